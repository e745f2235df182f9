"""Dropout masks of different keys: independent for the keys of the model, but not for arbitrary keys."""

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np

from bertjax.config.model_config import BertConfig, Compute
from bertjax.nn.feed_forward import FeedForward
from bertjax.nn.ops.dropout import dropout, fold_in, row_keys

SIZES = dict(vocab_size=60, hidden_size=64, num_hidden_layers=1, num_attention_heads=2, intermediate_size=64)
NUMBERS = 4096  # in a mask


def correlations(keys: jax.Array) -> np.ndarray:
    """Returns correlations of the masks of all pairs of keys, in standard errors: normal for independent masks."""
    masks = np.asarray(dropout(jnp.ones((len(keys), NUMBERS)), 0.1, keys) == 0)
    return np.corrcoef(masks)[np.triu_indices(len(keys), 1)] * np.sqrt(NUMBERS)


def test_masks_of_neighbouring_rows_layers_sites_and_steps_are_independent():
    keys = []
    for step in range(3):  # like the key of a step in training.loop
        key = jax.random.fold_in(jax.random.key(0, impl="threefry2x32"), step)
        rows = row_keys(key, jnp.arange(8))
        keys += [fold_in(rows, 0), fold_in(rows, 5)]  # the embeddings, the LM head
        keys += [fold_in(fold_in(rows, layer), site) for layer in range(1, 5) for site in range(3)]
    errors = correlations(jnp.concatenate(keys))
    assert len(errors) == 336 * 335 / 2
    assert 0.97 < np.sqrt(np.mean(errors**2)) < 1.03 and np.abs(errors).max() < 5.5


def test_masks_are_independent_along_a_row():
    """Tests the distances of neighbours, of the blocks of kernels, and of queries."""
    keys = row_keys(jax.random.key(0, impl="threefry2x32"), jnp.arange(64))
    masks = np.asarray(dropout(jnp.ones((64, 1 << 16)), 0.1, keys) == 0) - 0.1
    for distance in (1, 2, 3, 4, 8, 16, 32, 63, 64, 65, 128, 256, 512, 513, 1024, 4096):
        products = masks[:, distance:] * masks[:, :-distance]
        errors = products.sum(1) / (0.09 * np.sqrt(products.shape[1]))  # in standard errors
        assert np.sqrt(np.mean(errors**2)) < 1.35, (distance, errors)


class _Network(nn.Module):
    @nn.compact
    def __call__(self, x, keys):
        return FeedForward(64, "relu", dropout=0.5)(BertConfig(**SIZES), Compute(), x, keys)[0]


def test_inner_states_and_the_output_of_a_feed_forward_network_have_independent_masks():
    """A layer applies dropout to the output of the network with the keys that the network gets."""
    keys, x, identity = row_keys(jax.random.key(0), jnp.arange(4)), jnp.ones((4, 64, 64)), jnp.eye(64)
    params = {
        "input": {"kernel": identity, "bias": jnp.zeros(64)},
        "output": {"kernel": identity, "bias": jnp.zeros(64)},
    }
    inner, output = np.asarray(_Network().apply({"params": params}, x, keys)), np.asarray(dropout(x, 0.5, keys))
    np.testing.assert_allclose(np.unique(inner.round(5)), [0, 2])
    assert abs((inner == 0).mean() - 0.5) < 0.02 and abs(np.corrcoef(inner.ravel(), output.ravel())[0, 1]) < 0.03
    np.testing.assert_allclose(_Network().apply({"params": params}, x, None), x, atol=1e-6)
