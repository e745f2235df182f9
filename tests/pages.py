"""The commands of README and docs/, in the order of a page.

Comments in the Markdown, invisible to readers, contain instructions for the tests:

<!-- tiny: --config.x.y=VALUE ... -->  from here, flags for all commands with a --config; several comments add up
<!-- first: COMMAND -->                run before the block below, to provide its inputs
<!-- instead: A->B ... -->             in the block below, B replaces A
<!-- file: NAME -->                    the block below is the content of a file
<!-- run -->                           the Python below is run
<!-- says: TEXT -->                    the output of the block below contains this text
<!-- only parsed -->                   the block below needs resources that a test lacks, such as a cloud
<!-- said by: COMMAND -->              the block below is the last line of this command
<!-- in: FILE -->                      the words of the line below are in this file
"""

import dataclasses
import itertools
import pathlib
import re
import shlex
from collections.abc import Iterator

from bertjax.cli.commands import COMMANDS

ROOT = pathlib.Path(__file__).parents[1]
SITE = ROOT / "docs" / "site"  # sources of the site, not pages
PAGES = [ROOT / "README.md", *sorted(page for page in (ROOT / "docs").rglob("*.md") if SITE not in page.parents)]
# External programs, which no test runs.
OTHERS = ("pip", "hf", "docker", "srun", "pytest", "export", "uv", "curl", "printf", "source", "deactivate")

_PART = re.compile(r"<!-- (?P<comment>.+?) -->|^```(?P<language>\w*)\n(?P<block>.*?)^```$", re.MULTILINE | re.DOTALL)


@dataclasses.dataclass(frozen=True)
class Block:
    """A fenced block of a page, with the instructions of the comments before it."""

    language: str
    text: str
    notes: dict[str, str]

    def commands(self) -> Iterator[list[str]]:
        """Yields the words of each command of a shell block, including redirections."""
        if not self.language:
            yield from _commands(self.text)

    def to_run(self) -> Iterator[list[str]]:
        """Yields the commands that a test runs, with the replacements for tests."""
        if not self.language and "only parsed" not in self.notes:
            text = self.text
            for pair in self.notes.get("instead", "").split():
                text = text.replace(*pair.split("->"))
            yield from _commands(f"{self.notes.get('first', '')}\n{text}")


def _commands(text: str) -> Iterator[list[str]]:
    for line in text.replace("\\\n", " ").splitlines():
        words: list[str] = []
        for word in [*shlex.split(line, comments=True), "&&"]:
            if word != "&&":
                words.append(word)
            elif words := list(itertools.dropwhile(_is_variable, words)):
                yield words
                words = []


def _is_variable(word: str) -> bool:
    """Returns whether a word sets an environment variable for the command after it."""
    return re.match(r"[A-Z_]+=", word) is not None


def blocks_of(page: pathlib.Path) -> Iterator[Block]:
    notes: dict[str, str] = {}
    for part in _PART.finditer(page.read_text()):
        if part["comment"]:
            name, _, value = part["comment"].partition(": ")
            notes[name] = f"{notes.get(name, '')} {value}".strip()
        else:
            yield Block(part["language"], part["block"], notes)
            notes = {}


def module_of(words: list[str]) -> tuple[str, list[str]] | None:
    """Returns the module of a bertjax command, and its arguments; None for another program.

    Raises `ValueError` for a subcommand or module that does not exist.
    """
    modules = {module for module, _ in COMMANDS.values()}
    match words:
        case ["bertjax", name, *arguments] if name in COMMANDS:
            return COMMANDS[name][0], arguments
        case ["python", "-m", name, *arguments] if name.removeprefix("bertjax.") in modules:
            return name.removeprefix("bertjax."), arguments
        case ["bertjax", *_] | ["python", "-m", "bertjax", *_]:
            raise ValueError(f"no such command: {shlex.join(words)}")
    return None


def split_redirection(arguments: list[str]) -> tuple[list[str], str]:
    """Returns the arguments, and the target file of the redirection; "" without a redirection."""
    return (arguments[:-2], arguments[-1]) if ">" in arguments[-2:] else (arguments, "")
