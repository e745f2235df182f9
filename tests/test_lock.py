"""Two commands at once on one folder: one of them writes, the other says who does."""

import json
import os
import re
import signal
import subprocess
import sys
import threading
import time

import pytest

from bertjax import lock
from bertjax.config import UserError

HOLD = """
import sys, time
from bertjax import lock
from bertjax.config import UserError
while time.time() < float(sys.argv[2]):  # so that all begin at once
    pass
try:
    with lock.held(sys.argv[1], "--workdir"):
        print("held", flush=True)
        sys.stdin.read()
except UserError as error:
    print(error, flush=True)
"""


def start(folder, begin):
    command = [sys.executable, "-c", HOLD, str(folder), str(begin)]
    return subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)


@pytest.mark.slow
def test_of_several_that_start_together_one_goes_on(tmp_path):
    processes = [start(tmp_path / "run", time.time() + 2) for _ in range(3)]
    lines = [process.stdout.readline() for process in processes]
    (holder,) = [process for process, line in zip(processes, lines) if line == "held\n"]
    for process, line in zip(processes, lines):
        if process is not holder:
            assert re.match(rf"--workdir={tmp_path}/run: in use by (host \S+, process {holder.pid}, |another)", line)
    with pytest.raises(UserError, match=f"process {holder.pid}, since 20"):
        with lock.held(tmp_path / "run", "--workdir"):
            pass
    holder.send_signal(signal.SIGKILL)
    holder.wait()
    with lock.held(tmp_path / "run", "--workdir"):  # nothing of the killed one is in the way
        pass
    for process in processes:
        process.stdin.close()
        process.wait()
        process.stdout.close()


@pytest.fixture
def store(tmp_path, monkeypatch):
    """A folder whose lock is kept as in an object store, where time passes quickly."""
    for name, seconds in (("BEAT", 0.05), ("SILENCE", 0.7), ("SETTLE", 0.3)):
        monkeypatch.setattr(lock, name, seconds)
    monkeypatch.setattr(lock, "_held_by_kernel", lock._held_in_store)
    return tmp_path


@pytest.mark.slow
def test_in_a_store_the_last_of_those_that_start_together_goes_on(store):
    outcomes, ended = [], threading.Event()

    def hold():
        try:
            with lock.held(store, "--workdir"):
                outcomes.append("held")
                ended.wait()
        except UserError as error:
            outcomes.append(str(error))

    threads = [threading.Thread(target=hold) for _ in range(4)]
    for thread in threads:
        thread.start()
    time.sleep(1.5)  # longer than SILENCE: the owner is still alive
    with pytest.raises(UserError, match=f"process {os.getpid()}, since 20"):
        with lock.held(store, "--workdir"):
            pass
    ended.set()
    for thread in threads:
        thread.join()
    assert len(outcomes) == 4 and outcomes.count("held") == 1
    with lock.held(store, "--workdir"):
        pass


def test_in_a_store_a_dead_owner_is_waited_for_no_longer_than_one_that_lives_is_silent(store):
    owner = {"host": "a", "process": 1, "start": "b", "key": "c", "time": time.time() + 1000}  # its clock is ahead
    (store / lock.FILE).write_text(json.dumps(owner))
    began = time.monotonic()
    with lock.held(store, "--output"):
        assert 0.7 < time.monotonic() - began < 3
