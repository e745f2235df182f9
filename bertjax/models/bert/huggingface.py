"""BERT in Hugging Face's folders: fields of config.json, names of tensors, classes of transformers."""

import dataclasses
from collections.abc import Iterable, Mapping
from types import MappingProxyType
from typing import Any, ClassVar

import numpy as np
from etils import epath

from bertjax.common.errors import UserError
from bertjax.config.model_config import BertConfig, fields_of
from bertjax.models import json_config
from bertjax.models.bert import gpt2
from bertjax.models.bert.tf1_names import PARTS, WORDS, check_variables, to_params, to_variables, variable_shapes
from bertjax.models.huggingface_format import HuggingFaceFormat
from bertjax.models.tensors import WRAPPERS, check_parts, parts_of, untied

REQUIRED = (
    "vocab_size", "hidden_size", "num_hidden_layers", "num_attention_heads", "intermediate_size",
    "max_position_embeddings",
)  # fmt: skip
# The parts of each kind of class. A kind is the rest of a class name after the name of the model.
KINDS = {
    "Model": ("pooler",),
    "ForMaskedLM": ("masked_lm",),
    "ForNextSentencePrediction": ("pooler", "next_sentence"),
    "ForPreTraining": ("pooler", "masked_lm", "next_sentence"),
    "ForQuestionAnswering": ("spans",),
    "ForSequenceClassification": ("pooler", "classifier"),
    "ForMultipleChoice": ("pooler", "classifier"),
    "ForTokenClassification": ("classifier",),
}
KINDS_WITHOUT_PAIRS = {kind: parts for kind, parts in KINDS.items() if "next_sentence" not in parts}
# {part: the beginning of the names of Google's variables}
VARIABLES = {
    "pooler": "bert/pooler/",
    "masked_lm": "cls/predictions/",
    "next_sentence": "cls/seq_relationship/",
    "spans": "cls/squad/",
    "classifier": "output_",
}
FINE_TUNED_PARTS = {"classifier", "spans"}
FINE_TUNED_NAMES = {
    "output_weights": "classifier.weight",
    "output_bias": "classifier.bias",
    "cls/squad/output_weights": "qa_outputs.weight",
    "cls/squad/output_bias": "qa_outputs.bias",
}
OUTPUT_BIAS = "cls/predictions/output_bias"
# Copies of the word embeddings and of `OUTPUT_BIAS` that some files contain.
DECODER_WEIGHT, DECODER_BIAS = "cls/predictions/decoder/kernel", "cls/predictions/decoder/bias"

# Fields of config.json with the only value that is supported.
ONLY = {"position_embedding_type": "absolute", "is_decoder": False, "add_cross_attention": False}

# Fields that neither Google's configs nor Hugging Face's configs have.
OWN_FIELDS = (*fields_of(BertConfig, "form", "choice"), "attention")


class BertLayersFormat(HuggingFaceFormat):
    """The base class for families with the modules of BERT, under other names.

    Attributes:
      kinds: {kind of class: its parts}.
      names: {part of a tensor name in BERT: the replacement}, applied one after the other.
      names_of_kind: {kind of class: replacements that are applied before `names`}.
    """

    inputs: tuple[str, ...] = ("input_ids", "attention_mask")
    special_ids: ClassVar[Mapping[str, str]] = MappingProxyType({"pad_token_id": "pad"})
    kinds: ClassVar[Mapping[str, tuple[str, ...]]] = KINDS_WITHOUT_PAIRS
    names: ClassVar[Mapping[str, str]] = MappingProxyType({})
    names_of_kind: ClassVar[Mapping[str, Mapping[str, str]]] = MappingProxyType({})

    @property
    def architectures(self) -> Mapping[str, tuple[str, ...]]:
        """The classes, see `HuggingFaceFormat.architectures`."""
        return {f"{model}{kind}": parts for model in self.classes for kind, parts in self.kinds.items()}

    def class_prefix(self, config: Any) -> str:
        """Returns the beginning of the class names for a model config, a key of `classes`."""
        return next(iter(self.classes))

    def name_of(self, variable: str, kind: str) -> str:
        """Returns the tensor name of one of Google's variables in a kind of class."""
        name = huggingface_name(variable)
        for part, replacement in (*self.names_of_kind.get(kind, {}).items(), *self.names.items()):
            name = name.replace(part, replacement)
        return name

    def check_form(self, config: BertConfig) -> None:
        """Checks that transformers has a class for a model, see `HuggingFaceFormat.check_form`."""
        for name in fields_of(BertConfig, "form", "choice"):
            if (value := getattr(config, name)) != getattr(type(config), name):
                raise UserError(f"model.{name} = {value!r}")

    def read_params(
        self, tensors: Iterable[tuple[str, np.ndarray]], fields: Mapping[str, Any], config: Any, source: str
    ) -> tuple[dict, list[str], str]:
        """Converts tensors to params, see `HuggingFaceFormat.read_params`.

        A LayerNorm may have `gamma` and `beta`, weights may be in half precision, and a file may contain a copy of the
        tied decoder. A decoder that is not tied is ignored, with the other params that predict words.
        """
        variables, decoder, ignored = self._sort(tensors, config, source)
        weight, bias = (self.name_of(variable, "ForMaskedLM") for variable in (DECODER_WEIGHT, DECODER_BIAS))
        if bias in decoder:
            if fields.get("tie_word_embeddings") is False:  # transformers then does not read the other bias
                variables[OUTPUT_BIAS] = decoder[bias]
            variables.setdefault(OUTPUT_BIAS, decoder[bias])
            if not np.array_equal(decoder[bias], variables[OUTPUT_BIAS]):
                other = self.name_of(OUTPUT_BIAS, "ForMaskedLM")
                raise UserError(f"{source}: {bias} differs from {other}; there is one bias")
        predictions = [name for name in variables if name.startswith(VARIABLES["masked_lm"])]
        wordless = ""
        if (predictions or weight in decoder) and WORDS in variables:
            wordless = untied(decoder, weight, variables[WORDS], fields, source)
        if wordless:
            ignored += decoder.keys() & {weight}
            ignored += [self.name_of(variable, "ForMaskedLM") for variable in predictions]
            variables = {name: array for name, array in variables.items() if name not in predictions}
        check_variables(variables, config, source)
        return to_params(variables, config), ignored, wordless

    def _sort(
        self, tensors: Iterable[tuple[str, np.ndarray]], config: Any, source: str
    ) -> tuple[dict[str, np.ndarray], dict[str, np.ndarray], list[str]]:
        """Returns Google's variables by name, the tensors of a decoder by name, and the names of other tensors."""
        names = (*variable_shapes(config), *FINE_TUNED_NAMES)
        variable_of = {self.name_of(variable, kind): variable for kind in self.kinds for variable in names}
        decoder_names = {self.name_of(variable, "ForMaskedLM") for variable in (DECODER_WEIGHT, DECODER_BIAS)}
        variables: dict[str, np.ndarray] = {}
        decoder: dict[str, np.ndarray] = {}
        ignored = []
        for name, tensor in tensors:
            plain = WRAPPERS.sub("", name)
            plain = plain.replace("LayerNorm.gamma", "LayerNorm.weight").replace("LayerNorm.beta", "LayerNorm.bias")
            variable = variable_of.get(plain) or variable_of.get(f"{self._encoder_prefix}{plain}")
            if variable:
                if variable in variables:
                    raise UserError(f"{source}: {name} occurs twice, under two names")
                if tensor.dtype.kind in "iub":
                    raise UserError(f"{source}: {name} is of type {tensor.dtype}; quantized weights are not supported")
                tensor = tensor.astype(np.float32)
                variables[variable] = tensor.T if is_transposed(variable) else tensor
            elif plain in decoder_names:
                decoder[plain] = tensor.astype(np.float32)
            elif not plain.endswith("embeddings.position_ids"):  # a constant: 0, 1, 2, ...
                ignored.append(name)
        return variables, decoder, ignored

    def choose_architecture(self, params: dict, config: Any, stated: str = "") -> str:
        """Returns the class for params, see `HuggingFaceFormat.choose_architecture`.

        The stated class decides only for fine-tuned models: bert-base-uncased states `BertForMaskedLM` although it has
        all weights of `BertForPreTraining`.
        """
        parts, prefix = parts_of(params), self.class_prefix(config)
        if parts & set(self.kinds.get(kind_of(stated), ())) & FINE_TUNED_PARTS:
            return prefix + kind_of(stated)
        ranks = {
            kind: (bool(FINE_TUNED_PARTS & set(needed)), len(needed))
            for kind, needed in self.kinds.items()
            if parts >= set(needed)
        }
        return prefix + max(ranks, key=lambda kind: ranks[kind], default="Model")  # the first kind in a tie

    def to_tensors(self, params: dict, config: Any, architecture: str) -> tuple[dict[str, np.ndarray], list[str]]:
        """Converts params to tensors, see `HuggingFaceFormat.to_tensors`."""
        kind = kind_of(architecture)
        parts = self.kinds[kind]
        needed = parts if kind != "Model" else ()  # transformers accepts an encoder without a pooler
        names, present = (
            [VARIABLES[part].rstrip("/_") for part in some] for some in (needed, parts_of(params) & {*needed})
        )
        check_parts(architecture, names, present, self.choose_architecture(params, config))
        kept = tuple(VARIABLES[part] for part in parts)
        tensors, left_out = {}, sorted(params.keys() - PARTS)
        for variable, array in to_variables(params, config).items():
            if variable.startswith(tuple(VARIABLES.values())) and not variable.startswith(kept):
                left_out.append(variable)
            else:
                name = self.name_of(variable, kind)
                name = name.removeprefix(self._encoder_prefix) if kind == "Model" else name
                tensors[name] = np.ascontiguousarray(array.T if is_transposed(variable) else array)
        return tensors, left_out

    @property
    def _encoder_prefix(self) -> str:
        return self.names.get("bert.", "bert.")


class BertFormat(BertLayersFormat):
    """Folders of BERT and of GPT-2."""

    classes: ClassVar = {"Bert": "BERT"}
    inputs = ("input_ids", "token_type_ids", "attention_mask")
    kinds: ClassVar = KINDS

    def read_config(self, path: epath.Path, fields: Mapping[str, Any]) -> BertConfig:
        """Returns the model config of BERT or GPT-2, see `HuggingFaceFormat.read_config`."""
        if fields.get("model_type") == "gpt2":
            return dataclasses.replace(bert_config(path, gpt2.read_fields(path, fields)), **gpt2.FORM)
        names = json_config.field_names(BertConfig, OWN_FIELDS)
        values = json_config.read_fields(path, fields, "bert", names, ONLY, required=REQUIRED)
        return bert_config(path, values | {"hidden_act": json_config.activation(path, fields, "hidden_act")})

    def to_fields(self, config: BertConfig) -> dict[str, Any]:
        """Returns the fields of config.json, see `HuggingFaceFormat.to_fields`."""
        fields = {name: value for name, value in vars(config).items() if name not in OWN_FIELDS}
        return {"model_type": "bert", **fields, "position_embedding_type": "absolute"}

    def read_params(
        self, tensors: Iterable[tuple[str, np.ndarray]], fields: Mapping[str, Any], config: BertConfig, source: str
    ) -> tuple[dict, list[str], str]:
        """Converts tensors of BERT or GPT-2 to params, see `HuggingFaceFormat.read_params`."""
        if fields.get("model_type") == "gpt2":
            return *gpt2.to_params(dict(tensors), fields, config, source), ""
        return super().read_params(tensors, fields, config, source)


def bert_config(path: epath.Path, fields: Mapping[str, Any]) -> BertConfig:
    """Builds a `BertConfig` from a JSON object. Raises `UserError` if a field is missing or has an invalid value."""
    return json_config.build(path, BertConfig, fields, REQUIRED, OWN_FIELDS)


def huggingface_name(variable: str) -> str:
    """Returns the tensor name of one of Google's variables, in classes of BERT with an output layer."""
    if variable in FINE_TUNED_NAMES:
        return FINE_TUNED_NAMES[variable]
    name = variable.replace("layer_", "layer.").replace("/", ".")
    for end, replacement in (
        ("_embeddings", "_embeddings.weight"),
        (".kernel", ".weight"),  # also transposed, see `is_transposed`
        (".gamma", ".weight"),
        (".beta", ".bias"),
        (".output_weights", ".weight"),
        (".output_bias", ".bias"),
    ):
        if name.endswith(end):
            return name.removesuffix(end) + replacement
    return name


def is_transposed(variable: str) -> bool:
    """Returns whether a variable is a dense kernel: Google stores `[inputs, outputs]`, PyTorch `[outputs, inputs]`."""
    return variable.endswith("/kernel")


def kind_of(architecture: str) -> str:
    """Returns the kind of a class of transformers, in any family."""
    return architecture[architecture.index("For") :] if "For" in architecture else "Model"


FORMAT = BertFormat()
