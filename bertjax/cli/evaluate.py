"""Evaluates a checkpoint, without training: bertjax evaluate runs/mine --data=test.csv

With a fine-tuned run, --data is a labelled file like its dev set; prints the same scores, with the thresholds that the
dev set decided. With any checkpoint that makes vectors of texts, --form, --texts and --label describe --data, as
config.data does in a run: --data=BEIR/scifact --form=search. With a pre-trained checkpoint, --pairs are minimal pairs:
each line of the file is an object with a `good` and a `bad` sentence and perhaps its `paradigm` and `phenomenon`, as in
BLiMP (Warstadt et al. 2020), whose own files are read as well. Prints the share of pairs whose good sentence has the
higher likelihood; a model that fills masks has a pseudo-log-likelihood instead. Chance is 50 %. --checkpoint takes any
checkpoint that bertjax predict takes.
"""

import functools
import json
import sys

from absl import flags

from bertjax.cli.app import keep_compiled, run_command
from bertjax.cli.flags import define_checkpoint_flag, define_dtype_flag, group_flags
from bertjax.cli.next_commands import print_next, uses_of
from bertjax.training.signals import exit_on_signal

_CHECKPOINT = define_checkpoint_flag()
_DTYPE = define_dtype_flag()
_DATA = flags.DEFINE_string("data", None, "A labelled file like the dev set of the run; of vectors, also its folder.")
_READING = [
    flags.DEFINE_string("form", None, "Of vectors: what the examples of --data are, as config.data.form."),
    flags.DEFINE_string("texts", None, "Of vectors: the columns of the texts, as config.data.texts."),
    flags.DEFINE_string("label", None, "Of vectors: the column of the score or label, as config.data.label."),
    flags.DEFINE_string("widths", None, "Of vectors: judges their first so many numbers as well, such as 256,64."),
    flags.DEFINE_bool(
        "ignore_identical_ids",
        None,
        "Of --form=search: no query finds the document with its id, as for BEIR's ArguAna.",
    ),
]
_PAIRS = flags.DEFINE_string("pairs", None, "The .jsonl file with the pairs; .gz, .xz or .zst may follow.")
_MOST = flags.DEFINE_integer("most", 0, "Only the first so many pairs of each paradigm; 0: all.", lower_bound=0)
group_flags("Labelled data", _DATA)
group_flags("Embeddings", *_READING)
group_flags("Minimal pairs", _PAIRS, _MOST)
_JSON = flags.DEFINE_bool("json", False, "Print one JSON object; of pairs also with the shares of the paradigms.")


@exit_on_signal()
def main(arguments: list[str]) -> None:
    from etils import epath

    from bertjax.common.errors import UserError

    if arguments:
        raise UserError(f"unexpected argument {arguments[0]!r}; give --data=FILE or --pairs=FILE")
    if bool(_DATA.value) == bool(_PAIRS.value):
        raise UserError("give one of --data=FILE, labelled examples, and --pairs=FILE, minimal pairs")
    if _MOST.value and _DATA.value:
        raise UserError(f"--most={_MOST.value}: is for --pairs; leave it out")
    for flag in _READING:
        if flag.value is not None and _PAIRS.value:
            raise UserError(f"--{flag.name}={flag.value}: is for --data; leave it out")
    given = _DATA if _DATA.value else _PAIRS
    if not (epath.Path(given.value).is_file() or (_DATA.value and epath.Path(given.value).is_dir())):
        raise UserError(f"--{given.name}: no file {given.value!r}")
    keep_compiled()
    score_data() if _DATA.value else compare_pairs()


def score_data() -> None:
    """Scores the checkpoint on labelled data."""
    from bertjax import library
    from bertjax.finetuning.run import report

    description = {flag.name: flag.value for flag in _READING}
    print_note = functools.partial(print, file=sys.stderr, flush=True)
    scores = library.evaluate(_CHECKPOINT.value, _DATA.value, _DTYPE.value, print_note, **description)
    if _JSON.value:
        print(json.dumps({"scores": scores.scores, "decided": scores.decided}, ensure_ascii=False), flush=True)
    else:
        print(report(scores, _DATA.value), flush=True)
        print_next(*uses_of(_CHECKPOINT.value))


def compare_pairs() -> None:
    from bertjax.inference import likelihood
    from bertjax.inference.predictor import words_model
    from bertjax.interop import pretrained

    pairs = likelihood.read_pairs(_PAIRS.value, _MOST.value)
    source = pretrained.read_with_tokenizer(_CHECKPOINT.value, _DTYPE.value)
    is_right = likelihood.compare(*words_model(source), source.tokenizer, pairs)
    share = sum(is_right) / len(pairs)
    phenomena, paradigms = (likelihood.shares(pairs, is_right, by) for by in ("phenomenon", "paradigm"))
    if _JSON.value:
        by_name = {name: share for name, (share, _) in paradigms.items()}
        print(json.dumps({"share": share, "pairs": len(pairs), "paradigms": by_name}, ensure_ascii=False), flush=True)
        return
    groups = phenomena if len(phenomena) > 1 else paradigms
    for name, (part, count) in sorted(groups.items()) if len(groups) > 1 else ():
        print(f"{name:<44} {part:6.1%} of {count:,}")
    print(f"the good sentence is more likely in {share:.1%} of {len(pairs):,} pairs (chance: 50 %)", flush=True)
    print_next(*uses_of(_CHECKPOINT.value))


if __name__ == "__main__":
    run_command(main)
