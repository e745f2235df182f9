"""Shared code of the commands: flags, and one-line errors with a non-zero exit code for users' mistakes."""

import os
import signal
import sys
from collections.abc import Callable

import ml_collections
from absl import app, flags

from bertjax import experiment
from bertjax.config import UserError

flags.disclaim_key_flags()  # --config is listed in the --help of each command that defines it


class _Config:
    """The result of `define_config_flag`; `value` is the config after `run` has parsed the flags."""

    value: ml_collections.ConfigDict


_config = _Config()


def define_config_flag() -> _Config:
    flags.DEFINE_string(
        "config",
        None,
        f"An experiment: {', '.join(experiment.shipped())}, NAME:ARGUMENT as in small:mini, or the path of a Python"
        " file. --config.x.y=VALUE overrides a field.",
    )
    return _config


def experiment_name() -> str:
    """Returns the experiment's name for use as a folder: "small-mini" for --config=small:mini."""
    return experiment.name(flags.FLAGS.config)


def run(main: Callable[[list[str]], None]) -> None:
    """Parses the flags, runs `main(positional arguments)`, and exits with one line on a user's mistake."""

    def guarded(argv):
        from absl import logging

        logging.set_verbosity(logging.ERROR)  # silences libraries
        main(argv[1:])

    signal.signal(signal.SIGTERM, _terminate)
    try:
        app.run(guarded, flags_parser=_parse)
    except UserError as error:
        _fail(str(error))
    except OSError as error:  # a path that cannot be read or written
        if error.filename is None:
            raise
        _fail(f"{error.filename}: {error.strerror or error}")
    except KeyboardInterrupt as stop:
        _fail(str(stop) or "interrupted", code=130)


def define_checkpoint_flag() -> flags.FlagHolder:
    return flags.DEFINE_string(
        "checkpoint",
        None,
        "A run's workdir (WORKDIR@best, @latest, @STEP), a Hugging Face folder, or bert_model.ckpt.",
    )


def read_lines(name: str | None) -> list[str]:
    """Returns the lines of the file that --input names; none if it is not set."""
    from etils import epath

    if name is None:
        return []
    path = epath.Path(name)
    if not path.is_file():
        raise UserError(f"--input: no file {name!r}")
    try:
        return path.read_text().removesuffix("\n").split("\n")
    except UnicodeDecodeError as error:
        raise UserError(f"--input: {name} is not UTF-8 ({error.reason} at byte {error.start})") from None


def keep_compiled() -> None:
    """Turns on JAX's persistent compilation cache, in JAX_COMPILATION_CACHE_DIR or ~/.cache/bertjax/compiled."""
    import jax

    folder = os.environ.get("JAX_COMPILATION_CACHE_DIR", os.path.expanduser("~/.cache/bertjax/compiled"))
    jax.config.update("jax_compilation_cache_dir", folder)
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0)  # many short compilations are seconds too


def _terminate(*_):
    raise KeyboardInterrupt("terminated")  # cleans up as after Ctrl-C


def _parse(argv: list[str]) -> list[str]:
    options = argv[: argv.index("--")] if "--" in argv else argv
    if {"-h", "-help", "--help", "--helpshort"} & set(options):
        _, _, own_flags = flags.FLAGS.main_module_help().partition(":\n")  # without the file name
        print(f"{sys.modules['__main__'].__doc__.strip()}\n\nFlags:\n{own_flags}", flush=True)
        sys.exit(0)
    flags.FLAGS.set_gnu_getopt()  # flags may follow positional arguments
    try:
        argv = flags.FLAGS.read_flags_from_files(argv, force_gnu=False)
        if "config" in flags.FLAGS:
            _config.value, argv = experiment.from_arguments(argv)
        return flags.FLAGS(argv)
    except (UserError, flags.Error) as error:
        raise UserError(" ".join(str(error).split())) from None


def _fail(message: str, code: int = 1):
    print(f"error: {message}", file=sys.stderr, flush=True)
    sys.exit(code)
