"""Finds the files and records that are not what was written."""

import concurrent.futures
import functools
import itertools
from collections.abc import Iterator, Mapping

import google_crc32c
import numpy as np
from etils import epath

from bertjax.common.errors import UserError
from bertjax.common.files import persistently
from bertjax.data.records import layouts
from bertjax.data.records.layouts import Format
from bertjax.data.records.parsing import Unfit
from bertjax.data.records.serialization import read_tfrecords

PART = 1 << 20  # bytes read at a time
HEAD_BYTES = 4096  # first bytes of a file, compared with the manifest before training
IO_THREADS = 16  # remote storage answers in tens of milliseconds
BLOCK = 1024  # records parsed at a time
LEAST_BYTES = 16  # least bytes of a record: its size and two checksums


@persistently
def crc32c_of(path: epath.PathLike) -> int:
    """Reads a file, and returns its checksum."""
    checksum = 0
    with epath.Path(path).open("rb") as file:
        while part := file.read(PART):
            checksum = google_crc32c.extend(checksum, part)
    return checksum


def check_files(files: Mapping[str, Mapping], reads_all: bool = False) -> dict[str, str]:
    """Compares the size and the head of files, or all of them, with what `records.write_records` returned for them.

    Returns {path: what is wrong}. Raises `UserError` if a file does not exist.
    """
    with concurrent.futures.ThreadPoolExecutor(IO_THREADS) as pool:
        check = functools.partial(_check_file, reads_all=reads_all)
        found = dict(zip(files, pool.map(check, files, files.values())))
    return {path: fault for path, fault in found.items() if fault}


def _check_file(path: str, entry: Mapping, reads_all: bool) -> str:
    file = epath.Path(path)
    if not file.exists():
        raise UserError(f"{path}: missing, but listed in the manifest; copy or prepare it again")
    if reads_all and "crc32c" not in entry:
        raise UserError(f"config.data.checksums = True: the manifest has none of {path}; set it to False")
    try:
        size = file.stat().length
        if (whole := entry.get("bytes", size)) < LEAST_BYTES * entry["records"]:
            records = f"{entry['records']:,} records, as the manifest says"
            raise UserError(f"{path}: cannot have {records}, in {whole:,} bytes; copy both again")
        if "bytes" not in entry:  # a manifest of an older version
            return ""
        if size != entry["bytes"]:
            return f"has {size:,} bytes, not {entry['bytes']:,} as the manifest says"
        with file.open("rb") as opened:
            head = google_crc32c.value(opened.read(HEAD_BYTES))
        if head == entry.get("head_crc32c") and reads_all and crc32c_of(path) != entry.get("crc32c"):
            return "is damaged: its checksum is not that of the manifest"
    except OSError as error:
        raise UserError(f"{path}: cannot be read ({error})") from None
    return "" if head == entry.get("head_crc32c") else "is another file than the manifest says, or was overwritten"


def find(files: Mapping[str, int], form: Format) -> Iterator[tuple[str, tuple[range, ...], str]]:
    """Yields the files, given with their numbers of records, that have records which are damaged or make no sense.

    Yields path, numbers of these records, what is wrong with the first.
    """
    pool = concurrent.futures.ThreadPoolExecutor(IO_THREADS)
    try:
        for path, (numbers, fault) in zip(files, pool.map(lambda path: _find(path, files[path], form), files)):
            if numbers:
                yield path, numbers, fault
    finally:
        pool.shutdown(cancel_futures=True)


def _find(path: str, count: int, form: Format) -> tuple[tuple[range, ...], str]:
    faults, read = {}, 0
    try:
        with epath.Path(path).open("rb") as file:
            found = enumerate(itertools.islice(read_tfrecords(file), count))
            while block := list(itertools.islice(found, BLOCK)):
                read += len(block)
                faults |= {number: "is damaged (wrong checksum)" for number, record in block if record is None}
                faults |= _unfit({number: record for number, record in block if record is not None}, form)
    except OSError as error:
        raise UserError(f"{path}: cannot be read ({error})") from None
    faults |= dict.fromkeys(range(read, count), f"is damaged or missing, as are all after it, of {count:,}")
    return tuple(_runs(sorted(faults))), faults[min(faults)] if faults else ""


def _unfit(records: dict[int, bytes], form: Format) -> dict[int, str]:
    """The records that cannot be parsed, or have impossible values, and what is wrong with them."""
    items = list(records.items())
    if not items:
        return {}
    try:
        found = impossible(layouts.parse([record for _, record in items], form), form)
        return {items[row][0]: fault for row, fault in found.items()}
    except Unfit:
        if len(items) == 1:
            return {items[0][0]: "lacks features, or has them in other sizes"}
        half = len(items) // 2
        return _unfit(dict(items[:half]), form) | _unfit(dict(items[half:]), form)


def _runs(numbers: list[int]) -> Iterator[range]:
    """Ascending numbers as ranges."""
    for _, run in itertools.groupby(enumerate(numbers), lambda pair: pair[1] - pair[0]):
        run = [number for _, number in run]
        yield range(run[0], run[-1] + 1)


def impossible(batch: Mapping[str, np.ndarray], form: Format) -> dict[int, str]:
    """Returns the rows with values that no record has, and what is wrong with them."""
    limits = {
        "input_ids": form.vocab_size,
        "masked_lm_ids": form.vocab_size,
        "masked_lm_positions": form.length,
        "next_sentence_labels": 2,
        "input_mask": 2,
        "segment_ids": form.token_types,
    }
    found = {}
    for name, limit in limits.items():
        given = batch.get(layouts.ARRAY_OF_FEATURE[name], np.zeros(0, np.int32))
        if limit and given.view(np.uint32).max(initial=0) >= limit:  # as which negative numbers are large ones
            values = given.reshape(len(given), -1)
            wrong = (values < 0) | (values >= limit)
            for row in np.flatnonzero(wrong.any(1)).tolist():
                value = values[row, wrong[row].argmax()]
                found.setdefault(row, f"has {value} in {name}, which must be from 0 to {limit - 1}")
    return found
