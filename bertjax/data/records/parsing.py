"""Arrays from serialized `tf.train.Example`s without TensorFlow: many records at once, without an object per number.

Records of one writer have the same features in the same order and differ in sizes only. So all of them are gone through
side by side, an array holding the place in each. Records in another order are parsed apart (`layouts.parse`).
"""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

# Field numbers and wire types of tensorflow/core/example/{example,feature}.proto, see `serialization`.
_FIRST, _SECOND = 0x0A, 0x12  # tags of the fields 1 and 2, which have lengths
_BEYOND = 16  # bytes after the last record, in which it may be looked for a tag and a length
_KINDS = {0x0A: "bytes", 0x12: "float", 0x1A: "int64"}


class Unfit(ValueError):
    """A record is not what it should be."""


class Feature(NamedTuple):
    """Where a list of values is, of each record: `[records]` bytes before it, and its size in bytes."""

    kind: str  # bytes | float | int64
    starts: np.ndarray
    sizes: np.ndarray


def order_of(record: bytes) -> tuple[bytes, ...]:
    """Returns the names of an example's features in their order; () if it is none."""

    def size(place: int) -> tuple[int, int]:
        found, shift = 0, 0
        while (byte := record[place]) > 0x7F:
            found, shift, place = found | (byte & 0x7F) << shift, shift + 7, place + 1
        return place + 1, found | byte << shift

    names = []
    try:
        place, _ = size(1)
        while place < len(record):
            entry, length = size(place + 1)
            key, name = size(entry + 1)
            names.append(record[key : key + name])
            place = entry + length
    except IndexError:
        return ()
    return tuple(names)


class Records:
    """Serialized examples, which have the same features in the same order.

    Attributes:
      features: those that all have, by their names.
    """

    def __init__(self, records: Sequence[bytes]):
        self._raw = b"".join([*records, bytes(_BEYOND)])
        self._data = np.frombuffer(self._raw, np.uint8)
        sizes = np.fromiter(map(len, records), np.int64, len(records))
        ends = np.cumsum(sizes)
        place = self._enter(ends - sizes, _FIRST, ends)
        self.features: dict[str, Feature] = {}
        while (place < ends).any():
            if (place >= ends).any():
                raise Unfit("has other features than the first")
            entry, size = self._size(self._after(place, _FIRST))
            last = entry + size
            if (last > ends).any():
                raise Unfit("is no tf.train.Example")
            name, value = self._key(entry, last)
            value = self._enter(value, _SECOND, last)
            tag = self._byte(value)
            if tag not in _KINDS:
                raise Unfit("has a feature of an unknown type")
            start = self._enter(value, tag, last)
            self.features[name] = Feature(_KINDS[tag], start, last - start)
            place = last
        if (place != ends).any():
            raise Unfit("is no tf.train.Example")

    def _byte(self, place: np.ndarray) -> int:
        """The byte that all records have at their place."""
        found = self._data.take(place)
        if (found != found[0]).any():
            raise Unfit("has other features than the first")
        return int(found[0])

    def _after(self, place: np.ndarray, tag: int) -> np.ndarray:
        if (self._data.take(place) != tag).any():
            raise Unfit("is no tf.train.Example")
        return place + 1

    def _enter(self, place: np.ndarray, tag: int, last: np.ndarray) -> np.ndarray:
        """Returns where the field `tag` begins, which must end at `last`."""
        start, size = self._size(self._after(place, tag))
        if (start + size != last).any():
            raise Unfit("has other features than the first")
        return start

    def _size(self, place: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Reads a length: returns the places after it, and the length."""
        byte = self._data.take(place)
        size, more, shift = (byte & 0x7F).astype(np.int64), byte > 0x7F, 7
        place = place + 1
        while more.any():
            if shift > 28:
                raise Unfit("is no tf.train.Example")
            byte = self._data.take(place) * more
            size |= (byte & 0x7F).astype(np.int64) << shift
            place, more, shift = place + more, byte > 0x7F, shift + 7
        return place, size

    def _key(self, entry: np.ndarray, last: np.ndarray) -> tuple[str, np.ndarray]:
        """Returns the name that all records have in the field at their place, and where it ends."""
        key, size = self._size(self._after(entry, _FIRST))
        if (size != size[0]).any() or (key + size > last).any():
            raise Unfit("has other features than the first")
        found = self._windows(key, int(size[0]))
        if (found != found[0]).any():
            raise Unfit("has other features than the first")
        return found[0].tobytes().decode("utf-8", "replace"), key + size

    def count(self, name: str) -> int:
        """Returns how many numbers the first record has in a feature; 0 if it lacks it."""
        if name not in self.features:
            return 0
        kind, starts, sizes = self._values(name, self.features[name].kind)
        found = self._data[starts[0] : starts[0] + sizes[0]]
        return int(sizes[0]) // 4 if kind == "float" else int((found < 0x80).sum())

    def numbers(self, name: str, size: int, dtype: type) -> np.ndarray:
        """Returns a feature of `size` numbers: `[records, size]` int32, or float32 if that is the `dtype`."""
        feature = self._values(name, "float" if dtype == np.float32 else "int64")
        if dtype == np.float32:
            return self._rows(feature, 4 * size).view("<f4").astype(np.float32, copy=False)
        return self._integers(feature, size)

    def strings(self, name: str, dtype: np.dtype, most: int) -> tuple[np.ndarray, np.ndarray]:
        """Returns a feature of one string of numbers: `[records, most]` int32, the rest zeros, and the sizes
        `[records]`.
        """
        feature = self._values(name, "bytes")
        count = feature.sizes // dtype.itemsize
        if (count > most).any() or (feature.sizes % dtype.itemsize).any():
            raise Unfit(f"has another size in {name}")
        found = np.zeros((len(count), most), np.int32)
        found[np.arange(most) < count[:, None]] = np.frombuffer(self._joined(feature), dtype)
        return found, count

    def _values(self, name: str, kind: str) -> Feature:
        """Where the numbers of a feature are, or its one string."""
        if name not in self.features or self.features[name].kind != kind:
            raise Unfit(f"lacks {name}")
        _, place, size = self.features[name]
        if not size.any():  # an empty list is written as nothing
            return self.features[name]
        return Feature(kind, start := self._enter(place, _FIRST, place + size), place + size - start)

    def _rows(self, feature: Feature, size: int) -> np.ndarray:
        """The bytes of a feature, of which each record has `size`."""
        if (feature.sizes != size).any():
            raise Unfit("has features of other sizes")
        return self._windows(feature.starts, size)

    def _windows(self, starts: np.ndarray, size: int) -> np.ndarray:
        """`[records, size]`: so many bytes from a place on, of each record. Each is copied as a whole."""
        if not size:
            return np.empty((len(starts), 0), np.uint8)
        every = np.ndarray(len(self._raw) - size + 1, f"V{size}", self._raw, strides=(1,))
        return every[starts].view(np.uint8).reshape(len(starts), size)

    def _joined(self, feature: Feature, before: bytes = b"") -> bytes:
        ends = feature.starts + feature.sizes
        return b"".join([before, *(self._raw[a:b] for a, b in zip(feature.starts.tolist(), ends.tolist()))])

    def _integers(self, feature: Feature, size: int) -> np.ndarray:
        """Base 128, the lowest seven bits first; all bytes of a number but its last have their highest bit set."""
        if (feature.sizes == size).all():
            found = self._rows(feature, size)
            if (found < 0x80).all():
                return found.astype(np.int32)
        before = b"\xff" * (_BEYOND - 1) + b"\0"  # a number before the first
        found = np.frombuffer(self._joined(feature, before), np.uint8)
        place = np.flatnonzero(found < 0x80)[1:]  # the last byte of each number
        whole = np.cumsum(feature.sizes) + _BEYOND - 1
        if len(place) != size * len(whole) or (place[size - 1 :: size] != whole).any():
            raise Unfit("has features of other sizes")
        values, more = found.take(place).astype(np.uint32), np.uint8(1)
        while True:  # by products: choosing by a mask that is true here and there is far slower
            place -= 1
            byte = found.take(place)
            more = (byte >> 7) & more
            if not more.any():
                return values.view(np.int32).reshape(-1, size)
            values *= more * np.uint8(127) + np.uint8(1)  # what is beyond 32 bits is lost
            values += (byte & 0x7F) * more
