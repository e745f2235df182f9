"""Documents whose texts are in a file, so that a corpus may be larger than the memory."""

import functools
import hashlib
import itertools
from collections.abc import Iterable, Iterator, Sequence
from typing import overload

import numpy as np
import pyarrow
from etils import epath

from bertjax.common.files import replacing

BATCH = 1024  # texts in a record batch of the file
SCHEMA = pyarrow.schema({"text": pyarrow.large_string()})


class StoredTexts(Sequence[str]):
    """Distinct texts: some in memory, then the other texts of a file. `write` returns the texts.

    Args:
      first: the texts in memory.
      path: the file, whose record batches have `BATCH` texts.
      rows: the sorted rows of the file that are part of the texts.
    """

    def __init__(self, first: Sequence[str], path: epath.PathLike, rows: np.ndarray) -> None:
        self._first, self._rows = first, rows
        self._reader = pyarrow.ipc.open_file(pyarrow.memory_map(str(path)))
        self._batch = functools.lru_cache(4)(self._reader.get_batch)

    @classmethod
    def write(cls, path: epath.PathLike, first: Sequence[str], more: Iterable[str]) -> "StoredTexts":
        """Writes more texts to a file, and returns all texts; each text occurs once.

        The memory needs 16 bytes per text. Texts are compared by hashes of 64 bits: among ten million texts, a text is
        dropped because of an equal hash with a probability below 10**-5.

        Args:
          path: the .arrow file.
          first: the texts that stay in memory, which are distinct.
          more: the texts for the file.
        """
        hashes, texts = [_hashes(first)], iter(more)
        with replacing(path) as partial, pyarrow.OSFile(str(partial), "wb") as file:
            with pyarrow.ipc.new_file(file, SCHEMA) as writer:
                while batch := list(itertools.islice(texts, BATCH)):
                    hashes.append(_hashes(batch))
                    writer.write_batch(
                        pyarrow.RecordBatch.from_arrays([pyarrow.array(batch, SCHEMA.types[0])], SCHEMA.names)
                    )
        _, places = np.unique(np.concatenate(hashes), return_index=True)
        return cls(first, path, np.sort(places[places >= len(first)]) - len(first))

    def __len__(self) -> int:
        """Returns the number of texts."""
        return len(self._first) + len(self._rows)

    @overload
    def __getitem__(self, index: int) -> str: ...

    @overload
    def __getitem__(self, index: slice) -> list[str]: ...

    def __getitem__(self, index: int | slice) -> str | list[str]:
        """Returns a text, or a list of texts."""
        if isinstance(index, slice):
            return [self[number] for number in range(len(self))[index]]
        number = range(len(self))[index]
        if number < len(self._first):
            return self._first[number]
        batch, row = divmod(int(self._rows[number - len(self._first)]), BATCH)
        text: str = self._batch(batch).column("text")[row].as_py()
        return text

    def __iter__(self) -> Iterator[str]:
        """Yields the texts, with one batch of the file in memory at a time."""
        yield from self._first
        starts = np.arange(self._reader.num_record_batches + 1) * BATCH
        bounds = np.searchsorted(self._rows, starts)
        for number, (begin, end) in enumerate(itertools.pairwise(bounds)):
            texts = self._reader.get_batch(number).column("text").to_pylist()
            for row in self._rows[begin:end] - starts[number]:
                yield texts[row]


def _hashes(texts: Sequence[str]) -> np.ndarray:
    digests = b"".join(hashlib.blake2b(text.encode(), digest_size=8).digest() for text in texts)
    return np.frombuffer(digests, np.uint64)
