"""Texts, or pairs of texts, as BERT reads them."""

import numpy as np


def encode_pairs(tokenizer, firsts: list[str], seconds: list[str] | None, max_seq_length: int):
    """`[CLS] A [SEP]` or `[CLS] A [SEP] B [SEP]`: ids, token types, and booleans: cut to `max_seq_length`.

    Of what is too long the longer side loses its last tokens, one by one (run_classifier._truncate_seq_pair).
    """
    encoded = [tokenizer.encode_ids(firsts), tokenizer.encode_ids(seconds) if seconds is not None else None]
    input_ids, token_types, cut = [], [], []
    for number, a in enumerate(encoded[0]):
        b = encoded[1][number] if encoded[1] is not None else []
        room = max_seq_length - (3 if encoded[1] is not None else 2)
        cut.append(len(a) + len(b) > room)
        if cut[-1]:
            keep_a = max(room - len(b), min(len(a), room - room // 2))  # b is cut first where both are of one length
            a, b = a[:keep_a], b[: room - min(keep_a, len(a))]
        ids = [tokenizer.cls_id, *a, tokenizer.sep_id]
        types = [0] * len(ids)
        if encoded[1] is not None:
            ids += [*b, tokenizer.sep_id]
            types += [1] * (len(b) + 1)
        input_ids.append(np.array(ids, np.int32))
        token_types.append(np.array(types, np.int32))
    return input_ids, token_types, cut
