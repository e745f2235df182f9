"""Masking by statistics over many seeds: 15 %, 80/10/10, limits, whole words, spans; and independence of rows."""

import dataclasses
import itertools

import numpy as np
import pytest

from bertjax.data.loading.masking import TokenMasking

VOCAB, MASK, CLS, SEP, LENGTH = 1000, 4, 2, 3, 128
MASKING = TokenMasking(0.15, (0.8, 0.1, 0.1), 20, VOCAB, MASK, CLS, SEP)
CONTINUES = np.arange(VOCAB) % 3 == 0
SINGLE = np.zeros(VOCAB, bool)  # each word is one token
TOKENS, WORDS, SPANS = {}, {"continues_word": CONTINUES}, {"continues_word": CONTINUES, "spans": True}


def masked(seed, length=LENGTH, rows=1, **options):
    """Makes rows of random tokens with [CLS] and two [SEP]."""
    rng = np.random.default_rng(seed)
    ids = rng.integers(5, VOCAB, size=(rows, length), dtype=np.int32)
    ids[:, 0], ids[:, [length // 2, length - 1]] = CLS, SEP
    rules = dataclasses.replace(MASKING, **options)
    masking = rules.mask(ids, np.full(rows, length), rules.draw(rng, rows, length))
    return ids, np.isin(ids, [CLS, SEP]), masking


def selected(ids, masking):
    """Returns the masked positions, booleans `[rows, length]`."""
    chosen = np.zeros(ids.shape, bool)
    for row, count in enumerate(masking.counts):
        chosen[row, masking.positions[row, :count]] = True
    return chosen


def test_fifteen_percent_are_masked_and_no_special_token():
    ids, special, masking = masked(0, rows=500)
    chosen, used = selected(ids, masking), np.arange(20) < masking.counts[:, None]
    assert (masking.counts == round(0.15 * LENGTH)).all() and not chosen[special].any()
    assert (np.diff(masking.positions)[used[:, 1:]] > 0).all()
    assert (masking.labels == np.where(used, np.take_along_axis(ids, masking.positions, 1), 0)).all()
    assert not masking.positions[~used].any() and (masking.ids == ids)[~chosen].all()


@pytest.mark.parametrize("limit", [1, 10, 20])
def test_padding_is_never_masked_and_not_counted(limit):
    ids = np.full((300, LENGTH), 7, np.int32)
    ids[:, 0] = CLS
    sizes, rules = np.arange(300) % (LENGTH - 1) + 2, dataclasses.replace(MASKING, max_predictions_per_seq=limit)
    masked_rows = rules.mask(ids, sizes, rules.draw(np.random.default_rng(0), 300, LENGTH))
    assert (masked_rows.counts == np.clip(np.rint(0.15 * sizes), 1, limit)).all()
    assert (masked_rows.positions < sizes[:, None]).all() and masked_rows.positions.shape == (300, limit)


@pytest.mark.parametrize("split", [(0.8, 0.1, 0.1), (1.0, 0.0, 0.0), (0.5, 0.2, 0.3), (0.0, 1.0, 0.0)])
@pytest.mark.parametrize("words", [TOKENS, WORDS, SPANS])
def test_eighty_ten_ten_split_of_masked_tokens(split, words):
    _, _, masking = masked(0, rows=3000, split=split, **words)
    used = np.arange(20) < masking.counts[:, None]
    behind = np.take_along_axis(masking.ids, masking.positions, axis=1)[used]
    # One in VOCAB random tokens is the label itself. The tolerance is four standard deviations of 9,000 spans or more.
    tolerance = 0.02 if "spans" in words else 0.008
    assert abs((behind == MASK).mean() - split[0]) < tolerance
    assert abs((behind == masking.labels[used]).mean() - split[2]) < tolerance


@pytest.mark.parametrize("spans", [False, True])
def test_whole_words_are_masked_together(spans):
    ids, special, masking = masked(2, rows=500, continues_word=CONTINUES, spans=spans)
    hidden = selected(ids, masking)
    inside = CONTINUES[ids[:, 1:]] & ~special[:, 1:] & ~special[:, :-1]
    np.testing.assert_array_equal(hidden[:, 1:][inside], hidden[:, :-1][inside])
    assert masking.counts.max() <= round(0.15 * LENGTH) and masking.counts.mean() > 0.98 * round(0.15 * LENGTH)
    assert not hidden[special].any()
    # Long words are as likely as short words, except words that no longer fit.
    first = ~CONTINUES[ids] & ~special
    long = first[:, :-1] & inside
    assert 0.75 < hidden[:, :-1][long].mean() / hidden[:, :-1][first[:, :-1] & ~long].mean() < 1.1


def test_a_word_over_the_limit_is_skipped():
    ids = np.array([[CLS, 10, 11, 12, 13, 14, 15, 16, 17, SEP]], np.int32)
    continues = np.isin(np.arange(VOCAB), range(11, 18))  # one word of eight tokens
    for spans in (False, True):
        rules = dataclasses.replace(MASKING, max_predictions_per_seq=3, continues_word=continues, spans=spans)
        draws = rules.draw(np.random.default_rng(0), 1, 10)
        assert rules.mask(ids, np.array([10]), draws).counts.tolist() == [0]


def test_span_lengths_follow_spanbert():
    """Spans that seldom meet have 1 to 10 words, 3.8 on average, with the frequencies of SpanBERT's figure 2."""
    ids, _, masking = masked(
        0, 8192, rows=200, masked_lm_prob=0.02, max_predictions_per_seq=164, continues_word=SINGLE, spans=True
    )
    assert (masking.counts == 164).all()
    runs = [len(list(run)) for row in selected(ids, masking) for value, run in itertools.groupby(row) if value]
    shares = np.bincount(runs)[1:11] / len(runs)
    np.testing.assert_allclose(shares, 0.2 * 0.8 ** np.arange(10) / (1 - 0.8**10), atol=0.02)
    assert 3.65 < np.mean(runs) < 3.95


def test_tokens_of_a_span_share_one_replacement_kind():
    shares = dict(split=(0.5, 0.4, 0.1), masked_lm_prob=0.5, max_predictions_per_seq=10)
    rules = dataclasses.replace(MASKING, **shares, continues_word=SINGLE, spans=True)
    ids = np.random.default_rng(0).integers(5, VOCAB, size=(1000, LENGTH), dtype=np.int32)
    draws = rules.draw(np.random.default_rng(1), 1000, LENGTH)
    random_tokens = draws["random_tokens"] % 900 + 50  # without [MASK]
    draws |= dict(span_words=np.full_like(draws["span_words"], 10), random_tokens=random_tokens)
    masking = rules.mask(ids, np.full(1000, LENGTH), draws)
    whole = masking.positions[:, -1] < LENGTH - 1  # the other spans met the end of the row
    assert whole.mean() > 0.9 and (masking.positions[whole, -1] - masking.positions[whole, 0] == 9).all()
    behind = np.take_along_axis(masking.ids, masking.positions, 1)[whole]
    hidden, kept = (behind == MASK).sum(1), (behind == masking.labels[whole]).sum(1)
    assert np.isin(hidden, [0, 10]).all() and abs((hidden == 10).mean() - 0.5) < 0.06
    assert abs((kept == 10).mean() - 0.1) < 0.04
    replaced = behind[(hidden == 0) & (kept < 5)]
    assert len(replaced) and (np.array([len(set(row)) for row in replaced.tolist()]) > 6).all()  # separate tokens


def test_empty_batches_and_rows_without_text_have_no_masks():
    for words in (TOKENS, WORDS, SPANS):
        rules = dataclasses.replace(MASKING, **words)
        for ids in (np.zeros((0, 8), np.int32), np.array([[CLS, SEP, 0, 0, 7, 7, 7, 7]], np.int32)):
            draws = rules.draw(np.random.default_rng(0), len(ids), 8)
            masking = rules.mask(ids, np.full(len(ids), 2), draws)
            assert (masking.ids == ids).all() and masking.positions.shape == (len(ids), 20) and not masking.counts.any()
