"""Two concurrent commands in one folder of an object store. tests/test_faults.py tests the lock of a file system."""

import json
import os
import threading
import time

import pytest

from bertjax.common import lock
from bertjax.common.errors import UserError


@pytest.fixture
def store(tmp_path, monkeypatch):
    """A folder whose lock is kept as in an object store, with shortened periods."""
    for name, seconds in (("BEAT", 0.05), ("SILENCE", 0.7), ("SETTLE", 0.3)):
        monkeypatch.setattr(lock, name, seconds)
    monkeypatch.setattr(lock, "_held_by_kernel", lock._held_in_store)
    return tmp_path


@pytest.mark.slow
def test_one_of_several_concurrent_commands_gets_the_lock_of_an_object_store(store):
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


def test_the_lock_of_a_dead_owner_expires_in_an_object_store(store):
    # the clock of the owner is ahead
    owner = {"host": "a", "process": 1, "start": "b", "key": "c", "time": time.time() + 1000}
    (store / lock.FILE).write_text(json.dumps(owner))
    began = time.monotonic()
    with lock.held(store, "--output"):
        assert 0.7 < time.monotonic() - began < 3
