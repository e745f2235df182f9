"""Converts a corpus to pre-masked TFRecords in several processes, with bounded memory.

The output does not depend on the number of processes, byte for byte.

First pass: workers tokenize blocks of documents, make pairs and mask them, with one random generator per block, and
spill the sequences to disk as arrays, sorted into random buckets. Second pass: workers gather the buckets of a shard
from all blocks, shuffle them and write TFRecords. A worker never holds more than one block or one shard.
"""

import collections
import dataclasses
import functools
import os
import tempfile
import time
from collections.abc import Iterator
from typing import NamedTuple

import numpy as np
import tqdm
from etils import epath

from bertjax.config import UserError, corpus_sources, stages_of
from bertjax.data import corpus, records, vocabulary
from bertjax.data.instances import Pair, make_pairs
from bertjax.data.masking import mask_tokens
from bertjax.data.workers import in_order, worker_pool
from bertjax.text import sentences, tokenizer
from bertjax.text.documents import Document

BLOCK_CHARACTERS = 2_000_000
BLOCK_DOCUMENTS = 16  # at least: a random next segment comes from another document of the block
BIG_BLOCK_CHARACTERS = 16_000_000  # a block of this size needs only two documents
BUCKETS = 1024  # also the maximum number of shards
SHARD_BYTES = 64 << 20
MIN_TRAIN_SHARDS = 8  # so that each host of a small pod reads its own files
SPLITS = ("train", "heldout")
RECIPE_FIELDS = (
    "seed", "language", "split_sentences", "heldout_fraction", "dupe_factor", "masked_lm_prob", "short_seq_prob",
    "do_whole_word_mask",
)  # fmt: skip


class Stage(NamedTuple):
    """The sequence length and predictions per sequence of one set of records."""

    length: int
    predictions: int


@dataclasses.dataclass(frozen=True)
class Job:
    """The settings that a worker needs."""

    stages: tuple[Stage, ...]
    data: dict  # config.data
    tokenizer: dict  # arguments of tokenizer.load
    spill: str  # folder
    output: str  # folder


def recipe_of(config) -> dict:
    """Returns the config fields that determine the records, besides tokenizer and lengths."""
    return {"corpus": list(corpus_sources(config)), **{name: config.data[name] for name in RECIPE_FIELDS}}


def prepare(config, output: epath.PathLike, workers: int = 1) -> dict:
    """Writes the records of every stage of `config`, the tokenizer and the manifest to `output`; returns the manifest.

    Loads the tokenizer from `config.tokenizer.path`, or learns it from the training documents if the path is empty.
    Writes the manifest last; overwrites the output of an interrupted run. Raises `UserError` if `output` already has a
    manifest or the corpus has too few documents.
    """
    if workers < 1:
        raise UserError(f"--workers={workers}: must be at least 1")
    output = epath.Path(output)
    if (output / records.MANIFEST).exists():
        raise UserError(f"{output} already contains finished records; delete the folder, or choose another")
    began = time.time()
    tokenizer = vocabulary.tokenizer_of(config)
    output.mkdir(parents=True, exist_ok=True)
    tokenizer.save(output)

    is_local = "://" not in str(output)
    for leftover in output.glob("spill-*") if is_local else ():  # from a killed run
        leftover.rmtree()
    with tempfile.TemporaryDirectory(prefix="spill-", dir=output if is_local else None) as spill:
        job = Job(
            stages=tuple(Stage(s.length, s.max_predictions_per_seq) for s in stages_of(config)),
            data=config.data.to_dict(),
            tokenizer=dict(kind=tokenizer.kind, path=str(output / tokenizer.filename), lowercase=tokenizer.lowercase),
            spill=spill,
            output=str(output),
        )
        with worker_pool(workers, _start_worker, job) as pool:
            totals, blocks = _spill_blocks(config, pool, 2 * workers)
            _check_documents(config, totals)
            sets = _write_shards(job, blocks, pool, 2 * workers)

    manifest = {
        "recipe": recipe_of(config),
        "tokenizer": dict(
            kind=tokenizer.kind,
            lowercase=tokenizer.lowercase,
            vocab_size=tokenizer.vocab_size,
            fingerprint=tokenizer.fingerprint,
        ),
        "corpus": dict(sorted(totals.items())),
        "sets": sets,
    }
    records.write_manifest(output, manifest)
    seconds = time.time() - began
    characters = totals["train_characters"] + totals["heldout_characters"]
    written = sum(sum(files[split].values()) for files in sets.values() for split in SPLITS)
    print(
        f"prepared {written:,} records from {totals['train_documents']:,} training and "
        f"{totals['heldout_documents']:,} held-out documents: {characters / 1e6:.1f} M characters in {seconds:.0f} s, "
        f"{characters / 1e6 / seconds:.2f} M/s",
        flush=True,
    )
    return manifest


def _check_documents(config, totals: dict) -> None:
    train, heldout = totals["train_documents"], totals["heldout_documents"]
    if train < 2:
        raise UserError(
            f"data.corpus: {', '.join(corpus_sources(config))} gives {train} document{'s' * (train != 1)} for training;"
            f" next-sentence prediction needs at least two (a blank line ends a document)"
        )
    if config.data.heldout_fraction and heldout < 2:
        raise UserError(
            f"config.data.heldout_fraction = {config.data.heldout_fraction}: of {train + heldout} documents it holds "
            f"out {heldout}, but next-sentence prediction needs two; increase it, or set it to 0"
        )


# Workers.


@dataclasses.dataclass
class _Worker:
    job: Job
    tokenizer: tokenizer.Tokenizer


_worker: _Worker  # of this process


def _start_worker(job: Job) -> None:
    global _worker
    os.environ["TOKENIZERS_PARALLELISM"] = "false"
    _worker = _Worker(job, tokenizer.load(**job.tokenizer))


# First pass: documents -> blocks of masked sequences, on disk.


class Block(NamedTuple):
    split: str
    number: int
    documents: list[Document]


class Spilled(NamedTuple):
    """A block on disk: its statistics, and for each stage the number of sequences per bucket `[BUCKETS]`."""

    split: str
    number: int
    stats: dict[str, int]
    bucket_sizes: dict[Stage, np.ndarray]


def _spill_blocks(config, pool, ahead: int) -> tuple[dict, list[Spilled]]:
    totals, blocks = collections.Counter(), []
    with tqdm.tqdm(desc="preparing text", unit=" characters", unit_scale=True, disable=None, leave=False) as bar:
        for spilled in in_order(pool, _spill_block, _blocks(config), ahead):
            totals.update({f"{spilled.split}_{name}": count for name, count in spilled.stats.items()})
            blocks.append(spilled)
            bar.update(spilled.stats["characters"])
    return totals, blocks


def _blocks(config) -> Iterator[Block]:
    """Yields the corpus in blocks of at least `BLOCK_CHARACTERS` and `BLOCK_DOCUMENTS`, separately for each split.

    Buffers a full block until the next one of its split is full, so that it can absorb a last block that is too short.
    """
    held = {split: [] for split in SPLITS}
    growing = {split: [] for split in SPLITS}
    sizes = dict.fromkeys(SPLITS, 0)
    number = 0
    for document in corpus.read_documents(corpus_sources(config)):
        split = SPLITS[corpus.is_heldout(document, config.data.heldout_fraction, config.data.seed)]
        growing[split].append(document)
        sizes[split] += sum(map(len, document.lines))
        if sizes[split] >= BLOCK_CHARACTERS and (
            len(growing[split]) >= BLOCK_DOCUMENTS
            or (sizes[split] >= BIG_BLOCK_CHARACTERS and len(growing[split]) >= 2)
        ):
            if held[split]:
                yield Block(split, number, held[split])
                number += 1
            held[split], growing[split], sizes[split] = growing[split], [], 0
    for split in SPLITS:
        last = [held[split], growing[split]]
        for documents in last if len(growing[split]) >= BLOCK_DOCUMENTS else [held[split] + growing[split]]:
            if documents:
                yield Block(split, number, documents)
                number += 1


@functools.cache
def _row_type(stage: Stage) -> np.dtype:
    """The format of a masked sequence on disk; omits what can be derived."""
    numbers = np.int32
    return np.dtype(
        [
            ("ids", numbers, (stage.length,)),
            ("size", numbers),  # number of tokens
            ("first_size", numbers),  # tokens in [CLS] A [SEP]
            ("positions", numbers, (stage.predictions,)),
            ("labels", numbers, (stage.predictions,)),
            ("masked", numbers),  # number of predictions
            ("is_random_next", numbers),
        ]
    )


def _spill_path(spill: str, stage: Stage, number: int) -> str:
    return os.path.join(spill, f"{stage.length}-{number:08d}")


def _spill_block(block: Block) -> Spilled:
    job, tokenizer = _worker.job, _worker.tokenizer
    data = job.data
    texts = [sentences.split(d, data["language"], data["split_sentences"]) for d in block.documents]
    ids = iter(tokenizer.encode_ids([sentence for text in texts for sentence in text]))
    documents = [[sentence for _ in text if (sentence := next(ids))] for text in texts]
    documents = [document for document in documents if document]
    stats = dict(
        documents=len(documents),
        sentences=sum(map(len, documents)),
        tokens=sum(len(sentence) for document in documents for sentence in document),
        characters=sum(len(line) for document in block.documents for line in document.lines),
    )
    bucket_sizes = {}
    for stage in job.stages:
        rng = np.random.default_rng([data["seed"], stage.length, block.number])
        copies = data["dupe_factor"] if block.split == "train" else 1
        rows = _masked_rows(documents, copies, stage, job, tokenizer, rng) if len(documents) > 1 else []
        rows = np.array(rows, _row_type(stage))
        buckets = rng.integers(BUCKETS, size=len(rows))
        rows[np.argsort(buckets, kind="stable")].tofile(_spill_path(job.spill, stage, block.number))
        bucket_sizes[stage] = np.bincount(buckets, minlength=BUCKETS)
    return Spilled(block.split, block.number, stats, bucket_sizes)


def _masked_rows(documents, copies: int, stage: Stage, job: Job, tokenizer: tokenizer.Tokenizer, rng) -> list[tuple]:
    continues_word = tokenizer.continues_word if job.data["do_whole_word_mask"] else None
    rows = []
    for _ in range(copies):
        for index in range(len(documents)):
            for pair in make_pairs(
                documents, index, rng, length=stage.length, short_seq_prob=job.data["short_seq_prob"]
            ):
                ids, special = _assemble(pair, tokenizer)
                masking = mask_tokens(
                    ids,
                    special,
                    rng,
                    vocab_size=tokenizer.vocab_size,
                    mask_id=tokenizer.mask_id,
                    masked_lm_prob=job.data["masked_lm_prob"],
                    max_predictions_per_seq=stage.predictions,
                    continues_word=continues_word,
                )
                free = stage.predictions - len(masking.positions)
                rows.append(
                    (
                        np.pad(masking.ids, (0, stage.length - len(ids)), constant_values=tokenizer.pad_id),
                        len(ids),
                        len(pair.first) + 2,
                        np.pad(masking.positions, (0, free)),
                        np.pad(masking.labels, (0, free)),
                        len(masking.positions),
                        pair.is_random_next,
                    )
                )
    return rows


def _assemble(pair: Pair, tokenizer: tokenizer.Tokenizer) -> tuple[np.ndarray, np.ndarray]:
    """Returns the ids of [CLS] A [SEP] B [SEP], and booleans that mark the special tokens; both `[tokens]`."""
    ids = np.array([tokenizer.cls_id, *pair.first, tokenizer.sep_id, *pair.second, tokenizer.sep_id])
    special = np.zeros(len(ids), bool)
    special[[0, len(pair.first) + 1, -1]] = True
    return ids, special


# Second pass: blocks -> shards.


class Shard(NamedTuple):
    path: str  # relative to the output folder
    stage: Stage
    seed: tuple[int, ...]
    slices: list[tuple[int, int, int]]  # (block, first row, number of rows)


def _write_shards(job: Job, blocks: list[Spilled], pool, ahead: int) -> dict:
    """Writes all sets of records; returns the manifest's "sets", with the number of records per file."""
    sets = {
        str(stage.length): {"max_predictions_per_seq": stage.predictions, **{split: {} for split in SPLITS}}
        for stage in job.stages
    }
    shards = []
    for stage in job.stages:
        (epath.Path(job.output) / records.set_folder(stage.length)).mkdir(exist_ok=True)
        for split in SPLITS:
            shards += _shards_of(job, stage, split, [block for block in blocks if block.split == split])
    with tqdm.tqdm(desc="writing shards", total=len(shards), disable=None, leave=False) as bar:
        for shard, count in zip(shards, in_order(pool, _write_shard, shards, ahead)):
            split = os.path.basename(shard.path).split("-")[0]
            sets[str(shard.stage.length)][split][shard.path] = count
            bar.update()
    return sets


def _shards_of(job: Job, stage: Stage, split: str, blocks: list[Spilled]) -> list[Shard]:
    if not blocks:
        return []
    sizes = np.array([block.bucket_sizes[stage] for block in blocks])  # [blocks, BUCKETS]
    count, least = 1, MIN_TRAIN_SHARDS if split == "train" else 1
    while count < least or (count < BUCKETS and sizes.sum() * _row_type(stage).itemsize > count * SHARD_BYTES):
        count *= 2
    ends = np.cumsum(sizes, axis=1)
    shards = []
    for i in range(count):
        low, high = i * BUCKETS // count, (i + 1) * BUCKETS // count
        first, last = ends[:, low] - sizes[:, low], ends[:, high - 1]
        shards.append(
            Shard(
                path=f"{records.set_folder(stage.length)}/{split}-{i:05d}-of-{count:05d}.tfrecord",
                stage=stage,
                seed=(job.data["seed"], stage.length, SPLITS.index(split), i),
                slices=[(b.number, int(a), int(z - a)) for b, a, z in zip(blocks, first, last) if z > a],
            )
        )
    return shards


def _write_shard(shard: Shard) -> int:
    job, row_type = _worker.job, _row_type(shard.stage)
    parts = [
        np.fromfile(_spill_path(job.spill, shard.stage, block), row_type, count, offset=first * row_type.itemsize)
        for block, first, count in shard.slices
    ]
    rows = np.concatenate(parts) if parts else np.empty(0, row_type)
    order = np.random.default_rng(shard.seed).permutation(len(rows))
    records.write_records(epath.Path(job.output) / shard.path, (_features(rows[i]) for i in order))
    return len(rows)


def _features(row: np.void) -> dict[str, np.ndarray]:
    """Converts a row to the features of a record."""
    token, prediction = np.arange(len(row["ids"])), np.arange(len(row["positions"]))
    return {
        "input_ids": row["ids"],
        "input_mask": (token < row["size"]).astype(np.int64),
        "segment_ids": ((token >= row["first_size"]) & (token < row["size"])).astype(np.int64),
        "masked_lm_positions": row["positions"],
        "masked_lm_ids": row["labels"],
        "masked_lm_weights": (prediction < row["masked"]).astype(np.float32),
        "next_sentence_labels": row["is_random_next"][None],
    }
