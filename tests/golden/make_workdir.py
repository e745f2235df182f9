"""Makes workdir.tar.gz: a run that was stopped at step 5 of 8, as main was on 2026-11-25 (f00deda), and its end.

    git worktree add /tmp/then f00deda
    git show aa44ff2:tests/golden/make_workdir.py > /tmp/then/tests/golden/make_workdir.py  # older imports
    cd /tmp/then && PYTHONPATH=. python -m tests.golden.make_workdir FILE

In it: `run`, the workdir, and `end.npz`, the params that the same code had after step 8, by their paths. Where a
change means to have other dropout masks, `python -m tests.golden.make_workdir FILE end` writes the `end.npz` that they
lead to into the archive, as on 2026-11-26, when dropout's hash became shorter.
"""

import contextlib
import pathlib
import shutil
import sys
import tarfile
import tempfile

import flax.traverse_util
import numpy as np

from bertjax.config.defaults import named_stages, stage
from bertjax.launch.start import launch
from bertjax.launch.validate import validate
from bertjax.training.checkpoints import checkpoint
from tests.conftest import make_corpus, tiny_config


def config_of(corpus):
    config = tiny_config(corpus)
    config.model.update(vocab_size=128, hidden_size=8, num_hidden_layers=2, intermediate_size=16)
    config.stages = named_stages(short=stage(8, 16, 3))
    config.data.update(dupe_factor=1)
    config.dtype = "float32"
    config.checkpoint.update(every_steps=5, keep=2)
    validate(config)
    return config


def save_end() -> None:
    end = flax.traverse_util.flatten_dict(checkpoint.read_params("run", 8), sep="/")
    np.savez("end.npz", **end)


def renew_end(target: str) -> None:
    with tempfile.TemporaryDirectory() as name, contextlib.chdir(name):
        for folder in ("old", "."):  # the first stays as it is
            with tarfile.open(target) as archive:
                archive.extractall(folder, filter="data")
        pathlib.Path("text.txt").write_text(make_corpus(30))
        launch(config_of("text.txt"), "run")
        save_end()
        with tarfile.open(target, "w:gz") as archive:
            archive.add("old/run", "run")
            archive.add("end.npz")


def main(target: str) -> None:
    with tempfile.TemporaryDirectory() as name, contextlib.chdir(name):
        pathlib.Path("text.txt").write_text(make_corpus(30))
        launch(config_of("text.txt"), "run")
        save_end()
        shutil.rmtree("run/checkpoints/8")
        for left in ("tensorboard", "report.txt", "report.html", "report.png"):
            path = pathlib.Path("run", left)
            shutil.rmtree(path) if path.is_dir() else path.unlink(missing_ok=True)
        lines = pathlib.Path("run/metrics.jsonl").read_text().splitlines(keepends=True)
        pathlib.Path("run/metrics.jsonl").write_text("".join(line for line in lines if '"step": 5' in line))
        with tarfile.open(target, "w:gz") as archive:
            archive.add("run")
            archive.add("end.npz")


if __name__ == "__main__":
    make = renew_end if sys.argv[2:] == ["end"] else main
    make(str(pathlib.Path(sys.argv[1]).absolute()))
