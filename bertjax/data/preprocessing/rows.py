"""Sequences as rows of a structured array, the format on disk between the passes of a preparation."""

import random

import numpy as np

from bertjax.data.loading.masking import masking_of
from bertjax.data.preprocessing.job import Job, RecordShape
from bertjax.data.preprocessing.sequences import Tokens, make_instances, of_documents, separated
from bertjax.data.records.layouts import number_type
from bertjax.text.tokenizer import Tokenizer


def row_type(shape: RecordShape, job: Job) -> np.dtype:
    """Returns the type of a sequence, without derived fields and, with dynamic masking, without masked tokens."""
    number = number_type(shape.length, job.vocab_size)
    fields = [
        ("ids", number, (shape.length,)),
        ("size", number),  # number of tokens
        ("first_size", number),  # tokens in [CLS] A [SEP], or in A [SEP]
        ("label", number),  # see `sequences.Instance`
    ]
    if job.data["masking"] == "static":
        fields += [
            ("positions", number, (shape.predictions,)),
            ("labels", number, (shape.predictions,)),
            ("masked", number),  # number of predictions
        ]
    return np.dtype(fields)


def make_rows(
    tokens: Tokens, documents: np.ndarray, shape: RecordShape, job: Job, tokenizer: Tokenizer, seed: list[int]
) -> tuple[np.ndarray, np.ndarray]:
    """Makes the sequences that cover documents once, with masks unless masking is dynamic.

    Args:
      tokens: the tokens of a block.
      documents: the ascending indices of the documents.
      shape: the shape of the sequences.
      job: the preparation.
      tokenizer: the tokenizer.
      seed: the seed of the random generators.

    Returns:
      The sequences, and the ascending places of the tokens that are in no sequence.
    """
    rng = np.random.default_rng(seed)
    python_rng, data, all_tokens = random.Random(rng.bytes(16)), job.data, tokens
    if data["next_sentence"] == "none":
        tokens = separated(of_documents(tokens, documents), tokenizer.sep_id)
    if data["stream"]:
        framed = _framed(tokens, tokenizer)
        rows = _cut(framed, row_type(shape, job))
        rest = np.isin(framed[rows["ids"].size :], (tokenizer.cls_id, tokenizer.sep_id), invert=True).sum()
        size = len(tokens.ids) - len(documents)
        return rows, _places_among_all(np.arange(size - rest, size), all_tokens, documents)
    made = make_instances(
        tokens,
        documents.tolist(),
        data["next_sentence"],
        python_rng,
        length=shape.length,
        short_seq_prob=data["short_seq_prob"],
    )
    instances = np.array(list(made), np.int32).reshape(-1, 5)
    outside = _outside(instances[:, :4].reshape(-1, 2), len(tokens.ids))
    if data["next_sentence"] == "none":
        separators = np.array([tokens.starts[place] for place in tokens.documents[1:]]) - 1
        outside = outside[np.isin(outside, separators, invert=True)]
        outside = _places_among_all(outside - np.searchsorted(separators, outside), all_tokens, documents)
    ids, sizes = assemble(tokens.ids, instances[:, :4], shape.length, tokenizer)
    rows = np.empty(len(instances), row_type(shape, job))
    if data["masking"] == "static":
        masking = masking_of(data, tokenizer, shape.predictions)
        draws = masking.draw(rng, len(ids), shape.length)
        ids, rows["positions"], rows["labels"], rows["masked"] = masking.mask(ids, sizes, draws)
    rows["ids"], rows["size"] = ids, sizes
    rows["first_size"] = len(tokenizer.begin) + instances[:, 1] + 1
    rows["label"] = instances[:, 4]
    return rows, outside


def _outside(spans: np.ndarray, size: int) -> np.ndarray:
    """Returns the places from 0 to `size - 1` outside of all spans (start, size), `[spans, 2]`."""
    spans = spans[np.argsort(spans[:, 0], kind="stable")]
    ends = np.maximum.accumulate(np.append(0, spans.sum(1)))  # maximum end of the earlier spans
    gaps = np.maximum(np.append(spans[:, 0], size) - ends, 0)
    return np.repeat(ends - np.cumsum(gaps) + gaps, gaps) + np.arange(gaps.sum())


def _places_among_all(places: np.ndarray, tokens: Tokens, documents: np.ndarray) -> np.ndarray:
    """Converts unused places among the tokens of some documents to unused places among all tokens of the block."""
    if len(documents) == len(tokens.documents) - 1:
        return places
    edges = np.array([tokens.starts[place] for place in tokens.documents])
    used = np.repeat(np.isin(np.arange(len(edges) - 1), documents), np.diff(edges))
    used[np.flatnonzero(used)[places]] = False
    return np.flatnonzero(~used)


def _framed(tokens: Tokens, tokenizer: Tokenizer) -> np.ndarray:
    """Inserts [CLS], or the special tokens of the tokenizer, before or after each document."""
    edges = np.array(tokens.starts)[np.array(tokens.documents)]
    places, added = (edges[1:], (tokenizer.cls_id,)) if tokenizer.ends_with_cls else (edges[:-1], tokenizer.begin)
    return np.insert(tokens.ids, np.repeat(places, len(added)), added * len(places))


def _cut(ids: np.ndarray, row: np.dtype) -> np.ndarray:
    """Cuts tokens into sequences of the full length; omits the remaining tokens at the end."""
    length = row["ids"].shape[0]
    rows = np.zeros(len(ids) // length, row)
    rows["ids"] = ids[: len(rows) * length].reshape(-1, length)
    rows["size"] = rows["first_size"] = length
    return rows


def assemble(tokens: np.ndarray, spans: np.ndarray, length: int, tokenizer: Tokenizer) -> tuple[np.ndarray, np.ndarray]:
    """Makes rows [CLS] A [SEP] B [SEP] or [CLS] A [SEP], with padding. Some tokenizers have the [CLS] at the end.

    Args:
      tokens: `[tokens]`.
      spans: `[rows, 4]`: start and size of A, start and size of B.
      length: the length of the rows.
      tokenizer: the tokenizer.

    Returns:
      ids `[rows, length]`, and the number of tokens of each row `[rows]`.
    """
    first_start, first_size, second_start, second_size = spans.T[..., None]  # arrays `[rows, 1]`
    place = np.arange(length, dtype=np.int32)
    begin = len(tokenizer.begin)
    first_end = begin + first_size  # `first_end` and `end` are the places of the [SEP]s
    end = np.where(second_size, first_end + second_size + 1, first_end)
    source = np.where(place < first_end, first_start + place - begin, second_start + place - first_end - 1)
    ids = tokens[np.clip(source, 0, len(tokens) - 1)]
    ids[place > end] = tokenizer.pad_id
    ids[(place == first_end) | (place == end)] = tokenizer.sep_id
    sizes = end[:, 0] + 1 + tokenizer.ends_with_cls
    ids[np.arange(len(ids)), tokenizer.cls_place(sizes)] = tokenizer.cls_id
    return ids, sizes
