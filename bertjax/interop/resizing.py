"""Makes the arrays of a checkpoint fit a model of another size: with more pieces or positions, or fewer layers.

What is new starts from what is there: a piece from the mean of those that it is made of, as embedding and as output; a
position from an earlier one, or from the two that it comes between. Which axes are meant, their logical names say.
"""

from collections.abc import Mapping, Sequence

import numpy as np

from bertjax.common.errors import UserError
from bertjax.config.model_config import BertConfig
from bertjax.models import families
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


def with_layers(arrays: Mapping[str, np.ndarray], config: BertConfig, layers: int) -> dict[str, np.ndarray]:
    """Returns arrays by path, with every n-th layer of those that the model of `config` has, the last one among them.

    Raises `UserError` for a family whose layers are not stacked, since they are not alike.
    """
    kept = [(number + 1) * config.num_hidden_layers // layers - 1 for number in range(layers)]

    def of_kept(path: str, array: np.ndarray) -> np.ndarray:
        numbers = families.layer_ids(config, tuple(path.split("/")))
        if numbers is None or (np.ndim(numbers) == 0 and numbers == 0):
            return array
        if np.ndim(numbers) == 0 or len(numbers) != config.num_hidden_layers:
            raise UserError(
                f"config.keep_layers = {layers}: the layers of model.family = {config.family!r} are not alike, so that "
                f"none can be left out; set 0"
            )
        return array[kept]

    return {path: of_kept(path, array) for path, array in arrays.items()}


def _along(name: str, arrays: Mapping[str, np.ndarray], axes: Mapping[str, Sequence], enlarged) -> dict:
    return {
        path: enlarged(array, tuple(axes[path]).index(name)) if name in axes.get(path, ()) else array
        for path, array in arrays.items()
    }
