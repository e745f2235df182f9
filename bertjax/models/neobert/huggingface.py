"""NeoBERT in Hugging Face's folders: fields of config.json, names of tensors, classes of the published code.

transformers has no class for NeoBERT. The published folder contains the classes as Python code.
"""

from collections.abc import Collection, Iterable, Mapping
from typing import Any, ClassVar

import numpy as np
from etils import epath

from bertjax.common.errors import UserError
from bertjax.models import json_config, tensors
from bertjax.models.neobert.config import NeoBertConfig

REQUIRED = (
    "vocab_size", "hidden_size", "num_hidden_layers", "num_attention_heads", "intermediate_size", "norm_eps",
    "max_position_embeddings",
)  # fmt: skip
NAMES = {"max_position_embeddings": "max_length", "initializer_range": "embedding_init_range"}
# The training code has other architectures for other values.
SUPPORTED_VALUES = {"rope": True, "rms_norm": True, "ngpt": False, "hidden_act": "SwiGLU"}
# Other fields that are read, or that have no effect.
READ = (
    "base_scale", "classifier_init_range", "decoder_init_range", "dim_head", "dropout", "encoder_init_range",
    "flash_attention", "kwargs", "pretrained_model_name_or_path", "trust_remote_code",
)  # fmt: skip
FIELDS = json_config.ConfigFields(NeoBertConfig, "neobert", REQUIRED, ("family",), NAMES, SUPPORTED_VALUES, READ)
CODE = "chandar-lab/NeoBERT--model"  # the module on the hub with the published code
CLASSES = {
    "AutoConfig": "NeoBERTConfig", "AutoModel": "NeoBERT", "AutoModelForMaskedLM": "NeoBERTLMHead",
    "AutoModelForSequenceClassification": "NeoBERTForSequenceClassification",
}  # fmt: skip
MULTIPLE = 8  # of the output size of the gate


class NeoBertFormat(tensors.TableFormat):
    """Folders of NeoBERT."""

    classes: ClassVar = {"NeoBERT": "NeoBERT"}
    bert_suffixes: ClassVar = {"": "Model", "LMHead": "ForMaskedLM"}
    needs_code = True
    inputs = ("input_ids", "attention_mask")
    special_ids: ClassVar = {"pad_token_id": "pad"}
    architectures: ClassVar = {
        "NeoBERT": (),
        "NeoBERTLMHead": ("masked_lm",),
        "NeoBERTForSequenceClassification": ("pooler", "classifier"),
    }
    model_name = "a NeoBERT"
    words = "model.encoder.weight"
    decoder = "decoder.weight"
    part_tensors: ClassVar = {
        "masked_lm": (decoder,),
        "pooler": ("dense.weight",),
        "classifier": ("classifier.weight",),
    }

    def read_config(self, path: epath.Path, fields: Mapping[str, Any]) -> NeoBertConfig:
        """Returns the model config of a config.json, see `HuggingFaceFormat.read_config`."""
        fields = json_config.without_code(fields, "NeoBERT")
        if str(fields.get("hidden_act")).lower() == "swiglu":
            fields |= {"hidden_act": "SwiGLU"}
        values = FIELDS.read(path, fields)
        if fields.get("dim_head") not in (None, size := json_config.head_size(fields)):
            raise UserError(f"{path}: dim_head {fields['dim_head']!r} is not supported; supported: {size!r}")
        if type(stated := values.get("intermediate_size")) is int:
            values["intermediate_size"] = -(-(2 * stated // 3) // MULTIPLE) * MULTIPLE
        return FIELDS.build(path, values)

    def to_fields(self, config: NeoBertConfig) -> dict[str, Any]:
        """Returns the fields of config.json, with the classes of the published code."""
        return FIELDS.to_fields(config) | {
            "intermediate_size": config.intermediate_size // 2 * 3,
            "decoder_init_range": config.initializer_range,
            "dim_head": config.head_size,
            "auto_map": {name: f"{CODE}.{class_name}" for name, class_name in CLASSES.items()},
        }

    def check_exportable(self, config: NeoBertConfig) -> None:
        """Checks that the published code has the size of the gate, see `HuggingFaceFormat.check_exportable`."""
        if config.intermediate_size % MULTIPLE:
            raise UserError(f"model.intermediate_size = {config.intermediate_size}")

    def table(self, config: NeoBertConfig, parts: Collection[str], labels: int) -> tensors.TensorTable:
        """Returns the tensors of a model, see `TableFormat.table`."""
        hidden, heads = config.hidden_size, (config.num_attention_heads, config.head_size)
        size, inner, table = (hidden,), (config.intermediate_size,), tensors.TensorTable()
        table.array(("bert", "embeddings", "word", "embedding"), self.words, config.vocab_size, hidden)
        for number in range(config.num_hidden_layers):
            path, name = ("bert", "layers", number), f"model.transformer_encoder.{number}"
            table.norm((*path, "attention_norm"), f"{name}.attention_norm", hidden)
            table.dense((*path, "attention", "query_key_value"), f"{name}.qkv", size, (3, *heads))
            table.dense((*path, "attention", "output"), f"{name}.wo", heads, size)
            table.norm((*path, "output_norm"), f"{name}.ffn_norm", hidden)
            table.dense((*path, "input"), f"{name}.ffn.w12", size, (2, *inner))
            table.dense((*path, "output"), f"{name}.ffn.w3", inner, size)
        table.norm(("bert", "encoder", "norm"), "model.layer_norm", hidden)
        if "masked_lm" in parts:
            table.array(("masked_lm", "decoder", "embedding"), self.decoder, config.vocab_size, hidden)
            table.array(("masked_lm", "bias"), "decoder.bias", config.vocab_size)
        if "pooler" in parts:
            table.dense(("bert", "pooler", "dense"), "dense", size, size, bias=True)
        if "classifier" in parts:
            table.dense(("classifier", "dense"), "classifier", size, (labels,), bias=True)
        return table

    def read_params(
        self, tensors: Iterable[tuple[str, np.ndarray]], fields: Mapping[str, Any], config: Any, source: str
    ) -> tuple[dict, list[str], str]:
        """Converts tensors to params, see `HuggingFaceFormat.read_params`."""
        rows = _rows(config)
        ordered = ((name, x[rows] if _is_fused(name) and len(x) == len(rows) else x) for name, x in tensors)
        return super().read_params(ordered, fields, config, source)

    def to_tensors(self, params: dict, config: Any, architecture: str) -> tuple[dict[str, np.ndarray], list[str]]:
        """Converts params to tensors, see `HuggingFaceFormat.to_tensors`."""
        state_dict, left_out = super().to_tensors(params, config, architecture)
        places = np.argsort(_rows(config))
        return {name: x[places] if _is_fused(name) else x for name, x in state_dict.items()}, left_out

    def untied_reason(
        self, state_dict: Mapping[str, np.ndarray], fields: Mapping[str, Any], config: Any, source: str
    ) -> str:
        """Returns "", because the decoder is separate."""
        return ""


def _is_fused(name: str) -> bool:
    return name.endswith(".qkv.weight")


def _rows(config: NeoBertConfig) -> np.ndarray:
    """Returns the row in the tensor `qkv` of each row of the projections of bertjax, `[3 * hidden]`.

    The tensor has the query, key and value of a head one after the other. In the published code, the elements of a pair
    that rotates are neighbours. In bertjax, the two elements are in the two halves of a head.
    """
    rows = np.arange(3 * config.hidden_size).reshape(config.num_attention_heads, 3, config.head_size)
    query, key, value = np.moveaxis(rows, 1, 0)
    halves = [np.concatenate([x[:, ::2], x[:, 1::2]], axis=-1) for x in (query, key)]
    return np.stack([*halves, value]).reshape(-1)


FORMAT = NeoBertFormat()
