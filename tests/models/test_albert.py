"""The layers of ALBERT equal separate layers with equal params; the numbers of layers that share params."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from bertjax.config.model_config import Compute
from bertjax.models.albert.config import AlbertConfig
from bertjax.models.albert.family import FAMILY
from bertjax.models.electra.config import ElectraConfig
from bertjax.models.families import encoder_of
from bertjax.models.heads import BertForMaskedLM
from tests.models.test_modernbert import random_params
from tests.nn.reference import packed

SIZES = dict(
    vocab_size=90, embedding_size=8, hidden_size=16, num_hidden_layers=4, num_attention_heads=2, intermediate_size=24,
    max_position_embeddings=32, hidden_dropout_prob=0.3, attention_probs_dropout_prob=0.3,
)  # fmt: skip


@pytest.mark.parametrize("groups", [1, 2])
def test_shared_layers_equal_separate_layers_with_equal_params(groups):
    """Compares states of packed rows with dropout. The gradient of a group is the sum over its layers."""
    config = AlbertConfig(**SIZES, num_hidden_groups=groups, hidden_act="gelu")
    separate = encoder_of(ElectraConfig(**SIZES))
    params = random_params(BertForMaskedLM(config), config)["bert"]
    ids, segments = np.random.default_rng(0).integers(0, 90, (2, 32)), packed(2, 32)
    keys, target = jax.random.split(jax.random.key(0), 2), np.random.default_rng(1).normal(size=(5, 2, 32, 16))

    def loss(params, model, compute=None):
        states = model.apply(
            {"params": params}, ids, segments, ids % 2, dropout_keys=keys, every_layer=True, method="encode"
        )
        return (states * target).sum(), states

    differentiate = jax.jit(jax.value_and_grad(loss, has_aux=True), static_argnums=1)
    by_layer = FAMILY.architecture(config).layers.by_layer(params["encoder"])
    layers = jax.tree.map(lambda *arrays: jnp.stack(arrays), *by_layer)
    (_, expected), gradients = differentiate(params | {"encoder": {"layers": layers}}, separate)
    assert {len(x) for x in jax.tree.leaves(params["encoder"]["layers"])} == {groups}
    for compute in (Compute(), Compute(remat="full"), Compute(unroll=True)):
        (_, states), shared = differentiate(params, encoder_of(config, compute))
        np.testing.assert_allclose(states, expected, atol=1e-5)
        summed = jax.tree.map(lambda x: x.reshape(groups, -1, *x.shape[1:]).sum(1), gradients["encoder"]["layers"])
        for a, b in zip(jax.tree.leaves(shared["encoder"]["layers"]), jax.tree.leaves(summed), strict=True):
            np.testing.assert_allclose(a, b, atol=1e-4 * max(1.0, np.abs(b).max()))


def test_a_group_has_the_number_of_its_last_layer():
    config = AlbertConfig(**SIZES, num_hidden_groups=2)
    kernel = "encoder", "layers", "output", "kernel"
    np.testing.assert_array_equal(FAMILY.layer_ids(config, kernel), [2, 4])
    np.testing.assert_array_equal(FAMILY.layer_ids(dataclasses.replace(config, num_hidden_groups=1), kernel), [4])
    assert FAMILY.layer_ids(config, ("embeddings", "projection", "kernel")) == 0
    assert FAMILY.forward_flops(config, 8) == FAMILY.forward_flops(dataclasses.replace(config, num_hidden_groups=4), 8)


def test_generation_caches_the_keys_of_every_layer():
    config = dataclasses.replace(AlbertConfig(**SIZES), causal=True)
    model, ids = encoder_of(config), np.random.default_rng(0).integers(0, 90, (2, 6))
    params = {"params": random_params(BertForMaskedLM(config), config)["bert"]}
    expected = model.apply(params, ids, np.ones_like(ids), np.zeros_like(ids), method="encode")
    cache = FAMILY.new_cache(config, 2, 6, "float32")
    states = []
    for place in range(6):
        state, cache = model.apply(params, ids[:, place : place + 1], jnp.array([place]), cache, method="decode")
        states.append(state)
    np.testing.assert_allclose(jnp.concatenate(states, axis=1), expected, atol=1e-5)
