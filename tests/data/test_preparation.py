"""Preparation from end to end: the same bytes for any number of workers, and nothing lost or leaked on the way."""

import collections
import contextlib
import hashlib
import itertools
import os
import pathlib
import random
import re
import resource
import shutil
import signal
import subprocess
import sys
import time

import numpy as np
import pytest

from bertjax.config import UserError, named_stages, stage
from bertjax.data import preparation, records, sorting
from bertjax.data.batches.pipeline import heldout_batches
from bertjax.data.documents import corpus, selection
from bertjax.data.documents.corpus import read_documents
from bertjax.data.documents.reading import Document
from bertjax.data.documents.selection import is_heldout, selection_of
from bertjax.data.preparation import blocks, shards
from bertjax.data.records.manifest import read_manifest
from bertjax.experiment import find_field
from bertjax.text import tokenizer
from tests.conftest import make_corpus, preparing_in_process, tiny_config

ROOT = pathlib.Path(__file__).parents[2]


def digest(folder):
    return {
        str(path.relative_to(folder)): hashlib.sha256(path.read_bytes()).hexdigest()
        for path in sorted(folder.rglob("*"))
        if path.is_file()
    }


def everything(folder, length, predictions, split):
    found = records.find_records(folder, length, predictions, split)
    batches = list(heldout_batches(found, length, predictions, batch_size=64, max_sequences=10**9))
    batch = {name: np.concatenate([b[name] for b in batches]) for name in batches[0]}
    return {name: x[: found.total] for name, x in batch.items()}


GROUP = [corpus.Group(0, ())]


def blocks_in(config, groups=None):
    groups = groups or corpus.groups([config.data.corpus])
    return blocks.read_blocks(groups, selection_of(config), collections.Counter())


def test_the_same_bytes_for_any_number_of_workers(corpus_file, records_folder, tmp_path, monkeypatch):
    """In one process, and with two others and many small blocks, so that they really take turns."""
    monkeypatch.setattr(blocks, "BLOCK_CHARACTERS", 3000)
    sizes = [len(block.selected) for block in blocks_in(tiny_config(corpus_file))]
    assert len(sizes) > 2 and min(sizes) >= min(16, sizes[-1])
    with preparing_in_process():
        preparation.prepare(tiny_config(corpus_file), tmp_path / "alone")
    preparation.prepare(tiny_config(corpus_file), tmp_path / "two", workers=2)
    assert digest(tmp_path / "alone") == digest(tmp_path / "two") != digest(records_folder)


def test_the_seed_of_the_data_decides_and_that_of_training_does_not(corpus_file, records_folder, tmp_path, in_process):
    config = tiny_config(corpus_file)
    config.seed = 5
    preparation.prepare(config, tmp_path / "training")
    assert digest(tmp_path / "training") == digest(records_folder)

    config.tokenizer.path, config.stages = str(records_folder / "vocab.txt"), named_stages(short=config.stages.short)
    heldout, rows = [], []
    for seed in (0, 5):
        config.data.update(seed=seed, heldout_fraction=0.15)
        heldout.append([block.selected for block in blocks_in(config) if block.part == "heldout"])
        config.data.heldout_fraction = 0.0  # the same documents: what differs are pairs and masks
        preparation.prepare(config, tmp_path / f"data{seed}")
        rows.append(sorted(map(tuple, everything(tmp_path / f"data{seed}", 32, 5, "train")["input_ids"])))
    assert heldout[0] != heldout[1] and rows[0] != rows[1]


def test_records_of_another_recipe_are_refused(corpus_file, records_folder):
    manifest, config = read_manifest(records_folder), tiny_config(corpus_file)
    config.seed = 5
    preparation.check_recipe(config, manifest, records_folder)
    older = {**manifest, "recipe": {name: manifest["recipe"][name] for name in ("corpus", "seed", "dupe_factor")}}
    older["recipe"]["heldout_fraction"] = config.data.heldout_fraction
    preparation.check_recipe(config, older, records_folder)
    changes = [("seed", 5), ("dupe_factor", 4), ("corpus", "other.txt"), ("next_sentence", "order")]
    for name, value in [*changes, ("masking", "dynamic")]:
        config = tiny_config(corpus_file)
        config.data[name] = value
        with pytest.raises(UserError, match=rf"config.data.{name} = .*{value}.*: the records in .* were prepared with"):
            preparation.check_recipe(config, manifest, records_folder)


def test_nothing_but_the_result_is_left(records_folder):
    names = {path.name for path in records_folder.iterdir()}
    assert names == {"manifest.json", "vocab.txt", "length32", "length64"}
    assert not list(records_folder.rglob("*.partial"))


def test_records_are_well_formed(records_folder):
    pieces = tokenizer.load("wordpiece", records_folder / "vocab.txt")
    for length, predictions in ((32, 5), (64, 10)):
        batch = everything(records_folder, length, predictions, "train")
        sizes = batch["segments"].sum(1)
        ids = batch["input_ids"]
        assert (ids[:, 0] == pieces.cls_id).all()
        assert (ids[np.arange(len(ids)), sizes - 1] == pieces.sep_id).all()
        assert (ids[batch["segments"] == 0] == pieces.pad_id).all()
        assert ((ids == pieces.sep_id).sum(1) >= 2).all()
        assert (batch["token_types"].sum(1) >= 2).all()  # at least one token and [SEP] in B
        counts = batch["word_weights"].sum(1)
        expected = np.minimum(predictions, np.maximum(1, np.round(sizes * 0.15)))
        assert (counts == expected).all()
        hidden = np.take_along_axis(ids, batch["word_positions"], 1)[batch["word_weights"] > 0]
        assert 0.75 < (hidden == pieces.mask_id).mean() < 0.85
        assert 0.4 < batch["pair_labels"].mean() < 0.7


def test_held_out_text_is_not_in_training(corpus_file, records_folder):
    fraction = tiny_config(corpus_file).data.heldout_fraction
    pieces = tokenizer.load("wordpiece", records_folder / "vocab.txt")
    documents = list(read_documents([str(corpus_file)]))
    heldout = {line for d in documents if is_heldout("\n".join(d.lines), fraction, 0) for line in d.lines}
    train = {line for d in documents if not is_heldout("\n".join(d.lines), fraction, 0) for line in d.lines}
    only_heldout = {tuple(pieces.encode(line).ids) for line in heldout - train}
    assert only_heldout

    def sentences_in(split):
        batch = everything(records_folder, 64, 10, split)
        ids = batch["input_ids"].copy()
        rows, columns = np.nonzero(batch["word_weights"])
        ids[rows, batch["word_positions"][rows, columns]] = batch["word_ids"][rows, columns]
        text = " ".join(" ".join(map(str, row)) + " |" for row in ids)
        return sum(" ".join(map(str, sentence)) in text for sentence in only_heldout)

    assert sentences_in("train") == 0 and sentences_in("heldout") > 0


def test_every_document_is_used_dupe_factor_times_and_shards_share_evenly(records_folder):
    manifest = read_manifest(records_folder)
    batch = everything(records_folder, 64, 10, "train")
    pieces = tokenizer.load("wordpiece", records_folder / "vocab.txt")
    # Tokens of the first segments and the actual next ones: each document three times, less what truncation took.
    special = np.isin(batch["input_ids"], [pieces.cls_id, pieces.sep_id, pieces.pad_id])
    actual = batch["pair_labels"][:, None] == 0
    own = ~special & (actual | (batch["token_types"] == 0)) & (batch["segments"] == 1)
    assert 0.8 < own.sum() / (3 * manifest["corpus"]["train_tokens"]) <= 1
    assert len(manifest["sets"]["64"]["train"]) == 8
    assert max(file["records"] for file in manifest["sets"]["64"]["train"].values()) < 3 * len(own) / 8


def test_whole_words_and_sentencepiece(corpus_file, tmp_path, in_process):
    config = tiny_config(corpus_file)
    config.tokenizer.kind = "sentencepiece"
    config.model.vocab_size = 80
    config.data.update(do_whole_word_mask=True, dupe_factor=1)
    config.stages = named_stages(short=stage(1, 64, 20))
    preparation.prepare(config, tmp_path)
    pieces = tokenizer.load("sentencepiece", tmp_path / "tokenizer.model")
    batch = everything(tmp_path, 64, 20, "train")
    ids = batch["input_ids"].copy()
    hidden = np.zeros(ids.shape, bool)
    rows, columns = np.nonzero(batch["word_weights"])
    ids[rows, batch["word_positions"][rows, columns]] = batch["word_ids"][rows, columns]
    hidden[rows, batch["word_positions"][rows, columns]] = True
    follows = pieces.continues_word[ids[:, 1:]] & (ids[:, :-1] != pieces.cls_id) & (ids[:, :-1] != pieces.sep_id)
    assert follows.any() and (hidden[:, 1:][follows] == hidden[:, :-1][follows]).all()


def test_a_cased_tokenizer_of_hugging_face_stays_cased(tmp_path, in_process):
    """tokenizer.json knows so itself, whatever the config's default is."""
    words = "The the Ship ship sailed home .".split()
    cased = tokenizer.WordPiece([*tokenizer.SPECIAL_PIECES, *words], lowercase=False)
    (tmp_path / "tokenizer.json").write_text(cased.to_huggingface())
    rng = random.Random(0)
    documents = [" ".join(rng.choices(words, k=9)) + "\n" + " ".join(rng.choices(words, k=9)) for _ in range(100)]
    (tmp_path / "text.txt").write_text("\n\n".join(documents))
    config = tiny_config(tmp_path / "text.txt")
    config.tokenizer.path, config.model.vocab_size = str(tmp_path / "tokenizer.json"), cased.vocab_size
    config.stages = named_stages(short=stage(1, 64, 20))
    manifest = preparation.prepare(config, tmp_path / "records")
    assert manifest["tokenizer"]["lowercase"] is False and manifest["tokenizer"]["fingerprint"] == cased.fingerprint
    hidden = everything(tmp_path / "records", 64, 20, "train")["word_ids"]
    assert (hidden == cased.pieces.index("Ship")).any() and (hidden != cased.unk_id).all()


def test_documents_are_read_as_they_are_needed(monkeypatch):
    """A corpus without end: the blocks come one by one."""
    endless = (f"document {i} has a line of its own." for i in itertools.count())
    from bertjax.data.documents.reading import Document

    monkeypatch.setattr(corpus, "read_group", lambda *_: (("x", Document("x", [t])) for t in endless))
    monkeypatch.setattr(blocks, "BLOCK_CHARACTERS", 1000)
    first = list(itertools.islice(blocks_in(tiny_config("x"), GROUP), 3))
    assert [block.number for block in first] == [(0, 0), (0, 1), (0, 2)]


@pytest.mark.parametrize(
    "text, options, message",
    [
        ("Only one document.\nWith two lines.", {"heldout_fraction": 0.0}, "gives 1 document for training"),
        (make_corpus(20), {"cleaning.min_words": 999}, r"training; .* 20 documents left out, of no words, or of fewer"),
        (make_corpus(20), {"heldout_fraction": 0.0001}, r"heldout_fraction = 0.0001: of 20 documents it holds out 0"),
        (make_corpus(20) + "\n" + "x" * 1_000_000, {}, r"text.txt:\d+: a sentence of 1,000,000 characters"),
    ],
)
def test_corpora_that_cannot_serve(tmp_path, text, options, message):
    (tmp_path / "text.txt").write_text(text)
    (tmp_path / "vocab.txt").write_text("\n".join([*tokenizer.SPECIAL_PIECES, "the", "one"]))
    config = tiny_config(tmp_path / "text.txt")
    for name, value in options.items():
        find_field(config, f"data.{name}").set(value)
    config.model.vocab_size = 7
    config.tokenizer.path = str(tmp_path / "vocab.txt")
    with pytest.raises(UserError, match=message):
        preparation.prepare(config, tmp_path / "out")
    assert not (tmp_path / "out" / "manifest.json").exists()
    assert not list((tmp_path / "out").rglob("*.tfrecord"))


def test_a_sentence_that_is_none_is_refused_before_a_vocabulary_is_learnt_from_it(tmp_path):
    (tmp_path / "text.txt").write_text(make_corpus(20) + "\n" + "x" * 1_000_000)
    with pytest.raises(UserError, match=r"text.txt:\d+: a sentence of 1,000,000 characters"):
        preparation.prepare(tiny_config(tmp_path / "text.txt"), tmp_path / "out")
    assert [path.name for path in (tmp_path / "out").iterdir()] == ["unfinished"]


def test_what_a_killed_run_left_is_cleared_away(corpus_file, tmp_path, in_process):
    left = tmp_path / "out" / "unfinished" / "another"
    left.mkdir(parents=True)
    (left / "block-0.json").write_text("{}")
    preparation.prepare(tiny_config(corpus_file), tmp_path / "out")
    assert not left.parent.exists()


def many_blocks(monkeypatch, tmp_path, documents=300):
    """A config of two sources whose corpus makes a dozen blocks, in two groups."""
    monkeypatch.setattr(blocks, "BLOCK_CHARACTERS", 8000)
    monkeypatch.setattr(corpus, "PORTION_BYTES", 10_000)
    for seed in (1, 2):
        (tmp_path / f"{seed}.txt").write_text(make_corpus(documents // 2, seed))
    config = tiny_config()
    config.data.corpus = [str(tmp_path / "1.txt"), str(tmp_path / "2.txt")]
    return config


@pytest.mark.slow
@pytest.mark.parametrize("broken", ["blocks.spill", "shards.write"])
def test_what_a_killed_run_has_finished_is_kept(monkeypatch, tmp_path, in_process, broken):
    """Stopped at every block and every shard: none is made twice, and the bytes are those of an undisturbed run."""
    config = many_blocks(monkeypatch, tmp_path)
    preparation.prepare(config, tmp_path / "undisturbed")
    monkeypatch.setattr(sorting, "READ_TOGETHER", 2)
    module, name = broken.split(".")
    module = {"blocks": blocks, "shards": shards}[module]
    original, made = {"spill": "sequences_of", "write": "write_rows"}[name], []
    make = getattr(module, original)

    class Killed(BaseException):
        pass

    def make_one(*arguments):
        if killed:
            raise Killed
        killed.append(True)
        made.append(arguments[0])
        return make(*arguments)

    monkeypatch.setattr(module, original, make_one)
    for _ in range(100):
        killed = []
        try:
            preparation.prepare(config, tmp_path / "out")
            break
        except Killed:
            assert not (tmp_path / "out" / "manifest.json").exists()
    assert len(made) > 10 and len(made) == len({str(each)[:80] for each in made})
    assert digest(tmp_path / "out") == digest(tmp_path / "undisturbed")


@pytest.mark.slow
@pytest.mark.parametrize("change", ["config", "corpus", "word"])
def test_what_a_killed_run_has_finished_is_not_kept_for_another(monkeypatch, tmp_path, in_process, change):
    config = many_blocks(monkeypatch, tmp_path)
    if change == "word":  # the vocabulary is the same
        preparation.prepare(config, tmp_path / "learnt")
        config.tokenizer.path = str(tmp_path / "learnt/vocab.txt")
    else:
        monkeypatch.setattr(sorting, "READ_TOGETHER", 2)
    write_rows, written = shards.write_rows, []

    def write_some(shard, *arguments):
        written.append(shard)
        return write_rows(shard, *arguments) if len(written) < 5 else 1 / 0

    with monkeypatch.context() as patch, pytest.raises(ZeroDivisionError):
        patch.setattr(shards, "MIN_TRAIN_SHARDS", 16)  # files of which the next run would write none
        patch.setattr(shards, "write_rows", write_some)
        preparation.prepare(config, tmp_path / "out")
    (tmp_path / "out/length32/train-00000-of-00008.tfrecord.abc.partial").write_bytes(b"half")
    assert len(list(tmp_path.glob("out/*/*.tfrecord"))) == 4
    if change == "config":
        config.data.short_seq_prob = 0.2
    elif change == "word":
        text = (tmp_path / "1.txt").read_text()
        (tmp_path / "1.txt").write_text(text.replace("saw", "left", 1))
    else:
        (tmp_path / "1.txt").write_text(make_corpus(150, seed=3))
    preparation.prepare(config, tmp_path / "out")
    preparation.prepare(config, tmp_path / "anew")
    assert digest(tmp_path / "out") == digest(tmp_path / "anew")


@pytest.mark.slow
def test_when_a_bad_document_is_mended_blocks_of_the_same_text_are_kept(monkeypatch, tmp_path, in_process):
    config = many_blocks(monkeypatch, tmp_path)
    monkeypatch.setattr(corpus, "PORTION_BYTES", 10**9)  # one group, so that the mended file is in the identity of all
    learnt = preparation.prepare(config, tmp_path / "learnt")
    config.tokenizer.path, config.model.vocab_size = str(tmp_path / "learnt/vocab.txt"), 150
    text = (tmp_path / "2.txt").read_text()
    (tmp_path / "2.txt").write_text(text + "\n" + "x" * 104_000 + "\n")
    made, sequences_of = [], blocks.sequences_of
    monkeypatch.setattr(blocks, "sequences_of", lambda block, job: made.append(block) or sequences_of(block, job))
    with pytest.raises(UserError, match=r"2.txt:\d+: a sentence of 104,000 .*--config.data.on_bad_document=skip"):
        preparation.prepare(config, tmp_path / "out")
    before = len(made)
    config.data.on_bad_document = "skip"
    preparation.prepare(config, tmp_path / "out")
    assert before > 6 and len(made) - before <= 3, "only what came after the bad document"
    shutil.rmtree(tmp_path / "out")

    config.data.on_bad_document = "stop"
    with pytest.raises(UserError, match="a sentence of 104,000"):
        preparation.prepare(config, tmp_path / "out")
    before = len(made)
    (tmp_path / "2.txt").write_text(text + "\nA mended line.\n")
    manifest = preparation.prepare(config, tmp_path / "out")
    assert len(made) - before <= 4, "only the last block of each part is another"
    preparation.prepare(config, tmp_path / "anew")
    assert digest(tmp_path / "out") == digest(tmp_path / "anew")
    assert manifest["corpus"]["train_documents"] >= learnt["corpus"]["train_documents"]


def test_bad_documents_are_left_out_and_counted(monkeypatch, tmp_path, in_process, capsys):
    config = many_blocks(monkeypatch, tmp_path)
    preparation.prepare(config, tmp_path / "clean")
    text = (tmp_path / "1.txt").read_text()
    (tmp_path / "1.txt").write_bytes(b"\xff\n\n" + text.encode() + b"\n" + b"x" * 104_000 + b"\n")
    config.data.on_bad_document = "skip"
    capsys.readouterr()
    manifest = preparation.prepare(config, tmp_path / "out")
    printed = capsys.readouterr().out
    assert manifest["cleaning"] == {"bad_documents": 2}
    assert "2 documents left out, which are no text" in printed and printed.count("left out: ") == 2
    clean = digest(tmp_path / "clean")
    assert {name: x for name, x in digest(tmp_path / "out").items() if "manifest" not in name} == {
        name: x for name, x in clean.items() if "manifest" not in name
    }


@pytest.mark.slow
def test_files_are_opened_in_proportion_to_the_corpus(monkeypatch, tmp_path, in_process):
    """And not each block for each shard."""
    monkeypatch.setattr(sorting, "READ_TOGETHER", 8)
    monkeypatch.setattr(sorting, "MERGED_BYTES", 4000)
    monkeypatch.setattr(shards, "SHARD_BYTES", 8000)
    monkeypatch.setattr(blocks, "BLOCK_CHARACTERS", 3000)
    config, opened, open_run = tiny_config(), [], sorting.open_run
    config.stages, config.data.heldout_fraction = named_stages(short=stage(1, 32, 5)), 0.0
    config.tokenizer.path = str(tmp_path / "vocab.txt")
    pieces = [*tokenizer.SPECIAL_PIECES, *"the a and saw found left near stayed . ,".split()]
    (tmp_path / "vocab.txt").write_text("\n".join(pieces + [f"x{i}" for i in range(150 - len(pieces))]))
    monkeypatch.setattr(sorting, "open_run", lambda *arguments: opened.append(arguments) or open_run(*arguments))
    counts = []
    for times in (1, 4, 16):
        (tmp_path / "text.txt").write_text(make_corpus(30 * times))
        config.data.corpus = str(tmp_path / "text.txt")
        opened.clear()
        preparation.prepare(config, tmp_path / f"out{times}")
        counts.append(len(opened) / len(list(tmp_path.glob(f"out{times}/*/*.tfrecord"))))
    assert all(count <= 2 * sorting.READ_TOGETHER for count in counts), counts
    monkeypatch.setattr(sorting, "READ_TOGETHER", 10**6)
    preparation.prepare(config, tmp_path / "unmerged")
    assert digest(tmp_path / "unmerged") == digest(tmp_path / "out16")


@pytest.mark.parametrize("document", ["blank_line", "file"])
def test_padding_and_lonely_sentences_are_told(tmp_path, in_process, capsys, document):
    """Paragraphs with blank lines between them, each a sentence."""
    for number in range(30):
        text = make_corpus(2, seed=number).replace("\n\n", "\n").replace("\n", "\n\n")
        (tmp_path / f"{number}.txt").write_text(text)
    config = tiny_config(tmp_path)
    config.data.document, config.data.heldout_fraction = document, 0.2
    config.stages, config.model.max_position_embeddings = named_stages(only=stage(4, 128, 20)), 128
    manifest = preparation.prepare(config, tmp_path / "out")
    printed, ids = capsys.readouterr().out, everything(tmp_path / "out", 128, 20, "train")["segments"]
    assert abs(manifest["real_tokens_share"]["128"] - ids.mean()) < 1e-4
    assert f"sequences of 128 tokens are on average {ids.mean():.0%} full" in printed
    is_bad = document == "blank_line"
    assert ("--config.data.next_sentence=none" in printed) == is_bad == ("no document has two sentences" in printed)
    assert ("most of a sequence of 128 is padding" in printed) == is_bad
    assert manifest["corpus"]["train_documents"] < 30 or is_bad


@pytest.mark.slow
def test_sources_are_used_as_often_as_the_mixture_says(monkeypatch, tmp_path, in_process):
    config = many_blocks(monkeypatch, tmp_path, documents=1000)
    first, second = config.data.corpus
    config.data.mixture = f"{first}=0.5,{second}=2"
    config.data.heldout_fraction = 0.0
    sources = preparation.prepare(config, tmp_path / "out")["sources"]
    assert sources[second]["documents"] == 500 * 3 * 2
    assert abs(sources[first]["documents"] - 500 * 3 * 0.5) < 4 * (500 * 0.25) ** 0.5
    config.data.mixture = f"{first}=0"
    manifest = preparation.prepare(config, tmp_path / "without")
    assert first not in manifest["sources"] and manifest["corpus"]["train_documents"] == 500


def test_a_document_that_is_not_used_is_no_random_next_segment_either(tmp_path, in_process):
    (tmp_path / "a.txt").write_text(make_corpus(100))
    (tmp_path / "b.txt").write_text(make_corpus(100, seed=1).replace("The", "Zzz"))
    config = tiny_config()
    config.data.corpus = [str(tmp_path / "a.txt"), str(tmp_path / "b.txt")]
    config.data.update(mixture=f"{tmp_path}/b.txt=0.0001", dupe_factor=1, heldout_fraction=0.0)
    (tmp_path / "vocab.txt").write_text("\n".join([*tokenizer.SPECIAL_PIECES, "the", "zzz"]))
    config.tokenizer.path, config.model.vocab_size = str(tmp_path / "vocab.txt"), 7
    manifest = preparation.prepare(config, tmp_path / "out")
    assert manifest["corpus"]["train_documents"] == manifest["sources"][str(tmp_path / "a.txt")]["documents"] == 100
    batch = everything(tmp_path / "out", 64, 10, "train")
    assert (batch["input_ids"] == 5).any() and not (batch["word_ids"] == 6).any()
    preparation.check_recipe(tiny_config_of(records=tmp_path / "out", like=config), manifest, tmp_path / "out")


def tiny_config_of(records, like):
    """A config that trains on records, and does not know their corpus."""
    config = tiny_config(records=records)
    config.data.update(dupe_factor=like.data.dupe_factor, heldout_fraction=like.data.heldout_fraction)
    return config


def test_one_held_out_document_in_each_group_is_too_few(monkeypatch, tmp_path, in_process):
    config = many_blocks(monkeypatch, tmp_path)
    monkeypatch.setattr(selection, "is_heldout", lambda text, *_: text in heldout)
    heldout = {(tmp_path / f"{seed}.txt").read_text().split("\n\n")[0] for seed in (1, 2)}
    with pytest.raises(UserError, match=r"heldout_fraction = 0.15: of 300 documents it holds out 2, but next-sentence"):
        preparation.prepare(config, tmp_path / "out")


def test_a_finished_shard_that_is_lost_is_written_again(monkeypatch, tmp_path, in_process):
    config = many_blocks(monkeypatch, tmp_path)
    preparation.prepare(config, tmp_path / "undisturbed")
    with monkeypatch.context() as patch, pytest.raises(ZeroDivisionError):
        patch.setattr(preparation, "write_manifest", lambda *_: 1 / 0)
        preparation.prepare(config, tmp_path / "out")
    (tmp_path / "out/length32/train-00003-of-00008.tfrecord").unlink()
    (tmp_path / "out/length64/train-00003-of-00008.tfrecord").write_bytes(b"cut")
    (tmp_path / "out/vocab.txt").write_text("another")
    preparation.prepare(config, tmp_path / "out")
    assert digest(tmp_path / "out") == digest(tmp_path / "undisturbed")


def processes(session: int) -> dict[int, tuple[str, int]]:
    """(command line, mask of ignored and blocked signals) of the living processes of a session."""
    found = {}
    for folder in pathlib.Path("/proc").glob("[0-9]*"):
        try:
            state, _, _, own_session = (folder / "stat").read_text().rpartition(")")[2].split()[:4]
            if int(own_session) == session and state != "Z":
                status = dict(line.split(":", 1) for line in (folder / "status").read_text().splitlines())
                masked = int(status["SigIgn"], 16) | int(status["SigBlk"], 16)
                found[int(folder.name)] = ((folder / "cmdline").read_text(), masked)
        except (FileNotFoundError, ProcessLookupError):  # it has just ended
            continue
    return found


@contextlib.contextmanager
def preparing(folder: pathlib.Path, workers: int, largest_file: int = resource.RLIM_INFINITY):
    """`bertjax.prepare` in a process, as a session of its own, on a few blocks of text; its records are in out/."""
    if not (folder / "text.txt").exists():
        (folder / "text.txt").write_text(12 * make_corpus(1_000))
    (folder / "vocab.txt").write_text("\n".join([*tokenizer.SPECIAL_PIECES, "the"]))
    options = ["data.corpus=text.txt", "tokenizer.path=vocab.txt", "model.vocab_size=6", "data.dupe_factor=1"]
    process = subprocess.Popen(
        [sys.executable, "-m", "bertjax.prepare", f"--config={ROOT / 'experiments/base.py'}", "--output=out",
         f"--workers={workers}", *(f"--config.{option}" for option in options)],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        cwd=folder,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        start_new_session=True,
    )  # fmt: skip
    resource.prlimit(process.pid, resource.RLIMIT_FSIZE, (largest_file, largest_file))  # its workers inherit it
    try:
        yield process
    finally:
        if processes(process.pid):
            os.killpg(process.pid, signal.SIGKILL)
        process.communicate()


def wait_until(condition, process):
    deadline = time.monotonic() + 300
    while not (found := condition()):
        assert time.monotonic() < deadline, (processes(process.pid), process.poll())
        time.sleep(0.01)
    return found


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="looks into /proc")
def test_ctrl_c_is_the_parents_to_answer(tmp_path):
    """A terminal sends it to all processes. No worker ever hears it, so that none prints a traceback."""
    (tmp_path / "text.txt").write_text(100 * make_corpus(1_000))  # enough for all workers to be at work
    with preparing(tmp_path, workers=4) as process:

        def workers():
            found = [ignored for line, ignored in processes(process.pid).values() if "spawn_main" in line]
            return found if len(found) == 4 else None

        ignored = wait_until(workers, process)
        assert all(signals >> signal.SIGINT - 1 & 1 for signals in ignored), ignored
        os.killpg(process.pid, signal.SIGINT)
        _, errors = process.communicate(timeout=300)
        assert (process.returncode, errors) == (130, "error: interrupted\n")
        wait_until(lambda: not processes(process.pid), process)  # the resource tracker ends just after its parent


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="looks into /proc")
def test_killed_and_started_again(tmp_path):
    """With SIGKILL, after the first block. The workers end as well, and no byte differs from an undisturbed run."""
    with preparing(tmp_path, workers=2) as process:
        wait_until(lambda: list(tmp_path.glob("out/unfinished/*/*.json")), process)
        process.kill()
        wait_until(lambda: not processes(process.pid), process)
    with preparing(tmp_path, workers=1) as process:
        output, errors = process.communicate(timeout=300)
        assert process.returncode == 0 and "going on with the unfinished preparation in out" in output, errors
    (tmp_path / "out").rename(tmp_path / "killed")
    with preparing(tmp_path, workers=2) as process:
        process.communicate(timeout=300)
    assert digest(tmp_path / "killed") == digest(tmp_path / "out")


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="looks into /proc")
def test_a_full_disk_is_one_line_and_costs_nothing(tmp_path):
    """Files may have 300 KB at first, too few for what a block spills. The blocks that are finished remain."""
    with preparing(tmp_path, workers=2, largest_file=300_000) as process:
        _, errors = process.communicate(timeout=300)
        assert process.returncode == 1
        assert re.fullmatch(r"error: out/unfinished/\w+/block-\S+: cannot be written \(File too large\)\n", errors)
        wait_until(lambda: not processes(process.pid), process)
    with preparing(tmp_path, workers=2) as process:
        output, errors = process.communicate(timeout=300)
        assert process.returncode == 0 and "going on with the unfinished preparation in out" in output, errors


def test_two_big_documents_make_a_block(monkeypatch):
    """Sixteen of them would not fit into memory."""
    monkeypatch.setattr(blocks, "BLOCK_CHARACTERS", 100)
    monkeypatch.setattr(blocks, "BIG_BLOCK_CHARACTERS", 1000)
    documents = [Document(str(i), [str(i) * size]) for i, size in enumerate([600] * 6 + [20] * 40)]
    monkeypatch.setattr(corpus, "read_group", lambda *_: (("x", document) for document in documents))
    config = tiny_config("x")
    config.data.heldout_fraction = 0.0
    sizes = [len(block.selected) for block in blocks_in(config, GROUP)]
    assert sizes[:3] == [2, 2, 2] and sum(sizes) == 46 and min(sizes[3:]) >= 16


def test_finished_records_and_a_vocabulary_of_another_size_are_refused(corpus_file, records_folder, tmp_path):
    with pytest.raises(UserError, match="already contains finished records"):
        preparation.prepare(tiny_config(corpus_file), records_folder)
    config = tiny_config(corpus_file)
    config.tokenizer.path = str(records_folder / "vocab.txt")
    config.model.vocab_size = 30522
    with pytest.raises(UserError, match=r"vocab_size = 30522: .*vocab.txt has 150 pieces"):
        preparation.prepare(config, tmp_path / "out")
    with pytest.raises(UserError, match="workers=0"):
        preparation.prepare(config, tmp_path / "out", workers=0)
