"""Loads experiments by name or path. Every mistake raises a `UserError` with the name of the experiment and the fix."""

import importlib.machinery
import inspect
import pathlib
import sys
import traceback
import types

from ml_collections import ConfigDict

from bertjax.common.errors import UserError
from bertjax.config.fields import suggest


def shipped() -> dict[str, pathlib.Path]:
    """Returns {name: file} of the experiments of bertjax, in the installed package or in the checkout."""
    package = pathlib.Path(__file__).parents[1]
    inside = package / "experiments"
    folder = inside if inside.is_dir() else package.parent / "experiments"
    return {path.stem: path for path in sorted(folder.glob("*.py"))}


def name(experiment: str) -> str:
    """Returns "small-mini" for "small:mini" and for "path/to/small.py:mini"."""
    path, _, argument = experiment.partition(":")
    return "-".join(filter(None, [pathlib.Path(path).stem, argument]))


def load(experiment: str) -> ConfigDict:
    """Loads and locks the config of "quickstart", "small:mini", "path/to/file.py" or "path/to/file.py:argument".

    If there is no file "experiments/small.py", the path loads "small".

    Raises:
      UserError: if the experiment does not exist, or does not return a config.
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
    stem = path.stem if is_path_in_checkout else name  # there is no such folder beside an installed package
    experiments = shipped()
    if stem in experiments:
        return str(experiments[stem])
    fault = "the path is a folder" if pathlib.Path(name).is_dir() else "no such file"
    raise UserError(f"{fault}, and no experiment of this name{suggest(experiments, path.stem)}")


def _call_get_config(path: str, arguments: list[str]) -> ConfigDict:
    loader = importlib.machinery.SourceFileLoader("experiment", path)
    module = types.ModuleType(loader.name)
    module.__file__ = path
    folder = str(pathlib.Path(path).parent.absolute())
    sys.path.insert(0, folder)  # an experiment may import modules of its folder, such as a task
    sys.modules[loader.name] = module
    try:
        loader.exec_module(module)
        if not callable(get_config := getattr(module, "get_config", None)):
            raise UserError("has no function get_config(); define the function in the file")
        try:
            inspect.signature(get_config).bind(*arguments)
        except TypeError:
            problem = (
                f"does not accept {arguments[0]!r} after a colon" if arguments else "needs an argument after a colon"
            )
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
