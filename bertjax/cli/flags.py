"""Shared code of the commands: flags, and one-line errors with a non-zero exit code for users' mistakes."""

import itertools
import sys
from collections.abc import Iterator

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
