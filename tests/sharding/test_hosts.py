"""Who takes part, where nobody else does. Several processes: tests/test_several_hosts.py."""

import pytest

from bertjax.config import UserError
from bertjax.sharding import hosts


@pytest.fixture
def alone(monkeypatch):
    for name in (*hosts.VARIABLES, "TPU_WORKER_HOSTNAMES", "MEGASCALE_COORDINATOR_ADDRESS"):
        monkeypatch.delenv(name, raising=False)


def test_a_machine_by_itself_waits_for_nobody(alone, monkeypatch):
    assert hosts.join(timeout=1) == 0
    monkeypatch.setenv("TPU_WORKER_HOSTNAMES", "localhost")  # Colab's TPU
    assert hosts.join(timeout=1) == 0


@pytest.mark.parametrize(
    "values, message",
    [
        (("", "2", "0"), "JAX_COORDINATOR_ADDRESS: not set; set all three"),
        (("host:1234", "2", ""), "JAX_PROCESS_ID: not set; set all three"),
        (("host", "2", "0"), "must be host:port, a count, and an index below it"),
        (("host:1234", "2", "2"), "must be host:port, a count, and an index below it"),
        (("host:1234", "", ""), "JAX_NUM_PROCESSES and JAX_PROCESS_ID: not set; set all three"),
        (("host:port", "2", "0"), "must be host:port, a count, and an index below it"),
        (("host:1234", "two", "0"), "must be host:port, a count, and an index below it"),
    ],
)
def test_half_a_description_of_the_hosts_is_refused(alone, monkeypatch, values, message):
    for name, value in zip(hosts.VARIABLES, values):
        monkeypatch.setenv(name, value)
    with pytest.raises(UserError, match=message):
        hosts.join(timeout=1)


def test_another_jax_that_does_not_say_who_takes_part(alone, monkeypatch):
    """What is asked has no public name; guessing that nobody else does would train a pod's hosts one by one."""
    monkeypatch.delattr("jax._src.clusters.ClusterEnv.auto_detect_unset_distributed_params")
    with pytest.raises(UserError, match=r"cannot detect the hosts of this run; set JAX_COORDINATOR_ADDRESS"):
        hosts.join(timeout=1)
