"""ALBERT in Hugging Face's folders. Tensors of the encoder have other names than in BERT."""

from collections.abc import Mapping
from typing import Any, ClassVar

from etils import epath

from bertjax.models import json_config
from bertjax.models.albert.config import AlbertConfig
from bertjax.models.bert import huggingface as bert
from bertjax.models.bert import tf1_names

REQUIRED = (*bert.REQUIRED, "embedding_size")
# {field: the only supported value}. A group of transformers may consist of several layers with separate params.
SUPPORTED_VALUES = bert.SUPPORTED_VALUES | {"inner_group_num": 1}
# Fields of published configs that no version of transformers reads.
UNUSED_FIELDS = ("down_scale_factor", "gap_size", "net_structure_type", "num_memory_blocks")
NAMES = {"pooled_dropout_prob": "classifier_dropout_prob"}
FIELDS = json_config.ConfigFields(
    AlbertConfig, "albert", REQUIRED, bert.BERTJAX_FIELDS, NAMES, SUPPORTED_VALUES, UNUSED_FIELDS
)
LAYER = ".albert_layers.0"  # the layer of a group


class AlbertFormat(bert.BertLayersFormat):
    """Folders of ALBERT."""

    classes: ClassVar = {"Albert": "ALBERT"}
    inputs = ("input_ids", "token_type_ids", "attention_mask")
    class_parts: ClassVar = bert.CLASS_PARTS_WITHOUT_NSP | {"ForPreTraining": bert.CLASS_PARTS["ForPreTraining"]}
    replacements: ClassVar = {
        "cls.predictions.transform.": "predictions.",
        "cls.predictions.": "predictions.",
        "cls.seq_relationship.": "sop_classifier.classifier.",
        "bert.pooler.dense.": "bert.pooler.",
        "bert.embeddings_project.": "bert.encoder.embedding_hidden_mapping_in.",
        "bert.encoder.layer.": "bert.encoder.albert_layer_groups.",
        ".attention.self.": f"{LAYER}.attention.",
        ".attention.output.": f"{LAYER}.attention.",
        ".intermediate.dense.": f"{LAYER}.ffn.",
        ".output.dense.": f"{LAYER}.ffn_output.",
        ".output.LayerNorm.": f"{LAYER}.full_layer_layer_norm.",
        "bert.": "albert.",
    }

    def variable_table(self, config: AlbertConfig, labels: Mapping[str, int]) -> tf1_names.VariableTable:
        """Returns the variables of a model. The layers of a group share their variables."""
        return tf1_names.variable_table(config, labels, layers=config.num_hidden_groups)

    def read_config(self, path: epath.Path, fields: Mapping[str, Any]) -> AlbertConfig:
        """Returns the model config of a config.json, see `HuggingFaceFormat.read_config`."""
        return FIELDS.build(path, FIELDS.read(path, fields))

    def to_fields(self, config: AlbertConfig) -> dict[str, Any]:
        """Returns the fields of config.json, see `HuggingFaceFormat.to_fields`."""
        return FIELDS.to_fields(config) | {"inner_group_num": 1}


FORMAT = AlbertFormat()
