"""Masked sequences as rows of an array: made from tokens, kept on disk between the passes, turned into records."""

import functools
import random

import numpy as np

from bertjax.data.instances import Tokens, make_pairs
from bertjax.data.job import Job, Stage
from bertjax.data.masking import draw, mask_tokens, rules_of
from bertjax.text.tokenizer import Tokenizer


@functools.cache
def row_type(stage: Stage, vocab_size: int) -> np.dtype:
    """The format of a masked sequence; omits what can be derived."""
    number = np.uint16 if max(stage.length, vocab_size) <= 1 << 16 else np.int32
    return np.dtype(
        [
            ("ids", number, (stage.length,)),
            ("size", number),  # number of tokens
            ("first_size", number),  # tokens in [CLS] A [SEP]
            ("positions", number, (stage.predictions,)),
            ("labels", number, (stage.predictions,)),
            ("masked", number),  # number of predictions
            ("is_random_next", number),
        ]
    )


def make_rows(tokens: Tokens, stage: Stage, job: Job, tokenizer: Tokenizer, seed: list[int]) -> np.ndarray:
    """Makes and masks the sequences that cover some documents once."""
    rng = np.random.default_rng(seed)
    chance = random.Random(rng.bytes(16))
    pairs = [
        pair
        for index in range(len(tokens.documents) - 1)
        for pair in make_pairs(tokens, index, chance, length=stage.length, short_seq_prob=job.data["short_seq_prob"])
    ]
    pairs = np.array(pairs, np.int32).reshape(-1, 5)
    ids, sizes = assemble(tokens.ids, pairs[:, :4], stage.length, tokenizer)
    rules = rules_of(job.data, tokenizer, stage.predictions)
    masking = mask_tokens(ids, sizes, draw(rng, len(ids), stage.length, rules), rules)
    rows = np.empty(len(pairs), row_type(stage, job.vocab_size))
    rows["ids"], rows["size"], rows["first_size"] = masking.ids, sizes, pairs[:, 1] + 2
    rows["positions"], rows["labels"], rows["masked"] = masking.positions, masking.labels, masking.counts
    rows["is_random_next"] = pairs[:, 4]
    return rows


def assemble(tokens: np.ndarray, spans: np.ndarray, length: int, tokenizer: Tokenizer):
    """Copies segments A and B out of `tokens`, as [CLS] A [SEP] B [SEP] and padding.

    Args:
      tokens: `[tokens]`.
      spans: `[rows, 4]`: start and size of A, start and size of B.

    Returns:
      ids `[rows, length]`, and the number of tokens of each row `[rows]`.
    """
    first_start, first_size, second_start, second_size = spans.T[..., None]  # [rows, 1] each
    place = np.arange(length, dtype=np.int32)
    first_end, end = first_size + 1, first_size + second_size + 2  # of the [SEP]s
    source = np.where(place < first_end, first_start + place - 1, second_start + place - first_end - 1)
    ids = tokens[np.clip(source, 0, len(tokens) - 1)]
    ids[place > end] = tokenizer.pad_id
    separates = (place == first_end) | (place == end)
    ids[separates] = tokenizer.sep_id
    ids[:, 0] = tokenizer.cls_id
    return ids, end[:, 0] + 1


def features_of(rows: np.ndarray) -> dict[str, np.ndarray]:
    """Returns the features of records `[rows, size]`, as `records.features` names them."""
    token, prediction = np.arange(rows["ids"].shape[1]), np.arange(rows["positions"].shape[1])
    inside = token < rows["size"][:, None]
    return {
        "input_ids": rows["ids"],
        "input_mask": inside,
        "segment_ids": inside & (token >= rows["first_size"][:, None]),
        "masked_lm_positions": rows["positions"],
        "masked_lm_ids": rows["labels"],
        "masked_lm_weights": (prediction < rows["masked"][:, None]).astype(np.float32),
        "next_sentence_labels": rows["is_random_next"][:, None],
    }
