"""Mines hard negatives: bertjax mine runs/vectors --data=pairs.csv --output=mined.jsonl

For each query of --data, finds the nearest documents that are not relevant to it, of --data and --corpus, with the
vectors of the checkpoint, and writes a table with the columns anchor, positive, negative_1, ..., which training reads
with --config.data.texts=anchor,positive,negative_1. --first, --last, --margin, --max_score and --min_score keep those
away that are relevant and not said to be. Prints how many candidates and queries it dropped, and warns
if it dropped most queries, or if a negative is nearer than the positive. --checkpoint is the workdir of a run that
learnt vectors, or a folder of sentence-transformers.
"""

import pathlib

from absl import flags

from bertjax.cli.app import keep_compiled, run_command
from bertjax.cli.flags import define_checkpoint_flag, define_dtype_flag, group_flags, require_flags
from bertjax.cli.next_commands import command, print_next
from bertjax.training.signals import exit_on_signal

_CHECKPOINT = define_checkpoint_flag()
_DTYPE = define_dtype_flag()
_DATA = flags.DEFINE_string("data", None, "A file of queries and documents, or a folder with such a train file.")
_FORM = flags.DEFINE_string("form", "pairs", "What the examples of --data are, as config.data.form.")
_TEXTS = flags.DEFINE_string("texts", "anchor,positive", "The columns of its texts, as config.data.texts.")
_CORPUS = flags.DEFINE_string(
    "corpus",
    None,
    "More documents: a .txt with one a line, or the column `text` of a table, after its `title`, such as BEIR's.",
)
_NEGATIVES = flags.DEFINE_integer("negatives", 1, "Negatives for each query.", lower_bound=1)
_FIRST = flags.DEFINE_integer(
    "first", 1, "Rank of the first document that may be one: 1 is the nearest.", lower_bound=1
)
_LAST = flags.DEFINE_integer("last", 100, "Rank of the last document that may be one.", lower_bound=1)
_MARGIN = flags.DEFINE_string(
    "margin",
    "-inf",
    "The cosine of a negative is below the cosine of the positive by this margin: 0.1, or 5% of the positive.",
)
_MAX_SCORE = flags.DEFINE_float("max_score", float("inf"), "The highest cosine of a negative.")
_MIN_SCORE = flags.DEFINE_float("min_score", -float("inf"), "The lowest cosine of a negative.")
_SEED = flags.DEFINE_integer(
    "seed", None, "Draws among the ranks; else takes the nearest.", lower_bound=0, upper_bound=2**31 - 1
)
_OUTPUT = flags.DEFINE_string("output", None, "The .jsonl, .csv or .tsv file to write.")
require_flags("data", "output")
group_flags("Data", _DATA, _FORM, _TEXTS, _CORPUS, _OUTPUT)
group_flags("Choice of negatives", _NEGATIVES, _FIRST, _LAST, _MARGIN, _MAX_SCORE, _MIN_SCORE, _SEED)


@exit_on_signal()
def main(arguments: list[str]) -> None:
    """Mines hard negatives, and prints how many candidates and queries were dropped."""
    from bertjax.common.errors import UserError

    if arguments:
        raise UserError(f"unexpected argument {arguments[0]!r}; use --checkpoint=, --data= and --output=")

    from bertjax.embedding.hard_negatives import make_choice, mine_files

    choice = make_choice(
        _NEGATIVES.value,
        _FIRST.value,
        _LAST.value,
        _MARGIN.value,
        _MIN_SCORE.value,
        _MAX_SCORE.value,
        _SEED.value,
    )
    keep_compiled()
    paths = (_CHECKPOINT.value, _DATA.value, _OUTPUT.value)
    search, mined, lines = mine_files(*paths, choice, _CORPUS.value, _FORM.value, _TEXTS.value, _DTYPE.value)
    print("\n".join(lines), flush=True)
    if len(mined.rows) < len(search.queries) / 2:  # The warning has the remedy.
        return
    columns = ",".join(["anchor", "positive", *(f"negative_{i}" for i in range(1, choice.negatives + 1))])
    data = [f"--config.data.path={_OUTPUT.value}", f"--config.data.texts={columns}"]
    train = pathlib.Path(_DATA.value)
    dev = train.with_name(train.name.replace("train", "dev"))
    if _FORM.value == "pairs" and dev != train and dev.is_file():  # comparable with the scores of the checkpoint
        data += [f"--config.data.dev.path={dev}", f"--config.data.dev.texts={_TEXTS.value}"]
    data.append("--workdir=runs/mined")
    print_next(command("train", "--config=embed", f"--config.init_checkpoint={_CHECKPOINT.value}", *data))


if __name__ == "__main__":
    run_command(main)
