"""Vocabularies of a corpus: the same for any number of workers and as from its text, from counts in bounded memory."""

import collections

import numpy as np
import pytest

from bertjax.config import UserError
from bertjax.data.documents import corpus, sentences
from bertjax.data.documents.selection import is_heldout, selection_of
from bertjax.data.preparation import blocks, vocabulary
from bertjax.data.preparation.counts import PARTS, WordCounts, sample
from tests.conftest import tiny_config

SIZE = {"wordpiece": 120, "sentencepiece": 80}


def config_of(corpus_file, kind="wordpiece", vocab_size=None):
    config = tiny_config(corpus_file)
    config.tokenizer.kind = kind
    config.model.vocab_size = vocab_size or SIZE[kind]
    return config


@pytest.mark.parametrize("kind", ["wordpiece", "sentencepiece"])
def test_words_are_those_of_the_sentences_that_are_not_held_out(kind, corpus_file, tmp_path, monkeypatch, in_process):
    monkeypatch.setattr(blocks, "BLOCK_CHARACTERS", 3000)
    config, expected, used = config_of(corpus_file, kind), collections.Counter(), 0
    for document in corpus.read_documents([str(corpus_file)]):
        if is_heldout("\n".join(document.lines), config.data.heldout_fraction, config.data.seed):
            continue
        used += 1
        for sentence in sentences.split(document):
            if kind == "wordpiece":
                sentence = sentence.lower().replace(",", " ,").replace(".", " .")
            expected.update(sentence.split())
    groups, words = corpus.groups([config.data.corpus]), vocabulary.words_of(config)
    with vocabulary.worker_pool(1) as pool:
        counts = vocabulary.count_corpus(words, groups, selection_of(config), tmp_path, pool, 2)
    assert used < 80
    assert counts.words == expected
    assert (counts.total, counts.threshold) == (expected.total(), 1)


@pytest.mark.parametrize("kind, message", [
    ("wordpiece", "data.corpus: there are no words to learn a vocabulary from"),
    ("sentencepiece", "SentencePiece could not learn from this corpus"),
])  # fmt: skip
def test_a_corpus_without_words_is_one_line(kind, message, tmp_path, in_process):
    path = tmp_path / "empty.txt"
    path.write_text("\u200b\n\n\u200b\u200b\n")  # nothing is left of it
    with pytest.raises(UserError, match=message):
        vocabulary.learn_vocabulary(config_of(path, kind), workers=1)


def zipf_words(count=40, different=20_000) -> list[collections.Counter]:
    """Blocks of words such as "17": word n has a frequency of about 1 / n."""
    rng = np.random.default_rng(0)
    return [collections.Counter(map(str, (different ** rng.random(5000)).astype(int).tolist())) for _ in range(count)]


@pytest.mark.parametrize("room", [10**6, 3000, 1])
def test_counts_are_exact_in_memory_and_on_disk(tmp_path, room):
    counts, parts = WordCounts(tmp_path, room), zipf_words(10)
    parts.append(collections.Counter({"\ud800": 2, "a\u2028b\x0c": 1, "\x85": 3}))  # no character; no ends of lines
    for part in parts:
        counts.add(part)
    found = list(counts.parts())
    assert sum(map(len, found)) == len(set().union(*found))  # each word once
    assert sum(map(collections.Counter, found), collections.Counter()) == sum(parts, collections.Counter())
    assert any(tmp_path.iterdir()) == (room < 10**6)


def test_a_full_disk_is_one_line(tmp_path):
    for number in range(PARTS):
        (tmp_path / f"words-{number:02d}").symlink_to("/dev/full")
    with pytest.raises(UserError, match=rf"^{tmp_path}: cannot be written \(No space left on device\)$"):
        WordCounts(tmp_path, 100).add(zipf_words(1)[0])


def test_a_sample_takes_bounded_room_and_is_right_on_average():
    shares, truth = [], sum(zipf_words(4, 4000), collections.Counter())
    for trial in range(100):  # other words, hence other hashes
        words = {f"{word}.{trial:02d}": count for word, count in truth.items()}
        found = sample([words], 4700)
        assert sum(map(len, found.words)) <= 4700 < sum(map(len, words)) / 4
        assert found.threshold >= 8 and found.total == 20_000
        rare = {word for word in words if words[word] < found.threshold}
        assert all(found.words[word] == words[word] for word in words.keys() - rare)
        taken = [found.words.get(word, 0) for word in rare]
        assert set(taken) == {0, found.threshold}
        shares.append(sum(taken) / sum(words[word] for word in rare))
    assert abs(np.mean(shares) - 1) < 4 * np.std(shares) / 100**0.5 < 0.02


def test_a_sample_does_not_depend_on_order_and_parts():
    words = sum(zipf_words(4), collections.Counter())
    items, rng = list(words.items()), np.random.default_rng(0)
    whole = sample([words], 10_000)
    for count in (2, 7, 1000):
        parts = [dict(items[i] for i in some) for some in np.array_split(rng.permutation(len(items)), count)]
        assert sample(parts, 10_000) == whole
