"""Pre-trains models and fine-tunes them with several seeds for the tables, except for finished runs."""

import concurrent.futures
import contextlib
import dataclasses
import itertools
import json
import os
import pathlib
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterable

from bertjax.common.errors import UserError
from bertjax.common.files import read_json, write_whole
from bertjax.config.lists import join_with_commas
from experiments.ablations import tables
from experiments.ablations.scaled import SCALES, TASKS, Cell, Model, Scale

FOLDER = pathlib.Path(__file__).parent
RESULTS_HELP = "The file with the tables; by default RESULTS.md in this folder (cores) or in the workdir."


def results_of(given: str | None, scale_name: str, workdir: pathlib.Path) -> pathlib.Path:
    """Returns the file with the tables, see `RESULTS_HELP`."""
    return pathlib.Path(given or (FOLDER if scale_name == "cores" else workdir) / "RESULTS.md")


def run_all(suite: "Suite", runs: Iterable[Model | Cell], jobs: int, on_done: Callable) -> None:
    """Runs all, `jobs` at a time, models before fine-tuning; calls `on_done(names of open runs)` after each."""
    cores = sorted(os.sched_getaffinity(0)) if jobs > 1 and hasattr(os, "sched_setaffinity") else []
    shares = itertools.count()

    def take_share() -> None:  # the cores of a thread and of the processes that it starts
        if len(cores) >= jobs:
            os.sched_setaffinity(0, cores[next(shares) :: jobs])

    to_do, running = {run.name: run for run in runs}, {}
    with concurrent.futures.ThreadPoolExecutor(jobs, initializer=take_share) as pool:
        try:
            while to_do:
                ready = [run for run in to_do.values() if isinstance(run, Model) or run.model.name not in to_do]
                for run in [run for run in ready if run.name not in running.values()][: jobs - len(running)]:
                    running[pool.submit(suite.run, run)] = run.name
                for done in concurrent.futures.wait(running, return_when="FIRST_COMPLETED").done:
                    done.result()
                    del to_do[running.pop(done)]
                on_done(to_do)
        except BaseException as error:
            suite.interrupt()
            if isinstance(error, KeyboardInterrupt):
                raise KeyboardInterrupt("interrupted; run the same command to resume") from None
            raise


@dataclasses.dataclass(frozen=True)
class Suite:
    """Runs the models and the fine-tuning of a table, except for finished runs."""

    scale_name: str
    workdir: pathlib.Path
    data: pathlib.Path
    processes: list[subprocess.Popen] = dataclasses.field(default_factory=list)
    preparing: threading.Lock = dataclasses.field(default_factory=threading.Lock)
    starting: threading.Lock = dataclasses.field(default_factory=threading.Lock)
    is_interrupted: threading.Event = dataclasses.field(default_factory=threading.Event)

    @property
    def scale(self) -> Scale:
        return SCALES[self.scale_name]

    def run(self, what: Model | Cell) -> None:
        """Pre-trains a model, after its preparation, or fine-tunes it on a task with all seeds."""
        self._pretrain(what) if isinstance(what, Model) else self._fine_tune(what)

    def interrupt(self) -> None:
        """Stops the current processes, like Ctrl-C, and starts no further process."""
        with self.starting:
            self.is_interrupted.set()
            for process in self.processes:
                process.send_signal(signal.SIGINT)

    def _fine_tune(self, cell: Cell) -> None:
        folder, task = self.workdir / cell.name, TASKS[cell.task]
        if len(tables.scores(folder, task.metric)) >= self.scale.seeds:
            return
        settings = {
            "data.path": self._part(cell.task) or self.data / task.data,
            "init_checkpoint": f"{self.workdir / cell.model.name}@{cell.step or 'latest'}",
            "sweep": f"seed={','.join(map(str, range(self.scale.seeds)))}",
            **cell.settings(self.scale),
        }
        self._start("main", folder, task.experiment, settings, f"--workdir={folder}")

    def _part(self, task: str) -> pathlib.Path | None:
        """Writes the first part of a task's data if the scale limits it, and returns the folder."""
        if task == "sst2":
            folder = self.workdir / f"sst2-{self.scale.sentences}"
            for name, most in (("train.tsv", self.scale.sentences), ("dev.tsv", None)):
                lines = (self.data / "glue/SST-2" / name).read_text().splitlines(keepends=True)
                write_whole(folder / "SST-2" / name, "".join(lines[: most and most + 1]))  # with the header
            return folder
        if task == "squad":
            folder = self.workdir / f"squad-{self.scale.articles}"
            for name in ("train-v1.1.json", "dev-v1.1.json"):
                content = read_json(self.data / "squad" / name)
                content["data"] = content["data"][: self.scale.articles]
                write_whole(folder / name, json.dumps(content))
            return folder
        return None

    def _pretrain(self, model: Model) -> None:
        folder = self.workdir / model.name
        if (folder / "report.txt").exists():
            return
        records, config = (
            self.workdir / f"records-{model.records}",
            f"{FOLDER / 'scaled.py'}:{self.scale_name}/{model.name}",
        )
        with self.preparing:  # models share records
            if not (records / "manifest.json").exists():
                self._prepare(model, config, records)
        self._start("main", folder, config, {"data.records": records}, f"--workdir={folder}")

    def _prepare(self, model: Model, config: str, records: pathlib.Path) -> None:
        corpus = {"data.corpus": join_with_commas(map(str, self.scale.corpora(self.data / "corpora")))}
        if model.records == "bytes":
            return self._start("prepare", records, config, corpus, f"--output={records}")
        vocabulary = self.workdir / "vocabulary"
        if not (vocabulary / "vocab.txt").exists():
            self._start("vocabulary", vocabulary, config, corpus, f"--output={vocabulary}")
        settings = {**corpus, "tokenizer.path": vocabulary / "vocab.txt"}
        self._start("prepare", records, config, settings, f"--output={records}")

    def _start(self, module: str, folder: pathlib.Path, config: str, settings: dict, *arguments: str) -> None:
        """Runs a command of bertjax with a config; its output goes to FOLDER.log."""
        changes = (f"--config.{name}={value}" for name, value in settings.items())
        self._command(f"bertjax.{module}", folder, [f"--config={config}", *changes, *arguments])

    def _command(
        self, module: str, folder: pathlib.Path, arguments: list[str], result: pathlib.Path | None = None
    ) -> None:
        """Runs a module with the log FOLDER.log. If `result` is set, standard output goes to this file."""
        module_name, module = module, module.rpartition(".")[2]
        log, began = folder.with_name(folder.name + ".log"), time.monotonic()
        log.parent.mkdir(parents=True, exist_ok=True)
        print(f"{time.strftime('%H:%M:%S')} {module} {folder.name}", flush=True)
        with log.open("a") as output, result.open("w") if result else contextlib.nullcontext(output) as printed:
            print(f"$ {module} {' '.join(arguments)}", file=output, flush=True)
            with self.starting:
                if self.is_interrupted.is_set():
                    raise KeyboardInterrupt
                # A separate session, so Ctrl-C reaches the process only once, by `interrupt`.
                process = subprocess.Popen(
                    [sys.executable, "-m", module_name, *arguments],
                    stdout=printed,
                    stderr=output,
                    start_new_session=True,
                )
                self.processes.append(process)
            code = process.wait()
        end = {0: "done", 130: "interrupted"}.get(code, "failed")
        print(f"{time.strftime('%H:%M:%S')} {module} {folder.name} {end}: {time.monotonic() - began:.0f} s", flush=True)
        if code == 130:
            raise KeyboardInterrupt
        if code < 0:
            killer = signal.Signals(-code).name
            raise UserError(f"{module} {folder.name}: killed by {killer}, if memory was short try fewer --jobs ({log})")
        if code:
            last = log.read_text(errors="replace").splitlines()[-1]
            raise UserError(f"{last.removeprefix('error: ')} ({log})")
