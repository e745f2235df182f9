"""The rules of next-sentence pairs."""

import random
from typing import NamedTuple

import numpy as np
import pytest

from bertjax.data.instances import as_tokens, make_pairs


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
