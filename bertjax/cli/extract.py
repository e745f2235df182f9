"""Extracts vectors or hidden states of texts: bertjax extract runs/mine --pool=mean \\
--input=texts.txt --output=text_embedding.npy

A checkpoint that makes vectors of texts (a run of `embed`, a folder of sentence-transformers) writes its vectors,
`vectors` [texts, width]. With any other checkpoint, --pool=mean writes the mean of the hidden states of a text, [CLS]
and [SEP] included; --pool=cls writes the hidden state of [CLS], and --pool=last the hidden state of the last token.
--output is an .npy, an .npz or a .parquet. The same command resumes after an interruption.

Without vectors and --pool, writes the hidden states of all tokens to an .npz: `hidden` [tokens of all texts, width]
and `offsets` [texts + 1]; text i, with its [CLS] and [SEP], has the rows from offsets[i] to offsets[i + 1].

--input=TABLE.csv (.tsv, .jsonl) reads the texts of a table's column, --texts=COLUMN, and --id=COLUMN keeps another
beside the vectors in a .parquet. --checkpoint takes any checkpoint that bertjax predict takes.
"""

import contextlib
import functools
from collections.abc import Iterator

from absl import flags

from bertjax.cli.app import keep_compiled, run_command
from bertjax.cli.flags import define_checkpoint_flag, define_dtype_flag, group_flags, input_lines, require_flags
from bertjax.cli.next_commands import print_next
from bertjax.training.signals import exit_on_signal

_CHECKPOINT = define_checkpoint_flag()
_DTYPE = define_dtype_flag()
_INPUT = flags.DEFINE_string(
    "input",
    None,
    "File with one text per line, in addition to those on the command line; or a table, .csv, .tsv or .jsonl.",
)
_TEXTS = flags.DEFINE_string("texts", "", "The table's column of texts; text unless given.")
_ID = flags.DEFINE_string("id", "", "A column of the table that a .parquet gets as well, as text.")
_PROMPT = flags.DEFINE_string(
    "prompt",
    None,
    "Of vectors: what comes before each text: query (the default of runs), document, another prompt of a folder of "
    "sentence-transformers (whose default prompt is the default), or the words themselves.",
)
_WIDTH = flags.DEFINE_integer(
    "width",
    0,
    "Cuts vectors to this width and normalizes them anew; the run must have trained this width (loss.widths).",
    lower_bound=0,
)
_LAYERS = flags.DEFINE_string(
    "layers",
    None,
    "Which hidden states: last is the default with --pool, else concat_last_four, or last of a model with fewer than "
    "four layers; the error for an unknown name lists them.",
)
_POOL = flags.DEFINE_enum(
    "pool", None, ["mean", "cls", "last"], "One vector a text: the mean of hidden states, or that of one token."
)
_OUTPUT = flags.DEFINE_string("output", None, "The .npy, .npz or .parquet file to write.")
require_flags("output")
group_flags("Texts", _INPUT, _TEXTS, _ID)
group_flags("Embeddings", _PROMPT, _WIDTH)
group_flags("Hidden states", _LAYERS, _POOL)


@exit_on_signal()
def main(texts: list[str]) -> None:
    from bertjax.common.errors import UserError
    from bertjax.data.corpus.tables import SUFFIXES
    from bertjax.nn.layer_pooling import WITHOUT_WEIGHTS

    if _LAYERS.value not in (None, *WITHOUT_WEIGHTS):
        raise UserError(f"--layers={_LAYERS.value}: choose one of {', '.join(WITHOUT_WEIGHTS)}")
    is_table = (_INPUT.value or "").endswith(SUFFIXES)
    if is_table and texts:
        raise UserError(f"unexpected argument {texts[0]!r}; with a table as --input, all texts are in it")
    for flag in (_TEXTS, _ID):
        if flag.value and not is_table:
            suffixes = ", ".join(SUFFIXES)
            raise UserError(f"--{flag.name}={flag.value}: is for a table; give --input=FILE that ends in {suffixes}")
    if _ID.value and not _OUTPUT.value.endswith(".parquet"):
        raise UserError(f"--id={_ID.value}: only a .parquet has columns; give --output=FILE.parquet")

    def all_texts() -> Iterator[str]:
        if is_table:
            yield from column(_TEXTS.value or "text", "texts")
            return
        yield from texts
        yield from input_lines(_INPUT.value)  # also empty ones: text i of the output is line i of the input

    if next(all_texts(), None) is None:
        raise UserError(
            f"no text for the checkpoint {_CHECKPOINT.value!r}: give one on the command line, or a file with --input"
        )
    if _ID.value:
        next(column(_ID.value, "id"))

    from bertjax.inference.abilities import find_ability
    from bertjax.inference.task import HasEmbeddings
    from bertjax.interop import pretrained

    keep_compiled()
    source = pretrained.read_with_tokenizer(_CHECKPOINT.value, _DTYPE.value)
    task = None
    with contextlib.suppress(UserError):  # A checkpoint of a task that is not registered here has hidden states.
        task = find_ability(source, HasEmbeddings)
    makes_own = task is not None and not (_POOL.value or _LAYERS.value)
    for flag in (_PROMPT, _WIDTH):
        if flag.value and not makes_own:
            raise UserError(
                f"--{flag.name}={flag.value}: is for vectors that a checkpoint makes without --pool, --layers"
            )
    if makes_own or _POOL.value:
        write_vectors(source, task if makes_own else None, all_texts)
    else:
        write_hidden_states(source, all_texts)


def column(name: str, flag: str) -> Iterator[str]:
    """Yields the cells of a column of the table."""
    from bertjax.common.errors import UserError
    from bertjax.data.corpus import tables

    for row in tables.rows_of(_INPUT.value):
        if name not in row.columns:
            raise UserError(f"{row.where}: no column {name!r}; name one of {', '.join(row.columns)} with --{flag}")
        yield tables.column(row, name)


def write_vectors(source, task, all_texts) -> None:
    """Writes the vectors that the task of a checkpoint makes, or pooled hidden states."""
    from etils import epath

    from bertjax.common.errors import UserError
    from bertjax.inference import text_embedding
    from bertjax.nn.layer_pooling import check_layers

    if not _OUTPUT.value.endswith(text_embedding.SUFFIXES):
        raise UserError(f"--output={_OUTPUT.value}: must end in one of {', '.join(text_embedding.SUFFIXES)}")
    if task is not None:
        make, most = task.embedder(source, _PROMPT.value, _WIDTH.value), source.max_seq_length
    else:
        layers, most = _LAYERS.value or "last", source.config.max_position_embeddings
        check_layers(layers, source.config, "--layers")
        make = text_embedding.PooledStatesEmbedder(source, layers, _POOL.value)
    ids = functools.partial(column, _ID.value, "id") if _ID.value else None
    size = epath.Path(_INPUT.value).stat().length if _INPUT.value else 0
    (rows, width), cut = text_embedding.write_embeddings(_OUTPUT.value, make, all_texts(), ids, _ID.value, size)
    note = f"; {cut} of them cut to {most} tokens" if cut else ""
    print(f"vectors [{rows}, {width}] of {rows} texts in {_OUTPUT.value}{note}", flush=True)
    print_reading()


def write_hidden_states(source, all_texts) -> None:
    import jax

    from bertjax.common.errors import UserError
    from bertjax.distributed.mesh import compute_for
    from bertjax.inference import hidden_states, text_embedding
    from bertjax.models import families
    from bertjax.nn.layer_pooling import check_layers

    if _OUTPUT.value.endswith(tuple(set(text_embedding.SUFFIXES) - {".npz"})):
        raise UserError(f"--output={_OUTPUT.value}: hidden states are written to an .npz; or give --pool=mean")
    layers = _LAYERS.value or ("concat_last_four" if source.config.num_hidden_layers >= 4 else "last")
    check_layers(layers, source.config, "--layers")
    model = families.family_of(source.config).build(source.config, compute_for(source.dtype))
    params = jax.device_put(source.params["bert"])  # once, not per batch
    written = hidden_states.write_hidden_states(_OUTPUT.value, model, params, source.tokenizer, all_texts, layers)
    note = f"; {written.cut} of them cut to {source.config.max_position_embeddings} tokens" if written.cut else ""
    shape = ", ".join(map(str, written.shape))
    note += f"; --layers={layers}" if not _LAYERS.value else ""
    print(f"hidden [{shape}] of {written.texts} texts in {_OUTPUT.value}{note}", flush=True)
    print_reading()


def print_reading() -> None:
    """Prints the command that shows what is in the file."""
    path = _OUTPUT.value
    if path.endswith(".parquet"):
        program = f"import pyarrow.parquet; print(pyarrow.parquet.read_table({path!r}))"
    elif path.endswith(".npz"):
        program = f"import numpy; print({{name: x.shape for name, x in numpy.load({path!r}).items()}})"
    else:
        program = f"import numpy; print(numpy.load({path!r}, mmap_mode='r'))"
    print_next(["python", "-c", program])


if __name__ == "__main__":
    run_command(main)
