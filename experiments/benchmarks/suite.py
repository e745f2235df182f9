"""Measures where the time of the tests goes: imports, tracing, compilation, training, processes, idle workers.

Command:  python -m experiments.benchmarks.suite [--output=measured.jsonl] [ARGUMENTS OF PYTEST]
          such as `-n 3 --dist loadfile`; the compilation cache is a new, empty folder
Needs:    pip install -e '.[test]'
Results:  RESULTS.md, "The tests"

Each second of a worker's main thread belongs to one phase, the innermost that is active:

start:       the worker process until pytest begins, with the imports of `conftest.py`
collection:  imports of the test files
tracing:     Python to jaxprs, and jaxprs to MLIR
compilation: XLA, by platform and number of devices; `tpu` and `cuda` are compiled ahead of time
cache:       programs read from the compilation cache or written there
training:    `bertjax.training.loop.train_task` without the phases above: steps, evaluation, checkpoints
processes:   waiting for the processes that a test starts
tests:       the rest of the tests and their fixtures
idle:        from the last test of a worker to the last test of all workers
"""

import argparse
import collections
import contextlib
import functools
import json
import os
import pathlib
import platform
import re
import subprocess
import sys
import tempfile
import threading
import time

from experiments.benchmarks.timing import calls_per_second

OUTPUT = "BERTJAX_SUITE_MEASURED"  # environment variable: the file that the workers append to

# In the launcher.


def matrix_product_rate(size: int = 2048, seconds: float = 3.0) -> float:
    """Returns the GFLOP/s of float32 products of two square matrices in XLA, on all cores."""
    import jax
    import jax.numpy as jnp

    product = jax.jit(jnp.matmul)
    x = jnp.ones((size, size))
    product(x, x).block_until_ready()
    return 2 * size**3 * calls_per_second(lambda: product(x, x).block_until_ready(), seconds) / 1e9


def processor() -> str:
    """Returns model, family and number of the processor's cores, as Linux lists them."""
    listed = pathlib.Path("/proc/cpuinfo").read_text() if sys.platform == "linux" else ""
    fields = dict(re.findall(r"^([\w ]+?)\s*: (.*)$", listed, re.MULTILINE))
    name = fields.get("model name", platform.processor())
    family = f", family {fields['cpu family']}, model {fields['model']}" if "cpu family" in fields else ""
    return f"{os.cpu_count()} cores of {name}{family}"


def table(lines: list[dict], slowest: int = 0) -> str:
    """Returns the seconds of all workers by phase, and the slowest tests, as Markdown."""
    workers = {line["worker"]: line for line in lines if "start" in line}
    ends = {line["worker"]: line["end"] for line in lines if "end" in line}
    tests = [line for line in lines if "test" in line]
    seconds, counts = collections.Counter(), collections.Counter()
    for line in tests:
        seconds.update(line["seconds"])
        counts.update(line["counts"])
    for name, worker in workers.items():
        seconds["start"] += worker["start"]
        seconds["collection"] += worker["collection"]
        seconds["idle"] += max(ends.values()) - ends[name]
    total = sum(seconds.values())
    rows = [
        f"{len(tests)} tests, {len(workers)} workers",
        "",
        "| phase | seconds | share | count |",
        "|---|---|---|---|",
    ]
    for phase, spent in seconds.most_common():
        rows.append(f"| {phase} | {spent:,.0f} | {100 * spent / total:.1f} % | {counts[phase] or ''} |")
    if slowest:
        rows += ["", "| test | seconds |", "|---|---|"]
        by_time = sorted(tests, key=lambda line: -sum(line["seconds"].values()))[:slowest]
        rows += [f"| {line['test']} | {sum(line['seconds'].values()):.1f} |" for line in by_time]
    return "\n".join(rows)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", default="", help="file for the measurements of each test, as JSON lines")
    parser.add_argument("--slowest", type=int, default=20, help="number of the slowest tests that are listed")
    arguments, for_pytest = parser.parse_known_args()
    print(f"{processor()}; {matrix_product_rate():.0f} GFLOP/s in float32 products", flush=True)
    with tempfile.TemporaryDirectory() as folder:
        output = pathlib.Path(arguments.output or f"{folder}/measured.jsonl").absolute()
        output.unlink(missing_ok=True)
        environment = {**os.environ, OUTPUT: str(output), "JAX_COMPILATION_CACHE_DIR": f"{folder}/compiled"}
        began = time.monotonic()
        command = [sys.executable, "-m", "pytest", "-p", "experiments.benchmarks.suite", *for_pytest]
        done = subprocess.run(command, env=environment)
        print(f"\n{time.monotonic() - began:.0f} s, exit status {done.returncode}")
        print(table([json.loads(line) for line in output.read_text().splitlines()], arguments.slowest))
    sys.exit(done.returncode)


# In the workers: a plugin of pytest.


class Stopwatch:
    """Attributes the seconds of one thread to the innermost active phase."""

    def __init__(self) -> None:
        self.thread = threading.get_ident()
        self.phases = ["tests"]
        self.last = time.perf_counter()
        self.seconds: collections.Counter[str] = collections.Counter()
        self.counts: collections.Counter[str] = collections.Counter()

    def lap(self) -> None:
        now = time.perf_counter()
        self.seconds[self.phases[-1]] += now - self.last
        self.last = now

    def push(self, phase: str) -> None:
        self.lap()
        self.phases.append(phase)
        self.counts[phase] += 1

    def pop(self) -> None:
        self.lap()
        self.phases.pop()

    @contextlib.contextmanager
    def phase(self, name: str):
        if threading.get_ident() != self.thread:
            yield
            return
        self.push(name)
        try:
            yield
        finally:
            self.pop()

    def wrap(self, owner, attribute: str, name) -> None:
        """Attributes the calls of a function; `name` is a phase, or a function of the arguments that returns it."""
        function = getattr(owner, attribute)

        @functools.wraps(function)
        def timed(*arguments, **named):
            with self.phase(name(*arguments, **named) if callable(name) else name):
                return function(*arguments, **named)

        setattr(owner, attribute, timed)


def _compilation(backend, module, executable_devices, options, *rest) -> str:
    """Returns the phase of a compilation: its platform and its number of devices."""
    build = options.executable_build_options if hasattr(options, "executable_build_options") else options
    return f"compilation, {backend.platform}, {build.num_replicas * build.num_partitions} devices"


class Plugin:
    def __init__(self, output: pathlib.Path, worker: str):
        self.output, self.worker = output, worker
        self.watch = Stopwatch()
        self.began = time.time()

    def write(self, **line) -> None:
        with self.output.open("a") as file:
            file.write(json.dumps({"worker": self.worker, **line}) + "\n")

    def pytest_collection_finish(self, session) -> None:
        import jax._src.compiler as compiler
        import psutil
        from jax._src import dispatch

        import bertjax.training.loop
        import bertjax.training.run
        import tests.processes

        started = self.began - psutil.Process().create_time()
        self.write(start=started, collection=time.time() - self.began)
        watch = self.watch
        watch.wrap(compiler, "backend_compile_and_load", _compilation)
        for name in ("_cache_read", "_cache_write"):
            watch.wrap(compiler, name, "cache")
        for owner in (bertjax.training.loop, bertjax.training.run):
            watch.wrap(owner, "train", "training")
        for name in ("wait", "communicate"):
            watch.wrap(subprocess.Popen, name, "processes")
        watch.wrap(tests.processes.Process, "wait", "processes")

        traced = (dispatch.JAXPR_TRACE_EVENT, dispatch.JAXPR_TO_MLIR_MODULE_EVENT)
        timer = dispatch.log_elapsed_time

        def timed(*arguments, event=None, **named):
            stack = contextlib.ExitStack()
            if event in traced:
                stack.enter_context(watch.phase("tracing"))
            stack.enter_context(timer(*arguments, event=event, **named))
            return stack

        dispatch.log_elapsed_time = timed
        watch.lap()
        watch.seconds.clear()

    def pytest_runtest_logfinish(self, nodeid: str, location) -> None:
        self.watch.lap()
        seconds = {phase: round(spent, 4) for phase, spent in self.watch.seconds.items()}
        self.write(test=nodeid, seconds=seconds, counts=dict(self.watch.counts))
        self.watch.seconds.clear()
        self.watch.counts.clear()

    def pytest_sessionfinish(self) -> None:
        self.write(end=time.time())


def pytest_configure(config) -> None:
    worker = os.environ.get("PYTEST_XDIST_WORKER", "")
    if worker or not config.getoption("numprocesses", None):
        config.pluginmanager.register(Plugin(pathlib.Path(os.environ[OUTPUT]), worker or "main"))


if __name__ == "__main__":
    main()
