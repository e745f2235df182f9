"""The model: published sizes, attention masks, heads, initial values, FLOPs."""

import dataclasses
import functools
import math

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from bertjax.config.model_config import BertConfig, Compute, model_size
from bertjax.models.families import encoder_of
from bertjax.models.heads import BertForMaskedLM, BertForPreTraining, count_parameters, model_flops
from bertjax.nn.activations import ACTIVATIONS
from bertjax.nn.norm import LayerNorm, Normalize, RMSNorm
from bertjax.nn.ops.dropout import dropout, fold_in, row_keys
from tests.nn.reference import random_params

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
    """Runs `model.apply`, compiled: without compilation it takes seconds. All tests use the same program."""
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
def test_parameter_counts_equal_published_counts(size, count):
    config = dataclasses.replace(BertConfig(), **model_size(size))
    assert count_parameters(abstract_params(encoder_of, config), config) == count


def test_initial_values_are_googles():
    config = dataclasses.replace(TINY, num_hidden_layers=1, hidden_size=128, intermediate_size=512)
    ids = jnp.zeros((1, 8), jnp.int32)
    params = nn.meta.unbox(jax.jit(BertForPreTraining(config).init)(jax.random.key(0), ids, ids, ids, ids)["params"])
    for path, leaf in jax.tree_util.tree_leaves_with_path(params):
        name = path[-1].key
        if name in ("kernel", "embedding"):
            assert abs(leaf).max() <= 0.04  # cut off at two standard deviations of 0.02 ...
            if leaf.size > 10_000:
                assert abs(leaf.std() / (0.02 * 0.8796) - 1) < 0.05  # ... which leaves 88 % of the standard deviation
        else:
            assert (leaf == (1 if name == "scale" else 0)).all()


def test_padding_of_the_vocabulary_is_never_predicted(tiny):
    model, params = tiny
    words, _ = forward(model, params, *inputs(), np.arange(16)[None].repeat(3, 0))
    probabilities = np.asarray(jax.nn.softmax(words))
    assert probabilities.shape == (3, 16, 128)
    assert (probabilities[..., 100:] == 0).all() and np.allclose(probabilities.sum(-1), 1, atol=1e-5)


@pytest.mark.slow
def test_neither_recomputation_nor_unrolling_changes_a_gradient(tiny):
    _, params = tiny
    batch, keys = (*inputs(), np.array([[2], [3], [4]])), row_keys(jax.random.key(3), jnp.arange(3))

    def gradient_of(compute):
        """Returns the gradient with dropout, the text of the program, and the bytes of its memory."""

        def loss(params):
            words, pairs = BertForPreTraining(TINY, compute).apply({"params": params}, *batch, keys)
            return jax.nn.logsumexp(words[..., :100]).sum() + pairs.sum()

        lowered = jax.jit(jax.value_and_grad(loss)).lower(params)
        compiled = lowered.compile()
        return compiled(params), lowered.as_text(), compiled.memory_analysis().temp_size_in_bytes

    expected, text, memory = gradient_of(Compute())
    assert "dynamic_update_slice" in text
    for compute in (Compute(remat="dots"), Compute(remat="full"), Compute(unroll=True)):
        gradient, other_text, less_memory = gradient_of(compute)
        jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-5), expected, gradient)
        assert ("dynamic_update_slice" not in other_text) == compute.unroll
        assert compute.remat != "full" or less_memory < 0.8 * memory


def test_dropout_of_a_row_is_a_function_of_its_key(tiny):
    """The dropout mask depends neither on the neighbouring rows nor on the number of rows."""
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


def test_dropout_drops_the_configured_share_and_scales_the_remaining_elements():
    """Checks the rate for every row and every position. tests/nn/test_dropout.py tests that masks are independent."""
    shape, rate, rows = (64, 20, 60), 0.1, row_keys(jax.random.key(1), jnp.arange(64))
    x = np.full(shape, 3, np.float32)
    dropped = np.asarray(dropout(x, rate, fold_in(fold_in(rows, 1), 2)))
    assert set(np.unique(dropped)) == {np.float32(0), np.float32(3) / np.float32(0.9)}
    for axes in ((0, 1, 2), (1, 2), 0):
        shares = (dropped == 0).mean(axes)
        assert np.abs(shares - rate).max() < 5 * np.sqrt(rate * (1 - rate) * shares.size / x.size)
    assert (dropout(x, rate, None) == x).all() and (dropout(x, 0.0, rows) == x).all()


def test_flops_include_pooler_and_pair_head():
    """The first token of each row is multiplied by a square matrix, and has two logits."""
    pooled = model_flops(TINY, 4, 32, 5) - model_flops(TINY, 4, 32, 5, pooled=0)
    assert pooled == 4 * 2 * (32 * 32 + 32 * 2)


@pytest.mark.parametrize("norm, chip", [("LayerNorm", ""), ("LayerNorm", "cpu"), ("RMSNorm", "")])
def test_layer_norm_and_its_gradient_equal_flax(norm, chip):
    """Flax derives the gradient from two passes over x; bertjax computes it in closed form."""
    epsilon = 1e-5
    flax_norm = getattr(nn, norm)(epsilon=epsilon, use_fast_variance=False)
    make = functools.partial(Normalize, dict(LayerNorm=LayerNorm, RMSNorm=RMSNorm)[norm](epsilon), 32)
    rng = np.random.default_rng(5)
    x, grad = rng.normal(3, 2, (2, 4, 32)).astype(np.float32), rng.normal(size=(2, 4, 32)).astype(np.float32)
    x[0, 0] *= 1e-3  # in bfloat16, epsilon would hide its square
    names = ("scale", "bias") if norm == "LayerNorm" else ("scale",)
    params = {name: rng.normal(size=32).astype(np.float32) for name in names}

    @functools.partial(jax.jit, static_argnums=0)
    def result(module, x):
        out, back = jax.vjp(lambda params, x: module.apply({"params": params}, x), params, x)
        return out, back(grad.astype(x.dtype))

    expected = result(flax_norm, x)
    outputs = result(make(Compute(chip=chip)), x)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, atol=5e-6, rtol=1e-4), outputs, expected)
    out, (_, gradient) = result(make(Compute("bfloat16", "bfloat16", chip=chip)), jnp.bfloat16(x))
    assert out.dtype == gradient.dtype == jnp.bfloat16
    np.testing.assert_allclose(np.float32(out), expected[0], atol=0.05)


@pytest.mark.parametrize("dtype, absolute, relative", [(jnp.float32, 5e-7, 1e-6), (jnp.bfloat16, 1e-9, 0.2)])
def test_gelu_is_exact_in_the_tails(dtype, absolute, relative):
    x = np.linspace(-6, 6, 241).astype(dtype)
    expected = [v * 0.5 * math.erfc(-v / math.sqrt(2)) for v in x.astype(float)]
    np.testing.assert_allclose(np.float32(ACTIVATIONS["gelu"](x)), expected, atol=absolute, rtol=relative)
    if dtype == jnp.float32:
        expected = [0.5 * v * (1 + math.tanh(math.sqrt(2 / math.pi) * (v + 0.044715 * v**3))) for v in x.astype(float)]
        np.testing.assert_allclose(ACTIVATIONS["gelu_new"](x), expected, atol=1e-6)


def test_a_model_with_one_token_type_maps_both_segments_to_it(tiny):
    """transformers does the same; a look-up outside of the table would be NaN."""
    _, params = tiny
    model = encoder_of(dataclasses.replace(TINY, type_vocab_size=1))
    embeddings = params["bert"]["embeddings"]
    table = embeddings["token_type"]["embedding"][:1]
    bert = {**params["bert"], "embeddings": {**embeddings, "token_type": {"embedding": table}}}
    ids, segments, types = inputs()
    pairs, _ = forward(model, bert, ids, segments, types)
    single, _ = forward(model, bert, ids, segments, np.zeros_like(types))
    assert np.isfinite(pairs).all() and (pairs == single).all() and types.any()
