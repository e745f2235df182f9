"""Holds out a tenth of the examples of one file as the dev set, for data without a dev file.

The split is a function of the file and of `config.data.heldout_seed`. The split is therefore the same on all hosts, in
a resumed run and in `evaluate`.
"""

import hashlib
from collections import Counter
from collections.abc import Sequence
from typing import Any

from etils import epath
from ml_collections import ConfigDict

from bertjax.common.errors import UserError
from bertjax.data.corpus import fingerprints
from bertjax.data.corpus.tables import SUFFIXES

ONE_OF = 10  # holds out one example of ten
MIN_FOR_CORRELATION = 3  # held-out examples


def is_one_file(path: str) -> bool:
    """Returns whether `config.data.path` names a table, and not a folder with tables."""
    return epath.Path(path).suffix in SUFFIXES and not epath.Path(path).is_dir()


def is_file_of_run(path: epath.PathLike, data: ConfigDict, known: dict[str, str]) -> bool:
    """Returns whether a run has split this file into training and held-out examples.

    Args:
      path: the file.
      data: the `config.data` of the run.
      known: the fingerprints of the run's files, by name.
    """
    name = str(epath.Path(data.get("path", "")))
    return name in known and epath.Path(path).is_file() and fingerprints.of_file(path) == known[name]


def choose_heldout(labels: Sequence[Sequence[Any]], seed: int, stratified: bool = True) -> set[int]:
    """Returns the indices of the examples to hold out, one of `ONE_OF`.

    Args:
      labels: the distinct labels of each example. The last training example with a label is not held out.
      seed: the seed of the split.
      stratified: whether to hold out one of `ONE_OF` examples of each label. An example with several labels counts for
        the rarest of these labels.
    """
    left = Counter(label for labels_of_example in labels for label in labels_of_example)
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


def require_heldout(held_out: int, examples: int, data: ConfigDict, noun: str, least: int = 1) -> None:
    """Raises `UserError` unless enough examples are held out.

    Args:
      held_out: the number of held-out examples.
      examples: the number of all examples.
      data: `config.data`.
      noun: the word for examples in the message, such as "rows".
      least: the minimum number of held-out examples.
    """
    if held_out < least:
        raise UserError(
            f"config.data.path = {data.path!r}: {examples} {noun} are too few to hold out 1 of {ONE_OF} as the dev "
            f"set; add {noun}, or name a folder with a training and a dev file"
        )


def describe_split(held_out: int, examples: int, data: ConfigDict, noun: str, stratified_by: str = "") -> str:
    """Returns a line that describes the split; see `require_heldout` for the arguments."""
    how = f", stratified by {stratified_by}" if stratified_by else ""
    return (
        f"{data.path}: 1 of {ONE_OF} {noun} held out as dev{how} (data.heldout_seed={seed_of(data)}): "
        f"{examples - held_out:,} for training, {held_out:,} held out"
    )


def seed_of(data: ConfigDict) -> int:
    """Returns `config.data.heldout_seed`; 0 for older configs without this field."""
    return data.get("heldout_seed", 0)
