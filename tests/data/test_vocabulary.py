"""Vocabularies of a corpus: the same for any number of workers and as from its text, from counts in bounded memory."""

import collections

import numpy as np
import pytest

from bertjax.config import UserError
from bertjax.data import blocks, corpus, vocabulary
from bertjax.data.selection import is_heldout, selection_of
from bertjax.data.vocabulary import WordCounts
from bertjax.text import learning, sentences
from tests.conftest import tiny_config

SIZE = {"wordpiece": 120, "sentencepiece": 80}


@pytest.fixture
def small_blocks(monkeypatch):
    monkeypatch.setattr(blocks, "BLOCK_CHARACTERS", 3000)


def config_of(corpus_file, kind="wordpiece", vocab_size=None):
    config = tiny_config(corpus_file)
    config.tokenizer.kind = kind
    config.model.vocab_size = vocab_size or SIZE[kind]
    return config


def count(config, workers=1):
    selection = selection_of(config)
    with vocabulary.worker_pool(workers) as pool:
        groups = corpus.groups([config.data.corpus])
        return vocabulary.count_corpus(vocabulary.words_of(config), groups, selection, pool, 2 * workers)


@pytest.mark.parametrize("kind", ["wordpiece", "sentencepiece"])
def test_words_are_those_of_the_sentences_that_are_not_held_out(kind, corpus_file, small_blocks, in_process):
    config = config_of(corpus_file, kind)
    documents = [
        document
        for document in corpus.read_documents([str(corpus_file)])
        if not is_heldout("\n".join(document.lines), config.data.heldout_fraction, config.data.seed)
    ]
    expected = collections.Counter()
    for document in documents:
        for sentence in sentences.split(document):
            for word in sentence.lower().split() if kind == "wordpiece" else sentence.split():
                expected.update(word.replace(",", " ,").replace(".", " .").split() if kind == "wordpiece" else [word])
    counts = count(config)
    assert len(documents) < 80
    assert counts.words == expected
    assert counts.total == expected.total()
    assert counts.threshold == 1


def test_any_number_of_workers_learns_the_same(corpus_file, small_blocks, monkeypatch):
    monkeypatch.setitem(learning.COUNTED_LETTERS, "wordpiece", 150)  # of 330: so that some are left out
    found = [count(config_of(corpus_file), workers) for workers in (1, 2)]
    assert found[0].words == found[1].words
    assert found[0].threshold > 1


@pytest.mark.parametrize(
    "kind, message",
    [
        ("wordpiece", "data.corpus: there are no words to learn a vocabulary from"),
        ("sentencepiece", "SentencePiece could not learn from this corpus"),
    ],
)
def test_a_corpus_without_words_is_one_line(kind, message, tmp_path, in_process):
    path = tmp_path / "empty.txt"
    path.write_text("\u200b\n\n\u200b\u200b\n")  # nothing is left of it
    with pytest.raises(UserError, match=message):
        vocabulary.learn_vocabulary(config_of(path, kind), workers=1)


def zipf_words(seed: int) -> list[collections.Counter]:
    """Blocks of words such as "17": word n has a frequency of about 1 / n."""
    rng = np.random.default_rng(seed)
    return [collections.Counter(map(str, (20_000 ** rng.random(5000)).astype(int).tolist())) for _ in range(40)]


def test_counts_are_exact_while_all_words_fit():
    counts, parts = WordCounts(10**6), zipf_words(0)
    for part in parts:
        counts.add(part)
    assert counts.words == sum(parts, collections.Counter())
    assert counts.threshold == 1


def test_counts_take_bounded_room_and_are_right_on_average():
    errors, shares = collections.defaultdict(list), []
    for seed in range(12):
        counts, truth = WordCounts(12_000), collections.Counter()
        for part in zipf_words(seed):
            counts.add(part)
            truth += part
            assert sum(map(len, counts.words)) <= 12_000
        assert sum(map(len, truth)) > 4 * 12_000
        assert counts.threshold >= 8
        assert counts.total == truth.total() == 200_000
        for word in map(str, range(1, 50)):  # frequent
            errors[word].append((counts.words[word] - truth[word]) / counts.threshold)
        rare = [word for word in truth if truth[word] < counts.threshold]
        shares.append(sum(counts.words.get(word, 0) for word in rare) / sum(truth[word] for word in rare))
    assert np.abs(np.concatenate(list(errors.values()))).max() < 6
    assert abs(np.mean(np.concatenate(list(errors.values())))) < 0.2
    assert abs(np.mean(shares) - 1) < 0.02


@pytest.mark.parametrize("kind", ["wordpiece", "sentencepiece"])
def test_a_large_corpus_gives_nearly_the_pieces_of_all_its_text(kind, corpus_file, monkeypatch, in_process):
    config = config_of(corpus_file, kind)
    whole = vocabulary.learn_vocabulary(config, workers=1)
    monkeypatch.setitem(learning.TRAINING_BYTES, kind, 6000)  # a tenth
    part = vocabulary.learn_vocabulary(config, workers=1)
    assert whole.pieces != part.pieces
    assert len(set(whole.pieces) & set(part.pieces)) > 0.85 * SIZE[kind]
