"""ModernBERT in Hugging Face's folders: fields of config.json, names of tensors, classes of transformers."""

from collections.abc import Collection, Mapping
from typing import Any, ClassVar

import numpy as np
from etils import epath

from bertjax.common.errors import UserError
from bertjax.models import json_config, rope, tensors
from bertjax.models.modernbert.config import ModernBertConfig

# {field of `ModernBertConfig`: field of config.json} where the names differ.
NAMES = {
    "hidden_act": "hidden_activation",
    "layer_norm_eps": "norm_eps",
    "bias": "norm_bias",
    "attention_output_dropout_prob": "attention_dropout",  # transformers also drops attention probabilities
}
REQUIRED = ("vocab_size", "hidden_size", "num_hidden_layers", "num_attention_heads", "intermediate_size")
KINDS = {"global": "full_attention", "local": "sliding_attention"}  # of layers, as in config.json
BIASES = ("norm_bias", "attention_bias", "mlp_bias", "classifier_bias")
SUPPORTED_VALUES = {"embedding_dropout": 0.0, "mlp_dropout": 0.0, "decoder_bias": True}
# Other fields that `read_config` reads. The last four fields are for training and do not affect predictions.
READ = (
    "classifier_activation", "head_dim", "layer_types", "rope_parameters", "rope_scaling", "sliding_window",
    "deterministic_flash_attn", "initializer_cutoff_factor", "sparse_pred_ignore_index", "sparse_prediction",
)  # fmt: skip

FIELDS = json_config.ConfigFields(
    ModernBertConfig,
    "modernbert",
    REQUIRED,
    ("glu", "family", "global_rope_scaling", "local_rope_scaling"),
    NAMES,
    also=READ,
)


class ModernBertFormat(tensors.TableFormat):
    """Folders of ModernBERT that old and new versions of transformers write."""

    classes: ClassVar = {"ModernBert": "ModernBERT"}
    inputs = ("input_ids", "attention_mask")
    special_ids: ClassVar = {
        "pad_token_id": "pad", "bos_token_id": "cls", "cls_token_id": "cls", "eos_token_id": "sep",
        "sep_token_id": "sep",
    }  # fmt: skip
    architectures: ClassVar = {
        "ModernBertModel": (),
        "ModernBertForMaskedLM": ("masked_lm",),
        "ModernBertForSequenceClassification": ("pooler", "classifier"),
        "ModernBertForMultipleChoice": ("pooler", "classifier"),
        "ModernBertForTokenClassification": ("pooler", "classifier"),
        "ModernBertForQuestionAnswering": ("pooler", "spans"),
    }
    model_name = "a ModernBERT"
    words = "model.embeddings.tok_embeddings.weight"
    decoder = "decoder.weight"
    part_tensors: ClassVar = {"masked_lm": ("decoder.bias",), "classifier": ("classifier.weight",)}

    def read_config(self, path: epath.Path, fields: Mapping[str, Any]) -> ModernBertConfig:
        """Returns the model config of a config.json, see `HuggingFaceFormat.read_config`."""
        only = SUPPORTED_VALUES | dict.fromkeys(BIASES, fields.get("norm_bias", False))
        values = FIELDS.read(path, fields, only=only)
        if fields.get("classifier_activation", "gelu") != fields.get("hidden_activation", "gelu"):
            raise UserError(
                f"{path}: classifier_activation {fields.get('classifier_activation', 'gelu')!r} is not supported; "
                f"supported: {fields.get('hidden_activation', 'gelu')!r}, the value of hidden_activation"
            )
        if fields.get("head_dim") not in (None, size := json_config.head_size(fields)):
            raise UserError(f"{path}: head_dim {fields['head_dim']!r} is not supported; supported: {size!r}")
        values |= _ropes(path, fields) | _pattern(path, fields)
        if "sliding_window" in fields:  # half the window size
            if type(fields["sliding_window"]) is not int:
                raise UserError(f"{path}: sliding_window is {fields['sliding_window']!r}; expected int")
            values["local_attention"] = 2 * fields["sliding_window"]
        return FIELDS.build(path, values)

    def to_fields(self, config: ModernBertConfig) -> dict[str, Any]:
        """Returns the fields of config.json, with the fields of both old and new versions of transformers."""
        kinds = {True: "full_attention", False: "sliding_attention"}
        return {
            **FIELDS.to_fields(config),
            **dict.fromkeys(BIASES, config.bias),
            **SUPPORTED_VALUES,
            "classifier_activation": config.hidden_act,
            "layer_types": [kinds[config.is_global(number)] for number in range(config.num_hidden_layers)],
            "rope_parameters": rope.rope_fields_of_kinds(config, KINDS),
        }

    def check_exportable(self, config: ModernBertConfig) -> None:
        """Checks that transformers has a class for a model, see `HuggingFaceFormat.check_exportable`."""
        if not config.glu:
            raise UserError("model.glu = False")

    def table(self, config: ModernBertConfig, parts: Collection[str], labels: int) -> tensors.TensorTable:
        """Returns the tensors of a model, see `TableFormat.table`."""
        hidden, heads = config.hidden_size, (config.num_attention_heads, config.head_size)
        size, inner, bias, table = (hidden,), (config.intermediate_size,), config.bias, tensors.TensorTable()
        table.array(("bert", "embeddings", "word", "embedding"), self.words, config.vocab_size, hidden)
        table.norm(("bert", "embeddings", "norm"), "model.embeddings.norm", hidden, bias)
        for number in range(config.num_hidden_layers):
            path, name = ("bert", "layers", number), f"model.layers.{number}"
            if number:
                table.norm((*path, "attention_norm"), f"{name}.attn_norm", hidden, bias)
            table.dense((*path, "attention", "query_key_value"), f"{name}.attn.Wqkv", size, (3, *heads), bias)
            table.dense((*path, "attention", "output"), f"{name}.attn.Wo", heads, size, bias)
            table.norm((*path, "output_norm"), f"{name}.mlp_norm", hidden, bias)
            table.dense((*path, "input"), f"{name}.mlp.Wi", size, (2, *inner), bias)
            table.dense((*path, "output"), f"{name}.mlp.Wo", inner, size, bias)
        table.norm(("bert", "encoder", "norm"), "model.final_norm", hidden, bias)
        if "masked_lm" in parts:
            self._head(table, ("masked_lm",), config)
            table.array(("masked_lm", "bias"), "decoder.bias", config.vocab_size)
        for part in ("classifier", "spans"):
            if part in parts:
                self._head(table, ("bert", "pooler"), config)
                table.dense((part, "dense"), "classifier", size, (labels,), bias=True)
        return table

    def _head(self, table: tensors.TensorTable, path: tuple, config: ModernBertConfig) -> None:
        """Adds the dense layer and the norm before a head. The tensor names are the same in all classes."""
        size = (config.hidden_size,)
        table.dense((*path, "dense"), "head.dense", size, size, config.bias)
        table.norm((*path, "norm"), "head.norm", config.hidden_size, config.bias)

    def parts_in(self, state_dict: Mapping[str, np.ndarray], fields: Mapping[str, Any]) -> list[str]:
        """Returns the parts of a checkpoint, see `TableFormat.parts_in`."""
        is_question_answering = any("QuestionAnswering" in name for name in fields.get("architectures") or ())
        classifier = "spans" if is_question_answering else "classifier"
        return [classifier if part == "classifier" else part for part in super().parts_in(state_dict, fields)]


def _ropes(path: epath.Path, fields: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the bases and the scalings of the rotary frequencies of global and local layers.

    As in transformers, the values of rope_scaling replace values of rope_parameters in both layer types. A base that is
    in neither object is the field of the same name.
    """
    values = {}
    by_kind = rope.objects_of_kinds(path, fields.get("rope_parameters") or {}, KINDS)
    for name, kind in KINDS.items():
        field, scaling = f"{name}_rope_theta", fields.get("rope_scaling")
        parameters = {kind: by_kind.get(kind) or {}}
        if isinstance(scaling, dict):
            scaling = {"rope_type": "default", **parameters[kind], **scaling}
        stated = {**fields, "rope_theta": None, "rope_parameters": parameters, "rope_scaling": scaling}
        theta, scaling_text = rope.read_rope(path, stated, kind)
        values[field] = fields.get(field, getattr(ModernBertConfig, field)) if theta is None else theta
        values[f"{name}_rope_scaling"] = scaling_text
    return values


def _pattern(path: epath.Path, fields: Mapping[str, Any]) -> dict[str, Any]:
    """Returns {"global_attn_every_n_layers": period} from layer_types. Raises `UserError` without a period."""
    types = json_config.layer_types(path, fields)
    if types is None:
        return {}
    are_global, layers = [kind == "full_attention" for kind in types], len(types)
    every = next((number for number in range(1, layers) if are_global[number]), layers)
    if are_global != [number % every == 0 for number in range(layers)]:
        raise UserError(
            f"{path}: layer_types must be full_attention in layers 0, n, 2 n, ..., "
            f"and sliding_attention in all other layers"
        )
    return {"global_attn_every_n_layers": every}


FORMAT = ModernBertFormat()
