"""The interface of a Hugging Face format: reads and writes the folders in which transformers stores one family."""

import abc
from collections.abc import Iterable, Mapping
from types import MappingProxyType
from typing import Any, ClassVar

import numpy as np
from etils import epath

from bertjax.common.errors import UserError


class HuggingFaceFormat(abc.ABC):
    """Reads and writes the config.json and the tensors of a family.

    A class of transformers consists of an encoder and parts. A part is the pooler or a head. The names of the parts are
    `pooler`, `masked_lm`, `next_sentence`, `classifier`, `spans`, and the names of heads that only the family has.
    `bertjax.models.tensors.TableFormat` is a subclass that converts params and tensors by a table.

    Params are a nested dict of float32 arrays. `params["bert"]` are the params of the encoder with the pooler, the
    other keys are heads. The word embeddings end with rows of zeros, up to `config.padded_vocab_size` rows.

    Attributes:
      classes: {prefix of class names: the name of the model in prose}, such as {"Bert": "BERT"}.
      inputs: the names of the inputs of a class, in the order of `model_input_names` in tokenizer_config.json.
      special_ids: {field of config.json with the id of a special token: pad, unk, cls, sep or mask}.
      aliases: {alias of a field of config.json that transformers accepts: the name of the field}.
      other_types: {`model_type` of published folders whose code transformers replaced: a repository of the hub with the
        same model for transformers}.
      bert_suffixes: {suffix of a class name: suffix of the class name of BERT with the same head}, only for suffixes
        that differ. The suffix follows the prefix, such as "ForMaskedLM".
      module_names: {first part of a tensor name in a folder: the name of the module in the class}, if transformers
        renames tensors when it reads a folder.
      needs_code: whether transformers loads the classes from Python code on the hub.
      word_modules: modules of the class that only predict words, and whose names are not the names in other families.
    """

    classes: ClassVar[Mapping[str, str]]
    inputs: tuple[str, ...]
    special_ids: ClassVar[Mapping[str, str]]
    aliases: ClassVar[Mapping[str, str]] = MappingProxyType({})
    other_types: ClassVar[Mapping[str, str]] = MappingProxyType({})
    bert_suffixes: ClassVar[Mapping[str, str]] = MappingProxyType({})
    module_names: ClassVar[Mapping[str, str]] = MappingProxyType({})
    needs_code: ClassVar[bool] = False
    word_modules: ClassVar[tuple[str, ...]] = ()

    def name_in_class(self, name: str) -> str:
        """Returns the name in the class of transformers of a tensor in a folder."""
        first, dot, rest = name.partition(".")
        return f"{self.module_names.get(first, first)}{dot}{rest}"

    @property
    @abc.abstractmethod
    def architectures(self) -> Mapping[str, tuple[str, ...]]:
        """{class of transformers: the parts of the class}, such as {"BertForMaskedLM": ("masked_lm",)}."""

    @abc.abstractmethod
    def read_config(self, path: epath.Path, fields: Mapping[str, Any]) -> Any:
        """Returns the model config of a config.json.

        Args:
          path: the file, for messages.
          fields: the content of the file.

        Returns:
          An instance of `ModelFamily.config_class`.

        Raises:
          UserError: for a missing field, an invalid value, or a model that bertjax does not have.
        """

    @abc.abstractmethod
    def to_fields(self, config: Any) -> dict[str, Any]:
        """Returns the fields of config.json for a model config, `model_type` first.

        Callers add the fields of the class, the labels and the dtype, and the fields in `special_ids`.

        Args:
          config: the model config.
        """

    @abc.abstractmethod
    def read_params(
        self, tensors: Iterable[tuple[str, np.ndarray]], fields: Mapping[str, Any], config: Any, source: str
    ) -> tuple[dict, list[str], str]:
        """Converts tensors to params.

        Args:
          tensors: pairs (name, tensor) of all tensors in the folder, of any dtype. Names may omit the prefix of the
            encoder, and may have the prefixes `module.` of DataParallel or `_orig_mod.` of torch.compile.
          fields: the content of config.json.
          config: the model config.
          source: the folder, for messages.

        Returns:
          The params; the names of the ignored tensors; and the reason why the masked-LM head in the folder is not read.
          The reason is "" if the head is read or absent.

        Raises:
          UserError: if a tensor is missing, has another shape, is quantized, or contradicts another tensor.
        """

    def current_tensors(self, tensors: Iterable[tuple[str, np.ndarray]]) -> Iterable[tuple[str, np.ndarray]]:
        """Returns tensors under the names of the modules in transformers, which adapters of PEFT also have.

        The default returns the tensors. A family whose published folders have other names overrides the method.

        Args:
          tensors: pairs (name, tensor).
        """
        return tensors

    @abc.abstractmethod
    def choose_architecture(self, params: dict, config: Any, saved_class: str = "") -> str:
        """Returns the class for params: the class with the fine-tuned head, or else the class with the most parts.

        Args:
          params: the params of a model.
          config: the model config.
          saved_class: the class that the checkpoint names, of this family or of BERT; "" if unknown. Among the
            classes with the same head, the method prefers this class.
        """

    @abc.abstractmethod
    def to_tensors(self, params: dict, config: Any, architecture: str) -> tuple[dict[str, np.ndarray], list[str]]:
        """Converts params to the tensors of a class.

        Args:
          params: the params of a model.
          config: the model config.
          architecture: the class, a key of `architectures`.

        Returns:
          {name: float32 tensor}, with the names and shapes in PyTorch; and the names of the omitted parts, or of the
          omitted variables in Google's naming.

        Raises:
          UserError: if the class has a part that the params lack.
        """

    def check_exportable(self, config: Any) -> None:  # noqa: B027 (most formats support all configs)
        """Checks that transformers has a class for a model.

        Args:
          config: the model config.

        Raises:
          UserError: if transformers has no class for the model. The message is the field and its value only, because
            callers add the remedy.
        """

    def count_labels(self, params: dict, architecture: str) -> int:
        """Returns the number of labels that config.json must list for a class; 0 if the class has no labels.

        Args:
          params: the params of a model.
          architecture: the class, a key of `architectures`.

        Raises:
          UserError: if the class is for multiple choice, and the classifier has more than one output.
        """
        if "classifier" not in self.architectures[architecture]:
            return 0
        rows = params["classifier"]["dense"]["bias"].shape[0]
        if architecture.endswith("ForMultipleChoice") and rows != 1:
            raise UserError(
                f"--architecture={architecture}: the classifier has {rows} outputs; expected 1, the score of a choice; "
                f"use a class for sequence classification"
            )
        return rows
