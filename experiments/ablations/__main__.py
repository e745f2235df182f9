"""Runs the paper's comparisons at a chosen scale, and writes their tables and plots to RESULTS.md.

Command:  python -m experiments.ablations --scale=cores --data=DATA --workdir=runs/ablations
          DATA has corpora/*.txt.xz (or .txt), and glue/, conll2003/ and squad/ in their published formats. The same
          command resumes an interrupted run and does not repeat a finished run. A changed scale therefore needs another
          workdir. --tables=objective,size runs only these tables. --results=FILE writes the tables to another file.
          --jobs=2 runs two models or two fine-tuning runs at a time, each on half of the cores
"""

import os
import pathlib
from collections.abc import Container

from absl import flags

from bertjax.cli.app import run_command
from bertjax.common.errors import UserError
from bertjax.distributed.topology import available_cores
from experiments.ablations import tables
from experiments.ablations.scaled import COLUMNS, SCALES, TABLES, TASKS, cells
from experiments.ablations.suite import RESULTS_HELP, Suite, results_of, run_all

SCALE = flags.DEFINE_enum("scale", "cores", list(SCALES), "How large the models are, and how long they train.")
DATA = flags.DEFINE_string("data", None, "Folder with the data, see above.", required=True)
WORKDIR = flags.DEFINE_string("workdir", None, "Folder of all runs, by default runs/ablations-SCALE.")
WANTED = flags.DEFINE_list("tables", list(TABLES), f"Of {', '.join(TABLES)}.")
RESULTS = flags.DEFINE_string("results", None, RESULTS_HELP)
JOBS = flags.DEFINE_integer("jobs", 1, "How many runs at a time; two or more share the CPU's cores: for small models.")


def main(arguments: list[str]) -> None:
    if arguments:
        raise UserError(f"{arguments[0]!r} is not understood; see --help")
    if unknown := set(WANTED.value) - set(TABLES):
        raise UserError(f"--tables={','.join(unknown)}: there are {', '.join(TABLES)}")
    data, workdir = (
        pathlib.Path(path or f"runs/ablations-{SCALE.value}").absolute() for path in (DATA.value, WORKDIR.value)
    )
    results = results_of(RESULTS.value, SCALE.value, workdir)
    if results.is_dir():
        raise UserError(f"--results={RESULTS.value}: a folder; name a file in it, such as {results / 'RESULTS.md'}")
    wanted = [TASKS[name] for table in WANTED.value for name in COLUMNS[table]]
    for path in ("corpora", *(f"{task.data}/{file}" for task in wanted for file in task.files)):
        if not (data / path).exists():
            raise UserError(f"--data={DATA.value}: no {path} in it")
    SCALES[SCALE.value].corpora(data / "corpora")
    if not 1 <= JOBS.value <= available_cores():
        raise UserError(f"--jobs={JOBS.value}: from 1 to {available_cores()}, the cores of this machine")
    if JOBS.value > 1:
        os.environ["JAX_PLATFORMS"] = "cpu"  # parallel runs would compete for the memory of a GPU
    suite = Suite(SCALE.value, workdir, data)
    unfinished = {table: {cell.name for _, cell in cells(table, suite.scale)} for table in WANTED.value}

    def write_finished(to_do: Container[str]) -> None:
        for table in [table for table, names in unfinished.items() if not any(name in to_do for name in names)]:
            tables.write(results, workdir, table, suite.scale)
            del unfinished[table]

    all_cells = [cell for table in WANTED.value for _, cell in cells(table, suite.scale)]
    run_all(suite, [run for cell in all_cells for run in (cell.model, cell)], JOBS.value, write_finished)


if __name__ == "__main__":
    run_command(main)
