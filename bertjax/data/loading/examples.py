"""Batches of the tokenized examples of a task, either grouped by length to reduce padding, or packed.

All examples are NumPy arrays in memory. The batch of a step is a function of (seed, step, examples) for any number of
hosts.
"""

import bisect
import dataclasses
import functools
import itertools
import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import NamedTuple, Protocol

import numpy as np
from ml_collections import ConfigDict

from bertjax.data.batch import Batch, RowSize, take_rows
from bertjax.data.loading import packing
from bertjax.data.loading.packing import Arrangement, first_in_row, index_in_row
from bertjax.distributed.mesh import Rows

# The padded lengths of batches. Each length costs a compilation; more lengths mean less padding.
LENGTHS = (16, 32, 48, 64, 96, 128, 192, 256, 384, 512)
WINDOW = 16  # the largest number of batches in a window, within which examples are sorted by length
MIN_WINDOWS = 4  # windows of an epoch. In a single window, the same examples would share a batch in every epoch.
COSTLY_LENGTH = 2048  # the length of rows at which attention takes half of the time of models such as BERT-base
NO_STARTS = itertools.repeat(0)  # the starts of arrays that begin a row


class _Places(NamedTuple):
    """The places of examples in packed rows, `[examples]`.

    Attributes:
      examples: the indices of the examples.
      rows: the row of each example, ascending.
      starts: the position of the first token of each example in the row.
      indices: the index of each example among the examples of the row.
    """

    examples: np.ndarray
    rows: np.ndarray
    starts: np.ndarray
    indices: np.ndarray


@dataclasses.dataclass(frozen=True)
class Examples:
    """Tokenized inputs and their labels.

    Attributes:
      input_ids: one `[length]` array per sequence. The sequences of an example with `choices` are consecutive.
      token_types: one `[length]` array per sequence; 0 in sentence A, 1 in sentence B.
      labels: one entry per example: a number, an array of fixed size or, with `per_token`, a `[length]` array that is
        -1 for tokens without a label. None if the labels are unknown.
      choices: the number of sequences per example; 0 is one sequence, in batches without an axis for choices.
      per_token: whether labels and logits are per token.
      teacher_logits: the outputs of a teacher for each example: logits `[classes]` or, with `per_token`, `[length,
        classes]`; embeddings `[texts, width]`; or scores. None without a teacher.
      guide_embeddings: the embeddings of the texts of each example by a guide, `[texts, width]`; None without a guide.
      equal_tokens: whether all batches of training have about the same number of tokens, in place of the same number of
        examples. The batch size is then the mean number of examples of a batch.
    """

    input_ids: list[np.ndarray]
    token_types: list[np.ndarray]
    labels: Sequence | np.ndarray | None = None
    choices: int = 0
    per_token: bool = False
    teacher_logits: Sequence[np.ndarray] | None = None
    guide_embeddings: Sequence[np.ndarray] | None = None
    equal_tokens: bool = False

    def __len__(self) -> int:
        """Returns the number of examples."""
        return len(self.input_ids) // max(1, self.choices)

    @functools.cached_property
    def lengths(self) -> np.ndarray:
        """The length of the longest choice of each example, `[examples]`."""
        return self._sizes.max(1)

    @functools.cached_property
    def tokens(self) -> np.ndarray:
        """The number of tokens of all choices of each example, `[examples]`."""
        return self._sizes.sum(1)

    @property
    def _sizes(self) -> np.ndarray:
        """The number of tokens of each sequence, `[examples, choices]`."""
        return np.array([len(ids) for ids in self.input_ids], np.int64).reshape(-1, max(1, self.choices))

    @functools.cached_property
    def _labels(self) -> np.ndarray:
        """Labels that are not per token, `[examples, ...]`; 0 if the labels are unknown."""
        labels = np.zeros(len(self), np.int32) if self.labels is None else np.asarray(self.labels)
        return labels.astype(np.float32 if labels.dtype.kind == "f" else np.int32)

    def identifying_arrays(self) -> Iterator[np.ndarray]:
        """Yields int32 arrays that identify the examples: the ids of the tokens."""
        yield from self.input_ids

    def with_teacher(self, targets: Sequence[np.ndarray]) -> "Examples":
        """Returns the examples with the outputs of a teacher, see `teacher_logits`."""
        return dataclasses.replace(self, teacher_logits=targets)

    def make_order(self, batch_size: int, seed: int, longest: int, multiple: int, packs: bool) -> "Order":
        """Returns the assignment of the examples to the batches of training.

        Args:
          batch_size: examples of a batch, see `equal_tokens`.
          seed: the seed of the order.
          longest: the largest length of a row.
          multiple: the number of rows of a batch is a multiple of this number.
          packs: whether examples share rows.
        """
        if packs:
            return PackedOrder(self, batch_size, seed, longest, multiple)
        if self.equal_tokens:
            return TokenOrder(self, batch_size, seed, longest, multiple)
        return TrainingOrder(self, batch_size, seed, longest)

    def batch(self, rows: np.ndarray, length: int) -> Batch:
        """Returns a padded batch of some examples.

        Args:
          rows: `[rows]`, the example of each row; -1 is a row of padding, with weight 0.
          length: the padded length.

        Returns:
          `input_ids`, `segments`, `token_types` `[rows, length]` or `[rows, choices, length]`; `labels` and `weights`
          `[rows, ...]`, or per token `[rows, length]`; with a teacher also `teacher_logits`, and with a guide
          `guide_embeddings`.
        """
        choices, weights = max(1, self.choices), (rows >= 0).astype(np.float32)
        used = np.flatnonzero(rows >= 0)
        places, sequences = ((x[:, None] * choices + np.arange(choices)).ravel().tolist() for x in (used, rows[used]))

        def padded(arrays: Iterable, padding: int = 0) -> np.ndarray:
            return _fill(np.full((len(rows) * choices, length), padding, np.int32), places, NO_STARTS, arrays)

        ids = [self.input_ids[sequence] for sequence in sequences]
        batch = {
            "input_ids": padded(ids),
            "segments": padded(map(np.ones_like, ids)),
            "token_types": padded(self.token_types[sequence] for sequence in sequences),
        }
        if self.choices:
            batch = {name: values.reshape(len(rows), choices, length) for name, values in batch.items()}
        if self.per_token and self.labels is not None:
            labels = padded((self.labels[sequence] for sequence in sequences), padding=-1)
            weights = weights[:, None] * (labels >= 0)
            labels = np.maximum(labels, 0)
        else:
            labels = self._labels[np.maximum(rows, 0)]
        batch |= {"labels": labels, "weights": weights}
        for name, outputs in self._model_outputs.items():
            shape, selected = self._output_shape(outputs), (outputs[example] for example in rows[used])
            batch[name] = _fill(np.zeros((*weights.shape, *shape), np.float32), used, NO_STARTS, selected)
        return batch

    @property
    def _model_outputs(self) -> dict[str, Sequence[np.ndarray]]:
        """The outputs of a teacher and of a guide, by the names of their arrays in a batch."""
        outputs = {"teacher_logits": self.teacher_logits, "guide_embeddings": self.guide_embeddings}
        return {name: arrays for name, arrays in outputs.items() if arrays is not None}

    def _output_shape(self, outputs: Sequence[np.ndarray]) -> tuple[int, ...]:
        """Returns the shape of the outputs for an example or, with `per_token`, for a token."""
        return outputs[0].shape[self.per_token :]

    def packed(self, examples: np.ndarray, rows: np.ndarray, starts: np.ndarray, count: int, row: RowSize) -> Batch:
        """Packs examples into rows. The choices of an example are adjacent.

        Args:
          examples: `[examples]`, the indices of the examples; -1 at the end is padding.
          rows: `[examples]`, the row of each example, see `packing.Arrangement`.
          starts: `[examples]`, the position of the first token of each example in the row.
          count: the number of rows.
          row: the size of a row.

        Returns:
          `input_ids`, `segments`, `token_types`, `positions` `[count, tokens]`, where `segments` numbers the
          sequences of a row from 1; `first_tokens` `[count, sequences]` or `[count, sequences, choices]`; `labels` and
          `weights` `[count, sequences, ...]`, or per token `[count, tokens]`; `dropout_rows` `[count]`; with a teacher
          also `teacher_logits` `[count, sequences or tokens, ...]`, and with a guide `guide_embeddings`.
        """
        is_example = examples >= 0
        examples, rows, starts = examples[is_example], rows[is_example], starts[is_example]
        places = _Places(examples, rows, starts, index_in_row(rows))
        batch = self._packed_tokens(places, count, row) | self._packed_labels(places, count, row)
        for name, outputs in self._model_outputs.items():
            batch[name] = self._packed_outputs(outputs, places, count, row)
        batch["dropout_rows"] = first_in_row(np.arange(len(rows)), rows, count)
        return batch

    def _packed_tokens(self, places: _Places, count: int, row: RowSize) -> Batch:
        """Returns the packed arrays of tokens, and `first_tokens`."""
        choices = max(1, self.choices)
        names = ("input_ids", "segments", "token_types", "positions")
        tokens = {name: np.zeros((count, row.tokens), np.int32) for name in names}
        first_tokens = np.zeros((count, row.sequences, choices), np.int32)
        for example, row_number, start, index in zip(*places):
            for choice in range(choices):
                first_tokens[row_number, index, choice] = start
                ids = self.input_ids[example * choices + choice]
                span = (row_number, slice(start, start + len(ids)))
                tokens["input_ids"][span] = ids
                tokens["segments"][span] = index * choices + choice + 1
                tokens["token_types"][span] = self.token_types[example * choices + choice]
                tokens["positions"][span] = np.arange(len(ids))
                start += len(ids)
        return tokens | {"first_tokens": first_tokens if self.choices else first_tokens[..., 0]}

    def _packed_labels(self, places: _Places, count: int, row: RowSize) -> Batch:
        """Returns the packed `labels` and `weights`."""
        examples, rows, starts, indices = places
        if self.per_token:
            labels = np.full((count, row.tokens), -1, np.int32)
            if self.labels is not None:
                _fill(labels, rows, starts, (self.labels[example] for example in examples))
            return {"labels": np.maximum(labels, 0), "weights": (labels >= 0).astype(np.float32)}
        labels = np.zeros((count, row.sequences, *self._labels.shape[1:]), self._labels.dtype)
        weights = np.zeros((count, row.sequences), np.float32)
        labels[rows, indices], weights[rows, indices] = self._labels[examples], 1
        return {"labels": labels, "weights": weights}

    def _packed_outputs(self, outputs: Sequence[np.ndarray], places: _Places, count: int, row: RowSize) -> np.ndarray:
        """Returns the packed outputs of a teacher or a guide."""
        shape, selected = self._output_shape(outputs), (outputs[example] for example in places.examples)
        if self.per_token:
            return _fill(np.zeros((count, row.tokens, *shape), np.float32), places.rows, places.starts, selected)
        packed = np.zeros((count * row.sequences, *shape), np.float32)
        _fill(packed, places.rows * row.sequences + places.indices, NO_STARTS, selected)
        return packed.reshape(count, row.sequences, *shape)


def _fill(table: np.ndarray, rows: Iterable[int], starts: Iterable[int], arrays: Iterable) -> np.ndarray:
    """Writes each array into a row of a table, from a start position in the row. Returns the table."""
    for row, start, array in zip(rows, starts, arrays):
        table[row, start : start + len(array)] = array
    return table


def padded_length(length: int, longest: int) -> int:
    """Returns the padded length of a batch.

    Args:
      length: the length of the longest sequence of the batch.
      longest: the largest padded length.
    """
    return min(longest, next((size for size in LENGTHS if size >= length), longest))


def next_power_of_two(number: int) -> int:
    """Returns the least power of two that is at least `number`. Few different shapes need few compilations."""
    return 1 << (int(number) - 1).bit_length()


def steps_per_epoch(examples: int, batch_size: int) -> int:
    """Returns the number of batches per epoch. The last batch of an epoch may be smaller."""
    return math.ceil(examples / batch_size)


def count_steps(config: ConfigDict, train_examples: int) -> int:
    """Returns the number of fine-tuning steps. The last batch of an epoch may be smaller, as in transformers."""
    return max(1, round(config.epochs * steps_per_epoch(train_examples, config.batch_size)))


class Order(Protocol):
    """Assigns examples to the batches of training.

    Attributes:
      steps_per_epoch: the number of batches per epoch.
    """

    steps_per_epoch: int

    def shape(self, step: int) -> tuple[int, int]:
        """Returns the number of rows of a step, counted from 0, with padding, and their length."""

    def batches(self, steps: range, rows: Rows) -> Iterator[Batch]:
        """Yields the batches of steps.

        Args:
          steps: the steps, counted from 0.
          rows: (number of rows) -> the indices of the rows that this host computes.
        """


class TrainingOrder(Order):
    """Assigns examples to the padded batches of training.

    Each epoch is a random permutation of all examples, cut into windows of several batches; the last window may be
    shorter. Within a window, examples of similar length share a batch, and the batches are in random order. If the
    examples do not fill the last batch of an epoch, a random batch of the last window gets the rows of padding.

    Attributes:
      steps_per_epoch: the number of batches per epoch.
      window_steps: the number of batches of a window.
    """

    def __init__(self, examples: Examples, batch_size: int, seed: int, longest: int) -> None:
        """Creates the order.

        Args:
          examples: the training examples.
          batch_size: examples of a batch.
          seed: the seed of the order.
          longest: the largest padded length.
        """
        self._examples, self._batch_size, self._seed, self._longest = examples, batch_size, seed, longest
        self.steps_per_epoch = steps_per_epoch(len(examples), batch_size)
        self.window_steps = max(1, min(WINDOW, self.steps_per_epoch // MIN_WINDOWS))
        self._epoch: Callable[[int], np.ndarray] = functools.lru_cache(2)(self._shuffle)
        self._window: Callable[[int, int], list[np.ndarray]] = functools.lru_cache(2)(self._arrange)

    def rows(self, step: int) -> np.ndarray:
        """Returns the examples of a step, counted from 0, `[rows]`; -1 is padding."""
        epoch, batch = divmod(step, self.steps_per_epoch)
        return self._window(epoch, batch // self.window_steps)[batch % self.window_steps]

    def length(self, step: int) -> int:
        """Returns the padded length of the sequences of a step."""
        rows = self.rows(step)
        return padded_length(int(self._examples.lengths[rows[rows >= 0]].max()), self._longest)

    def shape(self, step: int) -> tuple[int, int]:
        """Returns the number of sequences of a step, with padding, and their padded length."""
        return len(self.rows(step)) * max(1, self._examples.choices), self.length(step)

    def batches(self, steps: range, rows: Rows) -> Iterator[Batch]:
        """Yields the batches of steps, see `Order.batches`."""
        for step in steps:
            examples = self.rows(step)
            yield self._examples.batch(examples[rows(len(examples))], self.length(step))

    def _shuffle(self, epoch: int) -> np.ndarray:
        """Returns the examples of an epoch in random order."""
        return np.random.default_rng([self._seed, 0, epoch]).permutation(len(self._examples))

    def _arrange(self, epoch: int, window: int) -> list[np.ndarray]:
        """Returns the examples of each batch of a window of an epoch, `[rows]`; -1 is padding."""
        size = self.window_steps * self._batch_size
        rows = self._epoch(epoch)[window * size : (window + 1) * size]
        rows = rows[np.argsort(self._examples.lengths[rows], kind="stable")]
        rng = np.random.default_rng([self._seed, 1, epoch, window])
        batches = self._group(rows, math.ceil(len(rows) / self._batch_size), rng)
        return [batches[number] for number in rng.permutation(len(batches))]

    def _group(self, rows: np.ndarray, batches: int, rng: np.random.Generator) -> list[np.ndarray]:
        """Returns the examples of each batch, with rows of padding, `[rows]`.

        Args:
          rows: `[examples]`, the examples of a window, sorted by length.
          batches: the number of batches.
          rng: the generator of random numbers.
        """
        missing = batches * self._batch_size - len(rows)
        # A random batch gets the padding. In the last batch, padding would always accompany the longest examples.
        end = (1 + rng.integers(batches)) * self._batch_size - missing
        return [*np.insert(rows, end, np.full(missing, -1)).reshape(batches, self._batch_size)]


class TokenOrder(TrainingOrder):
    """Assigns examples to padded batches with about equal numbers of tokens, including padding.

    A batch of short examples has more examples than a batch of long examples. `batch_size` is the mean number of
    examples. The windows and the order of the batches are the same as in `TrainingOrder`.
    """

    def __init__(self, examples: Examples, batch_size: int, seed: int, longest: int, multiple: int) -> None:
        """Creates the order, see `Examples.make_order`."""
        super().__init__(examples, batch_size, seed, longest)
        self._multiple = multiple

    def _group(self, rows: np.ndarray, batches: int, rng: np.random.Generator) -> list[np.ndarray]:
        """Returns the examples of each batch, see `TrainingOrder._group`."""
        rows = rows[::-1]
        lengths = [padded_length(length, self._longest) for length in self._examples.lengths[rows].tolist()]
        counts = _counts_of_equal_batches(lengths, batches)
        groups = []
        for group in np.split(rows, np.cumsum(counts)[:-1]):
            padding = packing.round_up_coarsely(len(group), self._multiple) - len(group)
            groups.append(np.pad(group, (0, padding), constant_values=-1))
        return groups


def _counts_of_equal_batches(lengths: Sequence[int], batches: int) -> list[int]:
    """Returns the number of examples of each batch, so that the largest batch has as few tokens as possible.

    Args:
      lengths: the padded length of each example, descending. All examples of a batch have the length of the first.
      batches: the number of batches, at most the number of examples.
    """

    def counts_within(most_tokens: int) -> list[int]:
        """Returns the number of examples of each batch, if a batch has at most `most_tokens` tokens."""
        counts, first = [], 0
        while first < len(lengths):
            counts.append(min(most_tokens // lengths[first], len(lengths) - first))
            first += counts[-1]
        return counts

    limits = range(lengths[0], lengths[0] * math.ceil(len(lengths) / batches))
    counts = counts_within(
        limits.start + bisect.bisect_left(limits, -batches, key=lambda most: -len(counts_within(most)))
    )
    while len(counts) < batches:  # Several numbers of batches can have the same least limit.
        largest = int(np.argmax(counts))
        counts[largest : largest + 1] = [counts[largest] - counts[largest] // 2, counts[largest] // 2]
    return counts


def row_lengths(longest_example: int, longest: int) -> list[int]:
    """Returns the lengths of packed rows that hold the longest example; its length alone, if no length fits.

    Args:
      longest_example: the tokens of the longest example.
      longest: the largest length to choose. A longer example makes the rows as long as the example.
    """
    largest = max(longest, longest_example)
    return [length for length in LENGTHS if longest_example <= length <= largest] or [longest_example]


def cost_of_row(row: RowSize) -> float:
    """Returns the time of a row, in the time of a token without attention."""
    return row.tokens * (1 + row.tokens / COSTLY_LENGTH)


def choose_row_size(examples: Examples, batch_size: int, longest: int) -> RowSize:
    """Returns the size of packed rows that costs the least time in training.

    Args:
      examples: the examples to pack.
      batch_size: examples of a batch.
      longest: see `row_lengths`.

    The size does not depend on the devices and the microbatches, so that neither do the batches.
    """

    def cost(row: RowSize) -> float:
        rows = packing.best_fit(examples.tokens, row, np.random.default_rng(0)).max() + 1
        rows = math.ceil(rows * batch_size / max(len(examples), batch_size))
        return rows * cost_of_row(row)

    lengths, mean = row_lengths(int(examples.tokens.max()), longest), examples.tokens.mean()
    return min((RowSize(length, next_power_of_two(math.ceil(2 * length / mean))) for length in lengths), key=cost)


class PackedOrder(Order):
    """Assigns examples to the packed batches of training. `packing.arrange` arranges an epoch as one window.

    Attributes:
      steps_per_epoch: the number of batches per epoch.
      row: the size of a row.
      arrangement: (epoch) -> the arrangement of the epoch.
    """

    def __init__(self, examples: Examples, batch_size: int, seed: int, longest: int, multiple: int) -> None:
        """Creates the order, see `Examples.make_order`."""
        self._examples, self._batch_size, self._seed, self._multiple = examples, batch_size, seed, multiple
        self.steps_per_epoch = steps_per_epoch(len(examples), batch_size)
        self.row = choose_row_size(examples, batch_size, longest)
        self.arrangement: Callable[[int], Arrangement] = functools.lru_cache(2)(self._arrange)

    def _arrange(self, epoch: int) -> Arrangement:
        rng = np.random.default_rng([self._seed, 0, epoch])
        examples = self._examples
        return packing.arrange(examples.tokens, self._batch_size, self.row, rng, examples.equal_tokens)

    def shape(self, step: int) -> tuple[int, int]:
        """Returns the number of rows of a step, with padding, and their length."""
        row_count = self.arrangement(step // self.steps_per_epoch).row_count
        return packing.round_up(row_count, self._multiple), self.row.tokens

    def batches(self, steps: range, rows: Rows) -> Iterator[Batch]:
        """Yields the batches of steps, see `Order.batches`."""
        for step in steps:
            epoch, index = divmod(step, self.steps_per_epoch)
            arrangement = self.arrangement(epoch)
            count, _ = self.shape(step)
            batch = self._examples.packed(
                arrangement.order[index], arrangement.rows[index], arrangement.starts[index], count, self.row
            )
            host_rows = rows(count)
            yield batch if len(host_rows) == count else take_rows(batch, host_rows)
