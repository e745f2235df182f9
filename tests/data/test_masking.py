"""Masking by statistics over many seeds: 15 %, 80/10/10, limits, whole words."""

import numpy as np
import pytest

from bertjax.data.masking import mask_tokens

VOCAB, MASK, LENGTH = 1000, 4, 128


def masked(seed, length=LENGTH, **options):
    rng = np.random.default_rng(seed)
    ids = rng.integers(5, VOCAB, size=length)
    special = np.zeros(length, bool)
    special[[0, length // 2, -1]] = True
    options = {"vocab_size": VOCAB, "mask_id": MASK, **options}
    return ids, special, mask_tokens(ids, special, rng, **options)


def test_hides_15_percent_and_never_a_special_token():
    for seed in range(200):
        ids, special, masking = masked(seed)
        assert len(masking.positions) == round(0.15 * LENGTH)
        assert not special[masking.positions].any()
        assert (np.diff(masking.positions) > 0).all()
        assert (masking.labels == ids[masking.positions]).all()
        untouched = np.delete(np.arange(LENGTH), masking.positions)
        assert (masking.ids[untouched] == ids[untouched]).all()


def test_80_10_10():
    kinds = np.zeros(3)
    for seed in range(2000):
        _, _, masking = masked(seed)
        behind = masking.ids[masking.positions]
        kinds += [(behind == MASK).sum(), (behind == masking.labels).sum(), 0]
        kinds[2] += len(behind)
    # One in VOCAB random pieces is the label itself; the rest is four standard deviations of 38,000 draws.
    assert abs(kinds[0] / kinds[2] - 0.8) < 0.01
    assert abs(kinds[1] / kinds[2] - 0.1) < 0.007


def test_random_pieces_and_positions_are_uniform():
    pieces, places = np.zeros(VOCAB), np.zeros(LENGTH)
    for seed in range(4000):
        _, _, masking = masked(seed)
        behind = masking.ids[masking.positions]
        random = behind[(behind != MASK) & (behind != masking.labels)]
        pieces += np.bincount(random, minlength=VOCAB)
        places[masking.positions] += 1
    assert (pieces[5:] > 0).all() and pieces[5:].max() < 6 * pieces[5:].mean() / 2
    hidden = np.delete(places, [0, LENGTH // 2, LENGTH - 1])
    assert places[[0, LENGTH // 2, LENGTH - 1]].sum() == 0
    assert abs(hidden / hidden.mean() - 1).max() < 0.2


@pytest.mark.parametrize("length, limit, expected", [(128, 5, 5), (4, 20, 1), (8, 20, 1), (20, 20, 3)])
def test_at_least_one_and_at_most_the_limit(length, limit, expected):
    assert len(masked(0, length, max_predictions_per_seq=limit)[2].positions) == expected


def test_whole_words_are_hidden_together_or_not_at_all():
    continues = np.arange(VOCAB) % 3 == 0
    counts = []
    for seed in range(300):
        ids, special, masking = masked(seed, continues_word=continues)
        hidden = np.isin(np.arange(LENGTH), masking.positions)
        for i in range(1, LENGTH):
            if continues[ids[i]] and not special[i] and not special[i - 1]:
                assert hidden[i] == hidden[i - 1], (seed, i)
        counts.append(hidden.sum())
    assert max(counts) <= round(0.15 * LENGTH) and np.mean(counts) > 0.98 * round(0.15 * LENGTH)


def test_a_word_over_the_limit_is_passed_over():
    ids = np.array([2, 10, 11, 12, 13, 14, 15, 16, 17, 3])
    continues = np.zeros(VOCAB, bool)
    continues[11:18] = True  # one word of eight pieces
    special = np.isin(ids, [2, 3])
    masking = mask_tokens(ids, special, np.random.default_rng(0), vocab_size=VOCAB, mask_id=MASK,
                          max_predictions_per_seq=3, continues_word=continues)  # fmt: skip
    assert len(masking.positions) == 0


def test_the_generator_decides_everything():
    first, again, other = masked(1)[2], masked(1)[2], masked(2)[2]
    assert (first.ids == again.ids).all() and (first.positions == again.positions).all()
    assert not np.array_equal(first.positions, other.positions)
