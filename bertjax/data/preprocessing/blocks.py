"""The first pass of a preparation: divides documents into blocks, and writes their masked sequences to disk."""

import collections
import glob
import hashlib
import json
import os
import shutil
from collections.abc import Iterable, Iterator, Mapping
from typing import Any, NamedTuple

import numpy as np

from bertjax.common.files import write_whole
from bertjax.common.sorting import write_run
from bertjax.data.corpus import sentences
from bertjax.data.corpus.corpus import Group
from bertjax.data.corpus.selection import Selected, Selection, check_selected_sources, split_of
from bertjax.data.preprocessing.job import Job, tokenizer_of_job
from bertjax.data.preprocessing.rows import make_rows, row_type
from bertjax.data.preprocessing.sequences import Tokens, as_tokens
from bertjax.text.tokenizer import Tokenizer

BLOCK_CHARACTERS = 2_000_000
MIN_BLOCK_DOCUMENTS = 16  # documents of a block; a random next segment is from another document of the block
BIG_BLOCK_CHARACTERS = 16_000_000  # a block of this size needs only two documents
UNKNOWN, MAX_SHOWN = "unknown_word_of_source_", 30  # prefix in the statistics; letters of a word that are shown
ENCODED_SENTENCES = 8192  # sentences encoded at a time
UNKNOWN_SENTENCES, UNKNOWN_WORDS = 20, 3  # per block: sentences with counted unknown words; reported words


class Block(NamedTuple):
    """Documents that one worker converts together.

    Attributes:
      part: the part of the records, see `selection`.
      number: the number of the group, and the number of the block in the group.
      selected: the documents.
      bytes: the number of bytes, as stored, that were read since the previous block.
    """

    part: str
    number: tuple[int, int]
    selected: list[Selected]
    bytes: int


class Spilled(NamedTuple):
    """A block on disk.

    Attributes:
      part: the part of the records.
      stats: the statistics of the block.
      rows: the number of sequences of each shape.
      paths: the file of the sequences of each shape.
    """

    part: str
    stats: dict[str, int]
    rows: list[int]
    paths: list[str]


def blocks_of(group: Group, selection: Selection, counts: collections.Counter) -> Iterator[Block]:
    """Yields the blocks of a group for each part: at least `BLOCK_CHARACTERS` and `MIN_BLOCK_DOCUMENTS` per block.

    Buffers a full block until the next block of the part is full, so that the full block can absorb a short last block.

    Args:
      group: the group.
      selection: the selection of documents.
      counts: the counts of `Selection.read`.
    """
    held: dict[str, list[Selected]] = {part: [] for part in selection.parts}
    growing: dict[str, list[Selected]] = {part: [] for part in selection.parts}
    sizes = dict.fromkeys(selection.parts, 0)
    number, read = 0, counts["bytes"]

    def block(part: str, selected: list[Selected]) -> Block:
        nonlocal number, read
        made = Block(part, (group.number, number), selected, counts["bytes"] - read)
        number, read = number + 1, counts["bytes"]
        return made

    for document in selection.read(group, counts):
        part = document.part
        growing[part].append(document)
        sizes[part] += sum(map(len, document.document.lines))
        if sizes[part] >= BLOCK_CHARACTERS and (
            len(growing[part]) >= MIN_BLOCK_DOCUMENTS
            or (sizes[part] >= BIG_BLOCK_CHARACTERS and len(growing[part]) >= 2)
        ):
            if held[part]:
                yield block(part, held[part])
            held[part], growing[part], sizes[part] = growing[part], [], 0
    for part in selection.parts:
        last = [held[part], growing[part]]
        for selected in last if len(growing[part]) >= MIN_BLOCK_DOCUMENTS else [held[part] + growing[part]]:
            if selected:
                yield block(part, selected)


def read_blocks(groups: Iterable[Group], selection: Selection, counts: collections.Counter) -> Iterator[Block]:
    """Yields the blocks of all groups. Raises `UserError` if a source is empty."""
    for group in groups:
        yield from blocks_of(group, selection, counts)
    check_selected_sources(counts, selection.weights)


def block_identity(block: Block, job: Job) -> str:
    """Returns a hash that changes if the sequences of a block change. The hash is unique in the folder `Job.work`."""
    content: list[Any] = [job.fingerprint, block.part, block.number]
    content += [(selected.copies, selected.document.lines) for selected in block.selected]
    return hashlib.sha256(json.dumps(content).encode()).hexdigest()[:32]


def spill(block: Block, job: Job) -> Spilled:
    """Writes the sequences of a block to disk, unless an earlier preparation has written the same block."""
    path = os.path.join(job.work, f"block-{block_identity(block, job)}")
    done, paths = f"{path}.json", [f"{path}.{shape.length}" for shape in job.shapes]
    if os.path.exists(done):
        with open(done) as file:
            return Spilled(**json.load(file), paths=paths)
    stats, rows = sequences_of(block, job)
    for path_of_shape, (keys, arrays) in zip(paths, rows):
        write_run(path_of_shape, keys, arrays)
    summary: dict[str, Any] = dict(part=block.part, stats=stats, rows=[len(keys) for keys, _ in rows])
    write_whole(done, json.dumps(summary))
    return Spilled(**summary, paths=paths)


def keep_unmerged(work: str) -> None:
    """Deletes the files of a preparation of another corpus, except blocks that are not merged yet."""
    for entry in os.scandir(work):
        path, kind = os.path.splitext(entry.path)
        is_block = entry.name.startswith("block-")
        if entry.is_dir():
            shutil.rmtree(entry.path)
        elif not is_block or (kind == ".json" and not glob.glob(f"{glob.escape(path)}.[0-9]*")):
            os.unlink(entry.path)


def delete_other_blocks(work: str, spilled: Iterable[Spilled]) -> None:
    """Deletes the blocks of earlier preparations whose text is not in the corpus any more."""
    used = {os.path.splitext(block.paths[0])[0] for block in spilled}
    for entry in os.scandir(work):
        if entry.name.startswith("block-") and entry.path.rpartition(".")[0] not in used:
            os.unlink(entry.path)


def of_split(part: str, statistics: Mapping[str, int], job: Job) -> dict[str, int]:
    """Returns statistics of documents of a part under their names in the manifest."""
    split, _ = split_of(part, job.sources)
    return {f"{split}_{name}": count for name, count in statistics.items()}


def sequences_of(block: Block, job: Job) -> tuple[dict[str, int], list[tuple[np.ndarray, list[np.ndarray]]]]:
    """Makes the sequences of a block.

    Returns:
      The statistics of the block; for each shape, random keys `[rows]` and arrays of the rows in succession.
    """
    data = job.data
    tokens, has_tokens, stats = _encode(block, job)
    copies = np.array([selected.copies for selected in block.selected])[has_tokens]
    if data["next_sentence"] == "pairs" and len(copies) < 2:  # a random next segment needs another document
        copies = copies[:0]
    rows = []
    for shape in job.shapes:
        seed = [data["seed"], shape.length, *block.number]
        arrays, in_no_copy = [np.empty(0, row_type(shape, job))], np.arange(len(tokens.ids))
        for copy in range(copies.max(initial=0)):
            used = np.flatnonzero(copies > copy)
            made, cut = make_rows(tokens, used, shape, job, tokenizer_of_job(job), [*seed, copy])
            arrays.append(made)
            in_no_copy = np.intersect1d(in_no_copy, cut, assume_unique=True)
        stats[f"tokens_of_{shape.length}"] = int(sum(array["size"].sum(dtype=np.int64) for array in arrays))
        stats[f"tokens_in_records_of_{shape.length}"] = len(tokens.ids) - len(in_no_copy)
        rows.append((keys_of(sum(map(len, arrays)), data["stream"], np.random.default_rng(seed)), arrays))
    return stats, rows


def _encode(block: Block, job: Job) -> tuple[Tokens, np.ndarray, dict[str, int]]:
    """Returns the tokens of a block, whether each document has tokens `[documents]`, and statistics.

    The tokens do not contain documents without tokens.
    """
    tokenizer, data = tokenizer_of_job(job), job.data
    documents = [selected.document for selected in block.selected]
    texts = [sentences.split(document, data["language"], data["split_sentences"]) for document in documents]
    counts = [len(text) for text in texts]
    flat = [sentence for text in texts for sentence in text]
    starts = range(0, max(1, len(flat)), ENCODED_SENTENCES)
    encoded = [tokenizer.encode_flat(flat[first : first + ENCODED_SENTENCES]) for first in starts]
    ids, sizes = (np.concatenate(arrays) for arrays in zip(*encoded))
    tokens = as_tokens(ids, sizes, counts)
    document_of = np.repeat(np.arange(len(texts)), counts)  # `[sentences]`
    document_sizes = np.bincount(document_of, sizes, len(texts)).astype(int)
    has_tokens = document_sizes > 0
    stats = dict(
        documents=len(tokens.documents) - 1,
        several_sentences=int((np.diff(tokens.documents) > 1).sum()),
        sentences=len(tokens.starts) - 1,
        tokens=len(tokens.ids),
        characters=sum(len(line) for document in documents for line in document.lines),
        bytes=block.bytes,
        documents_without_tokens=int((~has_tokens).sum()),
    )
    # The sentence of each unknown token.
    unknown = np.searchsorted(np.cumsum(sizes), np.flatnonzero(tokens.ids == tokenizer.unk_id), "right")
    source_of = np.array([job.sources.index(selected.source) for selected in block.selected])  # `[documents]`
    for name, by_source in {
        "tokens": np.bincount(source_of, document_sizes),
        "unknown_tokens": np.bincount(source_of[document_of[unknown]]),
    }.items():
        stats |= {f"{name}_of_source_{number}": int(count) for number, count in enumerate(by_source) if count}
    first = {number: int(source_of[document_of[number]]) for number in unknown.tolist()}
    stats |= _unknown_words([(flat[number], source) for number, source in first.items()], tokenizer)
    return tokens, has_tokens, stats


def _unknown_words(texts: list[tuple[str, int]], tokenizer: Tokenizer) -> dict[str, int]:
    """Returns counts of the unknown words in the first texts, as statistics.

    Args:
      texts: sentences with unknown words, and the numbers of their sources.
      tokenizer: the tokenizer.
    """
    words: collections.Counter[str] = collections.Counter()
    for text, source in texts[:UNKNOWN_SENTENCES]:
        encoded = tokenizer.encode(text)
        for token, (start, end) in zip(encoded.ids, encoded.offsets):
            if token == tokenizer.unk_id and (word := text[start:end].strip()):
                words[f"{UNKNOWN}{source} {word[:MAX_SHOWN]}"] += 1
    return dict(words.most_common(UNKNOWN_WORDS))


def keys_of(rows: int, is_stream: bool, rng: np.random.Generator) -> np.ndarray:
    """Returns random keys of the rows of a block, `[rows]`.

    The keys of a stream are one random number plus the number of the row, so that the rows stay together in order.
    """
    if is_stream:
        return (rng.integers(2**32, dtype=np.uint64) << np.uint64(32)) + np.arange(rows, dtype=np.uint64)
    return rng.integers(2**64, size=rows, dtype=np.uint64)
