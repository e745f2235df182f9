"""The smallest task, family, objective, optimizer, schedule and sink: what docs/extending/ shows is trained with."""

import sys

import pytest

from tests.checkpoints import checkpoint  # noqa: F401
from tests.pages import PAGES, ROOT
from tests.reader import Reader, write_inputs
from tests.test_tutorials import forgetting  # noqa: F401

EXTENDING = [page for page in PAGES if page.parent.name == "extending"]


@pytest.mark.slow
@pytest.mark.parametrize("page", EXTENDING, ids=lambda page: page.stem)
def test_the_smallest_example_of_a_page_is_trained_with(page, checkpoint, records_folder, tmp_path, monkeypatch):  # noqa: F811
    write_inputs(tmp_path, checkpoint)
    (tmp_path / "records").symlink_to(records_folder)  # as they would be made of the text
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)  # as where a program is run
    monkeypatch.delitem(sys.modules, "stars", raising=False)
    assert Reader(tmp_path).follow(page) == page.read_text().count("<!-- file: ") > 0


def test_there_is_a_page_for_each_kind_with_an_entry_point():
    table = (ROOT / "docs/extending.md").read_text()
    assert {page.stem for page in EXTENDING} == {"task", "family", "objective", "optimizer", "sink"}
    assert all(f"(extending/{page.name}" in table for page in EXTENDING)
