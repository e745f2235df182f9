"""XLNet in Hugging Face's folders: fields of config.json, names of tensors, classes of transformers."""

from collections.abc import Collection, Mapping
from typing import Any, ClassVar

from etils import epath

from bertjax.common.errors import UserError
from bertjax.models import json_config, tensors
from bertjax.models.xlnet.config import XlnetConfig

# {field of `XlnetConfig`: field of config.json} where the names differ. transformers has one dropout rate.
NAMES = {
    "hidden_size": "d_model", "num_hidden_layers": "n_layer", "num_attention_heads": "n_head",
    "intermediate_size": "d_inner", "hidden_act": "ff_activation", "hidden_dropout_prob": "dropout",
    "attention_probs_dropout_prob": "dropout",
}  # fmt: skip
# transformers does not limit the sequence length.
BERTJAX_FIELDS = ("family", "max_position_embeddings", "memory_length")
REQUIRED = ("vocab_size", "hidden_size", "num_hidden_layers", "num_attention_heads", "intermediate_size")
SUPPORTED_VALUES = {"attn_type": "bi", "bi_data": False, "clamp_len": -1, "same_length": False, "untie_r": True}
ALIASES = {
    "hidden_size": "d_model", "n_token": "vocab_size", "num_attention_heads": "n_head", "num_hidden_layers": "n_layer",
}  # fmt: skip
# {field: the only supported value} for the pooling of a sequence classifier. Other classes ignore these fields.
SUMMARY = {
    "summary_type": "last", "summary_use_proj": True, "summary_activation": "tanh", "summary_proj_to_labels": False,
}  # fmt: skip
# The fields for memory have no effect on a call without memory. `XLNetForQuestionAnswering`, which is not supported,
# has end_n_top and start_n_top. `read_config` checks d_head.
UNUSED_FIELDS = (
    *SUMMARY, "d_head", "end_n_top", "max_position_embeddings", "mem_len", "reuse_len",
    "start_n_top", "use_mems_eval", "use_mems_train",
)  # fmt: skip
FIELDS = json_config.ConfigFields(
    XlnetConfig, "xlnet", REQUIRED, BERTJAX_FIELDS, NAMES, also=(*UNUSED_FIELDS, *ALIASES)
)
POOLED = ("ForSequenceClassification", "ForMultipleChoice")


class XlnetFormat(tensors.TableFormat):
    """Folders of XLNet."""

    classes: ClassVar = {"XLNet": "XLNet"}
    inputs = ("input_ids", "token_type_ids", "attention_mask")
    special_ids: ClassVar = {"pad_token_id": "pad", "bos_token_id": "cls", "eos_token_id": "sep"}
    architectures: ClassVar = {
        "XLNetModel": (),
        "XLNetLMHeadModel": ("masked_lm",),
        "XLNetForSequenceClassification": ("pooler", "classifier"),
        "XLNetForMultipleChoice": ("pooler", "classifier"),
        "XLNetForTokenClassification": ("classifier",),
        "XLNetForQuestionAnsweringSimple": ("spans",),
    }
    aliases: ClassVar = ALIASES
    bert_suffixes: ClassVar = {"LMHeadModel": "ForMaskedLM", "ForQuestionAnsweringSimple": "ForQuestionAnswering"}
    model_name = "an XLNet"
    words = "transformer.word_embedding.weight"
    decoder = "lm_loss.weight"
    part_tensors: ClassVar = {
        "masked_lm": ("lm_loss.bias",),
        "pooler": ("sequence_summary.summary.weight",),
        "spans": ("qa_outputs.weight",),
        "classifier": ("logits_proj.weight", "classifier.weight"),
    }

    def read_config(self, path: epath.Path, fields: Mapping[str, Any]) -> XlnetConfig:
        """Returns the model config of a config.json, see `HuggingFaceFormat.read_config`."""
        is_pooled = any(str(name).endswith(POOLED) for name in fields.get("architectures") or ())
        fields = json_config.with_aliases(path, fields, ALIASES)
        values = FIELDS.read(path, fields, only=SUPPORTED_VALUES | (SUMMARY if is_pooled else {}))
        sizes: list[Any] = [fields.get(name) for name in ("d_model", "n_head", "d_head")]
        if all(type(size) is int for size in sizes) and sizes[1] * sizes[2] != sizes[0]:
            raise UserError(f"{path}: d_head {sizes[2]} is not supported; supported: d_model / n_head")
        return FIELDS.build(path, values)

    def to_fields(self, config: XlnetConfig) -> dict[str, Any]:
        """Returns the fields of config.json. mem_len is None: transformers then returns no memory by default."""
        fields = FIELDS.to_fields(config) | {"dropout": config.hidden_dropout_prob}
        summary = SUMMARY | {"summary_last_dropout": config.pooled_dropout_prob}
        memory = {"d_head": config.head_size, "mem_len": None, "reuse_len": None}
        return {**fields, **memory, **SUPPORTED_VALUES, **summary}

    def table(self, config: XlnetConfig, parts: Collection[str], labels: int) -> tensors.TensorTable:
        """Returns the tensors of a model, see `TableFormat.table`."""
        hidden, size, inner = config.hidden_size, (config.hidden_size,), (config.intermediate_size,)
        by_head = (config.num_attention_heads, config.head_size)
        # transformers stores all projections in this shape, including the output projection.
        projection = (hidden, *by_head)
        table = tensors.TensorTable()
        table.array(("bert", "embeddings", "word", "embedding"), self.words, config.vocab_size, hidden)
        table["bert", "embeddings", "query"] = tensors.Tensor(("transformer.mask_emb",), size, (1, 1, hidden))
        for number in range(config.num_hidden_layers):
            layer, name = ("bert", "layers", number), f"transformer.layer.{number}"
            for path, letters in (("query", "q"), ("key_value", "kv"), ("position", "r")):
                names = tuple(f"{name}.rel_attn.{letter}" for letter in letters)
                tensor = tensors.Tensor(names, projection, projection, inputs_first=True)
                table[*layer, "attention", path, "kernel"] = tensor
            output = tensors.Tensor((f"{name}.rel_attn.o",), (*by_head, hidden), projection)
            table[*layer, "attention", "output", "kernel"] = output
            table.array((*layer, "biases", "content"), f"{name}.rel_attn.r_w_bias", *by_head)
            table.array((*layer, "biases", "position"), f"{name}.rel_attn.r_r_bias", *by_head)
            table.array((*layer, "segment_bias"), f"{name}.rel_attn.r_s_bias", *by_head)
            table.array((*layer, "segment_embedding"), f"{name}.rel_attn.seg_embed", 2, *by_head)
            table.norm((*layer, "attention_norm"), f"{name}.rel_attn.layer_norm", hidden, bias=True)
            table.dense((*layer, "intermediate"), f"{name}.ff.layer_1", size, inner, bias=True)
            table.dense((*layer, "output"), f"{name}.ff.layer_2", inner, size, bias=True)
            table.norm((*layer, "output_norm"), f"{name}.ff.layer_norm", hidden, bias=True)
        if "masked_lm" in parts:
            table.array(("masked_lm", "bias"), "lm_loss.bias", config.vocab_size)
        if "pooler" in parts:
            table.dense(("bert", "pooler", "dense"), "sequence_summary.summary", size, size, bias=True)
        if "classifier" in parts:
            classifier = "logits_proj" if "pooler" in parts else "classifier"
            table.dense(("classifier", "dense"), classifier, size, (labels,), bias=True)
        if "spans" in parts:
            table.dense(("spans", "dense"), "qa_outputs", size, (2,), bias=True)
        return table


FORMAT = XlnetFormat()
