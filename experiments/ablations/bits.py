"""Bits per byte: python -m experiments.ablations.bits --checkpoint=PATH --texts=A.txt.xz,B.txt.xz

See `bertjax.inference.bits_per_byte`; most windows have fewer than 30 tokens of a vocabulary of 8,192. Prints
one JSON object.

For long texts and a model with a memory, as in Dai et al. 2019 (the memory may be longer than in training):
--cut=documents --windows=4000,8000 --most=50 --memory=512 --clamp=256
"""

import dataclasses
import itertools
import json
import re

from absl import flags

from bertjax.cli.app import keep_compiled, run_command
from bertjax.cli.flags import define_checkpoint_flag
from experiments.ablations.equal_time import WINDOW_BYTES

# The hidden words; every vocabulary contains their letters.
PLAIN = re.compile(r"[A-Za-z0-9.,;:'()!?-]{1,40}")

_CHECKPOINT = define_checkpoint_flag()
_TEXTS = flags.DEFINE_list("texts", None, "Files with held-out text, a paragraph a line.")
_LENGTH = flags.DEFINE_integer("length", 32, "Tokens of the longest sequence; longer windows are halved.")
_WINDOWS = flags.DEFINE_list("windows", [str(size) for size in WINDOW_BYTES], "Bytes of the shortest and the longest.")
_CUT = flags.DEFINE_enum(
    "cut", "lines", ["lines", "documents"], "The units that windows are cut from; blank lines end documents."
)
_MOST = flags.DEFINE_integer("most", 4000, "Maximum number of windows per file.", lower_bound=1)
_MEMORY = flags.DEFINE_integer(
    "memory",
    0,
    "Length of the memory in tokens, and of the text that a model reads at once; 0: as in training.",
    lower_bound=0,
)
_CLAMP = flags.DEFINE_integer("clamp", 0, "Maximum distance between tokens; 0: as in training.", lower_bound=0)
flags.mark_flags_as_required(["checkpoint", "texts"])


def may_hide(word: str) -> bool:
    return bool(PLAIN.fullmatch(word))


def main(arguments: list[str]) -> None:
    import jax

    from bertjax.common.errors import UserError
    from bertjax.data.corpus.reading import DEFAULT, read_lines
    from bertjax.distributed.mesh import compute_for
    from bertjax.inference import bits_per_byte, likelihood
    from bertjax.interop import pretrained
    from bertjax.models.heads import BertForMaskedLM

    if arguments:
        raise UserError(f"unexpected argument {arguments[0]!r}; the texts are given as --texts=FILE")
    sizes = [int(size) for size in _WINDOWS.value if size.isdecimal()]
    if len(sizes) != 2 or not 0 < sizes[0] <= sizes[1]:
        raise UserError(f"--windows={','.join(_WINDOWS.value)}: two numbers of bytes, such as 48,96")
    keep_compiled()
    texts = []
    for path in _TEXTS.value:
        lines = (line for _, line in read_lines(path, DEFAULT))
        if _CUT.value == "documents":
            lines = (" ".join(each) for has_words, each in itertools.groupby(lines, bool) if has_words)
        texts += bits_per_byte.windows(filter(None, lines), _MOST.value, *sizes)
    source = pretrained.read_with_tokenizer(_CHECKPOINT.value)
    if not source.predicts_words:
        raise UserError(source.no_words_reason)
    given = {"memory_length": _MEMORY.value, "clamp_length": _CLAMP.value}
    given = {name: value for name, value in given.items() if value}
    if given and likelihood.part_of(source.config) is None:
        raise UserError(
            f"--{next(iter(given)).removesuffix('_length')}: {_CHECKPOINT.value} reads texts without a memory"
        )
    model = BertForMaskedLM(dataclasses.replace(source.config, **given), compute_for(source.dtype))
    hidden = bits_per_byte.hidden_words(texts, may_hide)
    found = bits_per_byte.bits_per_byte(
        model, jax.device_put(source.params), source.tokenizer, texts, hidden, _LENGTH.value
    )
    print(json.dumps(found), flush=True)


if __name__ == "__main__":
    run_command(main)
