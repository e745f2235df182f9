"""BERT in Hugging Face's folders: fields of config.json, names of tensors, classes of transformers."""

import dataclasses
from collections.abc import Iterable, Mapping

import numpy as np
from etils import epath

from bertjax.config import BertConfig, UserError, fields_of
from bertjax.families import json_config
from bertjax.families.bert import gpt2
from bertjax.families.bert.variables import PARTS, WORDS, check_variables, to_params, to_variables, variable_shapes
from bertjax.families.tensors import WRAPPERS

REQUIRED = (
    "vocab_size", "hidden_size", "num_hidden_layers", "num_attention_heads", "intermediate_size",
    "max_position_embeddings",
)  # fmt: skip
CLASSES = {"Bert": "BERT"}  # how the names of its classes begin, and how people write it
INPUTS = ("input_ids", "token_type_ids", "attention_mask")
SPECIAL_IDS = {"pad_token_id": "pad"}  # fields of config.json that are ids of special pieces

# Parts of each transformers class besides the encoder, as prefixes of Google's variables.
ARCHITECTURES = {
    "BertModel": ("bert/pooler/",),
    "BertForMaskedLM": ("cls/predictions/",),
    "BertForNextSentencePrediction": ("bert/pooler/", "cls/seq_relationship/"),
    "BertForPreTraining": ("bert/pooler/", "cls/predictions/", "cls/seq_relationship/"),
    "BertForQuestionAnswering": ("cls/squad/",),
    "BertForSequenceClassification": ("bert/pooler/", "output_"),
    "BertForMultipleChoice": ("bert/pooler/", "output_"),
    "BertForTokenClassification": ("output_",),
}
FINE_TUNED_NAMES = {
    "output_weights": "classifier.weight",
    "output_bias": "classifier.bias",
    "cls/squad/output_weights": "qa_outputs.weight",
    "cls/squad/output_bias": "qa_outputs.bias",
}


# The fields that Google's and Hugging Face's configs do not have.
OWN_FIELDS = (*fields_of(BertConfig, "form", "choice"), "attention")


def read_config(path: epath.Path, fields: Mapping) -> BertConfig:
    """Returns the config of a config.json with these fields. Raises `UserError` for a variant that we do not have."""
    is_gpt2 = fields.get("model_type") == "gpt2"
    form = gpt2.FORM if is_gpt2 else {}
    fields = gpt2.as_bert(path, fields) if is_gpt2 else fields
    only = {"position_embedding_type": "absolute", "is_decoder": False, "add_cross_attention": False}
    json_config.require(path, fields, only)
    found = bert_config(path, {**fields, "hidden_act": json_config.activation(path, fields, "hidden_act")})
    return dataclasses.replace(found, **form)


def bert_config(path: epath.Path, fields: Mapping) -> BertConfig:
    """Builds a `BertConfig` from a JSON object. Raises `UserError` if a field is missing or has an invalid value."""
    return json_config.build(path, BertConfig, fields, REQUIRED, OWN_FIELDS)


def huggingface_name(variable: str) -> str:
    """Maps Google's variable to its tensor name in transformers' classes with a head."""
    if variable in FINE_TUNED_NAMES:
        return FINE_TUNED_NAMES[variable]
    name = variable.replace("layer_", "layer.").replace("/", ".")
    for end, theirs in (
        ("_embeddings", "_embeddings.weight"),
        (".kernel", ".weight"),  # also transposed, see `is_transposed`
        (".gamma", ".weight"),
        (".beta", ".bias"),
        (".output_weights", ".weight"),
        (".output_bias", ".bias"),
    ):
        if name.endswith(end):
            return name.removesuffix(end) + theirs
    return name


def is_transposed(variable: str) -> bool:
    """True for dense kernels: Google stores `[inputs, outputs]`, PyTorch `[outputs, inputs]`."""
    return variable.endswith("/kernel")


def read_params(
    tensors: Iterable[tuple[str, np.ndarray]], fields: Mapping, config: BertConfig, source: str
) -> tuple[dict, list[str], str]:
    """Returns our params from named tensors, the names of ignored tensors, and why they predict no words.

    The ignored ones are not part of BERT. A decoder of its own, which BERT has not, is left out with all that predicts
    words; otherwise the reason is "". Accepts encoders with and without the prefix `bert.`, the prefixes of PyTorch's
    wrappers, LayerNorms with `gamma` and `beta`, weights in half precision, and redundant copies of the tied decoder.
    Raises `UserError` if tensors are missing or contradict each other.
    """
    if fields.get("model_type") == "gpt2":
        return *gpt2.to_params(dict(tensors), config, source), ""
    known = {huggingface_name(variable): variable for variable in (*variable_shapes(config), *FINE_TUNED_NAMES)}
    variables, ignored, stored = {}, [], {}
    for name, tensor in tensors:
        plain = (
            WRAPPERS.sub("", name)
            .replace("LayerNorm.gamma", "LayerNorm.weight")
            .replace("LayerNorm.beta", "LayerNorm.bias")
        )
        variable = known.get(plain) or known.get(f"bert.{plain}")
        if variable in variables:
            raise UserError(f"{source}: {name} occurs twice, under two names")
        if variable and tensor.dtype.kind in "iub":
            raise UserError(f"{source}: {name} is of type {tensor.dtype}; quantized weights are not supported")
        if variable:
            tensor = tensor.astype(np.float32)
            variables[variable] = tensor.T if is_transposed(variable) else tensor
        elif plain.startswith("cls.predictions.decoder."):
            stored[plain.removeprefix("cls.predictions.decoder.")] = tensor.astype(np.float32)
        elif not plain.endswith("embeddings.position_ids"):  # a constant: 0, 1, 2, ...
            ignored.append(name)
    if "bias" in stored:
        variables.setdefault("cls/predictions/output_bias", stored["bias"])
        if not np.array_equal(stored["bias"], variables["cls/predictions/output_bias"]):
            raise UserError(
                f"{source}: cls.predictions.decoder.bias differs from cls.predictions.bias; BERT has one bias"
            )
    wordless = ""
    if "weight" in stored and WORDS in variables and not np.array_equal(stored["weight"], variables[WORDS]):
        wordless = (
            f"{source}: cls.predictions.decoder.weight is not tied to the word embeddings, which is not supported"
        )
        left_out = [name for name in variables if name.startswith("cls/predictions/")]
        ignored += ["cls.predictions.decoder.weight", *map(huggingface_name, left_out)]
        variables = {name: x for name, x in variables.items() if name not in left_out}
    check_variables(variables, config, source)
    return to_params(variables, config), ignored, wordless


HEADS = tuple(sorted({part for parts in ARCHITECTURES.values() for part in parts}))
FINE_TUNED_HEADS = ("output_", "cls/squad/")


def choose_architecture(params: dict, config: BertConfig, stated: str = "") -> str:
    """Chooses the transformers class for these params: that of a fine-tuned head, or the one that keeps the most.

    `stated`: the architecture that the checkpoint states. It decides between classes with the same fine-tuned head, but
    not otherwise: bert-base-uncased states `BertForMaskedLM` although it has all weights of `BertForPreTraining`.
    """
    variables = to_variables(params, config)
    present = {part for part in HEADS if any(name.startswith(part) for name in variables)}
    if present & set(ARCHITECTURES.get(stated, ())) & set(FINE_TUNED_HEADS):
        return stated
    fitting = [name for name, parts in ARCHITECTURES.items() if present >= set(parts)]
    kept = {
        name: (bool(set(FINE_TUNED_HEADS) & set(ARCHITECTURES[name])), len(ARCHITECTURES[name])) for name in fitting
    }
    return max(fitting, key=kept.get, default="BertModel")  # the first one in a tie


def to_tensors(params: dict, config: BertConfig, architecture: str) -> tuple[dict[str, np.ndarray], list[str]]:
    """Returns the tensors of a class of transformers, and the names of variables and parts that it does not have.

    Raises `UserError` if the class has parts that the params lack.
    """
    variables, wanted = to_variables(params, config), ARCHITECTURES[architecture]
    for part in wanted if architecture != "BertModel" else ():  # transformers accepts it without a pooler
        if not any(name.startswith(part) for name in variables):
            fitting = choose_architecture(params, config)
            raise UserError(
                f"--architecture={architecture}: it has {part.rstrip('/_')}, which the checkpoint lacks; use {fitting}"
            )
    tensors, left_out = {}, sorted(params.keys() - PARTS)
    for variable, array in variables.items():
        if variable.startswith(HEADS) and not variable.startswith(wanted):
            left_out.append(variable)
        else:
            name = huggingface_name(variable)
            name = name.removeprefix("bert.") if architecture == "BertModel" else name
            tensors[name] = np.ascontiguousarray(array.T if is_transposed(variable) else array)
    return tensors, left_out


def classifier_rows(params: dict, architecture: str) -> int:
    """Returns the rows of a classifier whose labels config.json names; 0 if the class has none."""
    if "output_" not in ARCHITECTURES[architecture]:
        return 0
    rows = params["classifier"]["dense"]["bias"].shape[0]
    if architecture == "BertForMultipleChoice" and rows != 1:
        raise UserError(f"--architecture={architecture}: one score per choice, but this classifier has {rows} labels")
    return rows


def to_fields(config: BertConfig) -> dict:
    """Returns what config.json says of the encoder."""
    names = (name for name in dataclasses.asdict(config) if name not in OWN_FIELDS)
    fields = {name: getattr(config, name) for name in names}
    return {"model_type": "bert", **fields, "position_embedding_type": "absolute"}


def check_form(config: BertConfig) -> None:
    """Raises `UserError` if no class of transformers, and no checkpoint of Google's, has this form of BERT."""
    for name in fields_of(BertConfig, "form", "choice"):
        if (value := getattr(config, name)) != getattr(BertConfig, name):
            raise UserError(f"model.{name} = {value!r}")
