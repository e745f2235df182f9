"""Writes arrays as TFRecords of `tf.train.Example`s, and reads TFRecords. TensorFlow writes the same bytes.

The protocol buffers of all records are built together, as arrays of bytes `[records, width]`. Because the sizes of
numbers and lengths differ between records, a mask `used` selects the bytes of a record.
"""

import functools
import itertools
import math
import struct
from collections.abc import Iterator
from typing import Any, BinaryIO, NamedTuple

import google_crc32c
import numpy as np
from etils import epath

# Field numbers, and the wire type 2 (length-delimited), of tensorflow/core/example/{example,feature}.proto.
_WITH_LENGTH = 2
_FEATURES, _FEATURE, _KEY, _VALUE, _LIST = 1, 1, 1, 2, 1
_BYTES_LIST, _FLOAT_LIST, _INT64_LIST = 1, 2, 3


class Numbers(NamedTuple):
    """A feature of type bytes: little-endian numbers, whose count differs between records.

    Attributes:
      values: `[records, size]`.
      sizes: `[records]`, the number of values of each record. The remaining values of the row are padding.
    """

    values: np.ndarray
    sizes: np.ndarray


class _Columns(NamedTuple):
    """A part of the protocol buffers of all records.

    Attributes:
      bytes: arrays `[records, width]` that are concatenated along the width.
      used: arrays `[records, width]`: whether the byte is in the record.
      sizes: `[records, 1]`, the number of used bytes.
    """

    bytes: list[np.ndarray]
    used: list[np.ndarray]
    sizes: np.ndarray


def tfrecords(examples: dict[str, np.ndarray | Numbers]) -> bytes:
    """Returns the bytes of the TFRecords of n examples.

    Args:
      examples: {name of a feature: `[n, size]`}. Integers must not be negative. Floats are stored as float32.
    """
    (count,) = {count_of(values) for values in examples.values()}
    entries = []
    for name in sorted(examples):
        kind, content = _content(examples[name])
        value = _field(_VALUE, _field(kind, _field(_LIST, content)))
        entries.append(_field(_FEATURE, _concatenate(_field(_KEY, _constant(name.encode(), count)), value)))
    message = _field(_FEATURES, _concatenate(*entries))
    data = np.concatenate(message.bytes, axis=1)[np.concatenate(message.used, axis=1)].tobytes()
    ends = np.cumsum(message.sizes).tolist()
    return b"".join(itertools.chain.from_iterable(_framed(data[a:b]) for a, b in itertools.pairwise([0, *ends])))


def count_of(values: np.ndarray | Numbers) -> int:
    """Returns the number of records of a feature."""
    return len(values.sizes if isinstance(values, Numbers) else values)


def read_tfrecords(file: BinaryIO) -> Iterator[bytes | None]:
    """Yields the records of a file; None for a record with a wrong checksum. Stops at a damaged length."""
    while len(start := file.read(12)) == 12 and _checksum(start[:8]) == start[8:]:
        (length,) = struct.unpack("<Q", start[:8])
        record, checksum = file.read(length), file.read(4)
        if len(checksum) < 4:
            return
        yield record if _checksum(record) == checksum else None


# The frame of a record. Before the record: the length of the record, and the checksum of the length. After the record:
# the checksum of the record.
_START, _END = struct.Struct("<QI"), struct.Struct("<I")
_MAX_UNCHECKED_LENGTH = 1 << 20  # bytes


class DamagedRecord(ValueError):
    """A record of a file is damaged or missing. The message contains the number of the record."""


class RecordOffsets:
    """The offsets in bytes of every 256th record of files, for seeking. Readers add the offsets that they pass."""

    EVERY = 256  # records

    def __init__(self) -> None:
        """Creates an empty index."""
        self._known: dict[str, list[int]] = {}

    def before(self, path: str, number: int) -> tuple[int, int]:
        """Returns the number and the offset of the last record with a known offset, up to record `number`."""
        known = self._known.setdefault(path, [0])
        index = min(number // self.EVERY, len(known) - 1)
        return index * self.EVERY, known[index]

    def add(self, path: str, number: int, offset: int) -> None:
        """Adds the offset of a record, if the number of the record is the next multiple of `EVERY`."""
        if number % self.EVERY == 0 and number // self.EVERY == len(self._known.setdefault(path, [0])):
            self._known[path].append(offset)


def read_range(
    path: str, first: int = 0, count: int | None = None, buffer: int = 1 << 20, offsets: RecordOffsets | None = None
) -> Iterator[bytes]:
    """Yields the records of a range of a file.

    Args:
      path: the file.
      first: the number of the first record.
      count: the number of records; None for all records from `first`.
      buffer: the number of bytes that are read at a time.
      offsets: known offsets of records, to which the function adds offsets.

    Raises:
      DamagedRecord: if a record is missing or has a wrong checksum.
    """
    return itertools.chain.from_iterable(read_chunks(path, first, count, buffer, offsets))


def read_chunks(
    path: str, first: int = 0, count: int | None = None, buffer: int = 1 << 20, offsets: RecordOffsets | None = None
) -> Iterator[list[bytes]]:
    """Yields lists of records, one list per buffer, see `read_range`."""
    last, offsets = math.inf if count is None else first + count, offsets or RecordOffsets()
    number, data_offset = offsets.before(path, first)
    data, place = b"", 0  # `data` begins at `data_offset` of the file; record `number` begins at `data[place]`
    with _open_unbuffered(path) as file:
        file.seek(data_offset)
        while number < last:
            records, ends = _split_frames(data, place, last - number)
            if not records:
                # Reads only the rest of an incomplete record, to avoid copying a full buffer.
                missing = _missing_bytes(data, place) if place < len(data) else buffer
                if missing is None or not (more := file.read(missing)):
                    if count is None and place == len(data):
                        return
                    break
                data, data_offset, place = data[place:] + more, data_offset + place, 0
                continue
            begin = max(0, first - number)  # skips records before `first`
            good = begin + _count_intact(data, records[begin:], ends[begin:])
            if good > begin:
                yield records[begin:good]
            if good < len(records):
                number += good
                break
            for i in range(-number % RecordOffsets.EVERY, len(records) + 1, RecordOffsets.EVERY):
                offsets.add(path, number + i, data_offset + (ends[i - 1] if i else place))
            number, place = number + len(records), ends[-1]
        else:
            return
    raise DamagedRecord(f"record {number:,} is damaged or missing")


def _split_frames(data: bytes, place: int, most: float) -> tuple[list[bytes], list[int]]:
    """Returns up to `most` complete records of `data[place:]`, and the ends of their frames in `data`."""
    records: list[bytes] = []
    ends: list[int] = []
    while len(records) < most and place + _START.size <= len(data):
        length, _ = _START.unpack_from(data, place)
        start = place + _START.size
        place = start + length + _END.size
        if place > len(data):
            break
        records.append(data[start : start + length])
        ends.append(place)
    return records, ends


def _missing_bytes(data: bytes, place: int) -> int | None:
    """Returns a lower bound of the missing bytes of the record at `data[place]`; None if the length is damaged."""
    rest = len(data) - place
    if rest < _START.size:
        return _START.size - rest
    length, checksum = _START.unpack_from(data, place)
    # A damaged length that is small is detected later, by the checksum of the record.
    if length > _MAX_UNCHECKED_LENGTH and _masked(google_crc32c.value(data[place : place + 8])) != checksum:
        return None
    return _START.size + length + _END.size - rest


def _count_intact(data: bytes, records: list[bytes], ends: list[int]) -> int:
    """Returns the number of records before the first record with a wrong checksum.

    Args:
      data: the bytes that contain the frames of the records.
      records: the records.
      ends: the ends of the frames in `data`.
    """
    actual = _masked(np.fromiter(map(google_crc32c.value, records), np.uint32, len(records)))
    places = np.array(ends, np.int64)[:, None] + np.arange(-_END.size, 0)
    wrong = actual != np.frombuffer(data, np.uint8)[places].view("<u4")[:, 0]
    return int(wrong.argmax()) if wrong.any() else len(records)


def _open_unbuffered(path: str) -> BinaryIO:
    return open(path, "rb", buffering=0) if "://" not in path else epath.Path(path).open("rb")


def _framed(record: bytes) -> tuple[bytes, ...]:
    """Frames a record as in tensorflow/core/lib/io/record_writer.h: length, checksum, record, checksum."""
    length = struct.pack("<Q", len(record))
    return length, _checksum(length), record, _checksum(record)


def _checksum(data: bytes) -> bytes:
    return _END.pack(_masked(google_crc32c.value(data)))


def _masked(crc: Any) -> Any:
    """Returns masked CRC-32Cs: rotated and shifted by a constant, as in tensorflow/core/lib/hash/crc32c.h."""
    return ((crc >> 15 | crc << 17) + 0xA282EAD8) & 0xFFFFFFFF


def _concatenate(*parts: _Columns) -> _Columns:
    return _Columns(
        [columns for part in parts for columns in part.bytes],
        [columns for part in parts for columns in part.used],
        functools.reduce(np.add, (part.sizes for part in parts)),
    )


def _field(number: int, content: _Columns) -> _Columns:
    """Returns a length-delimited field of a protocol buffer: number and wire type, length, content."""
    start = _constant(bytes([number << 3 | _WITH_LENGTH]), len(content.sizes))
    return _concatenate(start, _varints(content.sizes), content)


def _constant(data: bytes, count: int) -> _Columns:
    return _in_all_records(np.broadcast_to(np.frombuffer(data, np.uint8), (count, len(data))))


def _content(values: np.ndarray | Numbers) -> tuple[int, _Columns]:
    """Returns the field number of the list type of a feature, and the content of the list."""
    if isinstance(values, Numbers):
        numbers, sizes = values
        columns = np.ascontiguousarray(numbers, numbers.dtype.newbyteorder("<")).view(np.uint8)
        sizes = numbers.itemsize * np.asarray(sizes, np.int32)[:, None]
        return _BYTES_LIST, _Columns([columns], [np.arange(columns.shape[1]) < sizes], sizes)
    if values.dtype.kind in "iub":
        return _INT64_LIST, _varints(values)
    return _FLOAT_LIST, _in_all_records(np.ascontiguousarray(values, "<f4").view(np.uint8))


def _in_all_records(columns: np.ndarray) -> _Columns:
    """Returns columns whose bytes are in all records."""
    count, width = columns.shape
    return _Columns([columns], [np.broadcast_to(True, columns.shape)], np.full((count, 1), width, np.int32))


def _varints(values: np.ndarray) -> _Columns:
    """Encodes integers `[records, size]` as varints of protocol buffers: base 128, the lowest 7 bits first."""
    if values.size and values.min() < 0:
        raise ValueError(f"examples: {values.min()} is negative; expected integers of at least 0")
    width = max(1, -(-int(values.max(initial=0)).bit_length() // 7))
    if width == 1:
        return _in_all_records(values.astype(np.uint8))
    numbers, used = np.empty((*values.shape, width), np.uint8), np.empty((*values.shape, width), bool)
    for place in range(width):
        rest = values >> (7 * place)
        numbers[..., place] = rest & 0x7F | (rest > 0x7F) << 7
        used[..., place] = (rest > 0) | (place == 0)
    used = used.reshape(len(values), -1)
    return _Columns([numbers.reshape(len(values), -1)], [used], used.sum(1, keepdims=True, dtype=np.int32))
