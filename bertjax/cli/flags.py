"""Flags that several commands share, and checks of flags."""

import itertools
import sys
from collections.abc import Sequence
from typing import Any, cast

import ml_collections
from absl import flags

from bertjax.common.errors import UserError
from bertjax.config import experiments
from bertjax.config.limits import DTYPES
from bertjax.launch.overrides import find_field

flags.disclaim_key_flags()  # --config is listed in the --help of each command that defines it


class _Config:
    """The result of `define_config_flag`; `value` is the config after `run_command` has parsed the flags."""

    value: ml_collections.ConfigDict


CONFIG = _Config()


def define_config_flag() -> _Config:
    """Defines --config, which is required. Flags --config.x.y=VALUE override fields."""
    flags.DEFINE_string(
        "config",
        None,
        f"An experiment: {', '.join(experiments.shipped())}, NAME:ARGUMENT as in small:mini, or the path of a Python"
        " file. --config.x.y=VALUE overrides a field.",
    )
    _require_flag("config")
    return CONFIG


def experiment_name() -> str:
    """Returns the experiment's name for use as a folder: "small-mini" for --config=small:mini."""
    return experiments.name(flags.FLAGS.config)


class MissingFlags(UserError):
    """Required flags are missing."""


def define_required_flag(
    name: str, help: str, choices: Sequence[str] = (), positional: bool = False
) -> flags.FlagHolder[str]:
    """Defines a flag that a command needs.

    Args:
      name: the name of the flag.
      help: the help.
      choices: the allowed values; () allows all values.
      positional: whether an argument without a name can replace the flag. The first such argument replaces the first
        absent flag.
    """
    holder = flags.DEFINE_enum(name, None, choices, help) if choices else flags.DEFINE_string(name, None, help)
    _require_flag(name, positional)
    return cast(flags.FlagHolder[str], holder)  # `take_positional` raises an error without a value.


def _require_flag(name: str, positional: bool = False) -> None:
    flag: Any = flags.FLAGS[name]
    flag.is_required, flag.is_positional = True, positional


def group_flags(title: str, *holders: flags.FlagHolder) -> None:
    """Lists flags under a title in the help."""
    for holder in holders:
        flag: Any = flags.FLAGS[holder.name]
        flag.group = title


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
    required: list[Any] = [
        flag for flag in map(flags.FLAGS.__getitem__, flags.FLAGS) if getattr(flag, "is_required", False)
    ]
    for flag in required:
        if flag.is_positional and flag.value is None and arguments:
            flag.value = arguments.pop(0)
    if missing := [f"--{flag.name}" for flag in required if flag.value is None]:
        raise MissingFlags(f"{', '.join(missing)}: {'is' if len(missing) == 1 else 'are'} missing")
    return [program, *arguments]


def define_checkpoint_flag() -> flags.FlagHolder[str]:
    """Defines --checkpoint, which the first argument without a name can replace."""
    return define_required_flag(
        "checkpoint",
        "A run's workdir (WORKDIR@best, @latest, @STEP), a folder of Hugging Face or sentence-transformers, "
        "hub:NAME[@REVISION] for a model of the hub, or bert_model.ckpt. The first argument without a name is the "
        "checkpoint, too.",
        positional=True,
    )


def define_dtype_flag() -> flags.FlagHolder:
    """Defines --dtype."""
    return flags.DEFINE_enum(
        "dtype",
        None,
        DTYPES,
        "The type to compute in, as config.dtype. By default the type of the run, or auto for other checkpoints.",
    )


def define_input_flag() -> flags.FlagHolder:
    """Defines --input, a file of texts."""
    return flags.DEFINE_string(
        "input",
        None,
        "File with one text per line, in addition to the texts on the command line; or a table: .csv, .tsv or .jsonl.",
    )


def is_table_input(input_flag: flags.FlagHolder, texts: Sequence[str], *table_flags: flags.FlagHolder) -> bool:
    """Returns whether --input is a table.

    Args:
      input_flag: the flag --input.
      texts: the texts on the command line.
      table_flags: flags that need a table.

    Raises:
      UserError: if there are texts beside a table, or if a flag is set without a table.
    """
    from bertjax.data.corpus.tables import SUFFIXES
    from bertjax.data.corpus.text_input import is_table

    has_table = is_table(input_flag.value or "")
    if has_table:
        refuse_arguments(texts, "with a table as --input, all texts are in the table")
    for flag in table_flags:
        if flag.value and not has_table:
            suffixes = ", ".join(SUFFIXES)
            raise UserError(f"--{flag.name}={flag.value}: is for a table; give --input=FILE that ends in {suffixes}")
    return has_table


def refuse_arguments(arguments: Sequence[str], remedy: str) -> None:
    """Raises `UserError` if there are arguments that are no flags."""
    if arguments:
        raise UserError(f"unexpected argument {arguments[0]!r}; {remedy}")


def config_arguments() -> list[str]:
    """Returns the arguments of this command that specify its config."""
    kept, arguments = [], iter(sys.argv[1:])
    for argument in itertools.takewhile(lambda word: word != "--", arguments):
        name, has_value, _ = argument.lstrip("-").partition("=")
        if argument.startswith("-") and name.split(".")[0] in ("config", "noconfig"):
            is_switch = "." in name and find_field(CONFIG.value, name.partition(".")[2]).kind is bool
            kept += [argument] if has_value or is_switch else [argument, next(arguments, "")]
    return kept
