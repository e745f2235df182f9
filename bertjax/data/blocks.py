"""The first pass of a preparation: documents -> blocks -> masked sequences on disk, in random order."""

import collections
import functools
import glob
import json
import os
from collections.abc import Iterable, Iterator
from typing import NamedTuple

import numpy as np

from bertjax.data.corpus import Group, check_not_empty
from bertjax.data.instances import as_tokens
from bertjax.data.job import Job, tokenizer_of
from bertjax.data.runs import write_run
from bertjax.data.selection import SPLITS, Selected, Selection
from bertjax.data.sequences import make_rows, row_type
from bertjax.files import write_whole
from bertjax.text import sentences

BLOCK_CHARACTERS = 2_000_000
BLOCK_DOCUMENTS = 16  # at least: a random next segment comes from another document of the block
BIG_BLOCK_CHARACTERS = 16_000_000  # a block of this size needs only two documents
ENCODED_SENTENCES = 8192  # at a time


class Block(NamedTuple):
    split: str
    number: tuple[int, int]  # of the group, and within it
    selected: list[Selected]
    bytes: int  # that were read since the block before, as they are stored


class Spilled(NamedTuple):
    """A block on disk: its statistics, and the number of its sequences for each stage."""

    split: str
    stats: dict[str, int]
    rows: list[int]


def blocks_of(group: Group, selection: Selection, counts: collections.Counter) -> Iterator[Block]:
    """Yields a group in blocks of at least `BLOCK_CHARACTERS` and `BLOCK_DOCUMENTS`, separately for each split.

    Buffers a full block until the next one of its split is full, so that it can absorb a last block that is too short.
    `counts` is as in `Selection.read`.
    """
    held = {split: [] for split in SPLITS}
    growing = {split: [] for split in SPLITS}
    sizes = dict.fromkeys(SPLITS, 0)
    number, read = 0, counts["bytes"]

    def block(split: str, selected: list[Selected]) -> Block:
        nonlocal number, read
        made = Block(split, (group.number, number), selected, counts["bytes"] - read)
        number, read = number + 1, counts["bytes"]
        return made

    for each in selection.read(group, counts):
        split = each.split
        growing[split].append(each)
        sizes[split] += sum(map(len, each.document.lines))
        if sizes[split] >= BLOCK_CHARACTERS and (
            len(growing[split]) >= BLOCK_DOCUMENTS
            or (sizes[split] >= BIG_BLOCK_CHARACTERS and len(growing[split]) >= 2)
        ):
            if held[split]:
                yield block(split, held[split])
            held[split], growing[split], sizes[split] = growing[split], [], 0
    for split in SPLITS:
        last = [held[split], growing[split]]
        for selected in last if len(growing[split]) >= BLOCK_DOCUMENTS else [held[split] + growing[split]]:
            if selected:
                yield block(split, selected)


def read_blocks(groups: Iterable[Group], selection: Selection, counts: collections.Counter) -> Iterator[Block]:
    """Yields the blocks of all groups. Raises `UserError` if a source is empty."""
    for group in groups:
        yield from blocks_of(group, selection, counts)
    check_not_empty({source: counts["read", source] for source in selection.weights})


@functools.lru_cache(maxsize=1)  # of a large corpus there are 100,000
def spilled_paths(work: str, split: str, length: int) -> list[str]:
    """Returns what was spilled for a set of records, in the order of the corpus."""
    return sorted(glob.glob(os.path.join(glob.escape(work), f"{split}-*.{length}")))


def spill(block: Block, job: Job) -> Spilled:
    """Writes the sequences of a block to disk, unless an earlier run of the same job has done so."""
    path = os.path.join(job.work, f"{block.split}-{block.number[0]:05d}-{block.number[1]:06d}")
    done = f"{path}.json"
    if os.path.exists(done):
        with open(done) as file:
            return Spilled(**json.load(file))
    stats, rows = sequences_of(block, job)
    for stage, (keys, parts) in zip(job.stages, rows):
        write_run(f"{path}.{stage.length}", keys, parts)
    spilled = Spilled(block.split, stats, [len(keys) for keys, _ in rows])
    write_whole(done, json.dumps(spilled._asdict()))
    return spilled


def sequences_of(block: Block, job: Job) -> tuple[dict, list[tuple[np.ndarray, list[np.ndarray]]]]:
    """Returns the statistics of a block; for each stage random keys of its rows `[rows]`, and the rows in parts."""
    tokenizer, data = tokenizer_of(job), job.data
    documents = [each.document for each in block.selected]
    texts = [sentences.split(document, data["language"], data["split_sentences"]) for document in documents]
    flat = [sentence for text in texts for sentence in text]
    pieces = range(0, max(1, len(flat)), ENCODED_SENTENCES)
    ids, sizes = zip(*(tokenizer.encode_flat(flat[first : first + ENCODED_SENTENCES]) for first in pieces))
    tokens = as_tokens(np.concatenate(ids), np.concatenate(sizes), [len(text) for text in texts])
    owner = np.repeat(np.arange(len(texts)), [len(text) for text in texts])
    has_tokens = np.bincount(owner, np.concatenate(sizes), len(texts)) > 0  # `as_tokens` leaves out the others
    copies = np.array([each.copies for each in block.selected])[has_tokens]
    if data["next_sentence"] == "pairs" and len(copies) < 2:  # a random next segment needs another document
        copies = copies[:0]
    stats = dict(
        documents=len(tokens.documents) - 1,
        sentences=len(tokens.starts) - 1,
        tokens=len(tokens.ids),
        characters=sum(len(line) for document in documents for line in document.lines),
        bytes=block.bytes,
    )
    rows = []
    for stage in job.stages:
        seed = [data["seed"], stage.length, *block.number]
        parts = [np.empty(0, row_type(stage, job))]
        for copy in range(copies.max(initial=0)):
            used = np.flatnonzero(copies > copy)
            parts.append(make_rows(tokens, used, stage, job, tokenizer, [*seed, copy]))
        keys = np.random.default_rng(seed).integers(2**64, size=sum(map(len, parts)), dtype=np.uint64)
        rows.append((keys, parts))
    return stats, rows
