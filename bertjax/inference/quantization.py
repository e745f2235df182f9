"""Embeddings of 8 bits or 1 bit per dimension, equal to `quantize_embeddings` of sentence-transformers."""

import dataclasses
from typing import Any

import msgspec
import numpy as np
from etils import epath

from bertjax.common.errors import UserError
from bertjax.common.files import read_json
from bertjax.config.limits import INT8, PRECISIONS, UBINARY

STEPS, OFFSET = 255, 128  # An int8 is the number of a step from the least value of its dimension, minus the offset.
ROWS_AT_ONCE = 1 << 16  # rows in memory, while the ranges are computed


class QuantizedFormat(msgspec.Struct, forbid_unknown_fields=True):
    """The content of the .json beside an .npy with small embeddings.

    Args:
      precision: int8 or ubinary.
      width: the number of dimensions.
      ranges: the least and the greatest value of each dimension, `[2, width]`; None for ubinary.
    """

    precision: str
    width: int
    ranges: list[list[float]] | None = None


@dataclasses.dataclass(frozen=True, eq=False)
class Quantizer:
    """Converts float embeddings to small embeddings.

    Attributes:
      precision: int8, or ubinary: the bits of 8 dimensions in a byte, 1 for values above 0.
      width: the number of dimensions.
      ranges: for int8, the least and the greatest value of each dimension, `[2, width]` float32.
    """

    precision: str
    width: int
    ranges: np.ndarray | None = None

    @classmethod
    def calibrated(cls, precision: str, embeddings: np.ndarray, ranges: np.ndarray | None = None) -> "Quantizer":
        """Returns the quantizer of embeddings.

        Args:
          precision: int8 or ubinary.
          embeddings: `[texts, width]`; the array may be mapped into memory.
          ranges: for int8, the ranges; None for the ranges of the embeddings.

        Raises:
          UserError: if one embedding has to determine the ranges.
        """
        width = embeddings.shape[1]
        if precision == UBINARY:
            return cls(precision, width)
        if ranges is None and len(embeddings) < 2:
            raise UserError(
                f"--precision={precision}: {len(embeddings)} text determines no ranges, expected at least 2; add "
                f"texts, or --calibration=FILE"
            )
        return cls(precision, width, ranges_of(embeddings) if ranges is None else ranges)

    @property
    def dtype(self) -> np.dtype:
        """The type of the numbers of small embeddings."""
        return np.dtype(np.int8 if self.precision == INT8 else np.uint8)

    def __call__(self, embeddings: np.ndarray) -> np.ndarray:
        """Returns small embeddings, `[texts, width]` int8, or `[texts, bytes]` uint8."""
        if self.ranges is None:
            return np.packbits(embeddings > 0, axis=-1)
        steps = np.clip(np.floor((embeddings - self.ranges[0]) / self._step_sizes), 0, STEPS)
        return (steps - OFFSET).astype(np.int8)

    def restore(self, small: np.ndarray) -> np.ndarray:
        """Returns float32 values `[..., width]` of small embeddings: the least values of the steps, or the bits."""
        if self.ranges is None:
            return np.unpackbits(small, axis=-1, count=self.width).astype(np.float32)
        return (small.astype(np.float32) + OFFSET) * self._step_sizes + self.ranges[0]

    @property
    def _step_sizes(self) -> np.ndarray:
        assert self.ranges is not None
        sizes = (self.ranges[1] - self.ranges[0]) / np.float32(STEPS)
        return np.where(sizes == 0, np.float32(1), sizes)

    def describe(self) -> QuantizedFormat:
        """Returns the description for a file of small embeddings."""
        return QuantizedFormat(self.precision, self.width, None if self.ranges is None else self.ranges.tolist())


def check_precision(precision: str, calibration: str) -> None:
    """Raises `UserError` for an unknown precision, for a calibration without int8, and for a missing calibration."""
    if precision not in PRECISIONS:
        raise UserError(f"precision = {precision!r}: choose one of {', '.join(PRECISIONS)}")
    if calibration and precision != INT8:
        raise UserError(f"--calibration={calibration}: is for --precision=int8; leave the flag out")
    if calibration and not epath.Path(calibration).is_file():
        raise UserError(f"--calibration={calibration}: no such file; correct the path")


def ranges_of(embeddings: np.ndarray) -> np.ndarray:
    """Returns the least and the greatest value of each dimension, `[2, width]` float32."""
    blocks = (embeddings[start : start + ROWS_AT_ONCE] for start in range(0, len(embeddings), ROWS_AT_ONCE))
    least, greatest = zip(*((block.min(0), block.max(0)) for block in blocks))
    return np.stack([np.min(least, 0), np.max(greatest, 0)]).astype(np.float32)


def read_ranges(path: epath.PathLike) -> np.ndarray:
    """Reads the ranges of a calibration.

    Args:
      path: a file, see `check_precision`: an .npy of float embeddings, or the .json beside an .npy of int8 embeddings.

    Raises:
      UserError: if the file has another content.
    """
    flag, content = f"--calibration={path}", "an .npy of float embeddings, or the .json of int8 embeddings"
    if str(path).endswith(".json"):
        ranges: Any = read_json(path, QuantizedFormat, f"expected {content}").ranges
        if ranges is None or len(ranges) != 2 or len(ranges[0]) != len(ranges[1]):
            raise UserError(f"{flag}: has no ranges, expected {content}; correct the path")
        return _checked(np.array(ranges, np.float32), flag)
    try:
        embeddings = np.load(path, mmap_mode="r")
    except (OSError, ValueError, EOFError) as error:
        raise UserError(f"{flag}: cannot be read ({error}), expected {content}; correct the path") from None
    if not isinstance(embeddings, np.ndarray) or embeddings.dtype.kind != "f" or embeddings.ndim != 2:
        raise UserError(f"{flag}: expected {content}; correct the path")
    if len(embeddings) < 2:
        raise UserError(f"{flag}: has {len(embeddings)} embeddings, expected at least 2; name a larger file")
    return _checked(ranges_of(embeddings), flag)


def _checked(ranges: np.ndarray, flag: str) -> np.ndarray:
    """Returns ranges. Raises `UserError` if a range is not finite, or if its least value is above its greatest."""
    if not np.isfinite(ranges).all() or (ranges[0] > ranges[1]).any():
        raise UserError(f"{flag}: has a range that is not finite or not ascending; choose another calibration")
    return ranges
