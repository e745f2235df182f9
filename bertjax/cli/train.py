"""Trains BERT: bertjax train --config=quickstart

The config is a complete experiment; --config.x.y=VALUE overrides a field. If the config names no records, they and the
vocabulary are prepared from the corpus. The same command resumes a run that was stopped.
"""

from absl import flags

from bertjax.cli.app import BEGAN, keep_compiled, run_command
from bertjax.cli.flags import define_config_flag, experiment_name, require_flags
from bertjax.cli.next_commands import print_next, uses_of

_CONFIG = define_config_flag()
_WORKDIR = flags.DEFINE_string("workdir", None, "Folder of the run; by default runs/EXPERIMENT.")
require_flags("config")


def main(arguments: list[str]) -> None:
    from bertjax.common.errors import UserError
    from bertjax.training.signals import report_signals

    if arguments:
        raise UserError(f"unexpected argument {arguments[0]!r}; settings are given as --config.name=value")
    with report_signals():
        import jax

        from bertjax.launch.validate import validate

        validate(_CONFIG.value)

        from bertjax.launch.start import launch
        from bertjax.reporting.page import draw

        keep_compiled()
        workdir = _WORKDIR.value or f"runs/{experiment_name()}"
        launch(_CONFIG.value, workdir, BEGAN, draw)
        if jax.process_index() == 0:
            print_next(*uses_of(workdir))


if __name__ == "__main__":
    run_command(main)
