"""Embeddings of texts, written to a file portion by portion, so that an interrupted computation resumes.

Until `FILE` is complete, `FILE.partial` contains the embeddings in the format .npy. `FILE.partial.jsonl`, the journal,
identifies the checkpoint, and has a line for each portion. A portion is complete when both files contain it. The same
texts are always divided into the same portions and batches, so that an interruption does not change a rounding error.
"""

import abc
import contextlib
import dataclasses
import functools
import hashlib
import io
import itertools
import json
import os
import tempfile
import zipfile
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import IO, Any, BinaryIO, NamedTuple

import flax.linen as nn
import ml_collections
import msgspec
import numpy as np
from etils import epath

from bertjax.common import checksums
from bertjax.common.errors import UserError
from bertjax.common.files import parse_json, read_json, replacing, write_whole
from bertjax.common.progress import Bar
from bertjax.config.limits import FLOAT32, UBINARY
from bertjax.config.model_config import BertConfig
from bertjax.data.loading.examples import Examples
from bertjax.inference import predictor
from bertjax.inference.heads import Head
from bertjax.inference.losses import LabelLoss
from bertjax.inference.quantization import QuantizedFormat, Quantizer
from bertjax.interop.pretrained import Pretrained, tokenizer_of
from bertjax.models.heads import PooledStates

SUFFIXES = (".npz", ".npy", ".parquet")
NAME, COLUMN = "vectors", "vector"  # the names of the array in an .npz, and of the column of a .parquet
PORTION_TEXTS, PORTION_CHARACTERS = 1 << 12, 1 << 22  # The limits of a portion.
ROWS_AT_ONCE = 1 << 14  # rows in memory, while a .parquet or quantized embeddings are written
TEXTS_AT_ONCE = 1 << 14  # texts that are tokenized together


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
        """Returns the ids and the token types `[tokens]` of each text, and the number of tokens cut off each text."""

    @property
    @abc.abstractmethod
    def flags(self) -> Mapping[str, str]:
        """The flags of `bertjax extract` that change the embeddings, with their values."""

    def finish(self, embeddings: np.ndarray) -> np.ndarray:
        """Converts the outputs of the head to embeddings `[texts, width]`; by default returns them unchanged."""
        return embeddings

    def __call__(self, texts: Sequence[str]) -> tuple[np.ndarray, list[bool]]:
        """Returns the embeddings `[texts, width]` float32, and whether each text was truncated."""
        embeddings: list[np.ndarray] = []
        cut: list[bool] = []
        for start in range(0, len(texts), TEXTS_AT_ONCE):
            input_ids, token_types, lost = self.encode(list(texts[start : start + TEXTS_AT_ONCE]))
            embeddings.append(self.embed(input_ids, token_types))
            cut += [number > 0 for number in lost]
        return np.concatenate(embeddings), cut

    def embed(self, input_ids: list[np.ndarray], token_types: list[np.ndarray]) -> np.ndarray:
        """Returns the embeddings of encoded texts, see `encode`, `[texts, width]` float32."""
        return self.finish(np.stack(self._compute(Examples(input_ids, token_types))))

    @functools.cached_property
    def _compute(self) -> Callable[[Examples], list[np.ndarray]]:
        return predictor.single_device_predictor(self.head, self.source)

    def identity(self) -> dict[str, str]:
        """Returns the hash of the checkpoint, the dtype and the flags, which determine the embedding of a text."""
        return {"checkpoint": checkpoint_hash(self.source), "dtype": self.source.dtype, **self.flags}


def checkpoint_hash(source: Pretrained) -> str:
    """Returns a hash of the parameters, the model, the head and the tokenizer of a checkpoint."""
    digest = hashlib.sha256()
    arrays = {name: checksums.of_numpy(np.asarray(x)) for name, x in checksums.arrays_by_name(source.params).items()}
    fingerprint = tokenizer_of(source).fingerprint
    parts = dataclasses.asdict(source.config), source.head, fingerprint, source.max_seq_length
    for part in (arrays, *parts):
        digest.update(json.dumps(part, sort_keys=True).encode())
    return digest.hexdigest()[:16]


@dataclasses.dataclass(frozen=True)
class PooledStatesHead(Head):
    """Pooled hidden states `[batch, width]`, of any encoder. The head has no params, and no loss trains it.

    Attributes:
      layers: the layers that are averaged or concatenated, such as "last" or "concat_last_four", see `layer_pooling`.
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
        self._flags = {"layers": layers, "pool": pooling}
        # Without settings, the model has no head of a task.
        super().__init__(
            dataclasses.replace(source, settings=ml_collections.ConfigDict()), PooledStatesHead(layers, pooling)
        )

    @property
    def flags(self) -> Mapping[str, str]:
        """The layers and the kind of pooling."""
        return self._flags

    def encode(self, texts: list[str]) -> tuple[list[np.ndarray], list[np.ndarray], list[int]]:
        """Encodes texts; a text is truncated to the positions of the model."""
        tokenizer = tokenizer_of(self.source)
        room = self.source.config.max_position_embeddings - len(tokenizer.framed(()))
        tokens = [tokenizer.encode_with_masks(text) for text in texts]
        ids = [np.array(tokenizer.framed(text_ids[:room]), np.int32) for text_ids in tokens]
        types = [tokenizer.token_types(len(text_ids)) for text_ids in ids]
        return ids, types, [max(0, len(text_ids) - room) for text_ids in tokens]


class JournalLine(NamedTuple):
    """The progress after a portion: a line of the journal.

    Attributes:
      texts: the number of texts whose embeddings are in the file.
      digest: a hash of these texts.
      cut: the number of these texts that were truncated.
    """

    texts: int = 0
    digest: str = ""
    cut: int = 0


class WrittenEmbeddings(NamedTuple):
    """The result of `write_embeddings`.

    Attributes:
      shape: the shape of the embeddings, (texts, width).
      cut: the number of texts that were truncated.
    """

    shape: tuple[int, int]
    cut: int


def write_embeddings(
    path: epath.PathLike,
    embedder: TextEmbedder,
    texts: Iterable[str],
    ids: Callable[[], Iterable[str]] | None = None,
    id_name: str = "id",
    size: int = 0,
    precision: str = FLOAT32,
    ranges: np.ndarray | None = None,
) -> WrittenEmbeddings:
    """Writes the embeddings of texts to a file, and resumes an interrupted computation.

    Args:
      path: the file, which ends in one of the `SUFFIXES`.
      embedder: computes the embeddings.
      texts: the texts, one or more.
      ids: a function that returns an id for each text, for a column of a .parquet; None for no column.
      id_name: the name of the column.
      size: the number of bytes of the texts, for the bar that shows the progress; 0 if unknown.
      precision: float32, int8 or ubinary, see `Quantizer`. A precision that is not float32 is recorded:
        for an .npz in its array `description`, for a .parquet in its metadata, for an .npy in a .json beside it.
      ranges: for int8, see `Quantizer.calibrated`.

    Raises:
      UserError: if the unfinished file was written with other flags or texts, if another process writes the unfinished
        file, or if the number of ids differs from the number of texts. The unfinished file does not change.
    """
    path = epath.Path(path)
    if "://" in str(path):  # Object stores cannot append to a file.
        with tempfile.TemporaryDirectory() as folder:
            local = epath.Path(folder) / path.name
            written = write_embeddings(local, embedder, texts, ids, id_name, size, precision, ranges)
            for name in os.listdir(folder):
                with replacing(path.with_name(name)) as whole:
                    epath.Path(folder, name).copy(whole)
        return written
    path.parent.mkdir(parents=True, exist_ok=True)
    partial, journal = (path.with_name(f"{path.name}.partial{suffix}") for suffix in ("", ".jsonl"))
    partial.touch()
    with open(partial, "r+b") as file:
        _lock(file, partial)
        written = _compute(file, partial, journal, embedder, texts, size)
        file.seek(0)
        _write_header(file, written.shape)
        file.flush()
        os.fsync(file.fileno())
        rows = np.load(partial, mmap_mode="r") if written.shape[0] else np.zeros(written.shape, np.float32)
        try:
            quantizer = None if precision == FLOAT32 else Quantizer.calibrated(precision, rows, ranges)
        except UserError:  # int8 needs two texts. The next command with other texts must not find these files.
            partial.unlink()
            journal.unlink()
            raise
        output = OutputRows(rows, quantizer)
        if path.suffix == ".npy" and quantizer is None:
            partial.replace(path)
        else:
            with replacing(path) as whole:
                if path.suffix == ".parquet":
                    _write_parquet(whole, output, ids, id_name)
                else:
                    (_write_npz if path.suffix == ".npz" else _write_npy)(whole, output)
            partial.unlink()
        if path.suffix == ".npy":
            _write_sidecar(path, quantizer)
        journal.unlink()
    return written._replace(shape=output.shape)


@dataclasses.dataclass(frozen=True)
class OutputRows:
    """The rows of the array that is written.

    Attributes:
      embeddings: the embeddings `[texts, width]` float32.
      quantizer: converts the embeddings; None keeps float32.
    """

    embeddings: np.ndarray
    quantizer: Quantizer | None

    @property
    def dtype(self) -> np.dtype:
        """The type of the written numbers."""
        return np.dtype("<f4") if self.quantizer is None else self.quantizer.dtype

    @property
    def shape(self) -> tuple[int, int]:
        """The shape of the written array."""
        rows, width = self.embeddings.shape
        return rows, -(-width // 8) if self.quantizer and self.quantizer.precision == UBINARY else width

    def description(self) -> bytes:
        """Returns the description of the quantized embeddings as JSON; b"" for float32."""
        return b"" if self.quantizer is None else msgspec.json.encode(self.quantizer.describe())

    def blocks(self) -> Iterator[np.ndarray]:
        """Yields the rows in blocks of `ROWS_AT_ONCE`."""
        for first in range(0, len(self.embeddings), ROWS_AT_ONCE):
            block = np.asarray(self.embeddings[first : first + ROWS_AT_ONCE])
            yield block if self.quantizer is None else self.quantizer(block)


def _lock(file: BinaryIO, path: epath.Path) -> None:
    try:
        import fcntl
    except ModuleNotFoundError:  # on Windows
        return
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        raise UserError(f"{path}: in use by another process; wait for it, or name another --output") from None
    except OSError:  # The file system has no locks.
        pass


def _compute(
    file: BinaryIO, partial: epath.Path, journal: epath.Path, embedder: TextEmbedder, texts: Iterable[str], size: int
) -> WrittenEmbeddings:
    """Appends rows to the file until the file has the embeddings of all texts."""
    identity, digest, count = embedder.identity(), hashlib.sha256(), 0
    remedy = "delete this file, or name another --output"
    previous, steps = _read_journal(journal)
    width, steps = _complete_steps(file, steps)
    if steps and previous != identity:
        flag = next(name for name in {**previous, **identity} if previous.get(name) != identity.get(name))
        name = flag if flag == "checkpoint" else f"--{flag}"
        raise UserError(f"{partial}: was written with another {name}; {remedy}")
    done = steps[-1] if steps else JournalLine()
    cut = done.cut
    with open(f"{journal}.new", "w") as new:  # The new journal omits portions that are incomplete.
        new.writelines(f"{json.dumps(line)}\n" for line in (identity, *steps))
    os.replace(f"{journal}.new", journal)
    with open(journal, "a") as log, Bar("embeddings", [size]) as bar:
        for portion in predictor.divide_by_length(texts, PORTION_CHARACTERS, PORTION_TEXTS):
            for text in portion:
                bar.update(add_text(digest, text) + 1)
            count += len(portion)
            if count < done.texts:
                continue
            if count == done.texts and digest.hexdigest() == done.digest:
                print(f"resuming after {count:,} texts in {partial}", flush=True)
                file.seek(file.truncate(_start(width) + 4 * width * count))
                continue
            if count - len(portion) < done.texts:
                break
            embeddings, was_cut = embedder(portion)
            if not width:
                width = embeddings.shape[1]
                file.seek(file.truncate(0))
                _write_header(file, (0, width))
            cut += sum(was_cut)
            file.write(np.ascontiguousarray(embeddings, "<f4").data)
            file.flush()
            os.fsync(file.fileno())
            log.write(f"{json.dumps(JournalLine(count, digest.hexdigest(), cut))}\n")
            log.flush()
        else:
            if count >= done.texts:
                return WrittenEmbeddings((count, width), cut)
    raise UserError(f"{partial}: was written with other texts; {remedy}")


def add_text(digest: "hashlib._Hash", text: str) -> int:
    """Adds the number of bytes of a text to a digest, then the text. Returns the number of bytes."""
    content = text.encode()
    digest.update(b"%d " % len(content) + content)
    return len(content)


def _read_journal(path: epath.Path) -> tuple[dict[str, str], list[JournalLine]]:
    """Returns `TextEmbedder.identity` of the embeddings, and the progress after each portion.

    The last line may be incomplete.
    """
    identity: dict[str, str] = {}
    steps: list[JournalLine] = []
    first, *lines = (path.read_bytes().splitlines() if path.exists() else ()) or (b"",)
    with contextlib.suppress(ValueError):
        identity = parse_json(first, dict[str, str])
        for line in lines:
            steps.append(JournalLine(*parse_json(line, tuple[int, str, int])))
    return identity, steps


def _complete_steps(file: BinaryIO, steps: list[JournalLine]) -> tuple[int, list[JournalLine]]:
    """Returns the width of the rows of a file, and the portions with complete rows; (0, []) without such portions."""
    size = file.seek(0, os.SEEK_END)
    file.seek(0)
    try:
        np.lib.format.read_magic(file)
        (_, width), _, _ = np.lib.format.read_array_header_1_0(file)
    except ValueError:
        return 0, []
    steps = [step for step in steps if _start(width) + 4 * width * step.texts <= size]
    return (width, steps) if steps else (0, [])


def _write_header(file: IO[bytes], shape: tuple[int, int], dtype: str = "<f4") -> None:
    """Writes the header of a .npy. The size of the header does not depend on the number of rows."""
    np.lib.format.write_array_header_1_0(file, {"descr": dtype, "fortran_order": False, "shape": shape})


@functools.cache
def _start(width: int) -> int:
    """Returns the number of bytes of the header, which precedes the rows."""
    header = io.BytesIO()
    _write_header(header, (0, width))
    return header.tell()


def _write_rows(file: IO[bytes], output: OutputRows) -> None:
    _write_header(file, output.shape, output.dtype.str)
    for block in output.blocks():
        file.write(np.ascontiguousarray(block, output.dtype).data)


def _write_npy(path: epath.Path, output: OutputRows) -> None:
    with path.open("wb") as file:
        _write_rows(file, output)


def _write_sidecar(path: epath.Path, quantizer: Quantizer | None) -> None:
    """Writes the .json beside an .npy of quantized embeddings, or deletes the .json of an earlier file."""
    sidecar = path.with_name(f"{path.name}.json")
    if quantizer is not None:
        write_whole(sidecar, msgspec.json.encode(quantizer.describe()) + b"\n")
    elif sidecar.is_file():
        with contextlib.suppress(UserError):  # A file with another content stays.
            read_json(sidecar, QuantizedFormat)
            sidecar.unlink()


def _write_npz(path: epath.Path, output: OutputRows) -> None:
    with zipfile.ZipFile(path, "w") as archive:
        with archive.open(f"{NAME}.npy", "w", force_zip64=True) as member:
            _write_rows(member, output)
        if output.quantizer is not None:
            with archive.open("description.npy", "w") as member:
                np.lib.format.write_array(member, np.array(output.description().decode()), allow_pickle=False)


def _write_parquet(path: epath.Path, output: OutputRows, ids: Callable[[], Iterable[str]] | None, id_name: str) -> None:
    import pyarrow
    import pyarrow.parquet

    rows, width = output.shape
    fields = [(id_name, pyarrow.string())] * (ids is not None)
    number_type = pyarrow.from_numpy_dtype(output.dtype)
    metadata = {"description": output.description()} if output.quantizer else None
    schema = pyarrow.schema([*fields, (COLUMN, pyarrow.list_(number_type, width))], metadata)
    remaining, count = iter(ids() if ids is not None else ()), 0
    with pyarrow.parquet.ParquetWriter(path, schema) as writer:
        for block in output.blocks():
            columns = [pyarrow.FixedSizeListArray.from_arrays(pyarrow.array(block.reshape(-1)), width)]
            if ids is not None:
                names = list(itertools.islice(remaining, len(block)))
                count += len(names)
                columns.insert(0, pyarrow.array(names, pyarrow.string()))
            if len(columns[0]) != len(block):
                break
            writer.write_table(pyarrow.Table.from_arrays(columns, schema=schema))
    if ids is not None and (count != rows or next(remaining, None) is not None):
        raise UserError(
            "--input: the file changed during the computation; stop the program that changes it, and try again"
        )
