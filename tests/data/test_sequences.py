"""The rules of next-sentence pairs, of segments in order and of full sentences; and the rows of records."""

import itertools
import random
from typing import NamedTuple

import numpy as np
import pytest

from bertjax.config.defaults import pretraining_config
from bertjax.data.preprocessing.job import Job, RecordShape
from bertjax.data.preprocessing.rows import make_rows
from bertjax.data.preprocessing.sequences import as_tokens, make_full_sentences, make_ordered, make_pairs, separated
from bertjax.text.tokenizer import SPECIAL_TOKENS, WordPiece


def documents(number=6, sentences=30, seed=0):
    """Every token encodes its document and its position: document * 10,000 + position."""
    sizes = np.random.default_rng(seed).integers(3, 25, (number, sentences))
    starts = np.cumsum(sizes, 1) - sizes + 10_000 * np.arange(number)[:, None]
    return [[[*range(a, a + n)] for a, n in zip(*rows)] for rows in zip(starts.tolist(), sizes.tolist())]


class Segments(NamedTuple):
    first: list[int]
    second: list[int]
    label: bool


def joined(docs):
    """Converts documents, lists of sentences that are lists of tokens, to `Tokens`."""
    sentences = [sentence for document in docs for sentence in document]
    ids = np.array([token for sentence in sentences for token in sentence])
    return as_tokens(ids, np.array([len(sentence) for sentence in sentences]), [len(document) for document in docs])


def pairs(docs, index, seed, length=64, short_seq_prob=0.0):
    tokens, rng = joined(docs), random.Random(seed)
    made = make_pairs(tokens, index, rng, length=length, short_seq_prob=short_seq_prob)
    return [Segments(tokens.ids[first(p)].tolist(), tokens.ids[second(p)].tolist(), p.label) for p in made]


def first(pair) -> slice:
    return slice(pair.first_start, pair.first_start + pair.first_size)


def second(pair) -> slice:
    return slice(pair.second_start, pair.second_start + pair.second_size)


def test_empty_sentences_and_documents_are_skipped():
    tokens = joined([[[1, 2], [], [3]], [[], []], [], [[4, 5, 6]]])
    assert tokens.ids.tolist() == [1, 2, 3, 4, 5, 6]
    assert tokens.starts == [0, 2, 3, 6] and tokens.documents == [0, 2, 3]
    assert joined([]).documents == [0]


def test_half_of_the_pairs_are_random_next_and_half_are_consecutive():
    docs, labels, random_documents = documents(), [], set()
    for seed, short in itertools.product(range(300), (0.0, 0.5)):
        for pair in pairs(docs, 2, seed, length=128, short_seq_prob=short):
            assert pair.first and pair.second and len(pair.first) + len(pair.second) <= 125
            first, second = np.array(pair.first), np.array(pair.second)
            assert set(first // 10_000) == {2} and len(set(second // 10_000)) == 1
            assert (np.diff(first) == 1).all() and (np.diff(second) == 1).all()
            # otherwise many segments would be a single sentence, which is always followed by a random segment
            if not short:
                labels.append(pair.label)
            if pair.label:
                random_documents.add(second[0] // 10_000)
            else:
                assert second[0] // 10_000 == 2 and second[0] > first[-1]
    assert abs(np.mean(labels) - 0.5) < 0.05
    assert random_documents == {0, 1, 3, 4, 5}


def ordered(docs, index, seed, length=64, short_seq_prob=0.0):
    return list(make_ordered(joined(docs), index, random.Random(seed), length=length, short_seq_prob=short_seq_prob))


def used(pair):
    return sorted([*range(10**6)[first(pair)], *range(10**6)[second(pair)]])


def test_segments_in_order_cover_the_document_and_half_are_swapped():
    docs, labels = documents(), []
    begin, end = (joined(docs).starts[30 * number] for number in (2, 3))  # tokens of document 2
    for seed in range(50):
        whole = [place for segments in ordered(docs, 2, seed, length=100_000) for place in used(segments)]
        assert whole == list(range(begin, end))
        segments = ordered(docs, 2, seed)
        for pair in segments:
            before, after = (second, first) if pair.label else (first, second)
            assert pair.first_size and pair.second_size and before(pair).stop == after(pair).start
            labels.append(pair.label)
        rows = [[begin - 1], *map(used, segments), [end]]
        for row, following in itertools.pairwise(rows):
            assert row == list(range(row[0], row[-1] + 1))
            lost = following[0] - row[-1] - 1
            assert lost == 0 or (lost > 0 and 61 in (len(row), len(following)))  # cut off from a full sequence
            assert len(row) <= 61
    assert abs(np.mean(labels) - 0.5) < 0.05


def test_a_single_sentence_is_split_at_any_token():
    splits = [ordered([[[*range(40)]]], 0, seed)[0] for seed in range(2000)]
    assert all(used(pair) == list(range(40)) for pair in splits)
    at = np.bincount([max(pair.first_start, pair.second_start) for pair in splits], minlength=40)
    assert len(at) == 40 and at[0] == 0 and (at[1:] > 20).all()


def test_a_single_token_is_skipped():
    assert ordered([[[7]]], 0, 0) == []
    assert [len(used(pair)) for pair in ordered([[[1] * 61, [2]]], 0, 0)] == [61]


def full(docs, seed, length=64, short_seq_prob=0.0, sep=-1):
    tokens = separated(joined(docs), sep)
    sequences = list(make_full_sentences(tokens, random.Random(seed), length=length, short_seq_prob=short_seq_prob))
    assert not any(f.second_size or f.label for f in sequences)
    return [tokens.ids[f.first_start : f.first_start + f.first_size].tolist() for f in sequences]


@pytest.mark.parametrize("length", [8, 64, 1000])
@pytest.mark.parametrize("short_seq_prob", [0.0, 0.5])
def test_full_sentences_reproduce_the_text_with_separators_between_documents(length, short_seq_prob):
    docs = documents()
    for seed in range(10):
        rows = full(docs, seed, length, short_seq_prob)
        assert all(0 < len(row) <= length - 2 and row[0] != -1 and row[-1] != -1 for row in rows)
        tokens = [token for row in rows for token in row if token != -1]
        assert tokens == [token for document in docs for sentence in document for token in sentence]
        for row in rows:  # a separator at every change of the document, and at no other position
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
    first, second = ({*map(tuple, full(docs, seed, short_seq_prob=0.1))} for seed in (1, 2))
    assert len(first & second) < 0.7 * len(first)  # copies of the text differ


def test_only_a_sentence_longer_than_the_sequence_is_cut():
    docs = [[[1, 2], [*range(10, 30)], [3]], [[4]]]
    assert full(docs, 0, 10) == [[1, 2], [*range(10, 18)], [*range(18, 26)], [26, 27, 28, 29, 3, -1, 4]]


# Rows: from tokens to the values of a record.


PIECES = WordPiece([*SPECIAL_TOKENS, *(f"word{i}" for i in range(300))], lowercase=True)
STAGE = RecordShape(32, 5)


def rows_of(seed=0, documents=8, used=None, **options):
    config = pretraining_config()
    config.data.update(**{"short_seq_prob": 0.1, **options})
    job = Job((STAGE,), config.data.to_dict(), (), PIECES.vocab_size, PIECES.fingerprint, (), "", "")
    rng = np.random.default_rng(0)
    sizes = rng.integers(1, 12, size=20 * documents)
    tokens = as_tokens(rng.integers(5, 305, size=sizes.sum(), dtype=np.int32), sizes, [20] * documents)
    used = np.arange(documents) if used is None else np.array(used)
    return tokens, make_rows(tokens, used, STAGE, job, PIECES, [seed])[0]


@pytest.mark.parametrize("next_sentence", ["pairs", "order", "none"])
@pytest.mark.parametrize("masking", ["static", "dynamic"])
def test_rows_are_well_formed(next_sentence, masking):
    _, rows = rows_of(next_sentence=next_sentence, masking=masking)
    place, size = np.arange(STAGE.length), rows["size"][:, None]
    separators = rows["ids"] == PIECES.sep_id
    assert (rows["ids"][:, 0] == PIECES.cls_id).all() and ((rows["ids"] == PIECES.cls_id).sum(1) == 1).all()
    assert ((rows["ids"] == PIECES.pad_id) == (place >= size)).all()
    assert separators[place == size - 1].all()
    if next_sentence == "none":
        assert (rows["first_size"] == rows["size"]).all() and not rows["label"].any()
    else:
        assert (separators.sum(1) == 2).all() and separators[place == rows["first_size"][:, None] - 1].all()
        assert 0.3 < rows["label"].mean() < 0.8
    if masking == "static":
        assert (rows["masked"] == np.clip(np.rint(rows["size"] * 0.15), 1, 5)).all()
        assert 0.7 < (np.take_along_axis(rows["ids"], rows["positions"], 1)[:, 0] == PIECES.mask_id).mean() < 0.9
    else:
        assert not {"positions", "labels", "masked"} & set(rows.dtype.names)
        assert (rows["ids"] != PIECES.mask_id).all()


@pytest.mark.parametrize("next_sentence", ["order", "none"])
def test_sequences_can_use_a_selection_of_documents(next_sentence):
    """A mixture uses some documents more often than other documents."""
    tokens, rows = rows_of(used=[1, 4, 5], next_sentence=next_sentence, masking="dynamic", short_seq_prob=0.0)
    ids = rows["ids"][np.arange(STAGE.length) < rows["size"][:, None]]
    counts = np.bincount(ids[ids >= 5], minlength=305)
    selected = [tokens.ids[tokens.starts[20 * i] : tokens.starts[20 * i + 20]] for i in (1, 4, 5)]
    expected = np.bincount(np.concatenate(selected), minlength=305)
    assert (counts <= expected).all() and counts.sum() > 0.8 * expected.sum()
    assert next_sentence == "order" or (counts == expected).all()


def test_one_document_gives_rows_unless_random_next_needs_another():
    for next_sentence in ("order", "none"):
        assert len(rows_of(documents=1, next_sentence=next_sentence)[1])
        assert not len(rows_of(documents=0, next_sentence=next_sentence)[1])
