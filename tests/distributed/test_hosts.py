"""Detection of the hosts of a run, and of missing hosts. tests/test_several_hosts.py starts several processes."""

import concurrent.futures
import socket

import pytest

from bertjax.common.errors import UserError
from bertjax.distributed import hosts


@pytest.fixture
def alone(monkeypatch):
    for name in (*hosts.VARIABLES, "TPU_WORKER_HOSTNAMES", "MEGASCALE_COORDINATOR_ADDRESS"):
        monkeypatch.delenv(name, raising=False)


def test_a_single_machine_waits_for_no_hosts(alone, monkeypatch):
    assert hosts.join(timeout=1) == 0
    monkeypatch.setenv("TPU_WORKER_HOSTNAMES", "localhost")  # the TPU of Colab
    assert hosts.join(timeout=1) == 0


INVALID = "must be host:port, a count, and an index below it"


@pytest.mark.parametrize("values, message", [
    (("", "2", "0"), "JAX_COORDINATOR_ADDRESS: not set; set all three"),
    (("host:1234", "2", ""), "JAX_PROCESS_ID: not set; set all three"),
    (("host:1234", "", ""), "JAX_NUM_PROCESSES and JAX_PROCESS_ID: not set; set all three"),
    *(
        ((address, count, "2"), INVALID)
        for address, count in (("host", "3"), ("host:port", "3"), ("host:1234", "2"), ("host:1234", "two"))
    ),
])  # fmt: skip
def test_an_incomplete_description_of_hosts_is_refused(alone, monkeypatch, values, message):
    for name, value in zip(hosts.VARIABLES, values):
        monkeypatch.setenv(name, value)
    with pytest.raises(UserError, match=message):
        hosts.join(timeout=1)


def test_missing_hosts_are_named_on_all_hosts():
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        address = f"127.0.0.1:{probe.getsockname()[1] // 2 * 2}"
    message = "hosts 1, 3 of 4 did not report within 1 seconds; start the same command on every host"
    with concurrent.futures.ThreadPoolExecutor() as pool:
        for call in [pool.submit(hosts._roll_call, address, index, 4, 1) for index in (0, 2)]:
            with pytest.raises(UserError, match=f"^{message}$"):
                call.result()


def test_a_jax_version_without_host_detection_is_an_error(alone, monkeypatch):
    """The function has no public name; assuming a single host would train the hosts of a pod one by one."""
    monkeypatch.delattr("jax._src.clusters.ClusterEnv.auto_detect_unset_distributed_params")
    with pytest.raises(UserError, match=r"cannot detect the hosts of this run; set JAX_COORDINATOR_ADDRESS"):
        hosts.join(timeout=1)


@pytest.mark.parametrize("tasks, local_gpus", [("1(x2)", None), ("8(x2)", [3])])
def test_a_single_slurm_task_of_a_node_uses_all_gpus_of_the_node(alone, monkeypatch, tasks, local_gpus):
    """JAX gives each task the GPU of its number."""
    slurm = dict(JOB_ID=7, NTASKS=2, PROCID=1, LOCALID=3, STEP_NODELIST="node[1-2]", STEP_TASKS_PER_NODE=tasks)
    for name, value in slurm.items():
        monkeypatch.setenv(f"SLURM_{name}", str(value))
    coordinator, index, count, local_devices = hosts._find_processes(timeout=1)
    assert coordinator.startswith("node1:") and (index, count, local_devices) == (1, 2, local_gpus)
