"""Where the examples of a row begin and end: by its segments, of which 0 is padding."""

import jax.numpy as jnp


def last_tokens(segments, first_tokens=None):
    """Returns the last token of each row `[batch]`, or of the examples whose first tokens are given, in their shape."""
    if first_tokens is None:
        return jnp.maximum((segments > 0).sum(-1) - 1, 0)
    own = jnp.take_along_axis(segments, first_tokens, axis=1)[..., None] == segments[:, None, :]
    return jnp.where(own, jnp.arange(segments.shape[1]), 0).max(-1)


def join_ends(states, segments):
    """Joins the states of two directions, forward ones first, where each has read the whole row.

    `[batch, length, 2 * size]` -> `[batch, 2 * size]`.
    """
    forward, backward = jnp.split(states, 2, axis=-1)
    last = jnp.take_along_axis(forward, last_tokens(segments)[:, None, None], axis=1)[:, 0]
    return jnp.concatenate([last, backward[:, 0]], axis=-1)
