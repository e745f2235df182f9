"""Changes the sizes of the arrays of a checkpoint: new tokens, more positions, or fewer layers.

A new token starts from the mean of its subtokens, as embedding and as output. A new position starts from an earlier
position, or from the two neighbouring positions. The logical names of the axes select the arrays.
"""

from collections.abc import Callable, Mapping, Sequence

import numpy as np

from bertjax.common.errors import UserError
from bertjax.config.model_config import BertConfig
from bertjax.models import families
from bertjax.text.tokenizer import Tokenizer

Arrays = Mapping[str, np.ndarray]  # {path: array}
Axes = Mapping[str, Sequence[str | None]]  # {path: the logical names of the axes of the array}


def with_tokens(arrays: Arrays, axes: Axes, rows: int, old: Tokenizer, new: Tokenizer) -> dict[str, np.ndarray]:
    """Resizes the axis `vocab` of arrays to `rows`. Rows after the tokens of the new tokenizer are 0.

    Args:
      arrays: the arrays of the checkpoint.
      axes: their axes.
      rows: the new size.
      old: the tokenizer of the checkpoint.
      new: a tokenizer that begins with the tokens of `old`.
    """
    parts = [old.parts(token) for token in new.pieces[old.vocab_size :]]

    def resize(table: np.ndarray) -> np.ndarray:
        resized = np.zeros((rows, *table.shape[1:]), table.dtype)
        resized[: len(table)] = table[:rows]
        resized[old.vocab_size : new.vocab_size] = [table[ids].mean(0) for ids in parts]
        return resized

    return _along("vocab", arrays, axes, resize)


def with_positions(arrays: Arrays, axes: Axes, config: BertConfig, method: str) -> dict[str, np.ndarray]:
    """Resizes the axis `positions` of arrays to the positions of a config.

    Args:
      arrays: the arrays of the checkpoint.
      axes: their axes.
      config: the new model config.
      method: "repeat" to repeat the table; "interpolate" to stretch it.
    """
    first, size = config.position_offset, config.max_position_embeddings

    def resize(table: np.ndarray) -> np.ndarray:
        reserved, table = np.split(table, [first])
        if method == "repeat":
            return np.concatenate([reserved, table[np.arange(size) % len(table)]])
        places = np.linspace(0, len(table) - 1, size)
        below = np.minimum(places.astype(int), max(len(table) - 2, 0))
        share = (places - below).astype(table.dtype).reshape(-1, *[1] * (table.ndim - 1))
        above = np.minimum(below + 1, len(table) - 1)
        return np.concatenate([reserved, (1 - share) * table[below] + share * table[above]])

    return _along("positions", arrays, axes, resize)


def with_layers(arrays: Arrays, config: BertConfig, layers: int) -> dict[str, np.ndarray]:
    """Keeps every n-th layer, including the last layer.

    Args:
      arrays: the arrays of the checkpoint.
      config: the model config of the checkpoint.
      layers: the number of layers to keep.

    Raises:
      UserError: params do not stack all layers.
    """
    kept = [(number + 1) * config.num_hidden_layers // layers - 1 for number in range(layers)]

    def keep(path: str, array: np.ndarray) -> np.ndarray:
        numbers = families.layer_ids(config, tuple(path.split("/")))
        if numbers is None or (np.ndim(numbers) == 0 and numbers == 0):
            return array
        if np.ndim(numbers) == 0 or len(numbers) != config.num_hidden_layers:
            raise UserError(
                f"config.keep_layers = {layers}: the layers of model.family = {config.family!r} share params or differ "
                f"from layer to layer, so that no layer can be left out; set 0"
            )
        return array[kept]

    return {path: keep(path, array) for path, array in arrays.items()}


def _along(name: str, arrays: Arrays, axes: Axes, resize: Callable[[np.ndarray], np.ndarray]) -> dict[str, np.ndarray]:
    """Applies `resize` to the arrays that have an axis, with this axis first."""
    resized = dict(arrays)
    for path, array in arrays.items():
        if name in axes.get(path, ()):
            axis = tuple(axes[path]).index(name)
            resized[path] = np.moveaxis(resize(np.moveaxis(array, axis, 0)), 0, axis)
    return resized
