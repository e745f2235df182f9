"""Attention with relative positions compared with the sums of the papers, one number at a time."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from bertjax.config.model_config import Compute
from bertjax.nn.relative_attention import (  # fmt: skip
    Biases,
    Read,
    SegmentTerm,
    attend_relative,
    distance_embeddings,
    distances,
    probabilities,
    shift_to,
)

ROWS, MEMORY, QUERIES, HEADS, SIZE = 2, 3, 4, 2, 6
KEYS = MEMORY + QUERIES


def sinusoid(distance: int) -> np.ndarray:
    """Section 3.3 uses the sinusoids of Vaswani et al., as a function of the distance."""
    sines = [np.sin(distance / 10_000 ** (2 * i / SIZE)) for i in range(SIZE // 2)]
    return np.array(sines + [np.cos(distance / 10_000 ** (2 * i / SIZE)) for i in range(SIZE // 2)])


def by_hand(query, key, value, matrix, u, v, sees, segment=None):
    """Computes attention query by query.

    `matrix` `[heads, size, size]` projects sinusoids; positions of `sees(i, j)` include the memory.
    """
    seen = np.zeros(query.shape)
    for row in range(ROWS):
        for head in range(HEADS):
            for i in range(QUERIES):
                scores = np.full(KEYS, -np.inf)
                for j in filter(lambda j: sees(MEMORY + i, j), range(KEYS)):
                    q, k = query[row, i, head], key[row, j, head]
                    r = sinusoid(MEMORY + i - j) @ matrix[head]
                    scores[j] = q @ k + q @ r + u[head] @ k + v[head] @ r
                    if segment is not None:
                        bias, embedding, is_same = segment
                        scores[j] += (q + bias[head]) @ embedding[0 if is_same[row, i, j] else 1, head]
                weights = np.exp((scores - scores.max()) / np.sqrt(SIZE))
                seen[row, i, head] = weights @ value[row, :, head] / weights.sum()
    return seen


@pytest.fixture
def draw():
    rng = np.random.default_rng(0)
    return lambda *shape: rng.normal(size=shape)


@pytest.mark.parametrize("is_causal", [True, False])
@pytest.mark.parametrize("has_segments", [True, False])
def test_relative_attention_equals_the_equations_of_the_papers(draw, is_causal, has_segments):
    query, key, value = draw(ROWS, QUERIES, HEADS, SIZE), *draw(2, ROWS, KEYS, HEADS, SIZE)
    matrix, u, v = draw(HEADS, SIZE, SIZE), *draw(2, HEADS, SIZE)
    segment = (draw(HEADS, SIZE), draw(2, HEADS, SIZE), draw(ROWS, QUERIES, KEYS) > 0) if has_segments else None

    def sees(i, j):
        return j > 0 and (j <= i if is_causal else True)  # and the first position of the memory is empty

    expected = by_hand(query, key, value, matrix, u, v, sees, segment)
    embedded = distance_embeddings(distances(QUERIES, KEYS, is_causal), SIZE)
    positions = np.einsum("rs,hsd->rhd", embedded, matrix)
    mask = np.array([[sees(MEMORY + i, j) for j in range(KEYS)] for i in range(QUERIES)])[None, None]
    read, biases = Read(key, value, jnp.array(positions)), Biases(u, v)
    inputs = (jnp.array(query), jax.tree.map(jnp.array, read), biases, mask)
    term = SegmentTerm(*map(jnp.array, segment)) if has_segments else None
    actual = jax.jit(lambda *inputs: attend_relative(*inputs, 0.0, Compute(), segments=term))(*inputs)
    np.testing.assert_allclose(actual, expected, atol=1e-5)
    if not has_segments:
        shown = probabilities(*inputs)
        np.testing.assert_allclose(jnp.einsum("bhqk,bkhd->bqhd", shown, value), expected, atol=1e-5)
        np.testing.assert_allclose(np.asarray(shown)[:, :, :, 0], 0, atol=1e-7)


@pytest.mark.parametrize("queries, keys", [(1, 1), (6, 33)])
def test_scores_are_shifted_for_queries_at_arbitrary_positions(queries, keys):
    rng, known = np.random.default_rng(keys), distances(keys, keys, is_causal=False).tolist()
    scores = rng.normal(size=(3, queries, 2, len(known))).astype(np.float32)
    places = rng.integers(0, keys, (3, queries))
    moved = shift_to(jnp.asarray(scores), keys, jnp.asarray(places))
    for row, query in np.ndindex(3, queries):
        at = [known.index(places[row, query] - key) for key in range(keys)]
        np.testing.assert_array_equal(moved[row, query], scores[row, query][:, at])


@pytest.mark.slow
@pytest.mark.parametrize("predicts", [False, True])
def test_memory_use_is_bounded_by_the_scores(predicts):
    """Forward and backward pass.

    An embedding for each pair of tokens would take 64 times as much as the scores of a head.
    """
    heads, size, shares = 2, 64, []
    for length in (128, 256):
        arrays = {name: jnp.zeros((1, length, heads, size)) for name in ("query", "keys", "values")}
        positions = jnp.zeros((2 * length, heads, size))
        places = jnp.arange(length)[None] if predicts else None

        def loss(arrays, positions, length=length, places=places):
            biases = Biases(*jnp.zeros((2, heads, size)))
            read = Read(arrays["keys"], arrays["values"], positions)
            mask = jnp.ones((1, 1, length, length), bool)
            return attend_relative(arrays["query"], read, biases, mask, 0.0, Compute(), places=places).sum()

        program = jax.jit(jax.grad(loss, argnums=(0, 1))).lower(arrays, positions).compile()
        shares.append(program.memory_analysis().temp_size_in_bytes / (4 * heads * length * length))
    assert max(shares) < 16 and shares[1] < 1.2 * shares[0]


def test_dropout_uses_one_key_per_row(draw):
    query, key, value = draw(ROWS, QUERIES, HEADS, SIZE), *draw(2, ROWS, KEYS, HEADS, SIZE)
    keys = jax.random.split(jax.random.key(0), ROWS)
    mask, biases = np.ones((1, 1, QUERIES, KEYS), bool), Biases(*jnp.array(draw(2, HEADS, SIZE)))

    @jax.jit
    def seen(query, key, value, keys):
        read = Read(key, value, jnp.zeros((KEYS, HEADS, SIZE)))
        return attend_relative(query, read, biases, mask, 0.5, Compute(), keys)

    both, none = seen(query, key, value, keys), seen(query, key, value, None)
    np.testing.assert_allclose(seen(query[1:], key[1:], value[1:], keys[1:])[0], both[1], atol=1e-6)
    assert np.abs(both - none).max() > 0.1
