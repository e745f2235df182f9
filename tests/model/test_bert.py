"""The model: published sizes, what may see what, the heads, initial values, FLOPs."""

import dataclasses
import functools
import math

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from bertjax.config import BertConfig, Compute, model_size
from bertjax.families.bert.model import BertModel
from bertjax.families.with_heads import BertForMaskedLM, BertForPreTraining, count_parameters, forward_flops
from bertjax.model.attention import Dense, LayerNorm
from bertjax.model.dropout import dropout, fold_in, row_keys
from bertjax.model.encoder import ACTIVATIONS

TINY = BertConfig(
    vocab_size=100,
    hidden_size=32,
    num_hidden_layers=2,
    num_attention_heads=4,
    intermediate_size=64,
    max_position_embeddings=32,
)


def abstract_params(module, config):
    ids = jnp.zeros((1, 8), jnp.int32)
    extra = (ids,) if module in (BertForMaskedLM, BertForPreTraining) else ()
    return nn.meta.unbox(jax.eval_shape(module(config).init, jax.random.key(0), ids, ids, ids, *extra)["params"])


@pytest.fixture(scope="module")
def tiny():
    model = BertForPreTraining(TINY)
    ids = jnp.zeros((1, 8), jnp.int32)
    params = nn.meta.unbox(jax.jit(model.init)(jax.random.key(1), ids, ids, ids, ids)["params"])
    # Weights that are large enough for every path to matter.
    keys = iter(jax.random.split(jax.random.key(2), 99))
    return model, jax.tree.map(lambda x: x + 0.2 * jax.random.normal(next(keys), x.shape), params)


@functools.cache
def compiled(model):
    return jax.jit(lambda params, *inputs: model.apply({"params": params}, *inputs))


def forward(model, params, *inputs):
    """`model.apply`, compiled: operation by operation it takes seconds. The same program serves all tests."""
    return compiled(model)(params, *inputs)


def inputs(rows=3, length=16, seed=0):
    rng = np.random.default_rng(seed)
    ids = rng.integers(5, 100, (rows, length))
    return ids, np.ones_like(ids), (np.arange(length) >= 7).astype(int)[None].repeat(rows, 0)


# Hugging Face's bert-base-uncased and bert-large-uncased, and Turc et al. 2019, table 1 (4.4, 11.3, 29.1, 41.7 M).
@pytest.mark.parametrize(
    "size, count",
    [("base", 109_482_240), ("large", 335_141_888), ("tiny", 4_385_920), ("mini", 11_170_560), ("small", 28_763_648),
     ("medium", 41_373_184)],
)  # fmt: skip
def test_published_parameter_counts(size, count):
    config = dataclasses.replace(BertConfig(), **model_size(size))
    assert count_parameters(abstract_params(BertModel, config), config) == count


def test_params_are_plain_stacked_float32():
    params = abstract_params(BertForPreTraining, TINY)
    assert {leaf.dtype for leaf in jax.tree.leaves(params)} == {jnp.dtype("float32")}
    layers = params["bert"]["encoder"]["layers"]
    assert layers["attention"]["query_key_value"]["kernel"].shape == (2, 32, 3, 4, 8)
    assert {leaf.shape[0] for leaf in jax.tree.leaves(layers)} == {TINY.num_hidden_layers}
    assert params["bert"]["embeddings"]["word"]["embedding"].shape == (128, 32)  # 100 words and their padding


@pytest.mark.slow
def test_initial_values_are_googles():
    config = dataclasses.replace(TINY, hidden_size=128, intermediate_size=512)
    ids = jnp.zeros((1, 8), jnp.int32)
    params = nn.meta.unbox(jax.jit(BertForPreTraining(config).init)(jax.random.key(0), ids, ids, ids, ids)["params"])
    for path, leaf in jax.tree_util.tree_leaves_with_path(params):
        name = path[-1].key
        if name in ("kernel", "embedding"):
            assert abs(leaf).max() <= 0.04  # cut off at two standard deviations of 0.02 ...
            if leaf.size > 10_000:
                assert abs(leaf.std() / (0.02 * 0.8796) - 1) < 0.05  # ... which leaves 88 % of it
        else:
            assert (leaf == (1 if name == "scale" else 0)).all()


def test_padding_changes_nothing(tiny):
    model, params = tiny
    ids, segments, types = inputs()
    positions = np.array([[1, 5, 15]] * 3)
    expected = forward(model, params, ids, segments, types, positions)

    def pad(x, value=0):
        return np.pad(x, ((0, 0), (0, 9)), constant_values=value)

    padded = forward(model, params, pad(ids, 77), pad(segments), pad(types, 1), positions)
    for a, b in zip(expected, padded):
        np.testing.assert_allclose(a, b, atol=2e-5)


def test_packed_segments_do_not_see_each_other(tiny):
    """Two texts in one row, each with its own positions, give what each gives alone; a change in one stays there."""
    _, params = tiny
    ids, _, types = inputs(rows=2, length=12)
    encoder = BertModel(TINY)
    alone, _ = forward(encoder, params["bert"], ids, np.ones_like(ids), types)
    row = [np.concatenate(x)[None] for x in (ids, [[1] * 12, [2] * 12], types, [np.arange(12)] * 2)]
    packed, _ = forward(encoder, params["bert"], *row)
    np.testing.assert_allclose(packed[0], np.concatenate(alone), atol=2e-5)

    changed = row[0].copy()
    changed[0, 15] = 5 if changed[0, 15] != 5 else 6
    after, _ = forward(encoder, params["bert"], changed, *row[1:])
    assert (after[0, :12] == packed[0, :12]).all() and (after[0, 12:] != packed[0, 12:]).any()


def test_position_and_token_type_matter(tiny):
    _, params = tiny
    ids, segments, types = inputs()
    hidden, _ = forward(BertModel(TINY), params["bert"], ids, segments, types)
    other, _ = forward(BertModel(TINY), params["bert"], ids, segments, 1 - types)
    moved, _ = forward(BertModel(TINY), params["bert"], ids, segments, types, np.arange(3, 19)[None].repeat(3, 0))
    assert abs(hidden - other).max() > 1e-3 and abs(hidden - moved).max() > 1e-3


@pytest.mark.slow
def test_masked_words_are_predicted_where_they_stand_and_padding_words_never(tiny):
    model, params = tiny
    ids, segments, types = inputs()
    everywhere, _ = forward(model, params, ids, segments, types, np.arange(16)[None].repeat(3, 0))
    some, _ = forward(model, params, ids, segments, types, np.array([[3, 9], [0, 15], [7, 7]]))
    np.testing.assert_allclose(some[1], everywhere[1, [0, 15]], atol=1e-5)
    assert everywhere.shape == (3, 16, 128)
    probabilities = jax.nn.softmax(everywhere)
    assert (probabilities[..., 100:] == 0).all() and np.allclose(probabilities.sum(-1), 1, atol=1e-5)


def test_encoder_layer_against_numpy(tiny):
    """One layer written down from the paper in float64, with heads one by one."""
    _, params = tiny
    ids, segments, types = inputs(rows=1)
    p = jax.tree.map(lambda x: np.asarray(x, np.float64), params["bert"])
    one_layer = dataclasses.replace(TINY, num_hidden_layers=1)
    first = {**p, "encoder": {"layers": jax.tree.map(lambda x: x[:1], p["encoder"]["layers"])}}
    hidden, pooled = forward(BertModel(one_layer), first, ids, segments, types)

    def norm(x, q):
        x = x - x.mean(-1, keepdims=True)
        return x / np.sqrt((x**2).mean(-1, keepdims=True) + 1e-12) * q["scale"] + q["bias"]

    def gelu(x):
        return 0.5 * x * (1 + np.tanh(np.sqrt(2 / np.pi) * (x + 0.044715 * x**3)))

    e, layer = p["embeddings"], jax.tree.map(lambda x: x[0], p["encoder"]["layers"])
    x = norm(e["word"]["embedding"][ids[0]] + e["position"]["embedding"][:16] + e["token_type"]["embedding"][types[0]],
             e["norm"])  # fmt: skip
    attention, heads = layer["attention"], []
    for h in range(4):
        q, k, v = (
            x @ attention["query_key_value"]["kernel"][:, i, h] + attention["query_key_value"]["bias"][i, h]
            for i in range(3)
        )
        weights = np.exp(q @ k.T / np.sqrt(8))
        heads.append(weights / weights.sum(-1, keepdims=True) @ v @ attention["output"]["kernel"][h])
    x = norm(x + sum(heads) + attention["output"]["bias"], layer["attention_norm"])
    inner = gelu(x @ layer["intermediate"]["kernel"] + layer["intermediate"]["bias"])
    x = norm(x + inner @ layer["output"]["kernel"] + layer["output"]["bias"], layer["output_norm"])
    np.testing.assert_allclose(hidden[0], x, atol=3e-5)
    np.testing.assert_allclose(
        pooled[0], np.tanh(x[0] @ p["pooler"]["dense"]["kernel"] + p["pooler"]["dense"]["bias"]), atol=3e-5
    )


@pytest.mark.slow
def test_recomputation_changes_no_gradient(tiny):
    model, params = tiny
    ids, segments, types = inputs()

    def gradient(model):
        def loss(params):
            keys = jax.random.split(jax.random.key(3), len(ids))
            words, pairs = model.apply({"params": params}, ids, segments, types, ids % 16, keys)
            return jax.nn.logsumexp(words[..., :100]).sum() + pairs.sum()

        return jax.jit(jax.grad(loss))(params)

    plain = gradient(model)
    for remat in ("dots", "full"):
        recomputed = gradient(BertForPreTraining(TINY, Compute(remat=remat)))
        jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-5), plain, recomputed)


@pytest.mark.slow
def test_recomputation_saves_memory():
    config = dataclasses.replace(TINY, num_hidden_layers=4)
    ids = jax.ShapeDtypeStruct((8, 64), np.int32)
    keys = jax.eval_shape(lambda: jax.random.split(jax.random.key(0), 8))

    def temporaries(remat):
        model = BertModel(config, Compute(remat=remat))

        def loss(params, ids, keys):
            return model.apply({"params": params}, ids, ids, ids, dropout_keys=keys)[0].sum()

        params = jax.eval_shape(lambda: nn.unbox(model.init(jax.random.key(0), *[np.ones((1, 8), int)] * 3)["params"]))
        return jax.jit(jax.grad(loss)).lower(params, ids, keys).compile().memory_analysis().temp_size_in_bytes

    assert temporaries("full") < 0.7 * temporaries("none")


@pytest.mark.slow
def test_the_dropout_of_a_row_is_a_function_of_its_key(tiny):
    """And of nothing else: neither of the rows beside it, nor of how many there are."""
    model, params = tiny
    ids, segments, types = inputs()
    keys = jax.random.split(jax.random.key(0), len(ids))

    def apply(rows, keys):
        return forward(model, params, ids[rows], segments[rows], types[rows], ids[rows] % 16, keys)[0]

    rows = np.arange(len(ids))
    together = apply(rows, keys)
    np.testing.assert_allclose(apply(rows[::-1], keys[::-1])[::-1], together, atol=1e-4)
    np.testing.assert_allclose(apply(rows[:1], keys[:1]), together[:1], atol=1e-4)
    assert np.abs(apply(rows, keys[::-1]) - together).max() > 1e-2


@pytest.mark.slow
def test_dropout_drops_the_given_share_independently():
    """Of 64 rows, three layers and three places in each: no two masks, and no two neighbours, know of one another."""
    shape, rate = (64, 20, 60), 0.1
    rows = row_keys(jax.random.key(1), jnp.arange(64))
    masks = np.stack(
        [
            dropout(jnp.ones(shape), rate, fold_in(fold_in(rows, layer), site)) == 0
            for layer in (1, 2, 3) for site in (0, 1, 2)
        ]
    ).astype(float)  # fmt: skip

    def deviations(a, b):
        """How many standard errors the correlation of two sets of drawings is from 0."""
        return ((a - rate) * (b - rate)).mean() / (rate * (1 - rate)) * np.sqrt(a.size)

    assert abs((masks.mean() - rate) / np.sqrt(rate * (1 - rate) / masks.size)) < 4
    assert np.abs((masks.mean((2, 3)) - rate) / np.sqrt(rate * (1 - rate) / 1200)).max() < 5  # of each row
    assert np.abs((masks.mean((0, 1)) - rate) / np.sqrt(rate * (1 - rate) / 576)).max() < 5  # of each position
    flat = masks.reshape(9, 64, -1)
    for shift in (1, 2, 8, 16, 60, 64, 128, 256):
        assert abs(deviations(flat[..., shift:], flat[..., :-shift])) < 4.5, shift
    assert abs(deviations(masks[:, 1:], masks[:, :-1])) < 4.5  # neighbouring rows
    for a in range(9):
        for b in range(a):
            assert abs(deviations(masks[a], masks[b])) < 4.5, (a, b)  # layers and places
    x = jnp.full(shape, 3.0)
    assert set(np.unique(dropout(x, rate, rows))) == {np.float32(0), np.float32(3) / np.float32(0.9)}
    assert (dropout(x, rate, None) == x).all() and (dropout(x, 0.0, rows) == x).all()


def test_bfloat16_is_close_to_float32(tiny):
    model, params = tiny
    ids, segments, types = inputs()
    exact = forward(model, params, ids, segments, types, ids % 16)[0][..., :100]
    rough = forward(BertForPreTraining(TINY, Compute("bfloat16", "bfloat16")), params, ids, segments, types, ids % 16)[
        0
    ]
    assert rough.dtype == jnp.float32
    error = np.linalg.norm(rough[..., :100] - exact) / np.linalg.norm(exact)
    assert 0 < error < 3e-2


def test_flops_are_those_of_the_matrix_products():
    """Against XLA's count, with one layer (it counts the body of a scan once)."""
    config = dataclasses.replace(TINY, num_hidden_layers=1, hidden_size=128, intermediate_size=512)
    ids = jnp.zeros((4, 32), jnp.int32)
    positions = jnp.zeros((4, 5), jnp.int32)

    def counted(module):
        params = abstract_params(module, config)
        apply = jax.jit(lambda p: module(config).apply({"params": p}, ids, ids, ids, positions))
        return apply.lower(params).compile().cost_analysis()["flops"]

    whole, masked_lm = forward_flops(config, 4, 32, 5), forward_flops(config, 4, 32, 5, pooled=0)
    with_pooler, without = counted(BertForPreTraining), counted(BertForMaskedLM)
    assert 1 <= with_pooler / whole < 1.1  # the rest: norms, softmax, GELU
    assert 1 <= (with_pooler - without) / (whole - masked_lm) < 2  # of so little, the rest is more


def test_without_pairs_the_same_words_are_predicted_by_fewer_params(tiny):
    model, params = tiny
    batch = (*inputs(), np.array([[1, 5, 15]] * 3))
    fewer = {"bert": {n: x for n, x in params["bert"].items() if n != "pooler"}, "masked_lm": params["masked_lm"]}
    assert jax.tree.structure(abstract_params(BertForMaskedLM, TINY)) == jax.tree.structure(fewer)
    expected, _ = forward(model, params, *batch)
    np.testing.assert_array_equal(forward(BertForMaskedLM(TINY), fewer, *batch), expected)


@pytest.mark.slow
@pytest.mark.parametrize("features", [(3, 2, 4), (2,)])  # more than inputs, fewer
@pytest.mark.parametrize("dtype, x_dtype", [("float32", "float32"), ("bfloat16", "bfloat16"), ("float32", "bfloat16")])
def test_a_product_and_its_gradients_are_jaxs(features, dtype, x_dtype):
    dense = Dense(BertConfig(), Compute(dtype, dtype), (7,), features, (None,) * (1 + len(features)))
    x = jax.random.normal(jax.random.key(0), (2, 5, 7)).astype(x_dtype)
    params = nn.meta.unbox(dense.init(jax.random.key(1), x))
    ours, pull_back = jax.vjp(lambda params, x: dense.apply(params, x, method="product"), params, x)
    theirs, expected = jax.vjp(lambda w, x: jnp.tensordot(x, w.astype(dtype), 1), params["params"]["kernel"], x)
    np.testing.assert_array_equal(ours, theirs)
    grad = jax.random.normal(jax.random.key(2), ours.shape).astype(ours.dtype)
    of_params, of_x = pull_back(grad)
    for a, b in zip((of_params["params"]["kernel"], of_x), expected(grad), strict=True):
        assert a.dtype == b.dtype
        np.testing.assert_allclose(np.float32(a), np.float32(b), atol=2e-2 if a.dtype == "bfloat16" else 1e-5)


@pytest.mark.slow
@pytest.mark.parametrize("chip", ["", "cpu"])
def test_layer_norm_and_its_gradient_are_flaxs(chip):
    """Flax derives the gradient from two passes over x; ours is in closed form."""
    ours = LayerNorm(TINY, Compute(chip=chip))
    theirs = nn.LayerNorm(epsilon=TINY.layer_norm_eps, use_fast_variance=False)
    rng = np.random.default_rng(5)
    x, grad = rng.normal(3, 2, (2, 4, 32)).astype(np.float32), rng.normal(size=(2, 4, 32)).astype(np.float32)
    params = {name: rng.normal(size=32).astype(np.float32) for name in ("scale", "bias")}

    def result(module):
        out, back = jax.vjp(lambda params, x: module.apply({"params": params}, x), params, x)
        return out, back(grad)

    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, atol=5e-6), result(ours), result(theirs))
    half = LayerNorm(TINY, Compute("bfloat16", "bfloat16", chip=chip))
    out, back = jax.vjp(lambda x: half.apply({"params": params}, x), jnp.bfloat16(x))
    assert out.dtype == back(out)[0].dtype == jnp.bfloat16
    np.testing.assert_allclose(np.float32(out), result(ours)[0], atol=0.05)


@pytest.mark.slow
@pytest.mark.parametrize("dtype, absolute, relative", [(jnp.float32, 5e-7, 1e-6), (jnp.bfloat16, 1e-9, 0.2)])
def test_gelu_is_exact_in_the_tails(dtype, absolute, relative):
    x = jnp.linspace(-6, 6, 241).astype(dtype)
    expected = [float(v) * 0.5 * math.erfc(-float(v) / math.sqrt(2)) for v in x]
    np.testing.assert_allclose(np.float32(ACTIVATIONS["gelu"](x)), expected, atol=absolute, rtol=relative)


@pytest.mark.slow
def test_unrolled_layers_compute_the_same(tiny):
    _, params = tiny
    keys = row_keys(jax.random.key(3), jnp.arange(3))

    def lowered(unroll):
        model = BertForPreTraining(TINY, Compute(unroll=unroll))

        def loss(params):
            words, pairs = model.apply({"params": params}, *inputs(), np.array([[2], [3], [4]]), keys)
            return words[..., :50].std() + pairs.std()

        return jax.jit(jax.value_and_grad(loss)).lower(params)

    looped, unrolled = lowered(False), lowered(True)
    assert "dynamic_update_slice" in looped.as_text() and "dynamic_update_slice" not in unrolled.as_text()
    before, after = (program.compile()(params) for program in (looped, unrolled))
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, atol=1e-5), before, after)


def test_a_model_with_one_token_type_takes_pairs_as_of_it(tiny):
    """As transformers does; a look-up outside the table would be NaN."""
    _, params = tiny
    model = BertModel(dataclasses.replace(TINY, type_vocab_size=1))
    embeddings = params["bert"]["embeddings"]
    table = embeddings["token_type"]["embedding"][:1]
    bert = {**params["bert"], "embeddings": {**embeddings, "token_type": {"embedding": table}}}
    ids, segments, types = inputs()
    pairs, _ = forward(model, bert, ids, segments, types)
    single, _ = forward(model, bert, ids, segments, np.zeros_like(types))
    assert np.isfinite(pairs).all() and (pairs == single).all() and types.any()
