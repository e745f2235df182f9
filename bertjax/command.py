"""What the commands share: flags in; for a user's mistake one clear line out, and a non-zero exit."""

import os
import pathlib
import signal
import sys
from collections.abc import Callable

from absl import app, flags
from ml_collections import config_flags

from bertjax.config import UserError


def define_config_flag() -> flags.FlagHolder:
    return config_flags.DEFINE_config_file(
        "config", None, "Experiment file, such as experiments/base.py; --config.x.y=VALUE overrides a field."
    )


def experiment_name() -> str:
    """ "small-mini" of --config=experiments/small.py:mini."""
    filename = config_flags.get_config_filename(flags.FLAGS["config"])
    path, _, argument = filename.partition(":")
    return "-".join(filter(None, [pathlib.Path(path).stem, argument]))


def run(main: Callable[[list[str]], None]) -> None:
    """Parses the flags and runs `main(positional arguments)`."""

    def guarded(argv):
        from absl import logging

        logging.set_verbosity(logging.ERROR)  # libraries' chatter
        signal.signal(signal.SIGTERM, _terminate)
        try:
            main(argv[1:])
        except UserError as error:
            _fail(str(error))
        except OSError as error:  # a path that cannot be read or written
            if error.filename is None:
                raise
            _fail(f"{error.filename}: {error.strerror or error}")
        except KeyboardInterrupt as stop:
            _fail(str(stop) or "interrupted", code=130)

    app.run(guarded, flags_parser=_parse)


def define_checkpoint_flag() -> flags.FlagHolder:
    return flags.DEFINE_string(
        "checkpoint",
        None,
        "A run's workdir (WORKDIR@best, @latest, @STEP), a Hugging Face folder, or bert_model.ckpt.",
    )


def read_lines(name: str | None) -> list[str]:
    """The lines of the file that --input names; none where it names none."""
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
    """Has JAX keep what it compiles for the next process: in JAX_COMPILATION_CACHE_DIR, or below the home folder."""
    import jax

    folder = os.environ.get("JAX_COMPILATION_CACHE_DIR", os.path.expanduser("~/.cache/bertjax/compiled"))
    jax.config.update("jax_compilation_cache_dir", folder)


def _terminate(*_):
    raise KeyboardInterrupt("terminated")  # cleans up as after Ctrl-C


def _parse(argv: list[str]) -> list[str]:
    try:
        arguments = app.parse_flags_with_usage(argv)
        if "config" in flags.FLAGS:
            getattr(flags.FLAGS.config, "task", None)  # a file that could not be loaded fails when it is looked into
        return arguments
    except UserError as error:  # of an experiment's get_config
        _fail(str(error))
    except OSError:
        _fail(f"--config: cannot load {config_flags.get_config_filename(flags.FLAGS['config'])!r}: no such Python file")
    except (SyntaxError, NameError, ImportError) as error:
        _fail(f"--config: not a Python file that can be loaded: {type(error).__name__}: {error}")
    except (AttributeError, KeyError, TypeError, ValueError, IndexError) as error:  # of --config.x.y=VALUE
        if isinstance(error, IndexError):  # it says no more
            _fail("--config: an index in a --config.x[i]=VALUE is too large")
        reason = str(error.args[0] if error.args else error).replace("\\n", " ").replace("\\", "")
        _fail("--config: " + " ".join(reason.replace("'", "").split()))


def _fail(message: str, code: int = 1):
    print(f"error: {message}", file=sys.stderr, flush=True)
    sys.exit(code)
