"""Batches the tokenized examples of a task: grouped by length to reduce padding, or packed.

Everything is in memory, in NumPy. The batch of a step is a function of (seed, step, examples) and does not depend on
the number of hosts.
"""

import dataclasses
import functools
import math
from collections.abc import Iterator, Sequence

import numpy as np

from bertjax.data.batch import Batch, RowSize
from bertjax.data.loading import packing
from bertjax.data.loading.packing import Arrangement, first_in_row, numbers_in_row
from bertjax.distributed.mesh import Rows

# Lengths that batches are padded to. Each costs a compilation; more lengths mean less padding.
LENGTHS = (16, 32, 48, 64, 96, 128, 192, 256, 384, 512)
WINDOW = 16  # batches, at most, within which examples are sorted by length
LEAST_WINDOWS = 4  # least windows per epoch: with one, the same examples would share a batch in every epoch
COSTLY_LENGTH = 2048  # length of rows in which attention takes as long as all else, in models like BERT-base
EVALUATED_TOKENS = 64  # tokens that a packed batch of predictions has for each example
TOKENS = ("input_ids", "segments", "token_types", "positions")  # what packed rows say of each token


@dataclasses.dataclass(frozen=True)
class Examples:
    """Tokenized inputs and their labels.

    Args:
      input_ids: one `[length]` array per sequence; the sequences of an example with `choices` are consecutive.
      token_types: like `input_ids`; 0 in sentence A, 1 in sentence B.
      labels: one per example: a number, an array of fixed size or, with `per_token`, a `[length]` array in which -1
        marks tokens without a label. None if the labels are unknown.
      choices: sequences per example; 0 means one, and batches have no choices dimension.
      teacher_logits: what a teacher says of each example: `[classes]` or, with `per_token`, `[length, classes]`; of
        vectors `[texts, width]`, or scores; None: there is no teacher.
    """

    input_ids: list[np.ndarray]
    token_types: list[np.ndarray]
    labels: Sequence | None = None
    choices: int = 0
    per_token: bool = False
    teacher_logits: Sequence[np.ndarray] | None = None

    def __len__(self) -> int:
        return len(self.input_ids) // max(1, self.choices)

    @functools.cached_property
    def lengths(self) -> np.ndarray:
        """`[examples]`: length of each example in tokens; of its longest choice."""
        return self._sizes.max(1)

    @functools.cached_property
    def tokens(self) -> np.ndarray:
        """`[examples]`: tokens of each example; of all its choices."""
        return self._sizes.sum(1)

    @property
    def _sizes(self) -> np.ndarray:
        """`[examples, sequences]` tokens."""
        return np.array([len(ids) for ids in self.input_ids], np.int64).reshape(-1, max(1, self.choices))

    @functools.cached_property
    def _labels(self) -> np.ndarray:
        """`[examples, ...]` labels that are not per token; 0 if they are unknown."""
        labels = np.zeros(len(self), np.int32) if self.labels is None else np.asarray(self.labels)
        return labels.astype(np.float32 if labels.dtype.kind == "f" else np.int32)

    def batch(self, rows: np.ndarray, length: int) -> Batch:
        """`input_ids`, `segments`, `token_types` `[rows, length]` or `[rows, choices, length]`; `labels`, `weights`.

        A row of -1 is all padding, with weight 0.
        """
        choices, weights = max(1, self.choices), (rows >= 0).astype(np.float32)
        sequences = (rows[:, None] * choices + np.arange(choices)).ravel()  # negative: padding

        def padded(arrays, fill=0):
            out = np.full((len(sequences), length), fill, np.int32)
            for row, i in enumerate(sequences):
                if i >= 0:
                    out[row, : len(arrays[i])] = arrays[i]
            return out

        lengths = np.array([len(self.input_ids[i]) if i >= 0 else 0 for i in sequences])
        batch = {
            "input_ids": padded(self.input_ids),
            "segments": (np.arange(length) < lengths[:, None]).astype(np.int32),
            "token_types": padded(self.token_types),
        }
        if self.choices:
            batch = {name: x.reshape(len(rows), choices, length) for name, x in batch.items()}
        if self.per_token and self.labels is not None:
            labels = padded(self.labels, fill=-1)
            weights = weights[:, None] * (labels >= 0)
            labels = np.maximum(labels, 0)
        else:
            labels = self._labels[np.maximum(rows, 0)]
        batch |= {"labels": labels, "weights": weights}
        if self.teacher_logits is not None:
            batch["teacher_logits"] = found = np.zeros((*weights.shape, *self._taught_shape), np.float32)
            for row, example in enumerate(rows):
                if example >= 0:
                    self._put_teacher_logits(found[row], example)
        return batch

    @property
    def _taught_shape(self) -> tuple[int, ...]:
        """The shape of `teacher_logits` of an example or, with `per_token`, of a token."""
        return self.teacher_logits[0].shape[self.per_token :]

    def _put_teacher_logits(self, place: np.ndarray, example: int) -> None:
        """Writes them to part of an array: that of an example, or of tokens from its first one on."""
        logits = self.teacher_logits[example]
        place[: len(logits)] = logits

    def packed(self, examples: np.ndarray, rows: np.ndarray, starts: np.ndarray, count: int, row: RowSize) -> Batch:
        """Packs examples into `count` rows; -1 at the end is none.

        Args:
          examples, rows, starts: `[examples]`, as in `packing.Arrangement`. The choices of an example lie side by side.

        Returns:
          `input_ids`, `segments`, `token_types`, `positions` `[count, tokens]`, where `segments` numbers the
          sequences of a row from 1; `first_tokens` `[count, sequences]` or `[count, sequences, choices]`; `labels` and
          `weights` `[count, sequences, ...]`, per token `[count, tokens]`; `dropout_rows` `[count]`; and if there is a
          teacher, `teacher_logits` `[count, sequences or tokens, ...]`.
        """
        choices = max(1, self.choices)
        tokens = {name: np.zeros((count, row.tokens), np.int32) for name in TOKENS}
        first_tokens = np.zeros((count, row.sequences, choices), np.int32)
        if self.per_token:
            labels = np.full((count, row.tokens), -1, np.int32)
        else:
            labels = np.zeros((count, row.sequences, *self._labels.shape[1:]), self._labels.dtype)
        weights = np.zeros((count, row.sequences), np.float32)
        taught = {}
        if self.teacher_logits is not None:
            places = row.tokens if self.per_token else row.sequences
            taught["teacher_logits"] = np.zeros((count, places, *self._taught_shape), np.float32)
        there = examples >= 0
        examples, rows, starts = examples[there], rows[there], starts[there]
        for example, own, start, number in zip(examples, rows, starts, numbers_in_row(rows)):
            weights[own, number] = 1
            if not self.per_token:
                labels[own, number] = self._labels[example]
            elif self.labels is not None:
                labels[own, start : start + len(self.labels[example])] = self.labels[example]
            for logits in taught.values():
                self._put_teacher_logits(logits[own, start:] if self.per_token else logits[own, number], example)
            for choice in range(choices):
                ids, types = (each[example * choices + choice] for each in (self.input_ids, self.token_types))
                first_tokens[own, number, choice] = start
                values = (ids, number * choices + choice + 1, types, np.arange(len(ids)))
                for name, value in zip(TOKENS, values):
                    tokens[name][own, start : start + len(ids)] = value
                start += len(ids)
        if self.per_token:
            weights, labels = (labels >= 0).astype(np.float32), np.maximum(labels, 0)
        if not self.choices:
            first_tokens = first_tokens[..., 0]
        dropout_rows = first_in_row(np.arange(len(rows)), rows, count)
        return {
            **tokens,
            **taught,
            "first_tokens": first_tokens,
            "labels": labels,
            "weights": weights,
            "dropout_rows": dropout_rows,
        }


def padded_length(length: int, longest: int) -> int:
    """Returns the padded length of a batch whose longest sequence has `length` tokens; at most `longest`."""
    return min(longest, next((size for size in LENGTHS if size >= length), longest))


def power_of_two(number: int) -> int:
    """Returns the least one that is no smaller: of shapes, each costs a compilation."""
    return 1 << (int(number) - 1).bit_length()


def steps_per_epoch(examples: int, batch_size: int) -> int:
    """Returns the number of batches per epoch; the last one may be partial."""
    return math.ceil(examples / batch_size)


def count_steps(config, train_examples: int) -> int:
    """Returns the steps of fine-tuning. The last batch of an epoch may be smaller, as in transformers' Trainer."""
    return max(1, round(config.epochs * steps_per_epoch(train_examples, config.batch_size)))


class TrainingOrder:
    """Assigns examples to the batches of training.

    Each epoch is a random permutation of all examples, cut into windows of several batches; the last window may be
    shorter. Within a window, examples of similar length share a batch and the batches are in random order. If the
    examples do not fill the last batch of an epoch, a random batch of its last window gets the padding rows.
    """

    def __init__(self, examples: Examples, batch_size: int, seed: int, longest: int):
        self._examples, self._batch_size, self._seed, self._longest = examples, batch_size, seed, longest
        self.steps_per_epoch = steps_per_epoch(len(examples), batch_size)
        self.window_steps = max(1, min(WINDOW, self.steps_per_epoch // LEAST_WINDOWS))
        self._epoch, self._window = functools.lru_cache(2)(self._epoch), functools.lru_cache(2)(self._window)

    def rows(self, step: int) -> np.ndarray:
        """`[batch_size]`: the examples of step `step`, counted from 0; -1 is padding."""
        epoch, batch = divmod(step, self.steps_per_epoch)
        return self._window(epoch, batch // self.window_steps)[batch % self.window_steps]

    def length(self, step: int) -> int:
        """Returns the length that the sequences of the step are padded to."""
        rows = self.rows(step)
        return padded_length(int(self._examples.lengths[rows[rows >= 0]].max()), self._longest)

    def shape(self, step: int) -> tuple[int, int]:
        """Returns how many sequences are computed in a step, and their length."""
        return self._batch_size * max(1, self._examples.choices), self.length(step)

    def batches(self, steps: range, rows: Rows) -> Iterator[Batch]:
        """Yields the batches of `steps`, of which each host computes its `rows`."""
        own = rows(self._batch_size)
        for step in steps:
            yield self._examples.batch(self.rows(step)[own], self.length(step))

    def _epoch(self, number: int) -> np.ndarray:
        return np.random.default_rng([self._seed, 0, number]).permutation(len(self._examples))

    def _window(self, epoch: int, number: int) -> np.ndarray:
        """`[batches, batch_size]`: the examples of a window of an epoch; -1 is padding."""
        size = self.window_steps * self._batch_size
        rows = self._epoch(epoch)[number * size : (number + 1) * size]
        rows = rows[np.argsort(self._examples.lengths[rows], kind="stable")]
        rng = np.random.default_rng([self._seed, 1, epoch, number])
        batches = math.ceil(len(rows) / self._batch_size)
        missing = batches * self._batch_size - len(rows)
        # A random batch gets the padding: in the last one, it would always accompany the longest examples.
        end = (1 + rng.integers(batches)) * self._batch_size - missing
        rows = np.insert(rows, end, np.full(missing, -1)).reshape(batches, self._batch_size)
        return rows[rng.permutation(batches)]


def row_for(examples: Examples, batch_size: int, longest: int, multiple: int) -> RowSize:
    """Returns the rows in which batches of examples cost the least; they hold the longest example.

    Args:
      longest: the longest of the lengths to choose from, besides what the longest example needs.
      multiple: the number of rows is a multiple of it.
    """
    most, mean = int(examples.tokens.max()), examples.tokens.mean()
    lengths = [length for length in LENGTHS if most <= length <= max(longest, most)] or [most]

    def row(length: int) -> RowSize:
        return RowSize(length, power_of_two(math.ceil(2 * length / mean)))

    def cost(row: RowSize) -> float:
        rows = packing.best_fit(examples.tokens, row, np.random.default_rng(0)).max() + 1
        rows = packing.next_multiple(rows * batch_size / max(len(examples), batch_size), multiple)
        return rows * row.tokens * (1 + row.tokens / COSTLY_LENGTH)

    return min(map(row, lengths), key=cost)


class PackedOrder:
    """Assigns examples to the steps of training, packed. Each epoch is arranged as a whole, see `packing.arrange`.

    Args:
      longest, multiple: see `row_for`.
    """

    def __init__(self, examples: Examples, batch_size: int, seed: int, longest: int, multiple: int):
        self._examples, self._batch_size, self._seed, self._multiple = examples, batch_size, seed, multiple
        self.steps_per_epoch = steps_per_epoch(len(examples), batch_size)
        self.row = row_for(examples, batch_size, longest, multiple)
        self.arrangement = functools.lru_cache(2)(self.arrangement)

    def arrangement(self, epoch: int) -> Arrangement:
        rng = np.random.default_rng([self._seed, 0, epoch])
        return packing.arrange(self._examples.tokens, self._batch_size, self.row, rng)

    def shape(self, step: int) -> tuple[int, int]:
        """Returns how many rows are computed in a step, and their length."""
        rows = self.arrangement(step // self.steps_per_epoch).count
        return packing.next_multiple(rows, self._multiple), self.row.tokens

    def batches(self, steps: range, rows: Rows) -> Iterator[Batch]:
        """Yields the batches of `steps`, of which each host computes its `rows`."""
        for step in steps:
            epoch, number = divmod(step, self.steps_per_epoch)
            order, in_rows, starts, _ = self.arrangement(epoch)
            count, _ = self.shape(step)
            batch = self._examples.packed(order[number], in_rows[number], starts[number], count, self.row)
            own = rows(count)
            yield batch if len(own) == count else {name: x[own] for name, x in batch.items()}


def packed_evaluation(
    examples: Examples, batch_size: int, longest: int, multiple: int
) -> Iterator[tuple[np.ndarray, np.ndarray, np.ndarray, int, RowSize]]:
    """Yields the arguments of `Examples.packed` for batches of equal shape in which each example occurs once.

    A batch has `EVALUATED_TOKENS` for each of `batch_size` examples, or fewer if there are fewer; see `row_for`.
    """
    if not len(examples):
        return
    row = row_for(examples, batch_size, longest, multiple)
    pack = packing.best_fit(examples.tokens, row, np.random.default_rng(0))
    rows_of_batch = min(power_of_two(pack.max() + 1), batch_size * EVALUATED_TOKENS / row.tokens)
    count = packing.next_multiple(rows_of_batch, multiple)
    order = np.argsort(pack, kind="stable")
    pack, tokens = pack[order], examples.tokens[order]
    starts = np.cumsum(tokens) - tokens
    starts -= starts[np.searchsorted(pack, pack)]
    for first in range(0, pack[-1] + 1, count):
        some = slice(*np.searchsorted(pack, [first, first + count]))
        yield order[some], pack[some] - first, starts[some], count, row


def evaluation_batches(examples: Examples, batch_size: int, longest: int) -> Iterator[tuple[np.ndarray, int]]:
    """Yields (rows `[batch_size]`, length) so that each example occurs once, longest first; -1 pads the last batch."""
    order = np.argsort(-examples.lengths, kind="stable")
    for first in range(0, len(order), batch_size):
        rows = order[first : first + batch_size]
        length = padded_length(int(examples.lengths[rows].max()), longest)
        yield np.pad(rows, (0, batch_size - len(rows)), constant_values=-1), length
