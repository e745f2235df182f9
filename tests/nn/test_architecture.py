"""The choices of the composable encoder compared with a plain implementation; the choice of attention kernels.

The plain implementation computes the states of one text at a time, so that it needs no masks of packed rows.
"""

import dataclasses
import functools
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from bertjax.config.model_config import BertConfig, Compute
from bertjax.models.transformer_family import TransformerFamily
from bertjax.nn import architecture as choose
from bertjax.nn import attention as attention_module
from bertjax.nn.attention_implementations import implementation_of
from bertjax.nn.encoder_model import TransformerModel
from bertjax.nn.kernels import pallas, triton
from bertjax.nn.norm import Normalize
from bertjax.nn.ops.plain_attention import KeyValueCache
from bertjax.nn.positions import alibi_slopes
from tests.markers import slow_case
from tests.nn.reference import packed, random_params

EPSILON, BASE, LAYERS, GROUPS = 1e-5, 100.0, 2, 2
FLOAT32 = Compute()
H100 = "NVIDIA H100 80GB HBM3"


@dataclasses.dataclass(frozen=True)
class Case:
    """The choices of a model, as plain values. The sizes are for models without kernels."""

    heads: int = 4
    size: int = 8
    alibi: bool = False
    rotary: bool = False
    query_key_norm: str = ""  # rms or layer
    soft_cap: float | None = None
    scale: float | None = None
    window: int | None = None
    causal: bool = False
    grouped: bool = False
    residual: str = "pre"
    norm: str = "rms"
    embedding_scale: float = 1.0

    @property
    def hidden(self) -> int:
        return self.heads * self.size


def model_of(case: Case, compute: Compute = FLOAT32) -> TransformerModel:
    norms = {"rms": choose.RMSNorm(EPSILON), "layer": choose.LayerNorm(EPSILON), "": None}
    residuals = {"pre": choose.PreNorm(), "post": choose.PostNorm(), "sandwich": choose.SandwichNorm()}
    attention = choose.Attention(
        case.heads, case.size, GROUPS if case.grouped else None, causal=case.causal, window=case.window,
        rotary=choose.Rotary(BASE) if case.rotary else None, query_key_norm=norms[case.query_key_norm],
        scale=case.scale, soft_cap=case.soft_cap,
    )  # fmt: skip
    layer = choose.Layer(attention, choose.FeedForward(2 * case.hidden, "gelu"), norms[case.norm])
    layer = dataclasses.replace(layer, residual=residuals[case.residual])
    architecture = choose.Architecture(
        choose.Embeddings(scale=case.embedding_scale),
        choose.Layers(LAYERS, (layer,), norm=norms[case.norm]),
        pooling=choose.Pooling(None),
        word_head=choose.WordHead(None),
        score_bias=choose.Alibi() if case.alibi else None,
    )
    config = BertConfig(50, case.hidden, LAYERS, case.heads, 2 * case.hidden)
    return TransformerModel(config, compute, architecture=architecture)


# The plain implementation.


def normalized(x, params, kind):
    x = x - x.mean(-1, keepdims=True) if kind == "layer" else x
    x = x / jnp.sqrt((x * x).mean(-1, keepdims=True) + EPSILON) * params["scale"]
    return x + params["bias"] if kind == "layer" else x


def turned(x):
    """Rotates pairs of the halves of a head, as complex numbers: `[length, heads, size]`."""
    length, _, size = x.shape
    angles = np.arange(length)[:, None] / BASE ** (np.arange(0, size, 2) / size)
    pairs = (x[..., : size // 2] + 1j * x[..., size // 2 :]) * np.exp(1j * angles)[:, None]
    return jnp.concatenate([pairs.real, pairs.imag], -1)


def slopes_of(heads):
    return {3: [2**-4, 2**-8, 2**-2], 4: [2**-2, 2**-4, 2**-6, 2**-8]}[heads]


def attend(params, x, case):
    """Returns the output of the attention, and the probabilities `[heads, queries, keys]`."""
    if case.grouped:
        query = jnp.einsum("lx,xhd->lhd", x, params["query"]["kernel"]) + params["query"]["bias"]
        both = jnp.einsum("lx,xphd->lphd", x, params["key_value"]["kernel"]) + params["key_value"]["bias"]
        numbers = [head * GROUPS // case.heads for head in range(case.heads)]
        key, value = both[:, 0, numbers], both[:, 1, numbers]
    else:
        fused = jnp.einsum("lx,xphd->plhd", x, params["query_key_value"]["kernel"])
        query, key, value = fused + params["query_key_value"]["bias"][:, None]
    if case.query_key_norm:
        query = normalized(query, params["query_norm"], case.query_key_norm)
        key = normalized(key, params["key_norm"], case.query_key_norm)
    if case.rotary:
        query, key = turned(query), turned(key)
    scores = jnp.einsum("qhd,khd->hqk", query, key) * (case.scale or 1 / math.sqrt(case.size))
    if case.soft_cap:
        scores = case.soft_cap * jnp.tanh(scores / case.soft_cap)
    places = np.arange(len(x))
    apart = places[:, None] - places
    if case.alibi:
        scores -= np.array(slopes_of(case.heads))[:, None, None] * np.abs(apart)
    is_visible = (apart >= 0 if case.causal else True) & (np.abs(apart) <= (case.window or len(x)))
    weights = jnp.exp(scores - scores.max(-1, keepdims=True)) * is_visible
    probabilities = weights / weights.sum(-1, keepdims=True)
    context = jnp.einsum("hqk,khd->qhd", probabilities, value)
    return jnp.einsum("qhd,hdx->qx", context, params["output"]["kernel"]) + params["output"]["bias"], probabilities


def feed(params, x):
    inner = x @ params["input"]["kernel"] + params["input"]["bias"]
    inner = inner * (1 + jax.lax.erf(inner / math.sqrt(2))) / 2
    return inner @ params["output"]["kernel"] + params["output"]["bias"]


def text_states(params, ids, case):
    """Returns the states of one text `[length, hidden]`, and the attention probabilities of all layers."""
    x, probabilities = params["embeddings"]["word"]["embedding"][ids] * case.embedding_scale, []
    for number in range(LAYERS):
        layer = jax.tree.map(lambda a, number=number: a[number], params["encoder"]["layers"])

        def norm(name, x, layer=layer):
            return normalized(x, layer[name], case.norm)

        if case.residual == "post":
            update, of_layer = attend(layer["attention"], x, case)
            x = norm("attention_norm", x + update)
            x = norm("output_norm", x + feed(layer, x))
        else:
            update, of_layer = attend(layer["attention"], norm("attention_norm", x), case)
            x = x + (norm("attention_output_norm", update) if case.residual == "sandwich" else update)
            update = feed(layer, norm("output_norm", x))
            x = x + (norm("feed_forward_output_norm", update) if case.residual == "sandwich" else update)
        probabilities.append(of_layer)
    return normalized(x, params["encoder"]["norm"], case.norm), jnp.stack(probabilities)


def inputs_of(rows, length):
    """Returns ids, segments and positions of packed rows; the last row has one text."""
    segments = np.asarray(packed(rows, length, last=1))
    ids, positions = np.random.default_rng(0).integers(0, 50, segments.shape), np.zeros_like(segments)
    for row, text in texts_in(segments):
        positions[row, text] = np.arange(len(text))
    return ids, segments, positions


def texts_in(segments):
    """Returns (row, places of the tokens) of each text."""
    numbers = [(row, number) for row, places in enumerate(segments) for number in {*places} - {0}]
    return [(row, np.flatnonzero(segments[row] == number)) for row, number in numbers]


def compare(case, compute, rows, length, atol):
    """Compares states and gradients of packed rows."""
    model, (ids, segments, positions) = model_of(case, compute), inputs_of(rows, length)
    params = random_params(model, ids, segments, ids, deviation=1.5 / math.sqrt(case.hidden))
    weights = np.random.default_rng(1).normal(size=(*ids.shape, case.hidden)).astype(np.float32)
    weights *= (segments > 0)[..., None]

    def loss(params):
        states = model.apply({"params": params}, ids, segments, 0 * ids, positions, method="encode")
        return (states * weights).sum(), states

    def definition(params):
        states = jnp.zeros(weights.shape)
        for row, text in texts_in(segments):
            states = states.at[row, text].set(text_states(params, ids[row, text], case)[0])
        return (states * weights).sum(), states

    (_, states), gradients = jax.jit(jax.value_and_grad(loss, has_aux=True))(params)
    (_, expected), expected_gradients = jax.jit(jax.value_and_grad(definition, has_aux=True))(params)
    real = (segments > 0)[..., None]
    np.testing.assert_allclose(states * real, expected, atol=atol)
    for path, gradient in jax.tree.leaves_with_path(expected_gradients):
        computed = functools.reduce(lambda tree, key: tree[key.key], path, gradients)
        bound = atol * max(1.0, np.abs(gradient).max())
        np.testing.assert_allclose(computed, gradient, atol=bound, err_msg=jax.tree_util.keystr(path))
    return model, params


EVERYTHING = dict(
    rotary=True, query_key_norm="rms", soft_cap=3.0, scale=0.7, window=9, grouped=True, residual="sandwich",
    embedding_scale=2.5, alibi=True,
)  # fmt: skip


@pytest.mark.parametrize("case", [
    Case(alibi=True, heads=3),
    slow_case(Case(alibi=True)),
    slow_case(Case(query_key_norm="rms")),
    slow_case(Case(query_key_norm="layer", rotary=True, grouped=True)),
    slow_case(Case(soft_cap=2.0)),
    slow_case(Case(scale=0.7)),
    Case(scale=0.7, query_key_norm="rms", rotary=True, window=3),  # in blocks of windows
    slow_case(Case(residual="sandwich")),
    slow_case(Case(residual="sandwich", norm="layer")),
    slow_case(Case(residual="post", norm="layer", embedding_scale=3.0)),
    slow_case(Case(embedding_scale=3.0)),
    Case(**EVERYTHING),
    slow_case(Case(**EVERYTHING, causal=True)),
])  # fmt: skip
def test_states_gradients_and_attention_equal_the_definition(case):
    model, params = compare(case, FLOAT32, 2, 24, atol=2e-5)
    ids = np.random.default_rng(2).integers(0, 50, (1, 13))
    computed = model.attention_probabilities(params, ids, np.ones_like(ids), 0 * ids)
    np.testing.assert_allclose(computed, text_states(params, ids[0], case)[1], atol=1e-5)


def test_a_cache_is_refused_for_features_that_it_lacks():
    ids, places = jnp.zeros((1, 3), jnp.int32), jnp.arange(3)
    for case in (Case(alibi=True), Case(soft_cap=2.0), Case(window=3)):
        cache = KeyValueCache(*[jnp.zeros((LAYERS, 1, 5, case.heads, case.size))] * 2)
        with pytest.raises(NotImplementedError, match="attention with a cache has no"):
            init = functools.partial(model_of(dataclasses.replace(case, causal=True)).init, method="decode")
            jax.eval_shape(init, jax.random.key(0), ids, places, cache)


def test_slopes_of_alibi_are_the_slopes_of_the_paper():
    np.testing.assert_allclose(alibi_slopes(8), [2.0**-i for i in range(1, 9)])
    expected = [*(2.0**-i for i in range(1, 9)), 2**-0.5, 2**-1.5, 2**-2.5, 2**-3.5]
    np.testing.assert_allclose(alibi_slopes(12), expected, rtol=1e-6)


# The choice of kernels, for sizes that the kernels support.

WIDE = dict(heads=4, size=64)
PLAIN, TPU, GPU = "PlainOperations", ("ShortTpuKernel", "FlashTpuKernel"), "GpuKernel"


@pytest.mark.parametrize("case, on_tpu, on_gpu", [
    (Case(**WIDE), TPU[0], GPU),
    (Case(**WIDE, residual="sandwich", embedding_scale=2.0), TPU[0], GPU),
    (Case(**WIDE, rotary=True, grouped=True), TPU[1], GPU),
    (Case(**WIDE, rotary=True, window=64), TPU[1], GPU),
    (Case(**WIDE, causal=True), TPU[0], GPU),
    (Case(**WIDE, alibi=True), PLAIN, PLAIN),
    (Case(**WIDE, alibi=True, rotary=True, window=16), PLAIN, PLAIN),  # blocks of windows lack the term
    (Case(**WIDE, soft_cap=30.0), PLAIN, PLAIN),
    (Case(**WIDE, soft_cap=30.0, rotary=True, window=16), PLAIN, PLAIN),
    (Case(**WIDE, causal=True, window=16), PLAIN, PLAIN),
    (Case(**WIDE, window=64), PLAIN, GPU),
    # The kernels for TPUs project in the kernel. The kernel for GPUs reads states.
    (Case(**WIDE, query_key_norm="rms"), PLAIN, GPU),
    (Case(**WIDE, query_key_norm="layer", rotary=True), PLAIN, GPU),
    (Case(**WIDE, scale=0.3), PLAIN, GPU),
    (Case(**WIDE, scale=0.3, rotary=True), PLAIN, GPU),
])  # fmt: skip
def test_a_kernel_that_lacks_a_feature_is_not_chosen(case, on_tpu, on_gpu, monkeypatch):
    chosen = []

    def record(call):
        chosen.append(type(implementation_of(call)).__name__)
        return implementation_of(call)

    monkeypatch.setattr(attention_module, "implementation_of", record)
    ids = jnp.zeros((2, 256), jnp.int32)
    for chip, expected in {
        pallas.EMULATED: on_tpu, "TPU v4": on_tpu, triton.EMULATED: on_gpu, H100: on_gpu, "": PLAIN, "cpu": PLAIN
    }.items():  # fmt: skip
        model, chosen[:] = model_of(case, Compute("bfloat16", "bfloat16", chip=chip)), []
        jax.eval_shape(functools.partial(model.init, method="encode"), jax.random.key(0), ids, ids, ids)
        assert {*chosen} == {expected}, chip


@pytest.mark.parametrize("case, chip", [
    (Case(heads=2, size=64, query_key_norm="rms", scale=0.2), triton.EMULATED),
    slow_case(Case(heads=2, size=64, query_key_norm="layer", rotary=True, window=20), triton.EMULATED),
    slow_case(Case(heads=2, size=64, residual="sandwich", norm="layer"), triton.EMULATED),
    slow_case(Case(heads=2, size=64, residual="sandwich", norm="layer"), pallas.EMULATED),
    slow_case(Case(heads=2, size=64, residual="sandwich", rotary=True, grouped=True), pallas.EMULATED),
])  # fmt: skip
def test_states_and_gradients_with_kernels_equal_the_definition(case, chip):
    compare(case, Compute(chip=chip), 2, 128, atol=5e-5)


# Rotary positions.


@pytest.mark.extra_packages
@pytest.mark.parametrize("scaling, fields", [
    (choose.LinearScaling(4.0), dict(rope_type="linear", factor=4.0)),
    *((choose.Llama3Scaling(8.0, low, high, 64), dict(
        rope_type="llama3", factor=8.0, low_freq_factor=low, high_freq_factor=high,
        original_max_position_embeddings=64)) for low, high in ((1.0, 4.0), (0.5, 2.0))),
    *((choose.YarnScaling(factor, 64, fast, slow), dict(
        rope_type="yarn", factor=factor, original_max_position_embeddings=64, beta_fast=fast, beta_slow=slow,
        )) for factor, fast, slow in ((4.0, 32.0, 1.0), (1.5, 8.0, 2.0), (0.5, 32.0, 1.0))),
    (choose.YarnScaling(4.0, 4), dict(rope_type="yarn", factor=4.0, original_max_position_embeddings=4)),
])  # fmt: skip
@pytest.mark.parametrize("base, size", [(10_000.0, 64), (250_000.0, 8)])
def test_scaled_frequencies_equal_transformers(scaling, fields, base, size):
    transformers = pytest.importorskip("transformers")
    rope_utils = pytest.importorskip("transformers.modeling_rope_utils")
    config = transformers.LlamaConfig(head_dim=size, max_position_embeddings=256, rope_parameters={
        **fields, "rope_theta": base})  # fmt: skip
    expected, factor = rope_utils.ROPE_INIT_FUNCTIONS[fields["rope_type"]](config, "cpu")
    np.testing.assert_allclose(choose.Rotary(base, scaling).frequencies(size), expected.numpy(), rtol=1e-6)
    assert math.isclose(scaling.factor_of_sines, factor, rel_tol=1e-6)


@pytest.mark.parametrize("chip", ["", pallas.EMULATED, triton.EMULATED])
def test_a_norm_without_bias_after_a_sum(chip):
    """The kernels need a bias, or compute without one."""
    rng = np.random.default_rng(0)
    x, update = (rng.normal(size=(2, 128, 128)).astype(np.float32) for _ in range(2))
    norm = Normalize(choose.LayerNorm(EPSILON, bias=False), 128, Compute(chip=chip))
    result = norm.apply({"params": {"scale": np.full(128, 2, np.float32)}}, x, update, None, None, 0.0, method="of_sum")
    total = x + update
    expected = 2 * (total - total.mean(-1, keepdims=True)) / np.sqrt(total.var(-1, keepdims=True) + EPSILON)
    np.testing.assert_allclose(result, expected, atol=1e-5)


def test_choices_that_exclude_each_other_raise_an_error():
    layer = model_of(Case()).architecture.layers.group[0]
    other = dataclasses.replace(layer, output_dropout=0.5)
    for count, group in ((4, (layer, other)), (5, (layer,))):
        with pytest.raises(ValueError, match="shared = 2 must divide count"):
            choose.Layers(count, group, shared=2)
    model = model_of(Case(causal=True))
    layers = choose.Layers(2, (model.architecture.layers.group[0], other))
    mixed = dataclasses.replace(model, architecture=dataclasses.replace(model.architecture, layers=layers))
    ids, shape = np.zeros((1, 2), np.int32), (2, 1, 4, 4, 8)
    params = random_params(mixed, ids, ids, ids, deviation=0.1)
    cache = KeyValueCache(jnp.zeros(shape), jnp.zeros(shape))
    with pytest.raises(NotImplementedError, match="have no cache"):
        mixed.apply({"params": params}, ids, np.arange(2), cache, method="decode")


def test_a_config_agrees_with_the_params_of_a_family_that_ignores_fields():
    """The model has no positions, no token types and no norm of the embeddings, in contrast to the config."""

    class Family(TransformerFamily):
        def architecture(self, config):
            return model.architecture

    model, ids = model_of(Case(rotary=True)), np.zeros((1, 8), np.int32)
    config = dataclasses.replace(model.config, vocab_size=128)
    model = TransformerModel(config, architecture=model.architecture)
    params = {"bert": random_params(model, ids, ids, ids, deviation=1)}
    inferred = Family().infer_config(params)
    assert inferred is not None
    assert all(getattr(config, name) in values for name, values in inferred.items()) and len(inferred) == 5
