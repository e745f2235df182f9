"""Ends this host if another host of the run has ended. JAX would wait for minutes, and would not name the host.

Each host keeps a connection to host 0, and host 0 forwards all messages. A host sends "bye" at its regular end, and
"failed" after an error. If a process dies, its operating system closes the connection at once, before JAX aborts the
other hosts; if a machine dies, the connection times out (`KEEPALIVE`).
"""

import atexit
import contextlib
import os
import socket
import sys
import threading
from collections.abc import Iterator, Mapping

from bertjax.common.errors import UserError

GRACE = 3  # seconds in which all hosts may fail with the same error and print their messages
KEEPALIVE = dict(TCP_KEEPIDLE=10, TCP_KEEPINTVL=5, TCP_KEEPCNT=3)  # 25 seconds without an answer

_connections: dict[int, socket.socket] = {}
_lost = threading.Event()
_line = ""  # the message of the end


def watch_connections(connections: Mapping[int, socket.socket]) -> None:
    """Watches the other ends of connections: host 0 is connected to all hosts, and other hosts only to host 0."""
    _connections.update(connections)
    for index, connection in connections.items():
        connection.settimeout(None)
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        for option, seconds in KEEPALIVE.items():
            if hasattr(socket, option):  # not on every system
                connection.setsockopt(socket.IPPROTO_TCP, getattr(socket, option), seconds)
        threading.Thread(target=_listen, args=(index, connection), daemon=True).start()


@contextlib.contextmanager
def ending_together() -> Iterator[None]:
    """Context manager: if the block fails on this host, the other hosts end as well, and print the number of this host.

    Other hosts also end this host if the block fails there.
    """
    try:
        yield
    except Exception as error:
        if not _connections:
            raise
        if not isinstance(error, UserError) and _lost.wait(2):  # a collective may fail just before
            _end()
        _tell("failed")
        atexit.register(_end, print_line=False)  # before JAX waits for the other hosts
        raise
    except KeyboardInterrupt:  # an interrupt stops all hosts after the same step
        _tell("bye")
        raise
    _tell("bye")


def _listen(index: int, connection: socket.socket) -> None:
    with contextlib.suppress(OSError), connection.makefile() as lines:
        for line in lines:
            event, _, host = line.strip().partition(" ")
            if event == "bye":
                return
            _lose(int(host or index), event)
    _lose(index, "died")


def _lose(index: int, event: str) -> None:
    global _line
    if _lost.is_set():
        return
    _line = f"error: host {index} has {event}; start the same command again on all hosts"
    _lost.set()
    _tell(f"{event} {index}")
    if event == "died":
        _end()
    timer = threading.Timer(GRACE, _end)
    timer.daemon = True
    timer.start()


def _tell(line: str) -> None:
    for connection in _connections.values():
        with contextlib.suppress(OSError):
            connection.sendall(f"{line}\n".encode())


def _end(print_line: bool = True) -> None:
    if print_line:
        print(_line, file=sys.stderr, flush=True)
    sys.stdout.flush()
    os._exit(1)  # a regular exit of JAX would wait for the other hosts
