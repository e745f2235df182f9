"""Where the examples of a row begin and end: by its segments, of which 0 is padding."""

from typing import NamedTuple

import jax
import jax.numpy as jnp


class Bounds(NamedTuple):
    """The first and the last token that each token sees, int32."""

    first: jax.Array
    last: jax.Array


def bounds_of(segments: jax.Array, window: int | None = None) -> Bounds:
    """Returns what tokens see, `[batch, length]`: their segment, and of it those in the window.

    Args:
      segments: `[batch, length]` int32; the tokens of one lie side by side.
      window: how many places away a token sees, to either side; None: any number.
    """
    places = jnp.broadcast_to(jnp.arange(segments.shape[1], dtype=jnp.int32), segments.shape)
    differs = segments[:, 1:] != segments[:, :-1]
    begins, ends = (jnp.pad(differs, [(0, 0), pad], constant_values=True) for pad in ((1, 0), (0, 1)))
    first = jax.lax.cummax(jnp.where(begins, places, 0), axis=1)
    last = jax.lax.cummin(jnp.where(ends, places, segments.shape[1]), axis=1, reverse=True)
    if window is not None:
        first, last = jnp.maximum(first, places - window), jnp.minimum(last, places + window)
    return Bounds(first, last)


def last_tokens(segments, first_tokens=None):
    """Returns the last token of each row `[batch]`, or of the examples whose first tokens are given, in their shape."""
    if first_tokens is None:
        return jnp.maximum((segments > 0).sum(-1) - 1, 0)
    return jnp.where(_own(segments, first_tokens), jnp.arange(segments.shape[1]), 0).max(-1)


def pool_states(hidden, segments, first_tokens, how: str):
    """Returns one state of each text in float32: `[batch, length, hidden]` -> `[batch, hidden]`, or
    `[batch, examples, hidden]` of the examples whose first tokens are given `[batch, examples]`.

    Args:
      how: cls (that of the first token), last (of the last one) or mean (of all).
    """
    firsts = jnp.zeros((hidden.shape[0], 1), jnp.int32) if first_tokens is None else first_tokens
    if how == "mean":
        found = mean_of_segments(hidden.astype(jnp.float32), segments, firsts)
    else:
        tokens = firsts if how == "cls" else last_tokens(segments, firsts)
        found = jnp.take_along_axis(hidden, tokens[..., None], axis=1).astype(jnp.float32)
    return found[:, 0] if first_tokens is None else found


def mean_of_segments(hidden, segments, first_tokens):
    """Returns the mean state of each example whose first token is given `[batch, examples]`, summed in float32.

    `[batch, length, hidden]` -> `[batch, examples, hidden]`.
    """
    own = _own(segments, first_tokens)
    weights = own / own.sum(-1, keepdims=True)
    return jnp.einsum("btl,blh->bth", weights, hidden.astype(jnp.float32)).astype(hidden.dtype)


def _own(segments, first_tokens):
    """Returns which tokens are of each example whose first token is given, `[batch, examples, length]` booleans."""
    return jnp.take_along_axis(segments, first_tokens, axis=1)[..., None] == segments[:, None, :]


def join_ends(states, segments):
    """Joins the states of two directions, forward ones first, where each has read the whole row.

    `[batch, length, 2 * size]` -> `[batch, 2 * size]`.
    """
    forward, backward = jnp.split(states, 2, axis=-1)
    last = jnp.take_along_axis(forward, last_tokens(segments)[:, None, None], axis=1)[:, 0]
    return jnp.concatenate([last, backward[:, 0]], axis=-1)
