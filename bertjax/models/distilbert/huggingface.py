"""DistilBERT in Hugging Face's folders: BERT under names of its own."""

from collections.abc import Mapping

from etils import epath

from bertjax.models import json_config
from bertjax.models.bert import huggingface as bert
from bertjax.models.distilbert.config import DistilBertConfig

CLASSES = {"DistilBert": "DistilBERT"}  # how the names of its classes begin, and how people write it
INPUTS = ("input_ids", "attention_mask")
SPECIAL_IDS = {"pad_token_id": "pad"}
# Fields that config.json has under another name.
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
HARMLESS = ("sinusoidal_pos_embds",)  # how the table of positions began; the table itself is among the tensors
LAYOUT = bert.FolderLayout(
    lambda config: "DistilBert",
    bert.KINDS_WITHOUT_PAIRS | {"Model": ()},
    {
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
    },
)
ARCHITECTURES = tuple(f"DistilBert{kind}" for kind in LAYOUT.kinds)
read_params, choose_architecture = LAYOUT.read_params, LAYOUT.choose_architecture
to_tensors, classifier_rows = LAYOUT.to_tensors, LAYOUT.classifier_rows
check_form = bert.check_form


def read_config(path: epath.Path, fields: Mapping) -> DistilBertConfig:
    """Returns the config of a config.json with these fields. Raises `UserError` for a variant that we do not have."""
    fields = json_config.with_aliases(path, fields, ALIASES)
    names = json_config.field_names(DistilBertConfig, bert.OWN_FIELDS, NAMES)
    also = (*HARMLESS, *ALIASES)
    found = json_config.read_fields(path, fields, "distilbert", names, {}, required=bert.REQUIRED, also=also)
    found["hidden_act"] = json_config.activation(path, fields, "activation")
    return json_config.build(path, DistilBertConfig, found, bert.REQUIRED, bert.OWN_FIELDS, NAMES)


def to_fields(config: DistilBertConfig) -> dict:
    """Returns what config.json says of the encoder."""
    fields = {NAMES.get(name, name): x for name, x in vars(config).items() if name not in bert.OWN_FIELDS}
    return {"model_type": "distilbert", **fields, "sinusoidal_pos_embds": False}
