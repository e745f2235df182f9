"""Named tensors of somebody else's checkpoint, which a family reads and writes: those of a table that says which param
each of them is."""

import math
import re
from collections.abc import Collection, Mapping
from typing import Any, NamedTuple

import numpy as np

from bertjax.common.errors import UserError
from bertjax.models.family import param_at

WRAPPERS = re.compile(r"^(module\.|_orig_mod\.)+")  # DataParallel, torch.compile: put in front of all names


class Tensor(NamedTuple):
    """What a param is in PyTorch: one tensor, or several that are stacked on the param's second axis.

    Args:
      names: theirs.
      ours: the shape of the param, or of its part that is one tensor.
      theirs: the shape of each tensor.
      inputs_first: whether a matrix is as ours; as a rule it is the other way round, outputs first.
    """

    names: tuple[str, ...]
    ours: tuple[int, ...]
    theirs: tuple[int, ...]
    inputs_first: bool = False

    def turns(self, path: tuple) -> bool:
        """Whether it is a matrix, of the param at this path, that is the other way round."""
        return path[-1] == "kernel" and not self.inputs_first


class TensorTable(dict[tuple, Tensor]):
    """{path of a param: its tensor}. Layers are `("bert", "layers", number, ...)`, one by one."""

    def dense(self, path: tuple, names: str | tuple[str, ...], inputs: tuple, outputs: tuple, bias: bool = False):
        """Adds a linear layer, whose matrix PyTorch has the other way round, or several without biases as one."""
        names = (names,) if isinstance(names, str) else names
        wide, narrow = math.prod(outputs), math.prod(inputs)
        weights = tuple(f"{name}.weight" for name in names)
        self[*path, "kernel"] = Tensor(weights, (*inputs, *outputs), (wide, narrow))
        if bias:
            self[*path, "bias"] = Tensor((f"{names[0]}.bias",), outputs, (wide,))

    def norm(self, path: tuple, name: str, size: int, bias: bool = False) -> None:
        """Adds a LayerNorm or an RMSNorm."""
        self[*path, "scale"] = Tensor((f"{name}.weight",), (size,), (size,))
        if bias:
            self[*path, "bias"] = Tensor((f"{name}.bias",), (size,), (size,))

    def rows(self, path: tuple, name: str, *shape: int) -> None:
        """Adds what has a row for each piece of the vocabulary."""
        self[path] = Tensor((name,), shape, shape)

    def names(self) -> set[str]:
        """Returns those of all tensors."""
        return {name for tensor in self.values() for name in tensor.names}


def take(named: Mapping[str, np.ndarray], name: str, shape: tuple[int, ...], source: str, kind: str) -> np.ndarray:
    """Returns a tensor as float32. Raises `UserError` if it is missing, of another shape, or quantized.

    Args:
      source: the checkpoint, and `kind` what it should be of: "a GPT-2".
    """
    if name not in named:
        raise UserError(f"{source}: {name} is missing; is the checkpoint complete, and {kind}?")
    if named[name].shape != shape:
        raise UserError(f"{source}: {name} has shape {named[name].shape}, but its config says {shape}")
    if named[name].dtype.kind in "iub":
        raise UserError(f"{source}: {name} is of type {named[name].dtype}; quantized weights are not supported")
    return named[name].astype(np.float32)


def to_params(table: TensorTable, named: Mapping[str, np.ndarray], padding: int, source: str, kind: str) -> dict:
    """Returns the params of a table; those of the vocabulary's pieces get `padding` more rows, of zeros.

    Raises `UserError` as `take` does.
    """
    found: dict = {}
    for path, tensor in table.items():
        parts = [take(named, name, tensor.theirs, source, kind) for name in tensor.names]
        parts = [part.reshape(len(part), -1).T if tensor.turns(path) else part for part in parts]
        parts = [part.reshape(tensor.ours) for part in parts]
        array = np.stack(parts, axis=1) if len(parts) > 1 else parts[0]
        tree = found
        for step in path[:-1]:
            tree = tree.setdefault(step, {})
        rows = padding if _has_rows(path) else 0
        tree[path[-1]] = np.pad(array, [(0, rows)] + [(0, 0)] * (array.ndim - 1))
    return found


def to_named(table: TensorTable, params: Mapping) -> dict[str, np.ndarray]:
    """The inverse of `to_params`."""
    found = {}
    for path, tensor in table.items():
        names, theirs, array = tensor.names, tensor.theirs, np.asarray(param_at(params, path))
        array = array[: theirs[0]] if _has_rows(path) else array
        for name, part in zip(names, np.moveaxis(array, 1, 0) if len(names) > 1 else [array], strict=True):
            part = part.reshape(-1, theirs[0]).T if tensor.turns(path) else part
            found[name] = np.ascontiguousarray(part.reshape(theirs))
    return found


def stacked(params: dict) -> dict:
    """Stacks the layers of a table, as an encoder of equal ones has them."""
    import jax

    layers = jax.tree.map(lambda *x: np.stack(x), *params["bert"].pop("layers").values())
    return params | {"bert": params["bert"] | {"encoder": params["bert"].get("encoder", {}) | {"layers": layers}}}


def layer_by_layer(params: Mapping, count: int) -> dict:
    """The inverse of `stacked`, of so many layers."""
    import jax

    arrays = jax.tree.map(np.asarray, params["bert"]["encoder"]["layers"])
    layers = {i: jax.tree.map(lambda x, i=i: x[i], arrays) for i in range(count)}
    return {**params, "bert": params["bert"] | {"layers": layers}}


def _has_rows(path: tuple) -> bool:
    return path[-1] == "embedding" or path == ("masked_lm", "bias")


def parts_of(params: Mapping) -> set[str]:
    """Returns what params have besides the encoder: output layers, and its pooler."""
    return {*params, *(("pooler",) if "pooler" in params["bert"] else ())} - {"bert"}


def choose_class(
    architectures: Mapping[str, tuple[str, ...]], prefix: str, present: Collection[str], stated: str
) -> str:
    """Chooses the class of transformers for params: that of a fine-tuned head, or the one that keeps the most.

    Args:
      architectures: the classes, and the parts that each has besides the encoder.
      prefix: how their names begin.
      present: what there is of these parts.
      stated: the class, or BERT's, that the checkpoint states; it decides between those with the same head.
    """
    stated = prefix + stated.removeprefix(prefix).removeprefix("Bert")
    fitting = [name for name, parts in architectures.items() if set(present) >= set(parts)]
    return stated if stated in fitting else max(fitting, key=lambda name: len(architectures[name]))


def untied(
    named: Mapping[str, np.ndarray], decoder: str, words: np.ndarray, fields: Mapping[str, Any], source: str
) -> str:
    """Returns the reason why a decoder is not the word embeddings; "" if it is.

    Args:
      named: the tensors of a model that predicts words, by name.
      decoder: the name of the decoder, which may be absent if it is tied.
      words: the word embeddings.
      fields: the content of config.json.
      source: the folder, for messages.
    """
    if decoder not in named:
        is_missing = fields.get("tie_word_embeddings") is False
        reason = f"{source}: {decoder} is missing, although config.json has tie_word_embeddings false"
        return reason if is_missing else ""
    is_tied = np.array_equal(named[decoder], words)
    return "" if is_tied else f"{source}: {decoder} is not tied to the word embeddings, which is not supported"


def check_parts(architecture: str, wanted: Collection[str], present: Collection[str], fitting: str) -> None:
    """Raises `UserError` if a class has parts that the params lack; `fitting` is one that has not."""
    if lacking := set(wanted) - set(present):
        raise UserError(
            f"--architecture={architecture}: it has {min(lacking)}, which the checkpoint lacks; use {fitting}"
        )


def classifier_rows(params: Mapping, architecture: str, parts: Collection[str]) -> int:
    """Returns the rows of a classifier whose labels config.json names; 0 if a class of these parts has none."""
    if "classifier" not in parts:
        return 0
    rows = params["classifier"]["dense"]["bias"].shape[0]
    if architecture.endswith("ForMultipleChoice") and rows != 1:
        raise UserError(f"--architecture={architecture}: one score per choice, but this classifier has {rows} labels")
    return rows
