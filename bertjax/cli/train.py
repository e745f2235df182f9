"""Trains a model.

    bertjax train --config=quickstart

The config is a complete experiment; --config.x.y=VALUE overrides a field. If the config names no records, the command
prepares the vocabulary and the records from the corpus. The same command resumes an interrupted run.
"""

from absl import flags

from bertjax.cli.app import BEGAN, keep_compiled, run_command
from bertjax.cli.flags import define_config_flag, experiment_name, refuse_arguments
from bertjax.cli.next_commands import print_next, uses_of

_CONFIG = define_config_flag()
_WORKDIR = flags.DEFINE_string("workdir", None, "Folder of the run; by default runs/EXPERIMENT.")


def main(arguments: list[str]) -> None:
    """Trains, and proposes commands that use the checkpoint."""
    refuse_arguments(arguments, "settings are given as --config.name=value")

    from bertjax.training.signals import report_signals

    with report_signals():
        import jax

        from bertjax.library.runs import train

        keep_compiled()
        workdir = _WORKDIR.value or f"runs/{experiment_name()}"
        train(_CONFIG.value, workdir, began=BEGAN)
        if jax.process_index() == 0:
            print_next(*uses_of(workdir))


if __name__ == "__main__":
    run_command(main)
