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
TERMS = ("p2c", "c2p")  # of pos_att_type, in the order of published models
BIAS = "cls.predictions.bias"
# Tensors of old files: a copy of the bias, and the constant 0, 1, 2, ...
DECODER_BIAS, POSITION_IDS = "cls.predictions.decoder.bias", "deberta.embeddings.position_ids"


class DebertaV2Format(tensors.TableFormat):
    """Folders of DeBERTa-v2, DeBERTa-v3 and mDeBERTa."""

    classes: ClassVar = {"DebertaV2": "DeBERTa-v2"}
    inputs = ("input_ids", "attention_mask", "token_type_ids")
    special_ids: ClassVar = {"pad_token_id": "pad", "bos_token_id": "cls", "eos_token_id": "sep"}
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
        hidden, size, table = config.hidden_size, (config.hidden_size,), tensors.TensorTable()
        rows = config.max_position_embeddings if config.position_biased_input else 0
        for part, count in (("word", config.vocab_size), ("position", rows), ("token_type", config.type_vocab_size)):
            if count:
                name = f"deberta.embeddings.{part}_embeddings.weight"
                table.array(("bert", "embeddings", part, "embedding"), name, count, hidden)
        table.norm(("bert", "embeddings", "norm"), "deberta.embeddings.LayerNorm", hidden, bias=True)
        _add_shared(table, config)
        for number in range(config.num_hidden_layers):
            _add_layer(table, ("bert", "layers", number), f"deberta.encoder.layer.{number}", config)
        if "masked_lm" in parts:
            head = "cls.predictions" if config.legacy else "lm_predictions.lm_head"
            transform = f"{head}.transform" if config.legacy else head
            table.dense(("masked_lm", "dense"), f"{transform}.dense", size, size, bias=True)
            table.norm(("masked_lm", "norm"), f"{transform}.LayerNorm", hidden, bias=True)
            table.array(("masked_lm", "bias"), f"{head}.bias", config.vocab_size)
        heads = (("bert", "pooler"), "pooler.dense", hidden), (("classifier",), "classifier", labels)
        for path, name, outputs in (*heads, (("spans",), "qa_outputs", 2)):
            if path[-1] in parts:
                table.dense((*path, "dense"), name, size, (outputs,), bias=True)
        return table

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
        biases = [state_dict[name] for name in (BIAS, DECODER_BIAS) if name in state_dict]
        if not all(np.array_equal(biases[0], bias) for bias in biases):
            raise UserError(f"{source}: {DECODER_BIAS} differs from {BIAS}; expected equal tensors, which are tied")
        words = state_dict[self.words]
        return tensors.untied_reason(state_dict, self.decoder, words, fields, source, DECODER_BIAS)

    def read_params(
        self, tensors: Iterable[tuple[str, np.ndarray]], fields: Mapping[str, Any], config: DebertaV2Config, source: str
    ) -> tuple[dict, list[str], str]:
        """Converts tensors to params, see `HuggingFaceFormat.read_params`."""
        params, ignored, problem = super().read_params(tensors, fields, config, source)
        return params, [name for name in ignored if name not in (DECODER_BIAS, POSITION_IDS)], problem


def _add_shared(table: tensors.TensorTable, config: DebertaV2Config) -> None:
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


def _add_layer(table: tensors.TensorTable, path: tuple, name: str, config: DebertaV2Config) -> None:
    """Adds the tensors of the layer with the params at `path` and the tensors `name`."""
    hidden, heads = config.hidden_size, (config.num_attention_heads, config.head_size)
    size, inner, attention = (hidden,), (config.intermediate_size,), f"{name}.attention.self"
    projections = tuple(f"{attention}.{part}_proj" for part in ("query", "key", "value"))
    table.dense((*path, "attention", "query_key_value"), projections, size, heads, bias=True)
    for part, term in (("key", "c2p"), ("query", "p2c")):
        if config.relative_attention and not config.share_att_key and term in config.position_terms:
            table.dense(
                (*path, "attention", f"distance_{part}"), f"{attention}.pos_{part}_proj", size, heads, bias=True
            )
    table.dense((*path, "attention", "output"), f"{name}.attention.output.dense", heads, size, bias=True)
    table.norm((*path, "attention_norm"), f"{name}.attention.output.LayerNorm", hidden, bias=True)
    table.dense((*path, "intermediate"), f"{name}.intermediate.dense", size, inner, bias=True)
    table.dense((*path, "output"), f"{name}.output.dense", inner, size, bias=True)
    table.norm((*path, "output_norm"), f"{name}.output.LayerNorm", hidden, bias=True)


def _terms(path: epath.Path, value: Any) -> str:
    """Returns the terms of pos_att_type, a list or a text such as "p2c|c2p"."""
    terms = [term.strip() for term in value.lower().split("|")] if isinstance(value, str) else value or []
    if not isinstance(terms, list) or any(term not in TERMS for term in terms):
        raise UserError(f"{path}: pos_att_type {value!r} is not supported; supported: {', '.join(TERMS)}")
    return "|".join(term for term in TERMS if term in terms)


FORMAT = DebertaV2Format()
