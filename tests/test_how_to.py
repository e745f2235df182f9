"""The commands of README and the how-to pages, as a reader types them, with smaller models.

Runs whose checkpoint no other command reads end where training would begin; the tests of their features train.
"""

import pytest

from tests.checkpoints import checkpoint  # noqa: F401
from tests.pages import OTHERS, blocks_of
from tests.reader import HOW_TO, Reader, read_by_others, write_inputs, write_published, writers


def has_commands_to_run(page):
    return any(words[0] not in OTHERS for block in blocks_of(page) for words in block.to_run())


PAGES = [*filter(has_commands_to_run, HOW_TO)]


@pytest.fixture(scope="module")
def reader(checkpoint, tmp_path_factory):  # noqa: F811
    """A reader that has read no page yet; later pages read the outputs of earlier pages."""
    folder = tmp_path_factory.mktemp("reader")
    write_inputs(folder, checkpoint)
    write_published(folder, checkpoint)
    return Reader(folder, read_by_others())


@pytest.mark.slow
@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_every_command_of_a_page_runs(page, reader, monkeypatch):
    monkeypatch.chdir(reader.folder)
    assert reader.follow(page) > 0


def test_commands_write_to_distinct_paths():
    for path, commands in writers().items():
        assert len({tuple(words) for words, _ in commands}) == 1, path
