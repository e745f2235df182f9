"""Attention by its definition, random inputs and params, and a training step: the reference for tests of models."""

import functools
import math

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np

from bertjax.distributed.mesh import make_mesh, put_batch
from bertjax.nn.ops.dropout import dropout, row_keys
from bertjax.training.optim.schedules import make_schedule
from bertjax.training.step import Program, put_hyperparameters
from tests.conftest import pretraining_task


def arrays(dtype, *shapes):
    keys = jax.random.split(jax.random.key(sum(map(math.prod, shapes))), len(shapes))
    return [jax.random.normal(key, shape).astype(dtype) for key, shape in zip(keys, shapes)]


def random_params(module, *inputs, deviation: float):
    """Returns normally distributed params: around 1 for LayerNorm scales, around 0 for all other params."""
    rng, shapes = np.random.default_rng(0), jax.eval_shape(module.init, jax.random.key(0), *inputs)["params"]

    def draw(path, x):
        return np.float32((path[-1].key == "scale") + deviation * rng.normal(size=x.shape))

    return jax.tree_util.tree_map_with_path(draw, nn.unbox(shapes))


def keys_of(rows: int, rate: float = 1.0, step: int = 7):
    """Returns dropout keys of rows; None without dropout."""
    return row_keys(jax.random.key(step), jnp.arange(rows)) if rate else None


def packed(rows: int, length: int, last: int = 0) -> jax.Array:
    """Returns rows of three segments of different lengths and padding; the last row has only segment `last`."""
    places, ends = np.arange(length), np.linspace(length // 4, length // 3, rows).astype(int)[:, None]
    segments = np.minimum(places // ends + 1, 4) % 4
    segments[-1] = last
    return jnp.asarray(segments, jnp.int32)


def attend(query, key, value, segments, keys=None, rate=0.0, causal=False, window=None, score_bias=0.0):
    """Vaswani et al. 2017, section 3.2.1, in float32, to be differentiated by JAX: `[batch, length, heads * size]`."""
    scores = jnp.einsum("bqhd,bkhd->bhqk", query, key, precision="highest") / math.sqrt(query.shape[-1])
    scores += score_bias
    places = np.arange(segments.shape[1])
    distance = places[:, None] - places
    is_near = (distance >= 0 if causal else True) & (np.abs(distance) <= (len(places) if window is None else window))
    is_visible = (segments[:, None, :, None] == segments[:, None, None, :]) & is_near
    probs = dropout(jax.nn.softmax(scores, where=is_visible), rate, keys)
    return jnp.einsum("bhqk,bkhd->bqhd", probs, value, precision="highest").reshape(*segments.shape, -1)


def largest(x):
    return np.abs(x).max()


def assert_same(definition, kernels, inputs, gradients, bound: float, size=np.linalg.norm):
    """Compares the results of two functions, and the gradients of their inputs, which the definition gets in float32.

    Args:
      bound: the largest size of a difference, as a share of the size.
      size: the norm, or `largest`.

    Returns:
      The result of `kernels`, and the gradients.
    """

    @functools.partial(jax.jit, static_argnums=0)
    def run(function, inputs, gradients):
        out, pull_back = jax.vjp(function, *inputs)
        return out, pull_back(gradients)

    exact = jax.tree.map(lambda x: x.astype("float32"), (inputs, gradients))
    expected, computed = run(definition, *exact), run(kernels, inputs, gradients)
    assert jax.tree.map(jnp.shape, expected) == jax.tree.map(jnp.shape, computed)
    assert jax.tree.map(lambda x: x.dtype, computed) == jax.tree.map(lambda x: x.dtype, (gradients, tuple(inputs)))
    for a, b in zip(jax.tree.leaves(expected), jax.tree.leaves(computed), strict=True):
        a, b = np.float32(a).ravel(), np.float32(b).ravel()
        assert size(a - b) <= bound * size(a)
    return computed


def metrics_of_a_step(config, segments, kernel_names=()) -> tuple[list[float], list[str]]:
    """Returns loss and gradient norm of the first step on random data, and the kernels that the program contains."""
    mesh = make_mesh(config, jax.devices()[: math.prod(config.mesh.values())])
    task, rng = pretraining_task(config, mesh, None), np.random.default_rng(0)
    program = Program(task, config, mesh)
    batch = {
        name: rng.integers(0, 2, array.shape).astype(array.dtype)
        for name, array in sorted(task.data[0].abstract_batch().items())
    }
    batch["input_ids"] = rng.integers(0, config.model.vocab_size, segments.shape).astype(np.int32)
    batch["segments"] = np.asarray(segments, np.int32)
    hyperparameters = put_hyperparameters(0, make_schedule(config.optimizer, 4), mesh)
    arguments = program.init(jax.random.key(0)), put_batch(batch, mesh), hyperparameters
    text = str(program.train_step.trace(*arguments).jaxpr) if kernel_names else ""
    _, metrics = program.train_step(*arguments)
    return [float(metrics[name]) for name in ("loss", "grad_norm")], [name for name in kernel_names if name in text]
