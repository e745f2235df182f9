"""Parses the config and its overrides from the command line.

An override is `--config.data.dupe_factor=5` or `--config.stages.short.steps=100`; the type of the field decides how its
value is parsed. Every mistake raises a `UserError` that quotes the argument and names the remedy.

`ml_collections.config_flags` reports a misspelt field as an AttributeError or a KeyError, and a mistake in an
experiment's file with a traceback. Turning these errors into one line takes as much code as reading the flags here.
"""

import os
import re

from ml_collections import ConfigDict

from bertjax.common.errors import UserError
from bertjax.config.experiments import load, shipped
from bertjax.config.fields import quoted
from bertjax.launch.overrides import find_field, note_overrides

_FLAG = re.compile(r"--?(?P<no>no)?config(\.(?P<field>[^=]+))?(=(?P<value>.*))?", re.DOTALL)


class MissingExperiment(UserError):
    """The command line names no experiment."""


def from_arguments(argv: list[str]) -> tuple[ConfigDict, list[str]]:
    """Returns the config that `--config` and the overrides in `argv` specify, and `argv` without the overrides.

    Raises:
      UserError: if there is no experiment, or if an override does not fit its field.
    """
    argv, texts = _split_at_dashes(argv)
    config = load(_experiment(argv))
    rest: list[str] = []
    overridden: set[str] = set()
    width = config.get("model", {}).get("hidden_size")
    arguments = iter(argv)
    for argument in arguments:
        match = _FLAG.fullmatch(argument)
        if not match or not match["field"]:
            rest.append(argument)
            continue
        value = match["value"]
        try:
            field = find_field(config, match["field"])
            if match["no"] and (value is not None or field.kind is not bool):
                raise UserError(f"the prefix no is for fields with True or False; write --{field.name}=VALUE")
            if value is None and field.kind is bool:
                value = str(not match["no"])
            elif value is None:
                value = next(arguments, "--")
                if value.startswith("--"):
                    raise UserError(
                        f"the value is missing; write --{field.name}=VALUE, such as "
                        f"--{field.name}={quoted(field.value)}"
                    )
                argument += f" {value}"
            parsed = field.parse(value)
            if field.kind is tuple and field.name in overridden:  # repeated overrides of a tuple append to it
                parsed = field.value + parsed
            field.set(parsed)
        except UserError as error:
            raise UserError(" ".join(f"{argument}: {error}".split())) from None
        overridden.add(field.name)
    note_overrides(config, (name.removeprefix("config.") for name in overridden), width)
    return config, rest + texts


def _split_at_dashes(argv: list[str]) -> tuple[list[str], list[str]]:
    """Returns the arguments before `--`, and the arguments from `--` on."""
    end = argv.index("--") if "--" in argv else len(argv)
    return argv[:end], argv[end:]


def _experiment(argv: list[str]) -> str:
    """Returns the value of the last `--config`. Raises `MissingExperiment` if there is none."""
    name = None
    for argument, following in zip(argv, [*argv[1:], ""]):
        if (match := _FLAG.fullmatch(argument)) and not match["field"] and not match["no"]:
            name = following if match["value"] is None else match["value"]
    if not name or name.startswith("--"):
        _check_first_argument(argv)
        raise MissingExperiment(f"--config: name an experiment ({', '.join(shipped())}) or the path of a Python file")
    return name


def _check_first_argument(argv: list[str]) -> None:
    """Raises `UserError` if the first argument is an experiment or a workdir without a flag."""
    argument = argv[1] if len(argv) > 1 and not argv[1].startswith("-") else ""
    if argument.partition(":")[0] in shipped() or argument.endswith(".py"):
        raise UserError(f"{argument}: --config names an experiment; write --config={argument}")
    if os.path.isfile(os.path.join(argument, "config.json")) and argument:
        raise UserError(
            f"{argument}: a run resumes with its first command, see {os.path.join(argument, 'commands.txt')}"
        )
