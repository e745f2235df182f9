"""Holds out a tenth of the examples of one file as the dev set, for data that has no dev file.

The choice is a function of the file and of `config.data.heldout_seed`: it is the same on all hosts, when a run is
resumed, and when `evaluate` reads the file again.
"""

import hashlib
from collections import Counter
from collections.abc import Sequence
from typing import Any

from etils import epath

from bertjax.common.errors import UserError
from bertjax.data.corpus import fingerprints
from bertjax.data.corpus.tables import SUFFIXES, Row

ONE_OF = 10  # one of ten examples is held out
LEAST_NUMBERS = 3  # held-out examples that a correlation needs


class Part(Sequence[Row]):
    """Some of the rows of a table, without a copy of the table."""

    def __init__(self, rows: Sequence[Row], numbers: Sequence[int]):
        self._rows, self._numbers = rows, numbers

    def __len__(self) -> int:
        return len(self._numbers)

    def __getitem__(self, index: int) -> Row:
        return self._rows[self._numbers[index]]


def is_one_file(path: str) -> bool:
    """Returns whether `config.data.path` names a table, and not a folder with tables."""
    return epath.Path(path).suffix in SUFFIXES and not epath.Path(path).is_dir()


def is_file_of_run(path: epath.PathLike, data, known: dict[str, str]) -> bool:
    """Returns whether a file is the one file that a run has read and has held out a part of.

    Args:
      data: the `config.data` of the run.
      known: the fingerprints of the run's files, by name.
    """
    name = str(epath.Path(data.get("path", "")))
    return name in known and epath.Path(path).is_file() and fingerprints.of_file(path) == known[name]


def choose(labels: Sequence[Sequence[Any]], seed: int, stratified: bool = True) -> set[int]:
    """Returns the numbers of the examples to hold out, one of `ONE_OF`.

    Args:
      labels: the labels of each example, each label once. An example is not held out if no other example in the
        training data has one of its labels.
      stratified: holds out one of `ONE_OF` of the examples of each label; of several labels the rarest one counts.
    """
    left = Counter(label for each in labels for label in each)
    counts = dict(left)

    def place(number: int) -> tuple:
        stratum = min(((counts[label], label) for label in labels[number]), default=()) if stratified else ()
        return stratum, hashlib.sha256(f"{seed} {number}".encode()).digest()

    chosen = set()
    for number in sorted(range(len(labels)), key=place)[ONE_OF // 2 :: ONE_OF]:
        if all(left[label] > 1 for label in labels[number]):
            left.subtract(labels[number])
            chosen.add(number)
    return chosen


def require(held_out: int, examples: int, data, named: str, least: int = 1) -> None:
    """Raises `UserError` unless enough examples are held out.

    Args:
      data: `config.data`.
      named: the examples in words, such as "rows".
    """
    if held_out < least:
        raise UserError(
            f"config.data.path = {data.path!r}: {examples} {named} are too few to hold out 1 of {ONE_OF} as the dev "
            f"set; add {named}, or name a folder with a training and a dev file"
        )


def describe(held_out: int, examples: int, data, named: str, stratified_by: str = "") -> str:
    """Returns the line that states the split; arguments as of `require`."""
    how = f", stratified by {stratified_by}" if stratified_by else ""
    return (
        f"{data.path}: 1 of {ONE_OF} {named} held out as dev{how} (data.heldout_seed={seed_of(data)}): "
        f"{examples - held_out:,} for training, {held_out:,} held out"
    )


def seed_of(data) -> int:
    """Returns `config.data.heldout_seed`; 0 for configs that are older than this field."""
    return data.get("heldout_seed", 0)
