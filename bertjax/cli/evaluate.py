"""Evaluates a checkpoint, without training.

    bertjax evaluate runs/mine --data=test.csv

For a fine-tuned run, --data is a labelled file like its dev set. Prints the scores, with the thresholds that were tuned
on the dev set. For a checkpoint that computes embeddings, --form, --texts and --label describe --data, as
config.data does in a run: --data=BEIR/scifact --form=search.

For a pre-trained checkpoint, --pairs are minimal pairs: each line of the file is an object with a `good` and a `bad`
sentence and perhaps its `paradigm` and `phenomenon`; files of BLiMP (Warstadt et al. 2020) are read as well. Prints the
share of pairs whose good sentence has the higher likelihood, or the higher pseudo-log-likelihood for a model that fills
masks. Chance is 50 %. --checkpoint takes any checkpoint that bertjax predict takes.
"""

import contextlib
import functools
import json
import sys

from absl import flags

from bertjax.cli.app import run_command, start_reading
from bertjax.cli.flags import define_checkpoint_flag, define_dtype_flag, group_flags, refuse_arguments
from bertjax.cli.next_commands import print_next, uses_of
from bertjax.common.errors import UserError
from bertjax.config.limits import PRECISIONS
from bertjax.training.signals import exit_on_signal

_CHECKPOINT = define_checkpoint_flag()
_DTYPE = define_dtype_flag()
_DATA = flags.DEFINE_string("data", None, "A labelled file like the dev set of the run; for embeddings, also a folder.")
_READING = [
    flags.DEFINE_string("form", None, "The form of the examples of --data, as config.data.form."),
    flags.DEFINE_string("texts", None, "The columns of the texts, as config.data.texts."),
    flags.DEFINE_string("label", None, "The column of the score or label, as config.data.label."),
    flags.DEFINE_string(
        "candidates", None, "For rerankers, with --form=search: a run file of TREC with the candidates of each query."
    ),
    flags.DEFINE_string(
        "widths", None, "Also evaluates embeddings that are shortened to these widths, such as 256,64."
    ),
    flags.DEFINE_bool(
        "ignore_identical_ids",
        None,
        "With --form=search: ignores the document that has the id of the query, as for ArguAna of BEIR.",
    ),
    flags.DEFINE_enum(
        "precision",
        None,
        [*PRECISIONS],
        "Also evaluates retrieval by documents of 8 bits (int8) or 1 bit (ubinary) per dimension.",
    ),
    flags.DEFINE_integer(
        "rescore",
        None,
        "With --precision: small vectors retrieve this many times more documents, which the float query ranks. By "
        "default 4.",
        lower_bound=1,
    ),
]
_PAIRS = flags.DEFINE_string(
    "pairs", None, "The .jsonl file with the pairs, also compressed: .jsonl.gz, .jsonl.xz or .jsonl.zst."
)
_MOST = flags.DEFINE_integer("most", 0, "Number of pairs of each paradigm; 0 reads all.", lower_bound=0)
group_flags("Labelled data", _DATA)
group_flags("Embeddings and rerankers", *_READING)
group_flags("Minimal pairs", _PAIRS, _MOST)
_JSON = flags.DEFINE_bool("json", False, "Print one JSON object, with the scores of all paradigms.")


@exit_on_signal()
def main(arguments: list[str]) -> None:
    """Prints the scores."""
    refuse_arguments(arguments, "give --data=FILE or --pairs=FILE")
    _check_flags()
    start_reading(_CHECKPOINT.value)
    if _DATA.value:
        _score_data(_DATA.value)
    elif _PAIRS.value:
        _score_pairs(_PAIRS.value)


def _check_flags() -> None:
    """Raises `UserError` unless the flags describe one file, which exists."""
    from etils import epath

    if bool(_DATA.value) == bool(_PAIRS.value):
        raise UserError(
            "--data, --pairs: set one of them, --data=test.csv for labelled examples, or --pairs=pairs.jsonl for "
            "minimal pairs"
        )
    if _MOST.value and _DATA.value:
        raise UserError(f"--most={_MOST.value}: is for --pairs; leave the flag out")
    for flag in _READING:
        if flag.value is not None and _PAIRS.value:
            raise UserError(f"--{flag.name}={flag.value}: is for --data; leave the flag out")
    flag = _DATA if _DATA.value else _PAIRS
    path = epath.Path(flag.value or "")
    if not (path.is_file() or (_DATA.value and path.is_dir())):
        raise UserError(f"--{flag.name}={flag.value}: no such file; correct the path")


def _score_data(data: str) -> None:
    from bertjax.finetuning.run import report
    from bertjax.library.checkpoints import evaluate

    description = {flag.name: flag.value for flag in _READING}
    print_note = functools.partial(print, file=sys.stderr, flush=True)
    with contextlib.redirect_stdout(sys.stderr):  # the progress; stdout has the results only
        scores = evaluate(_CHECKPOINT.value, data, _DTYPE.value, print_note, **description)
    if _JSON.value:
        print(json.dumps({"scores": scores.scores, "decided": scores.decided}, ensure_ascii=False), flush=True)
    else:
        print(report(scores, data), flush=True)
        print_next(*uses_of(_CHECKPOINT.value))


def _score_pairs(path: str) -> None:
    from bertjax.inference.likelihood import read_pairs, score_pairs
    from bertjax.library.checkpoints import read_checkpoint

    pairs = read_pairs(path, _MOST.value)
    scores = score_pairs(read_checkpoint(_CHECKPOINT.value, _DTYPE.value), pairs)
    if _JSON.value:
        print(scores.as_json(), flush=True)
    else:
        print(*scores.lines(), sep="\n", flush=True)
        print_next(*uses_of(_CHECKPOINT.value))


if __name__ == "__main__":
    run_command(main)
