"""Sequences as rows of an array: made from tokens, kept on disk between the passes, turned into records."""

import random

import numpy as np

from bertjax.data.batches.masking import draw, mask_tokens, rules_of
from bertjax.data.preparation.instances import Tokens, make_instances, of_documents, separated
from bertjax.data.preparation.job import Job, RecordShape
from bertjax.data.records.layouts import number_type
from bertjax.text.tokenizer import Tokenizer


def row_type(shape: RecordShape, job: Job) -> np.dtype:
    """The format of a sequence; omits what can be derived, and with dynamic masking what is masked."""
    number = number_type(shape.length, job.vocab_size)
    fields = [
        ("ids", number, (shape.length,)),
        ("size", number),  # number of tokens
        ("first_size", number),  # tokens in [CLS] A [SEP], or in A [SEP]
        ("label", number),  # see `instances.Instance`
    ]
    if job.data["masking"] == "static":
        fields += [
            ("positions", number, (shape.predictions,)),
            ("labels", number, (shape.predictions,)),
            ("masked", number),  # number of predictions
        ]
    return np.dtype(fields)


def make_rows(
    tokens: Tokens,
    documents: np.ndarray,
    shape: RecordShape,
    job: Job,
    tokenizer: Tokenizer,
    seed: list[int],
    in_rows: np.ndarray | None = None,
) -> np.ndarray:
    """Makes the sequences that cover some documents once, masked unless masking is dynamic.

    `in_rows`: `[tokens]` booleans, which become True of the tokens that a sequence has.
    """
    rng = np.random.default_rng(seed)
    chance, data = random.Random(rng.bytes(16)), job.data
    places = np.arange(len(tokens.ids))  # of the tokens below among all tokens; -1 of special pieces
    if data["next_sentence"] == "none":
        chosen = np.repeat(np.isin(np.arange(len(tokens.documents) - 1), documents), _sizes_of_documents(tokens))
        places, tokens = places[chosen], of_documents(tokens, documents)
        places = separated(tokens._replace(ids=places), -1).ids
        tokens = separated(tokens, tokenizer.sep_id)
    if data["stream"]:
        rows = _cut(_framed(tokens, tokenizer), row_type(shape, job))
        _mark(in_rows, _framed(tokens._replace(ids=places), tokenizer, -1)[: rows["ids"].size])
        return rows
    instances = make_instances(
        tokens,
        documents.tolist(),
        data["next_sentence"],
        chance,
        length=shape.length,
        short_seq_prob=data["short_seq_prob"],
    )
    instances = np.array(list(instances), np.int32).reshape(-1, 5)
    _mark(in_rows, places[_are_in_spans(instances[:, :4].reshape(-1, 2), len(places))])
    ids, sizes = assemble(tokens.ids, instances[:, :4], shape.length, tokenizer)
    rows = np.empty(len(instances), row_type(shape, job))
    if data["masking"] == "static":
        rules = rules_of(data, tokenizer, shape.predictions)
        ids, rows["positions"], rows["labels"], rows["masked"] = mask_tokens(
            ids, sizes, draw(rng, len(ids), shape.length, rules), rules
        )
    rows["ids"], rows["size"] = ids, sizes
    rows["first_size"] = len(tokenizer.begin) + instances[:, 1] + 1
    rows["label"] = instances[:, 4]
    return rows


def _sizes_of_documents(tokens: Tokens) -> np.ndarray:
    return np.diff(np.array(tokens.starts)[np.array(tokens.documents)])


def _are_in_spans(spans: np.ndarray, size: int) -> np.ndarray:
    """`[size]` booleans: whether a place is in one of the spans `[spans, 2]`, of start and size."""
    starts, ends = spans[:, 0], spans.sum(1)
    return np.cumsum(np.bincount(starts, minlength=size + 1) - np.bincount(ends, minlength=size + 1))[:size] > 0


def _mark(marks: np.ndarray | None, places: np.ndarray) -> None:
    if marks is not None:
        marks[places[places >= 0]] = True


def _framed(tokens: Tokens, tokenizer: Tokenizer, cls_id: int | None = None) -> np.ndarray:
    """Returns the tokens with [CLS] where texts that are scored or continued have it: before each document, or last.

    `cls_id`: stands for [CLS].
    """
    edges = np.array(tokens.starts)[np.array(tokens.documents)]
    places, added = (edges[1:], (tokenizer.cls_id,)) if tokenizer.ends_with_cls else (edges[:-1], tokenizer.begin)
    added = added if cls_id is None else (cls_id,) * len(added)
    return np.insert(tokens.ids, np.repeat(places, len(added)), added * len(places))


def _cut(ids: np.ndarray, row: np.dtype) -> np.ndarray:
    """Cuts tokens into sequences as long as they may be, all of them tokens; leaves out what remains at the end."""
    length = row["ids"].shape[0]
    rows = np.zeros(len(ids) // length, row)
    rows["ids"] = ids[: len(rows) * length].reshape(-1, length)
    rows["size"] = rows["first_size"] = length
    return rows


def assemble(tokens: np.ndarray, spans: np.ndarray, length: int, tokenizer: Tokenizer):
    """Copies segments A and B out of `tokens`, as [CLS] A [SEP] B [SEP] and padding; without a B, as [CLS] A [SEP]. The
    [CLS] comes last if that is where the tokenizer has it.

    Args:
      tokens: `[tokens]`.
      spans: `[rows, 4]`: start and size of A, start and size of B.

    Returns:
      ids `[rows, length]`, and the number of tokens of each row `[rows]`.
    """
    first_start, first_size, second_start, second_size = spans.T[..., None]  # [rows, 1] each
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
