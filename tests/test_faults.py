"""Faults in operation: signals, full disks, killed processes."""

import re
import resource
import signal
import time

import pytest

from bertjax.cli.overrides import from_arguments
from bertjax.common import lock
from bertjax.data.preprocessing.preparation import prepare
from bertjax.training.checkpoints import checkpoint
from tests.cli.test_commands import TINY, base
from tests.conftest import make_corpus
from tests.processes import start

ENDLESS = [
    "--config.stages.long.steps=100000", "--config.checkpoint.every_steps=5", "--config.log_every_steps=1",
    "--config.stages.short.max_predictions_per_seq=5", "--config.data.dupe_factor=3", "--workdir=run",
]  # fmt: skip


def train(records, folder):
    return start("main", *base(f"--config.data.records={records}", *TINY, *ENDLESS), cwd=folder)


def wait_until(condition, process):
    deadline = time.monotonic() + 200
    while not condition():
        assert process.poll() is None and time.monotonic() < deadline, process.describe()
        time.sleep(0.01)


@pytest.mark.slow
def test_a_full_disk_prints_one_line_and_loses_no_checkpoint(records_folder, tmp_path):
    process = train(records_folder, tmp_path)
    wait_until(lambda: (tmp_path / "run/checkpoints/5").exists(), process)
    resource.prlimit(process.pid, resource.RLIMIT_FSIZE, (2000, 2000))
    assert process.wait(200) == 1, process.describe()
    lines = process.stderr.splitlines()
    assert len(lines) == 1 and re.match(r"error: .*run.*(File too large|cannot be written)", lines[0]), lines
    again = train(records_folder, tmp_path)
    wait_until(lambda: "training in run, from step" in again.stdout, again)
    again.send_signal(signal.SIGKILL)
    assert "damaged" not in again.stdout and checkpoint.latest_intact_step(tmp_path / "run") >= 5


@pytest.mark.slow
def test_repeated_ctrl_c_prints_at_most_two_lines(records_folder, tmp_path):
    process = train(records_folder, tmp_path)
    wait_until(lambda: "step 5/" in process.stdout, process)
    for _ in range(3):
        process.send_signal(signal.SIGINT)
        time.sleep(0.1)
    assert process.wait(100) in (130, -signal.SIGINT), process.describe()
    assert re.fullmatch(r"stopping: saving step \d+ first\n(\w.*\n)?", process.stderr), process.stderr


@pytest.mark.slow
def test_a_second_run_in_a_workdir_is_refused(records_folder, tmp_path):
    pair = [train(records_folder, tmp_path) for _ in range(2)]
    wait_until(lambda: any(process.poll() is not None for process in pair), pair[0] if pair[1].poll() else pair[1])
    (refused,) = [process for process in pair if process.poll() is not None]
    (other,) = [process for process in pair if process is not refused]
    assert refused.poll() == 1 and re.fullmatch(
        rf"error: --workdir=run: in use by (host \S+, process {other.pid}, since .*|another process); wait .*\n",
        refused.stderr,
    )
    wait_until(lambda: "step 5/" in other.stdout, other)
    other.send_signal(signal.SIGKILL)
    other.wait(100)
    with lock.held(tmp_path / "run", "--workdir"):  # the killed process leaves no lock
        pass


def test_a_corpus_may_have_a_comma_in_its_name(tmp_path, monkeypatch, in_process):
    monkeypatch.chdir(tmp_path)
    for seed, name in enumerate(("a,b.txt", "c.txt")):
        (tmp_path / name).write_text(make_corpus(30, seed))
    arguments = base(r"--config.data.corpus=a\,b.txt,c.txt", *TINY)
    config, _ = from_arguments(["bertjax", *arguments])
    manifest = prepare(config, tmp_path / "out")
    assert manifest["sources"].keys() == {"a,b.txt", "c.txt"}
