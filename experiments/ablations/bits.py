"""Bits per byte: python -m experiments.ablations.bits --checkpoint=PATH --texts=A.txt.xz,B.txt.xz

See `bertjax.tasks.bits`; the windows are so short that most have fewer than 30 pieces of a vocabulary of 8,192. Prints
one JSON object.
"""

import json
import re

from absl import flags

from bertjax import command

WINDOW_BYTES, MOST_WINDOWS = (48, 96), 4000  # the shortest and the longest window, and how many of a file
# Words that are hidden: every vocabulary has their letters.
PLAIN = re.compile(r"[A-Za-z0-9.,;:'()!?-]{1,40}")

_CHECKPOINT = command.define_checkpoint_flag()
_TEXTS = flags.DEFINE_list("texts", None, "Files with held-out text, a paragraph a line.")
_LENGTH = flags.DEFINE_integer("length", 32, "Tokens of the longest sequence; longer windows are halved.")
flags.mark_flags_as_required(["checkpoint", "texts"])


def may_hide(word: str) -> bool:
    return bool(PLAIN.fullmatch(word))


def main(arguments: list[str]) -> None:
    import jax

    from bertjax.config import UserError
    from bertjax.data.documents.reading import Reading, read_lines
    from bertjax.families.with_heads import BertForMaskedLM
    from bertjax.interop import pretrained
    from bertjax.sharding.mesh import compute_for
    from bertjax.tasks import bits

    if arguments:
        raise UserError(f"unexpected argument {arguments[0]!r}; the texts are given as --texts=FILE")
    command.keep_compiled()
    texts = []
    for path in _TEXTS.value:
        lines = (line for _, line in read_lines(path, Reading()) if line)
        texts += bits.windows(lines, MOST_WINDOWS, *WINDOW_BYTES)
    source = pretrained.read_with_tokenizer(_CHECKPOINT.value)
    if not source.predicts_words:
        raise UserError(source.no_words)
    model = BertForMaskedLM(source.config, compute_for(source.dtype))
    hidden = bits.hidden_words(texts, may_hide)
    found = bits.bits_per_byte(model, jax.device_put(source.params), source.tokenizer, texts, hidden, _LENGTH.value)
    print(json.dumps(found), flush=True)


if __name__ == "__main__":
    command.run(main)
