"""MPNet in Hugging Face's folders. Tensors of the encoder have the names of BERT, except in the attention."""

import dataclasses
from collections.abc import Mapping
from typing import Any, ClassVar

from etils import epath

from bertjax.common.errors import UserError
from bertjax.config.model_config import BertConfig
from bertjax.models import json_config
from bertjax.models.bert import huggingface as bert
from bertjax.models.bert import tf1_names
from bertjax.models.mpnet.config import MPNetConfig
from bertjax.models.roberta import huggingface as roberta

PADDING = 1  # the id of the padding token in the code of transformers, which counts positions from the next number
# {field of config.json: the only supported value}
SUPPORTED_VALUES = {
    "hidden_act": MPNetConfig.hidden_act,
    "relative_attention_num_buckets": MPNetConfig.relative_attention_num_buckets,
    "pad_token_id": PADDING,
}
FIELDS = json_config.ConfigFields(
    MPNetConfig, "mpnet", bert.REQUIRED, ("family", "position_offset"), only=SUPPORTED_VALUES
)


class MPNetFormat(bert.BertLayersFormat):
    """Folders of MPNet."""

    classes: ClassVar = {"MPNet": "MPNet"}
    special_ids: ClassVar = {"bos_token_id": "cls", "eos_token_id": "sep"}
    replacements: ClassVar = {
        **roberta.RobertaFormat.replacements,
        ".attention.self.query.": ".attention.attn.q.",
        ".attention.self.key.": ".attention.attn.k.",
        ".attention.self.value.": ".attention.attn.v.",
        ".attention.output.dense.": ".attention.attn.o.",
        ".attention.output.LayerNorm.": ".attention.LayerNorm.",
        ".relative_attention_embeddings.": ".relative_attention_bias.",
        "bert.": "mpnet.",
    }
    # The dense layer of a sequence classifier is the pooler of bertjax.
    replacements_by_suffix: ClassVar = roberta.RobertaFormat.replacements_by_suffix

    def variable_table(self, config: MPNetConfig, labels: Mapping[str, int]) -> tf1_names.VariableTable:
        """Returns the variables of a model, with the table of the position bias."""
        table = super().variable_table(config, labels)
        shape = config.relative_attention_num_buckets, config.num_attention_heads
        table.array(("bert", "relative_attention_bias"), "bert/encoder/relative_attention_embeddings", *shape)
        return table

    def check_exportable(self, config: BertConfig) -> None:
        """Checks that transformers has a class for a model, see `HuggingFaceFormat.check_exportable`."""
        if config.position_offset != PADDING + 1:
            raise UserError(f"model.position_offset = {config.position_offset}")

    def read_config(self, path: epath.Path, fields: Mapping[str, Any]) -> MPNetConfig:
        """Returns the model config of a config.json, see `HuggingFaceFormat.read_config`."""
        values = FIELDS.read(path, fields)
        values |= roberta.sequence_length(path, values, PADDING + 1)
        return dataclasses.replace(FIELDS.build(path, values), position_offset=PADDING + 1)

    def to_fields(self, config: MPNetConfig) -> dict[str, Any]:
        """Returns the fields of config.json, see `HuggingFaceFormat.to_fields`."""
        fields = FIELDS.to_fields(config) | SUPPORTED_VALUES
        return fields | {"max_position_embeddings": config.max_position_embeddings + config.position_offset}


FORMAT = MPNetFormat()
