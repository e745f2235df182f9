"""Finds the files and records that are not what was written."""

import concurrent.futures
import itertools
from collections.abc import Iterator, Mapping

import google_crc32c
import numpy as np
from etils import epath

from bertjax.config import UserError
from bertjax.data import layouts
from bertjax.data.layouts import Format
from bertjax.data.serialization import read_tfrecords

HEAD_BYTES = 4096  # of a file, that are compared with the manifest before training
IO_THREADS = 16  # remote storage answers in tens of milliseconds
BLOCK = 1024  # records parsed at a time


def check_files(files: Mapping[str, Mapping]) -> dict[str, str]:
    """Compares the size and the head of files with what `records.write_records` returned for them.

    Returns {path: what is wrong}. Raises `UserError` if a file does not exist.
    """
    with concurrent.futures.ThreadPoolExecutor(IO_THREADS) as pool:
        found = dict(zip(files, pool.map(_check_file, files, files.values())))
    return {path: fault for path, fault in found.items() if fault}


def _check_file(path: str, entry: Mapping) -> str:
    file = epath.Path(path)
    if not file.exists():
        raise UserError(f"{path}: missing, but listed in the manifest; copy or prepare it again")
    if "bytes" not in entry:  # a manifest of an older version
        return ""
    if (size := file.stat().length) != entry["bytes"]:
        return f"has {size:,} bytes, not {entry['bytes']:,} as the manifest says"
    with file.open("rb") as opened:
        head = google_crc32c.value(opened.read(HEAD_BYTES))
    return "" if head == entry["head_crc32c"] else "is another file than the manifest says, or was overwritten"


def unreadable(path: str, count: int, form: Format) -> tuple[tuple[range, ...], str]:
    """Returns which of a file's `count` records cannot be read, and what is wrong with the first of them."""
    numbers, faults, read = [], [], 0
    with epath.Path(path).open("rb") as file:
        found = enumerate(itertools.islice(read_tfrecords(file), count))
        while block := list(itertools.islice(found, BLOCK)):
            whole = {number: record for number, record in block if record is not None}
            others = _unparsed(whole, form)
            bad = [number for number, _ in block if number not in whole or number in others]
            numbers += bad
            faults += [
                "is no record of this layout" if n in others else "is damaged (its checksum is wrong)" for n in bad
            ]
            read += len(block)
    if read < count:
        numbers += range(read, count)
        faults.append(f"is damaged or missing, as are all after it, of {count:,}")
    return tuple(_runs(numbers)), faults[0] if faults else ""


def _unparsed(records: dict[int, bytes], form: Format) -> set[int]:
    """The numbers of the records that `layouts.parse` refuses."""
    from bertjax.data.tf import tf

    try:
        if records:
            layouts.parse(list(records.values()), form)
        return set()
    except tf.errors.InvalidArgumentError:
        if len(records) == 1:
            return set(records)
        items = list(records.items())
        half = len(items) // 2
        return _unparsed(dict(items[:half]), form) | _unparsed(dict(items[half:]), form)


def _runs(numbers: list[int]) -> Iterator[range]:
    """Ascending numbers as ranges."""
    for _, run in itertools.groupby(enumerate(numbers), lambda pair: pair[1] - pair[0]):
        run = [number for _, number in run]
        yield range(run[0], run[-1] + 1)


def impossible(batch: Mapping[str, np.ndarray], form: Format) -> tuple[int, str] | None:
    """Returns the row of a value that no valid record has, and what it is; None if there is none."""
    limits = {
        "input_ids": form.vocab_size,
        "masked_lm_ids": form.vocab_size,
        "masked_lm_positions": form.length,
        "next_sentence_labels": 2,
    }
    for name, limit in limits.items():
        values = batch[name].view(np.uint32)  # a negative number becomes a large one
        if limit and values.max(initial=0) >= limit:
            row = int((values.reshape(len(values), -1) >= limit).any(1).argmax())
            value = int(batch[name][row].flat[(values[row] >= limit).argmax()])
            return row, f"{name} has {value}, which is not from 0 to {limit - 1}"
    return None
