"""TFRecords of `tf.train.Example`s from arrays: byte for byte what TensorFlow writes, without an object per record.

A message is built for all records at once, as columns of bytes: `bytes` `[records, width]`, of which a record has those
where `used` is True. Numbers and lengths take more bytes in some records than in others.
"""

import itertools
import math
import struct
from collections.abc import Iterator
from typing import BinaryIO, NamedTuple

import google_crc32c
import numpy as np
from etils import epath

# Field numbers and wire types (2: with a length) of tensorflow/core/example/{example,feature}.proto.
_WITH_LENGTH = 2
_FEATURES, _FEATURE, _KEY, _VALUE, _LIST = 1, 1, 1, 2, 1
_BYTES_LIST, _FLOAT_LIST, _INT64_LIST = 1, 2, 3


class Numbers(NamedTuple):
    """A feature of type bytes: the first `sizes` `[records]` numbers of each record, little-endian.

    Attributes:
      values: `[records, size]`.
    """

    values: np.ndarray
    sizes: np.ndarray


class _Columns(NamedTuple):
    """A part of a message: bytes `[records, width]`, which of them a record has, and how many `[records, 1]`."""

    bytes: list[np.ndarray]  # to be concatenated
    used: list[np.ndarray]
    sizes: np.ndarray


def tfrecords(examples: dict[str, np.ndarray | Numbers]) -> bytes:
    """Returns the TFRecords of n examples, which have the features `{name: [n, size]}`.

    Integers must not be negative, since a negative one takes ten bytes; other numbers are stored as float32.
    """
    (count,) = {count_of(values) for values in examples.values()}
    entries = []
    for name in sorted(examples):
        kind, content = _content(examples[name])
        value = _field(_VALUE, _field(kind, _field(_LIST, content)))
        entries.append(_field(_FEATURE, _joined(_field(_KEY, _constant(name.encode(), count)), value)))
    message = _field(_FEATURES, _joined(*entries))
    data = np.concatenate(message.bytes, axis=1)[np.concatenate(message.used, axis=1)].tobytes()
    ends = np.cumsum(message.sizes).tolist()
    return b"".join(itertools.chain.from_iterable(_framed(data[a:b]) for a, b in itertools.pairwise([0, *ends])))


def count_of(values: np.ndarray | Numbers) -> int:
    return len(values.sizes if isinstance(values, Numbers) else values)


def read_tfrecords(file: BinaryIO) -> Iterator[bytes | None]:
    """Yields the records of a file, None for one whose checksum is wrong. Ends where the next one cannot be found."""
    while len(start := file.read(12)) == 12 and _checksum(start[:8]) == start[8:]:
        (length,) = struct.unpack("<Q", start[:8])
        record, checksum = file.read(length), file.read(4)
        if len(checksum) < 4:
            return
        yield record if _checksum(record) == checksum else None


_START, _END = struct.Struct("<QI"), struct.Struct("<I")  # length and checksum of the length; checksum of the record
_SHORT = 1 << 20  # bytes


class Damaged(ValueError):
    """A file does not have the records that it should have; says which."""


class Places:
    """Where some records of files begin, so that what lies before them need not be gone through again."""

    EVERY = 256  # records

    def __init__(self):
        self._known: dict[str, list[int]] = {}

    def before(self, path: str, number: int) -> tuple[int, int]:
        """Returns the last known record up to record `number`, and its place in bytes."""
        known = self._known.setdefault(path, [0])
        index = min(number // self.EVERY, len(known) - 1)
        return index * self.EVERY, known[index]

    def add(self, path: str, number: int, place: int) -> None:
        if number % self.EVERY == 0 and number // self.EVERY == len(self._known.setdefault(path, [0])):
            self._known[path].append(place)


def read_range(
    path: str, first: int = 0, count: int | None = None, buffer: int = 1 << 20, places: Places | None = None
) -> Iterator[bytes]:
    """Yields `count` records of a file from record `first` on, or all.

    Args:
      buffer: bytes that are read at a time.
      places: what is known of where records begin, which this adds to.

    Raises `Damaged` at the first that is not there or has another checksum.
    """
    return itertools.chain.from_iterable(read_together(path, first, count, buffer, places))


def read_together(
    path: str, first: int = 0, count: int | None = None, buffer: int = 1 << 20, places: Places | None = None
) -> Iterator[list[bytes]]:
    """As `read_range`, as many records at a time as a buffer has."""
    last, places = math.inf if count is None else first + count, places or Places()
    number, before = places.before(path, first)
    data, place = b"", 0  # `before`: of the file, what lies before data
    with _opened(path) as file:
        file.seek(before)
        while number < last:
            records, ends = _frames(data, place, last - number)
            if not records:
                # What the last record lacks is read alone, so that no buffer is copied.
                missing = _missing(data, place) if place < len(data) else buffer
                if missing is None or not (more := file.read(missing)):
                    if count is None and place == len(data):
                        return
                    break
                data, before, place = data[place:] + more, before + place, 0
                continue
            begin = max(0, first - number)  # those before are not asked for
            good = begin + _intact(data, records[begin:], ends[begin:])
            if good > begin:
                yield records[begin:good]
            if good < len(records):
                number += good
                break
            for i in range(-number % Places.EVERY, len(records) + 1, Places.EVERY):
                places.add(path, number + i, before + (ends[i - 1] if i else place))
            number, place = number + len(records), ends[-1]
        else:
            return
    raise Damaged(f"record {number:,} is damaged or missing")


def _frames(data: bytes, place: int, most: float) -> tuple[list[bytes], list[int]]:
    """Returns the records that `data` has whole from a place on, `most` at most, and where the frame of each ends."""
    records, ends, size = [], [], len(data)
    while len(records) < most and place + _START.size <= size:
        length, _ = _START.unpack_from(data, place)
        start = place + _START.size
        place = start + length + _END.size
        if place > size:
            break
        records.append(data[start : start + length])
        ends.append(place)
    return records, ends


def _missing(data: bytes, place: int) -> int | None:
    """Returns how many bytes the record at a place lacks at least; None if its length is damaged."""
    rest = len(data) - place
    if rest < _START.size:
        return _START.size - rest
    length, checksum = _START.unpack_from(data, place)
    # A short length that is wrong makes the record wrong.
    if length > _SHORT and _masked(google_crc32c.value(data[place : place + 8])) != checksum:
        return None
    return _START.size + length + _END.size - rest


def _intact(data: bytes, records: list[bytes], ends: list[int]) -> int:
    """Returns how many of the records come before the first with another checksum than follows it in `data`."""
    found = _masked(np.fromiter(map(google_crc32c.value, records), np.uint32, len(records)))
    places = np.array(ends, np.int64)[:, None] + np.arange(-_END.size, 0)
    wrong = found != np.frombuffer(data, np.uint8)[places].view("<u4")[:, 0]
    return int(wrong.argmax()) if wrong.any() else len(records)


def _opened(path: str) -> BinaryIO:
    return open(path, "rb", buffering=0) if "://" not in path else epath.Path(path).open("rb")


def _framed(record: bytes) -> tuple[bytes, ...]:
    """tensorflow/core/lib/io/record_writer.h: length, its checksum, the record, its checksum."""
    length = struct.pack("<Q", len(record))
    return length, _checksum(length), record, _checksum(record)


def _checksum(data: bytes) -> bytes:
    return _END.pack(_masked(google_crc32c.value(data)))


def _masked(crc):
    """A masked CRC-32C, or many: rotated and shifted by a constant, as in tensorflow/core/lib/hash/crc32c.h."""
    return ((crc >> 15 | crc << 17) + 0xA282EAD8) & 0xFFFFFFFF


def _joined(*parts: _Columns) -> _Columns:
    return _Columns(
        [each for part in parts for each in part.bytes],
        [each for part in parts for each in part.used],
        sum(part.sizes for part in parts),
    )


def _field(number: int, content: _Columns) -> _Columns:
    """A field of a message: its number and wire type, its length, its content."""
    start = _constant(bytes([number << 3 | _WITH_LENGTH]), len(content.sizes))
    return _joined(start, _varints(content.sizes), content)


def _constant(data: bytes, count: int) -> _Columns:
    return _whole(np.broadcast_to(np.frombuffer(data, np.uint8), (count, len(data))))


def _content(values: np.ndarray | Numbers) -> tuple[int, _Columns]:
    """The kind of a list, and its content."""
    if isinstance(values, Numbers):
        numbers, sizes = values
        columns = np.ascontiguousarray(numbers, numbers.dtype.newbyteorder("<")).view(np.uint8)
        sizes = numbers.itemsize * np.asarray(sizes, np.int32)[:, None]
        return _BYTES_LIST, _Columns([columns], [np.arange(columns.shape[1]) < sizes], sizes)
    if values.dtype.kind in "iub":
        return _INT64_LIST, _varints(values)
    return _FLOAT_LIST, _whole(np.ascontiguousarray(values, "<f4").view(np.uint8))


def _whole(columns: np.ndarray) -> _Columns:
    """Columns that all records have."""
    count, width = columns.shape
    return _Columns([columns], [np.broadcast_to(True, columns.shape)], np.full((count, 1), width, np.int32))


def _varints(values: np.ndarray) -> _Columns:
    """Base 128, the lowest seven bits first; all bytes but the last have their highest bit set."""
    if values.size and values.min() < 0:
        raise ValueError("negative integers are not supported")
    width = max(1, -(-int(values.max(initial=0)).bit_length() // 7))
    if width == 1:
        return _whole(values.astype(np.uint8))
    numbers, used = np.empty((*values.shape, width), np.uint8), np.empty((*values.shape, width), bool)
    for place in range(width):
        rest = values >> (7 * place)
        numbers[..., place] = rest & 0x7F | (rest > 0x7F) << 7
        used[..., place] = (rest > 0) | (place == 0)
    used = used.reshape(len(values), -1)
    return _Columns([numbers.reshape(len(values), -1)], [used], used.sum(1, keepdims=True, dtype=np.int32))
