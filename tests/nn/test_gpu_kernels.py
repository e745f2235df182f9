"""The GPU kernels, emulated on a CPU, compared with their definitions.

On a GPU, without the settings of the other tests, the same tests run the compiled kernels:
pytest --noconftest -n 0 -m '' tests/nn/test_gpu_kernels.py -k "definition or drops"
"""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from bertjax.config.defaults import named_stages, pretraining_config, stage
from bertjax.config.model_config import Compute
from bertjax.models.families import model_fields
from bertjax.nn.activations import ACTIVATIONS
from bertjax.nn.kernels import triton
from bertjax.nn.kernels.gpu_activation import can_activate_on_gpu, gpu_activate
from bertjax.nn.kernels.gpu_attention import AllTiles, Tiles, can_attend_on_gpu, gpu_attention
from bertjax.nn.kernels.gpu_norm import can_norm_on_gpu, gpu_add_norm, gpu_norm, gpu_sum_and_norm
from bertjax.nn.ops.dropout import dropout
from tests.markers import slow_case
from tests.nn.reference import arrays, assert_same, attend, keys_of, metrics_of_a_step, packed

EMULATED, H100 = triton.EMULATED, "NVIDIA H100 80GB HBM3"
CHIP = EMULATED if jax.default_backend() == "cpu" else jax.devices()[0].device_kind

DIFFERENT = AllTiles(Tiles(32, 64, 4, 1), Tiles(64, 16, 4, 1), Tiles(16, 32, 4, 1))


@pytest.mark.parametrize(
    "length, size, options, dtype, bound",
    [
        slow_case(7, 32, dict(rate=0.0), "float32", 1e-6),  # padded to 16
        slow_case(200, 64, dict(causal=True), "float32", 1e-6),  # padded to 256
        (200, 16, dict(causal=True, window=30), "float32", 1e-6),
        slow_case(300, 16, dict(rate=0.0, window=64), "float32", 1e-6),  # some blocks are outside of the window
        slow_case(128, 128, {}, "float32", 1e-6),
        slow_case(256, 16, dict(tiles=DIFFERENT), "float32", 1e-6),
        slow_case(90, 16, dict(tiles=AllTiles(*[Tiles(32, 64, 4, 1)] * 3)), "float32", 1e-6),  # padded to 128
        slow_case(128, 64, {}, "bfloat16", 4e-3),  # a rounding is 2e-3 of a norm
        slow_case(128, 64, {}, "float16", 6e-4),
    ],
)
def test_attention_and_gradient_equal_the_definition(length, size, options, dtype, bound):
    rows, heads, options = 2, 2, {"rate": 0.1, **options}
    inputs, gradients = arrays(dtype, (rows, length, 3, heads, size), (rows, length, heads * size))
    segments, keys = packed(rows, length), keys_of(rows, options["rate"])

    def definition(x):
        sees = {name: options[name] for name in ("rate", "causal", "window") if name in options}
        return attend(*jnp.moveaxis(x, 2, 0), segments, keys, **sees)

    def kernels(x):
        return gpu_attention(x, segments, keys, chip=CHIP, **options)

    assert_same(definition, kernels, [inputs], gradients, bound)


@pytest.mark.slow
def test_attention_drops_the_elements_of_the_dropout_mask():
    """With equal scores and an identity matrix as values, the output is the dropout mask of a part of the keys."""
    rows, length, heads, size, rate = 2, 200, 2, 64, 0.1
    keys, segments = keys_of(rows, rate), jnp.ones((rows, length), jnp.int32)
    expected = dropout(jnp.ones((rows, heads, length, length)), rate, keys) > 0
    run = jax.jit(lambda x: gpu_attention(x, segments, keys, rate, chip=CHIP))
    for first in (0, 128):
        x = np.zeros((rows, length, 3, heads, size), np.float32)
        x[:, first : first + size, 2] = np.eye(size)[:, None]
        context = np.asarray(run(x)).reshape(rows, length, heads, size)
        np.testing.assert_array_equal(context.swapaxes(1, 2) > 0, expected[..., first : first + size])


@pytest.mark.parametrize(
    "rows, length, hidden, rate, has_biases, dtype, bound",
    [
        (2, 64, 128, 0.1, True, "float32", 1e-6),
        slow_case(3, 20, 96, 0.3, False, "bfloat16", 4e-3),
        slow_case(2, 8, 768, 0.0, True, "bfloat16", 4e-3),
    ],
)
def test_norm_of_a_sum_and_gradient_equal_the_definition(rows, length, hidden, rate, has_biases, dtype, bound):
    keys, plane, vector = keys_of(rows, rate), (rows, length, hidden), (hidden,)
    x, update, of_norm, of_sum = arrays(dtype, *[plane] * 4)
    update_bias, scale, bias = arrays("float32", *[vector] * 3) if has_biases else (None, jnp.ones(hidden), None)

    def normalize(x, scale, bias):
        centered = x - x.mean(-1, keepdims=True)
        y = centered / jnp.sqrt(jnp.square(centered).mean(-1, keepdims=True) + 1e-5) * scale
        return y if bias is None else y + bias

    def definition(x, update, update_bias, scale, bias):
        total = x + dropout(update if update_bias is None else update + update_bias, rate, keys)
        return normalize(total, scale, bias), total

    def kernels(*inputs):
        total, normalized = gpu_sum_and_norm(*inputs, keys, rate, 1e-5, CHIP)
        return normalized, total

    inputs = [x, update, update_bias, scale, bias]
    assert_same(definition, kernels, inputs, (of_norm, of_sum), bound)
    only_norm = functools.partial(gpu_add_norm, dropout_keys=keys, rate=rate, epsilon=1e-5, chip=CHIP)
    assert_same(lambda *inputs: definition(*inputs)[0], only_norm, inputs, of_norm, bound)
    assert_same(normalize, lambda *inputs: gpu_norm(*inputs, 1e-5, CHIP), [x, scale, bias], of_norm, bound)


@pytest.mark.parametrize(
    "shape, activation, has_bias, dtype, bound",
    [
        slow_case((2, 64, 256), "gelu_new", True, "float32", 1e-6),
        ((3, 16, 2, 128), "gelu", False, "float32", 1e-6),
        slow_case((1, 48, 2, 128), "relu", True, "bfloat16", 4e-3),
    ],
)
def test_activation_and_gradient_equal_the_definition(shape, activation, has_bias, dtype, bound):
    product, gradient = arrays(dtype, shape, (*shape[:2], shape[-1]))
    (bias,) = arrays("float32", shape[2:]) if has_bias else (None,)

    def definition(product, bias):
        inner = product if bias is None else product + bias
        gated = len(shape) == 4
        return ACTIVATIONS[activation](inner[:, :, 0]) * inner[:, :, 1] if gated else ACTIVATIONS[activation](inner)

    def kernels(product, bias):
        return gpu_activate(product, bias, activation, CHIP)

    assert_same(definition, kernels, [3 * product, bias], gradient, bound)


KERNELS = [f"gpu_attention_{part}" for part in AllTiles._fields]
KERNELS += ["gpu_norm_forward", "gpu_norm_backward", "gpu_activation_backward"]


@pytest.mark.slow
@pytest.mark.parametrize("family, remat", [("bert", "none"), ("modernbert", "full")])
def test_a_step_with_kernels_is_equal_on_any_mesh(family, remat, monkeypatch):
    """Compares loss and gradient norm of a step with dropout: plain path on one device, kernels on eight devices."""
    size = dict(vocab_size=64, hidden_size=32, num_hidden_layers=1, num_attention_heads=2, intermediate_size=256)
    if family == "modernbert":
        size.update(num_hidden_layers=2, global_attn_every_n_layers=2, local_attention=8)

    def step(mesh_shape, microbatches):
        config = pretraining_config()
        config.stages, config.batch_size = named_stages(only=stage(4, 16, 3)), 8
        config.update(microbatches=microbatches, remat=remat, unroll="yes")
        config.mesh.update(dict(zip(("data", "fsdp", "tensor"), mesh_shape)))
        config.model = model_fields(family, **size)
        return metrics_of_a_step(config, packed(8, 16) > 0, KERNELS)

    expected, without = step((1, 1, 1), 1)
    monkeypatch.setattr(triton, "EMULATED", "cpu")
    scores, names = step((2, 2, 2), 2)
    assert not without and names == KERNELS
    np.testing.assert_allclose(scores, expected, rtol=2e-5)


@pytest.mark.parametrize("size, length, causal, window", [(16, 7, True, None), slow_case(128, 300, False, 64)])
def test_the_kernels_compile_to_ptx(size, length, causal, window):
    """The emulation accepts programs that the kernel compiler refuses."""
    half = jnp.bfloat16
    keys, vector = keys_of(2, 0.1), jnp.ones(3 * size)

    def loss(x, update, product):
        context = gpu_attention(x, packed(2, length), keys, 0.1, chip=H100, causal=causal, window=window)
        norm = gpu_add_norm(update, update, vector, vector, vector, keys, 0.1, 1e-5, H100)
        inner = gpu_activate(product, None, "gelu", H100)
        return sum(array.astype(jnp.float32).sum() for array in (context, norm, inner))

    shapes = (2, length, 3, 2, size), (2, 20, 3 * size), (2, 16, 2, 128)
    lowered = jax.jit(jax.grad(loss, (0, 1, 2))).trace(*arrays(half, *shapes)).lower(lowering_platforms=("cuda",))
    text = lowered.as_text()
    assert text.count("xla.gpu.triton") == len(KERNELS) and all(name in text for name in KERNELS)


def test_unsupported_shapes_use_the_plain_path():
    half = Compute("bfloat16", "bfloat16", chip=H100)
    assert can_attend_on_gpu(half, 512, 64) and can_norm_on_gpu(half, 512, 1000) and can_activate_on_gpu(half, 512, 384)
    for compute in (Compute(chip=H100), dataclasses.replace(half, chip="Tesla V100"), Compute(chip="cpu")):
        assert not can_attend_on_gpu(compute, 512, 64)
        assert not can_norm_on_gpu(compute, 512, 768)
        assert not can_activate_on_gpu(compute, 512, 3072)
    assert not can_attend_on_gpu(half, 512, 80) and not can_attend_on_gpu(half, 8193, 64)
    assert not can_norm_on_gpu(half, 77, 768) and not can_norm_on_gpu(half, 512, 4096)
    assert not can_activate_on_gpu(half, 512, 100)
