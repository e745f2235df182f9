"""The smallest example of each page in docs/extending/ trains a run."""

import pkgutil
import sys

import pytest

from bertjax.inference.tasks import TASKS, find_task
from bertjax.models.families import FAMILIES
from bertjax.objectives.registry import OBJECTIVES
from bertjax.training.hooks.registry import HOOKS
from bertjax.training.optim.optimizers import OPTIMIZERS
from bertjax.training.optim.schedules import SCHEDULES
from bertjax.training.trackers.trackers import TRACKERS
from tests.checkpoints import checkpoint  # noqa: F401
from tests.pages import PAGES, ROOT, blocks_of
from tests.reader import Reader, write_inputs
from tests.test_tutorials import forgetting  # noqa: F401

LINES = {"family": 25, "objective": 15, "hook": 10}  # maximum, without imports, blank lines and `get_config`
EXTENDING = [page for page in PAGES if page.parent.name == "extending"]


@pytest.mark.slow
@pytest.mark.parametrize("page", EXTENDING, ids=lambda page: page.stem)
def test_the_smallest_example_of_a_page_trains(page, checkpoint, records_folder, tmp_path, monkeypatch):  # noqa: F811
    write_inputs(tmp_path, checkpoint)
    (tmp_path / "records").symlink_to(records_folder)  # like objects of the text
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)  # as in the folder of a program
    monkeypatch.delitem(sys.modules, "stars", raising=False)
    assert Reader(tmp_path).follow(page) == page.read_text().count("<!-- file: ") > 0


def test_every_entry_point_group_has_a_page():
    table = (ROOT / "docs/extending.md").read_text()
    assert {page.stem for page in EXTENDING} == {"task", "family", "objective", "optimizer", "sink", "hook"}
    assert all(f"(extending/{page.name}" in table for page in EXTENDING)


@pytest.mark.parametrize("name, most", LINES.items())
def test_the_smallest_example_is_short(name, most):
    blocks = blocks_of(ROOT / f"docs/extending/{name}.md")
    code = next(block.text for block in blocks if "file" in block.notes)
    lines = code[: code.index("def get_config")].splitlines()
    assert sum(bool(line) and not line.startswith(("import ", "from ")) for line in lines) <= most


def test_the_page_names_the_groups_and_the_functions_of_the_registries():
    """Each row of the table has the entry point group of a registry, and its `register`."""
    rows = [line.split("|") for line in (ROOT / "docs/extending.md").read_text().splitlines() if "register` |" in line]
    registries = (TASKS, FAMILIES, OBJECTIVES, OPTIMIZERS, SCHEDULES, TRACKERS, HOOKS)
    assert [row[3].strip(" `") for row in rows] == [registry.group for registry in registries]
    for row, registry in zip(rows, registries):
        assert pkgutil.resolve_name(row[2].strip(" `").replace(".register", ":register")) == registry.register


def test_a_task_of_bertjax_is_one_file():
    files = {path.stem for path in (ROOT / "bertjax/finetuning/tasks").glob("*.py")} - {"__init__"}
    assert files | {"embed"} <= set(TASKS.names())


@pytest.mark.parametrize("architecture, task", [("SequenceClassification", "classify"), ("TokenClassification", "tag")])
def test_a_new_file_does_not_take_the_checkpoints_of_transformers(architecture, task):
    """Several tasks have these architectures."""
    assert find_task({}, f"BertFor{architecture}") is TASKS.get(task)
    assert find_task({"task": "glue"}, f"BertFor{architecture}") is TASKS.get("glue")


@pytest.mark.parametrize("registry", [TASKS, FAMILIES, OBJECTIVES, OPTIMIZERS, SCHEDULES, TRACKERS, HOOKS])
def test_every_registered_name_loads(registry):
    """Helper modules in the folders of objectives and families are not registered."""
    for name in registry.names():
        assert registry.get(name) is not None
