"""DistilBERT in Hugging Face's folders. Fields and tensors have other names than in BERT."""

from collections.abc import Mapping
from typing import Any, ClassVar

from etils import epath

from bertjax.models import json_config
from bertjax.models.bert import huggingface as bert
from bertjax.models.distilbert.config import DistilBertConfig

# {field of `DistilBertConfig`: field of config.json} where the names differ.
NAMES = {
    "hidden_size": "dim",
    "num_hidden_layers": "n_layers",
    "num_attention_heads": "n_heads",
    "intermediate_size": "hidden_dim",
    "hidden_act": "activation",
    "hidden_dropout_prob": "dropout",
    "attention_probs_dropout_prob": "attention_dropout",
    "pooled_dropout_prob": "seq_classif_dropout",
    "spans_dropout_prob": "qa_dropout",
}
ALIASES = {"hidden_size": "dim", "num_attention_heads": "n_heads", "num_hidden_layers": "n_layers"}
UNUSED_FIELDS = ("sinusoidal_pos_embds",)  # initial values of the position embeddings, which are among the tensors

FIELDS = json_config.ConfigFields(
    DistilBertConfig, "distilbert", bert.REQUIRED, bert.BERTJAX_FIELDS, NAMES, also=(*UNUSED_FIELDS, *ALIASES)
)


class DistilBertFormat(bert.BertLayersFormat):
    """Folders of DistilBERT."""

    classes: ClassVar = {"DistilBert": "DistilBERT"}
    aliases: ClassVar = ALIASES
    class_parts: ClassVar = bert.CLASS_PARTS_WITHOUT_NSP | {"Model": ()}
    replacements: ClassVar = {
        "cls.predictions.transform.dense.": "vocab_transform.",
        "cls.predictions.transform.LayerNorm.": "vocab_layer_norm.",
        "cls.predictions.decoder.weight": "vocab_projector.weight",
        "cls.predictions.bias": "vocab_projector.bias",
        "bert.pooler.dense.": "pre_classifier.",
        "bert.encoder.": "bert.transformer.",
        ".attention.self.query.": ".attention.q_lin.",
        ".attention.self.key.": ".attention.k_lin.",
        ".attention.self.value.": ".attention.v_lin.",
        ".attention.output.dense.": ".attention.out_lin.",
        ".attention.output.LayerNorm.": ".sa_layer_norm.",
        ".intermediate.dense.": ".ffn.lin1.",
        ".output.dense.": ".ffn.lin2.",
        ".output.LayerNorm.": ".output_layer_norm.",
        "bert.": "distilbert.",
    }

    def read_config(self, path: epath.Path, fields: Mapping[str, Any]) -> DistilBertConfig:
        """Returns the model config of a config.json, see `HuggingFaceFormat.read_config`."""
        fields = json_config.with_aliases(path, fields, ALIASES)
        return FIELDS.build(path, FIELDS.read(path, fields))

    def to_fields(self, config: DistilBertConfig) -> dict[str, Any]:
        """Returns the fields of config.json, see `HuggingFaceFormat.to_fields`."""
        return FIELDS.to_fields(config) | {"sinusoidal_pos_embds": False}


FORMAT = DistilBertFormat()
