"""The GPU kernels, emulated on a CPU, beside their definitions.

On a GPU, without the settings of the other tests, the same tests run on its kernels:
  pytest --noconftest -n 0 tests/model/test_gpu_kernels.py -k "definition or drops"
"""

import dataclasses
import functools
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from bertjax.config import Compute, named_stages, pretraining_config, stage
from bertjax.families import model_fields
from bertjax.model import gpu_kernels
from bertjax.model.dropout import dropout, row_keys
from bertjax.model.encoder import ACTIVATIONS
from bertjax.model.gpu_activation import can_activate_on_gpu, gpu_activate
from bertjax.model.gpu_attention import AllTiles, Tiles, can_attend_on_gpu, gpu_attention
from bertjax.model.gpu_norm import can_norm_on_gpu, gpu_add_norm, gpu_norm, gpu_sum_and_norm
from bertjax.model.plain_attention import visible
from bertjax.sharding.mesh import make_mesh, put_batch
from bertjax.tasks.pretraining import Pretraining
from bertjax.training.schedules import make_schedule
from bertjax.training.step import make_program, put_hyperparameters

EMULATED, H100 = gpu_kernels.EMULATED, "NVIDIA H100 80GB HBM3"
CHIP = EMULATED if jax.default_backend() == "cpu" else jax.devices()[0].device_kind


DIFFERENT = AllTiles(Tiles(32, 64, 4, 1), Tiles(64, 16, 4, 1), Tiles(16, 32, 4, 1))


def keys_of(rows: int, rate: float):
    return row_keys(jax.random.key(7), jnp.arange(rows)) if rate else None


def packed(rows: int, length: int) -> jax.Array:
    """Rows of three segments of different lengths and padding; the last one is padding only."""
    places, ends = np.arange(length), np.linspace(length // 4, length // 3, rows).astype(int)[:, None]
    segments = np.minimum(places // ends + 1, 4) % 4
    segments[-1] = 0
    return jnp.asarray(segments, jnp.int32)


def arrays(dtype, *shapes):
    keys = jax.random.split(jax.random.key(sum(map(math.prod, shapes))), len(shapes))
    return [jax.random.normal(key, shape).astype(dtype) for key, shape in zip(keys, shapes)]


def assert_same(definition, kernels, inputs, gradients, bound: float) -> None:
    """Compares what two functions return, and the gradients of their inputs, which the definition gets in float32.

    `bound`: the largest norm of a difference, as a share of the norm.
    """

    @functools.partial(jax.jit, static_argnums=0)
    def run(function, inputs, gradients):
        out, pull_back = jax.vjp(function, *inputs)
        return out, pull_back(gradients)

    exact = jax.tree.map(lambda x: x.astype("float32"), (inputs, gradients))
    expected, found = run(definition, *exact), run(kernels, inputs, gradients)
    assert jax.tree.map(jnp.shape, expected) == jax.tree.map(jnp.shape, found)
    assert jax.tree.map(lambda x: x.dtype, found[1]) == jax.tree.map(lambda x: x.dtype, tuple(inputs))
    for a, b in zip(jax.tree.leaves(expected), jax.tree.leaves(found), strict=True):
        a, b = np.float32(a).ravel(), np.float32(b).ravel()
        assert np.linalg.norm(a - b) <= bound * np.linalg.norm(a)


@pytest.mark.slow
@pytest.mark.parametrize(
    "rows, length, heads, size, rate, causal, window, tiles, dtype, bound",
    [
        (2, 128, 2, 64, 0.1, False, None, None, "float32", 1e-6),
        (2, 200, 2, 64, 0.1, False, None, None, "float32", 1e-6),  # padded to 256
        (3, 40, 2, 16, 0.1, True, None, None, "float32", 1e-6),  # padded to 64
        (3, 7, 2, 32, 0.0, False, None, None, "float32", 1e-6),  # padded to 16
        (2, 300, 1, 32, 0.1, True, None, None, "float32", 1e-6),
        (2, 700, 1, 64, 0.0, False, 64, None, "float32", 1e-6),  # pieces outside of the window
        (2, 300, 1, 16, 0.1, True, 30, None, "float32", 1e-6),
        (2, 256, 1, 128, 0.1, False, None, None, "float32", 1e-6),
        (
            2,
            256,
            2,
            16,
            0.1,
            False,
            None,
            DIFFERENT,
            "float32",
            1e-6,
        ),
        (2, 90, 2, 16, 0.1, False, None, AllTiles(*[Tiles(32, 64, 4, 1)] * 3), "float32", 1e-6),  # padded to 128
        (2, 256, 2, 64, 0.1, False, None, None, "bfloat16", 4e-3),  # a rounding is 2e-3 of a norm
        (2, 256, 2, 64, 0.1, False, None, None, "float16", 6e-4),
    ],
)
def test_attention_and_its_gradient_are_those_of_the_definition(
    rows, length, heads, size, rate, causal, window, tiles, dtype, bound
):
    inputs, gradients = arrays(dtype, (rows, length, 3, heads, size), (rows, length, heads * size))
    segments, keys = packed(rows, length), keys_of(rows, rate)

    def definition(x):
        query, key, value = jnp.moveaxis(x, 2, 0)
        scores = jnp.einsum("bqhd,bkhd->bhqk", query, key, precision="highest") / math.sqrt(size)
        probs = dropout(jax.nn.softmax(scores, where=visible(segments, causal, window)), rate, keys)
        return jnp.einsum("bhqk,bkhd->bqhd", probs, value, precision="highest").reshape(rows, length, -1)

    def kernels(x):
        return gpu_attention(x, segments, keys, rate, chip=CHIP, causal=causal, window=window, tiles=tiles)

    assert_same(definition, kernels, [inputs], gradients, bound)


@pytest.mark.slow
def test_attention_drops_what_dropout_drops():
    """With equal scores and an identity for values, the context is the dropout mask of a part of the keys."""
    rows, length, heads, size, rate = 2, 200, 2, 64, 0.1
    keys, segments = keys_of(rows, rate), jnp.ones((rows, length), jnp.int32)
    expected = dropout(jnp.ones((rows, heads, length, length)), rate, keys) > 0
    for first in (0, 64, 128):
        value = jnp.zeros((length, size)).at[first : first + size].set(jnp.eye(size))
        x = jnp.zeros((rows, length, 3, heads, size)).at[:, :, 2].set(value[:, None])
        context = gpu_attention(x, segments, keys, rate, chip=CHIP).reshape(rows, length, heads, size)
        np.testing.assert_array_equal(jnp.swapaxes(context, 1, 2) > 0, expected[..., first : first + size])


@pytest.mark.slow
@pytest.mark.parametrize("dtype, bound", [("float32", 1e-6), ("bfloat16", 4e-3)])
@pytest.mark.parametrize(
    "rows, length, hidden, rate, has_biases", [(2, 64, 128, 0.1, True), (3, 20, 96, 0.3, False), (2, 8, 768, 0.0, True)]
)
def test_the_norm_of_a_sum_and_its_gradient_are_those_of_the_definition(
    rows, length, hidden, rate, has_biases, dtype, bound
):
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


@pytest.mark.slow
@pytest.mark.parametrize("dtype, bound", [("float32", 1e-6), ("bfloat16", 4e-3)])
@pytest.mark.parametrize(
    "shape, activation, has_bias",
    [((2, 64, 256), "gelu_new", True), ((3, 16, 2, 128), "gelu", False), ((1, 48, 2, 128), "relu", True)],
)
def test_an_activation_and_its_gradient_are_those_of_the_definition(shape, activation, has_bias, dtype, bound):
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
@pytest.mark.parametrize(
    "model, remat, unroll", [("bert", "none", "auto"), ("gpt", "full", "no"), ("modernbert", "none", "yes")]
)
def test_a_step_with_kernels_is_the_same_on_any_mesh(model, remat, unroll, monkeypatch):
    """Loss and gradient norm of a step with dropout, of the plain path on one device, and of the kernels on eight."""

    def step(mesh_shape, microbatches):
        config = pretraining_config()
        config.stages, config.batch_size = named_stages(only=stage(4, 64, 10)), 8
        config.update(microbatches=microbatches, remat=remat, unroll=unroll)
        config.mesh.update(dict(zip(("data", "fsdp", "tensor"), mesh_shape)))
        size = dict(vocab_size=384, hidden_size=128, num_hidden_layers=3, num_attention_heads=2, intermediate_size=256)
        if model == "modernbert":
            config.model = model_fields("modernbert", **size, local_attention=32)
        else:
            config.model.update(size, norm="pre" if model == "gpt" else "post", causal=model == "gpt")
        config.objective = "lm" if model == "gpt" else config.objective
        mesh = make_mesh(config, jax.devices()[: math.prod(mesh_shape)])
        task = Pretraining(config, mesh, records=None)
        program = make_program(task, config, mesh)
        rng = np.random.default_rng(0)
        batch = {
            name: rng.integers(0, 2, array.shape).astype(array.dtype)
            for name, array in sorted(task.abstract_batch(0).items())
        }
        batch["input_ids"] = rng.integers(0, 384, (8, 64)).astype(np.int32)
        batch["segments"] = np.asarray(packed(8, 64) > 0, np.int32)
        hyperparameters = put_hyperparameters(0, make_schedule(config.optimizer, 4), mesh)
        given = program.init(jax.random.key(0)), put_batch(batch, mesh), hyperparameters
        program_text = str(program.train_step.trace(*given).jaxpr)
        _, metrics = program.train_step(*given)
        return [float(metrics[name]) for name in ("loss", "grad_norm")], [
            name for name in KERNELS if name in program_text
        ]

    expected, without = step((1, 1, 1), 1)
    monkeypatch.setattr(gpu_kernels, "EMULATED", "cpu")
    found, names = step((2, 2, 2), 2)
    assert not without and names == KERNELS
    np.testing.assert_allclose(found, expected, rtol=2e-5)


@pytest.mark.slow
@pytest.mark.parametrize(
    "size, length, causal, window", [(16, 7, False, None), (64, 100, True, None), (128, 300, False, 64)]
)
def test_the_kernels_are_in_the_language_of_a_gpu(size, length, causal, window):
    """Emulation takes what the compiler of kernels would not."""
    half = jnp.bfloat16
    keys, vector = keys_of(2, 0.1), jnp.ones(3 * size)

    def loss(x, update, product):
        context = gpu_attention(x, packed(2, length), keys, 0.1, chip=H100, causal=causal, window=window)
        norm = gpu_add_norm(update, update, vector, vector, vector, keys, 0.1, 1e-5, H100)
        inner = gpu_activate(product, None, "gelu", H100)
        return sum(each.astype(jnp.float32).sum() for each in (context, norm, inner))

    shapes = (2, length, 3, 2, size), (2, 20, 3 * size), (2, 16, 2, 128)
    lowered = jax.jit(jax.grad(loss, (0, 1, 2))).trace(*arrays(half, *shapes)).lower(lowering_platforms=("cuda",))
    text = lowered.as_text()
    assert text.count("xla.gpu.triton") == len(KERNELS) and all(name in text for name in KERNELS)


def test_what_the_kernels_cannot_do_has_the_plain_path():
    half = Compute("bfloat16", "bfloat16", chip=H100)
    assert can_attend_on_gpu(half, 512, 64) and can_norm_on_gpu(half, 512, 1000) and can_activate_on_gpu(half, 512, 384)
    for compute in (Compute(chip=H100), dataclasses.replace(half, chip="Tesla V100"), Compute(chip="cpu")):
        assert not can_attend_on_gpu(compute, 512, 64)
        assert not can_norm_on_gpu(compute, 512, 768)
        assert not can_activate_on_gpu(compute, 512, 3072)
    assert not can_attend_on_gpu(half, 512, 80) and not can_attend_on_gpu(half, 8193, 64)
    assert not can_norm_on_gpu(half, 77, 768) and not can_norm_on_gpu(half, 512, 4096)
    assert not can_activate_on_gpu(half, 512, 100)
