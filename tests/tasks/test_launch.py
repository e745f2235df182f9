"""The last lines of a run: files and commands."""

import shlex

import pytest

from bertjax import experiment
from bertjax.tasks.launch import last_lines


@pytest.mark.parametrize("name, expected", [
    ("small:mini", ["predict --checkpoint=W", "convert --source=W --output=W-huggingface", "train --config=classify"]),
    ("gpt", ["predict --checkpoint=W --generate=50 The", "train --config=classify --config.init_checkpoint=W"]),
    ("elmo", ["train --config=classify --config.init_checkpoint=W"]),
    ("classify", ["predict --checkpoint=W TEXT", "evaluate --checkpoint=W --data=W/dev.csv", "serve --checkpoint=W"]),
    ("squad", ["predict --checkpoint=W 'TEXT ||| TEXT'", "evaluate", "serve"]),
    ("embed", ["extract --checkpoint=W", "convert --source=W --output=W-sentence-transformers", "serve"]),
])  # fmt: skip
def test_the_last_lines_name_files_and_commands_with_quoted_paths(tmp_path, name, expected):
    config, workdir = experiment.load(name), tmp_path / "my run"
    for step in ("3", "20"):
        (workdir / "checkpoints" / step).mkdir(parents=True)
    (workdir / "dev.csv").touch()
    with config.unlocked():
        config.data.path = str(workdir)
    written, _, *commands = last_lines(config, workdir)
    assert str(workdir / "checkpoints" / "20") in written and "report.html" not in written
    for command, words in zip(map(shlex.split, commands), map(shlex.split, expected), strict=True):
        words = ["bertjax", *(word.replace("=W", f"={workdir}") for word in words)]
        assert command[: len(words)] == words
