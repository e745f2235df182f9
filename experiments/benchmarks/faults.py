"""Kills and stops runs, starts them twice, or fills the disk, many times, and checks the results.

Command:  python -m experiments.benchmarks.faults --measure=kills,stops,twice,full,haul,memory
          python -m experiments.benchmarks.faults --measure=versions --python=OTHER/bin/python
Measures: kills: `kill -9` at random moments of pre-training, fine-tuning and a sweep, until they end; params of all
              checkpoints and metrics must equal the undisturbed run, bit for bit
          stops: SIGTERM at random moments; the exit code, and the seconds until the process has saved and ended
          twice: the same command, two processes at once; one must refuse and name the other
          full:  main, prepare and convert on a disk with too little space (a limit on the size of files)
          haul:  minutes of training, evaluation, checkpoints and restarts; slopes of memory, descriptors and threads,
              size of the workdir, steps of the metrics
          memory: minutes of training in one process, and the memory of the process
          versions: a run that is stopped and resumed with another Python and another JAX, in both directions
Results:  RESULTS.md
"""

import collections
import itertools
import os
import pathlib
import random
import resource
import signal
import subprocess
import sys
import tempfile
import time

import numpy as np
from absl import flags

from bertjax.cli.app import run_command
from bertjax.common.errors import UserError
from experiments.benchmarks import fuzz

MEASURE = flags.DEFINE_list("measure", ["kills", "stops", "twice", "full"], "See above.")
TIMES = flags.DEFINE_integer("times", 20, "Number of repetitions of each measure.")
MINUTES = flags.DEFINE_float("minutes", 30, "Minutes of `haul` and `memory`.")
PYTHON = flags.DEFINE_string("python", sys.executable, "Of `versions`.")

EXPERIMENTS = """
from experiments.benchmarks.fuzz import tiny_config
from bertjax.config import experiments


def get_config(kind):
    if kind in ("pretraining", "haul"):
        config = tiny_config()
        config.data.records = "records"
        config.stages.only.steps = 300 if kind == "pretraining" else 10**6
        config.checkpoint.update(every_steps=20 if kind == "pretraining" else 500, keep=2)
        config.eval.update(every_steps=100 if kind == "pretraining" else 500)
        config.log_every_steps = 7 if kind == "pretraining" else 100
        return config
    config = experiments.load("classify")
    config.data.path, config.init_checkpoint = "classify-csv", "checkpoint"
    config.update(batch_size=4, max_seq_length=16, epochs=40.0, log_every_steps=7)
    config.checkpoint.update(every_steps=10)
    if kind == "search":
        config.epochs, config.sweep = 10.0, "learning_rate=1e-3,1e-4 seed=0,1"
    return config
"""
KINDS = ("pretraining", "fine-tuning", "search")
PREPARE = (
    "--config=soak.py:pretraining", "--config.data.records=", "--config.data.corpus=text.txt",
    "--config.tokenizer.path=vocab.txt",
)  # fmt: skip


def start(
    folder: pathlib.Path, module: str, *arguments, stdout=subprocess.PIPE, python=sys.executable, **more
) -> subprocess.Popen:
    environment = {**os.environ, "PYTHONPATH": os.getcwd(), "JAX_PLATFORMS": "cpu"}
    return subprocess.Popen(
        [python, "-m", f"bertjax.{module}", *map(str, arguments)], cwd=folder, env=environment, text=True,
        stdin=subprocess.DEVNULL, stdout=stdout, stderr=subprocess.PIPE, start_new_session=True, **more,
    )  # fmt: skip


def train(folder, kind, workdir, **more) -> subprocess.Popen:
    return start(folder, "main", f"--config=soak.py:{kind}", f"--workdir={workdir}", **more)


def finish(process) -> tuple[int, str, str]:
    stdout, stderr = process.communicate(timeout=900)
    return process.returncode, stdout, stderr


def content_of(workdir: pathlib.Path) -> dict:
    """Returns all params of all checkpoints, the scores, and the metrics without times."""
    from bertjax.interop.pretrained import flattened
    from bertjax.training.checkpoints import checkpoint
    from bertjax.training.trackers.jsonl import read_metrics

    timed, found = ("per_second", "wall/", "goodput/"), {}
    for run in [workdir, *sorted(workdir.glob("runs/*"))]:
        name = str(run.relative_to(workdir))
        for step in checkpoint.steps(run):
            params = flattened(checkpoint.read_params(run, step))
            found |= {f"{name} {step} {path}": np.asarray(x).tobytes() for path, x in params.items()}
            found[f"{name} {step} scores"] = checkpoint.read_scores(run, step)
        found[f"{name} metrics"] = [
            {key: value for key, value in line.items() if not any(part in key for part in timed)}
            for line in read_metrics(run)
        ]
    for name in ("sweep.md", "best", "report.txt"):
        if (workdir / name).exists():
            found[name] = (workdir / name).read_text()
    return found


def kills(folder, rng) -> None:
    for kind in KINDS:
        began = time.monotonic()
        code, _, stderr = finish(train(folder, kind, f"{kind}-straight"))
        assert code == 0, stderr
        lasts, expected = time.monotonic() - began, content_of(folder / f"{kind}-straight")
        counts, equal = collections.Counter(), 0
        for number in range(TIMES.value):
            workdir, moments = folder / f"{kind}-{number}", []
            for _ in range(2):
                process = train(folder, kind, workdir)
                try:
                    process.wait(rng.uniform(0, lasts))
                    break
                except subprocess.TimeoutExpired:
                    os.killpg(process.pid, signal.SIGKILL)
                    moments.append(len(list(workdir.glob("**/checkpoints/*"))))
                    counts["kills"] += 1
                    counts["saving"] += bool(list(workdir.glob("**/*orbax-checkpoint-tmp*")))
                finally:
                    process.communicate()
            code, _, stderr = finish(train(folder, kind, workdir))
            found = content_of(workdir)
            is_equal = code == 0 and found == expected
            equal += is_equal
            if not is_equal:
                wrong = [name for name in {**expected, **found} if expected.get(name) != found.get(name)]
                print(f"{kind} {number}: exit code {code}, other {wrong[:5]} {stderr[-300:]}", flush=True)
        print(f"kills, {kind} ({lasts:.0f} s): {equal} of {TIMES.value} bit for bit, {counts['kills']} kills, "
              f"{counts['saving']} during a save", flush=True)  # fmt: skip


def stops(folder, rng) -> None:
    """Stops a process that trains, evaluates or saves."""
    seconds, codes, lines = [], collections.Counter(), collections.Counter()
    for number in range(TIMES.value):
        process = train(folder, "haul", folder / f"stops-{number}")
        while "step 100/" not in process.stdout.readline():
            assert process.poll() is None, process.stderr.read()
        time.sleep(rng.uniform(0, 10))
        began = time.monotonic()
        process.send_signal(signal.SIGTERM)
        code, _, stderr = finish(process)
        seconds.append(time.monotonic() - began)
        codes[code] += 1
        lines[stderr.count("\n")] += 1
    print(
        f"stops: exit codes {dict(codes)}, lines of stderr {dict(lines)}, seconds at most {max(seconds):.1f}",
        flush=True,
    )


def twice(folder, rng) -> None:
    for module in ("main", "prepare"):
        ends, named = collections.Counter(), 0
        for number in range(TIMES.value):
            if module == "main":
                pair = [train(folder, "fine-tuning", folder / f"twice-{number}") for _ in range(2)]
            else:
                pair = [start(folder, "prepare", *PREPARE, f"--output=twice-records-{number}") for _ in range(2)]
            ended = [finish(process) for process in pair]
            ends[tuple(sorted(code for code, _, _ in ended))] += 1
            refused = [stderr for code, _, stderr in ended if code]
            said = (f"process {pair[ended[0][0] != 0].pid},", "already contains finished records")
            named += len(refused) == 1 == refused[0].count("\n") and any(words in refused[0] for words in said)
        print(
            f"twice, {module}: exit codes {dict(ends)}, the other named in one line {named} of {TIMES.value}",
            flush=True,
        )


def full(folder, rng) -> None:
    cases = {
        "main": ("--config=soak.py:pretraining", "--workdir=OUT"),
        "prepare": (*PREPARE, "--output=OUT"),
        "convert": ("--source=checkpoint", "--format=bertjax", "--output=OUT"),
    }  # fmt: skip
    for module, arguments in cases.items():
        ends = collections.Counter()
        for number in range(TIMES.value):
            out, size = f"full-{module}-{number}", int(10 ** rng.uniform(2.5, 4.5))
            arguments_here = [argument.replace("OUT", out) for argument in arguments]

            def limit(size=size):
                resource.setrlimit(resource.RLIMIT_FSIZE, (size, resource.RLIM_INFINITY))

            process = start(folder, module, *arguments_here, preexec_fn=limit)
            code, _, stderr = finish(process)
            is_right = code == 0 or (code == 1 and stderr.count("\n") == 1 and stderr.startswith("error: "))
            if not is_right:
                print(f"full {module} {size}: {code} {stderr[-1500:]}", flush=True)
            again = finish(start(folder, module, *arguments_here))[0] if module != "convert" else 0
            ends[f"{'done' if code == 0 else 'one line' if is_right else 'wrong'}, then {again}"] += 1
        print(f"full, {module}: {dict(ends)}", flush=True)


def haul(folder, rng) -> None:
    from bertjax.training.checkpoints import checkpoint
    from bertjax.training.trackers.jsonl import read_metrics

    until, workdir, slopes, starts = time.monotonic() + 60 * MINUTES.value, folder / "haul", [], 0
    while (left := until - time.monotonic()) > 0:
        process = train(folder, "haul", workdir, stdout=subprocess.DEVNULL)
        began, seen = time.monotonic(), []
        ends_at, starts = min(left, rng.uniform(120, 400)), starts + 1
        while time.monotonic() - began < ends_at and process.poll() is None:
            time.sleep(1)
            if time.monotonic() - began > 40:  # after compilation, when all code has run once
                seen.append((time.monotonic() - began, *_resources(process.pid)))
        process.send_signal(rng.choice((signal.SIGTERM, signal.SIGKILL)))
        process.communicate()
        if len(seen) > 30:
            table = np.array(seen)
            slopes.append(np.polyfit(table[:, 0] / 60, table[:, 1:], 1)[0])
    memory, descriptors, threads = np.mean(slopes, 0)
    steps = [line["step"] for line in read_metrics(workdir) if "train/loss" in line]
    gaps = sum(b - a != 100 for a, b in itertools.pairwise(steps))
    size = sum(path.stat().st_size for path in (workdir / "checkpoints").rglob("*") if path.is_file())
    print(
        f"haul, {MINUTES.value:.0f} min, {starts} starts, {steps[-1]} steps: a minute {memory / 2**20:+.2f} MiB, "
        f"{descriptors:+.3f} descriptors, {threads:+.3f} threads; checkpoints {checkpoint.steps(workdir)}, "
        f"{size / 2**20:.1f} MiB; {gaps} gaps or doubles among {len(steps)} lines",
        flush=True,
    )


def memory(folder, rng) -> None:
    """Prints the memory of one process after each fifth of the time. A slope of the first minutes would mislead."""
    process = train(folder, "haul", folder / "memory", stdout=subprocess.DEVNULL)
    seen = []
    for _ in range(5):
        time.sleep(12 * MINUTES.value)
        assert process.poll() is None, process.stderr.read()
        seen.append(_resources(process.pid))
    process.send_signal(signal.SIGTERM)
    finish(process)
    sizes = ", ".join(f"{size / 2**20:.1f}" for size, _, _ in seen)
    print(f"memory, after each fifth of {MINUTES.value:.0f} min: {sizes} MiB; descriptors and threads "
          f"{[tuple(rest) for _, *rest in seen]}", flush=True)  # fmt: skip


def versions(folder, rng) -> None:
    """Prints the largest relative difference of a metric of training or evaluation from an uninterrupted run."""
    from bertjax.training.trackers.jsonl import read_metrics

    def metrics(workdir):
        lines = read_metrics(folder / workdir)
        kept = ("train/loss", "train/grad_norm", "train/mlm_loss", "eval/mlm_loss")
        return {(line["step"], name): line[name] for line in lines for name in kept if name in line}

    code, _, stderr = finish(train(folder, "pretraining", "versions-straight"))
    assert code == 0, stderr
    expected = metrics("versions-straight")
    for number, pythons in enumerate(itertools.product((sys.executable, PYTHON.value), repeat=2)):
        workdir = f"versions-{number}"
        process = train(folder, "pretraining", workdir, python=pythons[0])
        while "step 98/" not in process.stdout.readline():
            assert process.poll() is None, process.stderr.read()
        process.send_signal(signal.SIGTERM)
        stopped, (code, _, stderr) = finish(process), finish(train(folder, "pretraining", workdir, python=pythons[1]))
        found = metrics(workdir)
        differences = [abs(found[key] / value - 1) for key, value in expected.items()] if code == 0 else [np.nan]
        said = ", then ".join(_jax_version(python) for python in pythons)
        print(f"versions, {said}: exit codes {stopped[0]}, {code} {stderr[-300:]}; largest difference among "
              f"{len(expected)} metrics {max(differences):.1e}", flush=True)  # fmt: skip


def _jax_version(python: str) -> str:
    return subprocess.check_output([python, "-c", "import jax; print('JAX', jax.__version__)"], text=True).strip()


def _resources(pid: int) -> tuple[int, int, int]:
    status = dict(line.split(":", 1) for line in pathlib.Path(f"/proc/{pid}/status").read_text().splitlines())
    memory = int(status["VmRSS"].split()[0]) * 1024
    return memory, len(os.listdir(f"/proc/{pid}/fd")), int(status["Threads"])


def main(_):
    measures = dict(kills=kills, stops=stops, twice=twice, full=full, haul=haul, memory=memory, versions=versions)
    if unknown := set(MEASURE.value) - measures.keys():
        raise UserError(f"--measure={','.join(unknown)}: choose from {', '.join(measures)}")
    with tempfile.TemporaryDirectory() as name:
        folder = pathlib.Path(name)
        (folder / "soak.py").write_text(EXPERIMENTS)
        fuzz.make_records(folder)
        fuzz.make_tables(folder)
        fuzz.make_checkpoint(folder / "checkpoint", "huggingface")
        for measure in MEASURE.value:
            measures[measure](folder, random.Random(0))


if __name__ == "__main__":
    run_command(main)
