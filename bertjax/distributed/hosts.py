"""Multi-host training: finds the hosts of a run, and synchronizes them.

Hosts wait for one another without a time-out at the key-value store of JAX's coordinator. A collective of devices has a
time-out on CPUs and GPUs, and an hour of work on one host exceeds it. `liveness` ends the hosts that wait for a dead
host.
"""

import collections
import contextlib
import json
import os
import secrets
import socket
import time
from collections.abc import Iterator
from typing import Any, TypeVar

import jax
from etils import epath
from jax.experimental import multihost_utils

from bertjax.common.errors import UserError
from bertjax.common.files import write_whole
from bertjax.distributed import liveness

N = TypeVar("N", int, float)
POLL_SECONDS = 10  # a signal is handled between two polls
VARIABLES = ("JAX_COORDINATOR_ADDRESS", "JAX_NUM_PROCESSES", "JAX_PROCESS_ID")


def join(timeout: float) -> int:
    """Connects this process to the processes on the other hosts, if there are any, and returns its index.

    Call this before JAX initializes a device. JAX detects the hosts of TPU pods, Slurm and similar clusters; elsewhere
    the environment variables `VARIABLES` name the hosts.

    Raises:
      UserError: with the missing hosts, if hosts do not report within `timeout` seconds. JAX would abort without the
        names of the hosts.
    """
    if jax.distributed.is_initialized():
        return jax.process_index()
    coordinator, index, count, local_devices = _find_processes(timeout)
    if count == 1:
        return 0
    liveness.watch_connections(_roll_call(coordinator, index, count, timeout))
    jax.distributed.initialize(
        coordinator, count, index, local_devices, initialization_timeout=60, shutdown_timeout_seconds=30
    )
    return index


def leave() -> None:
    """Waits for all hosts to finish: JAX aborts a process if the others have exited half a minute before it."""
    wait_for_all("leaving")


def wait_for_all(name: str) -> None:
    """Waits until all hosts have called this function with the same `name`."""
    if jax.process_count() > 1:
        index, key = jax.process_index(), _key(name)
        _write(f"{key}/{index}", "here")
        if index == 0:
            for other in range(1, jax.process_count()):
                _read(f"{key}/{other}")
            _write(f"{key}/all", "here")
        _read(f"{key}/all")


def check_shared(workdir: epath.PathLike) -> None:
    """Raises `UserError` unless all hosts of a run share `workdir`."""
    if jax.process_count() == 1:
        return
    mark = epath.Path(workdir) / f".shared-{multihost_utils.broadcast_one_to_all(secrets.randbits(30))}"
    if jax.process_index() == 0:
        write_whole(mark, "")
    multihost_utils.sync_global_devices("workdir marked")
    exists = multihost_utils.process_allgather(mark.exists())
    if jax.process_index() == 0:
        mark.unlink()
    if not exists.all():
        raise UserError(
            f"--workdir={workdir}: host {exists.argmin()} cannot read the files of host 0; use a folder that all hosts "
            f"share, such as gs://BUCKET/RUN"
        )


@contextlib.contextmanager
def first_before_others(name: str) -> Iterator[None]:
    """Context manager: the other hosts run the block after host 0, and can use the output of host 0.

    The other hosts also run the block if the block fails on host 0.
    """
    key = _key(name)
    if jax.process_index() > 0:
        _read(key)
    try:
        yield
    finally:
        if jax.process_index() == 0 and jax.process_count() > 1:
            _write(key, "done")


def as_on_first(number: N) -> N:
    """Returns the number of host 0, and waits for host 0 without a time-out."""
    if jax.process_count() == 1:
        return number
    key = _key("number")
    if jax.process_index() == 0:
        _write(key, json.dumps(number))
    return type(number)(json.loads(_read(key)))


@contextlib.contextmanager
def on_first(context: contextlib.AbstractContextManager[Any]) -> Iterator[None]:
    """Context manager: host 0 enters `context`. If `context` raises `UserError`, all hosts raise `UserError`."""
    with contextlib.ExitStack() as stack:
        error = None
        if jax.process_index() == 0:
            try:
                stack.enter_context(context)
            except UserError as failed:
                error = failed
        if as_on_first(int(error is not None)):
            raise error or UserError("host 0 has stopped")
        yield


_calls: collections.Counter[str] = collections.Counter()


def _key(name: str) -> str:
    """Returns a key for this call. All hosts make the same calls in the same order."""
    _calls[name] += 1
    return f"bertjax/{name}/{_calls[name]}"


def _client() -> Any:
    from jax._src import distributed  # has no public name; Orbax uses it as well

    return distributed.global_state.client


def _write(key: str, value: str) -> None:
    _client().key_value_set(key, value)


def _read(key: str) -> str:
    """Waits until a host has written a key; returns the value."""
    while True:
        try:
            return str(_client().blocking_key_value_get(key, POLL_SECONDS * 1000))
        except jax.errors.JaxRuntimeError as error:
            if "DEADLINE_EXCEEDED" not in str(error):
                raise


def _find_processes(timeout: float) -> tuple[str, int, int, list[int] | None]:
    """Returns the processes of the run: the environment variables, or the processes that JAX detects.

    Returns:
      The address and the port of host 0, the index of this process, the number of processes, and the GPUs of this
      process (None: all).
    """
    values = [os.environ.get(name, "") for name in VARIABLES]
    coordinator, count, index = values
    if all(values):
        port = coordinator.rpartition(":")[2] if ":" in coordinator else ""
        is_port = port.isdigit() and 0 < int(port) < 2**16
        if not (count.isdigit() and index.isdigit() and int(index) < int(count) and is_port):
            raise UserError(f"{', '.join(VARIABLES)} = {values}: must be host:port, a count, and an index below it")
        return coordinator, int(index), int(count), None
    if count or index:
        missing = [name for name, value in zip(VARIABLES, values) if not value]
        raise UserError(f"{' and '.join(missing)}: not set; set all three")
    # A coordinator without the other variables replaces the coordinator that JAX detects.
    workers = os.environ.get("TPU_WORKER_HOSTNAMES")
    if workers and "," not in workers and "MEGASCALE_COORDINATOR_ADDRESS" not in os.environ:
        return "", 0, 1, None  # a single TPU VM, such as Colab's, where JAX would search for other hosts
    return _detect_processes(coordinator, timeout)


def _detect_processes(coordinator: str, timeout: float) -> tuple[str, int, int, list[int] | None]:
    """Returns the processes that JAX detects, see `_find_processes`: the first step of jax.distributed.initialize()."""
    try:
        from jax._src.clusters import ClusterEnv  # has no public name

        address, count, index, devices = ClusterEnv.auto_detect_unset_distributed_params(
            coordinator or None, None, None, None, None, int(timeout)
        )
    except RuntimeError as error:  # from Kubernetes, for example
        reason = str(error).splitlines()[0]
        raise UserError(f"the hosts of this cluster cannot be found ({reason}); set {', '.join(VARIABLES)}") from None
    except (ImportError, AttributeError, TypeError):
        raise UserError(
            f"JAX {jax.__version__} cannot detect the hosts of this run; set {', '.join(VARIABLES)} (for a single "
            f"machine: 127.0.0.1:8476, 1 and 0)"
        ) from None
    if count is None or index is None:
        if coordinator:
            raise UserError(f"{' and '.join(VARIABLES[1:])}: not set; set all three")
        return "", 0, 1, None
    # JAX assumes one GPU per Slurm task, but the only task of a node uses all its GPUs.
    if os.environ.get("SLURM_STEP_TASKS_PER_NODE", "").partition("(")[0] == "1":
        devices = None
    return str(address), index, count, None if devices is None else list(devices)


def _roll_call(coordinator: str, index: int, count: int, timeout: float) -> dict[int, socket.socket]:
    """Waits until all hosts have reported to host 0, on the next port after JAX's; returns the connections by host."""
    host, jax_port = coordinator.rsplit(":", 1)
    port = int(jax_port) + 1 if int(jax_port) < 65_535 else int(jax_port) - 1
    deadline = time.monotonic() + timeout
    if index == 0:
        family = socket.AF_INET6 if host.startswith("[") else socket.AF_INET
        return _collect_reports(family, port, count, timeout, deadline)
    return {0: _report(host.strip("[]"), port, index, timeout, deadline)}


def _collect_reports(
    family: socket.AddressFamily, port: int, count: int, timeout: float, deadline: float
) -> dict[int, socket.socket]:
    """Waits for the reports of the other hosts, and answers all of them. Raises `UserError` if hosts are missing."""
    connections: dict[int, socket.socket] = {}
    try:
        server = socket.create_server(("", port), family=family, backlog=count)
    except OSError as error:
        raise UserError(
            f"port {port} of host 0 cannot be used ({error.strerror}); end the other run on host 0"
        ) from None
    with contextlib.ExitStack() as on_error:
        on_error.callback(lambda: list(map(socket.socket.close, connections.values())))
        with server:
            while len(connections) < count - 1 and (remaining := deadline - time.monotonic()) > 0:
                server.settimeout(remaining)
                try:
                    connection, _ = server.accept()
                    connection.settimeout(5)
                    reported = connection.makefile().readline().strip()
                except (OSError, UnicodeDecodeError):  # a timeout, or an unrelated client
                    continue
                if reported.isdigit() and 0 < int(reported) < count:
                    connections[int(reported)] = connection
                if len(connections) == count - 1:  # hosts may have exited while they waited
                    connections = {i: connection for i, connection in connections.items() if not _is_closed(connection)}
        missing = [index for index in range(1, count) if index not in connections]
        message = f"{_hosts(missing)} of {count} did not report within {timeout:.0f} seconds" if missing else "all here"
        for connection in connections.values():
            connection.sendall(f"{message}\n".encode())
        if missing:
            raise UserError(f"{message}; start the same command on every host")
        on_error.pop_all()
    return connections


def _is_closed(connection: socket.socket) -> bool:
    connection.settimeout(0)
    try:
        return not connection.recv(1, socket.MSG_PEEK)
    except BlockingIOError:  # open, no data
        return False
    except OSError:
        return True
    finally:
        connection.settimeout(5)


def _report(host: str, port: int, index: int, timeout: float, deadline: float) -> socket.socket:
    """Reports to host 0, and waits for the answer. Raises `UserError` if host 0 or other hosts are missing."""
    answer = ""
    while time.monotonic() < deadline and not answer:
        try:
            connection = socket.create_connection((host, port), timeout=5)
            connection.sendall(f"{index}\n".encode())
            connection.settimeout(timeout + 5)  # from here on, host 0 enforces the timeout
            answer = connection.makefile().readline().strip()
        except OSError:  # host 0 is not listening yet
            time.sleep(0.2)
    if not answer:
        raise UserError(
            f"host 0 ({host}:{port}) cannot be reached within {timeout:.0f} seconds; start the same command on host 0"
        )
    if answer != "all here":
        raise UserError(f"{answer}; start the same command on every host")
    return connection


def _hosts(indices: list[int]) -> str:
    """Returns a text such as "hosts 1, 3 and 40 more"."""
    named = ", ".join(map(str, indices[:16])) + (f" and {len(indices) - 16} more" if len(indices) > 16 else "")
    return f"host{'s' if len(indices) > 1 else ''} {named}"
