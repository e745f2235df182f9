"""Dropout masks of different keys: independent for the keys that the model makes, and not for just any keys."""

import jax
import jax.numpy as jnp
import numpy as np

from bertjax.model.dropout import dropout, fold_in, row_keys

NUMBERS = 4096  # in a mask


def correlations(keys: jax.Array) -> np.ndarray:
    """Of the masks of every two keys, in standard errors: normally distributed where the masks are independent."""
    masks = np.asarray(dropout(jnp.ones((len(keys), NUMBERS)), 0.1, keys) == 0)
    return np.corrcoef(masks)[np.triu_indices(len(keys), 1)] * np.sqrt(NUMBERS)


def test_masks_of_neighbouring_rows_layers_sites_and_steps_are_independent():
    keys = []
    for step in range(3):  # as training.loop makes a step's key
        key = jax.random.fold_in(jax.random.key(0, impl="threefry2x32"), step)
        rows = row_keys(key, jnp.arange(8))
        keys += [fold_in(rows, 0), fold_in(rows, 5)]  # the embeddings', the output layer's
        keys += [fold_in(fold_in(rows, layer), site) for layer in range(1, 5) for site in range(3)]
    found = correlations(jnp.concatenate(keys))
    assert len(found) == 336 * 335 / 2
    assert 0.97 < np.sqrt(np.mean(found**2)) < 1.03 and np.abs(found).max() < 5.5


def test_masks_of_raw_neighbouring_keys_are_not():
    """Why a key must be mixed before it comes here, as the docstring of `dropout` says."""
    numbers = jnp.arange(32, dtype=jnp.uint32)
    for words in (jnp.stack([0 * numbers, numbers], 1), jnp.stack([numbers, 0 * numbers], 1)):
        found = correlations(jax.random.wrap_key_data(words, impl="threefry2x32"))
        assert np.sqrt(np.mean(found**2)) > 5 and np.abs(found).max() > 10
