"""Predicts a benchmark's test set: bertjax submit runs/mrpc --input=test.tsv --output=MRPC.tsv

The checkpoint is the workdir of a run on the benchmark's training set, the input is the benchmark's test file, and the
output is the file that its server expects.
"""

from absl import flags

from bertjax.cli.app import keep_compiled, run_command
from bertjax.cli.flags import define_checkpoint_flag, require_flags
from bertjax.cli.next_commands import print_next, uses_of

_CHECKPOINT = define_checkpoint_flag()
_INPUT = flags.DEFINE_string("input", None, "The test file, as the benchmark distributes it.")
_OUTPUT = flags.DEFINE_string("output", None, "The file to write.")
require_flags("input", "output")


def main(arguments: list[str]) -> None:
    from bertjax.common.errors import UserError

    if arguments:
        raise UserError(f"unexpected argument {arguments[0]!r}; use --checkpoint=, --input= and --output=")

    from bertjax.common.files import write_whole
    from bertjax.inference.abilities import require_ability
    from bertjax.inference.task import HasSubmission
    from bertjax.interop import pretrained

    keep_compiled()
    source = pretrained.read_with_tokenizer(_CHECKPOINT.value)
    content, note = require_ability(source, HasSubmission).submission(source, _INPUT.value)
    write_whole(_OUTPUT.value, content)
    print(f"{note} in {_OUTPUT.value}", flush=True)
    print_next(*uses_of(_CHECKPOINT.value))


if __name__ == "__main__":
    run_command(main)
