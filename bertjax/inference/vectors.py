"""Vectors of texts, a portion at a time, in a file that grows: work that is interrupted goes on where it was.

Until all is done, `FILE.partial` has the vectors as the rows of a .npy, and `FILE.partial.jsonl` says of what they are
and, in a line for each portion, how far they are. A portion counts once both are on the disk. Which texts are a portion
depends on the texts alone, so that a portion is computed as it would have been without the interruption.
"""

import abc
import dataclasses
import functools
import hashlib
import itertools
import json
import os
import shutil
import tempfile
import zipfile
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, BinaryIO, NamedTuple

import flax.linen as nn
import ml_collections
import numpy as np
from etils import epath

from bertjax.common import checksums
from bertjax.common.errors import UserError
from bertjax.common.files import parse_json, replacing
from bertjax.common.progress import Bar
from bertjax.config.model_config import BertConfig
from bertjax.data.loading.examples import Examples
from bertjax.inference import predictor
from bertjax.inference.heads import Head
from bertjax.inference.losses import LabelLoss
from bertjax.interop.pretrained import Pretrained
from bertjax.models.heads import PooledStates

SUFFIXES = (".npz", ".npy", ".parquet")
NAME, COLUMN = "vectors", "vector"  # the array in an .npz, the column of a .parquet
# What is read, sorted by length, and held at a time: at most so many texts, and about so many characters.
PORTION_TEXTS, PORTION_CHARACTERS = 1 << 12, 1 << 22
ROWS_AT_ONCE = 1 << 14  # written to a .parquet
TEXTS_AT_ONCE = 1 << 14  # held as ids
TEXTS_BETWEEN_LINES = 1 << 9  # held as ids where progress is shown


class TextEmbedder(abc.ABC):
    """Computes the embeddings of texts with a checkpoint.

    Args:
      source: the checkpoint.
      head: the head whose outputs are embeddings.
    """

    def __init__(self, source: Pretrained, head: Head) -> None:
        self.source, self.head = source, head

    @abc.abstractmethod
    def encode(self, texts: list[str]) -> tuple[list[np.ndarray], list[np.ndarray], list[int]]:
        """Returns the ids and the token types of each text, and the number of tokens that were cut off."""

    @property
    @abc.abstractmethod
    def flags(self) -> Mapping[str, str]:
        """The settings that determine the embeddings, by flag of `bertjax extract`."""

    def finish(self, embeddings: np.ndarray) -> np.ndarray:
        """Returns the final embeddings of the outputs of the head `[texts, width]`."""
        return embeddings

    def __call__(self, texts: Sequence[str], bar: Bar | None = None) -> tuple[np.ndarray, list[bool]]:
        """Returns the embeddings `[texts, width]` float32, and whether each text was truncated.

        Args:
          texts: the texts.
          bar: a bar that counts the texts.
        """
        embeddings, cut, size = [], [], TEXTS_BETWEEN_LINES if bar else TEXTS_AT_ONCE
        for start in range(0, len(texts), size):
            *arrays, lost = self.encode(list(texts[start : start + size]))
            embeddings.append(self.finish(np.stack(self._compute(Examples(*arrays)))))
            cut += [number > 0 for number in lost]
            if bar:
                bar.update(len(lost))
        return np.concatenate(embeddings), cut

    @functools.cached_property
    def _compute(self) -> Callable[[Examples], list[np.ndarray]]:
        return predictor.on_one_device(self.head, self.source)

    def identity(self) -> dict[str, str]:
        """Returns {flag: value} that differs between different embeddings of the same texts."""
        source, digest = self.source, hashlib.sha256()
        arrays = {name: checksums.of_numpy(np.asarray(x)) for name, x in checksums.names_of(source.params).items()}
        parts = dataclasses.asdict(source.config), source.head, source.tokenizer.fingerprint, source.max_seq_length
        for part in (arrays, *parts):
            digest.update(json.dumps(part, sort_keys=True).encode())
        return {"checkpoint": digest.hexdigest()[:16], "dtype": source.dtype, **self.flags}


@dataclasses.dataclass(frozen=True)
class PooledStatesHead(Head):
    """Pooled hidden states `[batch, width]`, of any encoder. The head has no params, and no loss trains it.

    Attributes:
      layers: one of `layer_pooling.WITHOUT_WEIGHTS`; the model must have enough layers.
      pooling: mean, cls or last, see `segments.pool_states`.
    """

    layers: str
    pooling: str

    def make_model(self, config: BertConfig, **settings: Any) -> nn.Module:
        """Returns the module."""
        return PooledStates(config, layers=self.layers, pooling=self.pooling, **settings)

    def loss(self, config: ml_collections.ConfigDict) -> LabelLoss:
        """Raises an error: the head is not trained."""
        raise NotImplementedError("pooled hidden states have no loss")


class PooledStatesEmbedder(TextEmbedder):
    """Computes embeddings of texts by pooling the hidden states of any encoder."""

    def __init__(self, source: Pretrained, layers: str, pooling: str) -> None:
        # Without settings, the model has no head of a task.
        super().__init__(
            dataclasses.replace(source, settings=ml_collections.ConfigDict()), PooledStatesHead(layers, pooling)
        )

    @property
    def flags(self) -> Mapping[str, str]:
        """The layers and the kind of pooling."""
        return {"layers": self.head.layers, "pool": self.head.pooling}

    def encode(self, texts: list[str]) -> tuple[list[np.ndarray], list[np.ndarray], list[int]]:
        """Encodes texts; a text is truncated to the positions of the model."""
        tokenizer = self.source.tokenizer
        room = self.source.config.max_position_embeddings - len(tokenizer.framed(()))
        pieces = [tokenizer.encode_with_masks(text) for text in texts]
        ids = [np.array(tokenizer.framed(text_ids[:room]), np.int32) for text_ids in pieces]
        types = [tokenizer.token_types(len(text_ids)) for text_ids in ids]
        return ids, types, [max(0, len(text_ids) - room) for text_ids in pieces]


class Done(NamedTuple):
    """How far vectors are.

    Attributes:
      digest: a hash of the texts so far.
      cut: how many of them were truncated.
    """

    texts: int = 0
    digest: str = ""
    cut: int = 0


class WrittenVectors(NamedTuple):
    """What `write` has written."""

    shape: tuple[int, int]
    cut: int


def write(
    path: epath.PathLike,
    embedder: TextEmbedder,
    texts: Iterable[str],
    ids: Callable[[], Iterable[str]] | None = None,
    id_name: str = "id",
    size: int = 0,
) -> WrittenVectors:
    """Writes the vectors of texts to a file of one of the `SUFFIXES`, and goes on with what is begun of it.

    Args:
      texts: one or more.
      ids: returns an id of each text, for a column `id_name` of a .parquet.
      size: bytes of the texts, if known, for the bar that shows the progress.

    Raises `UserError` if what is begun is of other vectors or texts, or in use; nothing is changed then.
    """
    path = epath.Path(path)
    if "://" in str(path):  # object stores cannot append
        with tempfile.TemporaryDirectory() as folder:
            local = epath.Path(folder) / path.name
            found = write(local, embedder, texts, ids, id_name, size)
            with replacing(path) as whole:
                local.copy(whole)
        return found
    path.parent.mkdir(parents=True, exist_ok=True)
    partial, journal = (path.with_name(f"{path.name}.partial{suffix}") for suffix in ("", ".jsonl"))
    partial.touch()
    with open(partial, "r+b") as file:
        _lock(file, partial)
        found = _compute(file, partial, journal, embedder, texts, size)
        file.seek(0)
        _write_header(file, found.shape)
        file.flush()
        os.fsync(file.fileno())
        if path.suffix == ".npy":
            partial.replace(path)
        else:
            with replacing(path) as whole:
                if path.suffix == ".npz":
                    _write_npz(whole, file)
                else:
                    _write_parquet(whole, partial, ids, id_name)
            partial.unlink()
        journal.unlink()
    return found


def _lock(file: BinaryIO, path: epath.Path) -> None:
    try:
        import fcntl
    except ModuleNotFoundError:  # on Windows
        return
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        raise UserError(f"{path}: in use by another process; wait for it, or name another --output") from None
    except OSError:  # a file system without locks
        pass


def _compute(
    file: BinaryIO, partial: epath.Path, journal: epath.Path, embedder: TextEmbedder, texts: Iterable[str], size: int
) -> WrittenVectors:
    """Adds rows to the file until those of all texts are there."""
    identity, digest, count = embedder.identity(), hashlib.sha256(), 0
    remedy = "delete it to begin anew, or name another --output"
    begun, steps = _read_journal(journal)
    if steps and begun != identity:
        flag = next(name for name in {**begun, **identity} if begun.get(name) != identity.get(name))
        raise UserError(f"{partial}: begun with another --{flag}; {remedy}")
    width, steps = _shown(file, steps)
    done = steps[-1] if steps else Done()
    cut = done.cut
    with open(f"{journal}.new", "w") as new:  # without what is torn, and what the rows lack
        new.writelines(f"{json.dumps(line)}\n" for line in (identity, *steps))
    os.replace(f"{journal}.new", journal)
    with open(journal, "a") as log, Bar("vectors", [size]) as bar:
        for portion in _portions(texts):
            for text in portion:
                content = text.encode()
                digest.update(b"%d " % len(content) + content)
                bar.update(len(content) + 1)
            count += len(portion)
            if count < done.texts:
                continue
            if count == done.texts and digest.hexdigest() == done.digest:
                print(f"going on after {count:,} texts, which {partial} has", flush=True)
                file.seek(file.truncate(_start(width) + 4 * width * count))
                continue
            if count - len(portion) < done.texts:
                break
            found, are_cut = embedder(portion)
            if not width:
                width = found.shape[1]
                file.seek(file.truncate(0))
                _write_header(file, (0, width))
            cut += sum(are_cut)
            file.write(np.ascontiguousarray(found, "<f4").data)
            file.flush()
            os.fsync(file.fileno())
            log.write(f"{json.dumps(Done(count, digest.hexdigest(), cut))}\n")
            log.flush()
        else:
            if count >= done.texts:
                return WrittenVectors((count, width), cut)
    raise UserError(f"{partial}: begun with other texts; {remedy}")


def _portions(texts: Iterable[str]) -> Iterator[list[str]]:
    portion, characters = [], 0
    for text in texts:
        portion.append(text)
        characters += len(text)
        if len(portion) == PORTION_TEXTS or characters >= PORTION_CHARACTERS:
            yield portion
            portion, characters = [], 0
    if portion:
        yield portion


def _read_journal(path: epath.Path) -> tuple[dict, list[Done]]:
    """Returns what vectors are begun of, and how far they are; the last line may be torn."""
    found = []
    for line in path.read_bytes().splitlines() if path.exists() else ():
        try:
            found.append(parse_json(line, tuple[int, str, int] if found else dict[str, str]))
        except ValueError:
            break
    return (found[0], [Done(*each) for each in found[1:]]) if found else ({}, [])


def _shown(file: BinaryIO, steps: list[Done]) -> tuple[int, list[Done]]:
    """Returns the width of the rows of a file, and those of the steps that it has all rows of; (0, []) for none."""
    size = file.seek(0, os.SEEK_END)
    file.seek(0)
    try:
        np.lib.format.read_magic(file)
        (_, width), _, _ = np.lib.format.read_array_header_1_0(file)
    except ValueError:
        return 0, []
    steps = [step for step in steps if _start(width) + 4 * width * step.texts <= size]
    return (width, steps) if steps else (0, [])


def _write_header(file: BinaryIO, shape: tuple[int, int]) -> None:
    """Writes the beginning of a .npy; NumPy leaves room for any number of rows in it."""
    np.lib.format.write_array_header_1_0(file, {"descr": "<f4", "fortran_order": False, "shape": shape})


@functools.cache
def _start(width: int) -> int:
    """Returns where the rows begin."""
    with tempfile.TemporaryFile() as file:
        _write_header(file, (0, width))
        return file.tell()


def _write_npz(path: epath.Path, file: BinaryIO) -> None:
    file.seek(0)
    with zipfile.ZipFile(path, "w") as archive, archive.open(f"{NAME}.npy", "w", force_zip64=True) as member:
        shutil.copyfileobj(file, member, 1 << 20)


def _write_parquet(path: epath.Path, partial: epath.Path, ids, id_name: str) -> None:
    import pyarrow
    import pyarrow.parquet

    rows = np.load(partial, mmap_mode="r")
    kinds = [(id_name, pyarrow.string())] * (ids is not None)
    schema = pyarrow.schema([*kinds, (COLUMN, pyarrow.list_(pyarrow.float32(), rows.shape[1]))])
    names, count = iter(ids() if ids is not None else ()), 0
    with pyarrow.parquet.ParquetWriter(path, schema) as writer:
        for first in range(0, len(rows), ROWS_AT_ONCE):
            some = np.asarray(rows[first : first + ROWS_AT_ONCE])
            flat = pyarrow.array(some.reshape(-1))
            columns = [pyarrow.FixedSizeListArray.from_arrays(flat, rows.shape[1])]
            if ids is not None:
                named = list(itertools.islice(names, len(some)))
                count += len(named)
                columns.insert(0, pyarrow.array(named, pyarrow.string()))
            if len(columns[0]) != len(some):
                break
            writer.write_table(pyarrow.Table.from_arrays(columns, schema=schema))
    if ids is not None and (count != len(rows) or next(names, None) is not None):
        raise UserError("--input: has changed while it was read")
