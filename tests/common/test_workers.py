"""How a pool of workers ends. tests/cli/test_commands.py tests that Ctrl-C stops preparation."""

import os
import signal
import subprocess
import sys
import threading
import time

import pytest

from bertjax.common import workers
from bertjax.common.errors import UserError
from bertjax.common.workers import worker_pool


def fail_in_pool(before):
    """Raises an error in the body of a pool, after `before(pool)`; returns the raised error, or None."""
    raised, pools = [], []

    def run():
        try:
            with worker_pool(2) as pool:
                pools.append(pool)
                before(pool)
                raise UserError("the error")
        except BaseException as error:
            raised.append(error)

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    thread.join(60)
    if thread.is_alive():  # otherwise this process would not end either
        pools[0]._result_queue._writer.close()
    return next(iter(raised), None)


def use(pool):
    assert list(pool.map(abs, range(-4, 0))) == [4, 3, 2, 1]


def receive_half(pool):
    """Waits until the first part of a long result has arrived."""
    pool.submit(bytes, 100_000_000)

    def is_reading(frame):
        return frame and (frame.f_locals.get("remaining", 0) > 10_000_000 or is_reading(frame.f_back))

    while not is_reading(sys._current_frames()[pool._executor_manager_thread.ident]):
        time.sleep(0.001)


@pytest.mark.parametrize("before", [use, receive_half])
def test_an_error_in_the_body_is_raised_and_the_workers_end(before):
    assert str(fail_in_pool(before)) == "the error"


def test_a_dead_worker_raises_one_line():
    assert "a worker process died" in str(fail_in_pool(lambda pool: pool.submit(os._exit, 1).result()))


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_that_another_thread_receives_waits_until_the_workers_have_started(number):
    """Python runs signal handlers in the main thread, whichever thread receives the signal."""
    heard, end = [], threading.Event()
    other = threading.Thread(target=end.wait)
    other.start()
    before = signal.signal(number, lambda *_: heard.append(number))
    try:
        with workers._holding_interrupts():
            signal.pthread_kill(other.ident, number)
            time.sleep(0.05)
            assert not heard
        assert heard == [number]
    finally:
        signal.signal(number, before)
        end.set()


def test_ctrl_c_in_a_python_callback_is_not_lost():
    """Python prints and drops errors of `__del__`."""
    script = """
import os, signal, sys, time
from bertjax.cli.app import run_command

class Interrupted:
    def __del__(self):
        os.kill(os.getpid(), signal.SIGINT)
        time.sleep(0.01)

def main(_):
    Interrupted()
    time.sleep(60)

run_command(main)
"""
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=50)
    assert (done.returncode, done.stderr) == (130, "interrupted\n")


def test_workers_end_when_their_parent_is_killed():
    """Otherwise the workers would keep the output pipe open, and `run` would wait for them."""
    script = """
import os, signal
from bertjax.common.workers import worker_pool

with worker_pool(2):
    os.kill(os.getpid(), signal.SIGKILL)
"""
    assert subprocess.run([sys.executable, "-c", script], capture_output=True, timeout=50).returncode == -signal.SIGKILL
