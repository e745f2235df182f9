"""Counts properties that make code hard to read: python docs/site/contracts.py [--checkout=DIR]

Another checkout can be counted with --checkout, so that two commits compare. mypy must be installed.
"""

import argparse
import ast
import io
import pathlib
import re
import subprocess
import sys
import tokenize
from collections.abc import Iterator

# The rooms of the training path.
ROOMS = ("data", "models", "objectives", "pretraining", "training")
# The interfaces whose members are counted.
INTERFACES = (
    "Objective", "ObjectiveMetrics", "Family", "ModelFamily", "FineTuningTask", "Head", "Split", "TaskData", "Hook",
    "Evaluator",
)  # fmt: skip
# Functions and classes whose size is counted.
LONG = ("train", "run", "_make_train_step")
VAGUE = ("found", "each", "own", "given", "theirs", "what", "others", "its")
# Names of recurrence: the memory of a row, and rows that continue in the next step. In the modules of OTHER_MEMORY the
# same names have other meanings.
RECURRENCE = re.compile(
    r"_?([Rr]ecurren\w*|new_memory|memory_flops|memory_reach|memory|memory_length|Memory|MEMORY|fill_recurrent_memory|warmed_up|"
    r"remember|update_memory|_make_remember|_make_update_memory|_remembering|FOLLOWING|goes_on|continues|_continued)"
)
OTHER_MEMORY = ("data/loading/masking.py", "data/loading/permutation.py", "inference/generation.py", "nn/lstm.py")
RECURRENT_FAMILIES = ("models/transformer_xl", "models/xlnet", "nn/ops/recurrent_memory")


def trees(package: pathlib.Path) -> dict[str, ast.Module]:
    """Returns the syntax trees of the modules of a package by their paths in it."""
    return {str(path.relative_to(package)): ast.parse(path.read_text()) for path in sorted(package.rglob("*.py"))}


def classes(modules: dict[str, ast.Module]) -> Iterator[ast.ClassDef]:
    """Yields all classes."""
    for tree in modules.values():
        yield from (node for node in ast.walk(tree) if isinstance(node, ast.ClassDef))


def function_fields(definition: ast.ClassDef) -> list[str]:
    """Returns the names of the fields of a class whose type is `Callable`."""
    fields = (node for node in definition.body if isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name))
    return [node.target.id for node in fields if "Callable" in ast.unparse(node.annotation)]


def public_members(definition: ast.ClassDef) -> list[str]:
    """Returns the names of the public methods, properties and fields that a class defines."""
    names = [node.name for node in definition.body if isinstance(node, ast.FunctionDef)]
    names += [node.target.id for node in definition.body if isinstance(node, ast.AnnAssign)]
    assigned = [target for node in definition.body if isinstance(node, ast.Assign) for target in node.targets]
    names += [node.id for target in assigned for node in ast.walk(target) if isinstance(node, ast.Name)]
    return [name for name in dict.fromkeys(names) if not name.startswith("_")]


def functions(modules: dict[str, ast.Module]) -> Iterator[tuple[str, ast.FunctionDef]]:
    """Yields the path and the definition of each function."""
    for path, tree in modules.items():
        yield from ((path, node) for node in ast.walk(tree) if isinstance(node, ast.FunctionDef))


def lines_of(node: ast.FunctionDef) -> int:
    """Returns the number of lines of a function, with its docstring."""
    return node.end_lineno - node.lineno + 1


def vague_assignments(modules: dict[str, ast.Module]) -> int:
    """Returns how often a variable, a loop variable or a parameter has one of the vague names."""
    count = 0
    for tree in modules.values():
        for node in ast.walk(tree):
            is_stored = isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store) and node.id in VAGUE
            count += is_stored or (isinstance(node, ast.arg) and node.arg in VAGUE)
    return count


def recurrence(package: pathlib.Path) -> tuple[int, int]:
    """Returns the lines of code with a word of recurrence outside of the recurrent families, and their modules."""
    lines = modules = 0
    for path in sorted(package.rglob("*.py")):
        name = str(path.relative_to(package))
        if name.startswith((*RECURRENT_FAMILIES, *OTHER_MEMORY)) or not name.startswith((*ROOMS, "nn", "inference")):
            continue
        count = len(recurrent_lines(path))
        lines, modules = lines + count, modules + bool(count)
    return lines, modules


def recurrent_lines(path: pathlib.Path) -> set[int]:
    """Returns the numbers of the lines whose names or attributes speak of recurrence; comments do not count."""
    numbers = set()
    for node in ast.walk(ast.parse(path.read_text())):
        name = getattr(node, "id", None) or getattr(node, "attr", None) or getattr(node, "arg", None)
        name = name or (node.name if isinstance(node, ast.FunctionDef | ast.ClassDef) else None)
        if isinstance(name, str) and RECURRENCE.fullmatch(name) and hasattr(node, "lineno"):
            numbers.add(node.lineno)
    return numbers


def lines_of_code(path: pathlib.Path) -> int:
    """Returns the number of lines of a file without comments, docstrings and blank lines."""
    text = path.read_text()
    documented = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
    nodes = (node for node in ast.walk(ast.parse(text)) if isinstance(node, documented))
    docstrings = [node.body[0] for node in nodes if ast.get_docstring(node, clean=False) is not None]
    skipped = {line for node in docstrings for line in range(node.lineno, node.end_lineno + 1)}
    layout = (tokenize.COMMENT, tokenize.NL, tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT, tokenize.ENDMARKER)
    tokens = (token for token in tokenize.generate_tokens(io.StringIO(text).readline) if token.type not in layout)
    return len({line for token in tokens for line in range(token.start[0], token.end[0] + 1)} - skipped)


def mypy_errors(checkout: pathlib.Path, *paths: str) -> int:
    """Returns the number of errors that mypy reports with --check-untyped-defs."""
    flags = ["--check-untyped-defs", "--ignore-missing-imports", "--config-file=", "--no-incremental"]
    command = [sys.executable, "-m", "mypy", *flags, *paths]
    output = subprocess.run(command, capture_output=True, text=True, cwd=checkout).stdout
    return len(re.findall(r": error: ", output))


def main() -> None:
    """Prints the numbers."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--checkout", type=pathlib.Path, default=pathlib.Path(__file__).parents[2])
    checkout = parser.parse_args().checkout
    package = checkout / "bertjax"
    modules = trees(package)
    fields = {definition.name: function_fields(definition) for definition in classes(modules)}
    members = {definition.name: public_members(definition) for definition in classes(modules)}
    print(f"fields that are functions: {sum(map(len, fields.values()))}")
    for name in INTERFACES:
        if name in members:
            print(f"{name}: {len(members[name])} public members, {len(fields[name])} of them fields that are functions")
    pretraining = [node for path, node in functions(trees(package / "pretraining"))]
    owner = next(node for node in classes(modules) if node.name == "Pretraining")
    print(f"Pretraining: {sum(isinstance(node, ast.FunctionDef) for node in owner.body)} methods")
    print(f"copy.copy(self) in pretraining/: {sum('copy.copy(self)' in ast.unparse(node) for node in pretraining)}")
    everything = [*functions(modules)]
    training = [(path, node) for path, node in everything if path.startswith(ROOMS)]
    print(f"functions of more than 80 lines: {sum(lines_of(node) > 80 for _, node in everything)}")
    methods = {node.name: sum(isinstance(member, ast.FunctionDef) for member in node.body) for node in classes(modules)}
    large = ", ".join(f"{name} {count}" for name, count in methods.items() if count > 20)
    print(f"classes of more than 20 methods: {large or 'none'}")
    print(f"lines of code: {sum(map(lines_of_code, package.rglob('*.py'))):,}")
    for path, node in training:
        if node.name in LONG and path in ("training/loop.py", "training/run.py", "training/step.py"):
            print(f"{path}: {node.name}: {lines_of(node)} lines")
    print(f"functions of more than 80 lines in {', '.join(ROOMS)}: {sum(lines_of(node) > 80 for _, node in training)}")
    lines, count = recurrence(package)
    print(f"recurrence outside of its families: {lines} lines in {count} modules")
    inside = {path: tree for path, tree in modules.items() if path.startswith(ROOMS)}
    print(f"vague names: {vague_assignments(modules)} in the package, {vague_assignments(inside)} in these rooms")
    print(f"mypy --check-untyped-defs: {mypy_errors(checkout, 'bertjax')} errors in the package")
    count = mypy_errors(checkout, *(f"bertjax/{room}" for room in ROOMS), "--follow-imports=silent")
    print(f"mypy --check-untyped-defs: {count} errors in these rooms")


if __name__ == "__main__":
    main()
