"""BERT in Hugging Face's folders: fields of config.json, names of tensors, classes of transformers."""

import dataclasses
from collections.abc import Iterable, Mapping
from types import MappingProxyType
from typing import Any, ClassVar

import numpy as np
from etils import epath

from bertjax.common.errors import UserError
from bertjax.config.model_config import BertConfig, fields_with_roles
from bertjax.models import json_config
from bertjax.models.bert import gpt2, tf1_names
from bertjax.models.huggingface_format import HuggingFaceFormat
from bertjax.models.tensors import WRAPPER_PREFIXES, check_class_parts, class_parts_of, quantized_error, untied_reason

REQUIRED = (
    "vocab_size", "hidden_size", "num_hidden_layers", "num_attention_heads", "intermediate_size",
    "max_position_embeddings",
)  # fmt: skip
# {suffix of a class name: the parts of the class}. The suffix follows the prefix, such as Bert in BertForMaskedLM.
CLASS_PARTS = {
    "Model": ("pooler",),
    "ForMaskedLM": ("masked_lm",),
    "ForNextSentencePrediction": ("pooler", "next_sentence"),
    "ForPreTraining": ("pooler", "masked_lm", "next_sentence"),
    "ForQuestionAnswering": ("spans",),
    "ForSequenceClassification": ("pooler", "classifier"),
    "ForMultipleChoice": ("pooler", "classifier"),
    "ForTokenClassification": ("classifier",),
}
CLASS_PARTS_WITHOUT_NSP = {suffix: parts for suffix, parts in CLASS_PARTS.items() if "next_sentence" not in parts}
FINE_TUNED_NAMES = dict(
    zip(
        tf1_names.FINE_TUNED_VARIABLES, ("classifier.weight", "classifier.bias", "qa_outputs.weight", "qa_outputs.bias")
    )
)
OUTPUT_BIAS = "cls/predictions/output_bias"
# Variables of the tied decoder. Some files contain them, as copies of the word embeddings and of `OUTPUT_BIAS`.
DECODER_WEIGHT, DECODER_BIAS = "cls/predictions/decoder/kernel", "cls/predictions/decoder/bias"

# {field of config.json: the only supported value}
SUPPORTED_VALUES = {"position_embedding_type": "absolute", "is_decoder": False, "add_cross_attention": False}

# Fields of `BertConfig` that neither Google's nor Hugging Face's configs have.
BERTJAX_FIELDS = (*fields_with_roles(BertConfig, "form", "choice"), "attention")
FIELDS = json_config.ConfigFields(BertConfig, "bert", REQUIRED, BERTJAX_FIELDS, only=SUPPORTED_VALUES)


class BertLayersFormat(HuggingFaceFormat):
    """The base class for families whose tensors are the tensors of BERT with other names.

    Attributes:
      class_parts: {suffix of a class name: the parts of the class}.
      replacements: {substring of a tensor name of BERT: replacement}, applied in order.
      replacements_by_suffix: {suffix of a class name: replacements that are applied before `replacements`}.
    """

    inputs: tuple[str, ...] = ("input_ids", "attention_mask")
    special_ids: ClassVar[Mapping[str, str]] = MappingProxyType({"pad_token_id": "pad"})
    class_parts: ClassVar[Mapping[str, tuple[str, ...]]] = CLASS_PARTS_WITHOUT_NSP
    replacements: ClassVar[Mapping[str, str]] = MappingProxyType({})
    replacements_by_suffix: ClassVar[Mapping[str, Mapping[str, str]]] = MappingProxyType({})

    @property
    def architectures(self) -> Mapping[str, tuple[str, ...]]:
        """The classes, see `HuggingFaceFormat.architectures`."""
        return {f"{model}{suffix}": parts for model in self.classes for suffix, parts in self.class_parts.items()}

    def class_prefix(self, config: Any) -> str:
        """Returns the prefix of the class names for a model config, a key of `classes`."""
        return next(iter(self.classes))

    def variable_table(self, config: Any, labels: Mapping[str, int]) -> tf1_names.VariableTable:
        """Returns the variables of a model in Google's naming, see `tf1_names.variable_table`."""
        return tf1_names.variable_table(config, labels)

    def tensor_name(self, variable: str, suffix: str) -> str:
        """Returns the tensor name of a variable of Google in the class with a suffix."""
        name = huggingface_name(variable)
        for part, replacement in (*self.replacements_by_suffix.get(suffix, {}).items(), *self.replacements.items()):
            name = name.replace(part, replacement)
        return name

    def check_exportable(self, config: BertConfig) -> None:
        """Checks that transformers has a class for a model, see `HuggingFaceFormat.check_exportable`."""
        for name in fields_with_roles(BertConfig, "form", "choice"):
            if (value := getattr(config, name)) != getattr(type(config), name):
                raise UserError(f"model.{name} = {value!r}")

    def read_params(
        self, tensors: Iterable[tuple[str, np.ndarray]], fields: Mapping[str, Any], config: Any, source: str
    ) -> tuple[dict, list[str], str]:
        """Converts tensors to params, see `HuggingFaceFormat.read_params`.

        The params of a LayerNorm may be named `gamma` and `beta`, weights may be in half precision, and a file may
        contain a copy of the tied decoder. A masked-LM head whose decoder is not tied is ignored.
        """
        variables, decoder, ignored = self._split_tensors(tensors, config, source)
        weight, bias, output_bias = (
            self.tensor_name(variable, "ForMaskedLM") for variable in (DECODER_WEIGHT, DECODER_BIAS, OUTPUT_BIAS)
        )
        has_second_bias = output_bias != weight.removesuffix("weight") + "bias"
        if bias in decoder:
            if fields.get("tie_word_embeddings") is False:  # transformers reads only this bias
                variables[OUTPUT_BIAS] = decoder[bias]
            variables.setdefault(OUTPUT_BIAS, decoder[bias])
            if not np.array_equal(decoder[bias], variables[OUTPUT_BIAS]):
                raise UserError(
                    f"{source}: {bias} differs from {output_bias}; expected equal tensors, because they are tied"
                )
        predictions = [name for name in variables if name.startswith(tf1_names.VARIABLE_PREFIXES["masked_lm"])]
        masked_lm_problem = ""
        if (predictions or weight in decoder) and tf1_names.WORDS in variables:
            second_bias = bias if has_second_bias else ""
            words = variables[tf1_names.WORDS]
            masked_lm_problem = untied_reason(decoder, weight, words, fields, source, second_bias)
        if masked_lm_problem:
            ignored += decoder.keys() & {weight}
            ignored += [self.tensor_name(variable, "ForMaskedLM") for variable in predictions]
            variables = {name: array for name, array in variables.items() if name not in predictions}
        return tf1_names.to_params(variables, config, source, self.variable_table), ignored, masked_lm_problem

    def _split_tensors(
        self, tensors: Iterable[tuple[str, np.ndarray]], config: Any, source: str
    ) -> tuple[dict[str, np.ndarray], dict[str, np.ndarray], list[str]]:
        """Returns {Google's variable: array}, {name: tensor} of a decoder, and the names of all other tensors."""
        names = self.variable_table(config, dict.fromkeys(tf1_names.VARIABLE_PREFIXES, 0)).names()
        variable_of = {self.tensor_name(name, suffix): name for suffix in self.class_parts for name in names}
        decoder_names = {self.tensor_name(variable, "ForMaskedLM") for variable in (DECODER_WEIGHT, DECODER_BIAS)}
        variables: dict[str, np.ndarray] = {}
        decoder: dict[str, np.ndarray] = {}
        ignored = []
        for name, tensor in tensors:
            bare_name = WRAPPER_PREFIXES.sub("", name).replace("LayerNorm.gamma", "LayerNorm.weight")
            bare_name = bare_name.replace("LayerNorm.beta", "LayerNorm.bias")
            variable = variable_of.get(bare_name) or variable_of.get(f"{self._encoder_prefix}{bare_name}")
            if variable:
                if variable in variables:
                    raise UserError(f"{source}: {name} and another tensor are both {variable}; delete one of the two")
                if tensor.dtype.kind in "iub":
                    raise quantized_error(source, name, tensor)
                tensor = tensor.astype(np.float32)
                variables[variable] = tensor.T if is_transposed(variable) else tensor
            elif bare_name in decoder_names:
                decoder[bare_name] = tensor.astype(np.float32)
            elif not bare_name.endswith("embeddings.position_ids"):  # a constant: 0, 1, 2, ...
                ignored.append(name)
        return variables, decoder, ignored

    def choose_architecture(self, params: dict, config: Any, saved_class: str = "") -> str:
        """Returns the class for params, see `HuggingFaceFormat.choose_architecture`.

        `saved_class` is used only for fine-tuned models. For example, bert-base-uncased has the class `BertForMaskedLM`
        and all weights of `BertForPreTraining`.
        """
        parts, prefix = class_parts_of(params), self.class_prefix(config)
        if parts & set(self.class_parts.get(class_suffix(saved_class), ())) & tf1_names.FINE_TUNED.keys():
            return prefix + class_suffix(saved_class)
        ranks = {
            suffix: (bool(tf1_names.FINE_TUNED.keys() & set(needed)), len(needed))
            for suffix, needed in self.class_parts.items()
            if parts >= set(needed)
        }
        return prefix + max(ranks, key=lambda suffix: ranks[suffix], default="Model")  # the first suffix in a tie

    def to_tensors(self, params: dict, config: Any, architecture: str) -> tuple[dict[str, np.ndarray], list[str]]:
        """Converts params to tensors, see `HuggingFaceFormat.to_tensors`."""
        suffix = class_suffix(architecture)
        parts = self.class_parts[suffix]
        needed = parts if suffix != "Model" else ()  # transformers reads an encoder without a pooler
        names, present = (
            [tf1_names.VARIABLE_PREFIXES[part].rstrip("/_") for part in some_parts]
            for some_parts in (needed, class_parts_of(params) & {*needed})
        )
        check_class_parts(architecture, names, present, self.choose_architecture(params, config))
        kept = tuple(tf1_names.VARIABLE_PREFIXES[part] for part in parts)
        tensors, left_out = {}, sorted(params.keys() - tf1_names.PARTS)
        for variable, array in tf1_names.to_variables(params, config, self.variable_table).items():
            if variable.startswith(tuple(tf1_names.VARIABLE_PREFIXES.values())) and not variable.startswith(kept):
                left_out.append(variable)
            else:
                name = self.tensor_name(variable, suffix)
                name = name.removeprefix(self._encoder_prefix) if suffix == "Model" else name
                tensors[name] = np.ascontiguousarray(array.T if is_transposed(variable) else array)
        return tensors, left_out

    @property
    def _encoder_prefix(self) -> str:
        return self.replacements.get("bert.", "bert.")


class BertFormat(BertLayersFormat):
    """Folders of BERT and of GPT-2."""

    classes: ClassVar = {"Bert": "BERT"}
    inputs = ("input_ids", "token_type_ids", "attention_mask")
    class_parts: ClassVar = CLASS_PARTS

    def read_config(self, path: epath.Path, fields: Mapping[str, Any]) -> BertConfig:
        """Returns the model config of BERT or GPT-2, see `HuggingFaceFormat.read_config`."""
        if fields.get("model_type") == "gpt2":
            return dataclasses.replace(FIELDS.build(path, gpt2.read_gpt2_fields(path, fields)), **gpt2.MODEL_FIELDS)
        return FIELDS.build(path, FIELDS.read(path, fields))

    def to_fields(self, config: BertConfig) -> dict[str, Any]:
        """Returns the fields of config.json, see `HuggingFaceFormat.to_fields`."""
        return FIELDS.to_fields(config) | {"position_embedding_type": "absolute"}

    def read_params(
        self, tensors: Iterable[tuple[str, np.ndarray]], fields: Mapping[str, Any], config: BertConfig, source: str
    ) -> tuple[dict, list[str], str]:
        """Converts tensors of BERT or GPT-2 to params, see `HuggingFaceFormat.read_params`."""
        if fields.get("model_type") == "gpt2":
            return *gpt2.to_params(dict(tensors), fields, config, source), ""
        return super().read_params(tensors, fields, config, source)


def huggingface_name(variable: str) -> str:
    """Returns the tensor name of a variable of Google, in classes of BERT with a head."""
    if variable in FINE_TUNED_NAMES:
        return FINE_TUNED_NAMES[variable]
    name = variable.replace("layer_", "layer.").replace("/", ".")
    for end, replacement in (
        ("_embeddings", "_embeddings.weight"),
        (".kernel", ".weight"),  # the array is transposed, see `is_transposed`
        (".gamma", ".weight"),
        (".beta", ".bias"),
        (".output_weights", ".weight"),
        (".output_bias", ".bias"),
    ):
        if name.endswith(end):
            return name.removesuffix(end) + replacement
    return name


def is_transposed(variable: str) -> bool:
    """Returns whether a variable is a kernel: Google stores `[inputs, outputs]`, and PyTorch `[outputs, inputs]`."""
    return variable.endswith("/kernel")


def class_suffix(architecture: str) -> str:
    """Returns the suffix of a class name of transformers, such as "ForMaskedLM"; "Model" for an encoder."""
    return architecture[architecture.index("For") :] if "For" in architecture else "Model"


FORMAT = BertFormat()
