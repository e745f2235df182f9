"""Trains BERT: python -m bertjax.main --config=quickstart

The config is a complete experiment; --config.x.y=VALUE overrides a field. If the config names no records, they and the
vocabulary are prepared from the corpus. The same command resumes a run that was stopped.
"""

from absl import flags

from bertjax.cli import flags as command

_CONFIG = command.define_config_flag()
_WORKDIR = flags.DEFINE_string("workdir", None, "Folder of the run; by default runs/EXPERIMENT.")
flags.mark_flag_as_required("config")


def main(arguments: list[str]) -> None:
    from bertjax.common.errors import UserError
    from bertjax.training.stop import announced

    if arguments:
        raise UserError(f"unexpected argument {arguments[0]!r}; settings are given as --config.name=value")
    with announced():
        import jax

        from bertjax.launch.validate import validate

        validate(_CONFIG.value)

        from bertjax.launch.start import launch
        from bertjax.reporting.page import draw

        command.keep_compiled()
        workdir = _WORKDIR.value or f"runs/{command.experiment_name()}"
        launch(_CONFIG.value, workdir, command.BEGAN, draw)
        if jax.process_index() == 0:
            command.print_next(*command.uses_of(workdir))


if __name__ == "__main__":
    command.run(main)
