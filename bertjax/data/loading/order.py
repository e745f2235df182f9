"""The order of training assigns records to steps. The order is a function of (seed, records) for any number of hosts.

The records of a set form one list, which is divided into `lanes` contiguous ranges of equal size. In an epoch, a lane
reads the files of its range in random order. A window is a number of consecutive records of a lane, which are shuffled
together. A group consists of several lanes and fills the same rows of all batches. If the lengths of the records are
known, `packing` packs the windows of a group into few rows. Packing does not change the records of a step. If the
lengths are unknown, a group has one lane.

A stream has one lane per row of a batch. The lane reads its range in the order of the list, so that a row continues
the text of the same row in the previous step.

The random generators have the seeds (seed, lane, epoch) for the order of files and (seed, group, window) for windows,
so that any step can be computed without earlier steps. A host reads only the groups of its rows.
"""

import functools
import math
from collections.abc import Callable, Iterator

import numpy as np

from bertjax.common.errors import UserError
from bertjax.data.batch import RowSize
from bertjax.data.loading import packing
from bertjax.data.loading.packing import Arrangement
from bertjax.data.records.record_sets import RecordSet

MAX_LANES = 64  # the maximum number of lanes, except for streams
SHUFFLE_WINDOW = 4096  # records of a lane that are shuffled together; a window may span two epochs
STREAM_WINDOW = 64  # records of a lane of a stream that are read together
SEQUENCES_PER_GROUP = 128  # approximate number of sequences of a group in a step; smaller groups have more padding
# The number of rows of a batch is at least the maximum over the first `FIRST_WINDOWS` windows, so that the number
# rarely changes between windows. A change recompiles the train step.
FIRST_WINDOWS = 4

Span = tuple[str, int, int]  # path, first record, number of records


def count_groups(batch_size: int) -> int:
    """Returns the number of groups for packed batches, a power of 2 that divides the batch size."""
    return math.gcd(batch_size, MAX_LANES, 1 << (max(1, batch_size // SEQUENCES_PER_GROUP).bit_length() - 1))


class Order:
    """The order of a set of records: assigns records to training steps. Steps are counted from 0.

    - The records form one list. A lane is one of `lanes` contiguous ranges of the list, of equal size. In an epoch, a
      lane reads the files of its range in random order.
    - A window is a number of consecutive records of a lane, which are shuffled together.
    - A group is a set of lanes. The records of a group fill the same rows of all batches.

    Attributes:
      lanes: the number of lanes.
      groups: the number of groups.
      window: the number of records of a lane in a window.
      steps: the number of steps of a window.
      arrangement: (group, number of the window) -> `packing.Arrangement`, which assigns the records of the group to the
        steps of the window. The records are numbered lane by lane, in reading order.
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
        """Creates the order.

        Args:
          files: the records. A record contains one sequence.
          batch_size: the number of sequences in a step.
          seed: the seed of the order.
          row: the maximum sizes of a packed row.
          sequences_before: the number of sequences that the earlier stages of the run have read.
          is_stream: whether rows continue the texts of the previous step (`data.stream`).

        Raises:
          UserError: if there are fewer records than lanes.
        """
        self.files, self.batch_size, self.seed, self.row, self.is_stream = files, batch_size, seed, row, is_stream
        self.lanes = batch_size if is_stream else math.gcd(batch_size, MAX_LANES)
        if files.total < self.lanes:
            more = "add text" if is_stream else "add text, increase data.dupe_factor,"
            raise UserError(
                f"batch_size = {batch_size}: needs at least {self.lanes} training records, but there are "
                f"{files.total}; {more} or reduce batch_size"
            )
        is_known = files.lengths is not None and not is_stream
        self.groups = count_groups(batch_size) if is_known else self.lanes
        width = batch_size // self.lanes  # the number of records of a lane in a batch
        window = STREAM_WINDOW if is_stream else SHUFFLE_WINDOW
        self.steps = max(1, min(window, files.total // self.lanes) // width)
        self.window = self.steps * width
        self.sequences_before = sequences_before
        self._file_starts = np.cumsum([0, *files.counts])  # index of the first record of each file in the list
        self.arrangement: Callable[[int, int], Arrangement] = functools.lru_cache(4 * self.groups)(self._arrange)
        self._max_rows: Callable[[int], int] = functools.lru_cache(None)(self._count_max_rows)

    @property
    def group_size(self) -> int:
        """The number of sequences of a group in a step."""
        return self.batch_size // self.groups

    def lanes_of(self, group: int) -> range:
        """Returns the lanes of a group. The lanes are far apart, because adjacent files may contain similar text."""
        return range(group, self.lanes, self.groups)

    def groups_of(self, rows: np.ndarray, count: int) -> np.ndarray:
        """Returns the groups that fill some rows of a batch, ascending.

        Args:
          rows: the indices of the rows in the batch.
          count: the number of rows of the batch of all hosts.
        """
        return np.unique(np.asarray(rows) * self.groups // count)

    def lane_range(self, lane: int) -> range:
        """Returns the indices of a lane's records in the list."""
        return range(lane * self.files.total // self.lanes, (lane + 1) * self.files.total // self.lanes)

    def spans(self, lane: int, step: int) -> Iterator[Span]:
        """Yields the records of a lane in reading order, from the start of the window of `step`. Never ends.

        Yields:
          The path of a file, the index of the first record in the file, and the number of records.
        """
        for file, first, count in self._spans(lane, step // self.steps):
            yield self.files.paths[file], first, count

    def _spans(self, lane: int, window: int) -> Iterator[tuple[int, int, int]]:
        """Yields (index of the file, first record, number of records) from a window; never ends."""
        records = self.lane_range(lane)
        first_file, last_file = np.searchsorted(self._file_starts, [records.start, records.stop - 1], "right") - 1
        parts = []
        for file in range(first_file, last_file + 1):
            before, end = self._file_starts[file : file + 2].tolist()
            first, last = max(records.start, before), min(records.stop, end)
            if first < last:
                parts.append((file, first - before, last - first))

        epoch, skip = divmod(self.sequences_before // self.lanes + window * self.window, len(records))
        while True:
            order = np.random.default_rng([self.seed, lane, 0, epoch]).permutation(len(parts))
            for i in range(len(parts)) if self.is_stream else order:
                file, first, count = parts[i]
                if skip < count:
                    yield file, first + skip, count - skip
                skip = max(0, skip - count)
            epoch += 1

    def _arrange(self, group: int, window: int) -> Arrangement:
        rng = np.random.default_rng([self.seed, group, 1, window])
        lanes = self.lanes_of(group)
        if self.is_stream:
            return packing.ordered_arrangement(self.window)
        all_lengths = self.files.lengths
        if all_lengths is None:
            return packing.shuffled_arrangement(len(lanes) * self.window, self.group_size, rng)
        lengths = np.concatenate([self._lengths(all_lengths, lane, window) for lane in lanes])
        return packing.arrange(lengths, self.group_size, self.row, rng)

    def continues(self, rows: np.ndarray, step: int) -> np.ndarray:
        """Returns whether rows of a stream continue the text of the previous step: booleans `[rows]`.

        A row does not continue a text in step 0, and at the start of the range of its lane.

        Args:
          rows: the indices of the rows in the batch, which are the numbers of their lanes.
          step: the step.
        """
        sizes = np.array([len(self.lane_range(row)) for row in rows])
        return (step > 0) & ((self.sequences_before // self.lanes + step) % sizes > 0)

    def _lengths(self, all_lengths: np.ndarray, lane: int, window: int) -> np.ndarray:
        """Returns the lengths of the records of a lane in a window, in reading order."""
        lengths, missing, spans = [], self.window, self._spans(lane, window)
        while missing:
            file, first, count = next(spans)
            first += self._file_starts[file]
            lengths.append(all_lengths[first : first + min(count, missing)])
            missing -= len(lengths[-1])
        return np.concatenate(lengths)

    def rows(self, step: int, multiple: int) -> int:
        """Returns the number of rows of the packed batches of all hosts in the window of `step`.

        Args:
          step: the step.
          multiple: a divisor of the result, such as the number of devices.
        """
        rows_of_group = max(map(self._max_rows, {*range(FIRST_WINDOWS), step // self.steps}))
        return packing.round_up(rows_of_group * self.groups, math.lcm(self.groups, multiple))

    def _count_max_rows(self, window: int) -> int:
        """Returns the maximum number of rows of a group in any step of a window."""
        return max(self.arrangement(group, window).row_count for group in range(self.groups))

    def sequences_of(self, groups: np.ndarray) -> np.ndarray:
        """Returns the indices of the sequences of some groups in a padded batch, `[groups * group_size]`."""
        return (groups[:, None] * self.group_size + np.arange(self.group_size)).ravel()

    def packed(self, groups: np.ndarray, step: int, count: int) -> tuple[np.ndarray, np.ndarray]:
        """Returns the places of the sequences `sequences_of(groups)` in the packed rows of a step.

        Args:
          groups: the groups, ascending.
          step: the step.
          count: the number of rows of the batch of all hosts.

        Returns:
          The row of each sequence `[sequences]`, counted from 0 in the rows of these groups; and the position of the
          sequence in the row `[sequences]`, in tokens.
        """
        window, offset = divmod(step, self.steps)
        arrangements = [self.arrangement(group, window) for group in groups.tolist()]
        share = count // self.groups
        rows = np.concatenate([x.rows[offset] + number * share for number, x in enumerate(arrangements)])
        return rows, np.concatenate([x.starts[offset] for x in arrangements])
