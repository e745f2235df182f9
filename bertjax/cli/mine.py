"""Mines hard negatives: bertjax mine runs/vectors --data=pairs.csv --output=mined.jsonl

For each query of --data, finds the nearest documents that are not relevant to it, of --data and --corpus, with the
vectors of the checkpoint, and writes a table with the columns anchor, positive, negative_1, ..., which training reads
with --config.data.texts=anchor,positive,negative_1. --first, --last, --margin, --max_score and --min_score keep those
away that are relevant and not said to be. Prints how many candidates and queries it dropped, and warns
if it dropped most queries, or if a negative is nearer than the positive. --checkpoint is the workdir of a run that
learnt vectors, or a folder of sentence-transformers.
"""

import math
import pathlib
import sys

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
    from bertjax.common.errors import UserError
    from bertjax.common.progress import phase
    from bertjax.data.corpus.tables import SUFFIXES

    if arguments:
        raise UserError(f"unexpected argument {arguments[0]!r}; use --checkpoint=, --data= and --output=")
    if not _OUTPUT.value.endswith(SUFFIXES):
        raise UserError(f"--output={_OUTPUT.value}: must end in one of {', '.join(SUFFIXES)}")
    choice = _choice()

    from bertjax.embedding import datasets, mining, retrieval
    from bertjax.embedding.head import similarity_of
    from bertjax.inference.abilities import require_ability
    from bertjax.inference.task import HasVectors
    from bertjax.interop import pretrained

    keep_compiled()
    more = retrieval.read_documents(_CORPUS.value) if _CORPUS.value else ()
    search = retrieval.merged(datasets.read_training_search(_DATA.value, _FORM.value, _TEXTS.value), more)
    source = pretrained.read_with_tokenizer(_CHECKPOINT.value, _DTYPE.value)
    task = require_ability(source, HasVectors)
    similarity = similarity_of(source.settings)
    phase(
        f"computing the vectors of {len(search.queries):,} queries and {len(search.documents):,} documents", sys.stderr
    )
    vectors = task.embed_search(source, search)
    phase("looking for the nearest documents", sys.stderr)
    mined = mining.mine(search, *vectors, choice, similarity)
    print("\n".join(mining.write(_OUTPUT.value, search, mined, choice, similarity)), flush=True)
    if len(mined.rows) < len(search.queries) / 2:  # the warning has the remedy
        return
    columns = ",".join(["anchor", "positive", *(f"negative_{i}" for i in range(1, choice.negatives + 1))])
    data = [f"--config.data.path={_OUTPUT.value}", f"--config.data.texts={columns}"]
    train = pathlib.Path(_DATA.value)
    dev = train.with_name(train.name.replace("train", "dev"))
    if _FORM.value == "pairs" and dev != train and dev.is_file():  # comparable with the scores of the checkpoint
        data += [f"--config.data.dev.path={dev}", f"--config.data.dev.texts={_TEXTS.value}"]
    data.append("--workdir=runs/mined")
    print_next(command("train", "--config=embed", f"--config.init_checkpoint={_CHECKPOINT.value}", *data))


def _choice():
    """Returns the `mining.Choice` of the flags. Raises `UserError` if no document could be chosen."""
    from bertjax.common.errors import UserError
    from bertjax.embedding.mining import Choice

    first, last, negatives = _FIRST.value, _LAST.value, _NEGATIVES.value
    if first > last:
        raise UserError(f"--first={first}: must not be above --last={last}")
    if negatives > (holds := last - first + 1):
        raise UserError(f"--negatives={negatives}: ranks {first} to {last} hold {holds}; set --last")
    least, most = _MIN_SCORE.value, _MAX_SCORE.value
    if least > most:
        raise UserError(f"--min_score={least}: must not be above --max_score={most}")
    margin, is_share = _MARGIN.value, _MARGIN.value.endswith("%")
    try:
        margin = float(margin.removesuffix("%")) / (100 if is_share else 1)
    except ValueError:
        raise UserError(f"--margin={margin}: write a number, such as 0.1, or a share, such as 5%") from None
    for name, value in (("margin", margin), ("min_score", least), ("max_score", most)):
        if math.isnan(value):
            raise UserError(f"--{name}={value}: write a number")
    return Choice(negatives, first, last, margin, is_share, least, most, _SEED.value)


if __name__ == "__main__":
    run_command(main)
