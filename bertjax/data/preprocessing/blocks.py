"""The first pass of a preparation: documents -> blocks -> masked sequences on disk, in random order."""

import collections
import glob
import hashlib
import json
import os
import shutil
from collections.abc import Iterable, Iterator, Mapping
from typing import NamedTuple

import numpy as np

from bertjax.common.files import write_whole
from bertjax.common.sorting import write_run
from bertjax.data.corpus import sentences
from bertjax.data.corpus.corpus import Group
from bertjax.data.corpus.selection import Selected, Selection, check_not_empty, split_of
from bertjax.data.preprocessing.job import Job, tokenizer_of
from bertjax.data.preprocessing.rows import make_rows, row_type
from bertjax.data.preprocessing.sequences import as_tokens
from bertjax.text.tokenizer import Tokenizer

BLOCK_CHARACTERS = 2_000_000
BLOCK_DOCUMENTS = 16  # least documents of a block: a random next segment comes from another document of it
BIG_BLOCK_CHARACTERS = 16_000_000  # a block of this size needs only two documents
UNKNOWN, MOST_SHOWN = "unknown_word_of_source_", 30  # prefix in the statistics; letters of a word that are shown
ENCODED_SENTENCES = 8192  # sentences encoded at a time
UNKNOWN_SENTENCES, UNKNOWN_WORDS = 20, 3  # of a block: sentences whose unknown words are counted, and the most frequent


class Block(NamedTuple):
    part: str  # see `selection`
    number: tuple[int, int]  # the group's number, and the block's within it
    selected: list[Selected]
    bytes: int  # bytes read since the block before, as they are stored


class Spilled(NamedTuple):
    """A block on disk: its statistics; for each shape the number of its sequences, and their file."""

    part: str
    stats: dict[str, int]
    rows: list[int]
    paths: list[str]


def blocks_of(group: Group, selection: Selection, counts: collections.Counter) -> Iterator[Block]:
    """Yields a group in blocks of at least `BLOCK_CHARACTERS` and `BLOCK_DOCUMENTS`, separately for each part.

    Buffers a full block until the next one of its part is full, so that it can absorb a last block that is too short.
    `counts` is as in `Selection.read`.
    """
    held = {part: [] for part in selection.parts}
    growing = {part: [] for part in selection.parts}
    sizes = dict.fromkeys(selection.parts, 0)
    number, read = 0, counts["bytes"]

    def block(part: str, selected: list[Selected]) -> Block:
        nonlocal number, read
        made = Block(part, (group.number, number), selected, counts["bytes"] - read)
        number, read = number + 1, counts["bytes"]
        return made

    for each in selection.read(group, counts):
        part = each.part
        growing[part].append(each)
        sizes[part] += sum(map(len, each.document.lines))
        if sizes[part] >= BLOCK_CHARACTERS and (
            len(growing[part]) >= BLOCK_DOCUMENTS or (sizes[part] >= BIG_BLOCK_CHARACTERS and len(growing[part]) >= 2)
        ):
            if held[part]:
                yield block(part, held[part])
            held[part], growing[part], sizes[part] = growing[part], [], 0
    for part in selection.parts:
        last = [held[part], growing[part]]
        for selected in last if len(growing[part]) >= BLOCK_DOCUMENTS else [held[part] + growing[part]]:
            if selected:
                yield block(part, selected)


def read_blocks(groups: Iterable[Group], selection: Selection, counts: collections.Counter) -> Iterator[Block]:
    """Yields the blocks of all groups. Raises `UserError` if a source is empty."""
    for group in groups:
        yield from blocks_of(group, selection, counts)
    check_not_empty(counts, selection.weights)


def identity_of(block: Block, job: Job) -> str:
    """Returns a hash that changes if the sequences of a block, in this folder for unfinished work, become others."""
    content = [job.fingerprint, block.part, block.number]
    content += [(each.copies, each.document.lines) for each in block.selected]
    return hashlib.sha256(json.dumps(content).encode()).hexdigest()[:32]


def spill(block: Block, job: Job) -> Spilled:
    """Writes the sequences of a block to disk, unless a preparation before has done so with the same text."""
    path = os.path.join(job.work, f"block-{identity_of(block, job)}")
    done, paths = f"{path}.json", [f"{path}.{shape.length}" for shape in job.shapes]
    if os.path.exists(done):
        with open(done) as file:
            return Spilled(**json.load(file), paths=paths)
    stats, rows = sequences_of(block, job)
    for file, (keys, parts) in zip(paths, rows):
        write_run(file, keys, parts)
    summary = dict(part=block.part, stats=stats, rows=[len(keys) for keys, _ in rows])
    write_whole(done, json.dumps(summary))
    return Spilled(**summary, paths=paths)


def keep_unmerged(work: str) -> None:
    """Deletes what is left of the preparation of another corpus, except blocks that have not been merged."""
    for entry in os.scandir(work):
        path, kind = os.path.splitext(entry.path)
        is_block = entry.name.startswith("block-")
        if entry.is_dir():
            shutil.rmtree(entry.path)
        elif not is_block or (kind == ".json" and not glob.glob(f"{glob.escape(path)}.[0-9]*")):
            os.unlink(entry.path)


def delete_other_blocks(work: str, spilled: Iterable[Spilled]) -> None:
    """Deletes the blocks of a preparation before, of a text that is no longer there."""
    used = {os.path.splitext(each.paths[0])[0] for each in spilled}
    for entry in os.scandir(work):
        if entry.name.startswith("block-") and entry.path.rpartition(".")[0] not in used:
            os.unlink(entry.path)


def of_split(part: str, statistics: Mapping[str, int], job: Job) -> dict[str, int]:
    """Returns the statistics of some documents of a part, named as in the manifest."""
    split, _ = split_of(part, job.sources)
    return {f"{split}_{name}": count for name, count in statistics.items()}


def sequences_of(block: Block, job: Job) -> tuple[dict, list[tuple[np.ndarray, list[np.ndarray]]]]:
    """Returns the statistics of a block; for each shape random keys of its rows `[rows]`, and the rows in pieces."""
    tokenizer, data = tokenizer_of(job), job.data
    documents = [each.document for each in block.selected]
    texts = [sentences.split(document, data["language"], data["split_sentences"]) for document in documents]
    flat = [sentence for text in texts for sentence in text]
    pieces = range(0, max(1, len(flat)), ENCODED_SENTENCES)
    ids, sizes = zip(*(tokenizer.encode_flat(flat[first : first + ENCODED_SENTENCES]) for first in pieces))
    tokens = as_tokens(np.concatenate(ids), np.concatenate(sizes), [len(text) for text in texts])
    sizes, owner = np.concatenate(sizes), np.repeat(np.arange(len(texts)), [len(text) for text in texts])
    tokens_of_each = np.bincount(owner, sizes, len(texts)).astype(int)
    has_tokens = tokens_of_each > 0  # `as_tokens` leaves out the others
    copies = np.array([each.copies for each in block.selected])[has_tokens]
    if data["next_sentence"] == "pairs" and len(copies) < 2:  # a random next segment needs another document
        copies = copies[:0]
    stats = dict(
        documents=len(tokens.documents) - 1,
        several_sentences=int((np.diff(tokens.documents) > 1).sum()),
        sentences=len(tokens.starts) - 1,
        tokens=len(tokens.ids),
        characters=sum(len(line) for document in documents for line in document.lines),
        bytes=block.bytes,
        documents_without_tokens=int((~has_tokens).sum()),
    )
    unknown = np.searchsorted(np.cumsum(sizes), np.flatnonzero(tokens.ids == tokenizer.unk_id), "right")  # sentences
    of_source = np.array([job.sources.index(each.source) for each in block.selected])
    for name, counts in {
        "tokens": np.bincount(of_source, tokens_of_each),
        "unknown_tokens": np.bincount(of_source[owner[unknown]]),
    }.items():
        stats |= {f"{name}_of_source_{number}": int(count) for number, count in enumerate(counts) if count}
    first = {number: int(of_source[owner[number]]) for number in unknown.tolist()}
    stats |= _unknown_words([(flat[number], source) for number, source in first.items()], tokenizer)
    rows = []
    for shape in job.shapes:
        seed = [data["seed"], shape.length, *block.number]
        pieces, in_no_copy = [np.empty(0, row_type(shape, job))], np.arange(len(tokens.ids))
        for copy in range(copies.max(initial=0)):
            used = np.flatnonzero(copies > copy)
            made, cut = make_rows(tokens, used, shape, job, tokenizer, [*seed, copy])
            pieces.append(made)
            in_no_copy = np.intersect1d(in_no_copy, cut, assume_unique=True)
        stats[f"tokens_of_{shape.length}"] = int(sum(piece["size"].sum(dtype=np.int64) for piece in pieces))
        stats[f"tokens_in_records_of_{shape.length}"] = len(tokens.ids) - len(in_no_copy)
        rows.append((keys_of(sum(map(len, pieces)), data["stream"], np.random.default_rng(seed)), pieces))
    return stats, rows


def _unknown_words(texts: list[tuple[str, int]], tokenizer: Tokenizer) -> dict[str, int]:
    """Returns how often the first texts have unknown words, as statistics; `texts`: all that have some, with the number
    of their source."""
    words = collections.Counter()
    for text, source in texts[:UNKNOWN_SENTENCES]:
        encoded = tokenizer.encode(text)
        for token, (start, end) in zip(encoded.ids, encoded.offsets):
            if token == tokenizer.unk_id and (word := text[start:end].strip()):
                words[f"{UNKNOWN}{source} {word[:MOST_SHOWN]}"] += 1
    return dict(words.most_common(UNKNOWN_WORDS))


def keys_of(rows: int, is_stream: bool, rng: np.random.Generator) -> np.ndarray:
    """Returns random keys of a block's rows `[rows]`; of a stream one key, to which their numbers are added, so that
    they stay together, in their order."""
    if is_stream:
        return (rng.integers(2**32, dtype=np.uint64) << np.uint64(32)) + np.arange(rows, dtype=np.uint64)
    return rng.integers(2**64, size=rows, dtype=np.uint64)
