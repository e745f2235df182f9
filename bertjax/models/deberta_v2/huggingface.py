"""DeBERTa-v2 in Hugging Face's folders: fields of config.json, names of tensors, classes of transformers."""

from collections.abc import Collection, Iterable, Mapping
from typing import Any, ClassVar

import numpy as np
from etils import epath

from bertjax.common.errors import UserError
from bertjax.models import json_config, tensors
from bertjax.models.deberta_v2.config import DebertaV2Config

REQUIRED = ("vocab_size", "hidden_size", "num_hidden_layers", "num_attention_heads", "intermediate_size")
SUPPORTED_VALUES = {"pooler_hidden_act": "gelu", "conv_groups": 1}
# {field: value} where transformers reads a field that its config class does not declare.
UNDECLARED = {
    "share_att_key": False, "position_buckets": -1, "norm_rel_ebd": "none", "conv_kernel_size": 0, "conv_act": "tanh",
}  # fmt: skip
# Sizes that transformers reads, and that must equal a size of the model.
SIZES = ("attention_head_size", "embedding_size", "pooler_hidden_size")
UNUSED_FIELDS = ("cls_dropout",)  # a dropout rate in training
FIELDS = json_config.ConfigFields(
    DebertaV2Config, "deberta-v2", REQUIRED, ("family",), only=SUPPORTED_VALUES, also=(*SIZES, *UNUSED_FIELDS)
)
BIAS = "cls.predictions.bias"
# Tensors of old files: a copy of the bias, and the constant 0, 1, 2, ...
DECODER_BIAS, POSITION_IDS = "cls.predictions.decoder.bias", "deberta.embeddings.position_ids"


class DebertaV2Format(tensors.TableFormat):
    """Folders of DeBERTa-v2, DeBERTa-v3 and mDeBERTa."""

    classes: ClassVar = {"DebertaV2": "DeBERTa-v2"}
    inputs = ("input_ids", "attention_mask", "token_type_ids")
    special_ids: ClassVar = {"pad_token_id": "pad"}
    architectures: ClassVar = {
        "DebertaV2Model": (),
        "DebertaV2ForMaskedLM": ("masked_lm",),
        "DebertaV2ForSequenceClassification": ("pooler", "classifier"),
        "DebertaV2ForMultipleChoice": ("pooler", "classifier"),
        "DebertaV2ForTokenClassification": ("classifier",),
        "DebertaV2ForQuestionAnswering": ("spans",),
    }
    model_name = "a DeBERTa-v2"
    words = "deberta.embeddings.word_embeddings.weight"
    decoder = "cls.predictions.decoder.weight"
    part_tensors: ClassVar = {
        "masked_lm": (BIAS, "lm_predictions.lm_head.bias"),
        "pooler": ("pooler.dense.weight",),
        "classifier": ("classifier.weight",),
        "spans": ("qa_outputs.weight",),
    }

    def read_config(self, path: epath.Path, fields: Mapping[str, Any]) -> DebertaV2Config:
        """Returns the model config of a config.json, see `HuggingFaceFormat.read_config`."""
        values = FIELDS.read(path, UNDECLARED | dict(fields))
        sizes = json_config.head_size(fields), fields.get("hidden_size"), fields.get("hidden_size")
        for name, size in zip(SIZES, sizes, strict=True):
            if fields.get(name) not in (None, size):
                raise UserError(f"{path}: {name} {fields[name]!r} is not supported; supported: {size!r}")
        return FIELDS.build(path, values | {"pos_att_type": _terms(path, fields.get("pos_att_type"))})

    def to_fields(self, config: DebertaV2Config) -> dict[str, Any]:
        """Returns the fields of config.json, see `HuggingFaceFormat.to_fields`."""
        terms = {"pos_att_type": list(config.position_terms) or None}
        return FIELDS.to_fields(config) | SUPPORTED_VALUES | terms

    def table(self, config: DebertaV2Config, parts: Collection[str], labels: int) -> tensors.TensorTable:
        """Returns the tensors of a model, see `TableFormat.table`."""
        hidden, heads = config.hidden_size, (config.num_attention_heads, config.head_size)
        size, inner, table = (hidden,), (config.intermediate_size,), tensors.TensorTable()
        path, name = ("bert", "embeddings"), "deberta.embeddings"
        table.array((*path, "word", "embedding"), self.words, config.vocab_size, hidden)
        if config.position_biased_input:
            rows = config.max_position_embeddings
            table.array((*path, "position", "embedding"), f"{name}.position_embeddings.weight", rows, hidden)
        if config.type_vocab_size:
            rows = config.type_vocab_size
            table.array((*path, "token_type", "embedding"), f"{name}.token_type_embeddings.weight", rows, hidden)
        table.norm((*path, "norm"), f"{name}.LayerNorm", hidden, bias=True)
        self._add_shared(table, config)
        for number in range(config.num_hidden_layers):
            path, name = ("bert", "layers", number), f"deberta.encoder.layer.{number}"
            projections = tuple(f"{name}.attention.self.{part}_proj" for part in ("query", "key", "value"))
            table.dense((*path, "attention", "query_key_value"), projections, size, heads, bias=True)
            if config.relative_attention and not config.share_att_key:
                for part, term in (("key", "c2p"), ("query", "p2c")):
                    if term in config.position_terms:
                        projection = f"{name}.attention.self.pos_{part}_proj"
                        table.dense((*path, "attention", f"distance_{part}"), projection, size, heads, bias=True)
            table.dense((*path, "attention", "output"), f"{name}.attention.output.dense", heads, size, bias=True)
            table.norm((*path, "attention_norm"), f"{name}.attention.output.LayerNorm", hidden, bias=True)
            table.dense((*path, "intermediate"), f"{name}.intermediate.dense", size, inner, bias=True)
            table.dense((*path, "output"), f"{name}.output.dense", inner, size, bias=True)
            table.norm((*path, "output_norm"), f"{name}.output.LayerNorm", hidden, bias=True)
        if "masked_lm" in parts:
            head = "cls.predictions" if config.legacy else "lm_predictions.lm_head"
            transform = f"{head}.transform" if config.legacy else head
            table.dense(("masked_lm", "dense"), f"{transform}.dense", size, size, bias=True)
            table.norm(("masked_lm", "norm"), f"{transform}.LayerNorm", hidden, bias=True)
            table.array(("masked_lm", "bias"), f"{head}.bias", config.vocab_size)
        if "pooler" in parts:
            table.dense(("bert", "pooler", "dense"), "pooler.dense", size, size, bias=True)
        if "classifier" in parts:
            table.dense(("classifier", "dense"), "classifier", size, (labels,), bias=True)
        if "spans" in parts:
            table.dense(("spans", "dense"), "qa_outputs", size, (2,), bias=True)
        return table

    def _add_shared(self, table: tensors.TensorTable, config: DebertaV2Config) -> None:
        """Adds the tensors that layers share: the embeddings of distances, and the convolution."""
        path, name, hidden = ("bert", "encoder"), "deberta.encoder", config.hidden_size
        if config.relative_attention:
            rows = config.distance_rows
            table.array((*path, "distances", "embedding"), f"{name}.rel_embeddings.weight", rows, hidden)
            if config.norm_rel_ebd == "layer_norm":
                table.norm((*path, "distances", "norm"), f"{name}.LayerNorm", hidden, bias=True)
        if width := config.conv_kernel_size:
            kernel = tensors.Tensor((f"{name}.conv.conv.weight",), (hidden, width, hidden), (hidden, hidden, width))
            table[*path, "convolution", "kernel"] = kernel
            table.array((*path, "convolution", "bias"), f"{name}.conv.conv.bias", hidden)
            table.norm((*path, "convolution", "norm"), f"{name}.conv.LayerNorm", hidden, bias=True)

    def parts_in(self, state_dict: Mapping[str, np.ndarray], fields: Mapping[str, Any]) -> list[str]:
        """Returns the parts of a checkpoint. As in transformers, `legacy` determines the masked-LM head to read."""
        other = self.part_tensors["masked_lm"][bool(fields.get("legacy", True))]
        return super().parts_in({name: x for name, x in state_dict.items() if name != other}, fields)

    def untied_reason(
        self, state_dict: Mapping[str, np.ndarray], fields: Mapping[str, Any], config: DebertaV2Config, source: str
    ) -> str:
        """Returns the reason why the masked-LM head is not supported. The head with `legacy=False` is always tied.

        Raises:
          UserError: if the two biases of the head differ.
        """
        if not config.legacy:
            return ""
        if not np.array_equal(state_dict.get(DECODER_BIAS, bias := state_dict.get(BIAS)), bias):
            raise UserError(f"{source}: {DECODER_BIAS} differs from {BIAS}; expected equal tensors, which are tied")
        return super().untied_reason(state_dict, fields, config, source)

    def read_params(
        self, tensors: Iterable[tuple[str, np.ndarray]], fields: Mapping[str, Any], config: DebertaV2Config, source: str
    ) -> tuple[dict, list[str], str]:
        """Converts tensors to params, see `HuggingFaceFormat.read_params`."""
        params, ignored, problem = super().read_params(tensors, fields, config, source)
        return params, [name for name in ignored if name not in (DECODER_BIAS, POSITION_IDS)], problem


def _terms(path: epath.Path, value: Any) -> str:
    """Returns the terms of pos_att_type, a list or a text such as "p2c|c2p", in the order of published models."""
    terms = [term.strip() for term in value.lower().split("|")] if isinstance(value, str) else value or []
    if not isinstance(terms, list) or {*map(str, terms)} - {"p2c", "c2p"}:
        raise UserError(f"{path}: pos_att_type {value!r} is not supported; supported: p2c, c2p, p2c|c2p")
    return "|".join(term for term in ("p2c", "c2p") if term in terms)


FORMAT = DebertaV2Format()
