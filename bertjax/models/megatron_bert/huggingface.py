"""MegatronBERT in Hugging Face's folders. Tensors have the names of BERT, except LayerNorms."""

from collections.abc import Mapping
from typing import Any, ClassVar

from etils import epath

from bertjax.models import json_config
from bertjax.models.bert import huggingface as bert
from bertjax.models.megatron_bert.config import MegatronBertConfig

FIELDS = json_config.ConfigFields(
    MegatronBertConfig, "megatron-bert", bert.REQUIRED, bert.BERTJAX_FIELDS, only=bert.SUPPORTED_VALUES
)


class MegatronBertFormat(bert.BertLayersFormat):
    """Folders of MegatronBERT."""

    classes: ClassVar = {"MegatronBert": "MegatronBERT"}
    inputs = ("input_ids", "token_type_ids", "attention_mask")
    class_parts: ClassVar = bert.CLASS_PARTS
    replacements: ClassVar = {
        ".attention.output.LayerNorm.": ".attention.ln.",
        ".output.LayerNorm.": ".ln.",
        ".encoder.LayerNorm.": ".encoder.ln.",
    }

    def read_config(self, path: epath.Path, fields: Mapping[str, Any]) -> MegatronBertConfig:
        """Returns the model config of a config.json, see `HuggingFaceFormat.read_config`."""
        return FIELDS.build(path, FIELDS.read(path, fields))

    def to_fields(self, config: MegatronBertConfig) -> dict[str, Any]:
        """Returns the fields of config.json, see `HuggingFaceFormat.to_fields`."""
        return FIELDS.to_fields(config)


FORMAT = MegatronBertFormat()
