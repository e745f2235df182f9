"""Prints the docstrings of the public Python API, for the prose linter of `.ci/run`: python docs/site/docstrings.py

The public names are the names on the page docs/site/python.md.
"""

import importlib
import inspect
import pathlib
import re
from typing import Any

PAGE = pathlib.Path(__file__).parent / "python.md"


def find(name: str) -> Any:
    """Returns the module, class or function of a dotted name, such as bertjax.Model."""
    module, _, attribute = name.rpartition(".")
    try:
        return importlib.import_module(name)
    except ModuleNotFoundError:
        return getattr(find(module), attribute)


def docstrings(value: Any) -> list[str]:
    """Returns the docstring of an object of this package and, if it is a class, of its public methods."""
    members = [member for name, member in vars(value).items() if name[0] != "_"] if inspect.isclass(value) else []
    objects = [value, *filter(inspect.isroutine, members)]
    return [text for item in objects if (text := inspect.getdoc(item))]


def main() -> None:
    """Prints the docstrings."""
    for name in re.findall(r"^::: (\S+)$", PAGE.read_text(), re.MULTILINE):
        print(f"{name}\n\n" + "\n\n".join(docstrings(find(name))), end="\n\n")


if __name__ == "__main__":
    main()
