"""Converts params to and from Google's TF1 variables (modeling.py, run_pretraining.py).

`bert.huggingface` derives the names of Hugging Face's tensors from the names of these variables.
"""

import flax.traverse_util
import numpy as np

from bertjax.common.errors import UserError
from bertjax.config.model_config import BertConfig

LAYERS = "bert/encoder/layers"
QUERY_KEY_VALUE = f"{LAYERS}/attention/query_key_value"
WORDS = "bert/embeddings/word_embeddings"

# {path of a param: Google's variable}. `to_params` reshapes, transposes and pads the arrays.
VARIABLE_OF_PARAM = {
    "bert/embeddings/word/embedding": WORDS,
    "bert/embeddings/position/embedding": "bert/embeddings/position_embeddings",
    "bert/embeddings/token_type/embedding": "bert/embeddings/token_type_embeddings",
    "bert/embeddings/norm/scale": "bert/embeddings/LayerNorm/gamma",
    "bert/embeddings/norm/bias": "bert/embeddings/LayerNorm/beta",
    "bert/embeddings/projection/kernel": "bert/embeddings_project/kernel",
    "bert/embeddings/projection/bias": "bert/embeddings_project/bias",
    "bert/pooler/dense/kernel": "bert/pooler/dense/kernel",
    "bert/pooler/dense/bias": "bert/pooler/dense/bias",
    "masked_lm/dense/kernel": "cls/predictions/transform/dense/kernel",
    "masked_lm/dense/bias": "cls/predictions/transform/dense/bias",
    "masked_lm/norm/scale": "cls/predictions/transform/LayerNorm/gamma",
    "masked_lm/norm/bias": "cls/predictions/transform/LayerNorm/beta",
    "masked_lm/bias": "cls/predictions/output_bias",
    "next_sentence/dense/kernel": "cls/seq_relationship/output_weights",
    "next_sentence/dense/bias": "cls/seq_relationship/output_bias",
    "classifier/dense/kernel": "output_weights",  # run_classifier.create_model
    "classifier/dense/bias": "output_bias",
    "spans/dense/kernel": "cls/squad/output_weights",  # run_squad.create_model
    "spans/dense/bias": "cls/squad/output_bias",
}
# The variables of these kernels are `[outputs, inputs]`.
TRANSPOSED_KERNELS = ("next_sentence/dense/kernel", "classifier/dense/kernel", "spans/dense/kernel")

# The parts of a model that Google's code has.
PARTS = {"bert", *(path.partition("/")[0] for path in VARIABLE_OF_PARAM)}

# {path of a param in a layer: variable in a layer}. The param `bert/encoder/layers/PATH` stacks the variables
# `bert/encoder/layer_N/VARIABLE` of all layers.
LAYER_VARIABLE_OF_PARAM = {
    "attention/output/kernel": "attention/output/dense/kernel",
    "attention/output/bias": "attention/output/dense/bias",
    "attention_norm/scale": "attention/output/LayerNorm/gamma",
    "attention_norm/bias": "attention/output/LayerNorm/beta",
    "intermediate/kernel": "intermediate/dense/kernel",
    "intermediate/bias": "intermediate/dense/bias",
    "output/kernel": "output/dense/kernel",
    "output/bias": "output/dense/bias",
    "output_norm/scale": "output/LayerNorm/gamma",
    "output_norm/bias": "output/LayerNorm/beta",
}


def variable_shapes(config: BertConfig) -> dict[str, tuple[int, ...]]:
    """Returns {variable: shape} of a pre-trained BERT in Google's checkpoints."""
    hidden, inner, size = config.hidden_size, config.intermediate_size, config.embedding_size
    shapes: dict[str, tuple[int, ...]] = {
        WORDS: (config.vocab_size, size),
        "bert/embeddings/position_embeddings": (config.position_offset + config.max_position_embeddings, size),
    }
    if config.type_vocab_size:
        shapes["bert/embeddings/token_type_embeddings"] = (config.type_vocab_size, size)
    shapes |= _norm("bert/embeddings/LayerNorm", size)
    if size != hidden:
        shapes |= _dense("bert/embeddings_project", size, hidden)
    for number in range(config.num_hidden_layers):
        layer = f"bert/encoder/layer_{number}"
        for projection in ("query", "key", "value"):
            shapes |= _dense(f"{layer}/attention/self/{projection}", hidden, hidden)
        shapes |= _dense(f"{layer}/attention/output/dense", hidden, hidden)
        shapes |= _norm(f"{layer}/attention/output/LayerNorm", hidden)
        shapes |= _dense(f"{layer}/intermediate/dense", hidden, inner)
        shapes |= _dense(f"{layer}/output/dense", inner, hidden)
        shapes |= _norm(f"{layer}/output/LayerNorm", hidden)
    return {
        **shapes,
        **_dense("bert/pooler/dense", hidden, hidden),
        **_dense("cls/predictions/transform/dense", hidden, size),
        **_norm("cls/predictions/transform/LayerNorm", size),
        "cls/predictions/output_bias": (config.vocab_size,),
        "cls/seq_relationship/output_weights": (2, hidden),
        "cls/seq_relationship/output_bias": (2,),
    }


def _dense(name: str, inputs: int, outputs: int) -> dict:
    return {f"{name}/kernel": (inputs, outputs), f"{name}/bias": (outputs,)}


def _norm(name: str, size: int) -> dict:
    return {f"{name}/gamma": (size,), f"{name}/beta": (size,)}


# Prefixes of the variables of optional parts. The encoder is required.
OPTIONAL_PREFIXES = ("bert/pooler/", "cls/predictions/", "cls/seq_relationship/")
# Variables of the output layers of fine-tuned models, with one row per label.
FINE_TUNED_VARIABLES = ("output_weights", "output_bias", "cls/squad/output_weights", "cls/squad/output_bias")


def check_variables(variables: dict[str, np.ndarray], config: BertConfig, source: str) -> None:
    """Checks the variables of a checkpoint.

    Args:
      variables: {name: array}.
      config: the model config.
      source: the checkpoint, for messages.

    Raises:
      UserError: if a variable is missing, or has another shape than the config implies.
    """
    present = tuple(part for part in OPTIONAL_PREFIXES if any(name.startswith(part) for name in variables))
    for name, shape in variable_shapes(config).items():
        if name not in variables:
            if name.startswith(OPTIONAL_PREFIXES) and not name.startswith(present):
                continue
            raise UserError(
                f"{source}: {name} is missing; expected the variables of a BERT; check that the checkpoint is complete"
            )
        if variables[name].shape != shape:
            raise UserError(f"{source}: {name} has shape {variables[name].shape}; expected {shape} by the config")
    for weights, bias in (FINE_TUNED_VARIABLES[:2], FINE_TUNED_VARIABLES[2:]):
        if (weights in variables) != (bias in variables):
            raise UserError(f"{source}: expected both {weights} and {bias}; one is missing")
        if weights in variables and variables[weights].shape != (len(variables[bias]), config.hidden_size):
            raise UserError(
                f"{source}: {weights} has shape {variables[weights].shape}; expected "
                f"{(len(variables[bias]), config.hidden_size)} by {bias} and the config"
            )


def to_params(variables: dict[str, np.ndarray], config: BertConfig) -> dict:
    """Converts variables to params in float32. Parts without variables are omitted.

    Args:
      variables: {name: array}, see `check_variables`.
      config: the model config.
    """

    def stacked(variable: str, *shape: int) -> np.ndarray:
        layers = [variables[f"bert/encoder/layer_{i}/{variable}"] for i in range(config.num_hidden_layers)]
        return np.stack([x.reshape(shape or x.shape) for x in layers])

    hidden, heads, size = config.hidden_size, config.num_attention_heads, config.head_size
    flat = {path: variables[name] for path, name in VARIABLE_OF_PARAM.items() if name in variables}
    flat |= {f"{LAYERS}/{path}": stacked(name) for path, name in LAYER_VARIABLE_OF_PARAM.items()}
    flat[f"{LAYERS}/attention/output/kernel"] = stacked("attention/output/dense/kernel", heads, size, hidden)
    for part, shape in (("kernel", (hidden, heads, size)), ("bias", (heads, size))):
        projections = [
            stacked(f"attention/self/{projection}/{part}", *shape) for projection in ("query", "key", "value")
        ]
        flat[f"{QUERY_KEY_VALUE}/{part}"] = np.stack(projections, axis=-3)

    padding = config.padded_vocab_size - config.vocab_size
    for path in TRANSPOSED_KERNELS:
        if path in flat:
            flat[path] = flat[path].T
    for path in ("bert/embeddings/word/embedding", "masked_lm/bias"):
        if path in flat:
            flat[path] = np.pad(flat[path], [(0, padding)] + [(0, 0)] * (flat[path].ndim - 1))
    return flax.traverse_util.unflatten_dict({path: np.asarray(x, np.float32) for path, x in flat.items()}, sep="/")


def to_variables(params: dict, config: BertConfig) -> dict[str, np.ndarray]:
    """Converts params to variables. Parts that Google's code does not have are omitted.

    Args:
      params: the params of a model.
      config: the model config.
    """
    flat = {path: np.asarray(x) for path, x in flax.traverse_util.flatten_dict(params, sep="/").items()}
    variables = {
        name: flat[path].T if path in TRANSPOSED_KERNELS else flat[path]
        for path, name in VARIABLE_OF_PARAM.items()
        if path in flat
    }
    for name in (WORDS, "cls/predictions/output_bias"):
        if name in variables:
            variables[name] = variables[name][: config.vocab_size]

    shapes = variable_shapes(config)
    for number in range(config.num_hidden_layers):
        layer = f"bert/encoder/layer_{number}"
        for path, name in LAYER_VARIABLE_OF_PARAM.items():
            variables[f"{layer}/{name}"] = flat[f"{LAYERS}/{path}"][number]
        for part in ("kernel", "bias"):
            arrays = np.moveaxis(flat[f"{QUERY_KEY_VALUE}/{part}"][number], -3, 0)
            for projection, array in zip(("query", "key", "value"), arrays):
                variables[f"{layer}/attention/self/{projection}/{part}"] = array
    for name in shapes.keys() & variables.keys():
        variables[name] = variables[name].reshape(shapes[name])
    order = [name for name in (*shapes, *FINE_TUNED_VARIABLES) if name in variables]
    return {name: np.ascontiguousarray(variables[name]) for name in order}
