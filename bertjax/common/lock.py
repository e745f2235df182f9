"""Keeps a second command away from a folder that one is writing to.

On a file system the kernel holds the lock, and frees it when the process ends, however it ends. An object store has no
locks: there a file names the owner, who writes it again every `BEAT` seconds. Who finds the file waits to see whether
it changes, and takes over after `SILENCE` seconds; no clock needs to agree with another.
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

from etils import epath

from bertjax.common.errors import UserError
from bertjax.common.files import read_json, write_whole

try:
    import fcntl
except ModuleNotFoundError:  # on Windows
    fcntl = None

FILE = ".lock"
BEAT, SILENCE = 20, 50  # seconds
SETTLE = 2  # seconds, until two that write at once both see who was the last


@contextlib.contextmanager
def held(folder: epath.PathLike, flag: str) -> Iterator[None]:
    """Holds a folder, which is created if it is missing, while the block runs.

    Raises `UserError` with the flag that named the folder, and with host, process and start of the one that holds it.
    """
    path = epath.Path(folder) / FILE
    path.parent.mkdir(parents=True, exist_ok=True)
    owner = dict(host=socket.gethostname(), process=os.getpid(), start=f"{datetime.datetime.now():%Y-%m-%d %H:%M:%S}")
    if fcntl is None:
        hold = _not_held
    else:
        hold = _held_in_store if "://" in str(path) else _held_by_kernel
    with hold(path, owner) as other:
        if other is not None:
            described = "host {host}, process {process}, since {start}".format(**other) if other else "another process"
            raise UserError(f"{flag}={folder}: in use by {described}; wait for it, or name another folder")
        yield


def is_held(folder: epath.PathLike) -> bool:
    """Returns whether a process holds a folder; in an object store, whether its file is not older than `SILENCE`."""
    path = epath.Path(folder) / FILE
    if not path.exists():
        return False
    if "://" in str(path):
        return time.time() - _read(path).get("time", 0.0) < SILENCE
    if fcntl is None:
        return False
    try:
        with open(path) as file:
            fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    except OSError:  # it has been deleted since, or there are no locks
        pass
    return False


@contextlib.contextmanager
def _not_held(path: epath.Path, owner: dict) -> Iterator[None]:
    print(f"{path.parent}: cannot be locked here; do not start a second command in this folder", flush=True)
    yield None


@contextlib.contextmanager
def _held_by_kernel(path: epath.Path, owner: dict) -> Iterator[dict | None]:
    """Yields None if the lock is ours, and otherwise the owner, as far as it is known."""
    try:
        file = _locked(path)
    except BlockingIOError:
        yield _read(path)
        return
    except OSError as error:  # nothing can be written here, or the file system has no locks
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
            path.unlink(missing_ok=True)  # while it is ours


def _locked(path: epath.Path):
    """Opens and locks the file. Raises `OSError` if that fails, `BlockingIOError` if another process has locked it."""
    tries = 3  # `is_held` locks it for a moment
    while True:
        file = open(path, "a+")
        try:
            while True:
                try:
                    fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                    break
                except BlockingIOError:
                    if not (tries := tries - 1):
                        raise
                    time.sleep(0.05)
            with contextlib.suppress(FileNotFoundError):
                if os.path.samestat(os.fstat(file.fileno()), os.stat(path)):
                    return file
        except BaseException:
            file.close()
            raise
        file.close()  # its owner has deleted it since we opened it


@contextlib.contextmanager
def _held_in_store(path: epath.Path, owner: dict) -> Iterator[dict | None]:
    """As `_held_by_kernel`."""
    mine = {**owner, "key": secrets.token_hex(8)}

    def write():
        write_whole(path, json.dumps({**mine, "time": time.time()}))

    def is_ours() -> bool:
        return _read(path).get("key", mine["key"]) == mine["key"]

    found, deadline = _read(path), time.monotonic() + SILENCE
    while found and time.monotonic() < deadline:
        time.sleep(SETTLE)
        if (now := _read(path)) and now != found:
            yield now
            return
        found = now
    write()
    time.sleep(SETTLE)
    if not is_ours():
        yield _read(path)
        return
    ended = threading.Event()

    def beat():
        while not ended.wait(BEAT):
            if is_ours():
                with contextlib.suppress(Exception):  # tries again
                    write()
            else:  # what we write now could destroy what it writes
                print(f"error: {path.parent}: another process has taken it over", file=sys.stderr, flush=True)
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


def _read(path: epath.Path) -> dict:
    """The owner; {} if the file is missing, or not written yet."""
    try:
        return read_json(path)
    except (OSError, UserError):
        return {}
