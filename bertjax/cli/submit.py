"""Predicts a benchmark's test set.

    bertjax submit runs/mrpc --input=test.tsv --output=MRPC.tsv

The checkpoint is the workdir of a run on the benchmark's training set, the input is the benchmark's test file, and the
output is the file that its server expects.
"""

from bertjax.cli.app import run_command, start_reading
from bertjax.cli.flags import define_checkpoint_flag, define_required_flag, refuse_arguments
from bertjax.cli.next_commands import print_next, uses_of

_CHECKPOINT = define_checkpoint_flag()
_INPUT = define_required_flag("input", "The test file, as the benchmark distributes it.")
_OUTPUT = define_required_flag("output", "The file to write.")


def main(arguments: list[str]) -> None:
    """Writes the submission, and prints the number of predictions."""
    refuse_arguments(arguments, "use --checkpoint=, --input= and --output=")

    from bertjax import library

    start_reading(_CHECKPOINT.value)
    print(library.submit(_CHECKPOINT.value, _INPUT.value, _OUTPUT.value), flush=True)
    print_next(*uses_of(_CHECKPOINT.value))


if __name__ == "__main__":
    run_command(main)
