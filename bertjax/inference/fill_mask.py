"""Predicts the most likely words for each [MASK] of a text."""

import dataclasses
import functools
from collections.abc import Iterable, Iterator

import jax
import numpy as np

from bertjax.common.errors import UserError
from bertjax.inference.predictor import check_numbers, words_model
from bertjax.interop.pretrained import Pretrained
from bertjax.models import families
from bertjax.models.heads import BertForMaskedLM
from bertjax.text.tokenizer import Tokenizer

BATCH, MASKS = 32, 256  # most texts that are computed together, and most masks


@dataclasses.dataclass(frozen=True)
class Filled:
    """A text and, for each of its masks, the most likely (piece, probability) pairs, best first."""

    text: str
    masks: list[list[tuple[str, float]]]


@functools.partial(jax.jit, static_argnums=(0, 4, 5))
def _most_likely(model: BertForMaskedLM, params, batch, positions, vocab_size: int, top_k: int):
    logits = model.apply({"params": params}, **batch, masked_positions=positions)
    return jax.lax.top_k(jax.nn.softmax(logits)[..., :vocab_size], top_k)


def fill_masks(
    model: BertForMaskedLM, params, tokenizer: Tokenizer, texts: Iterable[str], top_k: int = 5
) -> Iterator[Filled]:
    """Yields each text with its masks filled. `params` may have more heads.

    Raises `UserError`, before filling any, if the model predicts next words, or if a text has no mask or is too long.
    """
    texts, top_k = list(texts), min(top_k, tokenizer.vocab_size)
    most_likely = min(1 << (top_k - 1).bit_length(), tokenizer.vocab_size)  # few numbers to compile
    longest = model.config.max_position_embeddings
    learnt = families.family_of(model.config).lm_type(model.config)
    if texts and learnt not in ("masked", "permuted"):
        instead = "; --generate=N continues a text with them" if learnt == "causal" else ""
        raise UserError(
            f"only a model that was trained with masks fills a [MASK]; this one predicts next words{instead}"
        )
    encoded = [_encode(text, tokenizer, longest) for text in texts]
    for some in _together([ids.count(tokenizer.mask_id) for ids in encoded]):
        found = _fill(model, params, tokenizer, encoded[some.start : some.stop], most_likely)
        for number, masks in zip(some, found):
            yield Filled(texts[number], [words[:top_k] for words in masks])


def _together(masks: list[int]) -> Iterator[range]:
    """Yields ranges of texts, given with their numbers of masks, whose logits fit in memory together."""
    start = 0
    for number, count in enumerate(masks):
        most = max([count, *masks[start:number]])
        if number > start and (number - start == BATCH or (number + 1 - start) * most > MASKS):
            yield range(start, number)
            start = number
    if masks:
        yield range(start, len(masks))


def _fill(model, params, tokenizer: Tokenizer, encoded: list[list[int]], top_k: int) -> list[list]:
    """The masks of texts that are computed together."""
    texts = len(encoded)
    encoded = encoded + encoded[-1:] * ((1 << (texts - 1).bit_length()) - texts)
    positions = [np.flatnonzero(np.array(ids) == tokenizer.mask_id) for ids in encoded]
    # Pads to powers of two to limit compilations.
    longest, most = max(map(len, encoded)), max(map(len, positions))
    length = min(model.config.max_position_embeddings, max(16, 1 << (longest - 1).bit_length()))
    width, rows = 1 << (most - 1).bit_length(), len(encoded)
    ids = np.full((rows, length), tokenizer.pad_id, np.int32)
    segments, types = np.zeros((2, rows, length), np.int32)
    masked = np.zeros((rows, width), np.int32)
    for row, (own, places) in enumerate(zip(encoded, positions)):
        ids[row, : len(own)], segments[row, : len(own)] = own, 1
        types[row, : len(own)] = tokenizer.token_types(len(own))
        masked[row] = places[-1]  # a model of permuted words hides what is there
        masked[row, : len(places)] = places
    batch = {"input_ids": ids, "segments": segments, "token_types": types}
    probabilities, words = jax.device_get(_most_likely(model, params, batch, masked, tokenizer.vocab_size, top_k))
    check_numbers(probabilities)
    return [
        [
            [(tokenizer.shown(int(w)), float(p)) for w, p in zip(words[row, i], probabilities[row, i])]
            for i in range(len(places))
        ]
        for row, places in enumerate(positions[:texts])
    ]


def of_checkpoint(source: Pretrained, texts: Iterable[str], top_k: int = 5) -> Iterator[Filled]:
    """As `fill_masks`, with a checkpoint. Also raises `UserError` if it predicts no words."""
    return fill_masks(*words_model(source), source.tokenizer, texts, top_k)


def check(texts: Iterable[str], tokenizer: Tokenizer, longest: int) -> None:
    """Raises `UserError` if `fill_masks` would reject a text."""
    for text in texts:
        _encode(text, tokenizer, longest)


def _encode(text: str, tokenizer: Tokenizer, longest: int) -> list[int]:
    ids = tokenizer.framed(tokenizer.encode_with_masks(text))
    if tokenizer.mask_id not in ids:
        raise UserError(f"no [MASK] in {text[:60]!r}: write [MASK] in place of a word")
    if len(ids) > longest:
        raise UserError(f"{text[:60]!r}... has {len(ids)} tokens, more than the model's {longest} positions")
    return ids


def describe(filled: Filled) -> str:
    """Formats the text and each of its masks, one line each."""
    lines = [filled.text]
    for number, words in enumerate(filled.masks, 1):
        lines.append(f"  [MASK] {number}: " + ", ".join(f"{word} {probability:.1%}" for word, probability in words))
    return "\n".join(lines)
