"""TFRecords of `tf.train.Example`s from arrays: byte for byte what TensorFlow writes, without an object per record.

A message is built for all records at once, as columns of bytes: `bytes` `[records, width]`, of which a record has those
where `used` is True. Numbers and lengths take more bytes in some records than in others.
"""

import itertools
import struct
from typing import NamedTuple

import google_crc32c
import numpy as np

# Field numbers and wire types (2: with a length) of tensorflow/core/example/{example,feature}.proto.
_WITH_LENGTH = 2
_FEATURES, _FEATURE, _KEY, _VALUE, _LIST = 1, 1, 1, 2, 1
_FLOAT_LIST, _INT64_LIST = 2, 3


class _Columns(NamedTuple):
    """A part of a message: bytes `[records, width]`, which of them a record has, and how many `[records, 1]`."""

    bytes: list[np.ndarray]  # to be concatenated
    used: list[np.ndarray]
    sizes: np.ndarray


def tfrecords(examples: dict[str, np.ndarray]) -> bytes:
    """Returns the TFRecords of n examples, which have the features `{name: [n, size]}`.

    Integers must not be negative, since a negative one takes ten bytes; other numbers are stored as float32.
    """
    (count,) = {len(values) for values in examples.values()}
    entries = []
    for name in sorted(examples):
        values = examples[name]
        is_whole = values.dtype.kind in "iub"
        kind, numbers = (_INT64_LIST, _varints(values)) if is_whole else (_FLOAT_LIST, _floats(values))
        value = _field(_VALUE, _field(kind, _field(_LIST, numbers)))
        entries.append(_field(_FEATURE, _joined(_field(_KEY, _constant(name.encode(), count)), value)))
    message = _field(_FEATURES, _joined(*entries))
    data = np.concatenate(message.bytes, axis=1)[np.concatenate(message.used, axis=1)].tobytes()
    ends = np.cumsum(message.sizes).tolist()
    return b"".join(itertools.chain.from_iterable(_framed(data[a:b]) for a, b in itertools.pairwise([0, *ends])))


def _framed(record: bytes) -> tuple[bytes, ...]:
    """tensorflow/core/lib/io/record_writer.h: length, its checksum, the record, its checksum."""
    length = struct.pack("<Q", len(record))
    return length, _checksum(length), record, _checksum(record)


def _checksum(data: bytes) -> bytes:
    """A masked CRC-32C: rotated and shifted by a constant, as in tensorflow/core/lib/hash/crc32c.h."""
    crc = google_crc32c.value(data)
    return struct.pack("<I", ((crc >> 15 | crc << 17) + 0xA282EAD8) & 0xFFFFFFFF)


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


def _floats(values: np.ndarray) -> _Columns:
    return _whole(np.ascontiguousarray(values, "<f4").view(np.uint8))


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
