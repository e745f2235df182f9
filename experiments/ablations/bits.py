"""Bits per byte of masked words: python -m experiments.ablations.bits --checkpoint=PATH --texts=A.txt.xz,B.txt.xz

So that models with different vocabularies can be compared: whatever the model, the same 15 % of the words between
spaces are hidden, all pieces of each, and what it takes to name these pieces is divided by the bytes of these words.
How many pieces a word has can be seen. Prints one JSON object.
"""

import json
import re
from collections.abc import Iterable, Iterator

import numpy as np
from absl import flags

from bertjax import command

SHARE, SEED = 0.15, 0
WINDOW_BYTES = 96  # the longest window; most have fewer than 30 pieces of a vocabulary of 8,192
MOST_WINDOWS = 4000  # from a file
# Words that are hidden: every vocabulary has their letters.
PLAIN = re.compile(r"[A-Za-z0-9.,;:'()!?-]{1,40}")

_CHECKPOINT = command.define_checkpoint_flag()
_TEXTS = flags.DEFINE_list("texts", None, "Files with held-out text, a paragraph a line.")
_LENGTH = flags.DEFINE_integer("length", 32, "Tokens of the longest sequence; longer windows are halved.")
flags.mark_flags_as_required(["checkpoint", "texts"])


def windows(lines: Iterable[str], most: int) -> list[str]:
    """Returns some windows of a text, at random: whole words, of at most `WINDOW_BYTES` and at least half of that."""
    found = [window for line in lines for window in _cut(line.split())]
    chosen = np.random.default_rng(SEED).permutation(len(found))[:most]
    return [found[i] for i in sorted(chosen)]


def _cut(words: list[str]) -> Iterator[str]:
    window, size = [], 0
    for word in words:
        bytes_more = len(word.encode()) + 1
        if window and size + bytes_more > WINDOW_BYTES:
            yield " ".join(window)
            window, size = [], 0
        if bytes_more <= WINDOW_BYTES:
            window, size = [*window, word], size + bytes_more
    if size >= WINDOW_BYTES // 2:
        yield " ".join(window)


def hidden_words(texts: list[str]) -> list[list[bool]]:
    """Returns of each word of each text whether it is hidden."""
    draw = np.random.default_rng(SEED).random
    return [[bool(PLAIN.fullmatch(word)) and draw() < SHARE for word in text.split(" ")] for text in texts]


def masked(text: str, hidden: list[bool], tokenizer, length: int) -> Iterator[tuple[list[int], list[int], list[int]]]:
    """Yields ids with masks, the positions of these, and the pieces that they hide; of each half, if it is too long.

    Raises `UserError` if a hidden word is not in the vocabulary.
    """
    from bertjax.config import UserError

    encoded = tokenizer.encode(text)
    words = text.split(" ")
    if len(encoded.ids) + 2 > length and len(words) > 1:
        middle = len(words) // 2
        for part in (slice(middle), slice(middle, None)):
            yield from masked(" ".join(words[part]), hidden[part], tokenizer, length)
        return
    word_at = [number for number, word in enumerate(words) for _ in range(len(word) + 1)]  # with the space after it
    owners = [word_at[end - 1] for _, end in encoded.offsets]
    ids = [tokenizer.cls_id, *encoded.ids, tokenizer.sep_id]
    positions = [place for place, owner in enumerate(owners, 1) if hidden[owner]]
    pieces = [ids[place] for place in positions]
    if tokenizer.unk_id in pieces:
        raise UserError(f"{text!r}: the vocabulary has no pieces for one of its words")
    for place in positions:
        ids[place] = tokenizer.mask_id
    if positions:
        yield ids, positions, pieces


def bits_per_byte(model, params, tokenizer, texts: list[str], length: int) -> dict[str, float]:
    """Returns the bits per byte of the hidden words of some texts, how many words these are, and how many bytes.

    Raises `UserError` if there are none.
    """
    from bertjax.config import UserError
    from bertjax.tasks import likelihood

    hidden = hidden_words(texts)
    rows = [
        likelihood.PredictedRow(number, *each)
        for number, (text, which) in enumerate(zip(texts, hidden))
        for each in masked(text, which, tokenizer, length)
    ]
    words = [word for text, which in zip(texts, hidden) for word, is_hidden in zip(text.split(" "), which) if is_hidden]
    size = sum(len(word.encode()) for word in words)
    if not size:
        raise UserError(f"--texts: none of their {len(texts)} windows of {WINDOW_BYTES} bytes has a word to hide")
    total = likelihood.log_likelihoods_of_rows(model, params, tokenizer, rows, len(texts)).sum()
    return {"bits_per_byte": float(-total / np.log(2) / size), "words": len(words), "bytes": size}


def main(arguments: list[str]) -> None:
    import jax

    from bertjax.config import UserError
    from bertjax.data.documents.reading import Reading, read_lines
    from bertjax.families.with_heads import BertForMaskedLM
    from bertjax.interop import pretrained
    from bertjax.sharding.mesh import compute_for

    if arguments:
        raise UserError(f"unexpected argument {arguments[0]!r}; the texts are given as --texts=FILE")
    command.keep_compiled()
    texts = []
    for path in _TEXTS.value:
        texts += windows((line for _, line in read_lines(path, Reading()) if line), MOST_WINDOWS)
    source = pretrained.read_with_tokenizer(_CHECKPOINT.value)
    if not source.predicts_words:
        raise UserError(source.no_words)
    model = BertForMaskedLM(source.config, compute_for(source.dtype))
    found = bits_per_byte(model, jax.device_put(source.params), source.tokenizer, texts, _LENGTH.value)
    print(json.dumps(found), flush=True)


if __name__ == "__main__":
    command.run(main)
