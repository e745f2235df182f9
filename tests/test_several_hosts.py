"""Several real processes on this machine: same batches, same losses, one checkpoint; resume; who is missing."""

import re
import shutil
import signal
import socket
import time

import jax
import numpy as np
import pytest

from bertjax.config import named_stages, stage
from bertjax.training import checkpoint
from bertjax.training.sinks.jsonl import read_metrics
from tests.conftest import tiny_config
from tests.processes import QUICK_TO_COMPILE, Process
from tests.processes import start as start_process

EXPERIMENT = """
import json
from ml_collections import ConfigDict
from bertjax.config import pretraining_config, named_stages, stage

def get_config():
    config, content = pretraining_config().unlock(), json.loads({text!r})
    config.stages = named_stages(**{{name: stage(**s) for name, s in content.pop("stages").items()}})
    config.model = ConfigDict(content.pop("model"))
    config.update(content)
    return config.lock()
"""


@pytest.fixture(scope="module")
def experiment(records_folder, tmp_path_factory):
    """An experiment file of `tiny_config`'s first stage, with dropout, packed."""
    config = tiny_config(records=records_folder)
    config.stages = named_stages(short=stage(10, 32, 5))
    config.log_every_steps, config.packing = 1, True
    path = tmp_path_factory.mktemp("experiment") / "tiny.py"
    path.write_text(EXPERIMENT.format(text=config.to_json_best_effort()))
    return path


def start(count: int, *arguments: str, numbers=None) -> list[Process]:
    """`count` processes of `bertjax.main` that share eight devices, or some `numbers` of them."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1] // 2 * 2  # the next one is needed as well
    patience = "--xla_cpu_collective_call_terminate_timeout_seconds=300"  # a busy machine is no reason to abort
    cpu = f"{QUICK_TO_COMPILE} --xla_force_host_platform_device_count={8 // count} {patience}"
    environment = dict(XLA_FLAGS=cpu, JAX_COORDINATOR_ADDRESS=f"127.0.0.1:{port}", JAX_NUM_PROCESSES=str(count))
    return [
        start_process("main", *arguments, cwd=".", **environment, JAX_PROCESS_ID=str(number))
        for number in (range(count) if numbers is None else numbers)
    ]


def finish(processes: list[Process], timeout: float = 300) -> list[tuple[int, str, str]]:
    """Exit status, stdout and stderr of each."""
    deadline = time.monotonic() + timeout
    while [process for process in processes if process.poll() is None]:
        if time.monotonic() > deadline:
            give_up(processes, f"not all have ended after {timeout} seconds")
        time.sleep(0.05)
    return [(process.poll(), process.stdout, process.stderr) for process in processes]


def wait_for_line(start: str, processes: list[Process], timeout: float = 300) -> None:
    """Until the first host has printed a line that begins so."""
    deadline = time.monotonic() + timeout
    while not any(line.startswith(start) for line in processes[0].stdout.splitlines()):
        if any(process.poll() is not None for process in processes):
            give_up(processes, f"a host has ended before {start!r}")
        if time.monotonic() > deadline:
            give_up(processes, f"no {start!r} after {timeout} seconds")
        time.sleep(0.02)


def give_up(processes: list[Process], reason: str):
    said = "\n".join(f"host {number}: {process.describe()}" for number, process in enumerate(processes))
    for process in processes:
        process.send_signal(signal.SIGKILL)
    pytest.fail(f"{reason}\n{said}", pytrace=False)


def is_silent(stdout: str) -> bool:
    """Whether only the collectives' library spoke, from several threads, so that its lines lie within one another.

    Any host may say that a step took long: on a busy machine it does.
    """
    stdout = re.sub(r"host \d+: step \d+ took .*", "", stdout)
    gloo = r"\[Gloo\] Rank|is connected to|peer ranks\.|Expected number of connected peer ranks is :|\d|\s"
    return re.sub(gloo, "", stdout) == ""


def params_of(workdir) -> dict[str, np.ndarray]:
    params = checkpoint.read_params(workdir, checkpoint.steps(workdir)[-1])
    return {jax.tree_util.keystr(path): leaf for path, leaf in jax.tree_util.tree_leaves_with_path(params)}


@pytest.fixture(scope="module")
def alone(experiment, tmp_path_factory):
    workdir = tmp_path_factory.mktemp("alone")
    ((code, _, stderr),) = finish(start(1, f"--config={experiment}", f"--workdir={workdir}"))
    assert code == 0, stderr[-3000:]
    return workdir


def assert_same_run(workdir, alone):
    ours, theirs = read_metrics(workdir), read_metrics(alone)
    assert [line["step"] for line in ours] == [line["step"] for line in theirs]
    for a, b in zip(ours, theirs):
        assert a.keys() == b.keys()
        for name in a:
            if "per_second" not in name and not name.startswith(("wall", "goodput")):
                np.testing.assert_allclose(a[name], b[name], rtol=1e-4, atol=1e-6, err_msg=f"{name} of {a['step']}")
    ours, theirs = params_of(workdir), params_of(alone)
    assert ours.keys() == theirs.keys()
    for name in ours:
        np.testing.assert_allclose(ours[name], theirs[name], atol=2e-4, err_msg=name)


@pytest.mark.slow
def test_two_hosts_go_on_where_one_stopped_stop_together_and_end_as_one_would_have(experiment, alone, tmp_path):
    """The two have another mesh. SIGTERM reaches the second only, as when one VM is taken away."""
    workdir = shutil.copytree(alone, tmp_path / "run")
    for step in checkpoint.steps(alone):  # as if it had been stopped at step 5
        if step > 5:
            shutil.rmtree(workdir / "checkpoints" / str(step))
    (workdir / "report.txt").unlink()
    arguments = (f"--config={experiment}", f"--workdir={workdir}", "--config.mesh.data=2", "--config.mesh.fsdp=2",
                 "--config.mesh.tensor=2")  # fmt: skip
    processes = start(2, *arguments)
    wait_for_line("training in", processes)  # all hosts are there, and the signal finds some steps left to stop at
    processes[1].send_signal(signal.SIGTERM)
    ended = finish(processes)
    last = checkpoint.steps(workdir)[-1]
    assert 5 < last < 10 and [code for code, _, _ in ended] == [130] * 2, ended
    assert all(f"stopped at step {last}" in stderr for _, _, stderr in ended), ended

    first, second = finish(start(2, *arguments))
    assert first[0] == second[0] == 0, (first[2] + second[2])[-3000:]
    assert "step 10/10" in first[1] and "held-out masked words" in first[1] and "[MASK] 1:" in first[1]
    assert is_silent(second[1]), second[1]  # one host speaks
    assert checkpoint.steps(workdir)[-1] == 10
    assert_same_run(workdir, alone)


@pytest.mark.slow
def test_where_a_host_dies_the_others_name_it_and_stop(experiment, tmp_path):
    endless = ("--config.stages.short.steps=100000", "--config.eval.every_steps=100000", "--config.packing=False")
    processes = start(2, f"--config={experiment}", f"--workdir={tmp_path / 'run'}", *endless)
    wait_for_line("step 3/", processes)
    processes[1].send_signal(signal.SIGKILL)
    began = time.monotonic()
    (code, _, stderr), _ = finish(processes)
    assert code == 1 and time.monotonic() - began < 60
    assert stderr.splitlines()[-1] == "error: host 1 has died; start the same command again on all hosts", stderr


@pytest.mark.slow
def test_hosts_that_are_missing_are_named(experiment, tmp_path):
    arguments = (f"--config={experiment}", f"--workdir={tmp_path}")
    called = start(4, *arguments, "--config.hosts_timeout=15", numbers=(0, 2))
    alone = start(2, *arguments, "--config.hosts_timeout=2", numbers=(1,))
    for code, stdout, stderr in finish(called):
        assert code == 1 and is_silent(stdout), stdout
        assert stderr.strip() == (
            "error: hosts 1, 3 of 4 did not report within 15 seconds; start the same command on every host"
        )
    ((code, _, stderr),) = finish(alone)
    assert code == 1 and "host 0 (127.0.0.1:" in stderr and "cannot be reached within 2 seconds" in stderr
