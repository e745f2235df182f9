"""Masking by statistics over many seeds: 15 %, 80/10/10, limits, whole words."""

import numpy as np
import pytest

from bertjax.data.masking import mask_tokens

VOCAB, MASK, LENGTH = 1000, 4, 128


def masked(seed, length=LENGTH, rows=1, **options):
    """Rows of random pieces with three special tokens, of which the last is followed by some padding."""
    rng = np.random.default_rng(seed)
    ids = rng.integers(5, VOCAB, size=(rows, length), dtype=np.int32)
    special = np.zeros((rows, length), bool)
    special[:, [0, length // 2, length - 1]] = True
    sizes = np.full(rows, length)
    options = {"vocab_size": VOCAB, "mask_id": MASK, **options}
    return ids, special, mask_tokens(ids, sizes, special, rng, **options)


def test_hides_15_percent_and_never_a_special_token():
    ids, special, masking = masked(0, rows=500)
    for row in range(500):
        assert masking.counts[row] == round(0.15 * LENGTH)
        positions, labels = (x[row, : masking.counts[row]] for x in (masking.positions, masking.labels))
        assert not special[row, positions].any()
        assert (np.diff(positions) > 0).all()
        assert (labels == ids[row, positions]).all()
        assert not masking.positions[row, len(positions) :].any() and not masking.labels[row, len(positions) :].any()
        untouched = np.delete(np.arange(LENGTH), positions)
        assert (masking.ids[row, untouched] == ids[row, untouched]).all()


def test_padding_is_never_hidden_and_does_not_count():
    ids = np.full((300, LENGTH), 7, np.int32)
    special = np.zeros(ids.shape, bool)
    special[:, 0] = True
    sizes = np.arange(300) % (LENGTH - 1) + 2
    found = mask_tokens(ids, sizes, special, np.random.default_rng(0), vocab_size=VOCAB, mask_id=MASK)
    for row, size in enumerate(sizes):
        assert found.counts[row] == min(20, max(1, round(0.15 * size)))
        assert (found.positions[row] < size).all()


def test_80_10_10():
    _, _, masking = masked(0, rows=4000)
    used = np.arange(20) < masking.counts[:, None]
    behind = np.take_along_axis(masking.ids, masking.positions, axis=1)[used]
    # One in VOCAB random pieces is the label itself; the rest is four standard deviations of 76,000 draws.
    assert abs((behind == MASK).mean() - 0.8) < 0.006
    assert abs((behind == masking.labels[used]).mean() - 0.1) < 0.005


def test_random_pieces_and_positions_are_uniform():
    _, _, masking = masked(1, rows=8000)
    used = np.arange(20) < masking.counts[:, None]
    behind, labels = np.take_along_axis(masking.ids, masking.positions, axis=1)[used], masking.labels[used]
    pieces = np.bincount(behind[(behind != MASK) & (behind != labels)], minlength=VOCAB)
    places = np.bincount(masking.positions[used], minlength=LENGTH)
    assert (pieces[5:] > 0).all() and pieces[5:].max() < 3 * pieces[5:].mean()
    special = [0, LENGTH // 2, LENGTH - 1]
    hidden = np.delete(places, special)
    assert places[special].sum() == 0
    assert abs(hidden / hidden.mean() - 1).max() < 0.15


@pytest.mark.parametrize("length, limit, expected", [(128, 5, 5), (4, 20, 1), (8, 20, 1), (20, 20, 3)])
def test_at_least_one_and_at_most_the_limit(length, limit, expected):
    found = masked(0, length, rows=50, max_predictions_per_seq=limit)[2]
    assert (found.counts == expected).all() and found.positions.shape == (50, limit)


def test_whole_words_are_hidden_together_or_not_at_all():
    continues = np.arange(VOCAB) % 3 == 0
    ids, special, masking = masked(2, rows=500, continues_word=continues)
    hidden = np.zeros(ids.shape, bool)
    for row, count in enumerate(masking.counts):
        hidden[row, masking.positions[row, :count]] = True
    inside = continues[ids[:, 1:]] & ~special[:, 1:] & ~special[:, :-1]
    np.testing.assert_array_equal(hidden[:, 1:][inside], hidden[:, :-1][inside])
    assert masking.counts.max() <= round(0.15 * LENGTH) and masking.counts.mean() > 0.98 * round(0.15 * LENGTH)
    assert not hidden[special].any()
    # Long words are as likely as short ones, but for those that no longer fit.
    first = ~continues[ids] & ~special
    long = first[:, :-1] & inside
    assert 0.75 < hidden[:, :-1][long].mean() / hidden[:, :-1][first[:, :-1] & ~long].mean() < 1.1


def test_a_word_over_the_limit_is_passed_over():
    ids = np.array([[2, 10, 11, 12, 13, 14, 15, 16, 17, 3]], np.int32)
    continues = np.zeros(VOCAB, bool)
    continues[11:18] = True  # one word of eight pieces
    masking = mask_tokens(ids, np.array([10]), np.isin(ids, [2, 3]), np.random.default_rng(0), vocab_size=VOCAB,
                          mask_id=MASK, max_predictions_per_seq=3, continues_word=continues)  # fmt: skip
    assert masking.counts.tolist() == [0]


def test_the_generator_decides_everything():
    first, again, other = (masked(seed, rows=3)[2] for seed in (1, 1, 2))
    assert (first.ids == again.ids).all() and (first.positions == again.positions).all()
    assert not np.array_equal(first.positions, other.positions)
