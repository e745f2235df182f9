"""Prevents a second command from writing to a folder that is in use.

On a file system the kernel holds the lock, and frees it when the process ends for any reason. An object store has no
locks: there a file names the owner, and the owner writes the file again every `BEAT` seconds. A process that finds the
file waits for a change of the file, and takes the folder over after `SILENCE` seconds. The clocks of hosts may differ.

The package filelock was tried instead of flock: it stores no owner for the message, cannot test a folder without write
permission (`is_held`), and where a file system has no flock, its marker stays after the process is killed.
"""

import contextlib
import datetime
import json
import os
import secrets
import socket
import sys
import threading
import time
from collections.abc import Iterator
from typing import Any, TextIO

import tenacity
from etils import epath

from bertjax.common.errors import UserError
from bertjax.common.files import read_json, write_whole

try:
    import fcntl
except ModuleNotFoundError:  # on Windows
    fcntl = None  # type: ignore[assignment]

FILE = ".lock"
BEAT, SILENCE = 20, 50  # seconds
SETTLE = 2  # seconds after which all processes that write at the same time read the last owner


@contextlib.contextmanager
def held(folder: epath.PathLike, flag: str) -> Iterator[None]:
    """Context manager: holds a folder while the block runs, and creates the folder if it is missing.

    Raises:
      UserError: if another process holds the folder. The message has `flag`, which names the folder, and the host, the
        number and the start of the process.
    """
    path = epath.Path(folder) / FILE
    path.parent.mkdir(parents=True, exist_ok=True)
    owner = dict(host=socket.gethostname(), process=os.getpid(), start=f"{datetime.datetime.now():%Y-%m-%d %H:%M:%S}")
    hold = _held_in_store if "://" in str(path) else _held_by_kernel
    with hold(path, owner) as other:
        if other is not None:
            described = "host {host}, process {process}, since {start}".format(**other) if other else "another process"
            raise UserError(f"{flag}={folder}: in use by {described}; wait for its end, or choose another folder")
        yield


def is_held(folder: epath.PathLike) -> bool:
    """Returns whether a process holds a folder; in an object store, whether its file is newer than `SILENCE`."""
    path = epath.Path(folder) / FILE
    if "://" in str(path):
        return time.time() - _read(path).get("time", 0.0) < SILENCE
    if fcntl is None:
        return False
    try:
        with open(path) as file:
            fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    except OSError:  # the file is missing, or the file system has no locks
        pass
    return False


@contextlib.contextmanager
def _held_by_kernel(path: epath.Path, owner: dict[str, Any]) -> Iterator[dict[str, Any] | None]:
    """Context manager: yields None if this process holds the lock, and otherwise the owner, or {} if it is unknown."""
    try:
        file = _locked(path)
    except BlockingIOError:
        yield _read(path)
        return
    except OSError as error:  # the folder is read-only, or the file system has no locks
        print(f"{path}: cannot be locked ({error.strerror}); do not start a second command in this folder", flush=True)
        yield None
        return
    with file:
        file.truncate(0)
        file.write(json.dumps(owner))
        file.flush()
        try:
            yield None
        finally:
            path.unlink(missing_ok=True)  # before the lock is freed


@tenacity.retry(  # `is_held` holds a lock for a moment
    retry=tenacity.retry_if_exception_type(BlockingIOError),
    stop=tenacity.stop_after_attempt(4),
    wait=tenacity.wait_fixed(0.05),
    reraise=True,
)
def _locked(path: epath.Path) -> TextIO:
    """Opens and locks a file. Raises `OSError` if this fails, `BlockingIOError` if another process holds the lock."""
    if fcntl is None:
        raise OSError(0, "no flock")
    with contextlib.ExitStack() as stack:
        file = stack.enter_context(open(path, "a+"))
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        with contextlib.suppress(FileNotFoundError):
            if os.path.samestat(os.fstat(file.fileno()), os.stat(path)):
                stack.pop_all()
                return file
    raise BlockingIOError  # the owner has deleted the file after this process opened it


@contextlib.contextmanager
def _held_in_store(path: epath.Path, owner: dict[str, Any]) -> Iterator[dict[str, Any] | None]:
    """As `_held_by_kernel`, in an object store."""
    owner = {**owner, "key": secrets.token_hex(8)}

    def write() -> None:
        write_whole(path, json.dumps({**owner, "time": time.time()}))

    def is_ours() -> bool:
        return bool(_read(path).get("key", owner["key"]) == owner["key"])

    content, deadline = _read(path), time.monotonic() + SILENCE
    while content and time.monotonic() < deadline:
        time.sleep(SETTLE)
        if (current := _read(path)) and current != content:
            yield current
            return
        content = current
    write()
    time.sleep(SETTLE)
    if not is_ours():
        yield _read(path)
        return
    ended = threading.Event()

    def beat() -> None:
        while not ended.wait(BEAT):
            if is_ours():
                with contextlib.suppress(Exception):  # the next beat tries again
                    write()
            else:  # files of this process could replace files of the new owner
                print(
                    f"error: {path.parent}: another process has locked the folder; this process ends",
                    file=sys.stderr,
                    flush=True,
                )
                os._exit(1)

    thread = threading.Thread(target=beat, daemon=True)
    thread.start()
    try:
        yield None
    finally:
        ended.set()
        thread.join()
        with contextlib.suppress(Exception):
            if is_ours():
                path.unlink()


def _read(path: epath.Path) -> dict[str, Any]:
    """Returns the owner; {} if the file is missing, or not written yet."""
    try:
        return read_json(path)
    except (OSError, UserError):
        return {}
