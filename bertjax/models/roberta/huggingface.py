"""RoBERTa in Hugging Face's folders. Tensors of the encoder have the names of BERT with another prefix."""

import dataclasses
from collections.abc import Mapping
from typing import Any, ClassVar

from etils import epath

from bertjax.common.errors import UserError
from bertjax.models import json_config
from bertjax.models.bert import huggingface as bert
from bertjax.models.roberta.config import RobertaConfig

BERTJAX_FIELDS = (*bert.BERTJAX_FIELDS, "position_offset", "variant")
FIELDS = json_config.ConfigFields(RobertaConfig, "roberta", bert.REQUIRED, BERTJAX_FIELDS, only=bert.SUPPORTED_VALUES)


class RobertaFormat(bert.BertLayersFormat):
    """Folders of RoBERTa, XLM-R and CamemBERT.

    Attributes:
      fields: the fields of config.json.
    """

    fields: ClassVar = FIELDS
    classes: ClassVar = {"Roberta": "RoBERTa", "XLMRoberta": "XLM-RoBERTa", "Camembert": "CamemBERT"}
    special_ids: ClassVar = {"bos_token_id": "cls", "eos_token_id": "sep"}
    replacements: ClassVar = {
        "cls.predictions.transform.dense.": "lm_head.dense.",
        "cls.predictions.transform.LayerNorm.": "lm_head.layer_norm.",
        "cls.predictions.": "lm_head.",
        "bert.": "roberta.",
    }
    # The dense layer of a sequence classifier is the pooler of bertjax.
    replacements_by_suffix: ClassVar = {
        "ForSequenceClassification": {"classifier.": "classifier.out_proj.", "bert.pooler.dense.": "classifier.dense."}
    }

    def class_prefix(self, config: RobertaConfig) -> str:
        """Returns the beginning of the class names for the variant of a config."""
        return {"roberta": "Roberta", "xlm-roberta": "XLMRoberta", "camembert": "Camembert"}[config.variant]

    def read_config(self, path: epath.Path, fields: Mapping[str, Any]) -> RobertaConfig:
        """Returns the model config of a config.json, see `HuggingFaceFormat.read_config`."""
        if fields.get("position_embedding_type") == "rotary":
            raise UserError(
                f"{path}: position_embedding_type 'rotary' is not supported; supported: 'absolute'; use a folder of "
                f"Jina Embeddings v3 that transformers reads without code, such as hub:jinaai/jina-embeddings-v3-hf"
            )
        variant = fields.get("model_type", self.fields.kind)
        values = self.fields.read(path, fields, kind=variant)
        offset = fields.get("pad_token_id", 1)
        if type(offset) is not int or offset < 0:
            raise UserError(
                f"{path}: pad_token_id is {offset!r}; expected an integer of at least 0, since positions follow it"
            )
        values |= sequence_length(path, values, offset + 1)
        return dataclasses.replace(self.fields.build(path, values), position_offset=offset + 1, variant=variant)

    def to_fields(self, config: RobertaConfig) -> dict[str, Any]:
        """Returns the fields of config.json. In transformers, the position of the first token is `pad_token_id` + 1."""
        fields = self.fields.to_fields(config) | {"model_type": config.variant}
        fields["max_position_embeddings"] += config.position_offset
        return fields | {"pad_token_id": config.position_offset - 1, "position_embedding_type": "absolute"}


def sequence_length(path: epath.Path, values: Mapping[str, Any], offset: int) -> dict[str, int]:
    """Returns max_position_embeddings without the rows before the position of the first token.

    Args:
      path: the file, for messages.
      values: the fields of the file. `ConfigFields.build` checks a value that is not an integer.
      offset: the position of the first token, pad_token_id + 1.

    Raises:
      UserError: if there is no position for a token.
    """
    positions = values.get("max_position_embeddings")
    if type(positions) is not int:
        return {}
    if positions <= offset:
        raise UserError(
            f"{path}: max_position_embeddings is {positions}; expected more than pad_token_id + 1 = {offset}, because "
            f"positions start there"
        )
    return {"max_position_embeddings": positions - offset}


FORMAT = RobertaFormat()
