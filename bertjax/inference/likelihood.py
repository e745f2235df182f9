"""Likelihoods of texts, and minimal pairs: how often a model finds the better of two sentences more likely.

A left-to-right model gives each token's probability after those before it; one with a memory reads a text that is
longer than the memory in parts of its length. Of a model that fills masks, each token is masked alone: the
pseudo-log-likelihood (Salazar et al. 2020, section 2).
"""

import collections
import functools
import itertools
import math
from collections.abc import Iterable, Iterator
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from bertjax.common.errors import UserError
from bertjax.common.files import parse_texts
from bertjax.inference.predictor import check_numbers
from bertjax.models import families
from bertjax.models.family import Recurrent
from bertjax.models.heads import BertForMaskedLM
from bertjax.text.tokenizer import Tokenizer

BATCH_TOKENS, MOST_ROWS = 8192, 512
TOGETHER = 1024  # texts whose rows are sorted by length
LENGTHS = 8  # rows are padded to multiples of this
# Names of a pair's fields, ours and those of BLiMP's own files (Warstadt et al. 2020).
GOOD, BAD = ("good", "sentence_good"), ("bad", "sentence_bad")
FIELDS = (GOOD, BAD, ("paradigm", "UID"), ("phenomenon", "linguistics_term"))


class PredictedRow(NamedTuple):
    """A row of a batch: `words` are predicted at `positions` of `ids`, for the text with this number."""

    text: int
    ids: list[int]
    positions: list[int]
    words: list[int]


class Pair(NamedTuple):
    good: str
    bad: str
    paradigm: str
    phenomenon: str


def log_likelihoods(model: BertForMaskedLM, params, tokenizer: Tokenizer, texts: Iterable[str]) -> Iterator[float]:
    """Yields the (pseudo-)log-likelihood of each text, the sum over its tokens without [CLS] and [SEP], in nats.

    Raises `UserError` for a model that predicts both neighbours, and for a text that it has no room for.
    """
    learnt = families.family_of(model.config).lm_type(model.config)
    if learnt not in ("masked", "causal", "permuted"):
        raise UserError("likelihoods need a model that fills masks, or that predicts next words; this one does neither")
    numbered = iter(texts)
    while some := list(itertools.islice(numbered, TOGETHER)):
        rows = [row for i, text in enumerate(some) for row in _rows_of(i, text, tokenizer, model.config, learnt)]
        yield from log_likelihoods_of_rows(model, params, tokenizer, rows, len(some)).tolist()


def log_likelihoods_of_rows(
    model: BertForMaskedLM, params, tokenizer: Tokenizer, rows: Iterable[PredictedRow], texts: int
) -> np.ndarray:
    """Returns the sum of the log-probabilities of each text's words, over all of its rows: `[texts]`, in nats."""
    found, longest, part = np.zeros(texts), longest_of(model.config), part_of(model.config)
    for batch in _batches(sorted(rows, key=lambda row: len(row.ids)), longest):
        arrays, positions, words, used = _arrays(batch, tokenizer, longest)
        is_whole = part is None or arrays["input_ids"].shape[1] <= part
        compute = _log_probabilities if is_whole else _log_probabilities_in_parts
        each = np.asarray(compute(model, params, arrays, positions, words))
        check_numbers(each)
        np.add.at(found, [row.text for row in batch], (each * used).sum(1)[: len(batch)])
    return found


def _rows_of(number: int, text: str, tokenizer: Tokenizer, config, learnt: str) -> Iterator[PredictedRow]:
    ids = tokenizer.framed(tokenizer.encode(text).ids)
    if len(ids) > (most := longest_of(config)):
        raise UserError(f"{text[:60]!r}... has {len(ids)} tokens, more than the model's {most} positions")
    places = range(len(tokenizer.begin), len(ids) - len(tokenizer.end))
    if learnt == "causal":
        yield PredictedRow(number, ids[:-1], [place - 1 for place in places], [ids[place] for place in places])
        return
    for place in places:
        yield PredictedRow(number, [*ids[:place], tokenizer.mask_id, *ids[place + 1 :]], [place], [ids[place]])


def _batches(rows: list[PredictedRow], longest: int) -> Iterator[list[PredictedRow]]:
    """Yields rows, which are sorted by length, with about as many tokens each time."""
    batch: list[PredictedRow] = []
    for row in rows:
        length = _padded(len(row.ids), longest)
        if batch and (length != _padded(len(batch[0].ids), longest) or len(batch) >= _rows_for(length)):
            yield batch
            batch = []
        batch.append(row)
    if batch:
        yield batch


def _padded(length: int, longest: int) -> int:
    return min(longest, -(-length // LENGTHS) * LENGTHS)


def _rows_for(length: int) -> int:
    return min(MOST_ROWS, max(1, BATCH_TOKENS // length))


def _arrays(batch: list[PredictedRow], tokenizer: Tokenizer, longest: int):
    """Returns the model's inputs, positions, words, and which of these there are, with the rows of every such batch."""
    length = _padded(len(batch[0].ids), longest)
    rows, most = _rows_for(length), 1 if all(len(row.positions) == 1 for row in batch) else length
    ids = np.full((rows, length), tokenizer.pad_id, np.int32)
    segments, types = np.zeros((2, *ids.shape), np.int32)
    positions, words, used = np.zeros((3, rows, most), np.int32)
    segments[:, 0] = 1  # rows that are filled up
    for i, row in enumerate(batch):
        size, count = len(row.ids), len(row.words)
        ids[i, :size], segments[i, :size], types[i, :size] = row.ids, 1, tokenizer.token_types(size)
        words[i, :count], used[i, :count] = row.words, 1
        positions[i, :count], positions[i, count:] = row.positions, max(row.positions, default=0)
    return dict(input_ids=ids, segments=segments, token_types=types), positions, words, used


def longest_of(config) -> float:
    """Returns how many tokens a text may have."""
    return config.max_position_embeddings if part_of(config) is None else math.inf


def part_of(config) -> int | None:
    """Returns how many tokens of a longer text a left-to-right model with a memory reads at once; None for others."""
    family = families.family_of(config)
    return config.memory_length if isinstance(family, Recurrent) and family.lm_type(config) == "causal" else None


@functools.partial(jax.jit, static_argnums=0)
def _log_probabilities(model: BertForMaskedLM, params, batch, positions, words):
    """`[rows, predictions]`: log-probabilities of the words at the positions."""
    return _of_words(model, model.apply({"params": params}, **batch, masked_positions=positions), words)


def _log_probabilities_in_parts(model: BertForMaskedLM, params, batch, positions, words):
    """As `_log_probabilities`, of a model that predicts the word after each position, a part after the other."""
    del positions
    config, part, found = model.config, part_of(model.config), []
    rows, length = words.shape
    batch, words = jax.tree.map(lambda x: np.pad(x, ((0, 0), (0, -length % part))), (batch, words))
    memory = families.family_of(config).new_memory(config, rows, model.compute.dtype)
    for start in range(0, length, part):
        own = {name: x[:, start : start + part] for name, x in batch.items()}
        each, memory = _remembering(model, params, own, words[:, start : start + part], memory)
        found.append(np.asarray(each))
    return np.concatenate(found, axis=1)[:, :length]


@functools.partial(jax.jit, static_argnums=0)
def _remembering(model: BertForMaskedLM, params, batch, words, memory):
    """The log-probability of the word after each position, and what the memory then is."""
    positions = jnp.broadcast_to(jnp.arange(words.shape[1]), words.shape)
    given = dict(**batch, masked_positions=positions, memory=memory)
    logits, memory = model.apply({"params": params}, **given, method="predict_with_memory")
    return _of_words(model, logits, words), memory


def _of_words(model: BertForMaskedLM, logits, words):
    logits = logits[..., : model.config.vocab_size].astype(jnp.float32)
    return jnp.take_along_axis(logits, words[..., None], -1)[..., 0] - jax.nn.logsumexp(logits, axis=-1)


def read_pairs(path: str, most: int = 0) -> list[Pair]:
    """Reads the pairs of a .jsonl file, which may be compressed; the first `most` of each paradigm, or all.

    Raises `UserError` with file and line for what is no pair.
    """
    from bertjax.data.corpus.reading import ReadOptions, read_lines  # with pyarrow, which training does without

    found, counts = [], collections.Counter()

    def stop(fault: str) -> None:
        raise UserError(fault)

    for number, line in read_lines(path, ReadOptions(on_bad=stop)):
        if not line or not line.strip():
            continue
        try:
            content = parse_texts(line, dict)
        except ValueError:
            raise UserError(f"{path}:{number}: not a JSON object: {line[:60]!r}") from None
        pair = Pair(*(next((content[name] for name in names if name in content), "") for names in FIELDS))
        for names, text in zip((GOOD, BAD), pair):
            if not isinstance(text, str) or not text.strip():
                raise UserError(f'{path}:{number}: needs "{names[0]}" with a sentence; it has {", ".join(content)}')
        counts[str(pair.paradigm)] += 1
        if not most or counts[str(pair.paradigm)] <= most:
            found.append(pair._replace(paradigm=str(pair.paradigm), phenomenon=str(pair.phenomenon)))
    if not found:
        raise UserError(f"{path}: has no pairs; each line is an object with good and bad")
    return found


def compare(model: BertForMaskedLM, params, tokenizer: Tokenizer, pairs: list[Pair]) -> list[bool]:
    """Returns of each pair whether its good text has the higher likelihood."""
    texts = (text for pair in pairs for text in (pair.good, pair.bad))
    found = list(log_likelihoods(model, params, tokenizer, texts))
    return [good > bad for good, bad in zip(found[::2], found[1::2])]


def shares(pairs: list[Pair], is_right: list[bool], by: str) -> dict[str, tuple[float, int]]:
    """Returns {name: (share of pairs that are right, number of pairs)} by "paradigm" or "phenomenon"."""
    groups: dict[str, list[bool]] = {}
    for pair, right in zip(pairs, is_right):
        groups.setdefault(getattr(pair, by), []).append(right)
    return {name: (float(np.mean(group)), len(group)) for name, group in groups.items()}
