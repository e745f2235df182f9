"""Extracts embeddings or hidden states of texts.

    bertjax extract runs/mine --pool=mean --input=texts.txt --output=vectors.npy

A checkpoint that was trained for embeddings (a run of `embed`, a folder of sentence-transformers) writes its
embeddings, `vectors` [texts, width]. With any other checkpoint, --pool=mean writes the mean of the hidden states of a
text, [CLS] and [SEP] included; --pool=cls writes the hidden state of [CLS], and --pool=last the hidden state of the
last token. --output is an .npy, an .npz or a .parquet. The same command resumes after an interruption.
--precision=int8 and --precision=ubinary write small embeddings.

Other checkpoints without --pool write the hidden states of all tokens to an .npz: `hidden` [tokens of all texts,
width] and `offsets` [texts + 1]; text i, with its [CLS] and [SEP], has the rows from offsets[i] to offsets[i + 1].

--input=TABLE.csv (.tsv, .jsonl) reads the texts of a table's column, --texts=COLUMN, and --id=COLUMN copies another
column to a .parquet. --checkpoint takes any checkpoint that bertjax predict takes.
"""

from absl import flags

from bertjax.cli.app import run_command, start_reading
from bertjax.cli.flags import (
    define_checkpoint_flag,
    define_dtype_flag,
    define_input_flag,
    define_required_flag,
    group_flags,
    is_table_input,
)
from bertjax.cli.next_commands import print_next
from bertjax.common.errors import UserError
from bertjax.config.limits import FLOAT32, POOLS, PRECISIONS
from bertjax.training.signals import exit_on_signal

_CHECKPOINT = define_checkpoint_flag()
_DTYPE = define_dtype_flag()
_INPUT = define_input_flag()
_TEXTS = flags.DEFINE_string("texts", "", "The column of the texts of a table; by default `text`.")
_ID = flags.DEFINE_string("id", "", "A column of the table that is copied to the .parquet, as text.")
_PROMPT = flags.DEFINE_string(
    "prompt",
    None,
    "With embeddings: the prompt before each text: query, document, a prompt of a folder of sentence-transformers, or "
    "the text of the prompt. By default query, or the default prompt of the folder.",
)
_WIDTH = flags.DEFINE_integer(
    "width",
    0,
    "Shortens embeddings to this width and normalizes them; the run must have trained this width (loss.widths).",
    lower_bound=0,
)
_LAYERS = flags.DEFINE_string(
    "layers",
    "",
    "The hidden states to write. By default last with --pool, else concat_last_four, or last for a model with fewer "
    "than four layers. The error for an unknown name lists all names.",
)
_POOL = flags.DEFINE_enum(
    "pool",
    None,
    [*POOLS],
    "Writes one vector per text: the mean of the hidden states of its tokens, or the hidden state of one token.",
)
_PRECISION = flags.DEFINE_enum(
    "precision",
    FLOAT32,
    [*PRECISIONS],
    "The type of the written embeddings: int8, or ubinary with one bit per dimension. The file stores the precision.",
)
_CALIBRATION = flags.DEFINE_string(
    "calibration",
    None,
    "With --precision=int8: an .npy of float embeddings, or the .json of an earlier .npy of int8 embeddings, which "
    "determines the range of each dimension. By default the ranges of the embeddings.",
)
_OUTPUT = define_required_flag("output", "The .npy, .npz or .parquet file to write.")
group_flags("Texts", _INPUT, _TEXTS, _ID)
group_flags("Embeddings", _PROMPT, _WIDTH)
group_flags("Hidden states", _LAYERS, _POOL)
group_flags("Small embeddings", _PRECISION, _CALIBRATION)


@exit_on_signal()
def main(texts: list[str]) -> None:
    """Extracts, and prints the shape of the written array."""
    from bertjax.data.corpus.text_input import TextInput
    from bertjax.library.checkpoints import extract

    is_table_input(_INPUT, texts, _TEXTS, _ID)
    if _ID.value and not _OUTPUT.value.endswith(".parquet"):
        raise UserError(f"--id={_ID.value}: only a .parquet has columns; give --output=FILE.parquet")
    start_reading(_CHECKPOINT.value)
    extracted = extract(
        _CHECKPOINT.value,
        TextInput(texts, _INPUT.value or "", _TEXTS.value or "text", _ID.value),
        _OUTPUT.value,
        prompt=_PROMPT.value,
        width=_WIDTH.value,
        pool=_POOL.value or "",
        layers=_LAYERS.value,
        dtype=_DTYPE.value,
        precision=_PRECISION.value,
        calibration=_CALIBRATION.value,
    )
    print(extracted.describe(_OUTPUT.value), flush=True)
    print_next(_reading_command(_OUTPUT.value))


def _reading_command(path: str) -> list[str]:
    """Returns the words of a command that shows the content of the file."""
    if path.endswith(".parquet"):
        program = f'import pyarrow.parquet; print(pyarrow.parquet.read_table("{path}"))'
    elif path.endswith(".npz"):
        program = f'import numpy; print({{name: x.shape for name, x in numpy.load("{path}").items()}})'
    else:
        program = f'import numpy; print(numpy.load("{path}", mmap_mode="r"))'
    return ["python", "-c", program]


if __name__ == "__main__":
    run_command(main)
