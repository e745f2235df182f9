"""Converts a corpus to TFRecords.

    bertjax prepare --config=base --config.data.corpus=texts/ --output=records

Writes the records of every stage of the config, the tokenizer, and manifest.json. The same config gives the same bytes
for any number of workers. The same command resumes after an interruption. Train on the records with
--config.data.records=records.

On a cluster, the flags of Apache Beam follow --. Beam has its own workers, and does not resume:
bertjax prepare --config=base --output=gs://... --runner=DataflowRunner -- --project=... --region=...
"""

from absl import flags

from bertjax.cli.app import run_command
from bertjax.cli.flags import (
    config_arguments,
    define_config_flag,
    define_required_flag,
    experiment_name,
    refuse_arguments,
)
from bertjax.cli.next_commands import command, print_next
from bertjax.distributed.topology import available_cores

_CONFIG = define_config_flag()
_OUTPUT = define_required_flag("output", "Folder for the records; must not contain finished records.")
_WORKERS = flags.DEFINE_integer("workers", available_cores(), "Number of parallel processes; by default one per core.")
_RUNNER = flags.DEFINE_string("runner", None, "Run with Apache Beam: DirectRunner, DataflowRunner, FlinkRunner, ...")


def main(arguments: list[str]) -> None:
    """Writes the records, and proposes the training command."""
    unexpected = [argument for argument in arguments if not (_RUNNER.value and argument.startswith("--"))]
    refuse_arguments(unexpected, "settings are given as --name=value")

    from bertjax.library.runs import prepare

    beam_options = [f"--runner={_RUNNER.value}", *arguments] if _RUNNER.value else None
    prepare(_CONFIG.value, _OUTPUT.value, _WORKERS.value, beam_options=beam_options)
    print(f"records, tokenizer and manifest written to {_OUTPUT.value}", flush=True)
    records, workdir = f"--config.data.records={_OUTPUT.value}", f"--workdir=runs/{experiment_name()}"
    print_next(command("train", *config_arguments(), records, workdir))


if __name__ == "__main__":
    run_command(main)
