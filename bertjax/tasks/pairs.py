"""Encodes texts, or pairs of texts, as inputs of BERT."""

import numpy as np


def encode_pairs(tokenizer, firsts: list[str], seconds: list[str] | None, max_seq_length: int):
    """Encodes `[CLS] A [SEP]` or `[CLS] A [SEP] B [SEP]`; returns ids, token types, and whether each was truncated.

    What surrounds the texts is as the tokenizer says. A pair that is too long loses the last token of its longer side,
    repeatedly (run_classifier._truncate_seq_pair).
    """
    encoded = [tokenizer.encode_ids(firsts), tokenizer.encode_ids(seconds) if seconds is not None else None]
    is_pair = seconds is not None
    room = max_seq_length - len(tokenizer.framed((), () if is_pair else None))
    input_ids, token_types, cut = [], [], []
    for index, a in enumerate(encoded[0]):
        b = encoded[1][index] if is_pair else []
        cut.append(len(a) + len(b) > room)
        if cut[-1]:
            keep_a = max(room - len(b), min(len(a), room - room // 2))  # b is cut first on a tie
            a, b = a[:keep_a], b[: room - min(keep_a, len(a))]
        ids = tokenizer.framed(a, b if is_pair else None)
        of_second = len(b) + len(tokenizer.end) if is_pair else 0
        input_ids.append(np.array(ids, np.int32))
        token_types.append(np.repeat(np.array([0, 1], np.int32), [len(ids) - of_second, of_second]))
    return input_ids, token_types, cut
