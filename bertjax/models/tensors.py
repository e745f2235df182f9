"""Converts params to and from the state dict of a PyTorch model, by a table {path of a param: tensor}."""

import abc
import math
import re
from collections.abc import Collection, Iterable, Mapping
from types import MappingProxyType
from typing import Any, ClassVar, NamedTuple

import numpy as np

from bertjax.common.errors import UserError
from bertjax.models import families
from bertjax.models.family import param_at
from bertjax.models.huggingface_format import HuggingFaceFormat

# The prefixes that DataParallel and torch.compile add to all tensor names.
WRAPPER_PREFIXES = re.compile(r"^(module\.|_orig_mod\.)+")


class Tensor(NamedTuple):
    """The PyTorch tensor of a param. A param may also stack several tensors, such as key and value.

    Attributes:
      names: the names of the tensors.
      param_shape: the shape of the param, without the axis that stacks tensors.
      tensor_shape: the shape of each tensor.
      inputs_first: whether the first axis of the tensor is the inputs, as in params. `torch.nn.Linear` stores
        `[outputs, inputs]`.
      stack_axis: the axis of the param that stacks several tensors.
    """

    names: tuple[str, ...]
    param_shape: tuple[int, ...]
    tensor_shape: tuple[int, ...]
    inputs_first: bool = False
    stack_axis: int = 1

    def is_transposed(self, path: tuple) -> bool:
        """Returns whether the tensor is the transpose of the param at a path."""
        return path[-1] == "kernel" and not self.inputs_first


class TensorTable(dict[tuple, Tensor]):
    """{path of a param: its tensor}. Layers are not stacked: their params are `("bert", "layers", number, ...)`.

    Attributes:
      suffixes: {name of a param: the suffix of the tensor's name}.
      inputs_first: see `Tensor`.
    """

    suffixes: ClassVar[Mapping[str, str]] = MappingProxyType(
        {"kernel": ".weight", "bias": ".bias", "scale": ".weight", "shift": ".bias"}
    )
    inputs_first: ClassVar[bool] = False

    def dense(
        self, path: tuple, names: str | tuple[str, ...], inputs: tuple, outputs: tuple, bias: bool = False
    ) -> None:
        """Adds a linear layer.

        Args:
          path: the path of the params of the layer.
          names: the name of the layer, or the names of several layers that one param stacks.
          inputs: the input axes of the kernel.
          outputs: the output axes of the kernel, such as `(heads, head_size)`.
          bias: whether the layer has a bias.
        """
        names = (names,) if isinstance(names, str) else names
        output_size, input_size = math.prod(outputs), math.prod(inputs)
        weights, biases = (tuple(name + self.suffixes[part] for name in names) for part in ("kernel", "bias"))
        shape = (input_size, output_size) if self.inputs_first else (output_size, input_size)
        self[*path, "kernel"] = Tensor(weights, (*inputs, *outputs), shape, self.inputs_first, len(inputs))
        if bias:
            self[*path, "bias"] = Tensor(biases, outputs, (output_size,), stack_axis=0)

    def norm(self, path: tuple, name: str, size: int, bias: bool = False) -> None:
        """Adds a LayerNorm or an RMSNorm of `size` elements."""
        self[*path, "scale"] = Tensor((name + self.suffixes["scale"],), (size,), (size,))
        if bias:
            self[*path, "bias"] = Tensor((name + self.suffixes["shift"],), (size,), (size,))

    def array(self, path: tuple, name: str, *shape: int) -> None:
        """Adds a param with the name and the shape of its tensor."""
        self[path] = Tensor((name,), shape, shape)

    def names(self) -> set[str]:
        """Returns the names of all tensors."""
        return {name for tensor in self.values() for name in tensor.names}


class TableFormat(HuggingFaceFormat):
    """A format whose tensors are listed in a `TensorTable`.

    Attributes:
      model_name: the model in messages, such as "a EuroBERT".
      words: the tensor name of the word embeddings, with the prefix of the encoder.
      decoder: the tensor name of the output embeddings of the masked-LM head.
      part_tensors: {part: possible names of a tensor that a checkpoint with the part contains}.
      optional_parts: {class: parts that the class has, and that a checkpoint of the class may lack}.
    """

    model_name: str
    words: str
    decoder: str
    part_tensors: ClassVar[Mapping[str, tuple[str, ...]]]
    optional_parts: ClassVar[Mapping[str, tuple[str, ...]]] = MappingProxyType({})

    @abc.abstractmethod
    def table(self, config: Any, parts: Collection[str], labels: int) -> TensorTable:
        """Returns the table of a model: the encoder and `parts`.

        Args:
          config: the model config.
          parts: the heads, and the pooler.
          labels: the number of labels; 0 without a classifier.
        """

    def parts_in(self, state_dict: Mapping[str, np.ndarray], fields: Mapping[str, Any]) -> list[str]:
        """Returns the parts that a checkpoint contains, without the encoder.

        Args:
          state_dict: {name: tensor}.
          fields: the content of config.json.
        """
        return [part for part, names in self.part_tensors.items() if any(name in state_dict for name in names)]

    def parts_of(self, params: Mapping, config: Any) -> set[str]:
        """Returns the parts that params contain, without the encoder."""
        return class_parts_of(params)

    @staticmethod
    def stack_layers(params: dict, config: Any) -> dict:
        """Returns params with the layers stacked, as in the params of the encoder."""
        encoder = dict(params["bert"])
        layers = families.family_of(config).stack_layers(config, [*encoder.pop("layers").values()])
        return params | {"bert": encoder | {"encoder": encoder.get("encoder", {}) | layers}}

    @staticmethod
    def unstack_layers(params: dict, config: Any) -> dict:
        """Returns params with separate layers, as in `TensorTable`. The inverse of `stack_layers`."""
        import jax

        encoder = jax.tree.map(np.asarray, params["bert"]["encoder"])
        layers = dict(enumerate(families.family_of(config).unstack_layers(config, encoder)))
        return params | {"bert": params["bert"] | {"layers": layers}}

    def untied_reason(
        self, state_dict: Mapping[str, np.ndarray], fields: Mapping[str, Any], config: Any, source: str
    ) -> str:
        """Returns the reason why the masked-LM head of a checkpoint is not supported; "" if it is supported."""
        return untied_reason(state_dict, self.decoder, state_dict[self.words], fields, source)

    def read_params(
        self, tensors: Iterable[tuple[str, np.ndarray]], fields: Mapping[str, Any], config: Any, source: str
    ) -> tuple[dict, list[str], str]:
        """Converts tensors to params, see `HuggingFaceFormat.read_params`."""
        state_dict = {self.name_in_class(WRAPPER_PREFIXES.sub("", name)): tensor for name, tensor in tensors}
        if self.words not in state_dict:  # tensor names of an encoder without a head have no prefix
            state_dict = {f"{self._prefix}{name}": tensor for name, tensor in state_dict.items()}
        parts, labels = self.parts_in(state_dict, fields), self._labels_in(state_dict)
        table, padding = self.table(config, parts, labels), config.padded_vocab_size - config.vocab_size
        params = self.stack_layers(to_params(table, state_dict, padding, source, self.model_name), config)
        ignored = sorted(state_dict.keys() - table.names() - {self.decoder})
        has_head = "masked_lm" in parts or self.decoder in state_dict
        masked_lm_problem = self.untied_reason(state_dict, fields, config, source) if has_head else ""
        if masked_lm_problem:
            params.pop("masked_lm", None)
            ignored += state_dict.keys() & {self.decoder}
        return params, ignored, masked_lm_problem

    def choose_architecture(self, params: dict, config: Any, saved_class: str = "") -> str:
        """Returns the class for params, see `HuggingFaceFormat.choose_architecture`."""
        prefix, parts = next(iter(self.classes)), self.parts_of(params, config)
        saved = saved_class.removeprefix(prefix).removeprefix("Bert") if saved_class else None
        fitting = {
            name.removeprefix(prefix): needed for name, needed in self.architectures.items() if parts >= set(needed)
        }
        same_head = (suffix for suffix in fitting if saved in (suffix, self.bert_suffixes.get(suffix, suffix)))
        return prefix + next(same_head, max(fitting, key=lambda suffix: len(fitting[suffix])))

    def to_tensors(self, params: dict, config: Any, architecture: str) -> tuple[dict[str, np.ndarray], list[str]]:
        """Converts params to tensors, see `HuggingFaceFormat.to_tensors`."""
        parts, present = self.architectures[architecture], self.parts_of(params, config)
        check_class_parts(architecture, parts, present, self.choose_architecture(params, config))
        parts += tuple(part for part in self.optional_parts.get(architecture, ()) if part in present)
        labels = [params[part]["dense"]["bias"].shape[0] for part in parts if part in ("classifier", "spans")]
        table = self.table(config, parts, sum(labels))
        state_dict = to_state_dict(table, self.unstack_layers(params, config))
        if not parts:
            state_dict = {name.removeprefix(self._prefix): tensor for name, tensor in state_dict.items()}
        return state_dict, sorted(class_parts_of(params) - set(parts))

    @property
    def _prefix(self) -> str:
        return self.words[: self.words.index(".") + 1]

    def _labels_in(self, state_dict: Mapping[str, np.ndarray]) -> int:
        return next((len(state_dict[name]) for name in self.part_tensors["classifier"] if name in state_dict), 0)


def take(
    state_dict: Mapping[str, np.ndarray], name: str, shape: tuple[int, ...], source: str, model_name: str
) -> np.ndarray:
    """Returns a tensor as float32.

    Args:
      state_dict: {name: tensor}.
      name: the name of the tensor.
      shape: the expected shape.
      source: the checkpoint, for messages.
      model_name: the expected model, for messages: "a GPT-2".

    Raises:
      UserError: if the tensor is missing, has another shape, or is quantized.
    """
    if name not in state_dict:
        raise UserError(
            f"{source}: {name} is missing; expected the tensors of {model_name}; check that the checkpoint is complete"
        )
    if state_dict[name].shape != shape:
        raise UserError(f"{source}: {name} has shape {state_dict[name].shape}; expected {shape} by the config")
    if state_dict[name].dtype.kind in "iub":
        raise quantized_error(source, name, state_dict[name])
    return state_dict[name].astype(np.float32)


def quantized_error(source: str, name: str, tensor: np.ndarray) -> UserError:
    """Returns the error for a tensor of integers."""
    return UserError(f"{source}: {name} has dtype {tensor.dtype}; expected floats, not quantized weights")


def to_params(
    table: TensorTable, state_dict: Mapping[str, np.ndarray], padding: int, source: str, model_name: str
) -> dict:
    """Converts the tensors of a table to params.

    Args:
      table: the params and their tensors.
      state_dict: {name: tensor}.
      padding: the number of rows of zeros that pad the vocabulary axis of params.
      source: the checkpoint, for messages.
      model_name: the expected model, for messages.

    Raises:
      UserError: if a tensor is missing, has another shape, or is quantized.
    """
    params: dict = {}
    for path, tensor in table.items():
        arrays = [take(state_dict, name, tensor.tensor_shape, source, model_name) for name in tensor.names]
        if tensor.is_transposed(path):
            arrays = [array.reshape(len(array), -1).T for array in arrays]
        arrays = [array.reshape(tensor.param_shape) for array in arrays]
        param = np.stack(arrays, tensor.stack_axis) if len(arrays) > 1 else arrays[0]
        tree = params
        for key in path[:-1]:
            tree = tree.setdefault(key, {})
        rows = padding if _has_vocab_rows(path) else 0
        tree[path[-1]] = np.pad(param, [(0, rows)] + [(0, 0)] * (param.ndim - 1))
    return params


def to_state_dict(table: TensorTable, params: Mapping) -> dict[str, np.ndarray]:
    """Converts params to {name: tensor}. The inverse of `to_params`."""
    state_dict = {}
    for path, tensor in table.items():
        shape, param = tensor.tensor_shape, np.asarray(param_at(params, path))
        param = param[: shape[0]] if _has_vocab_rows(path) else param
        arrays = np.moveaxis(param, tensor.stack_axis, 0) if len(tensor.names) > 1 else [param]
        for name, array in zip(tensor.names, arrays, strict=True):
            if tensor.is_transposed(path):
                array = array.reshape(-1, shape[0]).T
            state_dict[name] = np.ascontiguousarray(array.reshape(shape))
    return state_dict


def _has_vocab_rows(path: tuple) -> bool:
    """Returns whether the first axis of a param is the vocabulary."""
    return path[-2:] in (("word", "embedding"), ("decoder", "embedding"), ("masked_lm", "bias"))


def class_parts_of(params: Mapping) -> set[str]:
    """Returns the names of the heads in params, and "pooler" if params contain a pooler."""
    return {*params, *(("pooler",) if "pooler" in params["bert"] else ())} - {"bert"}


def untied_reason(
    state_dict: Mapping[str, np.ndarray],
    decoder: str,
    words: np.ndarray,
    fields: Mapping[str, Any],
    source: str,
    bias: str = "",
) -> str:
    """Returns the reason why a decoder is not supported; "" if the decoder is tied to the word embeddings.

    With tie_word_embeddings false, transformers initializes the tensors of the decoder that a folder lacks at random.

    Args:
      state_dict: {name: tensor} of a model with a masked-LM head.
      decoder: the tensor name of the decoder. A tied decoder may be absent.
      words: the word embeddings.
      fields: the content of config.json.
      source: the folder, for messages.
      bias: the tensor name of a bias of the decoder that is tied to another bias; "" for a decoder without this bias.
    """
    if not np.array_equal(state_dict.get(decoder, words), words):
        return f"{source}: {decoder} is not tied to the word embeddings, which is not supported"
    needed = [name for name in (decoder, bias) if name] if fields.get("tie_word_embeddings") is False else []
    if missing := [name for name in needed if name not in state_dict]:
        return (
            f"{source}: {missing[0]} is missing, but config.json has tie_word_embeddings false; set it to true, or "
            f"copy the tensor"
        )
    return ""


def check_class_parts(architecture: str, needed: Collection[str], present: Collection[str], fitting: str) -> None:
    """Raises `UserError` if params lack a part of a class.

    Args:
      architecture: the class.
      needed: the parts of the class.
      present: the parts that the params contain.
      fitting: the class that fits the params, for the message.
    """
    if missing := set(needed) - set(present):
        raise UserError(
            f"--architecture={architecture}: the checkpoint must contain {min(missing)}; use --architecture={fitting}"
        )
