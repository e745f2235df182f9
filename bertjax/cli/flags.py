"""Shared code of the commands: flags, and one-line errors with a non-zero exit code for users' mistakes."""

import errno
import gc
import importlib.util
import itertools
import os
import re
import shlex
import signal
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from logging import getLogger

import ml_collections
from absl import app, flags

from bertjax.cli.overrides import MissingExperiment, from_arguments
from bertjax.common.errors import UserError
from bertjax.config import experiments
from bertjax.config.limits import DTYPES
from bertjax.distributed.topology import has_accelerator
from bertjax.launch.overrides import find_field

BEGAN = time.monotonic()  # about when the process began: Python imports this module first
flags.disclaim_key_flags()  # --config is listed in the --help of each command that defines it


class _Config:
    """The result of `define_config_flag`; `value` is the config after `run` has parsed the flags."""

    value: ml_collections.ConfigDict


_config = _Config()


def define_config_flag() -> _Config:
    flags.DEFINE_string(
        "config",
        None,
        f"An experiment: {', '.join(experiments.shipped())}, NAME:ARGUMENT as in small:mini, or the path of a Python"
        " file. --config.x.y=VALUE overrides a field.",
    )
    return _config


def experiment_name() -> str:
    """Returns the experiment's name for use as a folder: "small-mini" for --config=small:mini."""
    return experiments.name(flags.FLAGS.config)


def run(main: Callable[[list[str]], None]) -> None:
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
    """Returns what the command writes to, as far as its flags say that."""
    named = (flags.FLAGS[name].value for name in ("workdir", "output") if name in flags.FLAGS)
    return next(filter(None, named), "output")


def define_checkpoint_flag() -> flags.FlagHolder:
    return flags.DEFINE_string(
        "checkpoint",
        None,
        "A run's workdir (WORKDIR@best, @latest, @STEP), a folder of Hugging Face or sentence-transformers, "
        "hub:NAME[@REVISION] for one of the hub, or bert_model.ckpt.",
    )


def define_dtype_flag() -> flags.FlagHolder:
    return flags.DEFINE_enum(
        "dtype",
        None,
        DTYPES,
        "Type to compute in, as config.dtype; the run's unless given, and auto for checkpoints that are no run's.",
    )


def lines(name: str | None) -> Iterator[str]:
    """Yields the lines of the file that --input names; none if it is not set."""
    from etils import epath

    if name is None:
        return
    path = epath.Path(name)
    if path.is_dir():
        raise UserError(f"--input={name}: is a folder; name a file with one text per line")
    if not path.is_file():
        raise UserError(f"--input: no file {name!r}")
    with path.open("rb") as file:
        for number, line in enumerate(file, 1):
            if number == 1 and line.startswith(b"\x1f\x8b"):
                raise UserError(f"--input: {name} is compressed; unpack it first")
            try:
                text = line.removesuffix(b"\n").removesuffix(b"\r").decode("utf-8-sig" if number == 1 else "utf-8")
            except UnicodeDecodeError as error:
                place = f"{name}:{number}"
                raise UserError(f"--input: {place} is not UTF-8 ({error.reason} at byte {error.start})") from None
            yield from text.split("\r")


def print_next(*commands: Sequence[str]) -> None:
    """Prints commands that may come next, as lines to copy into a shell. They go to stderr: stdout may be data."""
    if commands:
        print("next:", *(f"  {shlex.join(words)}" for words in commands), sep="\n", file=sys.stderr, flush=True)


def module(name: str, *arguments: str) -> list[str]:
    """Returns the words of the command `python -m bertjax.NAME`."""
    return ["python", "-m", f"bertjax.{name}", *arguments]


def config_arguments() -> list[str]:
    """Returns the arguments of this command that specify its config."""
    kept, arguments = [], iter(sys.argv[1:])
    for argument in itertools.takewhile(lambda word: word != "--", arguments):
        name, has_value, _ = argument.lstrip("-").partition("=")
        if argument.startswith("-") and name.split(".")[0] in ("config", "noconfig"):
            is_switch = "." in name and find_field(_config.value, name.partition(".")[2]).kind is bool
            kept += [argument] if has_value or is_switch else [argument, next(arguments, "")]
    return kept


def uses_of(checkpoint: str) -> list[list[str]]:
    """Returns commands that use a checkpoint: `predict` with a text that fits, or `extract`; `convert`; and `serve`, or
    for a pre-trained run `main`, which fine-tunes it. Returns none for a path without a checkpoint, such as a search.
    """
    from bertjax.finetuning.run import NARROW_RATE, WIDE
    from bertjax.finetuning.task import SEPARATOR
    from bertjax.inference import tasks
    from bertjax.interop import huggingface, pretrained
    from bertjax.objectives.parsing import terms_of_run

    try:
        place = pretrained.find(checkpoint)
        architecture, settings = pretrained.read_settings(checkpoint)
        if place.format == "huggingface" and not place.vectors:
            architecture, *_ = huggingface.read_head(place.folder / huggingface.CONFIG)
        if place.format == "peft" and not place.vectors:
            architecture = pretrained.class_of_adapter(place)
        task = tasks.of_checkpoint(settings.get("task", ""), architecture)
        learnt = [term.name for term in terms_of_run(settings)]
        is_google = place.format not in ("huggingface", "peft") and not architecture and "objective" not in settings
    except UserError:  # such as a task that is not registered here
        return []
    given = f"--checkpoint={checkpoint}"
    if task is not None:
        parts = len(task.columns(settings)) if settings.get("task") else 0
        texts = ["a text", "another text", "a third text"][: parts or task.inputs.parts.start]
        found = [module("predict", given, SEPARATOR.join(texts))]
    elif architecture.endswith(("ForMaskedLM", "ForPreTraining")) or "mlm" in learnt or is_google:
        text = next(iter(settings.get("eval", {}).get("fill_masks", ())), "the [MASK]")
        found = [module("predict", given, text)]
    elif architecture.endswith("ForCausalLM") or "lm" in learnt:
        found = [module("predict", given, "--generate=20", "the")]
    else:
        found = [module("extract", given, "--pool=mean", "--output=vectors.npy", "a text")]
    if place.format == "bertjax":
        of_vectors = task is not None and task.vectors is not None
        form = "sentence-transformers" if of_vectors else "huggingface"
        output = f"{checkpoint.rstrip('/').replace('@', '-')}-{form}"
        if not os.path.exists(output):
            found.append(module("convert", f"--source={checkpoint}", f"--output={output}", f"--format={form}"))
    if task is None and place.format == "bertjax":
        fine_tuning = ["--config=classify", f"--config.init_checkpoint={checkpoint}", "--config.data.path=reviews.csv"]
        if settings.model.get("hidden_size", WIDE) < WIDE:
            fine_tuning.append(f"--config.optimizer.learning_rate={NARROW_RATE:g}")
        return [*found, module("main", *fine_tuning, f"--workdir={checkpoint}-classify")]
    return [*found, module("serve", given)] if importlib.util.find_spec("aiohttp") else found


def keep_compiled() -> None:
    """Turns on JAX's persistent compilation cache, in JAX_COMPILATION_CACHE_DIR or ~/.cache/bertjax/compiled."""
    import jax

    home = os.path.expanduser("~")
    home = tempfile.gettempdir() if home.startswith("~") else home  # a user without a home
    folder = os.environ.get("JAX_COMPILATION_CACHE_DIR", f"{home}/.cache/bertjax/compiled")
    jax.config.update("jax_compilation_cache_dir", folder)
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


_MISSING = re.compile(r"Flag (--\w+) must have a value other than None")  # absl's message for a required flag


def example_in(docstring: str) -> str:
    """Returns the command in the first lines of a command's docstring, on one line."""
    return re.search(r"python -m (.*\\\n)*.*", docstring)[0].replace("\\\n", "")


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
            _config.value, argv = from_arguments(argv)
        return flags.FLAGS(argv)
    except (UserError, flags.Error) as error:
        message = " ".join(str(error).split())
        if missing := _MISSING.findall(message):
            message = f"{', '.join(missing)}: {'is' if len(missing) == 1 else 'are'} missing"
        if missing or isinstance(error, MissingExperiment):
            message += f"; an example of the command: {example_in(sys.modules['__main__'].__doc__)}"
        raise UserError(message) from None
