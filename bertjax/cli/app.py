"""Runs a command: parses its flags, and turns a mistake of the user into one line and an exit code."""

import errno
import gc
import importlib.util
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from logging import getLogger

from absl import app, flags

from bertjax.cli.flags import CONFIG, MissingFlags, take_positional
from bertjax.cli.help import example_in, help_text
from bertjax.cli.overrides import MissingExperiment, from_arguments
from bertjax.common.caches import compilation_cache
from bertjax.common.errors import UserError
from bertjax.distributed.topology import has_accelerator

BEGAN = time.monotonic()  # about when the process began: Python imports this module first


def run_command(main: Callable[[list[str]], None]) -> None:
    """Parses the flags, runs `main(positional arguments)`, and exits with one line on a user's mistake."""

    def guarded(argv):
        from absl import logging

        logging.set_verbosity(logging.FATAL)  # silences libraries, which also raise what they log
        # Texts are UTF-8, whatever letters the locale has.
        main([os.fsencode(argument).decode(errors="replace") for argument in argv[1:]])

    _open_streams()
    _silence_leftovers()
    _look_for_no_tpu()
    signal.signal(signal.SIGTERM, _terminate)
    failure, code, kind = "", 1, "error: "
    try:
        app.run(guarded, flags_parser=_parse)
    except UserError as error:
        failure = str(error)
    except KeyboardInterrupt as stop:
        signal.signal(signal.SIGINT, signal.SIG_DFL)  # while Python ends, its handler would print a traceback
        failure, code, kind = str(stop) or "interrupted", 130, ""
    except BrokenPipeError:  # whoever read the output has gone
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)  # for what is still in the buffer
        sys.exit(1)
    except Exception as error:
        for cause in _causes(error):  # a path that cannot be read or written; a full disk, whatever fails of it
            if full := _full(cause):
                failure = failure or f"{full}; free some space, and start the same command again"
        if not failure and (not isinstance(error, OSError) or error.filename is None):
            raise
        failure = failure or f"{error.filename}: {error.strerror or error}"
    if failure:
        gc.collect()  # with the exception's frames, the iterators of tf.data: those that outlive Python print warnings
        print(f"{kind}{failure}", file=sys.stderr, flush=True)
        sys.exit(code)


def _open_streams() -> None:
    """Makes printing safe: without streams (>&-), and in a locale that lacks a letter."""
    for number in range(3):
        try:
            os.fstat(number)
        except OSError:
            os.open(os.devnull, os.O_RDWR)  # takes this number, which a data file would get otherwise
    for stream in (sys.stdout, sys.stderr):
        if hasattr(stream, "reconfigure"):
            stream.reconfigure(errors="backslashreplace")


def _silence_leftovers() -> None:
    """Where a task of Orbax fails, others are left behind, whose ends asyncio and TensorStore would print.

    A Ctrl-C that comes while Python runs a callback, which cannot raise, is sent again: Python would drop it.
    """
    shown = sys.unraisablehook
    getLogger("asyncio").disabled = True

    def hook(failed) -> None:
        if isinstance(failed.exc_value, KeyboardInterrupt):
            number = signal.SIGTERM if str(failed.exc_value) == TERMINATED else signal.SIGINT
            if signal.getsignal(number) is not signal.SIG_DFL:
                threading.Timer(0.05, os.kill, (os.getpid(), number)).start()
        elif str(failed.exc_value) != "Event loop is closed":
            shown(failed)

    sys.unraisablehook = hook


def _causes(error: BaseException | None) -> Iterator[BaseException]:
    while error is not None:
        yield error
        error = error.__cause__ or error.__context__


def _full(error: BaseException) -> str:
    """Returns a line with the path on the full disk if the disk is full; each library has another message for this."""
    if isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG):
        return f"{error.filename or _output()}: {error.strerror}"
    said = next(
        (words for words in ("No space left on device", "quota exceeded", "File too large") if words in str(error)), ""
    )
    return said and f"{_output()}: {said}"


def _output() -> str:
    """Returns the value of --workdir or --output; "output" if the command has neither."""
    named = (flags.FLAGS[name].value for name in ("workdir", "output") if name in flags.FLAGS)
    return next(filter(None, named), "output")


def keep_compiled() -> None:
    """Turns on JAX's persistent compilation cache, in JAX_COMPILATION_CACHE_DIR or ~/.cache/bertjax/compiled."""
    import jax

    jax.config.update("jax_compilation_cache_dir", compilation_cache())
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0)  # many short compilations are seconds too


def _look_for_no_tpu() -> None:
    """Keeps JAX from starting libtpu, which also compiles for TPUs elsewhere, on a machine without accelerators.

    It would print a page of errors.
    """
    if importlib.util.find_spec("libtpu") and not has_accelerator():
        os.environ.setdefault("JAX_PLATFORMS", "cpu")


TERMINATED = "terminated"


def _terminate(*_):
    raise KeyboardInterrupt(TERMINATED)  # cleans up as after Ctrl-C


def _parse(argv: list[str]) -> list[str]:
    options, docstring = argv[: argv.index("--")] if "--" in argv else argv, sys.modules["__main__"].__doc__
    if {"-h", "-help", "--help", "--helpshort"} & set(options):
        print(help_text(docstring, flags.FLAGS.get_key_flags_for_module(sys.argv[0])), flush=True)
        sys.exit(0)
    flags.FLAGS.set_gnu_getopt()  # flags may follow positional arguments
    try:
        argv = flags.FLAGS.read_flags_from_files(argv, force_gnu=False)
        if "config" in flags.FLAGS:
            CONFIG.value, argv = from_arguments(argv)
        return take_positional(flags.FLAGS(argv))
    except (UserError, flags.Error) as error:
        message = " ".join(str(error).split())
        if isinstance(error, MissingFlags | MissingExperiment):
            message += f"; an example of the command: {example_in(docstring)}"
        raise UserError(message) from None
