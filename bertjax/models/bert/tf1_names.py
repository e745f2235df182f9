"""Converts params to and from Google's TF1 variables (modeling.py, run_pretraining.py).

`bert.huggingface` derives the names of Hugging Face's tensors from the names of these variables.
"""

from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import ClassVar

import numpy as np

from bertjax.common.errors import UserError
from bertjax.config.model_config import BertConfig
from bertjax.models import tensors

WORDS = "bert/embeddings/word_embeddings"
# {part: the prefix of the names of its variables}. The encoder has no prefix here, because it is required.
VARIABLE_PREFIXES = {
    "pooler": "bert/pooler/",
    "masked_lm": "cls/predictions/",
    "next_sentence": "cls/seq_relationship/",
    "classifier": "output_",  # run_classifier.create_model
    "spans": "cls/squad/",  # run_squad.create_model
}
# The parts of a model that Google's code has.
PARTS = {"bert", *VARIABLE_PREFIXES} - {"pooler"}
# {head of a fine-tuned model: (kernel, bias)}. The variables have one row per label.
FINE_TUNED = {
    "classifier": ("output_weights", "output_bias"),
    "spans": ("cls/squad/output_weights", "cls/squad/output_bias"),
}
FINE_TUNED_VARIABLES = tuple(name for names in FINE_TUNED.values() for name in names)


class VariableTable(tensors.TensorTable):
    """{path of a param: its variable}. Google stores kernels as `[inputs, outputs]`."""

    suffixes: ClassVar[Mapping[str, str]] = MappingProxyType(
        {"kernel": "/kernel", "bias": "/bias", "scale": "/gamma", "shift": "/beta"}
    )
    inputs_first = True

    def head(self, part: str, weights: str, bias: str, labels: int, size: int) -> None:
        """Adds a head, whose kernel Google stores as `[outputs, inputs]`."""
        self[part, "dense", "kernel"] = tensors.Tensor((weights,), (size, labels), (labels, size))
        self.array((part, "dense", "bias"), bias, labels)


def variable_table(config: BertConfig, labels: Mapping[str, int], layers: int | None = None) -> VariableTable:
    """Returns the variables of a model.

    Args:
      config: the model config.
      labels: {part: the number of labels} of the parts that the model has; 0 for parts without labels.
      layers: the number of layers with separate variables; None: all layers.
    """
    table, embeddings = VariableTable(), ("bert", "embeddings")
    hidden, size = config.hidden_size, config.embedding_size
    positions = config.position_offset + config.max_position_embeddings
    table.array((*embeddings, "word", "embedding"), WORDS, config.vocab_size, size)
    table.array((*embeddings, "position", "embedding"), "bert/embeddings/position_embeddings", positions, size)
    if config.type_vocab_size:
        token_types = "bert/embeddings/token_type_embeddings"
        table.array((*embeddings, "token_type", "embedding"), token_types, config.type_vocab_size, size)
    if config.norm == "post":
        table.norm((*embeddings, "norm"), "bert/embeddings/LayerNorm", size, bias=True)
    else:
        table.norm(("bert", "encoder", "norm"), "bert/encoder/LayerNorm", hidden, bias=True)
    if config.projects_embeddings:
        table.dense((*embeddings, "projection"), "bert/embeddings_project", (size,), (hidden,), bias=True)
    _add_layers(table, config, config.num_hidden_layers if layers is None else layers)
    if "pooler" in labels:
        table.dense(("bert", "pooler", "dense"), "bert/pooler/dense", (hidden,), (hidden,), bias=True)
    if "masked_lm" in labels:
        table.dense(("masked_lm", "dense"), "cls/predictions/transform/dense", (hidden,), (size,), bias=True)
        table.norm(("masked_lm", "norm"), "cls/predictions/transform/LayerNorm", size, bias=True)
        table.array(("masked_lm", "bias"), "cls/predictions/output_bias", config.vocab_size)
    if "next_sentence" in labels:
        prefix = "cls/seq_relationship/output_"
        table.head("next_sentence", f"{prefix}weights", f"{prefix}bias", 2, hidden)
    for part, names in FINE_TUNED.items():
        if part in labels:
            table.head(part, *names, labels[part], hidden)
    return table


def _add_layers(table: VariableTable, config: BertConfig, layers: int) -> None:
    """Adds the variables of layers."""
    hidden, heads = config.hidden_size, (config.num_attention_heads, config.head_size)
    for number in range(layers):
        path, name, inner = ("bert", "layers", number), f"bert/encoder/layer_{number}", (config.intermediate_size,)
        projections = tuple(f"{name}/attention/self/{projection}" for projection in ("query", "key", "value"))
        table.dense((*path, "attention", "query_key_value"), projections, (hidden,), heads, bias=True)
        table.dense((*path, "attention", "output"), f"{name}/attention/output/dense", heads, (hidden,), bias=True)
        table.norm((*path, "attention_norm"), f"{name}/attention/output/LayerNorm", hidden, bias=True)
        table.dense((*path, "intermediate"), f"{name}/intermediate/dense", (hidden,), inner, bias=True)
        table.dense((*path, "output"), f"{name}/output/dense", inner, (hidden,), bias=True)
        table.norm((*path, "output_norm"), f"{name}/output/LayerNorm", hidden, bias=True)


def variable_names(config: BertConfig) -> set[str]:
    """Returns the names of the variables of all parts."""
    return variable_table(config, dict.fromkeys(VARIABLE_PREFIXES, 0)).names()


# Returns the variables of a model, see `variable_table`.
MakeTable = Callable[[BertConfig, Mapping[str, int]], VariableTable]


def to_params(
    variables: Mapping[str, np.ndarray], config: BertConfig, source: str, make_table: MakeTable = variable_table
) -> dict:
    """Converts variables to params in float32. Parts without variables are omitted.

    Args:
      variables: {name: array}.
      config: the model config.
      source: the checkpoint, for messages.
      make_table: returns the variables of a model.

    Raises:
      UserError: if a variable is missing, or has another shape than the config implies.
    """
    labels = {part: 0 for part, prefix in VARIABLE_PREFIXES.items() if any(x.startswith(prefix) for x in variables)}
    for part, names in FINE_TUNED.items():
        if part in labels:
            if not variables.keys() >= {*names}:
                raise UserError(f"{source}: expected both {' and '.join(names)}; one is missing")
            labels[part] = len(variables[names[1]])
    table, padding = make_table(config, labels), config.padded_vocab_size - config.vocab_size
    return tensors.TableFormat.stack_layers(tensors.to_params(table, variables, padding, source, "a BERT"), config)


def to_variables(params: dict, config: BertConfig, make_table: MakeTable = variable_table) -> dict[str, np.ndarray]:
    """Converts params to variables. Parts that Google's code does not have are omitted.

    Args:
      params: the params of a model.
      config: the model config.
      make_table: returns the variables of a model.
    """
    parts = tensors.class_parts_of(params) & VARIABLE_PREFIXES.keys()
    labels = {part: len(params[part]["dense"]["bias"]) if part in FINE_TUNED else 0 for part in parts}
    return tensors.to_state_dict(make_table(config, labels), tensors.TableFormat.unstack_layers(params, config))
