"""Token orders of permutation language modelling: the predicted tokens, and their order."""

import numpy as np
import pytest

from bertjax.data.batch import take_rows
from bertjax.data.loading.permutation import RandomOrder

CLS, SEP, LENGTH, VOCABULARY = 2, 3, 120, 50
CONTINUES = np.arange(VOCABULARY) % 3 == 1  # one random token in three continues a word


def order(**fields) -> RandomOrder:
    return RandomOrder(**dict(k=6, max_span_words=5, max_predictions_per_seq=30, cls_id=CLS, sep_id=SEP) | fields,
                 continues_word=CONTINUES)  # fmt: skip


def rows_of(count: int):
    """Returns the ids of A [SEP] B [SEP] [CLS], and the sizes of the rows."""
    rng = np.random.default_rng(0)
    ids, sizes = rng.integers(4, VOCABULARY, (count, LENGTH)), rng.integers(6, LENGTH + 1, count)
    ids[np.arange(LENGTH) >= sizes[:, None]] = 0
    for place, piece in ((sizes // 2, SEP), (sizes - 2, SEP), (sizes - 1, CLS)):
        ids[np.arange(count), place] = piece
    return ids, sizes


@pytest.mark.parametrize("fields", [{}, dict(max_span_words=0), dict(max_span_words=1), dict(k=1), dict(k=40)])
def test_one_in_k_tokens_is_predicted_in_a_random_order(fields):
    random_order, (ids, sizes) = order(**fields), rows_of(400)
    ranks, selected = random_order.permute(ids, sizes, random_order.draw(np.random.default_rng(1), *ids.shape))
    wanted = np.minimum(np.clip(np.rint(sizes / random_order.k), 1, 30), sizes - 3)
    assert (selected.sum(1) == wanted).all() and ((ranks > 0) == selected).all()
    assert not selected[(ids == CLS) | (ids == SEP) | (np.arange(LENGTH) >= sizes[:, None])].any()
    for row, chosen in zip(ranks, selected):
        assert sorted(row[chosen]) == list(range(1, chosen.sum() + 1))
    firsts = [np.flatnonzero(chosen).tolist().index(row.argmax()) / (chosen.sum() - 1)
              for row, chosen in zip(ranks, selected) if chosen.sum() > 1]  # fmt: skip
    assert not firsts or abs(np.mean(firsts) - 0.5) < 0.06  # the last token of the order is at any position


def test_spans_are_words_of_harmonic_lengths_in_their_context():
    random_order, count = order(max_predictions_per_seq=LENGTH, k=6), 4000
    ids, sizes = rows_of(1)
    ids, sizes = np.repeat(ids, count, 0), np.full(count, LENGTH)
    ids[:] = np.random.default_rng(2).integers(4, VOCABULARY, LENGTH)
    ids[:, -1], ids[:, -2], ids[:, 60] = CLS, SEP, SEP
    draws = random_order.draw(np.random.default_rng(1), *ids.shape)
    _, selected = random_order.permute(ids, sizes, draws)
    begins = ~CONTINUES[ids[0]] | (ids[0] == SEP) | np.roll(ids[0] == SEP, 1)
    begins[[0, -1]] = True
    # The first span of a row has the words that were drawn, and begins after a share of its context.
    for row in range(50):
        words, start = (
            int(draws["span_words"][row, 0]),
            int(draws["context_shares"][row, 0] * random_order.k * draws["span_words"][row, 0]),
        )
        begin = start + int(np.flatnonzero(begins[start:])[0])
        end = begin + 1 + int(np.flatnonzero(np.cumsum(begins[begin + 1 :]) == words)[0])
        assert selected[row, begin:end].all()
    drawn = np.bincount(draws["span_words"].ravel(), minlength=6)[1:] / draws["span_words"].size
    np.testing.assert_allclose(drawn, 1 / np.arange(1, 6) / sum(1 / np.arange(1, 6)), atol=0.01)


def test_a_row_does_not_depend_on_neighbouring_rows():
    random_order, (ids, sizes) = order(), rows_of(64)
    draws = random_order.draw(np.random.default_rng(1), *ids.shape)
    together, _ = random_order.permute(ids, sizes, draws)
    for some in (slice(0, 1), slice(5, 9), slice(60, 64)):
        apart, _ = random_order.permute(ids[some], sizes[some], take_rows(draws, some))
        np.testing.assert_array_equal(apart, together[some])
    assert random_order.permute(ids[:0], sizes[:0], take_rows(draws, slice(0)))[0].shape == (0, LENGTH)
