"""Stops all hosts after the same step on Ctrl-C or SIGTERM, which a TPU VM receives before preemption.

Python calls its signal handlers between two bytecodes, and not while C++ code compiles a step for a minute. In the
command `train`, a thread also listens to signals, and answers at once (`announced`).
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
from types import FrameType

# Counts the sync points of all runs in this process. JAX makes the hosts stop at the same sync point.
_sync_points = itertools.count(1)

GRACE = 2.0  # seconds until the thread ends a process that does not react, if the process would lose no work
REACTION = 0.5  # the same in `ending_at_once`
SIGNALS: tuple[int, ...] = (signal.SIGINT, signal.SIGTERM)


class _Situation:
    """The effect of a signal that arrives now."""

    unsaved = ""  # the work that is saved before the run stops, as part of a line; "": no work
    is_stopping = False  # whether a signal has raised `KeyboardInterrupt`
    is_compiling = False  # whether `KeyboardInterrupt` was raised within JAX: Python may then crash at its exit
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
    """Context manager of a command: Ctrl-C and SIGTERM print a line at once, also while the main thread is busy.

    The third Ctrl-C ends the process. If there is nothing to save and the main thread does not react, the first does.
    """
    receiver, sender = socket.socketpair()
    sender.setblocking(False)
    handlers = {number: handler for number in SIGNALS if callable(handler := signal.getsignal(number))}

    def note(number: int, frame: FrameType | None) -> None:
        _now.is_stopping = True
        handlers[number](number, frame)  # Raises `KeyboardInterrupt`.

    for number in handlers:  # without ignored signals, as in the background of a shell
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
        sender.close()  # The thread answers signals that it has received, and ends.
        thread.join(1)


@contextlib.contextmanager
def ending_at_once() -> Iterator[None]:
    """Context manager of a command that has nothing to save: Ctrl-C and SIGTERM print a line and end the process.

    The signal raises `KeyboardInterrupt` first, so that unfinished files are deleted. If Python cannot call its
    handlers, such as while C++ code compiles, the process ends after `REACTION` seconds. The third signal ends it at
    once.
    """
    receiver, sender = socket.socketpair()
    sender.setblocking(False)
    ignored = signal.SIG_IGN, None  # None: a handler that Python has not set
    handlers = {number: handler for number in SIGNALS if (handler := signal.getsignal(number)) not in ignored}
    lines: dict[int, str] = {signal.SIGINT: "interrupted", signal.SIGTERM: "terminated"}
    has_reacted = threading.Event()

    def note(number: int, frame: FrameType | None) -> None:
        del frame
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
    except KeyboardInterrupt as error:  # If JAX was interrupted, Python may crash at its exit.
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
    """Answers the first signal, and ends the process as `announced` describes."""
    first, interrupts = 0.0, 0  # when the first signal arrived; 0: none has
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
        if not first and numbers[0] in SIGNALS:
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
    """Context manager: a signal stops the run after a step, and a second Ctrl-C stops it at once.

    With several hosts, a signal to one host stops all hosts after the same step. A single host stops at once while
    there is nothing to save.

    Yields:
      A function that returns whether to stop. All hosts call it once after each step.
    """
    import jax  # The import takes seconds, while `announced` listens already.
    from jax.experimental import multihost_utils

    received: list[int] = []

    def note(number: int, frame: FrameType | None) -> None:
        del frame
        if not received and not several and not _now.unsaved:
            received.append(number)
            _now.is_stopping = _now.is_compiling = True
            raise KeyboardInterrupt("stopped")
        if received and number == signal.SIGINT:
            signal.signal(signal.SIGINT, signal.SIG_DFL)  # A third Ctrl-C ends the process at once.
            _now.is_stopping = True
            raise KeyboardInterrupt
        received.append(number)
        if several:  # JAX sends SIGTERM to the other hosts.
            os.kill(os.getpid(), signal.SIGTERM)

    several = jax.process_count() > 1
    # With several hosts, JAX handles SIGTERM itself, outside of Python.
    numbers = (signal.SIGINT,) if several else SIGNALS
    if several:
        _now.unsaved, _now.is_alone = "all hosts save the same step first", False
    try:
        before = {number: signal.signal(number, note) for number in numbers}
    except ValueError:  # Only the main thread can handle signals.
        before = {}
    try:
        yield lambda: multihost_utils.reached_preemption_sync_point(next(_sync_points)) if several else bool(received)
    finally:
        _now.is_stopping |= bool(received)
        for number, handler in before.items():
            if signal.getsignal(number) is note:
                signal.signal(number, handler)
