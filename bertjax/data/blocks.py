"""The first pass of a preparation: documents -> blocks -> masked sequences on disk, sorted into random buckets."""

import collections
import os
from collections.abc import Iterator
from typing import NamedTuple

import numpy as np
import tqdm

from bertjax.config import corpus_sources
from bertjax.data import corpus
from bertjax.data.instances import as_tokens
from bertjax.data.job import SPLITS, Stage, this_worker
from bertjax.data.sequences import make_rows, row_type
from bertjax.data.workers import in_order
from bertjax.text import sentences
from bertjax.text.documents import Document

BLOCK_CHARACTERS = 2_000_000
BLOCK_DOCUMENTS = 16  # at least: a random next segment comes from another document of the block
BIG_BLOCK_CHARACTERS = 16_000_000  # a block of this size needs only two documents
BUCKETS = 1024  # also the maximum number of shards
ROWS = 4096  # that are copied at a time


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


def spill_all(config, pool, ahead: int) -> tuple[dict, list[Spilled]]:
    """Spills the whole corpus; returns its statistics by split, and its blocks."""
    totals, blocks = collections.Counter(), []
    with tqdm.tqdm(desc="preparing text", unit=" characters", unit_scale=True, disable=None, leave=False) as bar:
        for spilled in in_order(pool, spill, read_blocks(config), ahead):
            totals.update({f"{spilled.split}_{name}": count for name, count in spilled.stats.items()})
            blocks.append(spilled)
            bar.update(spilled.stats["characters"])
    return totals, blocks


def read_blocks(config) -> Iterator[Block]:
    """Yields the corpus in blocks of at least `BLOCK_CHARACTERS` and `BLOCK_DOCUMENTS`, separately for each split.

    Buffers a full block until the next one of its split is full, so that it can absorb a last block that is too short.
    """
    held = {split: [] for split in SPLITS}
    growing = {split: [] for split in SPLITS}
    sizes = dict.fromkeys(SPLITS, 0)
    number = 0
    for document in corpus.read_documents(corpus_sources(config), config.data.text_column):
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


def spill_path(folder: str, stage: Stage, number: int) -> str:
    return os.path.join(folder, f"{stage.length}-{number:08d}")


def spill(block: Block) -> Spilled:
    job, tokenizer = this_worker()
    data = job.data
    texts = [sentences.split(d, data["language"], data["split_sentences"]) for d in block.documents]
    encoded = tokenizer.encode_flat([sentence for text in texts for sentence in text])
    tokens = as_tokens(*encoded, [len(text) for text in texts])
    stats = dict(
        documents=len(tokens.documents) - 1,
        sentences=len(tokens.starts) - 1,
        tokens=len(tokens.ids),
        characters=sum(len(line) for document in block.documents for line in document.lines),
    )
    copies = data["dupe_factor"] if block.split == "train" else 1
    copies = copies if stats["documents"] > 1 else 0  # a random next segment needs another document
    bucket_sizes = {}
    for stage in job.stages:
        seed = [data["seed"], stage.length, block.number]
        none = np.empty(0, row_type(stage, job))
        parts = (make_rows(tokens, stage, job, tokenizer, [*seed, copy]) for copy in range(copies))
        rows = np.concatenate([none, *parts])
        buckets = np.random.default_rng(seed).integers(BUCKETS, size=len(rows))
        order = np.argsort(buckets, kind="stable")
        with open(spill_path(job.spill, stage, block.number), "wb") as file:
            for first in range(0, len(rows), ROWS):
                rows[order[first : first + ROWS]].tofile(file)
        bucket_sizes[stage] = np.bincount(buckets, minlength=BUCKETS)
    return Spilled(block.split, block.number, stats, bucket_sizes)
