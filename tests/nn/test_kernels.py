"""Attention compared with its definition; the TPU kernels emulated on a CPU, and compiled for all supported TPUs."""

import functools

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import SingleDeviceSharding

from bertjax.config.defaults import named_stages, pretraining_config, stage
from bertjax.config.model_config import BertConfig, Compute
from bertjax.distributed.topology import accelerator
from bertjax.nn.attention import Attention, SharedInputs
from bertjax.nn.attention_implementations import AttentionCall, ShortTpuKernel, implementation_of
from bertjax.nn.kernels import pallas
from bertjax.nn.kernels.fused_attention import fused_attention
from bertjax.nn.kernels.fused_norm import fused_add_norm
from bertjax.nn.ops.dropout import dropout
from bertjax.nn.ops.plain_attention import plain_attention
from bertjax.nn.ops.tiles import Tile, tile_of
from tests.markers import slow_case
from tests.nn.reference import arrays, assert_same, attend, keys_of, largest, metrics_of_a_step, packed

RATE = 0.1


def plain(x, kernel, bias, segments, dropout_keys, rate, causal=False, tile=None, compute=None, biased=False):
    compute = compute or Compute(str(x.dtype), str(x.dtype))
    projected = jnp.tensordot(x, kernel, 1) + bias
    score_bias = score_bias_of(bias, x.shape[1]) if biased else None
    return plain_attention(projected, segments, dropout_keys, rate, compute, causal, tile, bias=score_bias)


def score_bias_of(bias, length):
    """Returns a differentiable term of scores `[heads, queries, keys]`, from a bias of projections."""
    of_query, of_key, _ = jnp.take(bias.astype(jnp.float32), jnp.arange(length) % bias.shape[-1], axis=-1)
    return of_query[:, :, None] * of_key[:, None] + of_key[:, None]


def in_tiles(rows, heads, **options):
    return functools.partial(plain, tile=Tile(rows, heads), **options)


fused = functools.partial(fused_attention, chip=pallas.EMULATED)


def causal(attention):
    return functools.partial(attention, causal=True)


@pytest.mark.parametrize(
    "attention, sizes, rate, dtype, share",
    [
        (plain, (4, 37, 3, 24), RATE, "float32", 5e-6),
        slow_case(plain, (4, 37, 3, 24), 0.0, "bfloat16", 2e-2),  # two to three roundings of 2**-8
        slow_case(causal(plain), (4, 37, 3, 24), RATE, "float32", 5e-6),
        (in_tiles(2, 3), (4, 37, 3, 24), RATE, "float32", 5e-6),
        slow_case(in_tiles(1, 1), (4, 37, 3, 24), 0.0, "bfloat16", 2e-2),
        slow_case(in_tiles(1, 1, causal=True), (4, 37, 3, 24), RATE, "float32", 5e-6),
        (in_tiles(2, 1, biased=True), (4, 37, 3, 24), RATE, "float32", 5e-6),
        slow_case(functools.partial(plain, biased=True), (4, 37, 3, 24), 0.0, "bfloat16", 2e-2),
        (fused, (3, 128, 4, 64), RATE, "float32", 5e-6),
        slow_case(fused, (9, 128, 4, 32), 0.0, "float32", 5e-6),
        slow_case(functools.partial(fused, unroll=True), (2, 128, 2, 64), RATE, "bfloat16", 2e-2),
        slow_case(causal(fused), (2, 1024, 2, 64), RATE, "float32", 5e-6),  # in two chunks
    ],
)
def test_attention_and_gradients_equal_the_definition(attention, sizes, rate, dtype, share):
    rows, length, heads, size = sizes
    shapes = ((rows, length, 64), (64, 3, heads, size), (3, heads, size), (rows, length, heads * size))
    x, kernel, bias, gradient = arrays(dtype, *shapes)
    segments, keys = packed(rows, length), keys_of(rows, rate)
    options = attention.keywords if isinstance(attention, functools.partial) else {}

    def definition(x, kernel, bias):
        projected = jnp.moveaxis(jnp.tensordot(x, kernel, 1) + bias, 2, 0)
        score_bias = score_bias_of(bias, length) if options.get("biased") else 0.0
        return attend(*projected, segments, keys, rate, options.get("causal", False), score_bias=score_bias)

    def ours(x, kernel, bias):
        return attention(x, kernel, bias, segments, keys, rate)

    assert_same(definition, ours, [x, kernel / 8, bias], gradient, share, largest)


def test_fused_and_plain_attention_have_equal_dropout():
    """With equal scores and an identity matrix as values, the output is the dropout mask of one block of keys."""
    rows, length, heads, size = 2, 256, 2, 64
    segments = jnp.ones((rows, length), jnp.int32)

    @functools.partial(jax.jit, static_argnums=0)
    def attend_with(attention, kernel, keys):
        places = jnp.tile(jnp.eye(length)[None], (rows, 1, 1))
        return attention(places, kernel, jnp.zeros((3, heads, size)), segments, keys, RATE) > 0

    def mask(attention, step, first):
        kernel = np.zeros((length, 3, heads, size), np.float32)
        kernel[first : first + size, 2] = np.eye(size)[:, None]
        return np.asarray(attend_with(attention, kernel, keys_of(rows, step=step)))

    masks = np.stack([mask(fused, 5, first) for first in (0, 192)])
    np.testing.assert_array_equal(masks, np.stack([mask(plain, 5, first) for first in (0, 192)]))
    assert abs((masks.mean() - 0.9) / np.sqrt(0.09 / masks.size)) < 4
    assert 0.15 < (masks[0] != mask(fused, 6, 0)).mean() < 0.21  # another step: 2 * .9 * .1 differ


@pytest.mark.parametrize(
    "batch, length, heads, tile",
    [
        (32, 64, 12, None),  # short rows
        (2, 128, 2, None),  # few rows
        (32, 128, 12, (4, 12)),
        (34, 128, 12, (2, 12)),  # 4 rows would fit, but do not divide 34
        (7, 384, 12, (1, 4)),  # 5 heads would fit, but do not divide 12
        (2, 2048, 12, (1, 1)),  # not a single row fits
    ],
)
def test_tiles_of_attention_fit_in_the_cache(batch, length, heads, tile):
    assert tile_of(batch, length, heads) == tile


def test_long_attention_on_a_cpu_takes_the_memory_of_one_tile():
    batch, length, config = 16, 256, BertConfig(hidden_size=64, num_attention_heads=8)
    x, segments = np.zeros((batch, length, 64), np.float32), np.ones((batch, length), np.int32)
    keys = keys_of(batch)

    def temporaries(chip):
        module = Attention(8, 8, dropout=RATE).module(config, Compute(chip=chip))
        inputs = SharedInputs(segments)
        params = jax.eval_shape(module.init, jax.random.key(0), x, inputs)
        gradient = jax.grad(lambda params, x: module.apply(params, x, inputs, keys)[0].sum(), (0, 1))
        return jax.jit(gradient).lower(params, x).compile().memory_analysis().temp_size_in_bytes

    scores = 4 * batch * 8 * length**2
    assert temporaries("cpu") < 0.8 * scores < 2 * scores < temporaries("")


@pytest.mark.parametrize("length, dtype, share", [(128, "float32", 5e-6), slow_case(1024, "bfloat16", 2e-2)])
def test_fused_norm_and_gradients_equal_the_definition(length, dtype, share):
    rows, hidden = 4, 256
    x, update, gradient = arrays(dtype, *[(rows, length, hidden)] * 3)
    vectors, keys = arrays("float32", *[(hidden,)] * 3), keys_of(rows)

    def definition(x, update, update_bias, scale, bias):
        total = x + dropout(update + update_bias, RATE, keys)
        centered = total - total.mean(-1, keepdims=True)
        return centered * jax.lax.rsqrt(jnp.square(centered).mean(-1, keepdims=True) + 1e-12) * scale + bias

    fused = functools.partial(fused_add_norm, dropout_keys=keys, rate=RATE, epsilon=1e-12, chip=pallas.EMULATED)
    _, (_, of_update, *_) = assert_same(definition, fused, [x + 3, update, *vectors], gradient, share, largest)
    np.testing.assert_array_equal(of_update == 0, dropout(jnp.ones_like(x), RATE, keys) == 0)


@pytest.mark.slow
def test_a_training_step_with_kernels_is_equal_on_any_mesh(monkeypatch):
    """Compares loss and gradient norm with dropout: plain path on one device, kernels on eight devices."""

    def step(mesh_sizes, attention, microbatches):
        config = pretraining_config()
        config.model.update(vocab_size=64, num_hidden_layers=1, hidden_size=256, num_attention_heads=4)
        config.model.update(intermediate_size=32, max_position_embeddings=128, attention=attention)
        config.stages, config.unroll = named_stages(short=stage(4, 128, 4)), "no"
        config.batch_size, config.microbatches = 8, microbatches
        config.mesh.update(dict(zip(("data", "fsdp", "tensor"), mesh_sizes)))
        return metrics_of_a_step(config, packed(8, 128))[0]

    expected = step((1, 1, 1), "xla", 1)
    monkeypatch.setattr(pallas, "EMULATED", "cpu")
    np.testing.assert_allclose(step((2, 2, 2), "auto", 2), expected, rtol=2e-5)


def test_attention_is_fused_where_the_kernel_can_run():
    def fuses(chip, length=512, heads=12, size=64, preference="auto", **features):
        fields = dict.fromkeys(AttentionCall._fields) | features
        call = AttentionCall(**fields)._replace(
            compute=Compute(chip=chip, dtype="bfloat16"), preference=preference, heads=heads, size=size, rate=0.1,
            x=jax.ShapeDtypeStruct((8, length, heads * size), "bfloat16"), projects_in_kernel=True, causal=False,
        )  # fmt: skip
        return isinstance(implementation_of(call), ShortTpuKernel)

    assert [fuses("TPU v5 lite", length) for length in (512, 64, 4096)] == [True, False, False]
    assert not any(fuses(chip) for chip in ("TPU v3", "NVIDIA H100 80GB HBM3"))
    assert not fuses("TPU v4", preference="xla")
    assert fuses("", preference="fused")
    assert not fuses("TPU v4", heads=8, size=80)
    for feature in (dict(window=64), dict(bias=0.0), dict(soft_cap=30.0), dict(rotation=())):
        assert not fuses("TPU v4", **feature)
    mesh = jax.make_mesh((4,), ("tensor",), axis_types=(jax.sharding.AxisType.Auto,))
    with jax.set_mesh(mesh), nn.logical_axis_rules((("heads", "tensor"),)):
        assert not fuses("TPU v4")  # three heads per device do not fill lanes


@pytest.mark.slow
@pytest.mark.tpu_aot
@pytest.mark.parametrize(
    "name, length, heads",
    [
        ("v4-8", 512, 16),
        ("v5litepod-4", 1024, 16),
        ("v6e-4", 512, 2),
        ("tpu7x-8", 512, 2),
    ],
)
def test_the_kernels_compile_for_every_supported_tpu(name, length, heads):
    """With 16 heads as in BERT-large: on-chip memory grows with the number of heads."""
    device = accelerator(name).devices()[0]
    assert pallas.has_kernels(device.device_kind)

    def array(*shape, dtype=jnp.bfloat16):
        return jax.ShapeDtypeStruct(shape, dtype, sharding=SingleDeviceSharding(device))

    def loss(x, kernel, bias, scale, segments, words):
        keys = jax.random.wrap_key_data(words, impl="threefry2x32")
        context = fused_attention(x, kernel, bias, segments, keys, RATE, device.device_kind)
        return fused_add_norm(x, context, scale, scale, scale, keys, RATE, 1e-12, device.device_kind).sum()

    rows, size = 2, 64
    shapes = (
        array(rows, length, heads * size), array(heads * size, 3, heads, size), array(3, heads, size),
        array(heads * size, dtype=jnp.float32), array(rows, length, dtype=jnp.int32), array(rows, 2, dtype=jnp.uint32),
    )  # fmt: skip
    compiled = jax.jit(jax.grad(loss, argnums=(0, 1, 2, 3))).lower(*shapes).compile().as_text()
    assert compiled.count('custom_call_target="tpu_custom_call"') == 4
