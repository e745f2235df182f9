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
from tests.model.reference import random_params

TINY = BertConfig(
    vocab_size=100, hidden_size=32, num_hidden_layers=2, num_attention_heads=4, intermediate_size=64,
    max_position_embeddings=32,
)  # fmt: skip


def abstract_params(module, config):
    ids = jnp.zeros((1, 8), jnp.int32)
    extra = (ids,) if module in (BertForMaskedLM, BertForPreTraining) else ()
    return nn.meta.unbox(jax.eval_shape(module(config).init, jax.random.key(0), ids, ids, ids, *extra)["params"])


@pytest.fixture(scope="module")
def tiny():
    """A model whose weights are large enough for every path to matter."""
    model, ids = BertForPreTraining(TINY), np.zeros((1, 8), np.int32)
    return model, random_params(model, *[ids] * 4, deviation=0.2)


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


def test_initial_values_are_googles():
    config = dataclasses.replace(TINY, num_hidden_layers=1, hidden_size=128, intermediate_size=512)
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
    wider = (np.pad(x, ((0, 0), (0, 9)), constant_values=n) for x, n in ((ids, 77), (segments, 0), (types, 1)))
    for a, b in zip(expected, forward(model, params, *wider, positions)):
        np.testing.assert_allclose(a, b, atol=2e-5)


def test_packed_segments_do_not_see_each_other(tiny):
    """Two texts in one row, each with its own positions, give what each gives alone; a change in one stays there."""
    _, params = tiny
    ids, _, types = inputs(rows=2, length=8)
    encoder = BertModel(TINY)
    row = [np.concatenate(x)[None] for x in (ids, [[1] * 8, [2] * 8], types, [np.arange(8)] * 2)]
    packed, _ = forward(encoder, params["bert"], *row)
    alone, _ = forward(encoder, params["bert"], ids, np.ones_like(ids), types)
    np.testing.assert_allclose(packed[0], np.concatenate(alone), atol=2e-5)

    row[0][0, 11] = 5 if row[0][0, 11] != 5 else 6
    after, _ = forward(encoder, params["bert"], *row)
    assert (after[0, :8] == packed[0, :8]).all() and (after[0, 8:] != packed[0, 8:]).any()


def test_position_and_token_type_matter(tiny):
    _, params = tiny
    ids, segments, types = inputs()
    hidden, _ = forward(BertModel(TINY), params["bert"], ids, segments, types)
    other, _ = forward(BertModel(TINY), params["bert"], ids, segments, 1 - types)
    moved, _ = forward(BertModel(TINY), params["bert"], ids, segments, types, np.arange(3, 19)[None].repeat(3, 0))
    assert abs(hidden - other).max() > 1e-3 and abs(hidden - moved).max() > 1e-3


def test_masked_words_are_predicted_where_they_stand_and_padding_words_never(tiny):
    model, params = tiny
    batch = inputs()
    everywhere, _ = forward(model, params, *batch, np.arange(16)[None].repeat(3, 0))
    some, _ = forward(model, params, *batch, np.array([[3, 9, 3], [0, 15, 0], [7, 7, 7]]))
    np.testing.assert_allclose(some[1], everywhere[1, [0, 15, 0]], atol=1e-5)
    assert everywhere.shape == (3, 16, 128)
    probabilities = np.asarray(jax.nn.softmax(everywhere))
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


@pytest.fixture(scope="module")
def gradient_of(tiny):
    """Returns `gradient_of(compute)`: a compiled gradient with dropout, the program's text, and its bytes of memory."""
    _, params = tiny
    batch, keys = (*inputs(), np.array([[2], [3], [4]])), row_keys(jax.random.key(3), jnp.arange(3))

    @functools.cache
    def gradient(compute):
        def loss(params):
            words, pairs = BertForPreTraining(TINY, compute).apply({"params": params}, *batch, keys)
            return jax.nn.logsumexp(words[..., :100]).sum() + pairs.sum()

        lowered = jax.jit(jax.value_and_grad(loss)).lower(params)
        compiled = lowered.compile()
        return compiled(params), lowered.as_text(), compiled.memory_analysis().temp_size_in_bytes

    return gradient


@pytest.mark.slow
@pytest.mark.parametrize("compute", [Compute(remat="dots"), Compute(remat="full"), Compute(unroll=True)])
def test_neither_recomputation_nor_unrolling_changes_a_gradient(gradient_of, compute):
    (expected, text, memory), (gradient, other_text, less_memory) = gradient_of(Compute()), gradient_of(compute)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-5), expected, gradient)
    assert "dynamic_update_slice" in text and ("dynamic_update_slice" not in other_text) == compute.unroll
    assert compute.remat != "full" or less_memory < 0.8 * memory


def test_the_dropout_of_a_row_is_a_function_of_its_key(tiny):
    """And of nothing else: neither of the rows beside it, nor of their number."""
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


def test_dropout_drops_its_rate_of_the_elements_and_scales_the_rest():
    """Of each row, and of each position. tests/model/test_dropout.py tests that masks are independent."""
    shape, rate, rows = (64, 20, 60), 0.1, row_keys(jax.random.key(1), jnp.arange(64))
    x = np.full(shape, 3, np.float32)
    dropped = np.asarray(dropout(x, rate, fold_in(fold_in(rows, 1), 2)))
    assert set(np.unique(dropped)) == {np.float32(0), np.float32(3) / np.float32(0.9)}
    for axes in ((0, 1, 2), (1, 2), 0):
        shares = (dropped == 0).mean(axes)
        assert np.abs(shares - rate).max() < 5 * np.sqrt(rate * (1 - rate) * shares.size / x.size)
    assert (dropout(x, rate, None) == x).all() and (dropout(x, 0.0, rows) == x).all()


def test_bfloat16_is_close_to_float32(tiny):
    model, params = tiny
    ids, segments, types = inputs()
    exact = forward(model, params, ids, segments, types, ids % 16)[0][..., :100]
    half = BertForPreTraining(TINY, Compute("bfloat16", "bfloat16"))
    rough, _ = forward(half, params, ids, segments, types, ids % 16)
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


@pytest.mark.parametrize(
    "features, dtype, x_dtype",
    [((3, 2, 4), "float32", "float32"), ((2,), "bfloat16", "bfloat16"), ((2,), "float32", "bfloat16")],
)  # more features than inputs, fewer
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


@pytest.mark.parametrize("chip", ["", "cpu"])
def test_layer_norm_and_its_gradient_are_flaxs(chip):
    """Flax derives the gradient from two passes over x; ours is in closed form."""
    ours = LayerNorm(TINY, Compute(chip=chip))
    theirs = nn.LayerNorm(epsilon=TINY.layer_norm_eps, use_fast_variance=False)
    rng = np.random.default_rng(5)
    x, grad = rng.normal(3, 2, (2, 4, 32)).astype(np.float32), rng.normal(size=(2, 4, 32)).astype(np.float32)
    params = {name: rng.normal(size=32).astype(np.float32) for name in ("scale", "bias")}

    @functools.partial(jax.jit, static_argnums=0)
    def result(module, x):
        out, back = jax.vjp(lambda params, x: module.apply({"params": params}, x), params, x)
        return out, back(grad.astype(x.dtype))

    expected = result(theirs, x)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, atol=5e-6), result(ours, x), expected)
    half = LayerNorm(TINY, Compute("bfloat16", "bfloat16", chip=chip))
    out, (_, gradient) = result(half, jnp.bfloat16(x))
    assert out.dtype == gradient.dtype == jnp.bfloat16
    np.testing.assert_allclose(np.float32(out), expected[0], atol=0.05)


@pytest.mark.parametrize("dtype, absolute, relative", [(jnp.float32, 5e-7, 1e-6), (jnp.bfloat16, 1e-9, 0.2)])
def test_gelu_is_exact_in_the_tails(dtype, absolute, relative):
    x = np.linspace(-6, 6, 241).astype(dtype)
    expected = [v * 0.5 * math.erfc(-v / math.sqrt(2)) for v in x.astype(float)]
    np.testing.assert_allclose(np.float32(ACTIVATIONS["gelu"](x)), expected, atol=absolute, rtol=relative)


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
