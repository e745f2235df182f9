"""RoBERTa in Hugging Face's folders. Names of tensors are BERT's, but for those of its output layers."""

import dataclasses
from collections.abc import Mapping

from etils import epath

from bertjax.common.errors import UserError
from bertjax.models import json_config
from bertjax.models.bert import huggingface as bert
from bertjax.models.roberta.config import RobertaConfig

# How the names of classes begin, by variant; and how people write these.
PREFIXES = {"roberta": "Roberta", "xlm-roberta": "XLMRoberta", "camembert": "Camembert"}
CLASSES = {"Roberta": "RoBERTa", "XLMRoberta": "XLM-RoBERTa", "Camembert": "CamemBERT"}
INPUTS = ("input_ids", "attention_mask")
SPECIAL_IDS = {"bos_token_id": "cls", "eos_token_id": "sep"}
LAYOUT = bert.FolderLayout(
    lambda config: PREFIXES[config.variant],
    bert.KINDS_WITHOUT_PAIRS,
    names={
        "cls.predictions.transform.dense.": "lm_head.dense.",
        "cls.predictions.transform.LayerNorm.": "lm_head.layer_norm.",
        "cls.predictions.": "lm_head.",
        "bert.": "roberta.",
    },
    # The dense layer of a classifier of texts is our pooler.
    names_in={
        "ForSequenceClassification": {"classifier.": "classifier.out_proj.", "bert.pooler.dense.": "classifier.dense."}
    },
)
ARCHITECTURES = tuple(prefix + kind for prefix in PREFIXES.values() for kind in LAYOUT.kinds)
OWN_FIELDS = (*bert.OWN_FIELDS, "position_offset", "variant")
read_params, choose_architecture = LAYOUT.read_params, LAYOUT.choose_architecture
to_tensors, classifier_rows = LAYOUT.to_tensors, LAYOUT.classifier_rows
check_form = bert.check_form


def read_config(path: epath.Path, fields: Mapping) -> RobertaConfig:
    """Returns the config of a config.json with these fields. Raises `UserError` for a variant that we do not have."""
    variant = fields.get("model_type", "roberta")
    names = json_config.field_names(RobertaConfig, OWN_FIELDS)
    found = json_config.read_fields(path, fields, variant, names, bert.ONLY, required=bert.REQUIRED)
    offset, positions = fields.get("pad_token_id", 1), fields.get("max_position_embeddings")
    if type(offset) is not int or offset < 0:
        raise UserError(f"{path}: pad_token_id is {offset!r}, which positions are counted from")
    if type(positions) is int and positions <= offset + 1:
        raise UserError(f"{path}: max_position_embeddings is {positions}, of which pad_token_id leaves none")
    found["hidden_act"] = json_config.activation(path, fields, "hidden_act")
    if type(positions) is int:
        found["max_position_embeddings"] = positions - offset - 1
    built = json_config.build(path, RobertaConfig, found, bert.REQUIRED, OWN_FIELDS)
    return dataclasses.replace(built, position_offset=offset + 1, variant=variant)


def to_fields(config: RobertaConfig) -> dict:
    """Returns what config.json says of the encoder."""
    fields = {name: x for name, x in vars(config).items() if name not in OWN_FIELDS}
    fields["max_position_embeddings"] += config.position_offset
    padding = {"pad_token_id": config.position_offset - 1}  # transformers counts positions from it on
    return {"model_type": config.variant, **fields, **padding, "position_embedding_type": "absolute"}
