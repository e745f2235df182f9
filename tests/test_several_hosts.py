"""Several processes on this machine: equal batches and losses, one checkpoint; resume; missing hosts."""

import re
import shutil
import signal
import socket
import sys
import time
from subprocess import PIPE, Popen

import jax
import numpy as np
import pytest

from bertjax.config import experiments
from bertjax.config.defaults import named_stages, stage
from bertjax.launch.start import launch
from bertjax.training.checkpoints import checkpoint
from bertjax.training.checkpoints.workdir import RunInfo, write_info
from bertjax.training.trackers.jsonl import read_metrics
from tests.conftest import tiny_config
from tests.processes import QUICK_TO_COMPILE, Process, environment_with
from tests.processes import start as start_process


@pytest.fixture(scope="module")
def config_file(records_folder, tmp_path_factory):
    """An experiment file of the first stage of `tiny_config`, with dropout, packed."""
    config = tiny_config(records=records_folder)
    config.stages = named_stages(short=stage(10, 32, 5))
    config.log_every_steps, config.packing, config.eval.every_steps = 1, True, 10
    folder = tmp_path_factory.mktemp("experiment")
    write_info(folder, RunInfo(config), None)
    program = "from bertjax.training.checkpoints.workdir import require_info\n\n"
    program += f"def get_config():\n    return require_info({str(folder)!r}).config\n"
    (folder / "tiny.py").write_text(program)
    return folder / "tiny.py"


def start(count: int, *arguments: str, numbers=None) -> list[Process]:
    """Starts `count` processes of `bertjax.main` that share eight devices, or only the processes `numbers`."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1] // 2 * 2  # the next port is needed as well
    patience = "--xla_cpu_collective_call_terminate_timeout_seconds=300"  # a busy machine is no reason to abort
    cpu = f"{QUICK_TO_COMPILE} --xla_force_host_platform_device_count={8 // count} {patience}"
    environment = dict(XLA_FLAGS=cpu, JAX_COORDINATOR_ADDRESS=f"127.0.0.1:{port}", JAX_NUM_PROCESSES=str(count))
    return [
        start_process("main", *arguments, cwd=".", **environment, JAX_PROCESS_ID=str(number))
        for number in (range(count) if numbers is None else numbers)
    ]


def wait_until(condition, processes: list[Process], what: str) -> None:
    """Waits until the condition is true. Fails after five minutes with what the processes have printed."""
    deadline = time.monotonic() + 300
    while not condition():
        if time.monotonic() > deadline:
            described = "\n".join(f"host {number}: {process.describe()}" for number, process in enumerate(processes))
            for process in processes:
                process.send_signal(signal.SIGKILL)
            pytest.fail(f"{what}: not within 300 seconds\n{described}", pytrace=False)
        time.sleep(0.02)


def finish(processes: list[Process]) -> list[tuple[int, str, str]]:
    """Returns exit status, stdout and stderr of each process."""
    wait_until(lambda: all(process.poll() is not None for process in processes), processes, "the end of all hosts")
    return [(process.poll(), process.stdout, process.stderr) for process in processes]


def wait_for_line(start: str, processes: list[Process]) -> None:
    """Waits until the first host has printed a line with this start, or a host has ended."""

    def is_there():
        lines = processes[0].stdout.splitlines()
        return any(line.startswith(start) for line in lines) or any(process.poll() is not None for process in processes)

    wait_until(is_there, processes, start)


def is_silent(stdout: str) -> bool:
    """Returns whether only the library of collectives printed; its threads interleave their lines.

    Any host may report a long step: this happens on a busy machine.
    """
    stdout = re.sub(r"Step \d+ was slow on host .*", "", stdout)
    gloo = r"\[Gloo\] Rank|is connected to|peer ranks\.|Expected number of connected peer ranks is :|\d|\s"
    return re.sub(gloo, "", stdout) == ""


def params_of(workdir) -> dict[str, np.ndarray]:
    params = checkpoint.read_params(workdir, checkpoint.steps(workdir)[-1])
    return {jax.tree_util.keystr(path): leaf for path, leaf in jax.tree_util.tree_leaves_with_path(params)}


def assert_same_run(workdir, alone):
    actual, expected = read_metrics(workdir), read_metrics(alone)
    assert [line["step"] for line in actual] == [line["step"] for line in expected]
    for a, b in zip(actual, expected):
        assert a.keys() == b.keys()
        for name in a:
            if "per_second" not in name and not name.startswith(("wall", "goodput")):
                np.testing.assert_allclose(a[name], b[name], rtol=1e-4, atol=1e-6, err_msg=f"{name} of {a['step']}")
    actual, expected = params_of(workdir), params_of(alone)
    assert actual.keys() == expected.keys()
    for name in actual:
        np.testing.assert_allclose(actual[name], expected[name], atol=2e-4, err_msg=name)


@pytest.mark.slow
def test_two_hosts_resume_a_run_of_one_host_stop_together_and_give_equal_params(config_file, tmp_path):
    """The two hosts have another mesh. SIGTERM reaches only the second host, like the preemption of one VM."""
    alone = tmp_path / "alone"
    launch(experiments.load(str(config_file)), alone)
    workdir = shutil.copytree(alone, tmp_path / "run")
    for step in checkpoint.steps(alone):  # equals a run that was stopped at step 5
        if step > 5:
            shutil.rmtree(workdir / "checkpoints" / str(step))
    (workdir / "report.txt").unlink()
    mesh = (f"--config.mesh.{name}=2" for name in ("data", "fsdp", "tensor"))
    arguments = (f"--config={config_file}", f"--workdir={workdir}", *mesh)
    processes = start(2, *arguments)
    wait_for_line("training in", processes)  # all hosts have started, and the signal arrives before the last steps
    processes[1].send_signal(signal.SIGTERM)
    ended = finish(processes)
    last = checkpoint.steps(workdir)[-1]
    assert 5 < last < 10 and [code for code, _, _ in ended] == [130] * 2, ended
    assert all(f"stopped at step {last}" in stderr for _, _, stderr in ended), ended

    first, second = finish(start(2, *arguments))
    assert first[0] == second[0] == 0, (first[2] + second[2])[-3000:]
    assert "step 10/10" in first[1] and "held-out masked words" in first[1] and "[MASK] 1:" in first[1]
    assert is_silent(second[1]), second[1]  # one host prints
    assert checkpoint.steps(workdir)[-1] == 10
    assert_same_run(workdir, alone)


@pytest.mark.slow
def test_a_dead_host_is_named_and_stops_the_run(config_file, tmp_path):
    endless = ("--config.stages.short.steps=100000", "--config.eval.every_steps=100000", "--config.packing=False")
    processes = start(2, f"--config={config_file}", f"--workdir={tmp_path / 'run'}", *endless)
    wait_for_line("step 3/", processes)
    processes[1].send_signal(signal.SIGKILL)
    began = time.monotonic()
    (code, _, stderr), _ = finish(processes)
    assert code == 1 and time.monotonic() - began < 60
    assert stderr.splitlines()[-1] == "error: host 1 has died; start the same command again on all hosts", stderr


@pytest.mark.slow
def test_all_hosts_wait_for_the_first_host_and_get_its_value():
    """The wait is longer than the timeout of a collective."""
    program = "\n".join([
        "import jax, time; from bertjax.distributed import hosts; index, hosts.POLL_SECONDS = hosts.join(60), 1",
        "with hosts.first_before_others('slow'): time.sleep(3 * (index == 0)); print(index, time.time(), flush=True)",
        "time.sleep(3 * (index == 0)); print(hosts.as_on_first(0.1 + index)); hosts.leave()",
    ])  # fmt: skip
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        address = f"127.0.0.1:{probe.getsockname()[1] // 2 * 2}"
    flags = "--xla_cpu_collective_call_terminate_timeout_seconds=2 --xla_cpu_collective_timeout_seconds=2"
    fields = dict(JAX_COORDINATOR_ADDRESS=address, JAX_NUM_PROCESSES="2", XLA_FLAGS=flags)
    environments = [environment_with(**fields, JAX_PROCESS_ID=number) for number in "01"]
    hosts = [
        Popen([sys.executable, "-c", program], env=environment, stdout=PIPE, text=True) for environment in environments
    ]
    first, second = (host.communicate(timeout=120)[0].split()[-3:] for host in hosts)
    assert (first[0], second[0]) == ("0", "1") and first[1] < second[1] and first[2] == second[2] == "0.1"


def test_an_unreachable_host_is_named(config_file, tmp_path):
    """tests/distributed/test_hosts.py tests which of several hosts are missing."""
    arguments = (f"--config={config_file}", f"--workdir={tmp_path}", "--config.hosts_timeout=1")
    ((code, stdout, stderr),) = finish(start(2, *arguments, numbers=(1,)))
    assert (code, stdout) == (1, "") and stderr.count("\n") == 1
    assert "host 0 (127.0.0.1:" in stderr and "cannot be reached within 1 seconds" in stderr
