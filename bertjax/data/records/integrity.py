"""Finds damaged files and records."""

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
from bertjax.data.records.serialization import read_tfrecords

READ_BYTES = 1 << 20  # the number of bytes that are read at a time
HEAD_BYTES = 4096  # the number of first bytes of a file whose checksum is compared before training
IO_THREADS = 16  # threads hide the latency of remote storage, tens of milliseconds
BLOCK = 1024  # the number of records that are parsed together
DAMAGED, UNPARSED = "is damaged (wrong checksum)", "lacks features, or has features of other sizes"
MIN_RECORD_BYTES = 16  # the frame of an empty record: 8 bytes of length, and two checksums of 4 bytes


@persistently
def crc32c_of(path: epath.PathLike) -> int:
    """Returns the CRC-32C of a file."""
    checksum = 0
    with epath.Path(path).open("rb") as file:
        while chunk := file.read(READ_BYTES):
            checksum = google_crc32c.extend(checksum, chunk)
    return checksum


def check_files(files: Mapping[str, Mapping], reads_all: bool = False) -> dict[str, str]:
    """Compares the sizes and the checksums of files with the manifest.

    Args:
      files: {path: `manifest.FileEntry`}.
      reads_all: whether to compare the checksums of whole files, and not only of their first `HEAD_BYTES`.

    Returns:
      {path of a damaged file: description of the damage}.

    Raises:
      UserError: if a file does not exist or cannot be read, or the manifest is inconsistent.
    """
    with concurrent.futures.ThreadPoolExecutor(IO_THREADS) as pool:
        check = functools.partial(_check_file, reads_all=reads_all)
        faults = zip(files, pool.map(check, files, files.values()))
        return {path: fault for path, fault in faults if fault}


def _check_file(path: str, entry: Mapping, reads_all: bool) -> str:
    file = epath.Path(path)
    if not file.exists():
        raise UserError(f"{path}: missing, but listed in the manifest; copy or prepare it again")
    if reads_all and "crc32c" not in entry:
        raise UserError(f"config.data.checksums = True: the manifest has no checksum of {path}; set False")
    try:
        size = file.stat().length
        if (expected_size := entry.get("bytes", size)) < MIN_RECORD_BYTES * entry["records"]:
            raise UserError(
                f"{path}: {expected_size:,} bytes are too few for the {entry['records']:,} records in the manifest; "
                f"copy the file and the manifest again"
            )
        if "bytes" not in entry:  # a manifest of an older version
            return ""
        if size != entry["bytes"]:
            return f"has {size:,} bytes; expected {entry['bytes']:,} by the manifest"
        with file.open("rb") as opened:
            head = google_crc32c.value(opened.read(HEAD_BYTES))
        if head == entry.get("head_crc32c") and reads_all and crc32c_of(path) != entry.get("crc32c"):
            return "is damaged: its checksum differs from the manifest"
    except OSError as error:
        raise UserError(f"{path}: cannot be read ({error})") from None
    return (
        ""
        if head == entry.get("head_crc32c")
        else "is overwritten: the checksum of its first bytes differs from the manifest"
    )


def find_damaged_records(files: Mapping[str, int], form: Format) -> Iterator[tuple[str, tuple[range, ...], str]]:
    """Yields (path, numbers of the records, fault of the first record) for files with damaged or invalid records.

    Args:
      files: {path: number of records}.
      form: the format of the records.
    """
    pool = concurrent.futures.ThreadPoolExecutor(IO_THREADS)
    try:
        for path, (numbers, fault) in zip(files, pool.map(lambda path: _find_in_file(path, files[path], form), files)):
            if numbers:
                yield path, numbers, fault
    finally:
        pool.shutdown(cancel_futures=True)


def _find_in_file(path: str, count: int, form: Format) -> tuple[tuple[range, ...], str]:
    faults: dict[int, str] = {}
    read = 0
    try:
        for block in read_record_blocks(path, count):
            read += len(block)
            in_block = {number: DAMAGED if record is None else UNPARSED for number, record in block.items()}
            for numbers, batch in layouts.parse_valid(block, form):
                in_block |= dict.fromkeys(numbers, "")
                in_block |= {numbers[row]: fault for row, fault in invalid_rows(batch, form).items()}
            faults |= {number: fault for number, fault in in_block.items() if fault}
    except OSError as error:
        raise UserError(f"{path}: cannot be read ({error})") from None
    faults |= dict.fromkeys(range(read, count), f"is damaged or missing, and so are all later records of {count:,}")
    return tuple(_runs(sorted(faults))), faults[min(faults)] if faults else ""


def read_record_blocks(path: str, count: int) -> Iterator[dict[int, bytes | None]]:
    """Yields the first `count` records of a file in blocks, {number: record}; None for a damaged record."""
    with epath.Path(path).open("rb") as file:
        numbered = enumerate(itertools.islice(read_tfrecords(file), count))
        while block := dict(itertools.islice(numbered, BLOCK)):
            yield block


def _runs(numbers: list[int]) -> Iterator[range]:
    """Splits ascending numbers into ranges of consecutive numbers."""
    for _, pairs in itertools.groupby(enumerate(numbers), lambda pair: pair[1] - pair[0]):
        run = [number for _, number in pairs]
        yield range(run[0], run[-1] + 1)


def invalid_rows(batch: Mapping[str, np.ndarray], form: Format) -> dict[int, str]:
    """Returns {row: fault} of the rows of a batch with values out of range."""
    limits = {
        "input_ids": form.vocab_size,
        "masked_lm_ids": form.vocab_size,
        "masked_lm_positions": form.length,
        "next_sentence_labels": 2,
        "input_mask": 2,
        "segment_ids": form.token_types,
    }
    faults: dict[int, str] = {}
    for name, limit in limits.items():
        array = batch.get(layouts.ARRAY_OF_FEATURE[name], np.zeros(0, np.int32))
        if limit and array.view(np.uint32).max(initial=0) >= limit:  # as uint32, negative numbers are above the limit
            values = array.reshape(len(array), -1)
            wrong = (values < 0) | (values >= limit)
            for row in np.flatnonzero(wrong.any(1)).tolist():
                value = values[row, wrong[row].argmax()]
                faults.setdefault(row, f"has {value} in {name}, which must be from 0 to {limit - 1}")
    return faults
