"""Dropout masks of different keys: independent for the keys of the model, but not for arbitrary keys."""

import jax
import jax.numpy as jnp
import numpy as np

from bertjax.nn.ops.dropout import dropout, fold_in, row_keys

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
