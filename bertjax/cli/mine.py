"""Mines hard negatives.

    bertjax mine runs/embeddings --data=pairs.csv --output=mined.jsonl

For each query of --data, finds the nearest documents that are not relevant to the query, among the documents of --data
and --corpus, with the embeddings of the checkpoint. Writes a table with the columns anchor, positive, negative_1, ...,
which training reads with --config.data.texts=anchor,positive,negative_1. --first, --last, --margin, --max_score and
--min_score drop documents that may be relevant without a label. Prints the numbers of dropped candidates and queries.
Warns if most queries were dropped, or if a negative is nearer than the positive. --checkpoint is the workdir of a run
that was trained for embeddings, or a folder of sentence-transformers.

With --reranker=CHECKPOINT, --margin, --max_score and --min_score compare the scores of a reranker. --scores writes the
scores as more columns. The same command resumes after an interruption, from the folder OUTPUT.work.
"""

import contextlib
import pathlib
import sys

from absl import flags

from bertjax.cli.app import run_command, start_reading
from bertjax.cli.flags import (
    define_checkpoint_flag,
    define_dtype_flag,
    define_required_flag,
    group_flags,
    refuse_arguments,
)
from bertjax.cli.next_commands import command, print_next
from bertjax.training.signals import exit_on_signal

_CHECKPOINT = define_checkpoint_flag()
_DTYPE = define_dtype_flag()
_DATA = define_required_flag("data", "A file of queries and documents, or a folder with such a train file.")
_FORM = flags.DEFINE_string("form", "pairs", "The form of the examples of --data, as config.data.form.")
_TEXTS = flags.DEFINE_string("texts", "anchor,positive", "The columns of the texts of --data, as config.data.texts.")
_CORPUS = flags.DEFINE_string(
    "corpus",
    None,
    "More documents: a .txt with one document per line, or a table with the column `text`, and optionally `title`.",
)
_NEGATIVES = flags.DEFINE_integer("negatives", 1, "Number of negatives for each query.", lower_bound=1)
_FIRST = flags.DEFINE_integer(
    "first", 1, "Rank of the first document that can be a negative; 1 is the nearest.", lower_bound=1
)
_LAST = flags.DEFINE_integer("last", 100, "Rank of the last document that can be a negative.", lower_bound=1)
_MARGIN = flags.DEFINE_string(
    "margin",
    "-inf",
    "Least difference between the cosines of the positive and a negative: 0.1, or 5% of the positive's cosine.",
)
_MAX_SCORE = flags.DEFINE_float("max_score", float("inf"), "The highest cosine of a negative.")
_MIN_SCORE = flags.DEFINE_float("min_score", -float("inf"), "The lowest cosine of a negative.")
_RERANKER = flags.DEFINE_string(
    "reranker",
    None,
    "A checkpoint that computes one score for a pair of texts: the workdir of a run, or a CrossEncoder. --margin, "
    "--max_score and --min_score compare its scores in place of the cosines.",
)
_SCORES = flags.DEFINE_bool(
    "scores",
    False,
    "Also writes the columns score_positive, score_negative_1, ...: the scores of the reranker, or the cosines.",
)
_SEED = flags.DEFINE_integer(
    "seed",
    None,
    "Draws the negatives at random from the ranks, with this seed; by default takes the nearest documents.",
    lower_bound=0,
    upper_bound=2**31 - 1,
)
_OUTPUT = define_required_flag("output", "The .jsonl, .csv or .tsv file to write.")
group_flags("Data", _DATA, _FORM, _TEXTS, _CORPUS, _OUTPUT)
group_flags("Choice of negatives", _NEGATIVES, _FIRST, _LAST, _MARGIN, _MAX_SCORE, _MIN_SCORE, _SEED)
group_flags("Reranker", _RERANKER, _SCORES)


@exit_on_signal()
def main(arguments: list[str]) -> None:
    """Mines hard negatives, and prints how many candidates and queries were dropped."""
    refuse_arguments(arguments, "use --checkpoint=, --data= and --output=")

    from bertjax.library.checkpoints import mine

    start_reading(_CHECKPOINT.value)
    with contextlib.redirect_stdout(sys.stderr):  # the progress; stdout has the results only
        mined = mine(
            _CHECKPOINT.value,
            _DATA.value,
            _OUTPUT.value,
            corpus=_CORPUS.value,
            form=_FORM.value,
            texts=_TEXTS.value,
            negatives=_NEGATIVES.value,
            first=_FIRST.value,
            last=_LAST.value,
            margin=_MARGIN.value,
            min_score=_MIN_SCORE.value,
            max_score=_MAX_SCORE.value,
            seed=_SEED.value,
            dtype=_DTYPE.value,
            reranker=_RERANKER.value,
            scores=_SCORES.value,
        )
    print("\n".join(mined.lines), flush=True)
    if mined.rows >= mined.queries / 2:  # Otherwise, the warning in the lines has the remedy.
        print_next(_training_command(mined.mean_scores))


def _training_command(mean_scores: tuple[float, float]) -> list[str]:
    """Returns the words of a command that trains on the mined table.

    Args:
      mean_scores: the mean score of the positives and of the negatives.
    """
    columns = ",".join(["anchor", "positive", *(f"negative_{i}" for i in range(1, _NEGATIVES.value + 1))])
    data = [f"--config.data.path={_OUTPUT.value}", f"--config.data.texts={columns}"]
    train = pathlib.Path(_DATA.value)
    dev = train.with_name(train.name.replace("train", "dev"))
    if (
        _FORM.value == "pairs" and dev != train and dev.is_file()
    ):  # The scores compare with the scores of the checkpoint.
        data += [f"--config.data.dev.path={dev}", f"--config.data.dev.texts={_TEXTS.value}"]
    if _SCORES.value and _RERANKER.value:
        scores = ",".join(f"score_{column}" for column in columns.split(",")[1:])
        data += [f"--config.data.label={scores}", "--config.distill.what=kl"]
        positive, negative = mean_scores
        # With this temperature, the distribution of the teacher is neither flat nor certain.
        temperature = max((positive - negative) / 8, 0.01)
        data += ["--config.distill.student_temperature=0.05", f"--config.distill.teacher_temperature={temperature:.1g}"]
    checkpoint = f"--config.init_checkpoint={_CHECKPOINT.value}"
    return command("train", "--config=embed", checkpoint, *data, "--workdir=runs/mined")


if __name__ == "__main__":
    run_command(main)
