"""Encodes texts, or pairs of texts, as inputs of BERT."""

import numpy as np


def encode_pairs(
    tokenizer,
    firsts: list[str],
    seconds: list[str] | None,
    max_seq_length: int,
    longer_keeps_more: bool = False,
):
    """Encodes `[CLS] A [SEP]` or `[CLS] A [SEP] B [SEP]`; returns ids, token types, and the number of tokens cut off.

    The tokenizer decides which special pieces surround the texts. A pair that is too long loses the last token of its
    longer side, repeatedly (run_classifier._truncate_seq_pair). If both sides are cut and the room is odd, the first
    side keeps one token more. With `longer_keeps_more`, the longer side keeps it, or the second of two equal sides, as
    in the tokenizers library.
    """
    encoded = [tokenizer.encode_ids(firsts), tokenizer.encode_ids(seconds) if seconds is not None else None]
    is_pair = seconds is not None
    room = max_seq_length - len(tokenizer.framed((), () if is_pair else None))
    input_ids, token_types, lost = [], [], []
    for index, a in enumerate(encoded[0]):
        b = encoded[1][index] if is_pair else []
        lost.append(max(0, len(a) + len(b) - room))
        if lost[-1]:
            half = room // 2 if longer_keeps_more and len(a) <= len(b) else room - room // 2
            keep_a = max(room - len(b), min(len(a), half))
            a, b = a[:keep_a], b[: room - min(keep_a, len(a))]
        ids = tokenizer.framed(a, b if is_pair else None)
        of_second = len(b) + len(tokenizer.end) if is_pair else 0
        input_ids.append(np.array(ids, np.int32))
        token_types.append(tokenizer.token_types(len(ids), of_second))
    return input_ids, token_types, lost


def encode_windows(tokenizer, firsts: list[str], seconds: list[str] | None, max_seq_length: int, stride: int):
    """Encodes texts as `encode_pairs`, but none is truncated: a long one is cut into windows that begin `stride` tokens
    after each other.

    Of a pair it is the second text that is cut, and all windows have the first one, or its beginning: half of the room.

    Returns ids, token types, the number of the text that each window is of, and the number of tokens that each first
    text loses.
    """
    is_pair = seconds is not None
    room = max_seq_length - len(tokenizer.framed((), () if is_pair else None))
    asked = tokenizer.encode_ids(firsts) if is_pair else [[] for _ in firsts]
    long = tokenizer.encode_ids(seconds if is_pair else firsts)
    input_ids, token_types, owners, lost = [], [], [], []
    for number, (first, ids) in enumerate(zip(asked, long)):
        kept = first[: max(room // 2, room - len(ids))]
        lost.append(len(first) - len(kept))
        for start in window_starts(len(ids), room - len(kept), stride):
            window = ids[start : start + room - len(kept)]
            framed = tokenizer.framed(kept, window) if is_pair else tokenizer.framed(window)
            of_second = len(window) + len(tokenizer.end) if is_pair else 0
            input_ids.append(np.array(framed, np.int32))
            token_types.append(tokenizer.token_types(len(framed), of_second))
            owners.append(number)
    return input_ids, token_types, np.array(owners), lost


def window_starts(tokens: int, room: int, stride: int) -> list[int]:
    """Returns the first tokens of the windows of a text, which have at most `room` tokens each."""
    starts = [0]
    while starts[-1] + room < tokens:
        starts.append(starts[-1] + min(room, stride))
    return starts
