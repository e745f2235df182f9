"""The text of `bertjax COMMAND --help`: an example, the description of the command, and its flags in groups."""

import shutil
import textwrap
from collections.abc import Sequence

from absl import flags

INDENT, HELP_COLUMN = "  ", 26


def example_in(docstring: str) -> str:
    """Returns the example of a command, the second paragraph of the docstring."""
    return docstring.split("\n\n")[1].strip()


def help_text(docstring: str, command_flags: Sequence[flags.Flag]) -> str:
    """Returns the help of a command.

    Args:
      docstring: the docstring of the command's module: paragraphs with the purpose, the example and the description.
      command_flags: the flags of the command, in the order of their definition.
    """
    purpose, _, *description = docstring.strip().split("\n\n")
    paragraphs = (textwrap.fill(paragraph, _width(), break_on_hyphens=False) for paragraph in description)
    parts = [f"example: {example_in(docstring)}", purpose, *paragraphs]
    groups: dict[str, list[flags.Flag]] = {}
    for flag in command_flags:
        if not (flag.help or "").startswith("Alias for --"):
            groups.setdefault(getattr(flag, "group", "Flags"), []).append(flag)
    for title, members in groups.items():
        parts.append("\n".join([f"{title}:", *map(_lines, members)]))
    return "\n\n".join(filter(None, parts))


def _width() -> int:
    """Returns the number of columns of the terminal, at most 120; 100 without a terminal."""
    return min(shutil.get_terminal_size((100, 24)).columns, 120)


def _lines(flag: flags.Flag) -> str:
    """Returns the lines of a flag: its name, and its help beside the name."""
    name = f"{INDENT}--{flag.name}" if flag.boolean else f"{INDENT}--{flag.name}=…"
    text = flag.help or ""
    if flag.default not in (None, "", False, []) and "default" not in text:
        text += f" Default: {flag.default}."
    if getattr(flag, "is_required", False):
        text += " Required."
    indent = " " * HELP_COLUMN
    start = f"{name:<{HELP_COLUMN}}" if len(name) < HELP_COLUMN else f"{name}\n{indent}"
    wrapped = textwrap.wrap(" ".join(text.split()), _width() - HELP_COLUMN) or [""]
    return f"\n{indent}".join([start + wrapped[0], *wrapped[1:]])
