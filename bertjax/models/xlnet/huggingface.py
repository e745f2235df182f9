"""XLNet in Hugging Face's folders: fields of config.json, names of tensors, classes of transformers."""

from collections.abc import Iterable, Mapping

import numpy as np
from etils import epath

from bertjax.common.errors import UserError
from bertjax.models import json_config, tensors
from bertjax.models.xlnet.config import XlnetConfig

PREFIX = "XLNet"  # how the names of its classes begin
CLASSES = {PREFIX: "XLNet"}  # and how people write it
# Fields that config.json has under another name. There is one rate of dropout, for all places.
NAMES = {
    "hidden_size": "d_model", "num_hidden_layers": "n_layer", "num_attention_heads": "n_head",
    "intermediate_size": "d_inner", "hidden_act": "ff_activation", "hidden_dropout_prob": "dropout",
    "attention_probs_dropout_prob": "dropout",
}  # fmt: skip
OWN_FIELDS = ("family", "max_position_embeddings", "memory_length")  # there, texts may have any length
REQUIRED = ("vocab_size", "hidden_size", "num_hidden_layers", "num_attention_heads", "intermediate_size")
ONLY = {"attn_type": "bi", "bi_data": False, "clamp_len": -1, "same_length": False, "untie_r": True}
ALIASES = {
    "hidden_size": "d_model", "n_token": "vocab_size", "num_attention_heads": "n_head", "num_hidden_layers": "n_layer",
}  # fmt: skip
# What a classifier of texts is pooled with. No other class reads these fields.
SUMMARY = {
    "summary_type": "last", "summary_use_proj": True, "summary_activation": "tanh", "summary_proj_to_labels": False,
}  # fmt: skip
# The fields of memory change nothing in the first call, which has no memory. end_n_top and start_n_top belong to
# `XLNetForQuestionAnswering`, which is not read. `read_config` checks d_head.
HARMLESS = (
    *SUMMARY, "d_head", "end_n_top", "max_position_embeddings", "mem_len", "reuse_len",
    "start_n_top", "use_mems_eval", "use_mems_train",
)  # fmt: skip
POOLED = ("ForSequenceClassification", "ForMultipleChoice")
# Our parts, besides the encoder, of each class.
ARCHITECTURES = {
    "XLNetModel": (),
    "XLNetLMHeadModel": ("masked_lm",),
    "XLNetForSequenceClassification": ("pooler", "classifier"),
    "XLNetForMultipleChoice": ("pooler", "classifier"),
    "XLNetForTokenClassification": ("classifier",),
    "XLNetForQuestionAnsweringSimple": ("spans",),
}
# What classes of BERT with the same output layer are called, where it is something else.
KINDS_OF_BERT = {"LMHeadModel": "ForMaskedLM", "ForQuestionAnsweringSimple": "ForQuestionAnswering"}
INPUTS = ("input_ids", "token_type_ids", "attention_mask")
# Fields of config.json that are ids of special pieces.
SPECIAL_IDS = {"pad_token_id": "pad", "bos_token_id": "cls", "eos_token_id": "sep"}
WORDS, DECODER = "transformer.word_embedding.weight", "lm_loss.weight"


def read_config(path: epath.Path, fields: Mapping) -> XlnetConfig:
    """Returns the config of a config.json with these fields. Raises `UserError` for a variant that we do not have."""
    is_pooled = any(str(name).endswith(POOLED) for name in fields.get("architectures") or ())
    fields = json_config.with_aliases(path, fields, ALIASES)
    names, only = json_config.field_names(XlnetConfig, OWN_FIELDS, NAMES), ONLY | (SUMMARY if is_pooled else {})
    found = json_config.read_fields(path, fields, "xlnet", names, only, required=REQUIRED, also=(*HARMLESS, *ALIASES))
    sizes = [fields.get(name) for name in ("d_model", "n_head", "d_head")]
    if all(type(each) is int for each in sizes) and sizes[1] * sizes[2] != sizes[0]:
        raise UserError(f"{path}: d_head {sizes[2]} is not supported; supported: d_model / n_head")
    found["hidden_act"] = json_config.activation(path, fields, "ff_activation")
    return json_config.build(path, XlnetConfig, found, REQUIRED, OWN_FIELDS, NAMES)


def read_params(
    given: Iterable[tuple[str, np.ndarray]], fields: Mapping, config: XlnetConfig, source: str
) -> tuple[dict, list[str], str]:
    """Returns our params from named tensors, the names of ignored tensors, and why they predict no words.

    Raises `UserError` if tensors are missing, of another shape, or contradict each other.
    """
    named = {tensors.WRAPPERS.sub("", name): tensor for name, tensor in given}
    if WORDS not in named:  # the encoder alone
        named = {f"transformer.{name}": tensor for name, tensor in named.items()}
    classifier = next((name for name in ("logits_proj", "classifier") if f"{name}.weight" in named), "")
    has = {"masked_lm": "lm_loss.bias", "pooler": "sequence_summary.summary.weight", "spans": "qa_outputs.weight"}
    parts = [part for part, name in has.items() if name in named] + (["classifier"] if classifier else [])
    rows = len(named[f"{classifier}.weight"]) if classifier else 0
    table, padding = _table(config, parts, rows), config.padded_vocab_size - config.vocab_size
    params = tensors.stacked(tensors.to_params(table, named, padding, source, "an XLNet"))
    ignored = sorted(named.keys() - table.names() - {DECODER})
    has_decoder = "masked_lm" in parts or DECODER in named
    wordless = tensors.untied(named, DECODER, named[WORDS], fields, source) if has_decoder else ""
    if wordless:
        params.pop("masked_lm", None)
        ignored += named.keys() & {DECODER}
    return params, ignored, wordless


def _table(config: XlnetConfig, parts: Iterable[str], rows: int) -> tensors.TensorTable:
    """Returns which tensor each param is.

    Args:
      parts: what there is besides the encoder. A classifier of pooled texts has another name than one of tokens.
      rows: classes of the classifier, if that is among these.
    """
    hidden, size, inner = config.hidden_size, (config.hidden_size,), (config.intermediate_size,)
    by_head = (config.num_attention_heads, config.head_size)
    matrix = hidden, *by_head  # theirs of all projections: inputs first, but outputs first in that of the output
    found = tensors.TensorTable()
    found.rows(("bert", "embeddings", "word", "embedding"), WORDS, config.vocab_size, hidden)
    found["bert", "embeddings", "query"] = tensors.Tensor(("transformer.mask_emb",), size, (1, 1, hidden))
    for number in range(config.num_hidden_layers):
        ours, theirs = ("bert", "layers", number), f"transformer.layer.{number}"
        for path, names in (("query", "q"), ("key_value", "kv"), ("position", "r")):
            names = tuple(f"{theirs}.rel_attn.{name}" for name in names)
            found[*ours, "attention", path, "kernel"] = tensors.Tensor(names, matrix, matrix, inputs_first=True)
        names, output = (f"{theirs}.rel_attn.o",), (*by_head, hidden)
        found[*ours, "attention", "output", "kernel"] = tensors.Tensor(names, output, matrix)
        for path, name, shape in (
            (("biases", "content"), "r_w_bias", by_head),
            (("biases", "position"), "r_r_bias", by_head),
            (("segment_bias",), "r_s_bias", by_head),
            (("segment_embedding",), "seg_embed", (2, *by_head)),
        ):
            found[*ours, *path] = tensors.Tensor((f"{theirs}.rel_attn.{name}",), shape, shape)
        found.norm((*ours, "attention_norm"), f"{theirs}.rel_attn.layer_norm", hidden, bias=True)
        found.dense((*ours, "intermediate"), f"{theirs}.ff.layer_1", size, inner, bias=True)
        found.dense((*ours, "output"), f"{theirs}.ff.layer_2", inner, size, bias=True)
        found.norm((*ours, "output_norm"), f"{theirs}.ff.layer_norm", hidden, bias=True)
    if "masked_lm" in parts:
        found.rows(("masked_lm", "bias"), "lm_loss.bias", config.vocab_size)
    if "pooler" in parts:
        found.dense(("bert", "pooler", "dense"), "sequence_summary.summary", size, size, bias=True)
    if "classifier" in parts:
        name = "logits_proj" if "pooler" in parts else "classifier"
        found.dense(("classifier", "dense"), name, size, (rows,), bias=True)
    if "spans" in parts:
        found.dense(("spans", "dense"), "qa_outputs", size, (2,), bias=True)
    return found


def choose_architecture(params: dict, config: XlnetConfig, stated: str = "") -> str:
    """As `bert.huggingface.choose_architecture`."""
    return tensors.choose_class(ARCHITECTURES, PREFIX, tensors.parts_of(params), stated)


def to_tensors(params: dict, config: XlnetConfig, architecture: str) -> tuple[dict[str, np.ndarray], list[str]]:
    """As `bert.huggingface.to_tensors`."""
    present, wanted = tensors.parts_of(params), ARCHITECTURES[architecture]
    tensors.check_parts(architecture, wanted, present, choose_architecture(params, config))
    rows = params["classifier"]["dense"]["bias"].shape[0] if "classifier" in wanted else 0
    table = _table(config, wanted, rows)
    found = tensors.to_named(table, tensors.layer_by_layer(params, config.num_hidden_layers))
    if architecture == "XLNetModel":
        found = {name.removeprefix("transformer."): tensor for name, tensor in found.items()}
    return found, sorted(present - set(wanted))


def classifier_rows(params: dict, architecture: str) -> int:
    """As `bert.huggingface.classifier_rows`."""
    return tensors.classifier_rows(params, architecture, ARCHITECTURES[architecture])


def to_fields(config: XlnetConfig) -> dict:
    """Returns what config.json says of the encoder; no memory is kept, unless a call asks for it."""
    fields = {NAMES.get(name, name): value for name, value in vars(config).items() if name not in OWN_FIELDS}
    fields["dropout"] = config.hidden_dropout_prob
    summary = SUMMARY | {"summary_last_dropout": config.pooled_dropout_prob}
    more = {"d_head": config.head_size, "mem_len": None, "reuse_len": None}
    return {"model_type": "xlnet", **fields, **more, **ONLY, **summary}


def check_form(config: XlnetConfig) -> None:
    """Raises no `UserError`: transformers has all forms of XLNet."""
