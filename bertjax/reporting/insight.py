"""What a checkpoint has learnt, to look at: where each head attends, and which word embeddings lie close together."""

import functools
from collections.abc import Sequence

import jax
import numpy as np

from bertjax.common.errors import UserError
from bertjax.config.model_config import BertConfig
from bertjax.interop.pretrained import Pretrained
from bertjax.models import families
from bertjax.models.family import WORD_EMBEDDINGS, ExposesAttention, param_at

MOST_LAYERS = 12  # most layers that are drawn, evenly spaced
NEIGHBOURS = 8
WORD_BEGINS = "\u2581"  # SentencePiece's mark


def attention(source: Pretrained, text: str) -> tuple[list[str], np.ndarray]:
    """Computes the attention of a text.

    Returns its pieces, and the probabilities `[layers, heads, queries, keys]`. Raises `UserError` if it is too long, or
    if the model has no attention.
    """
    config, pieces, family = source.config, source.tokenizer, families.family_of(source.config)
    if not isinstance(family, ExposesAttention):
        raise UserError(f"{source.path}: a model with model.family = {config.family!r} has no attention")
    ids, longest = pieces.framed(pieces.encode_with_masks(text)), config.max_position_embeddings
    count = len(ids)
    if count > longest:
        raise UserError(f"{text[:60]!r}... has {count} tokens, more than the model's positions")
    length = min(longest, max(16, 1 << (count - 1).bit_length()))  # few lengths to compile for
    given, segments, types = np.zeros((3, 1, length), np.int32)
    given[:] = pieces.pad_id
    given[0, :count], segments[0, :count], types[0, :count] = ids, 1, pieces.token_types(count)
    probabilities = _probabilities(config, source.params["bert"], given, segments, types)
    return [pieces.shown(i) for i in ids], np.asarray(probabilities)[..., :count, :count]


@functools.partial(jax.jit, static_argnums=0)
def _probabilities(config: BertConfig, params: dict, ids, segments, types) -> jax.Array:
    family = families.family_of(config)
    assert isinstance(family, ExposesAttention)
    return family.attention_probabilities(config, params, ids, segments, types)


def piece_of(source: Pretrained, word: str) -> int:
    """Returns the id of a word's piece. Raises `UserError` if it has several pieces, or none."""
    (ids,) = source.tokenizer.encode_following([word])
    if len(ids) != 1:
        raise UserError(f"--words: {word!r} has {len(ids)} pieces; name words that have one of their own")
    if ids[0] == source.tokenizer.unk_id:
        raise UserError(f"--words: {word!r} is unknown to the vocabulary")
    return ids[0]


def words_of(source: Pretrained, text: str) -> list[int]:
    """Returns the ids of a text's pieces that are words, or parts of them."""
    ids, shown = source.tokenizer.encode(text).ids, source.tokenizer.shown
    return [number for number in ids if shown(number).strip(WORD_BEGINS + " ").isalpha()]


def neighbours(source: Pretrained, ids: Sequence[int]) -> dict[str, list[tuple[str, float]]]:
    """Returns, by piece, the pieces with the closest embeddings (cosine)."""
    pieces, shown = source.tokenizer.pieces, source.tokenizer.shown
    table = param_at(source.params["bert"], WORD_EMBEDDINGS)
    table = np.asarray(table, np.float32)[: len(pieces)]
    table = table / np.maximum(np.linalg.norm(table, axis=1, keepdims=True), 1e-12)
    found = {}
    for number in dict.fromkeys(ids):
        near = table @ table[number]
        near[number] = -np.inf
        found[shown(number)] = [(shown(int(i)), float(near[i])) for i in np.argsort(-near)[:NEIGHBOURS]]
    return found


def draw(pieces: Sequence[str], probabilities: np.ndarray):
    """Returns a Matplotlib figure: a row for each layer, a column for each head; rows of a picture are queries."""
    from matplotlib.figure import Figure

    layers = np.unique(np.linspace(0, len(probabilities) - 1, min(len(probabilities), MOST_LAYERS)).round().astype(int))
    heads = probabilities.shape[1]
    side = 2.6 if heads <= 4 else 1.6  # inches
    font = float(np.clip(72 * 0.75 * side / len(pieces), 2, 7))  # points: as high as a row, if that can be read
    figure = Figure(figsize=(side * heads + 1, side * len(layers) + 0.5), layout="constrained")
    axes = figure.subplots(len(layers), heads, squeeze=False)
    for row, layer in enumerate(layers):
        for head, axis in enumerate(axes[row]):
            axis.imshow(probabilities[layer, head], cmap="viridis", vmin=0)
            axis.set_title(f"layer {layer + 1}, head {head + 1}", fontsize=7)
            axis.set(xticks=[], yticks=[])
            if head == 0:
                axis.set_yticks(range(len(pieces)), pieces, fontsize=font)
            if row == len(layers) - 1:
                axis.set_xticks(range(len(pieces)), pieces, fontsize=font, rotation=90)
    return figure
