"""Generates the reference pages from the code: the flags of the commands, and the fields of configs with comments."""

import ast
import dataclasses
import inspect
import io
import pathlib
import re
import runpy
import textwrap
import tokenize
from collections.abc import Iterator

from absl import flags

import bertjax.cli.flags  # noqa: F401  defines the flags of absl, which belong to no command
from bertjax.cli.commands import COMMANDS
from bertjax.config import experiments
from bertjax.models import families
from bertjax.objectives.registry import OBJECTIVES

ROOT = pathlib.Path(__file__).parents[2]
# Names that are not fields of the tables: no field, the task of the experiment, and the model of the family.
OTHERS = ("", "task", "model")


def pages() -> dict[str, str]:
    """Returns {path in docs/: Markdown} of the generated pages."""
    return {
        "reference/commands.md": commands_page(),
        "reference/config.md": config_page(),
        "reference/experiments.md": experiments_page(),
        "reference/python.md": pathlib.Path(__file__).with_name("python.md").read_text(),
    }


# Commands.


def flags_of(module: str) -> tuple[str, list[flags.Flag]]:
    """Returns the docstring of a command's module, and its flags in the order of their definition, without aliases."""
    others = _flags_of_others()
    for name in others:
        delattr(flags.FLAGS, name)
    before = set(flags.FLAGS)
    try:
        names = runpy.run_module(f"bertjax.cli.{'train' if module == 'main' else module}")
        own = [flags.FLAGS[name] for name in flags.FLAGS if name not in before]
    finally:
        for name in set(flags.FLAGS) - before:
            delattr(flags.FLAGS, name)
        for name, flag in others.items():
            flags.FLAGS[name] = flag
    return names["__doc__"], own


def _flags_of_others() -> dict[str, flags.Flag]:
    """Returns the flags by name that scripts have defined when they were imported, which a command may name as well."""
    by_module = flags.FLAGS.flags_by_module_dict()
    absl = {flag.name for module, found in by_module.items() if module.startswith("absl") for flag in found}
    return {name: flags.FLAGS[name] for name in flags.FLAGS if flags.FLAGS[name].name not in absl}


def commands_page() -> str:
    lines = [
        "# Commands",
        "",
        "Each command is `bertjax COMMAND`. `bertjax COMMAND --help` prints an example and the flags.",
    ]
    for name, (module, _) in COMMANDS.items():
        doc, own = flags_of(module)
        lines += ["", f"## {name}", "", _block(doc), ""]
        lines += ["| flag | default | |", "|---|---|---|"]
        lines += [f"| `--{flag.name}` | {_default(flag)} | {_cell(flag.help)} |" for flag in own if not _is_alias(flag)]
    return "\n".join(lines) + "\n"


def _is_alias(flag: flags.Flag) -> bool:
    return (flag.help or "").startswith("Alias for --")


def is_required(flag: flags.Flag) -> bool:
    return getattr(flag, "is_required", False)


def _default(flag: flags.Flag) -> str:
    if is_required(flag):
        return "required"
    unsaid = flag.default in (None, "", []) or "default" in flag.help  # the help says it
    return "" if unsaid else f"`{flag.default}`"


# Configs.


@dataclasses.dataclass(frozen=True)
class ConfigField:
    """A field of the config with its default and its comments, or a section, which has no default."""

    name: str
    default: str | None
    comment: str


class Source:
    """A Python file, with its comments by line."""

    def __init__(self, text: str):
        self.text, self._lines = text, text.splitlines()
        self._comments = {
            token.start[0]: token.string.lstrip("# ").rstrip()
            for token in tokenize.generate_tokens(io.StringIO(text).readline)
            if token.type == tokenize.COMMENT
        }

    def comment_of(self, node: ast.AST, is_section: bool = False) -> str:
        """Returns the comments above a node and on its lines; for a section, above the node and on its first line."""
        first = node.lineno
        while self._is_comment(first - 1):
            first -= 1
        last = node.lineno if is_section else node.end_lineno
        lines = [number for number in range(first, last + 1) if number in self._comments]
        said = " ".join(self._comments[number] for number in lines)
        return said.partition("fmt: skip")[0].strip()

    def _is_comment(self, number: int) -> bool:
        return 0 < number <= len(self._lines) and self._lines[number - 1].lstrip().startswith("#")

    def function(self, name: str) -> ast.FunctionDef:
        return next(
            node for node in ast.parse(self.text).body if isinstance(node, ast.FunctionDef) and node.name == name
        )

    def fields(self, function: str) -> Iterator[ConfigField]:
        """Yields the fields of `config` that a function sets.

        A function sets fields by assignments, by `config.SECTION.update(...)`, and by a call of `fine_tuning_config`,
        whose keywords are fields of the section data.
        """
        for node in ast.walk(self.function(function)):
            match node:
                case ast.Assign([ast.Attribute() as target], value) if (name := _config_name(target)) not in OTHERS:
                    yield from self._of_value(name, node, value)
                case ast.Call(ast.Name("fine_tuning_config"), _, keywords):
                    yield from (each for keyword in keywords for each in self._of_keyword("data", keyword))
                case ast.Call(ast.Attribute(section, "update"), _, keywords) if name := _config_name(section):
                    yield from (each for keyword in keywords for each in self._of_keyword(name, keyword))

    def _of_value(self, name: str, node: ast.AST, value: ast.expr) -> Iterator[ConfigField]:
        keywords = _section(value)
        if keywords is None:
            yield ConfigField(name, ast.unparse(value), self.comment_of(node))
            return
        yield ConfigField(name, None, self.comment_of(node, is_section=True))
        for keyword in keywords:
            if keyword.arg and keyword.lineno == node.lineno:  # the comment is about all of them
                yield ConfigField(f"{name}.{keyword.arg}", ast.unparse(keyword.value), "")
            else:
                yield from self._of_keyword(name, keyword)

    def _of_keyword(self, section: str, keyword: ast.keyword) -> Iterator[ConfigField]:
        if keyword.arg:  # not **others
            yield from self._of_value(f"{section}.{keyword.arg}", keyword, keyword.value)


def _config_name(node: ast.expr) -> str:
    """Returns "data.cleaning" for the expression config.data.cleaning, and "" for other expressions."""
    name = ast.unparse(node)
    return name.removeprefix("config.") if name.startswith("config.") else ""


def _section(value: ast.expr) -> list[ast.keyword] | None:
    """Returns the keywords of ConfigDict(...) and ConfigDict(dict(...)); None for another expression."""
    match value:
        case ast.Call(ast.Attribute(_, "ConfigDict"), arguments, _):
            return [keyword for argument in arguments for keyword in getattr(argument, "keywords", [])]
    return None


def config_fields() -> dict[str, list[ConfigField]]:
    """Returns {heading: fields} of the defaults that all configs share, of pre-training, and of fine-tuning."""
    config = Source((ROOT / "bertjax" / "config" / "defaults.py").read_text())
    return {
        "All runs": list(config.fields("common_config")),
        "Pre-training": [*config.fields("pretraining_config"), *config.fields("_set_pretraining_data")],
        "Fine-tuning": list(config.fields("fine_tuning_config")),
    }


def task_fields() -> dict[str, list[ConfigField]]:
    """Returns {experiment: fields that its file sets} of the shipped experiments of fine-tuning."""
    found = {}
    for path in sorted((ROOT / "experiments").glob("*.py")):
        if "fine_tuning_config(" in (text := path.read_text()):
            found[path.stem] = list(Source(text).fields("get_config"))
    return found


def dataclass_fields(kind: type) -> list[ConfigField]:
    """Returns the fields of a model's config, or of an objective's settings, with their limits and comments."""
    said: dict[str, str] = {}
    for each in filter(dataclasses.is_dataclass, reversed(kind.__mro__)):
        source = Source(textwrap.dedent(inspect.getsource(each)))
        (body,) = (node.body for node in ast.parse(source.text).body if isinstance(node, ast.ClassDef))
        given = {node.target.id: source.comment_of(node) for node in body if isinstance(node, ast.AnnAssign)}
        said |= {name: comment for name, comment in given.items() if comment or name not in said}
    return [
        ConfigField(each.name, repr(each.default), " ".join((said[each.name], _limits(each.metadata))).strip())
        for each in dataclasses.fields(kind)
    ]


def _limits(metadata) -> str:
    """Returns "(a | b)" or "(at least 0, below 1)"; without the limit of integers."""
    words = dict(least="at least", above="above", most="at most", below="below")
    limits = [f"{word} {metadata[name]:g}" for name, word in words.items() if metadata.get(name, 2**31 - 1) < 2**31 - 1]
    said = " | ".join(metadata.get("choices", ())) or ", ".join(limits)
    return f"({said})" if said else ""


def config_page() -> str:
    lines = [
        "# Fields of a config",
        "",
        "An experiment's file begins with `pretraining_config()` or `fine_tuning_config(task)` of"
        " `bertjax/config/defaults.py`, and sets the fields that differ. `--config.NAME=VALUE` overrides a field. The"
        " description of a section may describe its fields.",
    ]
    for heading, fields in config_fields().items():
        lines += ["", f"## {heading}", "", *_table(fields)]
    lines += [
        "",
        "## The tasks of fine-tuning",
        "",
        "The experiment of each task sets these fields, besides the fields above.",
    ]
    for name, fields in task_fields().items():
        lines += ["", f"### {name}", "", *_table(fields)]
    lines += [
        "",
        "## The model",
        "",
        "`config.model` has the fields of its family, `model.family`. In fine-tuning, the fields that determine"
        " the shapes of params come from `init_checkpoint`.",
    ]
    base = {}
    for name in families.FAMILIES.names():
        fields = dataclass_fields(families.FAMILIES.get(name).config_class)
        differing = [field for field in fields if base.get(field.name) != field]
        base = base or {field.name: field for field in fields}  # BERT's
        lines += ["", f"### {name}", ""]
        if len(differing) < len(fields):
            lines += ["The fields that differ from the table of bert:" if differing else "The fields of bert.", ""]
        lines += _table(differing, "model.") if differing else ()
    lines += ["", "## Settings of objectives", ""]
    for name in OBJECTIVES.names():
        if fields := dataclass_fields(type(OBJECTIVES.get(name))):
            lines += [f"### {name}", "", *_table(fields, f"objectives.{name}.")]
    return "\n".join(lines) + "\n"


def _table(fields: list[ConfigField], prefix: str = "") -> Iterator[str]:
    yield from ("| `config.` | default | |", "|---|---|---|")
    for field in fields:
        match field.default:
            case None:
                default = "*a section*"
            case "config_dict.placeholder(object)":
                default = "`None`"
            case text if text.isidentifier() and text not in ("True", "False", "None"):
                default = "*set by the experiment*"
            case text:
                default = f"`{_cell(text)}`"
        yield f"| `{prefix}{field.name}` | {default} | {_cell(field.comment)} |"


# Experiments.


def experiments_page() -> str:
    lines = [
        "# Experiments",
        "",
        "`bertjax train --config=NAME` finds these experiments from any folder. To change an experiment, copy its"
        " file.",
    ]
    for name, path in experiments.shipped().items():
        lines += ["", f"## {name}", "", f"```python\n{path.read_text().rstrip()}\n```"]
    return "\n".join(lines) + "\n"


def _block(text: str) -> str:
    return f"```text\n{text.strip()}\n```"


def _cell(text: str) -> str:
    """Returns a text for a cell of a table: on one line, with | and < escaped."""
    return re.sub(r"([|<])", r"\\\1", " ".join((text or "").split()))
