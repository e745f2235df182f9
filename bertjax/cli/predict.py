"""Predicts with a checkpoint.

    bertjax predict runs/mine "the man went to the [MASK]"

A pre-trained checkpoint prints the most likely words for each [MASK] of each text, with probabilities. A
left-to-right checkpoint (model.causal) continues each text by up to N tokens with --generate=N. A fine-tuned checkpoint
prints a JSON object per text: its label, tags, answer or choice. " ||| " separates the two texts of a pair, or a
question and its context.
--input=TEXTS.csv (.tsv, .jsonl) reads the texts of a table, from the columns of the training data or from the columns
that --text and --second_text name; --output=FILE.csv (.tsv, .jsonl) writes the table with the predictions as columns.
The checkpoint is a run's workdir, a Hugging Face folder, an adapter of PEFT, hub:NAME, or Google's bert_model.ckpt. A
workdir stands for the best checkpoint after fine-tuning and the latest after pre-training; runs/mine@best,
runs/mine@latest or runs/mine@STEP choose another.
"""

import json

from absl import flags

from bertjax.cli.app import run_command, start_reading
from bertjax.cli.flags import (
    define_checkpoint_flag,
    define_dtype_flag,
    define_input_flag,
    group_flags,
    is_table_input,
)
from bertjax.cli.next_commands import print_next, uses_of
from bertjax.common.errors import UserError
from bertjax.training.signals import exit_on_signal

_CHECKPOINT = define_checkpoint_flag()
_DTYPE = define_dtype_flag()
_INPUT = define_input_flag()
_TEXT = flags.DEFINE_string(
    "text", "", "The column of the texts of a table; by default the column of the training data."
)
_SECOND_TEXT = flags.DEFINE_string("second_text", "", "With --text: the column of the second texts of pairs.")
_OUTPUT = flags.DEFINE_string("output", None, "The .csv, .tsv or .jsonl file for the table; by default prints JSON.")
_JSON = flags.DEFINE_bool("json", False, "Print filled masks, or continued texts, as one JSON object per text.")
_TOP_K = flags.DEFINE_integer(
    "top_k",
    None,
    "Number of words per mask, by default 5; with --generate, samples from so many tokens, by default all.",
    lower_bound=1,
)
_GENERATE = flags.DEFINE_integer("generate", 0, "Largest number of tokens to generate after each text.", lower_bound=0)
_TEMPERATURE = flags.DEFINE_float(
    "temperature",
    1.0,
    "With --generate: the temperature of sampling; 0 always chooses the most likely token.",
    lower_bound=0.0,
)
_TOP_P = flags.DEFINE_float(
    "top_p",
    1.0,
    "With --generate: samples from the most likely tokens with this total probability.",
    lower_bound=1e-6,
    upper_bound=1.0,
)
_SEED = flags.DEFINE_integer(
    "seed", 0, "With --generate: the seed of the random numbers.", lower_bound=0, upper_bound=2**31 - 1
)
group_flags("Tables", _TEXT, _SECOND_TEXT, _OUTPUT)
group_flags("Words", _TOP_K, _GENERATE, _TEMPERATURE, _TOP_P, _SEED)


@exit_on_signal()
def main(texts: list[str]) -> None:
    """Prints the predictions, or writes them to a table."""
    is_table = is_table_input(_INPUT, texts, _TEXT, _SECOND_TEXT, _OUTPUT)
    _check_flags(is_table)
    if is_table:
        _predict_table()
    else:
        _predict_texts(texts)


def _check_flags(is_table: bool) -> None:
    """Raises `UserError` if a flag does not fit another flag."""
    from bertjax.data.corpus.tables import SUFFIXES

    if _OUTPUT.value and not _OUTPUT.value.endswith(SUFFIXES):
        raise UserError(f"--output={_OUTPUT.value}: must end in one of {', '.join(SUFFIXES)}")
    for flag in (_TEMPERATURE, _TOP_P, _SEED):
        if flag.present and not _GENERATE.value:
            raise UserError(f"--{flag.name}={flag.value}: is for --generate=N; add --generate, or leave the flag out")
    for words_flag in (_GENERATE, _TOP_K):
        if words_flag.value and is_table:
            raise UserError(f"--{words_flag.name}={words_flag.value}: is for texts; leave the flag out for a table")
    if _DTYPE.value and _GENERATE.value:  # Computing one token at a time is slower in bfloat16.
        raise UserError(f"--dtype={_DTYPE.value}: --generate computes in float32; leave the flag out")


def _predict_texts(texts: list[str]) -> None:
    from bertjax.data.corpus.text_input import TextInput, missing_text
    from bertjax.library.checkpoints import read_checkpoint

    texts = texts + [line for line in TextInput(path=_INPUT.value or "") if line.strip()]
    if not texts:
        raise missing_text(_CHECKPOINT.value, _INPUT.value or "")
    start_reading(_CHECKPOINT.value)

    from bertjax.inference.generation import Sampling
    from bertjax.inference.predictions import predict_texts

    source = read_checkpoint(_CHECKPOINT.value, _DTYPE.value)
    sampling = Sampling(_TEMPERATURE.value, _TOP_K.value or 0, _TOP_P.value)
    for prediction in predict_texts(source, texts, _TOP_K.value, _GENERATE.value, sampling, _SEED.value):
        lines = None if _JSON.value else prediction.lines
        print(prediction.as_json() if lines is None else lines, flush=True)


def _predict_table() -> None:
    from bertjax.finetuning.predicted_table import predict_table, write_predictions
    from bertjax.library.checkpoints import read_checkpoint

    start_reading(_CHECKPOINT.value)
    source = read_checkpoint(_CHECKPOINT.value, _DTYPE.value)
    columns = (_TEXT.value, _SECOND_TEXT.value)
    if _OUTPUT.value:
        print(write_predictions(_OUTPUT.value, source, _INPUT.value, *columns), flush=True)
        print_next(*uses_of(_CHECKPOINT.value)[1:])
        return
    for row in predict_table(source, _INPUT.value, *columns):
        print(json.dumps(row, ensure_ascii=False), flush=True)


if __name__ == "__main__":
    run_command(main)
