"""Encodes texts, or pairs of texts, as inputs of BERT."""

import numpy as np


def encode_pairs(tokenizer, firsts: list[str], seconds: list[str] | None, max_seq_length: int):
    """Encodes `[CLS] A [SEP]` or `[CLS] A [SEP] B [SEP]`; returns ids, token types, and whether each was truncated.

    There are as many [SEP] before B as the tokenizer says. A pair that is too long loses the last token of its longer
    side, repeatedly (run_classifier._truncate_seq_pair).
    """
    encoded = [tokenizer.encode_ids(firsts), tokenizer.encode_ids(seconds) if seconds is not None else None]
    is_pair = seconds is not None
    separators = [tokenizer.sep_id] * (tokenizer.separators if is_pair else 1)
    input_ids, token_types, cut = [], [], []
    for index, a in enumerate(encoded[0]):
        b = encoded[1][index] if is_pair else []
        room = max_seq_length - 1 - len(separators) - is_pair
        cut.append(len(a) + len(b) > room)
        if cut[-1]:
            keep_a = max(room - len(b), min(len(a), room - room // 2))  # b is cut first on a tie
            a, b = a[:keep_a], b[: room - min(keep_a, len(a))]
        ids = [tokenizer.cls_id, *a, *separators]
        types = [0] * len(ids)
        if is_pair:
            ids += [*b, tokenizer.sep_id]
            types += [1] * (len(b) + 1)
        input_ids.append(np.array(ids, np.int32))
        token_types.append(np.array(types, np.int32))
    return input_ids, token_types, cut
