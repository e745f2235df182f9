"""The TPU kernels for long texts: emulated on a CPU, compared with the definition, and compiled for every such TPU."""

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import SingleDeviceSharding

from bertjax.distributed.topology import accelerator
from bertjax.nn.kernels import pallas
from bertjax.nn.kernels.flash_attention import can_flash, flash_attention
from bertjax.nn.ops.rotary import Rotation, rotate, rotation
from bertjax.nn.positions import Rotary
from tests.nn.reference import arrays, assert_same, attend, largest, packed


@pytest.mark.slow
@pytest.mark.parametrize(
    "rows, length, heads, size, window, dtype, share",
    [
        (4, 128, 4, 64, None, "float32", 5e-6),
        (3, 200, 4, 64, 64, "bfloat16", 2e-2),  # padded to 256, two rows at a time would not divide 3
        (1, 600, 4, 32, 100, "float32", 5e-6),  # padded to 1,024
        (2, 1536, 2, 64, None, "float32", 5e-6),  # three blocks, and segments that skip some blocks
        (1, 1536, 2, 64, 700, "float32", 5e-6),  # a window wider than one block
    ],
)
def test_kernels_and_gradients_equal_the_definition(rows, length, heads, size, window, dtype, share):
    shapes = ((rows, length, 64), (64, 3, heads, size), (3, heads, size), (rows, length, heads * size))
    x, kernel, bias, gradient = arrays(dtype, *shapes)
    segments = packed(rows, length, last=1)
    positions = jnp.broadcast_to(jnp.arange(length), segments.shape)
    turn = rotation(positions, Rotary(1_000.0).frequencies(size))

    def definition(x, kernel, bias=0):
        projected = jnp.tensordot(x, kernel, 1) + bias
        return attend(*jnp.moveaxis(rotate(projected, turn), 2, 0), segments, window=window)

    def flash(x, kernel, bias=None):
        return flash_attention(x, kernel, bias, turn, segments, chip=pallas.EMULATED, window=window)

    inputs = [x, kernel / 8, *([bias] if heads == 4 else [])]
    assert_same(definition, flash, inputs, gradient, share, largest)


def test_unsupported_shapes_use_the_plain_path():
    assert can_flash(128, 768, 64) and can_flash(8192, 768, 64) and can_flash(200, 256, 32)
    assert not can_flash(127, 768, 64) and not can_flash(8193, 768, 64)
    lanes_that_are_not_full = ((256, 8), (640, 80), (192, 64))
    assert not any(can_flash(512, width, size) for width, size in lanes_that_are_not_full)


@pytest.mark.slow
@pytest.mark.tpu_aot
@pytest.mark.parametrize("name", ["v4-8", "v6e-4"])
def test_the_kernels_compile_for_the_longest_texts(name):
    """Global and local attention. On-chip memory does not grow with the number of heads."""
    device = accelerator(name).devices()[0]
    length, heads = 8192, 2

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
