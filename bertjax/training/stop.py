"""Ctrl-C and SIGTERM (what a TPU VM gets before it is taken away): a step after which every host stops."""

import contextlib
import itertools
import os
import signal
from collections.abc import Callable, Iterator

import jax
from jax.experimental import multihost_utils

# Of all steps in this process, whichever run they are of: JAX agrees on one of them after which everybody stops.
_asked = itertools.count(1)


@contextlib.contextmanager
def stop_signals() -> Iterator[Callable[[], bool]]:
    """`stops()`, to be asked once after each step: whether to end with it. A second Ctrl-C stops at once.

    With several hosts a signal to one of them stops them all, after the same step.
    """
    received = []

    def note(number, frame):
        if received and number == signal.SIGINT:
            raise KeyboardInterrupt
        received.append(number)
        if several:  # it is SIGTERM that JAX tells the other hosts of
            os.kill(os.getpid(), signal.SIGTERM)

    several = jax.process_count() > 1
    # JAX has a handler of its own for SIGTERM then, beyond Python's knowledge.
    numbers = (signal.SIGINT,) if several else (signal.SIGINT, signal.SIGTERM)
    try:
        before = {number: signal.signal(number, note) for number in numbers}
    except ValueError:  # not the main thread (a notebook's, a test's): leave signals alone
        before = {}
    try:
        yield lambda: multihost_utils.reached_preemption_sync_point(next(_asked)) if several else bool(received)
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
