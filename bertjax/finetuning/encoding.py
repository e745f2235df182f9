"""Encodes texts, or pairs of texts, as inputs of BERT."""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from bertjax.text.tokenizer import Tokenizer


class EncodedPairs(NamedTuple):
    """Encoded texts, or pairs of texts.

    Attributes:
      input_ids: the ids of each text.
      token_types: the token types of each text.
      lost: the number of tokens of each text that were cut off.
    """

    input_ids: list[np.ndarray]
    token_types: list[np.ndarray]
    lost: list[int]


class EncodedWindows(NamedTuple):
    """Encoded windows of texts.

    Attributes:
      input_ids: the ids of each window.
      token_types: the token types of each window.
      owners: the index of the text of each window.
      lost: the number of tokens that were cut off from the first text of each pair.
    """

    input_ids: list[np.ndarray]
    token_types: list[np.ndarray]
    owners: np.ndarray
    lost: list[int]


def encode_pairs(
    tokenizer: Tokenizer,
    firsts: list[str],
    seconds: list[str] | None,
    max_seq_length: int,
    longer_keeps_more: bool = False,
) -> EncodedPairs:
    """Encodes `[CLS] A [SEP]` or `[CLS] A [SEP] B [SEP]`, with the special tokens of the tokenizer.

    A pair that is too long repeatedly loses the last token of the longer side (run_classifier._truncate_seq_pair).

    Args:
      tokenizer: the tokenizer.
      firsts: the texts A.
      seconds: the texts B; None without pairs.
      max_seq_length: the maximum number of tokens.
      longer_keeps_more: which side keeps one token more if both sides are truncated and an odd number of tokens is
        left. False: the first side. True: the longer side, as in the tokenizers library; of two equally long sides, the
        second side.
    """
    is_pair = seconds is not None
    encoded_firsts = tokenizer.encode_ids(firsts)
    encoded_seconds = tokenizer.encode_ids(seconds) if seconds is not None else [[] for _ in firsts]
    room = max_seq_length - len(tokenizer.framed((), () if is_pair else None))
    input_ids, token_types, lost = [], [], []
    for a, b in zip(encoded_firsts, encoded_seconds):
        lost.append(max(0, len(a) + len(b) - room))
        kept, of_pair = truncate_pair(a, b, room, longer_keeps_more)
        ids = tokenizer.framed(kept, of_pair if is_pair else None)
        of_second = len(of_pair) + len(tokenizer.end) if is_pair else 0
        input_ids.append(np.array(ids, np.int32))
        token_types.append(tokenizer.token_types(len(ids), of_second))
    return EncodedPairs(input_ids, token_types, lost)


def truncate_pair(
    first: Sequence[int], second: Sequence[int], room: int, longer_keeps_more: bool = False
) -> tuple[Sequence[int], Sequence[int]]:
    """Returns the ids of a pair of texts, truncated to `room` tokens in total, see `encode_pairs`."""
    if len(first) + len(second) <= room:
        return first, second
    half = room // 2 if longer_keeps_more and len(first) <= len(second) else room - room // 2
    kept = max(room - len(second), min(len(first), half))
    return first[:kept], second[: room - min(kept, len(first))]


def encode_windows(
    tokenizer: Tokenizer, firsts: list[str], seconds: list[str] | None, max_seq_length: int, stride: int
) -> EncodedWindows:
    """Encodes texts as `encode_pairs` does, but divides a long text into windows instead of truncating it.

    Only the second text of a pair is divided. Each window begins with the first text. A long first text is truncated to
    half of the window, or to the tokens that a short second text leaves.

    Args:
      tokenizer: the tokenizer.
      firsts: the texts, or the first text of each pair.
      seconds: the second text of each pair; None without pairs.
      max_seq_length: the maximum number of tokens of a window.
      stride: the number of tokens from the beginning of a window to the beginning of the next window.
    """
    is_pair = seconds is not None
    room = max_seq_length - len(tokenizer.framed((), () if is_pair else None))
    prefixes = tokenizer.encode_ids(firsts) if is_pair else [[] for _ in firsts]
    divided = tokenizer.encode_ids(firsts if seconds is None else seconds)
    input_ids, token_types, owners, lost = [], [], [], []
    for number, (first, ids) in enumerate(zip(prefixes, divided)):
        windows = pair_windows(first, ids, room, stride)
        lost.append(len(first) - len(windows[0][0]))
        for kept, window in windows:
            framed = tokenizer.framed(kept, window) if is_pair else tokenizer.framed(window)
            of_second = len(window) + len(tokenizer.end) if is_pair else 0
            input_ids.append(np.array(framed, np.int32))
            token_types.append(tokenizer.token_types(len(framed), of_second))
            owners.append(number)
    return EncodedWindows(input_ids, token_types, np.array(owners), lost)


def pair_windows(
    first: Sequence[int], second: Sequence[int], room: int, stride: int
) -> list[tuple[Sequence[int], Sequence[int]]]:
    """Returns the ids of the first text, truncated to half of the room, with each window of the second text.

    Args:
      first: the ids of the first text; empty without pairs.
      second: the ids of the text that is divided.
      room: the number of tokens of both texts of a window.
      stride: the number of tokens from the beginning of a window to the beginning of the next window.
    """
    kept = first[: max(room // 2, room - len(second))]
    size = room - len(kept)
    return [(kept, second[start : start + size]) for start in window_starts(len(second), size, stride)]


def window_starts(tokens: int, room: int, stride: int) -> list[int]:
    """Returns the index of the first token of each window of a text. A window has at most `room` tokens."""
    starts = [0]
    while starts[-1] + room < tokens:
        starts.append(starts[-1] + min(room, stride))
    return starts
