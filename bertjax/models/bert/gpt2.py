"""Reads GPT-2 as a causal model: fields of config.json and tensors of `GPT2LMHeadModel`."""

import re
from collections.abc import Mapping
from typing import Any

import numpy as np
from etils import epath

from bertjax.common.errors import UserError
from bertjax.config.model_config import BertConfig, fields_with_roles
from bertjax.models import json_config, tensors

# {field of `BertConfig`: field of config.json} where the names differ. embd_pdrop is ignored: bertjax has one rate for
# embeddings and residual sums.
NAMES = {
    "hidden_size": "n_embd",
    "num_hidden_layers": "n_layer",
    "num_attention_heads": "n_head",
    "intermediate_size": "n_inner",
    "max_position_embeddings": "n_positions",
    "hidden_act": "activation_function",
    "layer_norm_eps": "layer_norm_epsilon",
    "hidden_dropout_prob": "resid_pdrop",
    "attention_probs_dropout_prob": "attn_pdrop",
}
REQUIRED = ("vocab_size", "n_embd", "n_layer", "n_head", "n_positions")
ALIASES = {
    "hidden_size": "n_embd", "max_position_embeddings": "n_positions", "num_attention_heads": "n_head",
    "num_hidden_layers": "n_layer",
}  # fmt: skip
# {field of config.json: the only supported value}
SUPPORTED_VALUES = {
    "add_cross_attention": False, "is_causal": True, "scale_attn_by_inverse_layer_idx": False,
    "scale_attn_weights": True,
}  # fmt: skip
# The dropout after embeddings, an order of operations, and the multiple-choice head of `GPT2DoubleHeadsModel`, which is
# not read.
UNUSED_FIELDS = (
    "embd_pdrop", "reorder_and_upcast_attn", "summary_activation", "summary_proj_to_labels", "summary_type",
    "summary_use_proj",
)  # fmt: skip
# Fields of `BertConfig` that GPT-2's config.json does not have.
ABSENT = (*fields_with_roles(BertConfig, "form", "choice"), "attention", "type_vocab_size")
FIELDS = json_config.ConfigFields(
    BertConfig, "gpt2", (), ABSENT, NAMES, SUPPORTED_VALUES, also=(*UNUSED_FIELDS, *ALIASES)
)
MODEL_FIELDS: dict[str, Any] = {"causal": True, "norm": "pre", "output": "plain"}
MASK_CONSTANTS = re.compile(r"h\.\d+\.attn\.(bias|masked_bias)")  # attention masks, in files of older versions


def read_gpt2_fields(path: epath.Path, fields: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the fields of GPT-2's config.json under the names of `BertConfig`.

    Args:
      path: the file, for messages.
      fields: the content of the file.

    Raises:
      UserError: if a field is missing, or for a model that bertjax does not have.
    """
    fields = json_config.with_aliases(path, fields, ALIASES)
    for name in REQUIRED:
        if name not in fields:
            raise UserError(f"{path}: {name} is missing, but required for a GPT-2; add the field")
    values = FIELDS.read(path, fields)
    if values["intermediate_size"] is None and isinstance(values["hidden_size"], int):
        values["intermediate_size"] = 4 * values["hidden_size"]
    return values


def to_params(
    state_dict: Mapping[str, np.ndarray], fields: Mapping[str, Any], config: BertConfig, source: str
) -> tuple[dict, list[str]]:
    """Converts tensors to params. The embeddings of token types, which GPT-2 does not have, are zeros.

    Args:
      state_dict: {name: tensor}.
      fields: the content of config.json.
      config: the model config.
      source: the folder, for messages.

    Returns:
      The params, and the names of the tensors that are ignored.

    Raises:
      UserError: if a tensor is missing or has another shape, or if the decoder is not tied.
    """
    state_dict = {name.removeprefix("transformer."): tensor for name, tensor in state_dict.items()}
    state_dict = {name: tensor for name, tensor in state_dict.items() if not MASK_CONSTANTS.fullmatch(name)}
    table, padding = _table(config), config.padded_vocab_size - config.vocab_size
    params = tensors.to_params(table, state_dict, padding, source, "a GPT-2")
    if "lm_head.weight" not in state_dict and fields.get("tie_word_embeddings") is False:
        raise UserError(f"{source}: lm_head.weight is missing, but config.json has tie_word_embeddings false")
    if not np.array_equal(state_dict.get("lm_head.weight", state_dict["wte.weight"]), state_dict["wte.weight"]):
        raise UserError(
            f"{source}: lm_head.weight differs from wte.weight; expected equal tensors, because GPT-2 ties them"
        )
    token_types = np.zeros((config.type_vocab_size, config.hidden_size), np.float32)
    params["bert"]["embeddings"]["token_type"] = {"embedding": token_types}
    ignored = sorted(state_dict.keys() - table.names() - {"lm_head.weight"})
    return tensors.TableFormat.stack_layers(params, config), ignored


class _Table(tensors.TensorTable):
    """Tensors of GPT-2, whose `Conv1D` stores `[inputs, outputs]`."""

    inputs_first = True


def _table(config: BertConfig) -> _Table:
    """Returns the tensors of a model."""
    table, hidden, inner = _Table(), config.hidden_size, (config.intermediate_size,)
    size, heads = (hidden,), (config.num_attention_heads, config.head_size)
    table.array(("bert", "embeddings", "word", "embedding"), "wte.weight", config.vocab_size, hidden)
    table.array(("bert", "embeddings", "position", "embedding"), "wpe.weight", config.max_position_embeddings, hidden)
    for number in range(config.num_hidden_layers):
        path, name = ("bert", "layers", number), f"h.{number}"
        table.dense((*path, "attention", "query_key_value"), f"{name}.attn.c_attn", size, (3, *heads), bias=True)
        table.dense((*path, "attention", "output"), f"{name}.attn.c_proj", heads, size, bias=True)
        table.norm((*path, "attention_norm"), f"{name}.ln_1", hidden, bias=True)
        table.dense((*path, "intermediate"), f"{name}.mlp.c_fc", size, inner, bias=True)
        table.dense((*path, "output"), f"{name}.mlp.c_proj", inner, size, bias=True)
        table.norm((*path, "output_norm"), f"{name}.ln_2", hidden, bias=True)
    table.norm(("bert", "encoder", "norm"), "ln_f", hidden, bias=True)
    return table
