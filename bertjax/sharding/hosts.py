"""Several hosts that train together: who takes part, and waiting for all of them."""

import contextlib
import os
import secrets
import socket
import time
from collections.abc import Iterator

import jax
from etils import epath
from jax.experimental import multihost_utils

from bertjax.config import UserError
from bertjax.files import write_whole

VARIABLES = ("JAX_COORDINATOR_ADDRESS", "JAX_NUM_PROCESSES", "JAX_PROCESS_ID")


def join(timeout: float) -> int:
    """Connects this process with those on the other hosts, if there are any, and returns its number.

    Must come before JAX touches a device.

    Hosts are found by themselves on TPU pods, Slurm and the like; elsewhere the environment says where they are:
    `VARIABLES`. Raises `UserError` where a host is missing after `timeout` seconds. JAX alone would wait as well, but
    abort without a word about who is missing.
    """
    if jax.distributed.is_initialized():
        return jax.process_index()
    coordinator, number, count, local_devices = _who_takes_part(timeout)
    if count == 1:
        return 0
    _roll_call(coordinator, number, count, timeout)
    jax.distributed.initialize(
        coordinator, count, number, local_devices, initialization_timeout=60, shutdown_timeout_seconds=30
    )
    return number


def leave() -> None:
    """Waits until all are done: JAX aborts a process whose companions have ended half a minute before it."""
    if jax.process_count() > 1:
        multihost_utils.sync_global_devices("leaving")


def check_shared(workdir: epath.PathLike) -> None:
    """Raises `UserError` where the hosts of a run do not see the same folder."""
    if jax.process_count() == 1:
        return
    mark = epath.Path(workdir) / f".shared-{multihost_utils.broadcast_one_to_all(secrets.randbits(30))}"
    if jax.process_index() == 0:
        write_whole(mark, "")
    multihost_utils.sync_global_devices("workdir marked")
    seen = multihost_utils.process_allgather(mark.exists())
    if jax.process_index() == 0:
        mark.unlink()
    if not seen.all():
        raise UserError(
            f"--workdir={workdir}: host {seen.argmin()} does not see what host 0 writes there; take a folder that all "
            f"hosts share, such as gs://BUCKET/RUN"
        )


@contextlib.contextmanager
def first_before_others(name: str) -> Iterator[None]:
    """The first host goes through the block before the others, which find what it left; also where it fails."""
    if jax.process_index() > 0:
        multihost_utils.sync_global_devices(name)
    try:
        yield
    finally:
        if jax.process_index() == 0 and jax.process_count() > 1:
            multihost_utils.sync_global_devices(name)


def _who_takes_part(timeout: float) -> tuple[str, int, int, list[int] | None]:
    """The first host's address and port, the number of this process, how many there are, and its GPUs (None: all)."""
    given = [os.environ.get(name) for name in VARIABLES]
    if all(given):
        coordinator, count, number = given
        port = coordinator.rpartition(":")[2] if ":" in coordinator else ""
        is_port = port.isdigit() and 0 < int(port) < 2**16
        if not (count.isdigit() and number.isdigit() and int(number) < int(count) and is_port):
            raise UserError(f"{', '.join(VARIABLES)} = {given}: must be host:port, a number, and one below it")
        return coordinator, int(number), int(count), None
    if any(given[1:]):
        raise UserError(f"{' and '.join(n for n, value in zip(VARIABLES, given) if not value)}: not set; set all three")

    # The coordinator alone is JAX's own way to say where it is on a cluster that JAX knows.
    workers = os.environ.get("TPU_WORKER_HOSTNAMES")
    if workers and "," not in workers and "MEGASCALE_COORDINATOR_ADDRESS" not in os.environ:
        return "", 0, 1, None  # one TPU VM (Colab's, say), where JAX would look for others

    # What jax.distributed.initialize() does first; it has no public name.
    try:
        from jax._src.clusters import ClusterEnv

        coordinator, count, number, local_devices = ClusterEnv.auto_detect_unset_distributed_params(
            given[0], None, None, None, None, int(timeout)
        )
    except RuntimeError as error:  # of Kubernetes, say
        reason = str(error).splitlines()[0]
        raise UserError(f"the hosts of this cluster cannot be found ({reason}); set {', '.join(VARIABLES)}") from None
    except (ImportError, AttributeError, TypeError):
        alone = "127.0.0.1:8476, 1 and 0 for this machine alone"
        raise UserError(
            f"JAX {jax.__version__} does not say which hosts take part; set {', '.join(VARIABLES)} ({alone})"
        ) from None
    if count is None or number is None:
        if given[0]:
            raise UserError(f"{' and '.join(VARIABLES[1:])}: not set; set all three")
        return "", 0, 1, None
    # JAX takes a task of Slurm's to be one GPU's. The only task of a node has all the GPUs there.
    if os.environ.get("SLURM_STEP_TASKS_PER_NODE", "").partition("(")[0] == "1":
        local_devices = None
    return coordinator, number, count, local_devices


def _roll_call(coordinator: str, number: int, count: int, timeout: float) -> None:
    """Returns on every host when all have reported to the first, on the port next to JAX's."""
    host, port = coordinator.rsplit(":", 1)
    port = int(port) + 1 if int(port) < 65_535 else int(port) - 1
    deadline = time.monotonic() + timeout
    if number == 0:
        _call(socket.AF_INET6 if host.startswith("[") else socket.AF_INET, port, count, timeout, deadline)
    else:
        _report(host.strip("[]"), port, number, timeout, deadline)


def _call(family: socket.AddressFamily, port: int, count: int, timeout: float, deadline: float) -> None:
    connections: dict[int, socket.socket] = {}
    try:
        server = socket.create_server(("", port), family=family, backlog=count)
    except OSError as error:
        raise UserError(f"port {port} of the first host cannot be used: {error.strerror}; is a run going on?") from None
    try:
        with server:
            while len(connections) < count - 1 and (left := deadline - time.monotonic()) > 0:
                server.settimeout(left)
                try:
                    connection, _ = server.accept()
                    connection.settimeout(5)
                    reported = connection.makefile().readline().strip()
                except (OSError, UnicodeDecodeError):  # nobody, or somebody else
                    continue
                if reported.isdigit() and 0 < int(reported) < count:
                    connections[int(reported)] = connection
                if len(connections) == count - 1:  # some may have been stopped while they waited
                    connections = {i: connection for i, connection in connections.items() if not _is_closed(connection)}
        missing = [number for number in range(1, count) if number not in connections]
        message = f"{_these(missing)} of {count} did not report within {timeout:.0f} seconds" if missing else "all here"
        for connection in connections.values():
            connection.sendall(f"{message}\n".encode())
    finally:
        for connection in connections.values():
            connection.close()
    if missing:
        raise UserError(f"{message}; start the same command on every host")


def _is_closed(connection: socket.socket) -> bool:
    connection.settimeout(0)
    try:
        return not connection.recv(1, socket.MSG_PEEK)
    except BlockingIOError:  # open, and silent
        return False
    except OSError:
        return True
    finally:
        connection.settimeout(5)


def _report(host: str, port: int, number: int, timeout: float, deadline: float) -> None:
    answer = ""
    while time.monotonic() < deadline and not answer:
        try:
            with socket.create_connection((host, port), timeout=5) as connection:
                connection.sendall(f"{number}\n".encode())
                connection.settimeout(timeout + 5)  # from here on the first host's clock decides
                answer = connection.makefile().readline().strip()
        except OSError:  # not there yet
            time.sleep(0.2)
    if not answer:
        raise UserError(f"host 0 ({host}:{port}) cannot be reached within {timeout:.0f} seconds; is it running?")
    if answer != "all here":
        raise UserError(f"{answer}; start the same command on every host")


def _these(numbers: list[int]) -> str:
    """ "hosts 1, 3 and 40 more"."""
    named = ", ".join(map(str, numbers[:16])) + (f" and {len(numbers) - 16} more" if len(numbers) > 16 else "")
    return f"host{'s' if len(numbers) > 1 else ''} {named}"
