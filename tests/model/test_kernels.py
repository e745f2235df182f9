"""Attention beside its definition; the TPU kernels emulated on a CPU, and compiled ahead for every TPU with kernels."""

import functools

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import SingleDeviceSharding

from bertjax.config import BertConfig, Compute, named_stages, pretraining_config, stage
from bertjax.model import kernels
from bertjax.model.attention import SelfAttention, fuses
from bertjax.model.dropout import dropout, row_keys
from bertjax.model.fused_attention import fused_attention
from bertjax.model.fused_norm import fused_add_norm
from bertjax.model.plain_attention import plain_attention
from bertjax.model.tiles import Tile, tile_of
from bertjax.sharding.mesh import make_mesh, put_batch
from bertjax.sharding.topology import accelerator
from bertjax.tasks.pretraining import Pretraining
from bertjax.training.schedules import make_schedule
from bertjax.training.step import make_program, put_hyperparameters

RATE = 0.1


def arrays(seed: int, *shapes, dtype="float32"):
    keys = jax.random.split(jax.random.key(seed), len(shapes))
    return [jax.random.normal(key, shape).astype(dtype) for key, shape in zip(keys, shapes)]


def keys_of(rows: int, step: int = 0):
    return row_keys(jax.random.key(step), jnp.arange(rows))


def two_segments_and_padding(rows: int, length: int) -> jax.Array:
    """Rows of two segments and padding of different lengths; the last one is padding only."""
    ends = np.linspace(length // 4, length // 2, rows).astype(int)[:, None]
    places = np.arange(length)
    segments = np.where(places < ends, 1, np.where(places < 2 * ends, 2, 0))
    segments[-1] = 0
    return jnp.asarray(segments, jnp.int32)


def close(a, b, share: float) -> None:
    """Every difference is below this share of the largest number."""
    a, b = np.float32(a), np.float32(b)
    assert np.abs(a - b).max() <= share * np.abs(a).max(), (np.abs(a - b).max(), np.abs(a).max())


def plain(x, kernel, bias, segments, dropout_keys, rate, causal=False, tile=None, compute=None):
    compute = compute or Compute(str(x.dtype), str(x.dtype))
    projected = jnp.tensordot(x, kernel, 1) + bias
    return plain_attention(projected, segments, dropout_keys, rate, compute, causal, tile)


def in_tiles(rows, heads, **options):
    return functools.partial(plain, tile=Tile(rows, heads), **options)


fused = functools.partial(fused_attention, chip=kernels.EMULATED)


def causal(attend):
    return functools.partial(attend, causal=True)


def definition(x, kernel, bias, segments, dropout_keys, rate, causal=False):
    """Vaswani et al. 2017, section 3.2.1, in float32, differentiated by JAX."""
    query, key, value = jnp.moveaxis(jnp.tensordot(x, kernel, 1) + bias, 2, 0)
    scores = jnp.einsum("bqhd,bkhd->bhqk", query, key) / np.sqrt(query.shape[-1])
    allowed = segments[:, None, :, None] == segments[:, None, None, :]
    place = np.arange(x.shape[1])
    allowed &= (place[None, :] <= place[:, None]) | (not causal)
    probs = dropout(jax.nn.softmax(scores, where=allowed), rate, dropout_keys)
    context = jnp.einsum("bhqk,bkhd->bqhd", probs, value)
    return context.reshape(*context.shape[:2], -1)


def with_gradients(attend, rows, length, heads, size, rate, dtype):
    """The output and gradients of an attention, on random inputs."""
    hidden = 64
    x, kernel, bias, gradient = arrays(
        length, (rows, length, hidden), (hidden, 3, heads, size), (3, heads, size), (rows, length, heads * size)
    )
    inputs = [each.astype(dtype) for each in (x, kernel / 8, bias)]
    segments, dropout_keys = two_segments_and_padding(rows, length), keys_of(rows) if rate else None

    @jax.jit
    def run(inputs):
        out, pull_back = jax.vjp(lambda *inputs: attend(*inputs, segments, dropout_keys, rate), *inputs)
        return out, *pull_back(gradient.astype(dtype))

    return run(inputs)


@pytest.mark.slow
@pytest.mark.parametrize(
    "attend, rows, length, heads, size, rate, dtype, share",
    [
        (plain, 3, 128, 4, 64, RATE, "float32", 5e-6),
        (plain, 4, 37, 3, 24, RATE, "float32", 5e-6),
        (plain, 4, 37, 3, 24, 0.0, "float32", 5e-6),
        (plain, 2, 256, 2, 64, RATE, "bfloat16", 2e-2),  # two to three roundings of 2**-8
        (in_tiles(2, 3), 4, 37, 3, 24, RATE, "float32", 5e-6),
        (in_tiles(1, 2), 3, 128, 4, 64, RATE, "float32", 5e-6),
        (in_tiles(1, 1), 2, 128, 2, 64, 0.0, "bfloat16", 2e-2),
        (in_tiles(1, 1, causal=True), 4, 37, 3, 24, RATE, "float32", 5e-6),
        (fused, 3, 128, 4, 64, RATE, "float32", 5e-6),
        (fused, 2, 384, 2, 64, RATE, "float32", 5e-6),
        (functools.partial(fused, unroll=True), 2, 128, 2, 64, RATE, "float32", 5e-6),
        (fused, 2, 1024, 2, 64, RATE, "float32", 5e-6),
        (fused, 9, 128, 4, 32, 0.0, "float32", 5e-6),
        (fused, 2, 256, 2, 64, RATE, "bfloat16", 2e-2),
        (causal(plain), 4, 37, 3, 24, RATE, "float32", 5e-6),
        (causal(fused), 3, 128, 4, 64, RATE, "float32", 5e-6),
        (causal(fused), 2, 1024, 2, 64, RATE, "float32", 5e-6),  # in two chunks
    ],
)
def test_attention_and_its_gradients_are_those_of_the_definition(attend, rows, length, heads, size, rate, dtype, share):
    is_causal = isinstance(attend, functools.partial) and attend.keywords.get("causal", False)
    by_definition = functools.partial(definition, causal=is_causal)
    expected = with_gradients(by_definition, rows, length, heads, size, rate, "float32")
    found = with_gradients(attend, rows, length, heads, size, rate, dtype)
    for a, b in zip(expected, found, strict=True):
        assert b.dtype == dtype
        close(a, b, share)


@pytest.mark.slow
def test_fused_attention_drops_what_plain_attention_drops():
    """With equal scores and an identity for values, the context is the dropout mask of one block of keys."""
    rows, length, heads, size = 2, 256, 2, 64
    segments = jnp.ones((rows, length), jnp.int32)

    def mask(attend, step, first):
        places = jnp.tile(jnp.eye(length)[None], (rows, 1, 1))
        value = jnp.zeros((length, size)).at[first : first + size].set(jnp.eye(size))
        kernel = jnp.zeros((length, 3, heads, size)).at[:, 2].set(value[:, None])
        context = attend(places, kernel, jnp.zeros((3, heads, size)), segments, keys_of(rows, step), RATE)
        return np.asarray(context) > 0

    masks = np.stack([mask(fused, 5, first) for first in (0, 192)])
    np.testing.assert_array_equal(masks, np.stack([mask(plain, 5, first) for first in (0, 192)]))
    assert abs((masks.mean() - 0.9) / np.sqrt(0.09 / masks.size)) < 4
    assert 0.15 < (masks[0] != mask(fused, 6, 0)).mean() < 0.21  # another step: 2 * .9 * .1 differ


@pytest.mark.parametrize(
    "batch, length, heads, tile",
    [
        (32, 64, 12, None),  # short
        (2, 128, 2, None),  # few
        (32, 128, 12, (4, 12)),
        (34, 128, 12, (2, 12)),  # 4 rows would fit, but do not divide 34
        (7, 384, 12, (1, 4)),  # 5 heads would fit, but do not divide 12
        (2, 2048, 12, (1, 1)),  # not even one fits
    ],
)
def test_tiles_of_attention_fit_in_the_cache(batch, length, heads, tile):
    assert tile_of(batch, length, heads) == tile


@pytest.mark.slow
def test_on_a_cpu_long_attention_takes_the_memory_of_a_tile():
    batch, length, config = 16, 256, BertConfig(hidden_size=64, num_attention_heads=8)
    x, segments = jnp.zeros((batch, length, 64)), jnp.ones((batch, length), jnp.int32)

    def temporaries(chip):
        module = SelfAttention(config, Compute(chip=chip))
        params = module.init(jax.random.key(0), x, segments)
        gradient = jax.grad(lambda params, x: module.apply(params, x, segments, keys_of(batch))[0].sum(), (0, 1))
        return jax.jit(gradient).lower(params, x).compile().memory_analysis().temp_size_in_bytes

    scores = 4 * batch * 8 * length**2
    assert temporaries("cpu") < 0.8 * scores < 2 * scores < temporaries("")


@pytest.mark.slow
@pytest.mark.parametrize("length, rate, dtype, share", [(128, RATE, "float32", 5e-6), (1024, RATE, "bfloat16", 2e-2)])
def test_fused_norm_and_its_gradients_are_those_of_the_plain_path(length, rate, dtype, share):
    rows, hidden = 4, 256
    x, update, gradient = arrays(1, *[(rows, length, hidden)] * 3, dtype=dtype)
    update_bias, scale, bias = arrays(2, *[(hidden,)] * 3)
    dropout_keys = keys_of(rows)

    def add_norm(x, update, update_bias, scale, bias):
        total = (x + dropout(update + update_bias.astype(dtype), rate, dropout_keys)).astype(jnp.float32)
        centered = total - total.mean(-1, keepdims=True)
        normalized = centered * jax.lax.rsqrt(jnp.square(centered).mean(-1, keepdims=True) + 1e-12)
        return (normalized * scale + bias).astype(dtype)

    fused = functools.partial(
        fused_add_norm, dropout_keys=dropout_keys, rate=rate, epsilon=1e-12, chip=kernels.EMULATED
    )

    @functools.partial(jax.jit, static_argnums=0)
    def run(function):
        out, pull_back = jax.vjp(function, x + 3, update, update_bias, scale, bias)
        return out, *pull_back(gradient)

    found = run(fused)
    for a, b in zip(run(add_norm), found, strict=True):
        assert a.dtype == b.dtype
        close(a, b, share)
    dropped = found[2] == 0  # of the gradient of update
    np.testing.assert_array_equal(dropped, dropout(jnp.ones_like(x), rate, dropout_keys) == 0)


@pytest.mark.slow
def test_a_training_step_with_kernels_is_the_same_on_any_mesh(monkeypatch):
    """Loss and gradient norm, with dropout: of the plain path on one device, and of the kernels on eight."""

    def step(mesh_sizes, attention, microbatches):
        config = pretraining_config()
        config.model.update(vocab_size=384, num_hidden_layers=2, hidden_size=256, num_attention_heads=4)
        config.model.update(intermediate_size=512, max_position_embeddings=128, attention=attention)
        config.stages = named_stages(short=stage(4, 128, 4))
        config.batch_size, config.microbatches = 8, microbatches
        config.mesh.update(dict(zip(("data", "fsdp", "tensor"), mesh_sizes)))
        mesh = make_mesh(config, jax.devices()[: int(np.prod(mesh_sizes))])
        task = Pretraining(config, mesh, None)
        program = make_program(task, config, mesh)
        rng = np.random.default_rng(0)
        batch = {
            name: rng.integers(0, 2, each.shape).astype(each.dtype) for name, each in task.abstract_batch(0).items()
        }
        batch["input_ids"] = rng.integers(0, 384, (8, 128)).astype(np.int32)
        batch["segments"] = np.asarray(two_segments_and_padding(8, 128))
        hyperparameters = put_hyperparameters(0, make_schedule(config.optimizer, 4), mesh)
        state = program.init(jax.random.key(0))
        _, metrics = program.train_step(state, put_batch(batch, mesh), hyperparameters)
        return [float(metrics[name]) for name in ("loss", "grad_norm")]

    expected = step((1, 1, 1), "xla", 1)
    monkeypatch.setattr(kernels, "EMULATED", "cpu")
    np.testing.assert_allclose(step((2, 2, 2), "auto", 2), expected, rtol=2e-5)


def test_attention_is_fused_where_the_kernel_can_run():
    config = BertConfig()
    assert fuses(config, Compute(chip="TPU v5 lite"), 512)
    assert not fuses(config, Compute(chip="TPU v5 lite"), 64)
    assert not fuses(config, Compute(chip="TPU v5 lite"), 4096)
    assert not fuses(config, Compute(chip="TPU v3"), 512)
    assert not fuses(config, Compute(chip="NVIDIA H100 80GB HBM3"), 512)
    assert not fuses(BertConfig(attention="xla"), Compute(chip="TPU v4"), 512)
    assert fuses(BertConfig(attention="fused"), Compute(), 512)
    assert not fuses(BertConfig(hidden_size=640, num_attention_heads=8), Compute(chip="TPU v4"), 512)  # heads of 80
    mesh = jax.make_mesh((4,), ("tensor",), axis_types=(jax.sharding.AxisType.Auto,))
    with jax.set_mesh(mesh), nn.logical_axis_rules((("heads", "tensor"),)):
        assert not fuses(config, Compute(chip="TPU v4"), 512)  # three heads a device do not fill lanes


@pytest.mark.slow
@pytest.mark.tpu_aot
@pytest.mark.parametrize(
    "name, length, heads",
    [
        ("v4-8", 512, 16),
        ("v5litepod-4", 1024, 16),
        ("v5p-8", 512, 2),
        ("v6e-4", 512, 2),
        ("tpu7x-8", 512, 2),
    ],
)
def test_the_kernels_compile_for_every_tpu_that_has_them(name, length, heads):
    """With 16 heads as in BERT-large: what a kernel needs on the chip grows with them."""
    device = accelerator(name).devices()[0]
    assert kernels.has_kernels(device.device_kind)

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
