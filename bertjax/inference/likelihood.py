"""Likelihoods of texts, and minimal pairs of an acceptable and an unacceptable sentence.

A left-to-right model computes the probability of each token after the previous tokens. A recurrent model reads a long
text in segments of the length of the memory. A masked model computes the pseudo-log-likelihood (Salazar et al. 2020,
section 2): each token is masked alone.
"""

import collections
import functools
import itertools
import json
import math
from collections.abc import Iterable, Iterator
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from bertjax.common.errors import UserError
from bertjax.common.files import parse_texts
from bertjax.data.batch import Batch
from bertjax.inference.predictor import check_numbers, padded_batch, words_model
from bertjax.interop.pretrained import Pretrained, tokenizer_of
from bertjax.models import families
from bertjax.models.family import Recurrent
from bertjax.models.heads import BertForMaskedLM
from bertjax.text.tokenizer import Tokenizer

BATCH_TOKENS, MAX_ROWS = 8192, 512  # sizes of a batch
TEXTS_AT_ONCE = 1024  # the number of texts whose rows are sorted by length together
LENGTHS = 8  # Rows are padded to multiples of this length.
# The names of the fields of a pair in a .jsonl file: the name in bertjax, and the name in BLiMP (Warstadt et al. 2020).
GOOD, BAD = ("good", "sentence_good"), ("bad", "sentence_bad")
FIELDS = (GOOD, BAD, ("paradigm", "UID"), ("phenomenon", "linguistics_term"))


class PredictedRow(NamedTuple):
    """A row of a batch.

    Attributes:
      text: the number of the text, counted from 0.
      ids: the ids of the tokens of the row.
      positions: the positions in the row at which the model predicts.
      words: the ids of the predicted tokens, one for each position.
    """

    text: int
    ids: list[int]
    positions: list[int]
    words: list[int]


class Pair(NamedTuple):
    """A minimal pair.

    Attributes:
      good: the acceptable sentence.
      bad: the unacceptable sentence.
      paradigm: the name of the kind of contrast.
      phenomenon: the name of the group of paradigms.
    """

    good: str
    bad: str
    paradigm: str
    phenomenon: str


def log_likelihoods(
    model: BertForMaskedLM, params: dict, tokenizer: Tokenizer, texts: Iterable[str]
) -> Iterator[float]:
    """Yields the (pseudo-)log-likelihood of each text, in nats: the sum over all tokens except [CLS] and [SEP].

    Raises:
      UserError: for a bidirectional language model, and for a text with more tokens than the model has positions.
    """
    lm_type = families.family_of(model.config).lm_type(model.config)
    if lm_type not in ("masked", "causal", "permuted"):
        raise UserError(
            "likelihoods need a masked, permuted or left-to-right language model; this model is bidirectional"
        )
    remaining = iter(texts)
    while portion := list(itertools.islice(remaining, TEXTS_AT_ONCE)):
        rows = [row for i, text in enumerate(portion) for row in _rows_of(i, text, tokenizer, model.config, lm_type)]
        yield from log_likelihoods_of_rows(model, params, tokenizer, rows, len(portion)).tolist()


def log_likelihoods_of_rows(
    model: BertForMaskedLM, params: dict, tokenizer: Tokenizer, rows: Iterable[PredictedRow], texts: int
) -> np.ndarray:
    """Returns the sum of the log-probabilities of the predicted tokens of each text, in nats.

    Args:
      model: the language model.
      params: the params of the model.
      tokenizer: the tokenizer.
      rows: the rows of all texts.
      texts: the number of texts.

    Returns:
      `[texts]`; 0 for a text without rows.
    """
    sums, longest, segment_length = np.zeros(texts), longest_of(model.config), part_of(model.config)
    for batch in _batches(sorted(rows, key=lambda row: len(row.ids)), longest):
        arrays, positions, words, used = _arrays(batch, tokenizer, longest)
        if segment_length is None or arrays["input_ids"].shape[1] <= segment_length:
            log_probabilities = np.asarray(_log_probabilities(model, params, arrays, positions, words))
        else:
            log_probabilities = _log_probabilities_in_segments(model, params, arrays, words, segment_length)
        check_numbers(log_probabilities)
        np.add.at(sums, [row.text for row in batch], (log_probabilities * used).sum(1)[: len(batch)])
    return sums


def _rows_of(number: int, text: str, tokenizer: Tokenizer, config: Any, lm_type: str) -> Iterator[PredictedRow]:
    ids = tokenizer.framed(tokenizer.encode(text).ids)
    if len(ids) > (longest := longest_of(config)):
        raise UserError(f"{text[:60]!r}... has {len(ids)} tokens, more than the model's {longest} positions")
    places = range(len(tokenizer.begin), len(ids) - len(tokenizer.end))
    if lm_type == "causal":
        yield PredictedRow(number, ids[:-1], [place - 1 for place in places], [ids[place] for place in places])
        return
    for place in places:
        yield PredictedRow(number, [*ids[:place], tokenizer.mask_id, *ids[place + 1 :]], [place], [ids[place]])


def _batches(rows: list[PredictedRow], longest: float) -> Iterator[list[PredictedRow]]:
    """Yields batches of rows, which are sorted by length, with about `BATCH_TOKENS` tokens."""
    batch: list[PredictedRow] = []
    for row in rows:
        length = _padded(len(row.ids), longest)
        if batch and (length != _padded(len(batch[0].ids), longest) or len(batch) >= _rows_for(length)):
            yield batch
            batch = []
        batch.append(row)
    if batch:
        yield batch


def _padded(length: int, longest: float) -> int:
    return int(min(longest, -(-length // LENGTHS) * LENGTHS))


def _rows_for(length: int) -> int:
    return min(MAX_ROWS, max(1, BATCH_TOKENS // length))


def _arrays(
    batch: list[PredictedRow], tokenizer: Tokenizer, longest: float
) -> tuple[Batch, np.ndarray, np.ndarray, np.ndarray]:
    """Returns the inputs of the model, and the positions, words and weights of predictions `[rows, predictions]`."""
    length = _padded(len(batch[0].ids), longest)
    rows, predictions = _rows_for(length), 1 if all(len(row.positions) == 1 for row in batch) else length
    arrays = padded_batch([row.ids for row in batch], tokenizer, rows, length)
    arrays["segments"][:, 0] = 1  # Rows of padding have one visible token.
    positions, words, used = np.zeros((3, rows, predictions), np.int32)
    for i, row in enumerate(batch):
        count = len(row.words)
        words[i, :count], used[i, :count] = row.words, 1
        positions[i, :count], positions[i, count:] = row.positions, max(row.positions, default=0)
    return arrays, positions, words, used


def longest_of(config: Any) -> float:
    """Returns the maximum number of tokens of a text; infinity for a recurrent left-to-right model."""
    return config.max_position_embeddings if part_of(config) is None else math.inf


def part_of(config: Any) -> int | None:
    """Returns the length of the segments of a recurrent left-to-right model; None for other models."""
    family = families.family_of(config)
    return config.memory_length if isinstance(family, Recurrent) and family.lm_type(config) == "causal" else None


@functools.partial(jax.jit, static_argnums=0)
def _log_probabilities(
    model: BertForMaskedLM, params: dict, batch: dict, positions: np.ndarray, words: np.ndarray
) -> jax.Array:
    """Returns the log-probabilities of the words at the positions, `[rows, predictions]`."""
    return _of_words(model, model.apply({"params": params}, **batch, masked_positions=positions), words)


def _log_probabilities_in_segments(
    model: BertForMaskedLM, params: dict, batch: Batch, words: np.ndarray, size: int
) -> np.ndarray:
    """Returns the log-probability of the word after each position, `[rows, length]`, with segments of `size` tokens."""
    segments, config = [], model.config
    rows, length = words.shape
    batch, words = jax.tree.map(lambda x: np.pad(x, ((0, 0), (0, -length % size))), (batch, words))
    family: Any = families.family_of(config)  # `Recurrent`
    memory = family.new_memory(config, rows, model.compute.dtype)
    for start in range(0, length, size):
        segment = {name: x[:, start : start + size] for name, x in batch.items()}
        log_probabilities, memory = _with_memory(model, params, segment, words[:, start : start + size], memory)
        segments.append(np.asarray(log_probabilities))
    return np.concatenate(segments, axis=1)[:, :length]


@functools.partial(jax.jit, static_argnums=0)
def _with_memory(
    model: BertForMaskedLM, params: dict, batch: dict, words: np.ndarray, memory: Any
) -> tuple[jax.Array, Any]:
    """Returns the log-probability of the word after each position of a segment, and the new memory."""
    positions = jnp.broadcast_to(jnp.arange(words.shape[1]), words.shape)
    inputs = dict(**batch, masked_positions=positions, memory=memory)
    logits, memory = model.apply({"params": params}, **inputs, method="predict_with_memory")
    return _of_words(model, logits, words), memory


def _of_words(model: BertForMaskedLM, logits: Any, words: np.ndarray) -> jax.Array:
    logits = logits[..., : model.config.vocab_size].astype(jnp.float32)
    return jnp.take_along_axis(logits, words[..., None], -1)[..., 0] - jax.nn.logsumexp(logits, axis=-1)


def read_pairs(path: str, most: int = 0) -> list[Pair]:
    """Reads the pairs of a .jsonl file, which may be compressed.

    Args:
      path: the file.
      most: the maximum number of pairs of each paradigm; 0 for all pairs.

    Raises:
      UserError: for an invalid pair. The message has the file, the line and the expected value.
    """
    from bertjax.data.corpus.reading import ReadOptions, read_lines  # Imports pyarrow, which training does not need.

    pairs: list[Pair] = []
    counts: collections.Counter[str] = collections.Counter()

    class Stopping(ReadOptions):
        def on_bad(self, fault: str, remedy: str = "") -> None:
            raise UserError(fault)

    for number, line in read_lines(path, Stopping()):
        if not line or not line.strip():
            continue
        try:
            content = parse_texts(line, dict)
        except ValueError:
            raise UserError(f"{path}:{number}: not a JSON object: {line[:60]!r}") from None
        pair = Pair(*(next((content[name] for name in names if name in content), "") for names in FIELDS))
        for names, text in zip((GOOD, BAD), pair):
            if not isinstance(text, str) or not text.strip():
                raise UserError(
                    f'{path}:{number}: needs "{names[0]}" with a sentence; the line has {", ".join(content)}'
                )
        counts[str(pair.paradigm)] += 1
        if not most or counts[str(pair.paradigm)] <= most:
            pairs.append(pair._replace(paradigm=str(pair.paradigm), phenomenon=str(pair.phenomenon)))
    if not pairs:
        raise UserError(f"{path}: has no pairs; each line is an object with good and bad")
    return pairs


class PairScores(NamedTuple):
    """The shares, from 0 to 1, of minimal pairs whose acceptable sentence has the higher likelihood.

    Attributes:
      share: the share among all pairs.
      pairs: the number of pairs.
      phenomena: {phenomenon: (share, number of pairs)}.
      paradigms: {paradigm: (share, number of pairs)}.
    """

    share: float
    pairs: int
    phenomena: dict[str, tuple[float, int]]
    paradigms: dict[str, tuple[float, int]]

    def as_json(self) -> str:
        """Returns a JSON object with the shares of all pairs and of the paradigms."""
        paradigms = {name: share for name, (share, _) in self.paradigms.items()}
        return json.dumps({"share": self.share, "pairs": self.pairs, "paradigms": paradigms}, ensure_ascii=False)

    def lines(self) -> Iterator[str]:
        """Yields a line per phenomenon, or per paradigm if there is one phenomenon, and a line for all pairs."""
        groups = self.phenomena if len(self.phenomena) > 1 else self.paradigms
        for name, (share, count) in sorted(groups.items()) if len(groups) > 1 else ():
            yield f"{name:<44} {share:6.1%} of {count:,}"
        yield f"the good sentence is more likely in {self.share:.1%} of {self.pairs:,} pairs (chance: 50 %)"


def score_pairs(source: Pretrained, pairs: list[Pair]) -> PairScores:
    """Compares the likelihoods of minimal pairs. Raises `UserError` for a checkpoint that computes no likelihoods."""
    model, params = words_model(source)
    is_right = compare(model, params, tokenizer_of(source), pairs)
    phenomena, paradigms = (shares(pairs, is_right, by) for by in ("phenomenon", "paradigm"))
    return PairScores(sum(is_right) / len(pairs), len(pairs), phenomena, paradigms)


def compare(model: BertForMaskedLM, params: dict, tokenizer: Tokenizer, pairs: list[Pair]) -> list[bool]:
    """Returns for each pair whether the acceptable sentence has the higher likelihood."""
    texts = (text for pair in pairs for text in (pair.good, pair.bad))
    scores = list(log_likelihoods(model, params, tokenizer, texts))
    return [good > bad for good, bad in zip(scores[::2], scores[1::2])]


def shares(pairs: list[Pair], is_right: list[bool], by: str) -> dict[str, tuple[float, int]]:
    """Returns {name: (share of correct pairs, number of pairs)} by "paradigm" or "phenomenon"."""
    groups: dict[str, list[bool]] = {}
    for pair, right in zip(pairs, is_right):
        groups.setdefault(getattr(pair, by), []).append(right)
    return {name: (float(np.mean(group)), len(group)) for name, group in groups.items()}
