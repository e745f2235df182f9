"""Signals that arrive while Python cannot run handlers."""

import signal
import subprocess
import sys
import time

import pytest

HELD = """
import hashlib, time
from bertjax.training import signals
began = time.perf_counter()
hashlib.pbkdf2_hmac("sha256", b"", b"", 10**5)
rounds = int(10**5 * {seconds} / (time.perf_counter() - began))
signals.GRACE_SECONDS = 0.1
with signals.report_signals():
    signals.set_unsaved_work({work!r})
    print("ready", flush=True)
    hashlib.pbkdf2_hmac("sha256", b"", b"", rounds)  # no handler is called meanwhile
"""


AT_ONCE = """
import hashlib
from bertjax.training import signals
with signals.exit_on_signal():
    print("ready", flush=True)
    hashlib.pbkdf2_hmac("sha256", b"", b"", 10**9)
"""


@pytest.mark.parametrize("number, line", [(signal.SIGINT, "interrupted\n"), (signal.SIGTERM, "terminated\n")])
def test_a_signal_ends_a_command_during_compilation(number, line):
    with subprocess.Popen([sys.executable, "-c", AT_ONCE], stdout=-1, stderr=-1, text=True) as process:
        assert process.stdout.readline() == "ready\n"
        time.sleep(0.2)  # until the call begins
        process.send_signal(number)
        assert process.stderr.read() == line and process.wait(5) == 130


@pytest.mark.parametrize("work, seconds", [("", 100), ("saving step 3 first", 3)])
def test_a_signal_ends_a_process_without_state_at_once(work, seconds):
    code = HELD.format(work=work, seconds=seconds)
    with subprocess.Popen([sys.executable, "-c", code], stdout=-1, stderr=-1, text=True) as process:
        assert process.stdout.readline() == "ready\n"
        time.sleep(0.2)  # until the call begins
        process.send_signal(signal.SIGINT)
        assert process.stderr.readline() == f"stopping: {work or 'the same command continues from here'}\n"
        assert not work or process.poll() is None  # the line comes before the end of the call
        rest = process.stderr.read()
    assert rest.endswith("KeyboardInterrupt\n") if work else (process.returncode, rest) == (130, "stopped\n")
