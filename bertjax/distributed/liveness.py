"""Notices that another host of a run has ended, and ends this one: JAX would wait for it for minutes, and not name it.

Each host keeps a connection to host 0, which passes on what it hears. An orderly end says "bye", one by an error
"failed". The system of a process that dies closes its connection at once, before JAX aborts the others; of a machine
that dies, nothing answers any more.
"""

import atexit
import contextlib
import os
import socket
import sys
import threading
from collections.abc import Iterator, Mapping

from bertjax.common.errors import UserError

GRACE = 3  # seconds in which all hosts may fail of the same, each with its own line
KEEPALIVE = dict(TCP_KEEPIDLE=10, TCP_KEEPINTVL=5, TCP_KEEPCNT=3)  # 25 seconds without an answer

_connections: dict[int, socket.socket] = {}
_lost = threading.Event()
_line = ""  # what to print


def watch(connections: Mapping[int, socket.socket]) -> None:
    """Watches the hosts to which these are connections: all others on host 0, and on the others host 0."""
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
    """Context manager: a host on which the block fails ends the others, which name it, and is named by them."""
    try:
        yield
    except Exception as error:
        if not _connections:
            raise
        if not isinstance(error, UserError) and _lost.wait(2):  # a collective may fail just before
            _end()
        _tell("failed")
        atexit.register(_end, print_line=False)  # before JAX would wait for the others
        raise
    except KeyboardInterrupt:  # an interrupt stops all hosts after the same step
        _tell("bye")
        raise
    _tell("bye")


def _listen(index: int, connection: socket.socket) -> None:
    with contextlib.suppress(OSError), connection.makefile() as lines:
        for line in lines:
            what, _, about = line.strip().partition(" ")
            if what == "bye":
                return
            _lose(int(about or index), what)
    _lose(index, "died")


def _lose(index: int, what: str) -> None:
    global _line
    if _lost.is_set():
        return
    _line = f"error: host {index} has {what}; start the same command again on all hosts"
    _lost.set()
    _tell(f"{what} {index}")
    if what == "died":
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
    os._exit(1)  # at its end, JAX would wait for the others
