"""Preparation from end to end: deterministic bytes with any number of workers, no lost or leaked text; vocabularies."""

import bz2
import collections
import contextlib
import hashlib
import random
import re

import numpy as np
import pytest

from bertjax.common import sorting
from bertjax.common.errors import UserError
from bertjax.config.defaults import named_stages, stage
from bertjax.data.corpus import corpus, selection, sentences
from bertjax.data.preprocessing import blocks, preparation, shards, vocabulary
from bertjax.data.preprocessing.word_counts import PARTS, WordCounts, sample_words
from bertjax.data.records import record_sets
from bertjax.data.records.manifest import read_manifest
from bertjax.launch.overrides import find_field
from bertjax.text import tokenizer, vocabulary_learning
from tests.conftest import heldout_batches, make_corpus, preparing_in_process, tiny_config


def digest(folder):
    return {
        str(path.relative_to(folder)): hashlib.sha256(path.read_bytes()).hexdigest()
        for path in sorted(folder.rglob("*"))
        if path.is_file()
    }


def everything(folder, length, predictions, split):
    record_set = record_sets.find_records(folder, length, predictions, split)
    batches = list(heldout_batches(record_set, length, predictions, batch_size=64, max_sequences=10**9))
    batch = {name: np.concatenate([b[name] for b in batches]) for name in batches[0]}
    return {name: x[: record_set.total] for name, x in batch.items()}


def blocks_in(config, groups=None):
    groups = groups or corpus.groups([config.data.corpus])
    return blocks.read_blocks(groups, selection.selection_of(config), collections.Counter())


def test_any_number_of_workers_writes_identical_bytes(corpus_file, tmp_path, monkeypatch, capsys):
    """Compares one process with three processes and many small blocks, so that the processes take turns."""
    monkeypatch.setattr(blocks, "BLOCK_CHARACTERS", 3000)
    monkeypatch.setitem(vocabulary_learning.COUNTED_LETTERS, "wordpiece", 200)  # of 330
    config = tiny_config(corpus_file)
    config.model.vocab_size = 110
    sizes = [len(block.selected) for block in blocks_in(config)]
    assert len(sizes) > 2 and min(sizes) >= min(16, sizes[-1])
    with preparing_in_process():
        preparation.prepare(config, tmp_path / "alone")
    preparation.prepare(config, tmp_path / "two", workers=2)
    assert digest(tmp_path / "alone") == digest(tmp_path / "two")
    assert capsys.readouterr().out.count("; a sample of words rarer than ") == 2


def test_records_depend_on_the_data_seed_and_not_on_the_training_seed(
    corpus_file, records_folder, tmp_path, in_process
):
    config = tiny_config(corpus_file)
    config.seed = 5
    preparation.prepare(config, tmp_path / "training")
    assert digest(tmp_path / "training") == digest(records_folder)

    config.tokenizer.path, config.stages = str(records_folder / "vocab.txt"), named_stages(short=config.stages.short)
    heldout, rows = [], []
    for seed in (0, 5):
        config.data.update(seed=seed, heldout_fraction=0.15)
        heldout.append([block.selected for block in blocks_in(config) if block.part == "heldout"])
        config.data.heldout_fraction = 0.0  # the same documents: pairs and masks differ
        preparation.prepare(config, tmp_path / f"data{seed}")
        rows.append(sorted(map(tuple, everything(tmp_path / f"data{seed}", 32, 5, "train")["input_ids"])))
    assert heldout[0] != heldout[1] and rows[0] != rows[1]


def test_records_of_another_recipe_are_refused(corpus_file, records_folder):
    manifest, config = read_manifest(records_folder), tiny_config(corpus_file)
    config.seed = 5
    preparation.check_recipe(config, manifest, records_folder)
    older = {name: manifest["recipe"][name] for name in ("corpus", "seed", "dupe_factor", "heldout_fraction")}
    preparation.check_recipe(config, {**manifest, "recipe": older}, records_folder)
    changes = dict(seed=5, dupe_factor=4, corpus="other.txt", next_sentence="order", masking="dynamic")
    for name, value in changes.items():
        config = tiny_config(corpus_file)
        config.data[name] = value
        with pytest.raises(UserError, match=rf"config.data.{name} = .*{value}.*: the records in .* were prepared with"):
            preparation.check_recipe(config, manifest, records_folder)


def unmasked(batch):
    """Returns the tokens before they were masked."""
    ids, used = batch["input_ids"].copy(), batch["word_weights"] > 0
    ids[np.nonzero(used)[0], batch["word_positions"][used]] = batch["word_ids"][used]
    return ids


def test_held_out_text_is_not_in_training(corpus_file, records_folder):
    fraction = tiny_config(corpus_file).data.heldout_fraction
    pieces = tokenizer.load_tokenizer("wordpiece", records_folder / "vocab.txt")
    lines = {True: set(), False: set()}
    for document in corpus.read_documents([str(corpus_file)]):
        lines[selection.is_heldout("\n".join(document.lines), fraction, 0)].update(document.lines)
    sentences = {" ".join(map(str, pieces.encode(line).ids)) for line in lines[True] - lines[False]}

    def count_in(split):
        ids = unmasked(everything(records_folder, 64, 10, split))
        text = " | ".join(" ".join(map(str, row)) for row in ids)
        return sum(sentence in text for sentence in sentences)

    assert count_in("train") == 0 < count_in("heldout")


def test_every_document_is_used_dupe_factor_times_and_shards_share_evenly(records_folder):
    batch, manifest = everything(records_folder, 64, 10, "train"), read_manifest(records_folder)
    pieces = tokenizer.load_tokenizer("wordpiece", records_folder / "vocab.txt")
    # Tokens of first segments and of actual next segments: each document three times, minus the truncated tokens.
    special = np.isin(batch["input_ids"], [pieces.cls_id, pieces.sep_id, pieces.pad_id])
    is_kept = ~special & ((batch["pair_labels"][:, None] == 0) | (batch["token_types"] == 0)) & (batch["segments"] == 1)
    assert 0.8 < is_kept.sum() / (3 * manifest["corpus"]["train_tokens"]) <= 1
    counts = [file["records"] for file in manifest["sets"]["64"]["train"].values()]
    assert len(counts) == 8 and sum(counts) == len(is_kept) and max(counts) < 3 * len(is_kept) / 8
    # Only the result is left.
    assert {path.name for path in records_folder.iterdir()} == {"manifest.json", "vocab.txt", "length32", "length64"}
    assert not list(records_folder.rglob("*.partial"))


def test_a_cased_tokenizer_of_hugging_face_stays_cased(tmp_path, in_process):
    """tokenizer.json stores the casing; the default of the config does not matter."""
    words, rng = "The the Ship ship sailed home .".split(), random.Random(0)
    cased = tokenizer.WordPiece([*tokenizer.SPECIAL_TOKENS, *words], lowercase=False)
    (tmp_path / "tokenizer.json").write_text(cased.to_huggingface())
    lines = [" ".join(rng.choices(words, k=9)) + "\n" * (1 + number % 2) for number in range(200)]
    (tmp_path / "text.txt").write_text("\n".join(lines))
    config = tiny_config(tmp_path / "text.txt")
    config.tokenizer.path, config.model.vocab_size = str(tmp_path / "tokenizer.json"), cased.vocab_size
    manifest = preparation.prepare(config, tmp_path / "records")
    assert manifest["tokenizer"]["lowercase"] is False and manifest["tokenizer"]["fingerprint"] == cased.fingerprint
    hidden = everything(tmp_path / "records", 64, 10, "train")["word_ids"]
    assert (hidden == cased.pieces.index("Ship")).any() and (hidden != cased.unk_id).all()


TWENTY, ENDLESS = make_corpus(20), "x" * 1_000_000


@pytest.mark.parametrize("text, options, message", [
    ("Only one document.\nWith two lines.", {"data.heldout_fraction": 0.0}, "has 1 document for training"),
    (TWENTY, {"data.cleaning.min_words": 999}, r"training; .* 20 documents left out: no words, or fewer"),
    (TWENTY, {"data.heldout_fraction": 0.0001}, r"0 of 20 documents are held out, but .*_fraction=0.3 or 0"),
    (f"{TWENTY}\n{ENDLESS}", {}, r"text.txt:\d+: a sentence .*1,000,000 .*--config.data.on_bad_document=skip"),
    (f"{TWENTY}\n{ENDLESS}", {"tokenizer.path": ""}, r"text.txt:\d+: a sentence .* has 1,000,000 characters"),
    (TWENTY, {"model.vocab_size": 30522}, r"vocab_size = 30522: .*vocab.txt has 7 tokens"),
])  # fmt: skip
def test_unusable_corpora_are_refused(tmp_path, in_process, text, options, message):
    (tmp_path / "text.txt").write_text(text)
    config = with_vocabulary(tiny_config(tmp_path / "text.txt"), tmp_path, "the", "one")
    for name, value in options.items():
        find_field(config, name).set(value)
    with pytest.raises(UserError, match=message):
        preparation.prepare(config, tmp_path / "out")
    assert not (tmp_path / "out" / "manifest.json").exists()
    assert not list((tmp_path / "out").rglob("*.tfrecord"))
    assert config.tokenizer.path or not (tmp_path / "out" / "vocab.txt").exists()  # such text gives no vocabulary


def with_vocabulary(config, folder, *words):
    """Sets a vocabulary of some words, so that no vocabulary has to be trained."""
    (folder / "vocab.txt").write_text("\n".join([*tokenizer.SPECIAL_TOKENS, *words]))
    config.tokenizer.path, config.model.vocab_size = str(folder / "vocab.txt"), 5 + len(words)
    return config


WORDS = "the a and saw found left near stayed . ,".split()


def many_blocks(monkeypatch, folder, documents=160):
    """A config of two sources whose corpus makes a dozen blocks, in two groups."""
    monkeypatch.setattr(blocks, "BLOCK_CHARACTERS", 8000)
    monkeypatch.setattr(corpus, "PORTION_BYTES", 10_000)
    monkeypatch.setattr(sorting, "READ_TOGETHER", 2)
    for seed in (1, 2):
        (folder / f"{seed}.txt").write_text(make_corpus(documents // 2, seed))
    config = with_vocabulary(tiny_config(), folder, *WORDS)
    config.data.corpus = [str(folder / "1.txt"), str(folder / "2.txt")]
    return config


class Killed(BaseException):
    """Stops a preparation; no code catches it."""


def test_preparation_resumes_with_finished_parts_after_a_kill(monkeypatch, tmp_path, in_process):
    """Preparation stops after every third block or shard: no part is made twice, and the bytes equal an undisturbed
    run.

    Files of another run, and a lost or damaged shard, change nothing.
    """
    config, made = many_blocks(monkeypatch, tmp_path), []
    with monkeypatch.context() as patch:
        patch.setattr(sorting, "READ_TOGETHER", 10**6)  # files of blocks are merged in other ways, or not at all
        preparation.prepare(config, tmp_path / "undisturbed")

    def stopping(make):
        def make_one(*arguments):
            if len(made) == stop_at:
                raise Killed
            made.append(arguments[0])
            return make(*arguments)

        return make_one

    (tmp_path / "out/unfinished/another").mkdir(parents=True)
    (tmp_path / "out/unfinished/another/block-0.json").write_text("{}")
    with monkeypatch.context() as patch:
        patch.setattr(blocks, "sequences_of", stopping(blocks.sequences_of))
        patch.setattr(shards, "write_rows", stopping(shards.write_rows))
        patch.setattr(preparation, "write_manifest", lambda *_: 1 / 0)
        for _ in range(30):
            stop_at = len(made) + 3
            with pytest.raises((Killed, ZeroDivisionError)) as caught:
                preparation.prepare(config, tmp_path / "out")
            if caught.type is ZeroDivisionError:
                break
    assert 20 < len(made) == len({str(part)[:80] for part in made})
    (tmp_path / "out/length32/train-00003-of-00008.tfrecord").unlink()
    (tmp_path / "out/length64/train-00003-of-00008.tfrecord").write_bytes(b"cut")
    (tmp_path / "out/vocab.txt").write_text("another")
    preparation.prepare(config, tmp_path / "out")
    assert digest(tmp_path / "out") == digest(tmp_path / "undisturbed")


@pytest.mark.parametrize("change", ["config", "corpus", "word"])
def test_parts_of_another_recipe_are_not_reused(monkeypatch, tmp_path, in_process, change):
    config = many_blocks(monkeypatch, tmp_path, documents=80)
    if change == "corpus":
        config.tokenizer.path, config.model.vocab_size = "", 150  # the vocabulary differs as well
    if change == "word":
        monkeypatch.setattr(sorting, "READ_TOGETHER", 10**6)  # all blocks exist, and no blocks are merged
    write_rows, written = shards.write_rows, []

    def write_some(shard, *arguments):
        written.append(shard)
        return write_rows(shard, *arguments) if len(written) < 5 else 1 / 0

    with monkeypatch.context() as patch, pytest.raises(ZeroDivisionError):
        patch.setattr(shards, "MIN_TRAIN_SHARDS", 16)  # files that the next run would not write
        patch.setattr(shards, "write_rows", write_some)
        preparation.prepare(config, tmp_path / "out")
    (tmp_path / "out/length32/train-00000-of-00008.tfrecord.abc.partial").write_bytes(b"half")
    assert len(list(tmp_path.glob("out/*/*.tfrecord"))) == 4
    made, sequences_of = [], blocks.sequences_of
    monkeypatch.setattr(blocks, "sequences_of", lambda block, job: made.append(block) or sequences_of(block, job))
    if change == "config":
        config.data.short_seq_prob = 0.2
    elif change == "word":
        text = (tmp_path / "1.txt").read_text()
        (tmp_path / "1.txt").write_text(text.replace("saw", "left", 1))
    else:
        (tmp_path / "1.txt").write_text(make_corpus(40, seed=3))
    preparation.prepare(config, tmp_path / "out")
    remade = len(made)
    preparation.prepare(config, tmp_path / "anew")
    assert digest(tmp_path / "out") == digest(tmp_path / "anew")
    assert len(made) - remade > 4 and (remade == 1 or change != "word"), "blocks of the same text are kept"


def test_bad_documents_are_skipped_and_counted(monkeypatch, tmp_path, in_process, capsys):
    config = many_blocks(monkeypatch, tmp_path, documents=80)
    preparation.prepare(config, tmp_path / "clean")
    text = (tmp_path / "1.txt").read_text()
    (tmp_path / "1.txt").write_bytes(b"\xff\n\n" + text.encode() + b"\n" + b"x" * 104_000 + b"\n")
    config.data.on_bad_document = "skip"
    capsys.readouterr()
    manifest = preparation.prepare(config, tmp_path / "out")
    printed = capsys.readouterr().out
    assert manifest["cleaning"] == {"bad_documents": 2}
    assert "2 documents left out: not text" in printed and printed.count(f"left out: {tmp_path}") == 2
    clean, damaged = digest(tmp_path / "clean"), digest(tmp_path / "out")
    assert clean.pop("manifest.json") != damaged.pop("manifest.json") and clean == damaged


def test_files_are_opened_in_proportion_to_the_corpus(monkeypatch, tmp_path, in_process):
    """Not every block is opened for every shard."""
    opened, open_run = [], sorting.map_sorted_run
    config = many_blocks(monkeypatch, tmp_path, documents=2)
    monkeypatch.setattr(sorting, "map_sorted_run", lambda *arguments: opened.append(arguments) or open_run(*arguments))
    limits = {"common.sorting.READ_TOGETHER": 8, "common.sorting.MERGED_BYTES": 4000}
    limits |= {"data.preprocessing.shards.SHARD_BYTES": 8000, "data.preprocessing.blocks.BLOCK_CHARACTERS": 3000}
    for name, value in limits.items():
        monkeypatch.setattr(f"bertjax.{name}", value)
    config.stages, config.data.heldout_fraction = named_stages(short=stage(1, 32, 5)), 0.0
    for times in (1, 8):
        (tmp_path / "1.txt").write_text(make_corpus(30 * times))
        opened.clear()
        preparation.prepare(config, tmp_path / f"out{times}")
        assert len(opened) <= 2 * 8 * len(list(tmp_path.glob(f"out{times}/*/*.tfrecord"))), times


@pytest.mark.parametrize("document", ["blank_line", "file"])
def test_padding_and_documents_of_one_sentence_are_reported(tmp_path, in_process, capsys, document):
    """Paragraphs of one sentence, separated by blank lines."""
    for number in range(30):
        (tmp_path / f"{number}.txt").write_text(re.sub("\n+", "\n\n", make_corpus(2, seed=number)))
    config, is_bad = tiny_config(tmp_path), document == "blank_line"
    config.data.document, config.data.heldout_fraction = document, 0.2
    config.stages, config.model.max_position_embeddings = named_stages(only=stage(4, 128, 20)), 128
    manifest = preparation.prepare(config, tmp_path / "out")
    printed, share = capsys.readouterr().out, everything(tmp_path / "out", 128, 20, "train")["segments"].mean()
    assert abs(manifest["real_tokens_share"]["128"] - share) < 1e-4
    assert f"sequences of 128 tokens are on average {share:.0%} full" in printed
    hints = "--config.data.next_sentence=none", "no document has two sentences", "most of a sequence of 128 is padding"
    assert [hint in printed for hint in hints] == [is_bad] * 3
    assert printed.count("--config.data.document=file if") == 2 * is_bad
    config.data.corpus = str(tmp_path / "all.txt")  # the corpus would be a single document
    (tmp_path / "all.txt").write_text("\n\n".join((tmp_path / f"{i}.txt").read_text() for i in range(30)))
    too_few = pytest.raises(UserError, match=r"next_sentence=none at least one \(a file is a document")
    with contextlib.nullcontext() if is_bad else too_few:
        preparation.prepare(config, tmp_path / "one")
    assert "document=file" not in capsys.readouterr().out
    assert manifest["corpus"]["train_documents"] < 30 or is_bad


def test_the_mixture_sets_the_share_of_every_source(monkeypatch, tmp_path, in_process):
    config = many_blocks(monkeypatch, tmp_path, documents=400)
    first, second = config.data.corpus
    config.stages, config.data.heldout_fraction = named_stages(short=stage(1, 32, 5)), 0.0
    config.data.mixture = f"{first}=0.5,{second}=2"
    sources = preparation.prepare(config, tmp_path / "out")["sources"]
    assert sources[second]["documents"] == 200 * 3 * 2
    assert abs(sources[first]["documents"] - 200 * 3 * 0.5) < 4 * (200 * 0.25) ** 0.5
    config.data.mixture = f"{first}=0"
    manifest = preparation.prepare(config, tmp_path / "without")
    assert first not in manifest["sources"] and manifest["corpus"]["train_documents"] == 200


def test_unused_documents_are_not_random_next_segments(tmp_path, in_process):
    (tmp_path / "a.txt").write_text(make_corpus(100))
    (tmp_path / "b.txt").write_text(make_corpus(100, seed=1).replace("The", "Zzz"))
    config = with_vocabulary(tiny_config(), tmp_path, "the", "zzz")
    config.data.corpus = [str(tmp_path / "a.txt"), str(tmp_path / "b.txt")]
    config.data.update(mixture=f"{tmp_path}/b.txt=0.0001", dupe_factor=1, heldout_fraction=0.0)
    manifest = preparation.prepare(config, tmp_path / "out")
    assert manifest["corpus"]["train_documents"] == manifest["sources"][str(tmp_path / "a.txt")]["documents"] == 100
    batch = everything(tmp_path / "out", 64, 10, "train")
    assert (batch["input_ids"] == 5).any() and not (batch["word_ids"] == 6).any()
    config.data.corpus, config.data.mixture = "", ""  # training on the records needs no corpus
    preparation.check_recipe(config, manifest, tmp_path / "out")


RECIPES = {
    "pairs": dict(),
    "copies": dict(dupe_factor=3, masking="dynamic"),
    "order": dict(next_sentence="order", do_whole_word_mask=True),
    "none": dict(next_sentence="none", do_span_mask=True),
    "compact": dict(next_sentence="none", masking="dynamic", layout="compact"),
    "stream": dict(next_sentence="none", masking="dynamic", stream=True, short_seq_prob=0.0),
    "apart": dict(next_sentence="none", masking="dynamic", mix_when="read"),
}


@pytest.mark.parametrize("name", RECIPES)
def test_words_of_the_corpus_are_in_records_or_counted_as_cut(name, monkeypatch, tmp_path, in_process, capsys):
    """Every word occurs once, so the words in the records can be compared with the counts."""
    monkeypatch.setattr(blocks, "BLOCK_CHARACTERS", 3000)
    rng, words = random.Random(0), iter([f"w{number}" for number in range(9000)])
    lines = [[" ".join(next(words) for _ in range(rng.choice((1, 5, 20, 70)))) for _ in range(4)] for _ in range(50)]
    for number, part in enumerate((lines[:40], lines[40:])):
        (tmp_path / f"{number}.txt").write_text("\n\n".join(map("\n".join, part)))
    used = " ".join(map(" ".join, lines)).split()
    config = with_vocabulary(tiny_config(), tmp_path, *used)
    config.data.corpus = [str(tmp_path / "0.txt"), str(tmp_path / "1.txt")]
    config.data.update(**{"dupe_factor": 1, "heldout_fraction": 0.2, "split_sentences": False, **RECIPES[name]})
    config.data.mixture = f"{tmp_path}/1.txt=1.5" if name != "apart" else ""  # some documents are used twice
    totals = preparation.prepare(config, tmp_path / "out")["corpus"]
    printed = capsys.readouterr().out
    assert totals["train_tokens"] + totals["heldout_tokens"] == len(used)
    for length, predictions in ((32, 5), (64, 10)):
        kept = 0
        for split in selection.SPLITS:
            batch = everything(tmp_path / "out", length, predictions, split)
            ids = unmasked(batch) if config.data.masking == "static" else batch["input_ids"]
            kept += totals[f"{split}_tokens_in_records_of_{length}"]
            assert totals[f"{split}_tokens_in_records_of_{length}"] == len({*ids[ids > 4]})
        cut = len(used) - kept
        assert f"{len(used):,} tokens = {kept:,} in records, {cut:,}" in printed
        assert (cut == 0) == (name in ("none", "compact", "apart"))
        assert (f"are in no record of length {length}: " in printed) == (cut > 0.01 * len(used))


def test_counts_of_files_and_documents_add_up(monkeypatch, tmp_path, in_process, capsys):
    config = many_blocks(monkeypatch, tmp_path, documents=80)
    texts, line = tmp_path / "texts", '{"text": "The fox saw a dog near the river ."}\n'
    (texts / "sub").mkdir(parents=True)
    files = {"a.txt": "Once .\n\n\u200b\n\nzz yy .", "empty.txt": "", "b.json": line, "sub/c.JSON": line}
    files |= {"array.json": f"[{line}]", "meta.json": '{"version": 1}', "pretty.json": "{\n}", "none.md": "x"}
    files |= {"bad.jsonl": f'1\n{line}{{"text": ""}}', "sub/f.txt.bz2": bz2.compress(b"A dog .\n\nOne .")}
    files |= {"d.csv": "x", ".hidden": "x", "e.png": "x", "noname": "x"}
    for name, content in files.items():
        (texts / name).write_bytes(content if isinstance(content, bytes) else content.encode())
    config.data.corpus = [*config.data.corpus, str(texts)]
    config.data.update(on_bad_document="skip", mixture=f"{tmp_path}/2.txt=0.1", dupe_factor=1)
    config.data.cleaning.update(duplicate_documents=True, min_words=2)
    capsys.readouterr()
    manifest = preparation.prepare(config, tmp_path / "out")
    printed, totals, removed = capsys.readouterr().out, manifest["corpus"], manifest["cleaning"]
    assert f"files of {texts}: 14 found = 5 read, 1 without a document, 8 skipped" in printed
    assert "3 skipped for their content, such as " in printed and "array.json: not read: one JSON array" in printed
    assert "1 .csv (d.csv): write as .jsonl" in printed and "2 hidden, .png (.hidden, e.png)" in printed
    assert totals["read_documents"] == 80 + 3 + 3 + 2 + 2 and totals["empty_documents"] == 1
    assert removed["bad_documents"] == 1 and removed["duplicate_documents"] == 2
    used = totals["train_documents"] + totals["heldout_documents"] + totals["documents_without_tokens"]
    assert totals["unused_documents"] > 20 and totals["documents_without_tokens"] <= 1
    unused = totals["empty_documents"] + totals["unused_documents"]
    assert totals["read_documents"] == used + unused + sum(removed.values())
    assert f"{texts} are unknown to the vocabulary, such as " in printed and "'fox'" in printed


def test_finished_records_are_not_overwritten(corpus_file, records_folder, tmp_path):
    with pytest.raises(UserError, match="already contains finished records"):
        preparation.prepare(tiny_config(corpus_file), records_folder)
    with pytest.raises(UserError, match="workers=0"):
        preparation.prepare(tiny_config(corpus_file), tmp_path / "out", workers=0)


@pytest.fixture
def with_duplicates(tmp_path, monkeypatch):
    """A config of several groups and blocks, with duplicates."""
    pytest.importorskip("apache_beam")
    config = many_blocks(monkeypatch, tmp_path, documents=200)
    for seed in (1, 2):
        with (tmp_path / f"{seed}.txt").open("a") as file:
            file.write("\n" + make_corpus(40, seed=3))
    config.tokenizer.path, config.model.vocab_size = "", 110
    config.data.mixture = f"{tmp_path}/2.txt=0.5"
    config.data.cleaning.update(duplicate_documents=True, near_duplicates=True, max_line_documents=1)
    return config


@pytest.mark.slow
def test_beam_writes_the_records_of_the_local_run(with_duplicates, tmp_path, in_process, monkeypatch, capsys):
    monkeypatch.setitem(vocabulary_learning.COUNTED_LETTERS, "wordpiece", 200)  # fewer than the corpus has
    here = preparation.prepare(with_duplicates, tmp_path / "here")
    assert "; a sample of words rarer than " in capsys.readouterr().out
    assert here["cleaning"]["duplicate_documents"] == 40 and here["cleaning"]["repeated_lines"] > 0
    left = tmp_path / "beam" / "unfinished" / "beam"  # files of a stopped pipeline
    left.mkdir(parents=True)
    (left / "words-00000-of-00009").write_text('["nonsense", 1000000]\n')
    (tmp_path / "beam" / "length32").mkdir()
    (tmp_path / "beam" / "length32" / "train-00000-of-00016.tfrecord").write_bytes(b"another's")
    assert preparation.prepare(with_duplicates, tmp_path / "beam", beam_options=[]) == here
    assert digest(tmp_path / "beam") == digest(tmp_path / "here")


@pytest.mark.slow
def test_beam_reports_mistakes_in_one_line(with_duplicates, tmp_path, in_process):
    with (tmp_path / "2.txt").open("a") as file:
        file.write("\n" + "x" * 200_000)
    with pytest.raises(UserError, match=r"^.*2.txt:\d+: a sentence of this document has 200,000 characters[^\n]*$"):
        preparation.prepare(with_duplicates, tmp_path / "out", beam_options=[])
    assert not (tmp_path / "out" / "manifest.json").exists()


# Vocabularies of a corpus, from counts in bounded memory.


SIZE = {"wordpiece": 120, "sentencepiece": 80}


def config_of(corpus_file, kind="wordpiece", vocab_size=None):
    config = tiny_config(corpus_file)
    config.tokenizer.kind = kind
    config.model.vocab_size = vocab_size or SIZE[kind]
    return config


@pytest.mark.parametrize("kind", ["wordpiece", "sentencepiece"])
def test_vocabularies_are_trained_without_held_out_sentences(kind, corpus_file, tmp_path, monkeypatch, in_process):
    monkeypatch.setattr(blocks, "BLOCK_CHARACTERS", 3000)
    config, expected, used = config_of(corpus_file, kind), collections.Counter(), 0
    for document in corpus.read_documents([str(corpus_file)]):
        if selection.is_heldout("\n".join(document.lines), config.data.heldout_fraction, config.data.seed):
            continue
        used += 1
        for sentence in sentences.split(document):
            if kind == "wordpiece":
                sentence = sentence.lower().replace(",", " ,").replace(".", " .")
            expected.update(sentence.split())
    groups = corpus.groups([config.data.corpus])
    with vocabulary.worker_pool(1) as pool:
        counts = vocabulary.count_corpus(config, groups, selection.selection_of(config), tmp_path, pool, 2)
    assert used < 80
    assert counts.words == expected
    assert (counts.total, counts.threshold) == (expected.total(), 1)


@pytest.mark.parametrize("kind, message", [
    ("wordpiece", "data.corpus: there are no words to learn a vocabulary from"),
    ("sentencepiece", "SentencePiece could not learn from this corpus"),
])  # fmt: skip
def test_a_corpus_without_words_raises_one_line(kind, message, tmp_path, in_process):
    path = tmp_path / "empty.txt"
    path.write_text("\u200b\n\n\u200b\u200b\n")  # no file is left
    with pytest.raises(UserError, match=message):
        vocabulary.learn_vocabulary(config_of(path, kind), workers=1)


def zipf_words(count=40, different=20_000) -> list[collections.Counter]:
    """Returns blocks of words such as "17": word n has a frequency of about 1
    n.
    """
    rng = np.random.default_rng(0)
    return [collections.Counter(map(str, (different ** rng.random(5000)).astype(int).tolist())) for _ in range(count)]


@pytest.mark.parametrize("room", [10**6, 3000, 1])
def test_counts_are_exact_in_memory_and_on_disk(tmp_path, room):
    counts, parts = WordCounts(tmp_path, room), zipf_words(10)
    parts.append(collections.Counter({"\ud800": 2, "a\u2028b\x0c": 1, "\x85": 3}))  # not a character; not a line break
    for part in parts:
        counts.add(part)
    merged_counts = list(counts.parts())
    assert sum(map(len, merged_counts)) == len(set().union(*merged_counts))  # each word once
    assert sum(map(collections.Counter, merged_counts), collections.Counter()) == sum(parts, collections.Counter())
    assert any(tmp_path.iterdir()) == (room < 10**6)


def test_a_full_disk_raises_one_line(tmp_path):
    for number in range(PARTS):
        (tmp_path / f"words-{number:02d}").symlink_to("/dev/full")
    with pytest.raises(UserError, match=rf"^{tmp_path}: cannot be written \(No space left on device\)$"):
        WordCounts(tmp_path, 100).add(zipf_words(1)[0])


@pytest.mark.slow
def test_a_word_sample_has_bounded_size_and_unbiased_counts():
    shares, truth = [], sum(zipf_words(4, 4000), collections.Counter())
    for trial in range(100):  # other words, hence other hashes
        words = {f"{word}.{trial:02d}": count for word, count in truth.items()}
        sample = sample_words([words], 4700)
        assert sum(map(len, sample.words)) <= 4700 < sum(map(len, words)) / 4
        assert sample.threshold >= 8 and sample.total == 20_000
        rare = {word for word in words if words[word] < sample.threshold}
        assert all(sample.words[word] == words[word] for word in words.keys() - rare)
        taken = [sample.words.get(word, 0) for word in rare]
        assert set(taken) == {0, sample.threshold}
        shares.append(sum(taken) / sum(words[word] for word in rare))
    assert abs(np.mean(shares) - 1) < 4 * np.std(shares) / 100**0.5 < 0.02


def test_a_word_sample_does_not_depend_on_order_and_parts():
    words = sum(zipf_words(4), collections.Counter())
    items, rng = list(words.items()), np.random.default_rng(0)
    whole = sample_words([words], 10_000)
    for count in (2, 7, 1000):
        parts = [dict(items[i] for i in some) for some in np.array_split(rng.permutation(len(items)), count)]
        assert sample_words(parts, 10_000) == whole
