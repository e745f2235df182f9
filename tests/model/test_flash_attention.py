"""The TPU kernels for long texts: emulated on a CPU beside the definition, and compiled ahead for every such TPU."""

import dataclasses
import functools

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import SingleDeviceSharding

from bertjax.config import Compute
from bertjax.families.modernbert import ModernBertConfig
from bertjax.families.modernbert.model import ModernBertModel
from bertjax.model import kernels
from bertjax.model.flash_attention import can_flash, flash_attention
from bertjax.model.rotary import Rotation, rotate, rotation
from bertjax.sharding.rules import RULES
from bertjax.sharding.topology import accelerator


def packed(rows: int, length: int) -> jax.Array:
    """Rows of three segments of different lengths and padding; the last one is a single segment."""
    places, ends = np.arange(length), np.linspace(length // 4, length // 3, rows).astype(int)[:, None]
    segments = np.minimum(places // ends + 1, 4) % 4
    segments[-1] = 1
    return jnp.asarray(segments, jnp.int32)


def definition(x, kernel, bias, turn, segments, window):
    """Vaswani et al. 2017, section 3.2.1, of rotated queries and keys, in float32, differentiated by JAX."""
    projected = jnp.tensordot(x, kernel, 1) if bias is None else jnp.tensordot(x, kernel, 1) + bias
    query, key, value = jnp.moveaxis(rotate(projected, turn), 2, 0)
    scores = jnp.einsum("bqhd,bkhd->bhqk", query, key) / np.sqrt(query.shape[-1])
    allowed = segments[:, None, :, None] == segments[:, None, None, :]
    distance = jnp.abs(jnp.arange(segments.shape[1]) - jnp.arange(segments.shape[1])[:, None])
    probs = jax.nn.softmax(scores, where=allowed & (distance <= (segments.shape[1] if window is None else window)))
    return jnp.einsum("bhqk,bkhd->bqhd", probs, value).reshape(*segments.shape, -1)


@pytest.mark.slow
@pytest.mark.parametrize(
    "rows, length, heads, size, window, dtype, share",
    [
        (4, 128, 4, 64, None, "float32", 5e-6),
        (3, 200, 4, 64, 64, "float32", 5e-6),  # padded to 256, two rows at a time would not divide 3
        (2, 384, 2, 64, 64, "float32", 5e-6),  # three chunks, of which each sees all
        (1, 600, 4, 32, 100, "float32", 5e-6),  # padded to 1,024
        (2, 1536, 2, 64, None, "float32", 5e-6),  # three pieces, and segments that leave some out
        (2, 1536, 2, 64, 64, "float32", 5e-6),
        (1, 1536, 2, 64, 700, "float32", 5e-6),  # a window too wide for one piece
        (2, 1024, 2, 64, 64, "bfloat16", 2e-2),
        (2, 1024, 2, 64, None, "bfloat16", 2e-2),
    ],
)
def test_the_kernels_and_their_gradients_are_those_of_the_definition(rows, length, heads, size, window, dtype, share):
    hidden, keys = 64, jax.random.split(jax.random.key(length), 4)
    shapes = ((rows, length, hidden), (hidden, 3, heads, size), (3, heads, size), (rows, length, heads * size))
    x, kernel, bias, gradient = (jax.random.normal(key, shape).astype(dtype) for key, shape in zip(keys, shapes))
    inputs = x, kernel / 8, bias if heads == 4 else None
    segments = packed(rows, length)
    turn = rotation(jnp.broadcast_to(jnp.arange(length), segments.shape), size, 1_000.0)

    def run(attend, inputs, gradient):
        context, pull_back = jax.vjp(lambda *inputs: attend(*inputs, turn, segments, window=window), *inputs)
        return context, *pull_back(gradient)

    exact = jax.tree.map(lambda x: x.astype("float32"), (inputs, gradient))
    expected = jax.tree.leaves(jax.jit(functools.partial(run, definition))(*exact))
    flash = functools.partial(flash_attention, chip=kernels.EMULATED)
    found = jax.tree.leaves(jax.jit(functools.partial(run, flash))(inputs, gradient))
    for a, b in zip(expected, found, strict=True):
        assert b.dtype == dtype
        a, b = np.float32(a), np.float32(b)
        assert np.abs(a - b).max() <= share * np.abs(a).max()


@pytest.mark.slow
def test_modernbert_with_kernels_is_the_same_on_any_mesh():
    """States and gradients, of the plain path on one device, and of the kernels on eight."""
    config = ModernBertConfig(
        vocab_size=256, hidden_size=256, num_hidden_layers=4, num_attention_heads=4, intermediate_size=128
    )
    ids = jax.random.randint(jax.random.key(0), (4, 300), 0, 256)
    segments = packed(4, 300)
    plain = ModernBertModel(config)
    params = nn.meta.unbox(
        jax.jit(functools.partial(plain.init, method="encode"))(jax.random.key(1), ids, segments, ids)
    )

    def loss(params, model):
        states = model.apply(params, ids, segments, ids, method="encode")
        return jnp.square(states).sum() + states[:, :, ::7].sum(), states

    differentiate = jax.jit(jax.value_and_grad(loss, has_aux=True), static_argnums=1)
    (_, expected), of_params = differentiate(params, plain)
    mesh = jax.make_mesh((2, 2, 2), ("data", "fsdp", "tensor"), axis_types=(jax.sharding.AxisType.Auto,) * 3)
    with jax.set_mesh(mesh), nn.logical_axis_rules(RULES):
        (_, found), of_same = differentiate(params, dataclasses.replace(plain, compute=Compute(chip=kernels.EMULATED)))
    np.testing.assert_allclose(found, expected, atol=2e-5)
    for a, b in zip(jax.tree.leaves(of_params), jax.tree.leaves(of_same), strict=True):
        np.testing.assert_allclose(b, a, atol=2e-5 * max(1.0, np.abs(a).max()))


def test_what_the_kernels_cannot_do_has_the_plain_path():
    assert can_flash(128, 768, 64) and can_flash(8192, 768, 64) and can_flash(200, 256, 32)
    assert not can_flash(127, 768, 64) and not can_flash(8193, 768, 64)
    assert (
        not can_flash(512, 256, 8) and not can_flash(512, 640, 80) and not can_flash(512, 192, 64)
    )  # lanes that are not full


@pytest.mark.slow
@pytest.mark.tpu_aot
@pytest.mark.parametrize(
    "length, name, heads",
    [
        (1024, "v5litepod-4", 16),
        (8192, "v4-8", 2), (8192, "v5litepod-4", 2), (8192, "v5p-8", 2), (8192, "v6e-4", 2),  # the most on chip
    ],
)  # fmt: skip
def test_the_kernels_compile_for_every_tpu_that_has_them(length, name, heads):
    """Global and local attention; of 16 heads, as in ModernBERT-large, on two: they take four times as long."""
    device = accelerator(name).devices()[0]

    def array(*shape, dtype=jnp.bfloat16):
        return jax.ShapeDtypeStruct(shape, dtype, sharding=SingleDeviceSharding(device))

    def loss(x, kernel, angles, segments):
        turn = Rotation(angles, angles)
        x = flash_attention(x, kernel, None, turn, segments, device.device_kind)
        return flash_attention(x, kernel, None, turn, segments, device.device_kind, window=64).sum()

    angles = array(2, length, 32, dtype=jnp.float32)
    arrays = array(2, length, heads * 64), array(heads * 64, 3, heads, 64), angles, array(2, length, dtype=jnp.int32)
    compiled = jax.jit(jax.grad(loss, argnums=(0, 1))).lower(*arrays).compile().as_text()
    assert compiled.count('custom_call_target="tpu_custom_call"') == 4
