"""EuroBERT in Hugging Face's folders: fields of config.json, names of tensors, classes of transformers."""

from collections.abc import Collection, Mapping
from typing import Any, ClassVar

import numpy as np
from etils import epath

from bertjax.common.errors import UserError
from bertjax.models import json_config, rope, tensors
from bertjax.models.eurobert.config import EuroBertConfig

REQUIRED = ("vocab_size", "hidden_size", "num_hidden_layers", "num_attention_heads", "intermediate_size", "rope_theta")
SUPPORTED_VALUES = {"hidden_act": "silu", "attention_bias": False, "mlp_bias": False, "attention_dropout": 0.0}
# Other fields that are read, or that have no effect: the fields of `rope.read_rope`; clf_pooling, the former name of
# classifier_pooling; and pretraining_tp, which splits matrix products.
READ = ("clf_pooling", "pretraining_tp", *rope.READ)
FIELDS = json_config.ConfigFields(
    EuroBertConfig, "eurobert", REQUIRED, ("family", "rope_scaling"), only=SUPPORTED_VALUES, also=READ
)


class EuroBertLayersFormat(tensors.TableFormat):
    """A format whose tensors in the encoder have the names of EuroBERT."""

    inputs = ("input_ids", "attention_mask")
    words = "model.embed_tokens.weight"

    def encoder_table(self, config: Any) -> tensors.TensorTable:
        """Returns the tensors of the encoder."""
        hidden, size, inner = config.hidden_size, (config.hidden_size,), (config.intermediate_size,)
        queries, keys = (config.num_attention_heads, config.head_dim), (config.num_key_value_heads, config.head_dim)
        table = tensors.TensorTable()
        table.array(("bert", "embeddings", "word", "embedding"), self.words, config.vocab_size, hidden)
        for number in range(config.num_hidden_layers):
            path, name = ("bert", "layers", number), f"model.layers.{number}"
            table.norm((*path, "attention_norm"), f"{name}.input_layernorm", hidden)
            table.dense((*path, "attention", "query"), f"{name}.self_attn.q_proj", size, queries)
            keys_and_values = f"{name}.self_attn.k_proj", f"{name}.self_attn.v_proj"
            table.dense((*path, "attention", "key_value"), keys_and_values, size, keys)
            table.dense((*path, "attention", "output"), f"{name}.self_attn.o_proj", queries, size)
            table.norm((*path, "output_norm"), f"{name}.post_attention_layernorm", hidden)
            table.dense((*path, "input"), (f"{name}.mlp.gate_proj", f"{name}.mlp.up_proj"), size, inner)
            table.dense((*path, "output"), f"{name}.mlp.down_proj", inner, size)
        table.norm(("bert", "encoder", "norm"), "model.norm", hidden)
        return table

    def untied_reason(
        self, state_dict: Mapping[str, np.ndarray], fields: Mapping[str, Any], config: Any, source: str
    ) -> str:
        """Returns "", because tied and untied decoders are supported.

        Raises:
          UserError: if config.json has tie_word_embeddings true, and the decoder is not tied.
        """
        words = state_dict[self.words]
        if config.tie_word_embeddings and not np.array_equal(state_dict.get(self.decoder, words), words):
            raise UserError(
                f"{source}: {self.decoder} differs from {self.words}; expected equal tensors, because config.json has "
                f"tie_word_embeddings true; set it to false"
            )
        return ""


class EuroBertFormat(EuroBertLayersFormat):
    """Folders of EuroBERT that transformers writes, and the published folders, which contain Python code."""

    classes: ClassVar = {"EuroBert": "EuroBERT"}
    special_ids: ClassVar = {
        "pad_token_id": "pad",
        "bos_token_id": "cls",
        "eos_token_id": "sep",
        "mask_token_id": "mask",
    }
    # A class for question answering is only in the published code, and not in transformers.
    architectures: ClassVar = {
        "EuroBertModel": (),
        "EuroBertForMaskedLM": ("masked_lm",),
        "EuroBertForSequenceClassification": ("pooler", "classifier"),
        "EuroBertForTokenClassification": ("classifier",),
    }
    model_name = "a EuroBERT"
    decoder = "lm_head.weight"
    part_tensors: ClassVar = {
        "masked_lm": (decoder,),
        "pooler": ("dense.weight",),
        "classifier": ("classifier.weight",),
    }

    def read_config(self, path: epath.Path, fields: Mapping[str, Any]) -> EuroBertConfig:
        """Returns the model config of a config.json, see `HuggingFaceFormat.read_config`."""
        has_old_name = "classifier_pooling" not in fields and "clf_pooling" in fields  # the name in the published code
        names = {"classifier_pooling": "clf_pooling"} if has_old_name else {}
        plain_fields = json_config.without_code(fields, "EuroBert")
        values = with_head_sizes(FIELDS.read(path, plain_fields, names=names), fields)
        theta, scaling = rope.read_rope(path, fields)
        return FIELDS.build(path, values | {"rope_scaling": scaling} | ({} if theta is None else {"rope_theta": theta}))

    def to_fields(self, config: EuroBertConfig) -> dict[str, Any]:
        """Returns the fields of config.json, with the fields of both old and new versions of transformers."""
        rope_parameters = rope.rope_fields(config.rope_theta, config.rope_scaling)
        return FIELDS.to_fields(config) | SUPPORTED_VALUES | {"rope_parameters": rope_parameters}

    def table(self, config: EuroBertConfig, parts: Collection[str], labels: int) -> tensors.TensorTable:
        """Returns the tensors of a model, see `TableFormat.table`."""
        hidden, size, table = config.hidden_size, (config.hidden_size,), self.encoder_table(config)
        if "masked_lm" in parts and not config.tie_word_embeddings:
            table.array(("masked_lm", "decoder", "embedding"), self.decoder, config.vocab_size, hidden)
        if "pooler" in parts:
            table.dense(("bert", "pooler", "dense"), "dense", size, size, bias=True)
        if "classifier" in parts:
            table.dense(("classifier", "dense"), "classifier", size, (labels,), bias=True)
        return table

    def parts_of(self, params: Mapping, config: Any) -> set[str]:
        """Returns the parts of params. A tied decoder has no params, so that a lone encoder has `masked_lm`."""
        parts = tensors.class_parts_of(params)
        return parts | ({"masked_lm"} if config.tie_word_embeddings and not parts else set())


def with_head_sizes(values: Mapping[str, Any], fields: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the values of a model config, with the defaults of head_dim and num_key_value_heads for null.

    Args:
      values: {name in bertjax: value}.
      fields: the content of config.json.
    """
    defaults = {"head_dim": json_config.head_size(fields), "num_key_value_heads": fields.get("num_attention_heads")}
    return {**values, **{name: default for name, default in defaults.items() if values[name] is None}}


FORMAT = EuroBertFormat()
