"""Predicts the most likely words for each [MASK] of a text."""

import dataclasses
import functools
from collections.abc import Iterable, Iterator

import jax
import jax.numpy as jnp
import numpy as np

from bertjax.common.errors import UserError
from bertjax.inference.predictor import check_numbers, padded_batch, words_model
from bertjax.interop.pretrained import Pretrained, tokenizer_of
from bertjax.models import families
from bertjax.models.heads import BertForMaskedLM
from bertjax.text.tokenizer import Tokenizer

BATCH, MASKS = 32, 256  # the largest numbers of texts and of masks in a batch


@dataclasses.dataclass(frozen=True)
class Filled:
    """A text and, for each [MASK] of the text, the most likely (token, probability) pairs, best first."""

    text: str
    masks: list[list[tuple[str, float]]]

    def masks_as_json(self) -> list[list[dict[str, str | float]]]:
        """Returns the words for each [MASK] as objects with a word and its probability."""
        return [[{"word": word, "probability": probability} for word, probability in words] for words in self.masks]


@functools.partial(jax.jit, static_argnums=(0, 4, 5))
def _most_likely(
    model: BertForMaskedLM, params: dict, batch: dict, positions: np.ndarray, vocab_size: int, top_k: int
) -> tuple[jax.Array, jax.Array]:
    """Returns the probabilities and the ids of the most likely words, `[rows, predictions, top_k]`."""
    logits = model.apply({"params": params}, **batch, masked_positions=positions)
    top = jax.lax.top_k(jax.nn.softmax(jnp.asarray(logits))[..., :vocab_size], top_k)
    return top[0], top[1]


def fill_masks(
    model: BertForMaskedLM, params: dict, tokenizer: Tokenizer, texts: Iterable[str], top_k: int = 5
) -> Iterator[Filled]:
    """Yields each text with the most likely words for each [MASK].

    Args:
      model: the language model.
      params: the params of the model. Params of other heads are ignored.
      tokenizer: the tokenizer.
      texts: the texts.
      top_k: the number of words for each [MASK].

    Raises:
      UserError: before the first result, if the model predicts next words, or if a text has no [MASK] or is too long.
    """
    texts, top_k = list(texts), min(top_k, tokenizer.vocab_size)
    computed_words = min(1 << (top_k - 1).bit_length(), tokenizer.vocab_size)  # A power of two: few compilations.
    longest = model.config.max_position_embeddings
    lm_type = families.family_of(model.config).lm_type(model.config)
    if texts and lm_type not in ("masked", "permuted"):
        instead = "; continue the text with --generate=N" if lm_type == "causal" else ""
        raise UserError(
            f"only a masked language model fills a [MASK], but this checkpoint predicts next words{instead}"
        )
    encoded = [_encode(text, tokenizer, longest) for text in texts]
    for numbers in _together([ids.count(tokenizer.mask_id) for ids in encoded]):
        filled = _fill(model, params, tokenizer, encoded[numbers.start : numbers.stop], computed_words)
        for number, masks in zip(numbers, filled):
            yield Filled(texts[number], [words[:top_k] for words in masks])


def _together(masks: list[int]) -> Iterator[range]:
    """Yields ranges of texts whose logits fit in memory together; `masks` are the numbers of masks of all texts."""
    start = 0
    for number, count in enumerate(masks):
        most = max([count, *masks[start:number]])
        if number > start and (number - start == BATCH or (number + 1 - start) * most > MASKS):
            yield range(start, number)
            start = number
    if masks:
        yield range(start, len(masks))


def _fill(
    model: BertForMaskedLM, params: dict, tokenizer: Tokenizer, encoded: list[list[int]], top_k: int
) -> list[list[list[tuple[str, float]]]]:
    """Returns the most likely words for each mask of the texts of a batch."""
    texts = len(encoded)
    encoded = encoded + encoded[-1:] * ((1 << (texts - 1).bit_length()) - texts)
    positions = [np.flatnonzero(np.array(ids) == tokenizer.mask_id) for ids in encoded]
    # Pads to powers of two to limit compilations.
    longest, most_masks = max(map(len, encoded)), max(map(len, positions))
    length = min(model.config.max_position_embeddings, max(16, 1 << (longest - 1).bit_length()))
    batch = padded_batch(encoded, tokenizer, len(encoded), length)
    masked = np.zeros((len(encoded), 1 << (most_masks - 1).bit_length()), np.int32)
    for row, places in enumerate(positions):
        masked[row] = places[-1]  # A permuted model hides the tokens at all of these positions, also at padding.
        masked[row, : len(places)] = places
    probabilities, words = jax.device_get(_most_likely(model, params, batch, masked, tokenizer.vocab_size, top_k))
    check_numbers(probabilities)
    return [
        [
            [(tokenizer.shown(int(w)), float(p)) for w, p in zip(words[row, i], probabilities[row, i])]
            for i in range(len(places))
        ]
        for row, places in enumerate(positions[:texts])
    ]


def predict_masks(source: Pretrained, texts: Iterable[str], top_k: int = 5) -> Iterator[Filled]:
    """Yields the results of `fill_masks` by a checkpoint. Raises `UserError` if the checkpoint predicts no words."""
    return fill_masks(*words_model(source), tokenizer_of(source), texts, top_k)


def check_masks(texts: Iterable[str], tokenizer: Tokenizer, longest: int) -> None:
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
    """Returns a line with the text, and a line with the words for each [MASK]."""
    lines = [filled.text]
    for number, words in enumerate(filled.masks, 1):
        lines.append(f"  [MASK] {number}: " + ", ".join(f"{word} {probability:.1%}" for word, probability in words))
    return "\n".join(lines)
