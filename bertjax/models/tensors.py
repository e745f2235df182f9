"""Conversion between params and the named tensors of a PyTorch checkpoint, by a table that lists both."""

import abc
import math
import re
from collections.abc import Collection, Iterable, Mapping
from typing import Any, NamedTuple

import numpy as np

from bertjax.common.errors import UserError
from bertjax.models.family import param_at
from bertjax.models.huggingface_format import HuggingFaceFormat

WRAPPERS = re.compile(r"^(module\.|_orig_mod\.)+")  # prefixes of all names, from DataParallel and torch.compile


class Tensor(NamedTuple):
    """The tensor of a param in PyTorch, or several tensors that the param stacks on the second axis.

    Attributes:
      names: the names of the tensors.
      param_shape: the shape of the param, without the axis that stacks several tensors.
      tensor_shape: the shape of each tensor.
      inputs_first: whether a matrix has the inputs on the first axis, like the param. PyTorch's linear layers have the
        outputs first.
    """

    names: tuple[str, ...]
    param_shape: tuple[int, ...]
    tensor_shape: tuple[int, ...]
    inputs_first: bool = False

    def is_transposed(self, path: tuple) -> bool:
        """Returns whether the tensor is the transpose of the param at a path."""
        return path[-1] == "kernel" and not self.inputs_first


class TensorTable(dict[tuple, Tensor]):
    """{path of a param: its tensor}. The params of a layer are `("bert", "layers", number, ...)`, each layer alone."""

    def dense(
        self, path: tuple, names: str | tuple[str, ...], inputs: tuple, outputs: tuple, bias: bool = False
    ) -> None:
        """Adds a linear layer.

        Args:
          path: the path of the params of the layer.
          names: the name of the layer, or the names of several layers without biases that one param stacks.
          inputs: the shape of the inputs of the param.
          outputs: the shape of the outputs of the param.
          bias: whether the layer has a bias.
        """
        names = (names,) if isinstance(names, str) else names
        output_size, input_size = math.prod(outputs), math.prod(inputs)
        weights = tuple(f"{name}.weight" for name in names)
        self[*path, "kernel"] = Tensor(weights, (*inputs, *outputs), (output_size, input_size))
        if bias:
            self[*path, "bias"] = Tensor((f"{names[0]}.bias",), outputs, (output_size,))

    def norm(self, path: tuple, name: str, size: int, bias: bool = False) -> None:
        """Adds a LayerNorm or an RMSNorm."""
        self[*path, "scale"] = Tensor((f"{name}.weight",), (size,), (size,))
        if bias:
            self[*path, "bias"] = Tensor((f"{name}.bias",), (size,), (size,))

    def rows(self, path: tuple, name: str, *shape: int) -> None:
        """Adds a param with a row for each piece of the vocabulary."""
        self[path] = Tensor((name,), shape, shape)

    def names(self) -> set[str]:
        """Returns the names of all tensors."""
        return {name for tensor in self.values() for name in tensor.names}


class TableFormat(HuggingFaceFormat):
    """A format whose tensors are listed in a `TensorTable`.

    Attributes:
      model_name: the model in a message, such as "a EuroBERT".
      words: the name of the word embeddings. It begins with the prefix of the encoder.
      decoder: the name of the weights that predict words.
      classifiers: names that the output layer of a classifier may have.
    """

    model_name: str
    words: str
    decoder: str
    classifiers: tuple[str, ...] = ("classifier",)

    @abc.abstractmethod
    def table(self, config: Any, parts: Collection[str], labels: int) -> TensorTable:
        """Returns the tensors of a model.

        Args:
          config: the model config.
          parts: the parts of the model, without the encoder.
          labels: the number of labels; 0 if no part is a classifier.
        """

    @abc.abstractmethod
    def parts_in(self, named: Mapping[str, np.ndarray], fields: Mapping[str, Any]) -> list[str]:
        """Returns the parts of a checkpoint, without the encoder.

        Args:
          named: {name: tensor}.
          fields: the content of config.json.
        """

    def parts_of(self, params: Mapping, config: Any) -> set[str]:
        """Returns the parts of params, as classes name them."""
        return parts_of(params)

    def stack_layers(self, params: dict, config: Any) -> dict:
        """Moves the layers of a table to the paths of the encoder's params."""
        import jax

        encoder = dict(params["bert"])
        layers = jax.tree.map(lambda *arrays: np.stack(arrays), *encoder.pop("layers").values())
        return params | {"bert": encoder | {"encoder": encoder.get("encoder", {}) | {"layers": layers}}}

    def unstack_layers(self, params: dict, config: Any) -> dict:
        """Returns params with the layers at the paths of a table. The inverse of `stack_layers`."""
        import jax

        stacked = jax.tree.map(np.asarray, params["bert"]["encoder"]["layers"])
        layers = {i: jax.tree.map(lambda x, i=i: x[i], stacked) for i in range(config.num_hidden_layers)}
        return params | {"bert": params["bert"] | {"layers": layers}}

    def why_untied(
        self,
        named: Mapping[str, np.ndarray],
        parts: Collection[str],
        fields: Mapping[str, Any],
        config: Any,
        source: str,
    ) -> str:
        """Returns the reason why the output layer for words is not supported; "" if it is supported or absent."""
        if "masked_lm" not in parts and self.decoder not in named:
            return ""
        return untied(named, self.decoder, named[self.words], fields, source)

    def read_params(
        self, tensors: Iterable[tuple[str, np.ndarray]], fields: Mapping[str, Any], config: Any, source: str
    ) -> tuple[dict, list[str], str]:
        """Converts tensors to params, see `HuggingFaceFormat.read_params`."""
        named = {WRAPPERS.sub("", name): tensor for name, tensor in tensors}
        if self.words not in named:  # the encoder alone
            named = {f"{self._prefix}{name}": tensor for name, tensor in named.items()}
        parts, labels = self.parts_in(named, fields), self._labels_in(named)
        table, padding = self.table(config, parts, labels), config.padded_vocab_size - config.vocab_size
        params = self.stack_layers(to_params(table, named, padding, source, self.model_name), config)
        ignored = sorted(named.keys() - table.names() - {self.decoder})
        wordless = self.why_untied(named, parts, fields, config, source)
        if wordless:
            params.pop("masked_lm", None)
            ignored += named.keys() & {self.decoder}
        return params, ignored, wordless

    def choose_architecture(self, params: dict, config: Any, stated: str = "") -> str:
        """Returns the class for params, see `HuggingFaceFormat.choose_architecture`."""
        beginning, parts = next(iter(self.classes)), self.parts_of(params, config)
        stated = beginning + stated.removeprefix(beginning).removeprefix("Bert")
        fitting = [name for name, needed in self.architectures.items() if parts >= set(needed)]
        return stated if stated in fitting else max(fitting, key=lambda name: len(self.architectures[name]))

    def to_tensors(self, params: dict, config: Any, architecture: str) -> tuple[dict[str, np.ndarray], list[str]]:
        """Converts params to tensors, see `HuggingFaceFormat.to_tensors`."""
        parts = self.architectures[architecture]
        check_parts(architecture, parts, self.parts_of(params, config), self.choose_architecture(params, config))
        labels = [params[part]["dense"]["bias"].shape[0] for part in parts if part in ("classifier", "spans")]
        table = self.table(config, parts, sum(labels))
        named = to_named(table, self.unstack_layers(params, config))
        if architecture == f"{next(iter(self.classes))}Model":
            named = {name.removeprefix(self._prefix): tensor for name, tensor in named.items()}
        return named, sorted(parts_of(params) - set(parts))

    @property
    def _prefix(self) -> str:
        return self.words[: self.words.index(".") + 1]

    def _labels_in(self, named: Mapping[str, np.ndarray]) -> int:
        weights = (f"{name}.weight" for name in self.classifiers)
        return next((len(named[name]) for name in weights if name in named), 0)


def take(named: Mapping[str, np.ndarray], name: str, shape: tuple[int, ...], source: str, kind: str) -> np.ndarray:
    """Returns a tensor as float32.

    Args:
      named: {name: tensor}.
      name: the name of the tensor.
      shape: the expected shape.
      source: the checkpoint, for messages.
      kind: the expected model, for messages: "a GPT-2".

    Raises:
      UserError: if the tensor is missing, of another shape, or quantized.
    """
    if name not in named:
        raise UserError(f"{source}: {name} is missing; is the checkpoint complete, and {kind}?")
    if named[name].shape != shape:
        raise UserError(f"{source}: {name} has shape {named[name].shape}, but its config says {shape}")
    if named[name].dtype.kind in "iub":
        raise UserError(f"{source}: {name} is of type {named[name].dtype}; quantized weights are not supported")
    return named[name].astype(np.float32)


def to_params(table: TensorTable, named: Mapping[str, np.ndarray], padding: int, source: str, kind: str) -> dict:
    """Returns the params of a table.

    Args:
      table: the params and their tensors.
      named: {name: tensor}.
      padding: rows of zeros that are added to each param with a row for each piece of the vocabulary.
      source: the checkpoint, for messages.
      kind: the expected model, for messages.

    Raises:
      UserError: if a tensor is missing, of another shape, or quantized.
    """
    params: dict = {}
    for path, tensor in table.items():
        arrays = [take(named, name, tensor.tensor_shape, source, kind) for name in tensor.names]
        if tensor.is_transposed(path):
            arrays = [array.reshape(len(array), -1).T for array in arrays]
        arrays = [array.reshape(tensor.param_shape) for array in arrays]
        param = np.stack(arrays, axis=1) if len(arrays) > 1 else arrays[0]
        tree = params
        for step in path[:-1]:
            tree = tree.setdefault(step, {})
        rows = padding if _has_rows(path) else 0
        tree[path[-1]] = np.pad(param, [(0, rows)] + [(0, 0)] * (param.ndim - 1))
    return params


def to_named(table: TensorTable, params: Mapping) -> dict[str, np.ndarray]:
    """Returns the tensors of a table by name. The inverse of `to_params`."""
    named = {}
    for path, tensor in table.items():
        shape, param = tensor.tensor_shape, np.asarray(param_at(params, path))
        param = param[: shape[0]] if _has_rows(path) else param
        for name, array in zip(
            tensor.names, np.moveaxis(param, 1, 0) if len(tensor.names) > 1 else [param], strict=True
        ):
            if tensor.is_transposed(path):
                array = array.reshape(-1, shape[0]).T
            named[name] = np.ascontiguousarray(array.reshape(shape))
    return named


def _has_rows(path: tuple) -> bool:
    """Returns whether a param has a row for each piece of the vocabulary."""
    return path[-1] == "embedding" or path == ("masked_lm", "bias")


def parts_of(params: Mapping) -> set[str]:
    """Returns the parts of params, without the encoder: output layers, and the pooler."""
    return {*params, *(("pooler",) if "pooler" in params["bert"] else ())} - {"bert"}


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


def check_parts(architecture: str, needed: Collection[str], present: Collection[str], fitting: str) -> None:
    """Raises `UserError` if a class has parts that the params lack.

    Args:
      architecture: the class.
      needed: the parts of the class.
      present: the parts of the params.
      fitting: a class without the missing parts, for the message.
    """
    if missing := set(needed) - set(present):
        raise UserError(
            f"--architecture={architecture}: it has {min(missing)}, which the checkpoint lacks; use {fitting}"
        )
