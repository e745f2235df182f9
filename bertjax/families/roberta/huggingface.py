"""RoBERTa in Hugging Face's folders. Names of tensors are BERT's, but for those of its output layers."""

import dataclasses
from collections.abc import Iterable, Mapping

import numpy as np
from etils import epath

from bertjax.config import BertConfig, UserError, fields_of
from bertjax.families import json_config
from bertjax.families.bert import huggingface as bert
from bertjax.families.roberta import RobertaConfig
from bertjax.families.tensors import WRAPPERS

# How the names of classes begin, by variant; and how people write these.
PREFIXES = {"roberta": "Roberta", "xlm-roberta": "XLMRoberta", "camembert": "Camembert"}
CLASSES = {"Roberta": "RoBERTa", "XLMRoberta": "XLM-RoBERTa", "Camembert": "CamemBERT"}
INPUTS = ("input_ids", "attention_mask")
SPECIAL_IDS = {"bos_token_id": "cls", "eos_token_id": "sep"}
KINDS = [
    name.removeprefix("Bert")
    for name in bert.ARCHITECTURES
    if name not in ("BertForPreTraining", "BertForNextSentencePrediction")
]
ARCHITECTURES = {prefix + kind: bert.ARCHITECTURES["Bert" + kind] for prefix in PREFIXES.values() for kind in KINDS}
OWN_FIELDS = (*bert.OWN_FIELDS, "position_offset", "variant")

# The beginnings of names, theirs and BERT's, in the order in which they are looked for.
NAMES = {
    "lm_head.dense.": "cls.predictions.transform.dense.",
    "lm_head.layer_norm.": "cls.predictions.transform.LayerNorm.",
    "lm_head.": "cls.predictions.",
    "classifier.dense.": "bert.pooler.dense.",
    "classifier.out_proj.": "classifier.",
    "roberta.": "bert.",
}


def read_config(path: epath.Path, fields: Mapping) -> RobertaConfig:
    """Returns the config of a config.json with these fields. Raises `UserError` for a variant that we do not have."""
    json_config.require(
        path, fields, {"position_embedding_type": "absolute", "is_decoder": False, "add_cross_attention": False}
    )
    offset, positions = fields.get("pad_token_id", 1), fields.get("max_position_embeddings")
    if type(offset) is not int or offset < 0:
        raise UserError(f"{path}: pad_token_id is {offset!r}, which positions are counted from")
    if type(positions) is int and positions <= offset + 1:
        raise UserError(f"{path}: max_position_embeddings is {positions}, of which pad_token_id leaves none")
    found = {**fields, "hidden_act": json_config.activation(path, fields, "hidden_act")}
    if type(positions) is int:
        found["max_position_embeddings"] = positions - offset - 1
    own = dict(position_offset=offset + 1, variant=fields.get("model_type", "roberta"))
    built = json_config.build(path, RobertaConfig, found, bert.REQUIRED, OWN_FIELDS)
    return dataclasses.replace(built, **own)


def read_params(
    tensors: Iterable[tuple[str, np.ndarray]], fields: Mapping, config: RobertaConfig, source: str
) -> tuple[dict, list[str], str]:
    """As `bert.huggingface.read_params`. The dense layer of a classifier of texts is our pooler."""
    renamed = ((_bert_name(WRAPPERS.sub("", name)), tensor) for name, tensor in tensors)
    params, ignored, wordless = bert.read_params(renamed, fields, config, source)
    return params, [_own_name(name) for name in ignored], wordless.replace("cls.predictions.", "lm_head.")


def _bert_name(name: str) -> str:
    for theirs, berts in NAMES.items():
        if name.startswith(theirs):
            return berts + name.removeprefix(theirs)
    return name


def _own_name(name: str, of_texts: bool = False) -> str:
    """Returns RoBERTa's name of a tensor of BERT. `of_texts`: in a classifier of texts."""
    for theirs, berts in NAMES.items():
        if name.startswith(berts) and (of_texts or not theirs.startswith("classifier.")):
            return theirs + name.removeprefix(berts)
    return name


def choose_architecture(params: dict, config: RobertaConfig, stated: str = "") -> str:
    """As `bert.huggingface.choose_architecture`."""
    params = {part: tree for part, tree in params.items() if part != "next_sentence"}
    return _class_of(bert.choose_architecture(params, config, _bert_class(stated)), config)


def _class_of(berts: str, config: RobertaConfig) -> str:
    return PREFIXES[config.variant] + berts.removeprefix("Bert")


def _bert_class(architecture: str) -> str:
    kind = architecture[architecture.index("For") :] if "For" in architecture else "Model"
    return "Bert" + kind if architecture else ""


def to_tensors(params: dict, config: RobertaConfig, architecture: str) -> tuple[dict[str, np.ndarray], list[str]]:
    """As `bert.huggingface.to_tensors`."""
    of_texts = architecture.endswith("ForSequenceClassification")
    tensors, left_out = bert.to_tensors(params, config, _bert_class(architecture))
    return {_own_name(name, of_texts): tensor for name, tensor in tensors.items()}, left_out


def classifier_rows(params: dict, architecture: str) -> int:
    """As `bert.huggingface.classifier_rows`."""
    return bert.classifier_rows(params, _bert_class(architecture))


def to_fields(config: RobertaConfig) -> dict:
    """Returns what config.json says of the encoder."""
    fields = {name: x for name, x in vars(config).items() if name not in OWN_FIELDS}
    fields["max_position_embeddings"] += config.position_offset
    padding = {"pad_token_id": config.position_offset - 1}  # transformers counts positions from it on
    return {"model_type": config.variant, **fields, **padding, "position_embedding_type": "absolute"}


def check_form(config: RobertaConfig) -> None:
    """Raises `UserError` if no class of transformers has this form of RoBERTa."""
    for name in fields_of(BertConfig, "form", "choice"):
        if name != "family" and (value := getattr(config, name)) != getattr(BertConfig, name):
            raise UserError(f"model.{name} = {value!r}")
