"""Loads experiments by name or path, and applies overrides from the command line.

An override is `--config.data.dupe_factor=5` or `--config.stages.short.steps=100`; the type of the field decides how its
value is parsed. Every mistake raises a `UserError` that quotes the argument and names the remedy.

Not `ml_collections.config_flags`: it reports a misspelt field as an AttributeError or a KeyError, a wrong value in the
words of absl, and a mistake in an experiment's file with a traceback through its own code, so that turning these into
our one line takes as much code as reading the flags, and experiments by name would come on top.
"""

import ast
import dataclasses
import difflib
import fractions
import importlib.machinery
import importlib.util
import inspect
import pathlib
import re
import sys
import traceback
from collections.abc import Iterable

from ml_collections import ConfigDict

from bertjax.common.errors import UserError
from bertjax.config.stages import add_field, predictions_for
from bertjax.models import families
from bertjax.objectives.parsing import add_settings

_FLAG = re.compile(r"--?(?P<no>no)?config(\.(?P<field>[^=]+))?(=(?P<value>.*))?", re.DOTALL)


class MissingExperiment(UserError):
    """The command line names no experiment."""


def shipped() -> dict[str, pathlib.Path]:
    """Returns name -> file of bertjax's own experiments, in the installed package or in the checkout."""
    package = pathlib.Path(__file__).parents[1]
    inside = package / "experiments"
    folder = inside if inside.is_dir() else package.parent / "experiments"
    return {path.stem: path for path in sorted(folder.glob("*.py"))}


def name(experiment: str) -> str:
    """Returns "small-mini" for "small:mini" and for "path/to/small.py:mini"."""
    path, _, argument = experiment.partition(":")
    return "-".join(filter(None, [pathlib.Path(path).stem, argument]))


def from_arguments(argv: list[str]) -> tuple[ConfigDict, list[str]]:
    """Returns the config that `--config` and the overrides in `argv` specify, and `argv` without the overrides."""
    argv, texts = _split_at_dashes(argv)
    config, rest, overridden = load(_experiment(argv)), [], set()
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
                raise UserError(f"--no is for fields that are True or False; write --{field.name}=VALUE")
            if value is None and field.kind is bool:
                value = str(not match["no"])
            elif value is None:
                value = next(arguments, "--")
                if value.startswith("--"):
                    raise UserError(f"a value is missing, such as --{field.name}={_quoted(field.value)}")
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


def note_overrides(config, names: Iterable[str], width: int | None) -> None:
    """Adds the names of fields that the user has set to `config.overrides`. The sizes of a layer follow a new width.

    Args:
      width: `model.hidden_size` before the user has set any.
    """
    with config.unlocked():
        config.overrides = tuple(sorted({*config.get("overrides", ()), *names}))
    if config.get("recipe"):
        for name, stage in config.stages.items():
            if f"stages.{name}.max_predictions_per_seq" not in config.overrides:
                stage.max_predictions_per_seq = predictions_for(config.data.masked_lm_prob, stage.length)
    if width is None or config.model.hidden_size == width or families.is_adopted(config):
        return
    for name, size in sizes_of_width(config.model, width).items():
        if f"model.{name}" not in config.overrides:
            config.model[name] = size


def sizes_of_width(model: ConfigDict, width: int) -> dict[str, int]:
    """Returns the sizes of `model.hidden_size` that have the same proportions as those of `model` have to `width`."""
    hidden, sizes = model.hidden_size, {}
    if "intermediate_size" in model:
        sizes["intermediate_size"] = max(1, round(model.intermediate_size * hidden / width))
    if "num_attention_heads" in model and "head_dim" not in model:
        most = max(1, round(model.num_attention_heads * hidden / width))
        sizes["num_attention_heads"] = next(heads for heads in range(most, 0, -1) if hidden % heads == 0)
    return sizes


def _split_at_dashes(argv: list[str]) -> tuple[list[str], list[str]]:
    end = argv.index("--") if "--" in argv else len(argv)
    return argv[:end], argv[end:]


def _experiment(argv: list[str]) -> str:
    """Returns the value of the last `--config`."""
    found = None
    for argument, following in zip(argv, [*argv[1:], ""]):
        if (match := _FLAG.fullmatch(argument)) and not match["field"] and not match["no"]:
            found = following if match["value"] is None else match["value"]
    if not found or found.startswith("--"):
        raise MissingExperiment(f"--config: name an experiment ({', '.join(shipped())}) or the path of a Python file")
    return found


def load(experiment: str) -> ConfigDict:
    """Loads and locks the config of "quickstart", "small:mini", "path/to/file.py" or "path/to/file.py:argument".

    Where there is no file "experiments/small.py", this path stands for "small".
    """
    name, colon, argument = experiment.partition(":")
    try:
        config = _call_get_config(_find(name), [argument] if colon else [])
    except UserError as error:
        raise UserError(" ".join(f"--config={experiment}: {error}".split())) from None
    return config.lock()


def _find(name: str) -> str:
    if pathlib.Path(name).is_file():
        return name
    path = pathlib.PurePath(name)
    is_path_in_checkout = path.parent == pathlib.PurePath("experiments") and path.suffix == ".py"
    stem = path.stem if is_path_in_checkout else name  # an installed package has no such folder
    if stem in shipped():
        return str(shipped()[stem])
    what = "a folder" if pathlib.Path(name).is_dir() else "no such file"
    raise UserError(f"{what}, and no experiment of that name{_suggest(shipped(), pathlib.Path(name).stem)}")


def _call_get_config(path: str, arguments: list[str]) -> ConfigDict:
    loader = importlib.machinery.SourceFileLoader("experiment", path)
    module = importlib.util.module_from_spec(importlib.util.spec_from_loader(loader.name, loader))
    folder = str(pathlib.Path(path).parent.absolute())
    sys.path.insert(0, folder)  # modules beside the experiment: a task of its own
    sys.modules[loader.name] = module
    try:
        loader.exec_module(module)
        if not callable(get_config := getattr(module, "get_config", None)):
            raise UserError("has no function get_config()")
        try:
            inspect.signature(get_config).bind(*arguments)
        except TypeError:
            problem = f"takes no {arguments[0]!r} after a colon" if arguments else "wants an argument after a colon"
            raise UserError(f"get_config{inspect.signature(get_config)} {problem}") from None
        config = get_config(*arguments)
    except (UserError, KeyboardInterrupt):
        raise
    except SyntaxError as error:
        raise UserError(f"not Python: {_line(error, path)}{error.msg}") from None
    except Exception as error:
        raise UserError(f"{_line(error, path)}{type(error).__name__}: {error}") from None
    finally:
        sys.path.remove(folder)
    if not isinstance(config, ConfigDict):
        raise UserError(f"get_config() returns {config!r} instead of a ConfigDict, such as pretraining_config()")
    return config


def _line(error: Exception, path: str) -> str:
    if isinstance(error, SyntaxError):
        return f"line {error.lineno}: "
    lines = [frame.lineno for frame in traceback.extract_tb(error.__traceback__) if frame.filename == path]
    return f"line {lines[-1]}: " if lines else ""


@dataclasses.dataclass
class Field:
    """One value of a config: `holder[key]`, with full name `name` and type `kind`."""

    name: str
    holder: ConfigDict
    key: str
    kind: type

    @property
    def value(self):
        return self.holder[self.key]

    def set(self, value) -> None:
        """Raises `UserError` if the value is of another type, or if the field cannot be changed."""
        if self.name == "config.task":
            raise UserError("an experiment is for one task; choose another --config")
        try:
            self.holder[self.key] = value
        except (TypeError, ValueError) as error:
            raise UserError(" ".join(str(error).split())) from None

    def parse(self, text: str):
        """Parses `text` as a value of the field's type. Raises `UserError` if it is invalid."""
        if self.kind in (str, int, float, bool):
            return {str: str, int: _integer, float: _float, bool: _boolean}[self.kind](text)
        if self.kind is not tuple:  # such as data.corpus, which is a string or a list
            return _literal(text)
        parsed = _literal(text)
        if isinstance(parsed, str) and text.startswith(("(", "['", '["')):
            raise UserError(f"not a tuple; write --{self.name}={_quoted(self.value)}")
        parsed = tuple(parsed) if isinstance(parsed, tuple | list) else (parsed,)
        if self.value and not all(isinstance(item, type(self.value[0])) for item in parsed):
            raise UserError(f"a tuple of {type(self.value[0]).__name__}; write --{self.name}={_quoted(self.value)}")
        return parsed


def find_field(config: ConfigDict, path: str) -> Field:
    """Finds the field at `path`, such as "data.dupe_factor". Raises `UserError` with the existing fields."""
    example = "--config.model.vocab_size=8000"
    try:
        keys = _path_keys(ast.parse(path, mode="eval").body)
    except (SyntaxError, ValueError):
        raise UserError(f"not the name of a field; an override looks like {example}") from None
    holder, value, name = None, config, "config"
    for key in keys:
        holder = value
        if isinstance(holder, ConfigDict):
            if keys[0] == "model" and len(keys) == 2 and families.is_adopted(config) and key not in holder:
                families.add_field(config, key)
            if keys[0] == "stages" and len(keys) > 2 and "stages" in config and key not in holder:
                add_field(config, keys)
            if keys[0] == "objectives" and len(keys) > 1 and "stages" in config:
                add_settings(config, str(keys[1]))
            if key not in holder:
                raise UserError(f"{name} has no field {key!r}{_suggest(holder, str(key))}")
            name += f".{key}"
        elif isinstance(holder, tuple | list):
            if not (isinstance(key, int) and -len(holder) <= key < len(holder)):
                choice = f"{name}[0]" + (f" to {name}[{len(holder) - 1}]" if len(holder) > 1 else "")
                raise UserError(f"there is no {name}[{key!r}]; {name} has {len(holder)} entries: {choice}")
            name += f"[{key}]"
        else:
            raise UserError(f"{name} has no fields: it is the value {holder!r}")
        value = holder[key]
    if isinstance(value, ConfigDict):
        raise UserError(f"{name} is a section: set one of its fields, {', '.join(value)}")
    if isinstance(value, tuple | list) and any(isinstance(item, ConfigDict) for item in value):
        raise UserError(f"{name} has sections: set a field of one, {name}[0].FIELD: {', '.join(value[0])}")
    if not isinstance(holder, ConfigDict):
        raise UserError(f"set all of {name.rpartition('[')[0]} at once")
    return Field(name, holder, keys[-1], holder.get_type(keys[-1]))


def _path_keys(node: ast.expr) -> list[str | int]:
    """Returns ["stages", "short", "steps"] for the expression stages.short.steps; indices of tuples are integers."""
    match node:
        case ast.Name(name):
            return [name]
        case ast.Attribute(inner, name):
            return [*_path_keys(inner), name]
        case ast.Subscript(inner, index):
            return [*_path_keys(inner), ast.literal_eval(index)]
    raise ValueError(node)


def _suggest(names: Iterable[str], wrong: str) -> str:
    """Suggests names close to `wrong`, and lists the others."""
    close = difflib.get_close_matches(wrong, list(names), cutoff=0.7)
    others = [name for name in names if name not in close]
    if not close:
        return f"; there are {', '.join(others)}"
    etc = ", ..." if len(others) > 10 else ""
    return f"; did you mean {' or '.join(close)}? There are also {', '.join(others[:10])}{etc}"


def _quoted(value) -> str:
    return f'"{value}"' if isinstance(value, tuple) else str(value)


def _integer(text: str) -> int:
    try:
        return int(text)
    except ValueError:
        pass
    try:
        remedy = f"; write {int(float(text))}" if float(text).is_integer() else ""
    except ValueError:
        remedy = ""
    raise UserError(f"not a whole number (int){remedy}")


def _float(text: str) -> float:
    try:
        return float(fractions.Fraction(text)) if "/" in text else float(text)
    except (ValueError, ZeroDivisionError):
        raise UserError("not a number (float), such as 0.005, 1e-4 or 1/200") from None


def _boolean(text: str) -> bool:
    if text.lower() not in ("true", "t", "1", "false", "f", "0"):
        raise UserError("neither True nor False")
    return text.lower() in ("true", "t", "1")


def _literal(text: str):
    try:
        return ast.literal_eval(text)
    except (SyntaxError, ValueError):
        return text
