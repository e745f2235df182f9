"""The rules of next-sentence pairs, of segments in order, and of full sentences."""

import itertools
import random
from typing import NamedTuple

import numpy as np
import pytest

from bertjax.data.preparation.instances import (
    as_tokens,
    make_full_sentences,
    make_instances,
    make_ordered,
    make_pairs,
    separated,
)


def documents(number=6, sentences=30, seed=0):
    """Every token tells its document and its place: document * 10,000 + position."""
    rng = np.random.default_rng(seed)
    result = []
    for d in range(number):
        place, document = 0, []
        for _ in range(sentences):
            size = int(rng.integers(3, 25))
            document.append([d * 10_000 + place + i for i in range(size)])
            place += size
        result.append(document)
    return result


class Segments(NamedTuple):
    first: list[int]
    second: list[int]
    label: bool


def joined(docs):
    """Documents as lists of sentences as lists of tokens -> `Tokens`."""
    sentences = [sentence for document in docs for sentence in document]
    ids = np.array([token for sentence in sentences for token in sentence])
    return as_tokens(ids, np.array([len(sentence) for sentence in sentences]), [len(document) for document in docs])


def pairs(docs, index, seed, length=64, short_seq_prob=0.0):
    tokens, rng = joined(docs), random.Random(seed)
    return [
        Segments(
            tokens.ids[p.first_start : p.first_start + p.first_size].tolist(),
            tokens.ids[p.second_start : p.second_start + p.second_size].tolist(),
            p.label,
        )
        for p in make_pairs(tokens, index, rng, length=length, short_seq_prob=short_seq_prob)
    ]


def test_sentences_without_tokens_and_documents_without_sentences_are_left_out():
    tokens = joined([[[1, 2], [], [3]], [[], []], [], [[4, 5, 6]]])
    assert tokens.ids.tolist() == [1, 2, 3, 4, 5, 6]
    assert tokens.starts == [0, 2, 3, 6] and tokens.documents == [0, 2, 3]
    assert joined([]).documents == [0]


def test_pairs_fit_and_each_segment_has_a_token():
    docs = documents()
    for seed in range(50):
        for pair in pairs(docs, seed % 6, seed, short_seq_prob=0.5):
            assert pair.first and pair.second
            assert len(pair.first) + len(pair.second) <= 61


def test_random_next_comes_from_another_document_and_actual_next_follows():
    docs = documents()
    for seed in range(100):
        for pair in pairs(docs, 2, seed):
            first, second = np.array(pair.first), np.array(pair.second)
            assert set(first // 10_000) == {2}
            assert (np.diff(first) == 1).all() and (np.diff(second) == 1).all()
            if pair.label:
                assert 2 not in set(second // 10_000) and len(set(second // 10_000)) == 1
            else:
                assert set(second // 10_000) == {2} and second[0] > first[-1]


def test_half_are_random_next_and_all_other_documents_serve():
    docs, labels, others = documents(), [], set()
    for seed in range(400):
        for pair in pairs(docs, 3, seed, length=128):
            labels.append(pair.label)
            others |= {pair.second[0] // 10_000} if pair.label else set()
    assert abs(np.mean(labels) - 0.5) < 0.05
    assert others == {0, 1, 2, 4, 5}


def test_single_sentences_are_always_random_next():
    docs = [[[10_000 * d + i for i in range(80)]] for d in range(3)]
    assert all(pair.label for seed in range(50) for pair in pairs(docs, 0, seed))


def test_unused_sentences_are_put_back():
    """Where nothing is cut off, the first segments and the actual next ones use every sentence exactly once."""
    docs = documents(sentences=40)
    for seed in range(100):
        used = []
        for pair in pairs(docs, 1, seed, length=100_000 if seed % 2 else 64):
            used += pair.first + ([] if pair.label else pair.second)
        whole = [token for sentence in docs[1] for token in sentence]
        assert len(used) == len(set(used)) and set(used) <= set(whole)
        if seed % 2:
            assert sorted(used) == whole


def test_truncation_takes_from_the_longer_segment_at_both_ends():
    docs = [[list(range(50)), [100 + i for i in range(200)]], [[10_000 + i for i in range(300)]]]
    fronts, backs = 0, 0
    for seed in range(200):
        for pair in pairs(docs, 0, seed):
            if len(pair.first) + len(pair.second) == 61:
                assert abs(len(pair.first) - len(pair.second)) <= 1 or len(pair.first) in (50, 11)
                if not pair.label:
                    fronts += pair.second[0] - 100
                    backs += 299 - pair.second[-1]
    assert fronts > 0 and backs > 0 and abs(fronts / backs - 1) < 0.1


@pytest.mark.parametrize("length", [64, 128])
def test_short_sequences_come_as_often_as_asked(length):
    docs, short = documents(number=40, sentences=60), []
    for seed in range(400):
        first = pairs(docs, seed % 40, seed, length=length, short_seq_prob=0.1)[0]
        short.append(len(first.first) + len(first.second) < length - 3)
    # Drawn uniformly, the target is below the full length nearly always; the rest comes from the sentences' own ends.
    assert 0.06 < np.mean(short) < 0.16


def ordered(docs, index, seed, length=64, short_seq_prob=0.0):
    return list(make_ordered(joined(docs), index, random.Random(seed), length=length, short_seq_prob=short_seq_prob))


def test_segments_in_order_are_consecutive_and_half_are_swapped():
    docs, labels = documents(), []
    for seed in range(300):
        for found in ordered(docs, 2, seed, short_seq_prob=0.2):
            assert found.first_size and found.second_size and found.first_size + found.second_size <= 61
            if found.label:
                assert found.second_start + found.second_size == found.first_start
            else:
                assert found.first_start + found.first_size == found.second_start
            labels.append(found.label)
    assert abs(np.mean(labels) - 0.5) < 0.03


def used(found):
    first = range(found.first_start, found.first_start + found.first_size)
    return sorted([*first, *range(found.second_start, found.second_start + found.second_size)])


def test_segments_in_order_cover_their_document_and_no_other():
    docs = documents()
    first, last = 30 * 2, 30 * 3  # sentences of document 2
    starts = joined(docs).starts
    for seed in range(50):
        whole = [place for found in ordered(docs, 2, seed, length=100_000) for place in used(found)]
        assert whole == list(range(starts[first], starts[last]))
        rows = [[starts[first] - 1], *(used(found) for found in ordered(docs, 2, seed)), [starts[last]]]
        for row, following in itertools.pairwise(rows):
            assert row == list(range(row[0], row[-1] + 1))
            lost = following[0] - row[-1] - 1
            assert lost == 0 or (lost > 0 and 61 in (len(row), len(following)))  # cut off from a full sequence


def test_a_single_sentence_is_split_at_any_token():
    splits = [ordered([[[*range(40)]]], 0, seed)[0] for seed in range(2000)]
    assert all(used(found) == list(range(40)) for found in splits)
    at = np.bincount([max(found.first_start, found.second_start) for found in splits], minlength=40)
    assert len(at) == 40 and at[0] == 0 and (at[1:] > 20).all()


def test_a_single_token_is_left_out():
    assert ordered([[[7]]], 0, 0) == []
    assert [len(used(found)) for found in ordered([[[1] * 61, [2]]], 0, 0)] == [61]


def full(docs, seed, length=64, short_seq_prob=0.0, sep=-1):
    tokens = separated(joined(docs), sep)
    found = list(make_full_sentences(tokens, random.Random(seed), length=length, short_seq_prob=short_seq_prob))
    assert not any(f.second_size or f.label for f in found)
    return [tokens.ids[f.first_start : f.first_start + f.first_size].tolist() for f in found]


@pytest.mark.parametrize("length", [8, 64, 1000])
@pytest.mark.parametrize("short_seq_prob", [0.0, 0.5])
def test_full_sentences_give_back_the_text_with_documents_separated(length, short_seq_prob):
    docs = documents()
    for seed in range(10):
        rows = full(docs, seed, length, short_seq_prob)
        assert all(0 < len(row) <= length - 2 and row[0] != -1 and row[-1] != -1 for row in rows)
        tokens = [token for row in rows for token in row if token != -1]
        assert tokens == [token for document in docs for sentence in document for token in sentence]
        for row in rows:  # a separator wherever the document changes, and nowhere else
            parts = [part for part, _ in itertools.groupby(token // 10_000 for token in row)]  # -1: a separator
            numbers = range(parts[0], parts[-1] + 1)
            assert parts == [part for number in numbers for part in (-1, number)][1:]


def test_full_sentences_fill_the_sequence_and_begin_with_a_sentence():
    docs = documents()
    begins = {sentence[0] for document in docs for sentence in document}
    rows = full(docs, 0)
    assert all(row[0] in begins for row in rows)
    for row, following in itertools.pairwise(rows):
        sentence = next(i for i in range(1, len(following) + 1) if i == len(following) or following[i] in begins | {-1})
        separator = following[0] // 10_000 != row[-1] // 10_000
        assert len(row) + separator + sentence > 62  # the next sentence had no room
    assert any(-1 in row for row in rows)


def test_only_a_sentence_longer_than_the_sequence_is_cut():
    docs = [[[1, 2], [*range(10, 30)], [3]], [[4]]]
    assert full(docs, 0, 10) == [[1, 2], [*range(10, 18)], [*range(18, 26)], [26, 27, 28, 29, 3, -1, 4]]


def test_copies_of_full_sentences_differ_if_some_are_short():
    docs = documents()
    assert full(docs, 1) == full(docs, 2)
    first, second = full(docs, 1, short_seq_prob=0.1), full(docs, 2, short_seq_prob=0.1)
    assert len({*map(tuple, first)} & {*map(tuple, second)}) < 0.7 * len(first)


def test_one_document_is_enough_for_order_and_full_sentences():
    tokens = joined(documents(1))
    for name, given in (("order", tokens), ("none", separated(tokens, -1))):
        assert list(make_instances(given, [0], name, random.Random(0), length=64, short_seq_prob=0.1))
