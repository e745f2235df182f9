"""Converts serialized `tf.train.Example`s to arrays without TensorFlow. The numbers of many records become one array.

Records of one writer have the same features in the same order, and differ only in sizes. Therefore all records are
parsed in parallel: an array holds the current position in each record. `layouts.parse_records` first separates records
with a different order of features.
"""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

# Field numbers and wire types of tensorflow/core/example/{example,feature}.proto, see `serialization`.
_FIRST, _SECOND = 0x0A, 0x12  # tags of the fields 1 and 2, which have lengths
_PADDING = 16  # bytes after the last record, in which the parser may look for a tag and a length
_KINDS = {0x0A: "bytes", 0x12: "float", 0x1A: "int64"}


class InvalidRecord(ValueError):
    """A record does not have the expected format."""


class Feature(NamedTuple):
    """The places of a list of values in all records.

    Attributes:
      kind: "bytes", "float" or "int64".
      starts: `[records]`, the position of the first byte of the list among the bytes of all records.
      sizes: `[records]`, the number of bytes of the list.
    """

    kind: str
    starts: np.ndarray
    sizes: np.ndarray


def feature_names(record: bytes) -> tuple[bytes, ...]:
    """Returns the names of the features of an example in their order; () if the record is not an example."""

    def read_size(position: int) -> tuple[int, int]:
        """Returns the position after a number of variable size, and the number."""
        size, shift = 0, 0
        while (byte := record[position]) > 0x7F:
            size, shift, position = size | (byte & 0x7F) << shift, shift + 7, position + 1
        return position + 1, size | byte << shift

    names = []
    try:
        position, _ = read_size(1)
        while position < len(record):
            entry, entry_size = read_size(position + 1)
            name, name_size = read_size(entry + 1)
            names.append(record[name : name + name_size])
            position = entry + entry_size
    except IndexError:
        return ()
    return tuple(names)


class Records:
    """Serialized examples that have the same features in the same order.

    Attributes:
      features: {name: feature}.
    """

    def __init__(self, records: Sequence[bytes]) -> None:
        """Finds the features.

        Args:
          records: serialized examples.

        Raises:
          InvalidRecord: if a record is not an example, or has other features than the first record.
        """
        self._raw = b"".join([*records, bytes(_PADDING)])
        self._data = np.frombuffer(self._raw, np.uint8)
        sizes = np.fromiter(map(len, records), np.int64, len(records))
        ends = np.cumsum(sizes)
        position = self._enter(ends - sizes, _FIRST, ends)
        self.features: dict[str, Feature] = {}
        while (position < ends).any():
            if (position >= ends).any():
                raise InvalidRecord("has other features than the first record")
            entry, size = self._read_size(self._after_tag(position, _FIRST))
            end = entry + size
            if (end > ends).any():
                raise InvalidRecord("is not a tf.train.Example")
            name, value = self._read_name(entry, end)
            value = self._enter(value, _SECOND, end)
            tag = self._common_byte(value)
            if tag not in _KINDS:
                raise InvalidRecord("has a feature of an unknown type")
            start = self._enter(value, tag, end)
            self.features[name] = Feature(_KINDS[tag], start, end - start)
            position = end
        if (position != ends).any():
            raise InvalidRecord("is not a tf.train.Example")

    def _common_byte(self, position: np.ndarray) -> int:
        """Returns the byte at a position, which must be the same in all records."""
        bytes_of_records = self._data.take(position)
        if (bytes_of_records != bytes_of_records[0]).any():
            raise InvalidRecord("has other features than the first record")
        return int(bytes_of_records[0])

    def _after_tag(self, position: np.ndarray, tag: int) -> np.ndarray:
        """Returns the position after a tag, which all records must have."""
        if (self._data.take(position) != tag).any():
            raise InvalidRecord("is not a tf.train.Example")
        return position + 1

    def _enter(self, position: np.ndarray, tag: int, end: np.ndarray) -> np.ndarray:
        """Returns the start of the content of a field with a tag. The content must end at `end`."""
        start, size = self._read_size(self._after_tag(position, tag))
        if (start + size != end).any():
            raise InvalidRecord("has other features than the first record")
        return start

    def _read_size(self, position: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Returns the position after a number of variable size, and the number."""
        byte = self._data.take(position)
        size, more, shift = (byte & 0x7F).astype(np.int64), byte > 0x7F, 7
        position = position + 1
        while more.any():
            if shift > 28:
                raise InvalidRecord("is not a tf.train.Example")
            byte = self._data.take(position) * more
            size |= (byte & 0x7F).astype(np.int64) << shift
            position, more, shift = position + more, byte > 0x7F, shift + 7
        return position, size

    def _read_name(self, entry: np.ndarray, end: np.ndarray) -> tuple[str, np.ndarray]:
        """Returns the name of a feature, which must be the same in all records, and the position after the name."""
        start, size = self._read_size(self._after_tag(entry, _FIRST))
        if (size != size[0]).any() or (start + size > end).any():
            raise InvalidRecord("has other features than the first record")
        names = self._windows(start, int(size[0]))
        if (names != names[0]).any():
            raise InvalidRecord("has other features than the first record")
        return names[0].tobytes().decode("utf-8", "replace"), start + size

    def count(self, name: str) -> int:
        """Returns the number of values of a feature in the first record; 0 without the feature."""
        if name not in self.features:
            return 0
        kind, starts, sizes = self._values(name, self.features[name].kind)
        content = self._data[starts[0] : starts[0] + sizes[0]]
        return int(sizes[0]) // 4 if kind == "float" else int((content < 0x80).sum())

    def numbers(self, name: str, size: int, dtype: type) -> np.ndarray:
        """Returns a feature of numbers, `[records, size]`.

        Args:
          name: the name of the feature.
          size: the number of values in each record.
          dtype: float32; all other types return int32.

        Raises:
          InvalidRecord: if a record does not have such a feature.
        """
        feature = self._values(name, "float" if dtype == np.float32 else "int64")
        if dtype == np.float32:
            return self._rows(feature, 4 * size).view("<f4").astype(np.float32, copy=False)
        return self._integers(feature, size)

    def strings(self, name: str, dtype: np.dtype, most: int) -> tuple[np.ndarray, np.ndarray]:
        """Returns a feature that is one string of numbers.

        Args:
          name: the name of the feature.
          dtype: the type of the numbers in the string.
          most: the largest number of values.

        Returns:
          The numbers, int32 `[records, most]`, padded with 0; and the number of values of each record, `[records]`.

        Raises:
          InvalidRecord: if a record does not have such a feature.
        """
        feature = self._values(name, "bytes")
        counts = feature.sizes // dtype.itemsize
        if (counts > most).any() or (feature.sizes % dtype.itemsize).any():
            raise InvalidRecord(f"has a wrong size of {name}")
        numbers = np.zeros((len(counts), most), np.int32)
        numbers[np.arange(most) < counts[:, None]] = np.frombuffer(self._joined(feature), dtype)
        return numbers, counts

    def _values(self, name: str, kind: str) -> Feature:
        """Returns the places of the packed numbers of a feature, or of its string."""
        if name not in self.features or self.features[name].kind != kind:
            raise InvalidRecord(f"lacks {name}")
        _, list_start, size = self.features[name]
        if not size.any():  # An empty list has no bytes.
            return self.features[name]
        end = list_start + size
        start = self._enter(list_start, _FIRST, end)
        return Feature(kind, start, end - start)

    def _rows(self, feature: Feature, size: int) -> np.ndarray:
        """Returns the bytes of a feature that has `size` bytes in each record, `[records, size]`."""
        if (feature.sizes != size).any():
            raise InvalidRecord("has features of other sizes")
        return self._windows(feature.starts, size)

    def _windows(self, starts: np.ndarray, size: int) -> np.ndarray:
        """Returns `size` bytes from each start, `[records, size]`. NumPy copies each window as one element."""
        if not size:
            return np.empty((len(starts), 0), np.uint8)
        all_windows: np.ndarray = np.ndarray(len(self._raw) - size + 1, f"V{size}", self._raw, strides=(1,))
        return all_windows[starts].view(np.uint8).reshape(len(starts), size)

    def _joined(self, feature: Feature, before: bytes = b"") -> bytes:
        """Returns the bytes of a feature of all records, one after the other."""
        ends = feature.starts + feature.sizes
        contents = (self._raw[start:end] for start, end in zip(feature.starts.tolist(), ends.tolist()))
        return b"".join([before, *contents])

    def _integers(self, feature: Feature, size: int) -> np.ndarray:
        """Returns packed integers, int32 `[records, size]`.

        An integer is stored in base 128 with the lowest seven bits first. All bytes except the last have the highest
        bit set.
        """
        if (feature.sizes == size).all():
            content = self._rows(feature, size)
            if (content < 0x80).all():
                return content.astype(np.int32)
        before = b"\xff" * (_PADDING - 1) + b"\0"  # a number before the first number
        content = np.frombuffer(self._joined(feature, before), np.uint8)
        position = np.flatnonzero(content < 0x80)[1:]  # the last byte of each number
        ends = np.cumsum(feature.sizes) + _PADDING - 1  # the last byte of each record
        if len(position) != size * len(ends) or (position[size - 1 :: size] != ends).any():
            raise InvalidRecord("has features of other sizes")
        values = content.take(position).astype(np.uint32)
        more: np.ndarray | np.uint8 = np.uint8(1)
        while True:  # Products are much faster than indexing by a mask.
            position -= 1
            byte = content.take(position)
            more = (byte >> 7) & more
            if not more.any():
                return values.view(np.int32).reshape(-1, size)
            values *= more * np.uint8(127) + np.uint8(1)  # uint32 drops all higher bits
            values += (byte & 0x7F) * more
