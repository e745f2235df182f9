"""Stops all hosts after the same step on Ctrl-C or SIGTERM. A TPU VM receives SIGTERM before preemption.

Python calls its signal handlers between two bytecodes, and therefore not while C++ code compiles a step for a minute.
`report_signals` and `exit_on_signal` also start a thread that reacts to signals during such a call.
"""

import contextlib
import itertools
import os
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from types import FrameType
from typing import Any

# Counts the sync points of all runs in this process. JAX makes the hosts stop at the same sync point.
_sync_points = itertools.count(1)

# Seconds after which the thread ends the process if the main thread has not handled a signal. The thread does so only
# if the process has no unsaved work.
GRACE_SECONDS = 2.0  # in `report_signals`
REACTION_SECONDS = 0.5  # in `exit_on_signal`
SIGNALS: tuple[int, ...] = (signal.SIGINT, signal.SIGTERM)


class _State:
    """The state of the process, which determines the effect of the next signal."""

    unsaved_work = ""  # description of the work that is saved before the run stops; "" if there is no such work
    is_stopping = False  # whether a signal has raised `KeyboardInterrupt`
    interrupted_jax = False  # whether `KeyboardInterrupt` was raised within JAX, so that Python may crash at its exit
    is_single_host = True  # whether the run has a single host


_state = _State()


def set_unsaved_work(description: str) -> None:
    """Sets the work that the run finishes after a signal, before it stops.

    With several hosts, only the empty description has an effect, because the hosts agree on the last step after the
    signal.

    Args:
      description: a description for the line that a signal prints, such as "saving step 45 first". If the description
        is empty, a signal stops the run at once.
    """
    if _state.is_single_host or not description:
        _state.unsaved_work = description


@contextlib.contextmanager
def _handling(handlers: Mapping[int, Any], handle: Callable, listen: Callable[[socket.socket], None]) -> Iterator[None]:
    """Context manager: replaces the handlers of signals, and starts a thread that reads the signals.

    Args:
      handlers: {signal: the earlier handler, which the context manager restores}.
      handle: the new handler.
      listen: (socket) -> None, the function of the thread. The socket receives a byte for each signal, even while C++
        code runs, and is closed at the end.
    """
    receiver, sender = socket.socketpair()
    sender.setblocking(False)
    for number in handlers:
        signal.signal(number, handle)
    earlier_fd = signal.set_wakeup_fd(sender.fileno(), warn_on_full_buffer=False)
    thread = threading.Thread(target=listen, args=(receiver,), daemon=True)
    thread.start()
    try:
        yield
    finally:
        signal.set_wakeup_fd(earlier_fd)
        _restore(handlers, handle)
        sender.close()  # The thread handles the signals in the socket, and ends.
        thread.join(1)


def _restore(handlers: Mapping[int, Any], handle: Callable) -> None:
    """Restores the earlier handlers of the signals that `handle` still handles."""
    for number, handler in handlers.items():
        if signal.getsignal(number) is handle:
            signal.signal(number, handler)


@contextlib.contextmanager
def report_signals() -> Iterator[None]:
    """Context manager of a command: Ctrl-C and SIGTERM print a line at once, even while C++ code runs.

    The third Ctrl-C ends the process. If there is nothing to save, the first signal ends the process when the main
    thread has not handled the signal after `GRACE_SECONDS`.
    """
    # A shell may ignore SIGINT in background processes; ignored signals stay ignored.
    handlers = {number: handler for number in SIGNALS if callable(handler := signal.getsignal(number))}

    def handle(number: int, frame: FrameType | None) -> None:
        _state.is_stopping = True
        handlers[number](number, frame)  # Raises `KeyboardInterrupt`.

    with _handling(handlers, handle, _listen):
        try:
            yield
        except KeyboardInterrupt:
            if _state.interrupted_jax:
                _exit()
            raise


@contextlib.contextmanager
def exit_on_signal() -> Iterator[None]:
    """Context manager of a command that has nothing to save: Ctrl-C and SIGTERM print a line and end the process.

    The signal raises `KeyboardInterrupt` first, so that the command deletes unfinished files. If Python cannot call its
    handlers, for example while C++ code compiles, the process ends after `REACTION_SECONDS`. The third signal ends the
    process at once.
    """
    ignored = signal.SIG_IGN, None  # `getsignal` returns None for a handler that was not set from Python
    handlers = {number: handler for number in SIGNALS if (handler := signal.getsignal(number)) not in ignored}
    lines: dict[int, str] = {signal.SIGINT: "interrupted", signal.SIGTERM: "terminated"}
    was_handled = threading.Event()

    def handle(number: int, frame: FrameType | None) -> None:
        del frame
        was_handled.set()
        raise KeyboardInterrupt(lines[number])

    def end_unless_handled(receiver: socket.socket) -> None:
        count = 0
        while received := receiver.recv(1):
            if received[0] in handlers:
                count += 1
                if not was_handled.wait(REACTION_SECONDS) or count > 2:
                    _exit(lines[received[0]])

    with _handling(handlers, handle, end_unless_handled):
        try:
            yield
        except KeyboardInterrupt as error:  # If JAX was interrupted, Python may crash at its exit.
            with contextlib.suppress(OSError):
                sys.stdout.flush()
            _exit(str(error) or lines[signal.SIGINT])


def _listen(receiver: socket.socket) -> None:
    """Prints a line for the first signal, and ends the process as `report_signals` describes."""
    first_time, interrupts = 0.0, 0  # time of the first signal, 0.0 before it, and the number of SIGINTs
    while True:
        try:
            received = receiver.recv(1)
        except TimeoutError:
            has_work = _state.is_stopping or _state.unsaved_work or not _state.is_single_host
            if time.monotonic() - first_time > GRACE_SECONDS and not has_work:
                _exit()
            continue
        if not received:  # The sender is closed.
            return
        interrupts += received[0] == signal.SIGINT
        if interrupts == 3:
            _exit()
        if not first_time and received[0] in SIGNALS:
            first_time = time.monotonic()
            receiver.settimeout(0.1)
            _print(f"stopping: {_state.unsaved_work or 'the same command continues from here'}")


def _exit(line: str = "stopped") -> None:
    """Prints a line and ends the process at once, with the exit code of an interrupted command."""
    _print(line)
    os._exit(130)


def _print(line: str) -> None:
    with contextlib.suppress(OSError):
        print(line, file=sys.stderr, flush=True)


@contextlib.contextmanager
def stop_on_signal() -> Iterator[Callable[[], bool]]:
    """Context manager: a signal stops the run after a step, and a second Ctrl-C stops it at once.

    With several hosts, a signal to one host stops all hosts after the same step. A single host without unsaved work
    stops at once.

    Yields:
      A function that returns whether to stop. All hosts call it once after each step.
    """
    import jax  # imported here, because the import takes seconds and `report_signals` must start before
    from jax.experimental import multihost_utils

    received: list[int] = []

    def handle(number: int, frame: FrameType | None) -> None:
        del frame
        if not received and not has_several_hosts and not _state.unsaved_work:
            received.append(number)
            _state.is_stopping = _state.interrupted_jax = True
            raise KeyboardInterrupt("stopped")
        if received and number == signal.SIGINT:
            signal.signal(signal.SIGINT, signal.SIG_DFL)  # A third Ctrl-C ends the process at once.
            _state.is_stopping = True
            raise KeyboardInterrupt
        received.append(number)
        if has_several_hosts:  # On SIGTERM, JAX stops all hosts at the same sync point.
            os.kill(os.getpid(), signal.SIGTERM)

    has_several_hosts = jax.process_count() > 1
    # With several hosts, JAX handles SIGTERM itself, outside of Python.
    handled = (signal.SIGINT,) if has_several_hosts else SIGNALS
    if has_several_hosts:
        _state.unsaved_work, _state.is_single_host = "all hosts save the same step first", False
    try:
        earlier_handlers = {number: signal.signal(number, handle) for number in handled}
    except ValueError:  # Only the main thread can handle signals.
        earlier_handlers = {}

    def should_stop() -> bool:
        return (
            multihost_utils.reached_preemption_sync_point(next(_sync_points)) if has_several_hosts else bool(received)
        )

    try:
        yield should_stop
    finally:
        _state.is_stopping |= bool(received)
        _restore(earlier_handlers, handle)
