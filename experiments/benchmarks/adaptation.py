"""Adapts a checkpoint to a domain with and without new tokens, several seeds of each, and compares bits per byte.

Command:  python -m experiments.benchmarks.adaptation --checkpoint=PATH --domain=pydoc --general=TEXT --workdir=DIR
          prints a table of bits per byte of held-out text of the domain and of general text, before and after, as mean
          and standard deviation. The same command resumes an interrupted run and does not repeat finished runs
"""

import pathlib
import subprocess
import sys

from absl import flags

from bertjax.cli.app import run_command
from bertjax.cli.flags import define_checkpoint_flag
from bertjax.common.files import read_json
from bertjax.training.trackers.jsonl import read_metrics
from experiments.benchmarks.timing import mean_and_deviation, table_header, table_row

CHECKPOINT = define_checkpoint_flag()
DOMAIN = flags.DEFINE_string("domain", "pydoc", "Text of the domain, a value of data.corpus.")
GENERAL = flags.DEFINE_string("general", None, "General text, a fifth of the training data.", required=True)
WORKDIR = flags.DEFINE_string("workdir", "runs/adaptation", "Folder of all runs.")
PIECES = flags.DEFINE_list("pieces", ["0", "1000"], "Numbers of new tokens.")
SEEDS = flags.DEFINE_list("seeds", ["0", "1", "2"], "Seeds of training; all seeds share records and new tokens.")
STEPS = flags.DEFINE_integer("steps", 2000, "Steps of 16 sequences of 128 tokens.")
SETTINGS = {
    "batch_size": 16, "optimizer.learning_rate": 5e-4, "optimizer.warmup_steps": 100, "adapt.new_pieces_first": 0,
    "data.heldout_fraction": 0.05,
}  # fmt: skip


def adapt(pieces: str, seed: str) -> pathlib.Path:
    """Starts or resumes a run, and returns its workdir."""
    folder = pathlib.Path(WORKDIR.value) / f"{pieces}-{seed}"
    sources = f"{DOMAIN.value},{GENERAL.value}"
    fields = SETTINGS | {
        "init_checkpoint": CHECKPOINT.value, "data.corpus": sources, "data.mixture": f"{GENERAL.value}=20%",
        "tokenizer.extend": pieces, "seed": seed, "stages.adapt.steps": STEPS.value, "eval.every_steps": STEPS.value,
    }  # fmt: skip
    given = [f"--config.{name}={value}" for name, value in fields.items()]
    subprocess.run([sys.executable, "-m", "bertjax.main", "--config=adapt", f"--workdir={folder}", *given], check=True)
    return folder


def _last(folder: pathlib.Path, name: str) -> float:
    return [line[name] for line in read_metrics(folder) if name in line][-1]


def main(arguments: list[str]) -> None:
    del arguments
    print(table_header(["new tokens", "", "bits per byte before", "after", "tokens per word before", "after"]))
    for pieces in PIECES.value:
        folders = [adapt(pieces, seed) for seed in SEEDS.value]
        for source in (DOMAIN.value, GENERAL.value):
            before = read_json(folders[0] / "heldout_text.json")["before"][source]
            after = [_last(folder, f"eval/bits_per_byte ({source})") for folder in folders]
            report = (folders[0] / "report.txt").read_text().splitlines()
            (line,) = [line for line in report if line.startswith(f"held-out text of {source}:")]
            cells = [pieces, pathlib.Path(source).name, f"{before['bits_per_byte']:.3f}"]
            cells += [mean_and_deviation(after, 3), f"{before['tokens_per_word']:.3f}"]
            print(table_row([*cells, line.split()[-2]]), flush=True)


if __name__ == "__main__":
    run_command(main)
