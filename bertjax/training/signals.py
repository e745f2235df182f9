"""Stops all hosts after the same step on Ctrl-C or SIGTERM, which a TPU VM receives before preemption.

Python calls its signal handlers between two bytecodes: not while C++ code compiles a step, for a minute. The command
`train` therefore listens to signals in a thread too, which answers at once (`announced`).
"""

import contextlib
import itertools
import os
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterator

# Counts the steps of all runs in this process; JAX makes the hosts agree on one of them to stop after.
_asked = itertools.count(1)

GRACE = 2.0  # seconds until the thread ends a process that does not react, and would lose nothing
REACTION = 0.5  # the same, of a command that cannot continue
SIGNALS = (signal.SIGINT, signal.SIGTERM)


class _Situation:
    """The effect of a signal that comes now."""

    unsaved = ""  # the work that is saved before the run stops, as part of a line; "": there is none
    is_stopping = False  # whether `KeyboardInterrupt` was raised because of a signal
    is_compiling = False  # whether it was raised within JAX, after which Python may crash while it ends
    is_alone = True  # whether the run has a single host


_now = _Situation()


def saves_first(work: str) -> None:
    """Sets the work that a signal waits for, such as "saving step 45 first"; "": a signal stops the run at once.

    Several hosts agree on a step after the signal, so that only "" has an effect there.
    """
    if _now.is_alone or not work:
        _now.unsaved = work


@contextlib.contextmanager
def announced() -> Iterator[None]:
    """Context manager of a command: Ctrl-C and SIGTERM print a line at once, whatever the main thread does.

    Ends the process if there is nothing to save and the main thread does not react, and on the third Ctrl-C.
    """
    receiver, sender = socket.socketpair()
    sender.setblocking(False)
    handlers = {number: handler for number in SIGNALS if callable(handler := signal.getsignal(number))}

    def note(number, frame):
        _now.is_stopping = True
        handlers[number](number, frame)  # raises `KeyboardInterrupt`

    for number in handlers:  # not those that are ignored, as in the background of a shell
        signal.signal(number, note)
    before = signal.set_wakeup_fd(sender.fileno(), warn_on_full_buffer=False)
    thread = threading.Thread(target=_listen, args=(receiver,), daemon=True)
    thread.start()
    try:
        yield
    except KeyboardInterrupt:
        if _now.is_compiling:
            _end()
        raise
    finally:
        signal.set_wakeup_fd(before)
        for number, handler in handlers.items():
            if signal.getsignal(number) is note:
                signal.signal(number, handler)
        sender.close()  # ends the thread, once it has answered
        thread.join(1)


@contextlib.contextmanager
def ending_at_once() -> Iterator[None]:
    """Context manager of a command that has nothing to save: Ctrl-C and SIGTERM print a line and end the process.

    `KeyboardInterrupt` is raised first, so that unfinished files are deleted. If Python cannot call its handlers, such
    as while C++ code compiles, the process ends after `REACTION` seconds. The third signal ends it at once.
    """
    receiver, sender = socket.socketpair()
    sender.setblocking(False)
    ignored = signal.SIG_IGN, None  # None: not set by Python
    handlers = {number: handler for number in SIGNALS if (handler := signal.getsignal(number)) not in ignored}
    lines = {signal.SIGINT: "interrupted", signal.SIGTERM: "terminated"}
    has_reacted = threading.Event()

    def note(number, frame):
        has_reacted.set()
        raise KeyboardInterrupt(lines[number])

    def end() -> None:
        signals = 0
        while numbers := receiver.recv(1):
            if numbers[0] in handlers:
                signals += 1
                if not has_reacted.wait(REACTION) or signals > 2:
                    _end(lines[numbers[0]])

    for number in handlers:
        signal.signal(number, note)
    before = signal.set_wakeup_fd(sender.fileno(), warn_on_full_buffer=False)
    thread = threading.Thread(target=end, daemon=True)
    thread.start()
    try:
        yield
    except KeyboardInterrupt as error:  # perhaps within JAX, after which Python may crash while it ends
        with contextlib.suppress(OSError):
            sys.stdout.flush()
        _end(str(error) or lines[signal.SIGINT])
    finally:
        signal.set_wakeup_fd(before)
        for number, handler in handlers.items():
            signal.signal(number, handler)
        sender.close()
        thread.join(1)


def _listen(receiver: socket.socket) -> None:
    first, interrupts = None, 0
    while True:
        try:
            numbers = receiver.recv(1)
        except TimeoutError:
            if time.monotonic() - first > GRACE and not _now.is_stopping and not _now.unsaved and _now.is_alone:
                _end()
            continue
        if not numbers:
            return
        interrupts += numbers[0] == signal.SIGINT
        if interrupts == 3:
            _end()
        if first is None and numbers[0] in SIGNALS:
            first = time.monotonic()
            receiver.settimeout(0.1)
            _print(f"stopping: {_now.unsaved or 'the same command continues from here'}")


def _end(line: str = "stopped") -> None:
    _print(line)
    os._exit(130)


def _print(line: str) -> None:
    with contextlib.suppress(OSError):
        print(line, file=sys.stderr, flush=True)


@contextlib.contextmanager
def stop_signals() -> Iterator[Callable[[], bool]]:
    """Yields a function to call once after each step; it returns whether to stop. A second Ctrl-C stops at once.

    With several hosts, a signal to one of them stops them all after the same step. A single host stops at once while
    there is nothing to save.
    """
    import jax  # takes seconds, in which `announced` listens already
    from jax.experimental import multihost_utils

    received = []

    def note(number, frame):
        if not received and not several and not _now.unsaved:
            received.append(number)
            _now.is_stopping = _now.is_compiling = True
            raise KeyboardInterrupt("stopped")
        if received and number == signal.SIGINT:
            signal.signal(signal.SIGINT, signal.SIG_DFL)  # a third one ends the process, whatever it is doing
            _now.is_stopping = True
            raise KeyboardInterrupt
        received.append(number)
        if several:  # JAX propagates SIGTERM to the other hosts
            os.kill(os.getpid(), signal.SIGTERM)

    several = jax.process_count() > 1
    # With several hosts, JAX handles SIGTERM itself, outside of Python.
    numbers = (signal.SIGINT,) if several else SIGNALS
    if several:
        _now.unsaved, _now.is_alone = "all hosts save the same step first", False
    try:
        before = {number: signal.signal(number, note) for number in numbers}
    except ValueError:  # not in the main thread, where signals cannot be handled
        before = {}
    try:
        yield lambda: multihost_utils.reached_preemption_sync_point(next(_asked)) if several else bool(received)
    finally:
        _now.is_stopping |= bool(received)
        for number, handler in before.items():
            if signal.getsignal(number) is note:
                signal.signal(number, handler)
