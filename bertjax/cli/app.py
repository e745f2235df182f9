"""Runs a command: parses the flags, and turns a user's mistake into one line and an exit code."""

import difflib
import errno
import gc
import importlib.util
import os
import signal
import sys
import threading
import time
from collections.abc import Callable
from logging import getLogger

from absl import app, flags

from bertjax.cli.flags import CONFIG, MissingFlags, take_positional
from bertjax.cli.help import example_in, help_text
from bertjax.cli.overrides import MissingExperiment, from_arguments
from bertjax.common.caches import compilation_cache
from bertjax.common.errors import UserError
from bertjax.distributed.topology import has_accelerator

BEGAN = time.monotonic()  # the approximate start of the process: Python imports this module first
TERMINATED = "terminated"  # the message of the `KeyboardInterrupt` for SIGTERM
FULL_DISK = ("No space left on device", "quota exceeded", "File too large")  # in the messages of libraries


def run_command(main: Callable[[list[str]], None]) -> None:
    """Parses the flags, and runs `main(positional arguments)`. A user's mistake ends the process with one line."""

    def guarded(argv: list[str]) -> None:
        from absl import logging

        logging.set_verbosity(logging.FATAL)  # The libraries also raise the errors that they log.
        # Arguments are UTF-8 in every locale.
        main([os.fsencode(argument).decode(errors="replace") for argument in argv[1:]])

    _open_streams()
    _silence_leftovers()
    _keep_libtpu_off()
    signal.signal(signal.SIGTERM, _terminate)
    line, code = "", 1
    try:
        app.run(guarded, flags_parser=_parse)
    except UserError as error:
        line = f"error: {error}"
    except KeyboardInterrupt as stop:
        signal.signal(signal.SIGINT, signal.SIG_DFL)  # Python's handler would print a traceback while Python ends.
        line, code = str(stop) or "interrupted", 130
    except BrokenPipeError:  # The reader of the output has ended.
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)  # for the rest of the buffer
        sys.exit(1)
    except Exception as error:
        if not (failure := _failure_of_files(error)):
            raise
        line = f"error: {failure}"
    if line:
        gc.collect()  # Iterators of tf.data that outlive Python print warnings; the exception holds them.
        print(line, file=sys.stderr, flush=True)
        sys.exit(code)


def _open_streams() -> None:
    """Makes printing safe without streams (>&-), and in a locale that lacks a letter."""
    for number in range(3):
        try:
            os.fstat(number)
        except OSError:
            os.open(os.devnull, os.O_RDWR)  # takes this number, which a data file would take otherwise
    for stream in (sys.stdout, sys.stderr):
        if hasattr(stream, "reconfigure"):
            stream.reconfigure(errors="backslashreplace")


def _silence_leftovers() -> None:
    """Silences the errors of tasks that a failed task of Orbax leaves behind.

    A Ctrl-C that comes while Python runs a callback, which cannot raise, is sent again, because Python drops it.
    """
    default_hook = sys.unraisablehook
    getLogger("asyncio").disabled = True

    def hook(failed: "sys.UnraisableHookArgs") -> None:
        if isinstance(failed.exc_value, KeyboardInterrupt):
            number = signal.SIGTERM if str(failed.exc_value) == TERMINATED else signal.SIGINT
            if signal.getsignal(number) is not signal.SIG_DFL:
                threading.Timer(0.05, os.kill, (os.getpid(), number)).start()
        elif str(failed.exc_value) != "Event loop is closed":
            default_hook(failed)

    sys.unraisablehook = hook


def _failure_of_files(error: Exception) -> str:
    """Returns a line about a full disk, or about a file that cannot be read or written; "" for other errors."""
    cause: BaseException | None = error
    while cause is not None:
        if full := _full_disk(cause):
            return f"{full}; free some space, and start the same command again"
        cause = cause.__cause__ or cause.__context__
    if isinstance(error, OSError) and error.filename is not None:
        return f"{error.filename}: {error.strerror or error}"
    return ""


def _full_disk(error: BaseException) -> str:
    """Returns a line with the path on the full disk; "" for another error. The messages depend on the library."""
    if isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG):
        return f"{error.filename or _output()}: {error.strerror}"
    message = next((words for words in FULL_DISK if words in str(error)), "")
    return message and f"{_output()}: {message}"


def _output() -> str:
    """Returns the value of --workdir or --output; "output" if the command has neither."""
    values = (flags.FLAGS[name].value for name in ("workdir", "output") if name in flags.FLAGS)
    return next(filter(None, values), "output")


def keep_compiled() -> None:
    """Turns on JAX's persistent compilation cache, in JAX_COMPILATION_CACHE_DIR or ~/.cache/bertjax/compiled."""
    import jax

    jax.config.update("jax_compilation_cache_dir", compilation_cache())
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0)  # Many short compilations take seconds, too.


def start_reading(checkpoint: str) -> None:
    """Prints to a terminal that a checkpoint is read, which takes seconds; turns on the compilation cache."""
    if sys.stderr.isatty():
        print(f"reading {checkpoint} ...", file=sys.stderr, flush=True)
    keep_compiled()


def _keep_libtpu_off() -> None:
    """Prevents JAX from starting libtpu on a machine without accelerators, where libtpu prints a page of errors."""
    if importlib.util.find_spec("libtpu") and not has_accelerator():
        os.environ.setdefault("JAX_PLATFORMS", "cpu")


def _terminate(signal_number: int, frame: object) -> None:
    raise KeyboardInterrupt(TERMINATED)  # so that SIGTERM cleans up as Ctrl-C does


def _own_flags() -> list[str]:
    """Returns the names of the flags that `--help` lists."""
    return [flag.name for flag in flags.FLAGS.get_key_flags_for_module(sys.argv[0])]


def _parse(argv: list[str]) -> list[str]:
    """Parses the flags; returns the name of the program and the arguments that are no flags."""
    options = argv[: argv.index("--")] if "--" in argv else argv
    docstring = sys.modules["__main__"].__doc__ or ""
    if {"-h", "-help", "--help", "--helpshort"} & set(options):
        print(help_text(docstring, flags.FLAGS.get_key_flags_for_module(sys.argv[0])), flush=True)
        sys.exit(0)
    flags.FLAGS.set_gnu_getopt()  # Flags may follow positional arguments.
    try:
        argv = flags.FLAGS.read_flags_from_files(argv, force_gnu=False)
        if "config" in flags.FLAGS:
            CONFIG.value, argv = from_arguments(argv)
        return take_positional(flags.FLAGS(argv))
    except (UserError, flags.Error) as error:
        message = " ".join(str(error).split())
        if isinstance(error, flags.UnrecognizedFlagError):
            close = difflib.get_close_matches(error.flagname, _own_flags(), n=1)
            guess = f"did you mean --{close[0]}?" if close else "--help lists the flags"
            message = f"--{error.flagname}: the command has no flag of this name; {guess}"
        if isinstance(error, MissingFlags | MissingExperiment):
            message += f"; an example of the command: {example_in(docstring)}"
        raise UserError(message) from None
