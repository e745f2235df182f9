"""Trains the rows of a table (`today.py`, `successors.py`, `characters.py`) for the same time, scores them, and writes
the table to RESULTS.md.

Command:  python -m experiments.ablations.race calibrate --data=DATA --workdir=runs/race
          times all rows, alternating, on an otherwise idle machine, and writes steps per second to steps.json
          python -m experiments.ablations.race --minutes=10 --data=DATA --workdir=runs/race
          trains each row for the number of steps of these minutes: all rows with the first seed, then with the second
          seed, and so on. A table with `trains_once` pre-trains a row once and fine-tunes with all seeds.
          DATA has corpora/*.txt.xz (or .txt; the last file of each corpus is held out), and glue/, conll2003/ and
          blimp/blimp.jsonl.xz in their published formats. A finished run is a line of TABLE.jsonl and is not repeated.
          The same command resumes an interrupted run. --rows=bert,all and --seeds=0,1 select rows and seeds.
          --table=successors selects another table
"""

import dataclasses
import importlib.metadata
import itertools
import json
import pathlib
import shutil
import time
from collections.abc import Sequence

import numpy as np
from absl import flags

from bertjax.cli.app import run_command
from bertjax.common.errors import UserError
from bertjax.common.files import parse_json, read_json, write_whole
from bertjax.config.lists import join_with_commas
from bertjax.config.model_config import BertConfig, dropout_fields
from bertjax.reporting.history import read_history
from bertjax.text.tokenizer import KINDS, Bytes
from experiments.ablations import characters, successors, tables, today
from experiments.ablations.equal_time import Row, Table, length_of
from experiments.ablations.scaled import SCALES, TASKS, Cell, Model
from experiments.ablations.suite import FOLDER, RESULTS_HELP, Suite, results_of

TABLES = {table.name: table for table in (today.TABLE, successors.TABLE, characters.TABLE)}
TABLE = flags.DEFINE_enum("table", "today", list(TABLES), "Which table.")
SCALE = flags.DEFINE_enum("scale", "cores", list(SCALES), "How large the models are.")
DATA = flags.DEFINE_string("data", None, "Folder with the data, see above.", required=True)
WORKDIR = flags.DEFINE_string("workdir", None, "Folder of all runs, by default runs/TABLE-SCALE.")
MINUTES = flags.DEFINE_float("minutes", 10.0, "Minutes of pre-training for each run.", lower_bound=0.001)
WANTED = flags.DEFINE_list("rows", None, "Rows of the table; by default all rows.")
SEEDS = flags.DEFINE_list(
    "seeds", ["0", "1", "2"], "Seeds of pre-training (unless rows are trained once) and of fine-tuning."
)
RESULTS = flags.DEFINE_string("results", None, RESULTS_HELP)

# Calibration: rounds, steps of a row per round, and steps per line of metrics.
ROUNDS, TIMED_STEPS, LOGGED_STEPS = 5, 300, 50
PAIRS = 150  # from each of BLiMP's 67 paradigms
BLIMP = "blimp/blimp.jsonl.xz"
TUNED = ("conll", "sst2", "mrpc")  # scores whose names are also names of tasks
COLUMNS = {  # scores: title, factor, digits
    "bits_per_byte": ("bits per byte", 1, 3),
    "hidden_bits": ("bits per byte of hidden words", 1, 3),  # all other words are visible: not comparable with "bits"
    "blimp": ("BLiMP", 100, 1),
    "conll": ("CoNLL", 1, 1),
    "sst2": ("SST-2", 1, 1),
    "mrpc": ("MRPC", 1, 1),
}


@dataclasses.dataclass(frozen=True)
class Race(Suite):
    """Pre-trains the rows of a table and scores them, except for finished runs."""

    table: Table = today.TABLE

    @property
    def results(self) -> pathlib.Path:
        return self.workdir / f"{self.table.name}.jsonl"

    def finished(self) -> list[dict]:
        """Returns the lines of the finished runs, without a line that a crash truncated."""
        lines = self.results.read_text().splitlines(keepends=True) if self.results.exists() else ()
        return [parse_json(line.encode(), dict) for line in lines if line.endswith("\n")]

    def rates(self, rows: Sequence[str]) -> dict[str, float]:
        """Returns the steps per second of each row. Raises `UserError` if a row has not been timed."""
        path = self.workdir / "steps.json"
        found = read_json(path) if path.exists() else {}
        if missing := [name for name in rows if name not in found]:
            what = f"has no {', '.join(missing)}" if found else "is not there"
            raise UserError(f"{path} {what}: run `calibrate` first, while the machine does nothing else")
        return found

    def calibrate(self) -> None:
        """Times all rows with the training loop, alternating, and writes their steps per second.

        The speed of a machine changes from round to round. Only the ratio to the first row of the same round counts.
        """
        rows = self.table.rows
        found = {name: [] for name in rows}
        for row in rows.values():
            self.prepare(row)
        for number in range(ROUNDS):
            for name, row in rows.items():
                folder = self.workdir / f"calibrate-{name}-{number}"
                shutil.rmtree(folder, ignore_errors=True)  # remains of an interrupted calibration
                settings = {"log_every_steps": LOGGED_STEPS, "eval.max_sequences": 64}
                self._train(row, TIMED_STEPS, folder, settings)
                found[name].append(rate(read_history(folder).lines))
                shutil.rmtree(folder)
        first = np.array(found[next(iter(rows))])
        rates = {name: float(np.median(first) * np.median(np.array(each) / first)) for name, each in found.items()}
        write_whole(self.workdir / "steps.json", json.dumps(rates, indent=1) + "\n")
        for name, each in found.items():
            print(f"{name}: {rates[name]:.2f} steps/s ({', '.join(f'{one:.2f}' for one in each)})")

    def compete(self, row: Row, seed: int, steps: int, budget: float) -> None:
        """Pre-trains a row (with a seed, or once), scores it, and adds a line to the results."""
        first = 0 if self.table.trains_once else seed
        name = f"{row.name}-{first}"
        folder = self.workdir / name
        self.prepare(row)
        if not (folder / "report.txt").exists():
            self._train(row, steps, folder, {"seed": first})
        history, checkpoint = read_history(folder), f"--checkpoint={folder}@latest"
        steps = max(
            line["step"] for line in history.lines
        )  # steps of an existing run stay, even after a new calibration
        scores = dict.fromkeys(self.table.scores)
        if row.bits:
            scores |= self._of_words(row, f"{name}-{steps}", checkpoint)
        tasks = [score for score in self.table.scores if score in TUNED]
        scores |= {task: self._tuned(row, name, seed, task) for task in tasks}
        line = {
            "row": row.name,
            "seed": seed,
            "steps": steps,
            "budget": budget,
            "tokens": float(history.tokens(np.array(steps))),
            "minutes": sum(map(_seconds, history.lines)) / 60,
            **scores,
            "date": time.strftime("%Y-%m-%d"),
            "jax": importlib.metadata.version("jax"),
        }
        whole = "".join(json.dumps(each) + "\n" for each in [*self.finished(), line])
        write_whole(self.results, whole)

    def _of_words(self, row: Row, name: str, checkpoint: str) -> dict[str, float]:
        """Returns the scores of a checkpoint that predicts words."""
        found = {}
        if "blimp" in self.table.scores:
            given = checkpoint, f"--pairs={self.data / BLIMP}", f"--most={PAIRS}", "--json"
            found["blimp"] = self._printed("bertjax.evaluate", f"{name}-blimp", *given)["share"]
        texts = ",".join(map(str, self.scale.heldout(self.data / "corpora")))
        windows = ",".join(map(str, self.table.window_bytes))
        length = max(each.length for each in self._read_config(row).stages.values())
        given = checkpoint, f"--texts={texts}", f"--windows={windows}", f"--length={length}"
        return found | {row.bits: self._printed("experiments.ablations.bits", f"{name}-bits", *given)["bits_per_byte"]}

    def prepare(self, row: Row) -> None:
        """Prepares the vocabulary and the records of a row, which all seeds share."""
        records, config = self._records(row), self._config(row, TIMED_STEPS)
        if (records / "manifest.json").exists():
            return
        corpus = {"data.corpus": join_with_commas(map(str, self.scale.corpora(self.data / "corpora")))}
        kind = self._read_config(row).tokenizer.kind
        vocabulary = {}
        if kind != Bytes.kind:  # bytes need no learned vocabulary
            folder = self.workdir / f"vocabulary-{kind}"
            vocabulary = {"tokenizer.path": folder / KINDS[kind].filename}
            if not vocabulary["tokenizer.path"].exists():
                self._start("vocabulary", folder, config, corpus, f"--output={folder}")
        self._start("prepare", records, config, corpus | vocabulary, f"--output={records}")

    def _train(self, row: Row, steps: int, folder: pathlib.Path, settings: dict) -> None:
        given = {"data.records": self._records(row), **settings}
        self._start("main", folder, self._config(row, steps), given, f"--workdir={folder}")

    def _config(self, row: Row, steps: int) -> str:
        return f"{FOLDER / self.table.name}.py:{self.scale_name}/{row.name}/{steps}"

    def _read_config(self, row: Row):
        return self.table.config(f"{self.scale_name}/{row.name}/{TIMED_STEPS}")

    def _records(self, row: Row) -> pathlib.Path:
        return self.workdir / f"records-{row.records}"

    def _printed(self, module: str, name: str, *arguments: str) -> dict:
        """Returns the JSON object that a module prints, and stores it in the folder of the log."""
        path = self.workdir / f"{name}.json"
        if not path.exists():
            partial = path.with_suffix(".part")
            self._command(module, self.workdir / name, list(arguments), partial)
            partial.rename(path)
        return read_json(path)

    def _tuned(self, row: Row, name: str, seed: int, task: str) -> float:
        """Fine-tunes a pre-trained row, `name`, with a seed; returns the score in percent."""
        cell, its = Cell(Model(name, ""), task), TASKS[task]
        folder = self.workdir / (f"{cell.name}-{seed}" if self.table.trains_once else cell.name)
        if not tables.scores(folder, its.metric):
            model = self._read_config(row).model
            fields = cell.settings(self.scale) | {"max_seq_length": length_of(self.scale)}
            fields |= self.scale.short_tasks.get(task, {})
            own = {name: value for name, value in fields.items() if "dropout" not in name}
            # As in pre-training: no dropout. Fields that BERT lacks keep the values of the model.
            own |= {f"model.{name}": 0.0 for name in dropout_fields(model) if hasattr(BertConfig, name)}
            settings = {
                "data.path": self._part(task) or self.data / its.data,
                "init_checkpoint": f"{self.workdir / cell.model.name}@latest",
                "sweep": f"seed={seed}",
                **own,
            }
            self._start("main", folder, its.experiment, settings, f"--workdir={folder}")
        return tables.scores(folder, its.metric)[0]


def rate(lines: Sequence[dict]) -> float:
    """Returns the steps per second of a run by its metrics, without lines that include the compilation of a stage."""
    found = [line for line in lines if "wall/steps" in line]
    timed = [(line["step"] - before["step"], line) for before, line in itertools.pairwise(found)]
    timed = [(steps, line) for steps, line in timed if not line.get("wall/compile")]
    return sum(steps for steps, _ in timed) / sum(_seconds(line) for _, line in timed)


def _seconds(line: dict) -> float:
    """Returns the seconds that count for a budget: only steps and waiting for data."""
    return sum(line.get(f"wall/{part}") or 0.0 for part in ("steps", "data"))


def formatted(table: Table, lines: Sequence[dict]) -> str:
    """Formats the results in Markdown: mean ± standard deviation over the seeds, and in brackets the difference from
    the previous row or the first row (`Table.adds_up`), over the seeds of both rows."""
    titles = ["", "seeds", "steps", "M tokens", "minutes as it ran", *(COLUMNS[score][0] for score in table.scores)]
    rows, before = [titles, ["---"] * len(titles)], None
    for name, row in table.rows.items():
        if own := [line for line in lines if line["row"] == name]:
            steps, tokens, minutes = (np.mean([line[each] for line in own]) for each in ("steps", "tokens", "minutes"))
            trained = own[:1] if table.trains_once else own  # the runs of all seeds have the scores of one model
            cells = [_cell(score, own if score in TUNED else trained, before) for score in table.scores]
            rows.append([row.title, str(len(own)), f"{steps:,.0f}", f"{tokens / 1e6:.1f}", f"{minutes:.1f}", *cells])
            before = own if before is None or table.adds_up else before
    return "\n".join(f"| {' | '.join(cells)} |" for cells in rows)


def _cell(score: str, own: Sequence[dict], before: Sequence[dict] | None) -> str:
    _, factor, digits = COLUMNS[score]
    values, others = (
        {line["seed"]: factor * line[score] for line in lines if line[score] is not None}
        for lines in (own, before or ())
    )
    if not values:
        return ""
    changes = [values[seed] - others[seed] for seed in values if seed in others]
    more = f" ({np.mean(changes):+.{digits}f}{_spread(changes, digits)})" if changes else ""
    return f"{np.mean(list(values.values())):.{digits}f}{_spread(list(values.values()), digits)}{more}"


def _spread(values: Sequence[float], digits: int) -> str:
    return f" ± {np.std(values, ddof=1):.{digits}f}" if len(values) > 1 else ""


def main(arguments: list[str]) -> None:
    if arguments not in ([], ["calibrate"]):
        raise UserError(f"{arguments[0]!r} is not understood; see --help")
    table = TABLES[TABLE.value]
    if unknown := set(WANTED.value or ()) - set(table.rows):
        raise UserError(f"--rows={','.join(unknown)}: there are {', '.join(table.rows)}")
    if wrong := [seed for seed in SEEDS.value if not seed.isdecimal()]:
        raise UserError(f"--seeds={','.join(wrong)}: whole numbers such as 0,1,2")
    data, workdir = (
        pathlib.Path(path or f"runs/{table.name}-{SCALE.value}").absolute() for path in (DATA.value, WORKDIR.value)
    )
    tuned = [TASKS[score] for score in table.scores if score in TUNED]
    tuned = [f"{task.data}/{file}" for task in tuned for file in task.files]
    for path in ("corpora", *[BLIMP] * ("blimp" in table.scores), *tuned):
        if not (data / path).exists():
            raise UserError(f"--data={DATA.value}: no {path} in it")
    race = Race(SCALE.value, workdir, data, table=table)
    race.scale.heldout(data / "corpora")
    try:
        race.calibrate() if arguments else _run(race)
    except BaseException as error:
        race.interrupt()
        for process in race.processes:
            process.wait()
        if isinstance(error, KeyboardInterrupt):
            raise KeyboardInterrupt("interrupted; run the same command to resume") from None
        raise


def _run(race: Race) -> None:
    results = results_of(RESULTS.value, SCALE.value, race.workdir)
    rows = race.table.rows
    names = [name for name in rows if name in (WANTED.value or rows)]
    rates = race.rates(names)
    for line in race.finished():
        if line["budget"] != MINUTES.value:
            raise UserError(f"{race.results} has runs of {line['budget']:g} minutes; choose another --workdir")
        if missing := [score for score in race.table.scores if score not in line]:
            raise UserError(f"{race.results} has runs without {missing[0]}; choose another --workdir")
    for seed in map(int, SEEDS.value):
        for name in names:
            if (name, seed) not in {(line["row"], line["seed"]) for line in race.finished()}:
                race.compete(rows[name], seed, max(8, round(60 * MINUTES.value * rates[name])), MINUTES.value)
            tables.put(results, race.table.name, formatted(race.table, race.finished()))


if __name__ == "__main__":
    run_command(main)
