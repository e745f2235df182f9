"""Which documents are used: held out or not, how often, and what cleaning leaves out."""

import collections
import concurrent.futures
import random

import numpy as np
import pytest

from bertjax.config import UserError
from bertjax.data import preparation
from bertjax.data.documents import cleaning, corpus
from bertjax.data.documents.selection import is_heldout, selection_of
from bertjax.lists import mixture_of
from tests.conftest import make_corpus, tiny_config


def test_held_out_documents_are_a_random_share_and_do_not_depend_on_the_rest():
    texts = [f"text {i}" for i in range(4000)]
    heldout = [text for text in texts if is_heldout(text, 0.1, seed=1)]
    assert 340 < len(heldout) < 460
    assert [text for text in texts if is_heldout(text, 0.1, seed=2)] != heldout
    assert not any(is_heldout(text, 0.0, seed=1) for text in texts)


def read(config, work=None):
    """The lines of the selected documents, and the counts; with the rules about repeats if there is a folder `work`."""
    counts, selection = collections.Counter(), selection_of(config)
    groups = corpus.groups([config.data.corpus])
    if work:
        (work / "hashes").mkdir()  # what a killed run has left
        (work / "hashes" / "documents-00000000.abc.partial").write_bytes(np.arange(2000, dtype=np.uint64).tobytes())
        with concurrent.futures.ThreadPoolExecutor(1) as pool:
            selection = preparation.with_repeats(selection, groups, str(work), pool, 2)
    return [s.document.lines for group in groups for s in selection.read(group, counts)], counts


def config_of(tmp_path, documents, **cleaning_rules):
    (tmp_path / "text.txt").write_text("\n\n".join("\n".join(lines) for lines in documents))
    config = tiny_config(tmp_path / "text.txt")
    config.data.cleaning.update(cleaning_rules)
    return config


def test_documents_that_are_hardly_text_are_left_out_and_text_is_normalized(tmp_path):
    short, long, hindi, symbols = ["one"], ["one two", "three four"], ["नमस्ते दुनिया कैसे हो"], ["== | $$ a"]
    decomposed, composed = ["cafe\u0301", "caf\u00e9"], ["caf\u00e9", "caf\u00e9"]
    for rules, given, expected, change in (
        (dict(min_words=4), [short, long, hindi, symbols], [long, hindi, symbols], "short_documents"),
        (dict(max_symbols=0.3), [short, long, hindi, symbols], [short, long, hindi], "documents_of_symbols"),
        (dict(nfc=True), [short, decomposed], [short, composed], "normalized_lines"),
    ):
        found, counts = read(config_of(tmp_path, given, **rules))
        assert (found, counts[change]) == (expected, 1)


def test_repeats_are_found_as_by_brute_force(tmp_path, monkeypatch):
    """In many pieces and ranges; a duplicate does not make its lines boilerplate."""
    monkeypatch.setattr(cleaning, "HASHED_CHARACTERS", 200)
    monkeypatch.setattr(cleaning, "RANGE_BYTES", 1000)
    rng = random.Random(0)
    documents = [[f"line {rng.randrange(400)}" for _ in range(rng.randint(1, 6))] for _ in range(300)]
    documents += [["only here", f"and {i}"] for i in (1, 1, 1, 1, 2)] + documents[:50]
    rng.shuffle(documents)
    config = config_of(tmp_path, documents, duplicate_documents=True, max_line_documents=4)
    found, counts = read(config, tmp_path)

    unique = [lines for i, lines in enumerate(documents) if lines not in documents[:i]]
    having = collections.Counter(line for lines in unique for line in set(lines))
    kept = [[line for line in lines if having[line] <= 4] for lines in unique]
    assert found == [lines for lines in kept if lines]
    assert counts["duplicate_documents"] == len(documents) - len(unique) > 50
    assert counts["repeated_lines"] == sum(map(len, unique)) - sum(map(len, kept)) > 50
    assert ["only here", "and 1"] in found


def test_near_duplicates_are_found_by_how_much_they_share(tmp_path):
    """Copies with some words replaced; what is expected follows from their Jaccard similarity, over 300 pairs each."""
    rng, width = random.Random(0), cleaning.SHINGLE_WORDS

    def shingles(words):
        return {tuple(words[i : i + width]) for i in range(len(words) - width + 1)}

    for replaced in (1, 3, 10):
        documents, expected = [], 0.0
        for _ in range(300):
            words = [f"w{rng.randrange(10**6)}" for _ in range(100)]
            copy = list(words)
            for place in rng.sample(range(100), replaced):
                copy[place] = f"w{rng.randrange(10**6)}"
            documents += [[" ".join(words)], [" ".join(copy)]]
            shared = len(shingles(words) & shingles(copy)) / len(shingles(words) | shingles(copy))
            expected += 1 - (1 - shared**cleaning.BAND_HASHES) ** cleaning.BANDS
        found, counts = read(config_of(tmp_path, documents, near_duplicates=True), tmp_path)
        assert abs(counts["near_duplicates"] - expected) < 4 * max(1, expected * (1 - expected / 300)) ** 0.5
        assert all(lines in found for lines in documents[::2])
        (tmp_path / "repeats.npz").unlink()


def test_words_are_found_where_there_are_no_spaces(tmp_path):
    assert cleaning.words_of("The man, in 我们Hello 世界") == ["The", "man,", "in", "我", "们", "Hello", "世", "界"]
    assert cleaning.words_of("สวัสดี") == ["ส", "วั", "ส", "ดี"] and cleaning.words_of("한국어 문장") == ["한국어", "문장"]
    rng = random.Random(0)
    text = "".join(chr(0x4E00 + rng.randrange(3000)) for _ in range(3000))
    copy, other = text[:1500] + "新" + text[1501:], "".join(rng.sample(text, len(text)))
    first, second, third = cleaning.bands_of([[text], [copy], [other]])
    assert (first == second).sum() > 10 and not (first == third).any()
    config = config_of(tmp_path, [["我们在北京"], ["two words"], ["我们"]], min_words=3)
    assert read(config)[0] == [["我们在北京"]]


def test_what_cleaning_did_is_in_the_manifest(tmp_path, in_process, capsys):
    (tmp_path / "text.txt").write_text(make_corpus(60) + "\nhi\n\n" + make_corpus(60))
    config = tiny_config(tmp_path / "text.txt")
    config.data.cleaning.update(min_words=2, duplicate_documents=True)
    manifest = preparation.prepare(config, tmp_path / "out")
    assert manifest["cleaning"] == {"short_documents": 1, "duplicate_documents": 60}
    assert manifest["corpus"]["train_documents"] + manifest["corpus"]["heldout_documents"] == 60
    assert "60 documents left out, with the text of an earlier one" in capsys.readouterr().out
    assert manifest["recipe"]["cleaning.min_words"] == 2


def test_mixtures_name_sources_and_weights():
    config = tiny_config()
    config.data.corpus = ["a.txt", "b=c.txt"]
    config.data.mixture = "b=c.txt=0.5"
    assert mixture_of(config) == {"a.txt": 1.0, "b=c.txt": 0.5}
    for mixture, message in (
        ("c.txt=2", r"config.data.mixture = 'c.txt=2': 'c.txt' is no source of the text, which has a.txt, b=c.txt"),
        ("a.txt", "write SOURCE=WEIGHT"),
        ("a.txt=-1", "write SOURCE=WEIGHT"),
        ("a.txt=nan", "write SOURCE=WEIGHT"),
        ("a.txt=0,b=c.txt=0", "one weight at least must be above 0"),
    ):
        config.data.mixture = mixture
        with pytest.raises(UserError, match=message):
            mixture_of(config)
