"""The begin and the end of the examples of a row, from the segments of its tokens; segment 0 is padding."""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import Array


class Bounds(NamedTuple):
    """The first and the last token that a token attends to, int32."""

    first: Array
    last: Array


def bounds_of(segments: Array, window: int | None = None) -> Bounds:
    """Returns the bounds of tokens `[batch, length]`: a token attends to its segment within the window.

    Args:
      segments: `[batch, length]` int32; the tokens of a segment are consecutive.
      window: the largest distance, to either side; None: any distance.
    """
    places = jnp.broadcast_to(jnp.arange(segments.shape[1], dtype=jnp.int32), segments.shape)
    differs = segments[:, 1:] != segments[:, :-1]
    begins, ends = (jnp.pad(differs, [(0, 0), pad], constant_values=True) for pad in ((1, 0), (0, 1)))
    first = jax.lax.cummax(jnp.where(begins, places, 0), axis=1)
    last = jax.lax.cummin(jnp.where(ends, places, segments.shape[1]), axis=1, reverse=True)
    if window is not None:
        first, last = jnp.maximum(first, places - window), jnp.minimum(last, places + window)
    return Bounds(first, last)


def last_tokens(segments: Array, first_tokens: Array | None = None) -> Array:
    """Returns the last token of each row `[batch]`, or of each example, in the shape of `first_tokens`."""
    if first_tokens is None:
        return jnp.maximum((segments > 0).sum(-1) - 1, 0)
    return jnp.where(_is_of_example(segments, first_tokens), jnp.arange(segments.shape[1]), 0).max(-1)


def pool_states(hidden: Array, segments: Array, first_tokens: Array | None, pooling: str) -> Array:
    """Returns one state of each text in float32, `[batch, hidden]`, or of each example, `[batch, examples, hidden]`.

    Args:
      hidden: `[batch, length, hidden]`.
      segments: `[batch, length]`.
      first_tokens: the first tokens of the examples `[batch, examples]`; None: a row is a text.
      pooling: cls (the state of the first token), last (of the last token) or mean (of all tokens).
    """
    firsts = jnp.zeros((hidden.shape[0], 1), jnp.int32) if first_tokens is None else first_tokens
    if pooling == "mean":
        states = mean_of_segments(hidden.astype(jnp.float32), segments, firsts)
    else:
        tokens = firsts if pooling == "cls" else last_tokens(segments, firsts)
        states = jnp.take_along_axis(hidden, tokens[..., None], axis=1).astype(jnp.float32)
    return states[:, 0] if first_tokens is None else states


def mean_of_segments(hidden: Array, segments: Array, first_tokens: Array) -> Array:
    """Returns the mean state of each example, summed in float32.

    `[batch, length, hidden]`, first tokens of the examples `[batch, examples]` -> `[batch, examples, hidden]`.
    """
    is_of_example = _is_of_example(segments, first_tokens)
    weights = is_of_example / is_of_example.sum(-1, keepdims=True)
    return jnp.einsum("btl,blh->bth", weights, hidden.astype(jnp.float32)).astype(hidden.dtype)


def _is_of_example(segments: Array, first_tokens: Array) -> Array:
    """Returns booleans `[batch, examples, length]`: the tokens of each example."""
    return jnp.take_along_axis(segments, first_tokens, axis=1)[..., None] == segments[:, None, :]


def join_ends(states: Array, segments: Array) -> Array:
    """Joins the hidden states of two directions, the forward direction first, where they have read the row.

    `[batch, length, 2 * size]` -> `[batch, 2 * size]`.
    """
    forward, backward = jnp.split(states, 2, axis=-1)
    last = jnp.take_along_axis(forward, last_tokens(segments)[:, None, None], axis=1)[:, 0]
    return jnp.concatenate([last, backward[:, 0]], axis=-1)
