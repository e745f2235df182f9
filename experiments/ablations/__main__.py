"""Runs the paper's comparisons at a chosen scale, and writes their tables and pictures to RESULTS.md.

Command:  python -m experiments.ablations --scale=cores --data=DATA --workdir=runs/ablations
          DATA has corpora/*.txt.xz (or .txt), glue/, conll2003/ and squad/ as those are distributed. What was stopped
          goes on where it was; --tables=objective,size runs these only, --results=FILE writes elsewhere
"""

import dataclasses
import json
import pathlib
import subprocess
import sys
import time

from absl import flags

from bertjax import command
from bertjax.config import UserError
from bertjax.files import write_whole
from experiments.ablations import tables
from experiments.ablations.scaled import SCALES, TABLES, TASKS, Cell, Model, Scale, cells

FOLDER = pathlib.Path(__file__).parent
SCALE = flags.DEFINE_enum("scale", "cores", list(SCALES), "How large the models are, and how long they train.")
DATA = flags.DEFINE_string("data", None, "Folder with the data, see above.", required=True)
WORKDIR = flags.DEFINE_string("workdir", None, "Folder of all runs, by default runs/ablations-SCALE.")
WANTED = flags.DEFINE_list("tables", list(TABLES), f"Of {', '.join(TABLES)}.")
RESULTS = flags.DEFINE_string("results", None, "The file with the tables: beside this one, of a trial in the workdir.")


def main(arguments: list[str]) -> None:
    if arguments:
        raise UserError(f"{arguments[0]!r} is not understood; see --help")
    if unknown := set(WANTED.value) - set(TABLES):
        raise UserError(f"--tables={','.join(unknown)}: there are {', '.join(TABLES)}")
    data, workdir = (
        pathlib.Path(path or f"runs/ablations-{SCALE.value}").absolute() for path in (DATA.value, WORKDIR.value)
    )
    results = pathlib.Path(RESULTS.value or (workdir if SCALE.value == "trial" else FOLDER) / "RESULTS.md")
    for folder in ("corpora", *(task.data for task in TASKS.values())):
        if not (data / folder).is_dir():
            raise UserError(f"--data={DATA.value}: no folder {folder} in it")
    suite = Suite(SCALE.value, workdir, data)
    for table in WANTED.value:
        for _, cell in cells(table, suite.scale):
            suite.run(cell)
        tables.write(results, workdir, table, suite.scale)


@dataclasses.dataclass(frozen=True)
class Suite:
    """Runs what a cell needs, unless it is there already."""

    scale_name: str
    workdir: pathlib.Path
    data: pathlib.Path

    @property
    def scale(self) -> Scale:
        return SCALES[self.scale_name]

    def run(self, cell: Cell) -> None:
        """Fine-tunes a model on a task with all seeds, after its pre-training, and that after its preparation."""
        folder, task = self.workdir / cell.folder, TASKS[cell.task]
        if len(tables.scores(folder, task.metric)) >= self.scale.seeds:
            return
        self._pretrain(cell.model)
        settings = {
            "data.path": self._part(cell.task) or self.data / task.data,
            "init_checkpoint": f"{self.workdir / cell.model.name}@{cell.step or 'latest'}",
            "sweep": f"seed={','.join(map(str, range(self.scale.seeds)))}",
            **cell.settings(self.scale),
        }
        self._start("main", folder, task.experiment, settings, f"--workdir={folder}")

    def _part(self, task: str) -> pathlib.Path | None:
        """Writes the first part of a task's data, if the scale says so; returns its folder."""
        if task == "sst2":
            folder = self.workdir / f"sst2-{self.scale.sentences}"
            for name, most in (("train.tsv", self.scale.sentences), ("dev.tsv", None)):
                lines = (self.data / "glue/SST-2" / name).read_text().splitlines(keepends=True)
                write_whole(folder / "SST-2" / name, "".join(lines[: most and most + 1]))  # with the header
            return folder
        if task == "squad":
            folder = self.workdir / f"squad-{self.scale.articles}"
            for name in ("train-v1.1.json", "dev-v1.1.json"):
                content = json.loads((self.data / "squad" / name).read_text())
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
        if not (records / "manifest.json").exists():
            self._prepare(model, config, records)
        self._start("main", folder, config, {"data.records": records}, f"--workdir={folder}")

    def _prepare(self, model: Model, config: str, records: pathlib.Path) -> None:
        corpus = {"data.corpus": ",".join(map(str, self.scale.corpora(self.data / "corpora")))}
        if model.records == "bytes":
            return self._start("prepare", records, config, corpus, f"--output={records}")
        vocabulary = self.workdir / "vocabulary"
        if not (vocabulary / "vocab.txt").exists():
            self._start("vocabulary", vocabulary, config, corpus, f"--output={vocabulary}")
        settings = {**corpus, "tokenizer.path": vocabulary / "vocab.txt"}
        self._start("prepare", records, config, settings, f"--output={records}")

    def _start(self, module: str, folder: pathlib.Path, config: str, settings: dict, *arguments: str) -> None:
        """Runs a command of bertjax; its output goes to FOLDER.log."""
        arguments = [
            f"--config={config}",
            *(f"--config.{name}={value}" for name, value in settings.items()),
            *arguments,
        ]
        log, began = folder.with_name(folder.name + ".log"), time.monotonic()
        log.parent.mkdir(parents=True, exist_ok=True)
        print(f"{time.strftime('%H:%M:%S')} {module} {folder.name}", end=" ", flush=True)
        with log.open("a") as output:
            print(f"$ {module} {' '.join(arguments)}", file=output, flush=True)
            done = subprocess.run([sys.executable, "-m", f"bertjax.{module}", *arguments], stdout=output, stderr=output)
        print(f"{time.monotonic() - began:.0f} s", flush=True)
        if done.returncode == 130:
            raise KeyboardInterrupt("interrupted; the same command goes on")
        if done.returncode:
            last = log.read_text(errors="replace").splitlines()[-1]
            raise UserError(f"{last} ({log})")


if __name__ == "__main__":
    command.run(main)
