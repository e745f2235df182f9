"""Lists the texts that a user can see, for a review: python docs/site/messages.py [--checkout=DIR] [KIND ...]

A line has the file, the line, the kind and the text, with {} for values:

    bertjax/cli/mine.py:48: flag: --corpus: More documents: a .txt with one document per line, or ...

The kinds: "error" is the argument of an exception, "line" is printed, logged or passed to a callback, "flag" is the
help of a flag, and "text" is any other string of three words or more, such as a part of a message that a function
returns. Docstrings and annotations are left out. A value with words, as in `f"{a or 'none'}"`, is written as {none}.
"""

import argparse
import ast
import pathlib
from collections.abc import Iterator

# The last names of the functions that print or log their first argument, or pass it to the user.
PRINTERS = (
    "print", "print_line", "_print", "phase", "on_note", "warn", "info", "warning", "error", "exception", "write",
    "exit", "print_next", "log", "note",
)  # fmt: skip
# A string outside of these calls counts as text from so many words on.
WORDS = 3


def text_of(node: ast.expr) -> str:
    """Returns the text of an expression, with {} for its values; "" for an expression without text."""
    match node:
        case ast.Constant(value=str(text)):
            return text
        case ast.JoinedStr(values=parts):
            return "".join(text_of(part) or "{}" for part in parts)
        case ast.FormattedValue(value=value):
            return f"{{{text_of(value)}}}"
        case ast.BinOp(left=left, op=ast.Add() | ast.Mod(), right=right):
            return f"{text_of(left) or '{}'}{text_of(right) or '{}'}" if isinstance(node.op, ast.Add) else text_of(left)
        case ast.IfExp(body=body, orelse=alternative):
            texts = text_of(body), text_of(alternative)
            return "|".join(texts) if any(texts) else ""
        case ast.BoolOp(values=values):
            return "|".join(filter(None, map(text_of, values)))
        case ast.Call(func=ast.Attribute(value=ast.Constant() as template)):
            return text_of(template) if " " in str(template.value) else ""
    return ""


def name_of(call: ast.Call) -> str:
    """Returns the last name of the called function: "info" for `logging.info`."""
    return getattr(call.func, "attr", None) or getattr(call.func, "id", "")


def without_text(tree: ast.Module) -> set[ast.AST]:
    """Returns the nodes of the docstrings and annotations of a module."""
    nodes: set[ast.AST] = set()
    for node in ast.walk(tree):
        match node:
            case ast.Expr(value=ast.Constant()):
                nodes.add(node.value)
            case ast.FunctionDef(returns=annotation) | ast.arg(annotation=annotation):
                nodes.update(ast.walk(annotation) if annotation else ())
            case ast.AnnAssign(annotation=annotation):
                nodes.update(ast.walk(annotation))
    return nodes


def messages(tree: ast.Module) -> Iterator[tuple[int, str, str]]:
    """Yields the line, the kind and the text of each message of a module, in the order of the lines."""
    listed = without_text(tree)
    rows: list[tuple[int, str, str]] = []

    def add(kind: str, node: ast.expr, prefix: str = "") -> None:
        if (text := text_of(node)).strip("{} ") and node not in listed:
            rows.append((node.lineno, kind, prefix + " ".join(text.split())))
            listed.update(ast.walk(node))

    for node in ast.walk(tree):
        if isinstance(node, ast.Raise) and isinstance(node.exc, ast.Call) and node.exc.args:
            add("error", node.exc.args[0])
            listed.add(node.exc)
    for node in ast.walk(tree):
        if not isinstance(node, ast.Call) or node in listed:
            continue
        name = name_of(node)
        if name.endswith("Error") and node.args:
            add("error", node.args[0])
        elif name in PRINTERS and node.args:
            add("line", node.args[0])
        elif name.upper().startswith("DEFINE_") or name == "define_required_flag":
            texts = [argument for argument in node.args[1:] if " " in text_of(argument)]
            texts += [keyword.value for keyword in node.keywords if keyword.arg == "help"]
            for text in texts[-1:]:
                add("flag", text, f"--{text_of(node.args[0])}: ")
    for node in ast.walk(tree):  # parents before children
        if isinstance(node, ast.expr) and node not in listed and len(text_of(node).split()) >= WORDS:
            add("text", node)
    yield from sorted(rows, key=lambda row: row[0])


def main() -> None:
    """Prints the messages of the package."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--checkout", type=pathlib.Path, default=pathlib.Path(__file__).parents[2])
    parser.add_argument("kinds", nargs="*", default=["error", "line", "flag", "text"])
    arguments = parser.parse_args()
    for path in sorted((arguments.checkout / "bertjax").rglob("*.py")):
        for line, kind, text in messages(ast.parse(path.read_text())):
            if kind in arguments.kinds:
                print(f"{path.relative_to(arguments.checkout)}:{line}: {kind}: {text}")


if __name__ == "__main__":
    main()
