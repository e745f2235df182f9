"""Shared code of the commands: flags, and one-line errors with a non-zero exit code for users' mistakes."""

import itertools
import sys
from collections.abc import Iterator, Sequence

import ml_collections
from absl import flags

from bertjax.common.errors import UserError
from bertjax.config import experiments
from bertjax.config.limits import DTYPES
from bertjax.launch.overrides import find_field

flags.disclaim_key_flags()  # --config is listed in the --help of each command that defines it


class _Config:
    """The result of `define_config_flag`; `value` is the config after `run` has parsed the flags."""

    value: ml_collections.ConfigDict


CONFIG = _Config()


def define_config_flag() -> _Config:
    flags.DEFINE_string(
        "config",
        None,
        f"An experiment: {', '.join(experiments.shipped())}, NAME:ARGUMENT as in small:mini, or the path of a Python"
        " file. --config.x.y=VALUE overrides a field.",
    )
    return CONFIG


def experiment_name() -> str:
    """Returns the experiment's name for use as a folder: "small-mini" for --config=small:mini."""
    return experiments.name(flags.FLAGS.config)


class MissingFlags(UserError):
    """Required flags are missing."""


def require_flags(*names: str, positional: Sequence[str] = ()) -> None:
    """Makes flags required.

    Args:
      *names: the names of the flags.
      positional: the names of more required flags. The first arguments without a name are the values of these flags
        that are absent.
    """
    for name in (*positional, *names):
        flags.FLAGS[name].is_required = True
        flags.FLAGS[name].is_positional = name in positional


def group_flags(title: str, *holders: flags.FlagHolder) -> None:
    """Lists flags under a title in the help."""
    for holder in holders:
        flags.FLAGS[holder.name].group = title


def take_positional(argv: list[str]) -> list[str]:
    """Sets absent positional flags to the first arguments.

    Args:
      argv: the name of the program, and the arguments that are no flags.

    Returns:
      The name of the program, and the other arguments.

    Raises:
      MissingFlags: if a required flag is absent.
    """
    program, *arguments = argv
    required = [flag for flag in map(flags.FLAGS.__getitem__, flags.FLAGS) if getattr(flag, "is_required", False)]
    for flag in required:
        if flag.is_positional and flag.value is None and arguments:
            flag.value = arguments.pop(0)
    if missing := [f"--{flag.name}" for flag in required if flag.value is None]:
        raise MissingFlags(f"{', '.join(missing)}: {'is' if len(missing) == 1 else 'are'} missing")
    return [program, *arguments]


def define_checkpoint_flag() -> flags.FlagHolder:
    """Defines --checkpoint, which the first argument without a name can replace."""
    holder = flags.DEFINE_string(
        "checkpoint",
        None,
        "A run's workdir (WORKDIR@best, @latest, @STEP), a folder of Hugging Face or sentence-transformers, "
        "hub:NAME[@REVISION] for a model of the hub, or bert_model.ckpt. The first argument without a name is the "
        "checkpoint, too.",
    )
    require_flags(positional=["checkpoint"])
    return holder


def define_dtype_flag() -> flags.FlagHolder:
    return flags.DEFINE_enum(
        "dtype",
        None,
        DTYPES,
        "The type to compute in, as config.dtype. By default the type of the run, or auto for other checkpoints.",
    )


def input_lines(name: str | None) -> Iterator[str]:
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


def config_arguments() -> list[str]:
    """Returns the arguments of this command that specify its config."""
    kept, arguments = [], iter(sys.argv[1:])
    for argument in itertools.takewhile(lambda word: word != "--", arguments):
        name, has_value, _ = argument.lstrip("-").partition("=")
        if argument.startswith("-") and name.split(".")[0] in ("config", "noconfig"):
            is_switch = "." in name and find_field(CONFIG.value, name.partition(".")[2]).kind is bool
            kept += [argument] if has_value or is_switch else [argument, next(arguments, "")]
    return kept
