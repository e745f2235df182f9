"""The rooms of the package: no cycles of imports, doors without logic, shims of a few lines, and a picture of today.

import-linter checks in `.ci/run` that imports point down.
"""

import ast
import importlib.util

import pytest

from tests.conftest import FOLDER

ROOT = FOLDER.parent
PACKAGE = ROOT / "bertjax"
DOORS = sorted(PACKAGE.rglob("__init__.py"))
# Modules of the package that import a door: these read the version.
READ_VERSION = {
    "bertjax.cli.commands",
    "bertjax.interop.model_card",
    "bertjax.serving.text_embeddings_inference",
}


@pytest.fixture(scope="module")
def rooms():
    """Imports docs/site/rooms.py."""
    spec = importlib.util.spec_from_file_location("rooms", ROOT / "docs/site/rooms.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="module")
def imports(rooms):
    return rooms.imports_of_modules()


def test_no_modules_import_each_other(rooms, imports):
    assert rooms.cycles({"a": {"b"}, "b": {"c"}, "c": {"a"}, "d": {"a"}}) == [["a", "b", "c"]]
    assert rooms.cycles(imports) == []


def test_code_of_the_package_imports_modules_and_no_doors(imports):
    doors = {".".join(door.relative_to(ROOT).parts[:-1]) for door in DOORS}
    users = {name for name, imported in imports.items() if name not in doors and imported & doors}
    assert users <= READ_VERSION


@pytest.mark.parametrize("door", DOORS, ids=lambda door: str(door.relative_to(PACKAGE).parent))
def test_a_door_has_a_docstring_and_names_and_no_logic(door):
    text = door.read_text()
    assert ast.get_docstring(ast.parse(text)) and len(text.splitlines()) <= 60
    if door.parent != PACKAGE:  # bertjax/__init__.py imports its names when they are used
        assert all(
            isinstance(statement, ast.ImportFrom)
            or (isinstance(statement, ast.Assign) and statement.targets[0].id == "__all__")
            for statement in ast.parse(text).body[1:]
        )


def test_old_names_are_shims():
    files = [
        *PACKAGE.glob("*.py"),
        *(PACKAGE / "training" / f"{name}.py" for name in ("optimizers", "schedules", "sinks")),
    ]
    shims = {path: path.read_text().splitlines() for path in files if path.stem != "__init__"}
    assert len(shims) == 23
    for path, lines in shims.items():
        assert len(lines) <= 6, path


def test_picture_and_page_of_the_rooms_match_the_code(rooms):
    """If this test fails, run python docs/site/rooms.py."""
    assert rooms.PICTURE.read_text() == rooms.picture(rooms.layers())
    assert rooms.PAGE.read_text() == rooms.page(rooms.layers())


def test_every_folder_of_code_is_a_package():
    folders = {path.parent for path in PACKAGE.rglob("*.py")}
    assert folders == {door.parent for door in DOORS}
