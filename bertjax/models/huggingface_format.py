"""The interface of a Hugging Face format: how a folder of transformers stores the models of one family."""

import abc
from collections.abc import Iterable, Mapping
from types import MappingProxyType
from typing import Any, ClassVar

import numpy as np
from etils import epath

from bertjax.common.errors import UserError


class HuggingFaceFormat(abc.ABC):
    """Reads and writes the config.json and the tensors of a family.

    A class of transformers consists of an encoder and parts: output layers and the pooler. Parts have bertjax's names,
    such as `masked_lm`.

    Attributes:
      classes: {how the names of the classes begin: the name of the model in a text}, such as {"Bert": "BERT"}.
      inputs: names of the inputs of a class, in order.
      special_ids: {field of config.json that contains the id of a special piece: pad, unk, cls, sep or mask}.
      aliases: {another name that transformers accepts for a field of config.json: the name of the field}.
      kinds_of_bert: {rest of a class name, after the beginning: the rest of the name of BERT's class with the same
        output layer}, where the two differ.
    """

    classes: ClassVar[Mapping[str, str]]
    inputs: tuple[str, ...]
    special_ids: ClassVar[Mapping[str, str]]
    aliases: ClassVar[Mapping[str, str]] = MappingProxyType({})
    kinds_of_bert: ClassVar[Mapping[str, str]] = MappingProxyType({})

    @property
    @abc.abstractmethod
    def architectures(self) -> Mapping[str, tuple[str, ...]]:
        """{class of transformers: its parts}."""

    @abc.abstractmethod
    def read_config(self, path: epath.Path, fields: Mapping[str, Any]) -> Any:
        """Returns the model config of a config.json.

        Args:
          path: the file, for messages.
          fields: the content of the file.

        Raises:
          UserError: for a missing field, an invalid value, or a model that bertjax does not have.
        """

    @abc.abstractmethod
    def to_fields(self, config: Any) -> dict[str, Any]:
        """Returns the fields of config.json that describe an encoder, `model_type` first."""

    @abc.abstractmethod
    def read_params(
        self, tensors: Iterable[tuple[str, np.ndarray]], fields: Mapping[str, Any], config: Any, source: str
    ) -> tuple[dict, list[str], str]:
        """Converts tensors to params.

        Args:
          tensors: pairs of a name and a tensor. The names may lack the prefix of the encoder, or have the prefixes of
            PyTorch's wrappers.
          fields: the content of config.json.
          config: the model config.
          source: the folder, for messages.

        Returns:
          The params; the names of the tensors that are ignored; and the reason why the model predicts no words although
          the folder contains such an output layer, or "".

        Raises:
          UserError: if a tensor is missing, has another shape, is quantized, or contradicts another tensor.
        """

    @abc.abstractmethod
    def choose_architecture(self, params: dict, config: Any, stated: str = "") -> str:
        """Returns the class for params: the class of a fine-tuned output layer, or the class that keeps most parts.

        Args:
          params: the params of a model.
          config: the model config.
          stated: the class in the checkpoint, of this family or of BERT. It decides between classes that have the same
            output layer.
        """

    @abc.abstractmethod
    def to_tensors(self, params: dict, config: Any, architecture: str) -> tuple[dict[str, np.ndarray], list[str]]:
        """Converts params to the tensors of a class.

        Args:
          params: the params of a model.
          config: the model config.
          architecture: the class.

        Returns:
          {name: tensor}, and the names of the parts, or of Google's variables, that the class does not have.

        Raises:
          UserError: if the class has a part that the params lack.
        """

    def check_form(self, config: Any) -> None:  # noqa: B027 (most formats support all configs)
        """Checks that transformers has a class for a model.

        Args:
          config: the model config.

        Raises:
          UserError: if transformers has no class for the model.
        """

    def classifier_rows(self, params: dict, architecture: str) -> int:
        """Returns the number of labels that config.json must name for a class; 0 if the class has no labels.

        Args:
          params: the params of a model.
          architecture: the class.

        Raises:
          UserError: if the class scores choices, but the classifier has several labels.
        """
        if "classifier" not in self.architectures[architecture]:
            return 0
        rows = params["classifier"]["dense"]["bias"].shape[0]
        if architecture.endswith("ForMultipleChoice") and rows != 1:
            raise UserError(
                f"--architecture={architecture}: one score per choice, but this classifier has {rows} labels"
            )
        return rows
