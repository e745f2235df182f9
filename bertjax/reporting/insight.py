"""Shows the contents of a checkpoint: the attention of each head, and the nearest word embeddings."""

import functools
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import jax
import numpy as np

from bertjax.common.errors import UserError
from bertjax.config.model_config import BertConfig
from bertjax.interop.pretrained import Pretrained
from bertjax.models import families
from bertjax.models.family import WORD_EMBEDDINGS, ExposesAttention, param_at
from bertjax.text.tokenizer import Tokenizer

if TYPE_CHECKING:
    from matplotlib.figure import Figure

MOST_LAYERS = 12  # layers that are drawn, evenly spaced
NEIGHBOURS = 8
WORD_BEGINS = "\u2581"  # the mark of SentencePiece


def attention(source: Pretrained, text: str) -> tuple[list[str], np.ndarray]:
    """Returns the tokens of a text, and the attention probabilities `[layers, heads, queries, keys]`.

    Raises:
      UserError: the text is too long, or the model has no attention.
    """
    config, tokenizer = source.config, _tokenizer(source)
    if not isinstance(families.family_of(config), ExposesAttention):
        raise UserError(f"{source.path}: a model with model.family = {config.family!r} has no attention")
    ids, longest = tokenizer.framed(tokenizer.encode_with_masks(text)), config.max_position_embeddings
    count = len(ids)
    if count > longest:
        raise UserError(f"{text[:60]!r}... has {count} tokens, more than the model's positions")
    length = min(longest, max(16, 1 << (count - 1).bit_length()))  # each length compiles the program
    input_ids, segments, types = np.zeros((3, 1, length), np.int32)
    input_ids[:] = tokenizer.pad_id
    input_ids[0, :count], segments[0, :count], types[0, :count] = ids, 1, tokenizer.token_types(count)
    probabilities = _probabilities(config, source.params["bert"], input_ids, segments, types)
    return [tokenizer.shown(i) for i in ids], np.asarray(probabilities)[..., :count, :count]


def _tokenizer(source: Pretrained) -> Tokenizer:
    assert source.tokenizer is not None  # callers read the checkpoint with its tokenizer
    return source.tokenizer


@functools.partial(jax.jit, static_argnums=0)
def _probabilities(config: BertConfig, params: dict[str, Any], ids: Any, segments: Any, types: Any) -> jax.Array:
    family = families.family_of(config)
    assert isinstance(family, ExposesAttention)
    return family.attention_probabilities(config, params, ids, segments, types)


def token_id_of(source: Pretrained, word: str) -> int:
    """Returns the id of the token of a word. Raises `UserError` if the word has several tokens or is unknown."""
    tokenizer = _tokenizer(source)
    (ids,) = tokenizer.encode_following([word])
    if len(ids) != 1:
        raise UserError(f"--words: {word!r} has {len(ids)} tokens; name words that are one token")
    if ids[0] == tokenizer.unk_id:
        raise UserError(f"--words: {word!r} is unknown to the vocabulary; name other words")
    return ids[0]


def word_ids(source: Pretrained, text: str) -> list[int]:
    """Returns the ids of the tokens of a text that are words or parts of words."""
    tokenizer = _tokenizer(source)
    return [i for i in tokenizer.encode(text).ids if tokenizer.shown(i).strip(WORD_BEGINS + " ").isalpha()]


def neighbours(source: Pretrained, ids: Sequence[int]) -> dict[str, list[tuple[str, float]]]:
    """Returns {token: [(token with a close embedding, cosine)]}, the closest token first."""
    tokenizer = _tokenizer(source)
    table = param_at(source.params["bert"], WORD_EMBEDDINGS)
    table = np.asarray(table, np.float32)[: len(tokenizer.pieces)]
    table = table / np.maximum(np.linalg.norm(table, axis=1, keepdims=True), 1e-12)
    nearest = {}
    for number in dict.fromkeys(ids):
        cosines = table @ table[number]
        cosines[number] = -np.inf
        order = np.argsort(-cosines)[:NEIGHBOURS]
        nearest[tokenizer.shown(number)] = [(tokenizer.shown(int(i)), float(cosines[i])) for i in order]
    return nearest


def draw_attention(tokens: Sequence[str], probabilities: np.ndarray) -> "Figure":
    """Returns a figure with a row for each layer and a column for each head. The rows of a picture are queries."""
    from matplotlib.figure import Figure

    layers = np.unique(np.linspace(0, len(probabilities) - 1, min(len(probabilities), MOST_LAYERS)).round().astype(int))
    heads = probabilities.shape[1]
    side = 2.6 if heads <= 4 else 1.6  # inches
    font = float(np.clip(72 * 0.75 * side / len(tokens), 2, 7))  # points: the height of a row, within readable sizes
    figure = Figure(figsize=(side * heads + 1, side * len(layers) + 0.5), layout="constrained")
    axes = figure.subplots(len(layers), heads, squeeze=False)
    for (row, head), axis in np.ndenumerate(axes):
        axis.imshow(probabilities[layers[row], head], cmap="viridis", vmin=0)
        axis.set_title(f"layer {layers[row] + 1}, head {head + 1}", fontsize=7)
        axis.set(xticks=[], yticks=[])
        if head == 0:
            axis.set_yticks(range(len(tokens)), tokens, fontsize=font)
        if row == len(layers) - 1:
            axis.set_xticks(range(len(tokens)), tokens, fontsize=font, rotation=90)
    return figure
