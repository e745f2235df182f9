"""The order of training: which records each step has. A function of (seed, records), for any number of hosts.

The records of a set form one list, divided into `lanes` ranges of equal size. Each lane reads its range again and
again: its files in random order in each epoch, and their records in windows. A group of lanes fills the same rows of
every batch from their windows. If the lengths of the records are known, `packing` arranges the steps of a window such
that few rows hold them; packed or not, a run takes the same records in the same step. Otherwise each lane is a group,
and its window is shuffled.

A stream has a lane for each row of a batch, which reads its range in the order of the list, so that the row goes on
where it ended in the step before.

File order and arrangements come from generators seeded with (seed, lane, epoch) or (seed, group, window), so any step
can be computed without the steps before it. A host reads only the groups of its rows, and so opens only the files in
their ranges.
"""

import functools
import math
from collections.abc import Iterator

import numpy as np

from bertjax.common.errors import UserError
from bertjax.data.batch import RowSize
from bertjax.data.loading import packing
from bertjax.data.loading.packing import Arrangement
from bertjax.data.records.record_sets import RecordSet

MAX_LANES = 64
SHUFFLE_WINDOW = 4096  # records of a lane that are shuffled together; a window may span two epochs
STREAM_WINDOW = 64  # records of a lane of a stream that are read together
PACKED_TOGETHER = 128  # sequences of a step, about: few do not fill their last row
# All windows use the largest row count of the first four. Another count would compile the step again.
FIRST_WINDOWS = 4

Span = tuple[str, int, int]  # path, first record, number of records


def count_groups(batch_size: int) -> int:
    """Returns how many groups of lanes have the sequences of a batch, if they are packed: a power of two."""
    return math.gcd(batch_size, MAX_LANES, 1 << (max(1, batch_size // PACKED_TOGETHER).bit_length() - 1))


class Order:
    """The order of a set of records. Raises `UserError` if there are fewer records than lanes.

    Args:
      row: what a row holds if the sequences are packed.
      sequences_before: so many have been read already; the order goes on after them.
      is_stream: whether the records are a stream of text (`data.stream`).

    Attributes:
      lanes, groups: their numbers.
      window: records of a lane in a window.
      steps: the number of steps of a window.
    """

    def __init__(
        self,
        files: RecordSet,
        batch_size: int,
        seed: int,
        row: RowSize,
        sequences_before: int = 0,
        is_stream: bool = False,
    ):
        self.files, self.batch_size, self.seed, self.row, self.is_stream = files, batch_size, seed, row, is_stream
        self.lanes = batch_size if is_stream else math.gcd(batch_size, MAX_LANES)
        if files.total < self.lanes:
            more = "add text" if is_stream else "add text, increase data.dupe_factor,"
            raise UserError(
                f"{files.total} training records are too few for a batch of {batch_size} sequences: {more} or reduce "
                f"batch_size"
            )
        is_known = files.lengths is not None and not is_stream
        self.groups = count_groups(batch_size) if is_known else self.lanes
        width = batch_size // self.lanes  # records of a lane in a batch
        window = STREAM_WINDOW if is_stream else SHUFFLE_WINDOW
        self.steps = max(1, min(window, files.total // self.lanes) // width)
        self.window = self.steps * width
        self.sequences_before = sequences_before
        self._firsts = np.cumsum([0, *files.counts])  # record of each file in the list
        self.arrangement = functools.lru_cache(4 * self.groups)(self.arrangement)
        self._most_rows = functools.lru_cache(None)(self._most_rows)

    @property
    def group_size(self) -> int:
        """Sequences of a step that a group has."""
        return self.batch_size // self.groups

    def lanes_of(self, group: int) -> range:
        return range(group, self.lanes, self.groups)  # apart, because files that lie together may resemble each other

    def groups_of(self, rows: np.ndarray, count: int) -> np.ndarray:
        """Returns the groups that fill some of the `count` rows of a batch, ascending."""
        return np.unique(np.asarray(rows) * self.groups // count)

    def lane_range(self, lane: int) -> range:
        """Returns the indices of a lane's records in the list."""
        return range(lane * self.files.total // self.lanes, (lane + 1) * self.files.total // self.lanes)

    def spans(self, lane: int, step: int) -> Iterator[Span]:
        """Yields what a lane reads in reading order, starting with the window of `step`."""
        for file, first, count in self._parts(lane, step // self.steps):
            yield self.files.paths[file], first, count

    def _parts(self, lane: int, window: int) -> Iterator[tuple[int, int, int]]:
        """As `spans`, with the number of the file."""
        own = self.lane_range(lane)
        first_file, last_file = np.searchsorted(self._firsts, [own.start, own.stop - 1], "right") - 1
        parts = []
        for file in range(first_file, last_file + 1):
            before, end = self._firsts[file : file + 2].tolist()
            first, last = max(own.start, before), min(own.stop, end)
            if first < last:
                parts.append((file, first - before, last - first))

        epoch, skip = divmod(self.sequences_before // self.lanes + window * self.window, len(own))
        while True:
            order = np.random.default_rng([self.seed, lane, 0, epoch]).permutation(len(parts))
            for i in range(len(parts)) if self.is_stream else order:
                file, first, count = parts[i]
                if skip < count:
                    yield file, first + skip, count - skip
                skip = max(0, skip - count)
            epoch += 1

    def arrangement(self, group: int, window: int) -> Arrangement:
        """Arranges the steps of a window. Its sequences are the group's records, lane by lane in reading order."""
        rng = np.random.default_rng([self.seed, group, 1, window])
        lanes = self.lanes_of(group)
        if self.is_stream:
            return packing.in_order(self.window)
        if self.files.lengths is None:
            return packing.shuffled(len(lanes) * self.window, self.group_size, rng)
        lengths = np.concatenate([self._lengths(lane, window) for lane in lanes])
        return packing.arrange(lengths, self.group_size, self.row, rng)

    def continues(self, rows: np.ndarray, step: int) -> np.ndarray:
        """Returns whether each of these rows of a stream continues the row of the step before, booleans `[rows]`.

        A row that begins its range of the records anew does not continue.
        """
        sizes = np.array([len(self.lane_range(row)) for row in rows])
        return (step > 0) & ((self.sequences_before // self.lanes + step) % sizes > 0)

    def _lengths(self, lane: int, window: int) -> np.ndarray:
        """The lengths of a lane's records in a window, in reading order."""
        found, missing = [], self.window
        for file, first, count in self._parts(lane, window):
            first += self._firsts[file]
            found.append(self.files.lengths[first : first + min(count, missing)])
            missing -= len(found[-1])
            if not missing:
                return np.concatenate(found)

    def rows(self, step: int, multiple: int) -> int:
        """Returns how many rows hold the packed sequences of a step, of any step in its window: a multiple of that."""
        most = max(map(self._most_rows, {*range(FIRST_WINDOWS), step // self.steps}))
        return packing.whole(most * self.groups, math.lcm(self.groups, multiple))

    def _most_rows(self, window: int) -> int:
        """Returns the most rows that a group has in any step of the window."""
        return max(self.arrangement(group, window).count for group in range(self.groups))

    def sequences_of(self, groups: np.ndarray) -> np.ndarray:
        """Returns which sequences of each batch some groups have, as padded batches number them."""
        return (groups[:, None] * self.group_size + np.arange(self.group_size)).ravel()

    def packed(self, groups: np.ndarray, step: int, count: int) -> tuple[np.ndarray, np.ndarray]:
        """Returns row and first token of each of `sequences_of(groups)` at a step, which has `count` rows in all.

        The rows are counted from 0 over those of these groups.
        """
        window, offset = divmod(step, self.steps)
        arrangements = [self.arrangement(group, window) for group in groups.tolist()]
        share = count // self.groups
        rows = np.concatenate([each.rows[offset] + place * share for place, each in enumerate(arrangements)])
        return rows, np.concatenate([each.starts[offset] for each in arrangements])
