"""EuroBERT in Hugging Face's folders: fields of config.json, names of tensors, classes of transformers."""

import dataclasses
from collections.abc import Iterable, Mapping

import numpy as np
from etils import epath

from bertjax.common.errors import UserError
from bertjax.models import json_config, tensors
from bertjax.models.eurobert.config import EuroBertConfig

PREFIX = "EuroBert"  # how the names of its classes begin
CLASSES = {PREFIX: "EuroBERT"}  # and how people write it
OWN_FIELDS = ("family",)
REQUIRED = ("vocab_size", "hidden_size", "num_hidden_layers", "num_attention_heads", "intermediate_size", "rope_theta")
ONLY = {"hidden_act": "silu", "attention_bias": False, "mlp_bias": False, "attention_dropout": 0.0}
# Fields that `_theta` reads, the other name of classifier_pooling, and pretraining_tp, which splits products.
READ = ("clf_pooling", "pretraining_tp", "rope_parameters", "rope_scaling")
# Our parts, besides the encoder, of each class. Only the code beside the published weights answers questions.
ARCHITECTURES = {
    "EuroBertModel": (),
    "EuroBertForMaskedLM": ("masked_lm",),
    "EuroBertForSequenceClassification": ("pooler", "classifier"),
    "EuroBertForTokenClassification": ("classifier",),
}
INPUTS = ("input_ids", "attention_mask")
# Fields of config.json that are ids of special pieces.
SPECIAL_IDS = {"pad_token_id": "pad", "bos_token_id": "cls", "eos_token_id": "sep", "mask_token_id": "mask"}
WORDS, DECODER = "model.embed_tokens.weight", "lm_head.weight"


def read_config(path: epath.Path, fields: Mapping) -> EuroBertConfig:
    """Returns the config of a config.json, also of those that came with code of their own.

    Raises `UserError` for a variant that we do not have.
    """
    names = json_config.field_names(EuroBertConfig, OWN_FIELDS)
    if "classifier_pooling" not in fields and "clf_pooling" in fields:  # the name in the code beside the weights
        names["classifier_pooling"] = "clf_pooling"
    found = json_config.read_fields(path, _without_code(fields), "eurobert", names, ONLY, required=REQUIRED, also=READ)
    if found["head_dim"] is None:
        found["head_dim"] = json_config.head_size(fields)
    if found["num_key_value_heads"] is None:
        found["num_key_value_heads"] = fields.get("num_attention_heads")
    return json_config.build(path, EuroBertConfig, found | _theta(path, fields), REQUIRED, OWN_FIELDS)


def _without_code(fields: Mapping) -> dict:
    """Returns the fields without the auto_map of the published weights, whose code computes the same."""
    code = fields.get("auto_map")
    is_published = isinstance(code, dict) and all(
        str(name).rpartition(".")[2].startswith(PREFIX) for name in code.values()
    )
    return {name: value for name, value in fields.items() if name != "auto_map" or not is_published}


def _theta(path: epath.Path, fields: Mapping) -> dict:
    """Returns the base of the rotary angles: of rope_scaling, else of rope_parameters, else rope_theta."""
    objects = {name: fields.get(name) for name in ("rope_scaling", "rope_parameters")}
    thetas = {name: json_config.rope_theta(path, name, rope) for name, rope in objects.items()}
    used = next((thetas[name] for name, rope in objects.items() if rope), None)
    theta = fields.get("rope_theta") if used is None else used
    return {} if theta is None else {"rope_theta": theta}


def read_params(
    given: Iterable[tuple[str, np.ndarray]], fields: Mapping, config: EuroBertConfig, source: str
) -> tuple[dict, list[str], str]:
    """Returns our params from named tensors, the names of ignored tensors, and no reason why they predict no words.

    Raises `UserError` if tensors are missing, of another shape, or contradict each other.
    """
    named = {tensors.WRAPPERS.sub("", name): tensor for name, tensor in given}
    if WORDS not in named:  # the encoder alone
        named = {f"model.{name}": tensor for name, tensor in named.items()}
    has = {"masked_lm": DECODER, "pooler": "dense.weight", "classifier": "classifier.weight"}
    parts = [part for part, name in has.items() if name in named]
    rows = named["classifier.weight"].shape[0] if "classifier" in parts else 0
    table, padding = _table(config, parts, rows), config.padded_vocab_size - config.vocab_size
    params = tensors.stacked(tensors.to_params(table, named, padding, source, "a EuroBERT"))
    if config.tie_word_embeddings and not np.array_equal(named.get(DECODER, named[WORDS]), named[WORDS]):
        raise UserError(f"{source}: {DECODER} is not {WORDS}, although config.json has tie_word_embeddings true")
    return params, sorted(named.keys() - table.names() - {DECODER}), ""


def _table(config: EuroBertConfig, parts: Iterable[str], rows: int) -> tensors.TensorTable:
    """Returns which tensor each param is.

    Args:
      parts: what there is besides the encoder.
      rows: classes of the classifier, if that is among these.
    """
    hidden, size, inner = config.hidden_size, (config.hidden_size,), (config.intermediate_size,)
    heads, shared = ((count, config.head_dim) for count in (config.num_attention_heads, config.num_key_value_heads))
    found = tensors.TensorTable()
    found.rows(("bert", "embeddings", "word", "embedding"), WORDS, config.vocab_size, hidden)
    for number in range(config.num_hidden_layers):
        ours, theirs = ("bert", "layers", number), f"model.layers.{number}"
        found.norm((*ours, "attention_norm"), f"{theirs}.input_layernorm", hidden)
        found.dense((*ours, "attention", "query"), f"{theirs}.self_attn.q_proj", size, heads)
        keys_and_values = f"{theirs}.self_attn.k_proj", f"{theirs}.self_attn.v_proj"
        found.dense((*ours, "attention", "key_value"), keys_and_values, size, shared)
        found.dense((*ours, "attention", "output"), f"{theirs}.self_attn.o_proj", heads, size)
        found.norm((*ours, "output_norm"), f"{theirs}.post_attention_layernorm", hidden)
        found.dense((*ours, "input"), (f"{theirs}.mlp.gate_proj", f"{theirs}.mlp.up_proj"), size, inner)
        found.dense((*ours, "output"), f"{theirs}.mlp.down_proj", inner, size)
    found.norm(("bert", "encoder", "norm"), "model.norm", hidden)
    if "masked_lm" in parts and not config.tie_word_embeddings:
        found.rows(("masked_lm", "decoder", "embedding"), DECODER, config.vocab_size, hidden)
    if "pooler" in parts:
        found.dense(("bert", "pooler", "dense"), "dense", size, size, bias=True)
    if "classifier" in parts:
        found.dense(("classifier", "dense"), "classifier", size, (rows,), bias=True)
    return found


def choose_architecture(params: dict, config: EuroBertConfig, stated: str = "") -> str:
    """As `bert.huggingface.choose_architecture`."""
    return tensors.choose_class(ARCHITECTURES, PREFIX, _parts_of(params, config), stated)


def _parts_of(params: dict, config: EuroBertConfig) -> set[str]:
    """As `tensors.parts_of`; a tied decoder has no params, and an encoder that no task has been added to has one."""
    found = tensors.parts_of(params)
    return found | ({"masked_lm"} if config.tie_word_embeddings and not found else set())


def to_tensors(params: dict, config: EuroBertConfig, architecture: str) -> tuple[dict[str, np.ndarray], list[str]]:
    """As `bert.huggingface.to_tensors`."""
    present, wanted = _parts_of(params, config), ARCHITECTURES[architecture]
    tensors.check_parts(architecture, wanted, present, choose_architecture(params, config))
    rows = params["classifier"]["dense"]["bias"].shape[0] if "classifier" in wanted else 0
    found = tensors.to_named(_table(config, wanted, rows), tensors.layer_by_layer(params, config.num_hidden_layers))
    if architecture == "EuroBertModel":
        found = {name.removeprefix("model."): tensor for name, tensor in found.items()}
    return found, sorted(tensors.parts_of(params) - set(wanted))


def classifier_rows(params: dict, architecture: str) -> int:
    """As `bert.huggingface.classifier_rows`."""
    return tensors.classifier_rows(params, architecture, ARCHITECTURES[architecture])


def to_fields(config: EuroBertConfig) -> dict:
    """Returns what config.json says of the encoder, in the old and in the new form of transformers."""
    fields = {name: x for name, x in dataclasses.asdict(config).items() if name not in OWN_FIELDS}
    rope = {"rope_type": "default", "rope_theta": config.rope_theta}
    return {"model_type": "eurobert", **fields, **ONLY, "rope_parameters": rope}


def check_form(config: EuroBertConfig) -> None:
    """Raises no `UserError`: transformers has all forms of EuroBERT."""
