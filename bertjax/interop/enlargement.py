"""Makes the arrays of a checkpoint larger, for pieces and positions that it does not have.

What is new starts from what is there: a piece from the mean of those that it is made of, as embedding and as output; a
position from an earlier one, or from the two that it comes between. Which axes are meant, their logical names say.
"""

from collections.abc import Mapping, Sequence

import numpy as np

from bertjax.config import BertConfig
from bertjax.text.tokenizer import Tokenizer


def with_pieces(
    arrays: Mapping[str, np.ndarray], axes: Mapping[str, Sequence], rows: int, old: Tokenizer, new: Tokenizer
) -> dict[str, np.ndarray]:
    """Returns arrays by path, with `rows` along the axis `vocab`: those of the pieces of `new`, the rest 0.

    Args:
      axes: of each array, by path.
      old: the tokenizer of the checkpoint, with whose pieces those of `new` begin.
    """
    parts = [old.parts(piece) for piece in new.pieces[old.vocab_size :]]

    def enlarged(array: np.ndarray, axis: int) -> np.ndarray:
        by_piece = np.moveaxis(array, axis, 0)
        found = np.zeros((rows, *by_piece.shape[1:]), array.dtype)
        kept = min(rows, len(by_piece))
        found[:kept] = by_piece[:kept]
        found[old.vocab_size : new.vocab_size] = [by_piece[each].mean(0) for each in parts]
        return np.moveaxis(found, 0, axis)

    return _along("vocab", arrays, axes, enlarged)


def with_positions(
    arrays: Mapping[str, np.ndarray], axes: Mapping[str, Sequence], config: BertConfig, how: str
) -> dict[str, np.ndarray]:
    """Returns arrays by path, with the positions of a config along the axis `positions`.

    Args:
      axes: of each array, by path.
      how: repeat: the table begins anew after its last position; interpolate: it is stretched.
    """
    first, wanted = config.position_offset, config.max_position_embeddings

    def enlarged(array: np.ndarray, axis: int) -> np.ndarray:
        before, table = np.split(np.moveaxis(array, axis, 0), [first])
        if how == "repeat":
            found = table[np.arange(wanted) % len(table)]
        else:
            places = np.linspace(0, len(table) - 1, wanted)
            below = np.minimum(places.astype(int), len(table) - 2) if len(table) > 1 else np.zeros(wanted, int)
            share = (places - below).astype(array.dtype).reshape(-1, *[1] * (table.ndim - 1))
            found = (1 - share) * table[below] + share * table[np.minimum(below + 1, len(table) - 1)]
        return np.moveaxis(np.concatenate([before, found]), 0, axis)

    return _along("positions", arrays, axes, enlarged)


def _along(name: str, arrays: Mapping[str, np.ndarray], axes: Mapping[str, Sequence], enlarged) -> dict:
    return {
        path: enlarged(array, tuple(axes[path]).index(name)) if name in axes.get(path, ()) else array
        for path, array in arrays.items()
    }
