"""Checks a benchmark row that somebody else measured, and prints the row for RESULTS.md.

    python -m experiments.benchmarks.check_row row.json

The form "Benchmark row" of the issues has an example of the file. `Row` has the fields.
"""

import dataclasses
import math
import pathlib
import re
import statistics
import sys

from bertjax.common.errors import UserError
from bertjax.common.files import read_json

RESULTS = pathlib.Path(__file__).parent / "RESULTS.md"
MIN_RUNS = 3
VERSIONS = ("python", "jax")


@dataclasses.dataclass(frozen=True)
class Row:
    """A measurement.

    Attributes:
      section: a heading of RESULTS.md; another title asks for a new section and begins with "new: ".
      name: the measured thing, such as "step of BERT-base at length 128".
      unit: the unit of `runs`, such as "ms".
      runs: the result of each run, at least three runs.
      command: the command with all flags.
      hardware: the processor or the accelerators with their number and memory, and other load on the machine.
      versions: {package: version}, with "python" and "jax".
      commit: the commit of bertjax, 40 hexadecimal digits.
      others: {library with version: the result of each run}, for example of transformers. The runs of all libraries
        alternate.
    """

    section: str
    name: str
    unit: str
    runs: list[float]
    command: str
    hardware: str
    versions: dict[str, str]
    commit: str
    others: dict[str, list[float]] = dataclasses.field(default_factory=dict)


def check(row: Row) -> None:
    """Raises `UserError` for an empty field, too few runs, an impossible number, or an unknown section."""
    for field in ("name", "unit", "command", "hardware"):
        if not getattr(row, field).strip():
            raise UserError(f"{field}: is empty; describe it")
    headings = re.findall(r"^##+ (.+)$", RESULTS.read_text("utf-8"), re.MULTILINE)
    if row.section not in headings and not re.match("new: .", row.section):
        raise UserError(f'section = {row.section!r}: not a heading of {RESULTS.name}; set a heading, or "new: TITLE"')
    if not re.fullmatch("[0-9a-f]{40}", row.commit):
        raise UserError(f"commit = {row.commit!r}: not 40 hexadecimal digits; set the output of git rev-parse HEAD")
    for package in VERSIONS:
        if not row.versions.get(package):
            raise UserError(f"versions: has no {package!r}; copy the versions from the output of bertjax doctor")
    for name, runs in {"runs": row.runs, **row.others}.items():
        if len(runs) < MIN_RUNS:
            raise UserError(f"{name}: has {len(runs)} runs; measure at least {MIN_RUNS}")
        if wrong := [run for run in runs if not (math.isfinite(run) and run > 0)]:
            raise UserError(f"{name}: has the result {wrong[0]}; each result must be a positive number")


def spread(runs: list[float], unit: str) -> str:
    """Returns the median of runs, with the least and the most."""
    return f"{statistics.median(runs):.4g} {unit} ({min(runs):.4g} to {max(runs):.4g}, {len(runs)} runs)"


def format_row(row: Row) -> str:
    """Returns the lines for RESULTS.md."""
    results = {"bertjax": row.runs, **row.others}
    versions = ", ".join(f"{package} {version}" for package, version in row.versions.items())
    return "\n".join(
        [
            f"| {row.name} | {' | '.join(results)} |",
            f"|{'---|' * (len(results) + 1)}",
            f"| {row.hardware} | {' | '.join(spread(runs, row.unit) for runs in results.values())} |",
            "",
            f"Command: `{row.command}`. Versions: {versions}, bertjax {row.commit[:8]}.",
        ]
    )


def main(arguments: list[str]) -> int:
    """Prints the row of a file, or the mistake in it. Returns the exit status."""
    if len(arguments) != 1:
        print("usage: python -m experiments.benchmarks.check_row FILE", file=sys.stderr)
        return 2
    try:
        row = read_json(arguments[0], Row, "compare it with the example in the form")
        check(row)
    except UserError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    print(format_row(row))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
