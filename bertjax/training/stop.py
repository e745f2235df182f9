"""Stops all hosts after the same step on Ctrl-C or SIGTERM, which a TPU VM receives before preemption."""

import contextlib
import itertools
import os
import signal
from collections.abc import Callable, Iterator

import jax
from jax.experimental import multihost_utils

# Counts the steps of all runs in this process; JAX makes the hosts agree on one of them to stop after.
_asked = itertools.count(1)


@contextlib.contextmanager
def stop_signals() -> Iterator[Callable[[], bool]]:
    """Yields a function to call once after each step; it returns whether to stop. A second Ctrl-C stops at once.

    With several hosts, a signal to one of them stops them all after the same step.
    """
    received = []

    def note(number, frame):
        if received and number == signal.SIGINT:
            signal.signal(signal.SIGINT, signal.SIG_DFL)  # a third one ends the process, whatever it is doing
            raise KeyboardInterrupt
        received.append(number)
        if several:  # JAX propagates SIGTERM to the other hosts
            os.kill(os.getpid(), signal.SIGTERM)

    several = jax.process_count() > 1
    # With several hosts, JAX handles SIGTERM itself, outside of Python.
    numbers = (signal.SIGINT,) if several else (signal.SIGINT, signal.SIGTERM)
    try:
        before = {number: signal.signal(number, note) for number in numbers}
    except ValueError:  # not in the main thread, where signals cannot be handled
        before = {}
    try:
        yield lambda: multihost_utils.reached_preemption_sync_point(next(_asked)) if several else bool(received)
    finally:
        for number, handler in before.items():
            if signal.getsignal(number) is note:
                signal.signal(number, handler)
