"""The kernel that moves scores by distance to scores by key, emulated on a CPU."""

import dataclasses

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from bertjax.config.model_config import Compute
from bertjax.distributed.rules import RULES
from bertjax.models import families
from bertjax.models.deberta_v2.config import DebertaV2Config
from bertjax.models.heads import BertForMaskedLM
from bertjax.nn.kernels.pallas import EMULATED
from bertjax.nn.kernels.shift import can_shift, shift_on_chip
from bertjax.nn.relative_attention import shift
from tests.models.test_modernbert import random_params


def test_kernel_equals_shift_and_its_gradient():
    length, rng = 256, np.random.default_rng(0)
    scores, weights = rng.normal(size=(1, 1, length, 2 * length)), rng.normal(size=(1, 1, length, length))

    def plain(scores):
        return (shift(scores[..., :-1], length) * weights).sum(), shift(scores[..., :-1], length)

    def with_kernel(scores):
        moved = shift_on_chip(scores, EMULATED)
        return (moved * weights).sum(), moved

    (_, expected), gradient = jax.value_and_grad(plain, has_aux=True)(jnp.float32(scores))
    (_, moved), of_kernel = jax.value_and_grad(with_kernel, has_aux=True)(jnp.float32(scores))
    np.testing.assert_array_equal(moved, expected)
    np.testing.assert_array_equal(of_kernel, gradient)


def test_lengths_of_the_kernel():
    assert can_shift(128) and can_shift(512) and not can_shift(64) and not can_shift(200) and not can_shift(2048)


@pytest.mark.slow
@pytest.mark.parametrize("mesh_sizes", [None, (2, 2, 2)])
def test_disentangled_attention_with_the_kernel(mesh_sizes):
    """Compares states and gradients, on one device and on eight devices."""
    config = DebertaV2Config(
        vocab_size=150, hidden_size=32, num_hidden_layers=1, num_attention_heads=2, intermediate_size=64,
        position_buckets=16, max_position_embeddings=256,
    )  # fmt: skip
    ids = np.random.default_rng(0).integers(5, 150, (8, 128))
    segments = np.where(np.arange(128) < 50, 1, 2) * (np.arange(128) < 120) * np.ones_like(ids)
    params = {"params": random_params(BertForMaskedLM(config), config)["bert"]}

    def loss(params, chip):
        encoder = families.family_of(config).build(config, dataclasses.replace(Compute(), chip=chip))
        states = encoder.apply(params, ids, segments, 0 * ids, method="encode")
        return jnp.square(states).sum() + states[:, :, ::7].sum(), states

    differentiate = jax.jit(jax.value_and_grad(loss, has_aux=True), static_argnums=1)
    (_, expected), of_params = differentiate(params, "")
    if mesh_sizes is None:
        (_, states), gradients = differentiate(params, EMULATED)
    else:
        axis_types = (jax.sharding.AxisType.Auto,) * 3
        mesh = jax.make_mesh(mesh_sizes, ("data", "fsdp", "tensor"), axis_types=axis_types)
        with jax.set_mesh(mesh), nn.logical_axis_rules(RULES):
            (_, states), gradients = differentiate(params, EMULATED)
    np.testing.assert_allclose(states, expected, atol=1e-4)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-3, atol=1e-3), gradients, of_params)
