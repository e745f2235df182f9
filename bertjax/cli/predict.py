"""Predicts with a checkpoint: bertjax predict runs/mine "the man went to the [MASK]"

With a pre-trained checkpoint, prints the most likely words for each [MASK] of each text, with probabilities; with a
left-to-right one (model.causal), --generate=N continues each text by up to N pieces. With a fine-tuned one, prints a
JSON object per text: its label, tags, answer or choice. " ||| " separates the parts of a text.
--input=TEXTS.csv (.tsv, .jsonl) reads the texts of a table, from the columns that the run was trained on or --text and
--second_text name; --output=FILE.csv (.tsv, .jsonl) writes the table with the predictions as columns.
--checkpoint is a run's workdir, a Hugging Face folder, an adapter of PEFT, hub:NAME, or Google's bert_model.ckpt. From
a workdir, uses the best checkpoint after fine-tuning and the latest after pre-training; runs/mine@best,
runs/mine@latest or runs/mine@STEP choose another.
"""

import json

from absl import flags

from bertjax.cli.app import keep_compiled, run_command
from bertjax.cli.flags import define_checkpoint_flag, define_dtype_flag, group_flags, input_lines
from bertjax.cli.next_commands import print_next, uses_of
from bertjax.training.signals import exit_on_signal

_CHECKPOINT = define_checkpoint_flag()
_DTYPE = define_dtype_flag()
_INPUT = flags.DEFINE_string(
    "input",
    None,
    "File with one text per line, in addition to those on the command line; or a table, .csv, .tsv or .jsonl.",
)
_TEXT = flags.DEFINE_string("text", "", "The table's column of texts; the run's data.text unless given.")
_SECOND_TEXT = flags.DEFINE_string("second_text", "", "With --text: the column of the other texts of pairs.")
_OUTPUT = flags.DEFINE_string("output", None, "The .csv, .tsv or .jsonl file to write the table to; else prints rows.")
_JSON = flags.DEFINE_bool("json", False, "Print filled masks, or continued texts, as one JSON object per text.")
_TOP_K = flags.DEFINE_integer(
    "top_k", None, "Number of words per mask (5); with --generate, chooses among that many pieces (all).", lower_bound=1
)
_GENERATE = flags.DEFINE_integer("generate", 0, "Pieces to continue each text with, at most.", lower_bound=0)
_TEMPERATURE = flags.DEFINE_float(
    "temperature", 1.0, "Of --generate; 0: always the most likely piece.", lower_bound=0.0
)
_TOP_P = flags.DEFINE_float(
    "top_p", 1.0, "Of --generate: among the likeliest pieces with this share.", lower_bound=1e-6, upper_bound=1.0
)
_SEED = flags.DEFINE_integer("seed", 0, "Of --generate.", lower_bound=0, upper_bound=2**31 - 1)
group_flags("Tables", _TEXT, _SECOND_TEXT, _OUTPUT)
group_flags("Words", _TOP_K, _GENERATE, _TEMPERATURE, _TOP_P, _SEED)


@exit_on_signal()
def main(texts: list[str]) -> None:
    from bertjax.common.errors import UserError

    keep_compiled()
    for flag in (_TEMPERATURE, _TOP_P, _SEED):
        if flag.present and not _GENERATE.value:
            raise UserError(f"--{flag.name}={flag.value}: give --generate=N as well; nothing else draws pieces")
    if _DTYPE.value and _GENERATE.value:  # one token at a time is slower in bfloat16
        raise UserError(f"--dtype={_DTYPE.value}: --generate computes in float32; leave it out")
    is_table = _is_table(texts)
    if not is_table:
        texts = texts + [line for line in input_lines(_INPUT.value) if line.strip()]
    if not texts and not is_table:
        raise UserError(
            f"no text for the checkpoint {_CHECKPOINT.value!r}: give one on the command line, as in bertjax predict "
            f'{_CHECKPOINT.value} "the [MASK] barked", or a file with --input'
        )

    from bertjax.inference.abilities import task_of
    from bertjax.interop import pretrained

    source = pretrained.read_with_tokenizer(_CHECKPOINT.value, _DTYPE.value)
    task = task_of(source)
    if task is None and is_table:
        raise UserError(f"--input={_INPUT.value}: a table is for a fine-tuned checkpoint; here, a .txt has the texts")
    if task is None:
        continue_texts(source, texts) if _GENERATE.value else fill_masks(source, texts)
        return
    for flag in (_GENERATE, _TOP_K):
        if flag.value:
            raise UserError(f"--{flag.name}={flag.value}: {source.path} is fine-tuned, and predicts no words")
    parts = task.inputs.split(texts) if texts else ()
    if is_table:
        predict_table(task, source)
        return
    for text, result in zip(texts, task.predict(source, parts)):
        print(json.dumps({"text": text, **result}, ensure_ascii=False), flush=True)


def _is_table(texts: list[str]) -> bool:
    """Returns whether --input is a table. Raises `UserError` if other arguments do not fit that."""
    from bertjax.common.errors import UserError
    from bertjax.data.corpus.tables import SUFFIXES

    is_table, suffixes = (_INPUT.value or "").endswith(SUFFIXES), ", ".join(SUFFIXES)
    if is_table and texts:
        raise UserError(f"unexpected argument {texts[0]!r}; with a table as --input, all texts are in it")
    for flag in (_TEXT, _SECOND_TEXT, _OUTPUT):
        if flag.value and not is_table:
            raise UserError(f"--{flag.name}={flag.value}: is for a table; give --input=FILE that ends in {suffixes}")
    if _OUTPUT.value and not _OUTPUT.value.endswith(SUFFIXES):
        raise UserError(f"--output={_OUTPUT.value}: must end in one of {suffixes}")
    return is_table


def predict_table(task, source) -> None:
    from bertjax.finetuning import predicted_table

    names = predicted_table.text_columns(task, source, _TEXT.value, _SECOND_TEXT.value)
    if _OUTPUT.value:
        print(predicted_table.write_predictions(_OUTPUT.value, task, source, _INPUT.value, names), flush=True)
        print_next(*uses_of(_CHECKPOINT.value)[1:])
        return
    for row in predicted_table.predicted(task, source, _INPUT.value, names):
        print(json.dumps(predicted_table.with_columns(*row), ensure_ascii=False), flush=True)


def fill_masks(source, texts: list[str]) -> None:
    from bertjax.inference import fill_mask

    for filled in fill_mask.predict_masks(source, texts, _TOP_K.value or 5):
        if _JSON.value:
            masks = [[{"word": word, "probability": p} for word, p in words] for words in filled.masks]
            print(json.dumps({"text": filled.text, "masks": masks}, ensure_ascii=False), flush=True)
        else:
            print(fill_mask.describe(filled), flush=True)


def continue_texts(source, texts: list[str]) -> None:
    from bertjax.inference import generation

    sampling = generation.Sampling(_TEMPERATURE.value, _TOP_K.value or 0, _TOP_P.value)
    continued = generation.continue_texts(source, texts, _GENERATE.value, sampling, _SEED.value)
    for text, found in zip(texts, continued):
        print(json.dumps({"text": text, "continued": found}, ensure_ascii=False) if _JSON.value else found, flush=True)


if __name__ == "__main__":
    run_command(main)
