"""The commands of the package in separate processes.

`run` and `start` fork the processes off one process that has imported JAX already: a start costs milliseconds instead
of seconds. A fork runs `python -m bertjax.MODULE` with its own flags, environment, folder and signals. It reads records
without TensorFlow. `fresh=True` starts a new Python process, which takes seconds.
"""

import atexit
import concurrent.futures
import contextlib
import functools
import importlib
import json
import os
import pathlib
import runpy
import select
import signal
import subprocess
import sys
import tempfile
import threading
import time
import traceback

ROOT = pathlib.Path(__file__).parents[1]
# Without fusion emitters, which compile each fusion with MLIR, compilation takes half the time. One part of generated
# code takes a tenth less processor time than several parts, which are faster only on idle cores.
QUICK_TO_COMPILE = (
    "--xla_backend_optimization_level=0 --xla_llvm_disable_expensive_passes=true --xla_cpu_use_fusion_emitters=false "
    "--xla_cpu_parallel_codegen_split_count=1"
)


class Process:
    """A process whose stdout and stderr go to files, so that tests can read them while it runs."""

    def __init__(self, name: str, folder: pathlib.Path):
        self.name, self._folder, self._fresh = name, folder, None
        self._outputs = [folder / "stdout", folder / "stderr"]
        for path in self._outputs:
            path.touch()

    @property
    def stdout(self) -> str:
        """Returns the output until now."""
        return self._outputs[0].read_text()

    @property
    def stderr(self) -> str:
        return self._outputs[1].read_text()

    def poll(self) -> int | None:
        """The exit status, -N after signal N; None while it runs."""
        if self._fresh:
            return self._fresh.poll()
        if (code := self._folder / "code").exists():
            return int(code.read_text())
        assert _forking().poll() is None, "the process that forks has died"
        return None

    def send_signal(self, number: int) -> None:
        if self.poll() is None:
            os.kill(self.pid, number)

    def wait(self, timeout: float) -> int:
        """Returns the exit status.

        A process that has not ended after `timeout` seconds is killed, and its state is shown.
        """
        deadline = time.monotonic() + timeout
        while self.poll() is None:
            if time.monotonic() > deadline:
                self.send_signal(signal.SIGKILL)
                raise TimeoutError(f"not done after {timeout} seconds: {self.describe()}")
            time.sleep(0.02)
        return self.poll()

    def describe(self) -> str:
        """Returns the state of the process, with its last lines."""
        state = "still runs" if self.poll() is None else f"ended with status {self.poll()}"
        return f"{self.name} {state}\n--- stdout\n{self.stdout[-1000:]}\n--- stderr\n{self.stderr[-3000:]}"


# Environment variable: preparation starts no processes, and runs draw no pages and skip stages of one step, since each
# stage compiles a program; with the value "untrained", runs end where training would begin.
QUICK = "BERTJAX_TESTS_QUICK"


def environment_with(**variables: str) -> dict[str, str]:
    """Returns the environment of a process that computes on one CPU device, and caches all compiled programs."""
    return {**os.environ, "PYTHONPATH": str(ROOT), "XLA_FLAGS": QUICK_TO_COMPILE, "JAX_PLATFORMS": "cpu",
            "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0", **variables}  # fmt: skip


def start(module: str, *arguments, cwd, fresh: bool = False, **environment) -> Process:
    """Starts `python -m bertjax.MODULE` in folder `cwd`."""
    environment = environment_with(**environment)
    arguments = [*map(str, arguments)]
    process = Process(" ".join([module, *arguments]), pathlib.Path(tempfile.mkdtemp(dir=_folder())))
    if fresh:
        stdout, stderr = (path.open("w") for path in process._outputs)
        process._fresh = subprocess.Popen(
            [sys.executable, "-m", f"bertjax.{module}", *arguments], stdin=subprocess.DEVNULL, stdout=stdout,
            stderr=stderr, cwd=cwd, env=environment, start_new_session=True,
        )  # fmt: skip
        process.pid = process._fresh.pid
        return process
    request = dict(module=module, arguments=arguments, cwd=str(cwd), environment=environment)
    parent = _forking()
    parent.stdin.write(json.dumps({**request, "folder": str(process._folder)}) + "\n")
    parent.stdin.flush()
    process.pid = int(parent.stdout.readline())
    return process


def run(module: str, *arguments, cwd, timeout: float = 300, **more) -> subprocess.CompletedProcess:
    """Waits for a process of `start`."""
    process = start(module, *arguments, cwd=cwd, **more)
    code = process.wait(timeout)
    return subprocess.CompletedProcess([module, *arguments], code, process.stdout, process.stderr)


@contextlib.contextmanager
def in_process_pool(workers):
    """Yields an executor that calls functions at once, instead of starting processes, which takes seconds."""

    class Pool(concurrent.futures.Executor):
        def submit(self, function, *arguments):
            future = concurrent.futures.Future()
            future.set_result(function(*arguments))
            return future

    yield Pool()


@functools.cache
def _folder() -> str:
    folder = tempfile.TemporaryDirectory(prefix="bertjax-tests-")
    atexit.register(folder.cleanup)
    return folder.name


@functools.cache
def _forking() -> subprocess.Popen:
    """Starts the forking process, which ends with the tests: its stdin is closed then."""
    return subprocess.Popen(
        [sys.executable, "-m", "tests.processes"], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, cwd=ROOT
    )


# The process that forks. It computes nothing, because a computation would start threads of JAX, which do not survive a
# fork.


def _serve() -> str:
    """Answers requests; in each fork, returns the name of the module to run."""
    running, requests = {}, b""
    while True:
        ready, _, _ = select.select([0], [], [], 0.02 if running else None)
        if ready:
            requests += (read := os.read(0, 65_536))
            if not read:  # the tests have ended
                for pid in running:
                    os.kill(pid, signal.SIGKILL)
                os._exit(0)
        *lines, requests = requests.split(b"\n")
        for line in lines:
            request = json.loads(line)
            if (pid := os.fork()) == 0:
                return _become(**request)
            running[pid] = pathlib.Path(request["folder"])
            os.write(1, b"%d\n" % pid)
        for pid, folder in list(running.items()):
            if os.waitid(os.P_PID, pid, os.WEXITED | os.WNOHANG | os.WNOWAIT):
                (folder / "new").write_text(str(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])))
                (folder / "new").rename(folder / "code")
                del running[pid]


def _become(module: str, arguments: list[str], cwd: str, environment: dict[str, str], folder: str) -> str:
    """Sets the folder, environment and signals of this fork to these values."""
    for number, name in enumerate((os.devnull, f"{folder}/stdout", f"{folder}/stderr")):
        file = os.open(name, os.O_RDWR | os.O_CREAT | os.O_TRUNC)
        os.dup2(file, number)
        os.close(file)
    os.chdir(cwd)
    os.environ.clear()
    os.environ.update(environment)
    sys.argv = [module, *arguments]
    sys.path[:] = [cwd, *filter(None, environment.get("PYTHONPATH", "").split(os.pathsep)), *sys.path[1:]]
    for name, value in jax.config.values.items():  # JAX read them from the environment of the forking process
        content = environment.get(name.upper())
        if content is not None and isinstance(value, str | float | int | None):
            jax.config.update(name, content if value is None else type(value)(content))
    return f"bertjax.{module}"


def _run(module: str) -> None:
    """Runs the module and ends like Python, but without freeing the imported modules, which takes seconds."""
    code = 1
    bertjax.data.loading.pipeline.reader = lambda: bertjax.data.loading.readers.plain
    if QUICK in os.environ:
        step_times = bertjax.launch.budget.steps.StepTimes(steps=1.0, evaluation=0.1, compiling=1.0)
        bertjax.launch.budget.steps.measure_steps = lambda *_: step_times
        bertjax.reporting.page.draw = lambda workdir: None
        bertjax.data.preprocessing.preparation.worker_pool = in_process_pool
        bertjax.data.preprocessing.vocabulary.worker_pool = in_process_pool
        parts = bertjax.config.stages.batch_size_parts
        bertjax.config.stages.batch_size_parts = lambda stage, batch_size: (
            [] if stage.steps == 1 else parts(stage, batch_size)
        )
    if os.environ.get(QUICK) == "untrained":
        bertjax.training.run.train_task = lambda *_, **__: sys.exit(0)
    if "BERTJAX_TEST_COVERAGE" in os.environ:
        importlib.import_module("experiments.benchmarks.test_coverage").start_in_fork()
    try:
        runpy.run_module(module, run_name="__main__", alter_sys=True)
        code = 0
    except SystemExit as stop:
        code = stop.code if isinstance(stop.code, int) else int(stop.code is not None)
    except BaseException:
        traceback.print_exc()
    finally:
        threading._shutdown()
        atexit._run_exitfuncs()
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


if __name__ == "__main__":
    os.environ.pop("PYTHONPATH", None)
    import jax
    import matplotlib.figure  # noqa: F401

    import bertjax.config.stages
    import bertjax.data.loading.pipeline
    import bertjax.data.loading.readers.plain
    import bertjax.data.preprocessing.preparation
    import bertjax.interop.pretrained
    import bertjax.launch.budget.steps
    import bertjax.launch.start
    import bertjax.pretraining.task
    import bertjax.reporting.page
    import bertjax.training.run

    _run(_serve())
