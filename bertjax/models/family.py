"""The interface of a family of models: everything that the package reads of its models."""

import dataclasses
import re
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from bertjax.config.model_config import BertConfig, Compute
from bertjax.text.tokenizer import SPECIAL_PIECES

if TYPE_CHECKING:
    import flax.linen as nn
    import jax


def layers_by_name(config: BertConfig, path: tuple[str, ...]) -> np.ndarray | None:
    """Returns the layers of a param by its name, see `Family.layer_numbers`: all those of an array in `layers`, the
    fifth of one in `NAME_4`, and 0 of one in `embeddings`."""
    if path[0] == "embeddings":
        return np.array(0)
    if "layers" in path:
        return 1 + np.arange(config.num_hidden_layers)
    found = next(filter(None, (re.fullmatch(r".*_(\d+)", name) for name in path)), None)
    return np.array(1 + int(found[1])) if found else None


@dataclasses.dataclass(frozen=True)
class Family:
    """What the package asks about a family.

    Args:
      model: (config, compute) -> the encoder, a `nn.encoder_model.EncoderModel` or a module with its methods.
      words: config -> how it can learn words. masked: it fills in those that are hidden; next: each token sees those
        before it, and predicts the next; neighbours: some states see those before, others those after; permuted: it
        predicts words from any others that it is shown, see `EncoderModel.encode_permuted`.
      layer_flops: (config, tokens of a row) -> matrix-multiply FLOPs of its layers for one row, forwards.
      query_flops: (config, tokens of a row, words) -> those of the states that predict permuted words, besides.
      shown: params of a model -> {field of its config: the values that it may have} as far as the params show it; None
        if they are another family's.
      validate: whole config -> None. Raises `UserError` for what this family cannot do.
      attention: (config, params of the encoder, token ids `[1, length]`, segments, of which 0 is padding, token types)
        -> probabilities `[layers, heads, queries, keys]`, a function that can be compiled; None if it has no attention
        to show.
      new_cache: (config, batch, tokens, dtype) -> an empty cache, with which the encoder's `decode` continues a text;
        None if it cannot.
      new_memory: (config, rows, dtype) -> the memory of rows that have read nothing, a
        `nn.ops.recurrent_memory.Memory`. With it, the encoder's `encode`, or `encode_permuted` if words are permuted,
        returns the memory of the rows afterwards: the last `memory_length` states of each layer, a field of the config.
        None if its models have no memory.
      memory_flops: (config, tokens of a row) -> what a full memory adds to `layer_flops`.
      word_embeddings: path of the word embeddings among the params of the encoder.
      is_cast: path of a param -> whether the compute type may replace its float32 without changing a result.
      model_types: the `model_type`s in config.json of Hugging Face's folders whose models are of this family.
      huggingface: the module that reads and writes them, with the functions of `models.bert.huggingface`.
      layer_numbers: (config, path of a param of the encoder) -> the number of the layer that it is of, from 1 on, or
        `[layers]`, ascending, of those that an array stacks on its first axis; 0 before the layers, None after them.
      start: params of a checkpoint -> those that another run starts from.
      projected: (config, size) -> the config of a model like it, whose embeddings have this size and are projected to
        that of hidden states; None: there is none.
      special_pieces: the names of these in a SentencePiece model that is learnt for it, see
        `text.vocabulary_learning.learn`.
      packs: whether several sequences can share a row, each as a segment with positions of its own.
      has_kernels: whether its attention runs as a kernel on chips that have one.
      config: a frozen dataclass of `config.field`s, which say their limits. Names are those of `BertConfig` where the
        parts read them.
    """

    model: Callable[[BertConfig, Compute], "nn.Module"]
    words: Callable[[BertConfig], str]
    layer_flops: Callable[[BertConfig, int], int]
    shown: Callable[[dict], Mapping[str, Sequence] | None]
    query_flops: Callable[[BertConfig, int, int], int] | None = None
    validate: Callable[[Any], None] = lambda config: None
    attention: Callable[[BertConfig, dict, "jax.Array", "jax.Array", "jax.Array"], "jax.Array"] | None = None
    new_cache: Callable[[BertConfig, int, int, str], Any] | None = None
    new_memory: Callable[[BertConfig, int, str], Any] | None = None
    memory_flops: Callable[[BertConfig, int], int] = lambda config, length: 0
    word_embeddings: tuple[str, ...] = ("embeddings", "word", "embedding")
    is_cast: Callable[[tuple[str, ...]], bool] = lambda path: path[-1] in ("kernel", "embedding")
    model_types: tuple[str, ...] = ()
    huggingface: str = ""
    layer_numbers: Callable[[Any, tuple[str, ...]], np.ndarray | None] = layers_by_name
    start: Callable[[dict], dict] = lambda params: params
    projected: Callable[[Any, int], Any] | None = None
    special_pieces: tuple[str, ...] = SPECIAL_PIECES
    packs: bool = False
    has_kernels: bool = True
    config: type = BertConfig


def projection_flops(config: BertConfig, tokens: int) -> int:
    """Matrix-multiply FLOPs that bring embeddings to the size of hidden states, if theirs is another, forwards."""
    size, hidden = config.embedding_size, config.hidden_size
    return 2 * tokens * size * hidden if size != hidden else 0


def value_at(params: Mapping, path: Sequence[str]):
    """Returns the param at a path."""
    for name in path:
        params = params[name]
    return params


def shown_by_embeddings(params: dict) -> dict[str, Sequence]:
    """Returns what the params of a model with `nn.encoder.Embeddings` show of its config, see `Family.shown`."""
    embeddings = params["bert"]["embeddings"]
    rows, hidden = embeddings["word"]["embedding"].shape
    if "projection" in embeddings:
        hidden = len(embeddings["projection"]["bias"])
    found: dict[str, Sequence] = {
        "positions": ("learned",) if "position" in embeddings else ("sinusoidal", "none"),
        "norm": ("post",) if "norm" in embeddings else ("pre",),
        "hidden_size": (hidden,),
        "type_vocab_size": (len(embeddings["token_type"]["embedding"]) if "token_type" in embeddings else 0,),
        "vocab_size": range(rows, rows - 128, -1),  # padded
    }
    if "masked_lm" in params:
        found["output"] = ("transform",)
    if "position" in embeddings:
        found["max_position_embeddings"] = (len(embeddings["position"]["embedding"]),)
    return found
