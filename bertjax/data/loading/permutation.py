"""Draws the order in which the tokens of a sequence are predicted (XLNet; Yang et al. 2019, sections 2.2 and 2.3).

The tokens at the end of the order are predicted. All other tokens have no order, because all tokens see them. The
predicted tokens are chosen as in the released data code of XLNet. First, spans of whole words are selected from the
beginning of a row to the end. A span of n words has a context of `k * n` tokens, some before and some after the span.
The next span follows this context. Then single tokens are selected until the number suffices.
"""

import dataclasses

import numpy as np

from bertjax.data.batch import Batch
from bertjax.data.loading.masking import first_allowed
from bertjax.data.loading.transforms import BatchTransform


@dataclasses.dataclass(frozen=True)
class RandomOrder(BatchTransform):
    """Draws the order in which the tokens of a row are predicted. Each reading of the row draws another order.

    Attributes:
      k: one of k tokens is predicted.
      max_span_words: the largest number of words of a span. Spans of n words have a probability proportional to 1/n.
        0 selects single tokens only.
      max_predictions_per_seq: the largest number of predicted tokens.
      cls_id: the id of [CLS].
      sep_id: the id of [SEP].
      continues_word: `[vocab_size]` booleans: True if a token continues a word.
    """

    k: int
    max_span_words: int
    max_predictions_per_seq: int
    cls_id: int
    sep_id: int
    continues_word: np.ndarray

    def draw(self, rng: np.random.Generator, rows: int, length: int) -> Batch:
        """Returns the random numbers of an order.

        Returns:
          `order` `[rows, length]` uint32: predicted tokens come in ascending order of these numbers. `single_order`
          `[rows, length]` uint32: single tokens are tried in ascending order of these numbers. `span_words`
          `[rows, spans]` uint8, the number of words of each span. `context_shares` `[rows, spans]` float32 from 0 to 1,
          the share of the context that precedes the span.
        """
        # A span has at least one word, and a context of at least k tokens.
        shape = rows, 1 + length // (self.k + 1) if self.max_span_words else 0
        probabilities = 1 / np.arange(1, self.max_span_words + 1)
        bounds = np.cumsum(probabilities[:-1] / probabilities.sum())
        return {
            "order": rng.integers(2**32, size=(rows, length), dtype=np.uint32),
            "single_order": rng.integers(2**32, size=(rows, length), dtype=np.uint32),
            "span_words": 1 + np.searchsorted(bounds, rng.random(shape), "right").astype(np.uint8),
            "context_shares": rng.random(shape, np.float32),
        }

    def __call__(self, batch: Batch, draws: Batch) -> Batch:
        """Returns the `ranks` of `permute`, and the predictions."""
        ids = batch["input_ids"]
        ranks, selected = self.permute(ids, batch["segments"].sum(1), draws)
        is_prediction = np.arange(self.max_predictions_per_seq) < selected.sum(1)[:, None]
        positions, words = np.zeros((2, *is_prediction.shape), np.int32)
        positions[is_prediction], words[is_prediction] = np.nonzero(selected)[1], ids[selected]
        return {
            "ranks": ranks,
            "word_positions": positions,
            "word_ids": words,
            "word_weights": is_prediction.astype(np.float32),
        }

    def permute(self, ids: np.ndarray, sizes: np.ndarray, draws: Batch) -> tuple[np.ndarray, np.ndarray]:
        """Chooses one in `k` of the tokens of each row, at least one token, and the order of the predictions.

        [CLS] and [SEP] count as tokens but are never predicted. A span does not contain [CLS] or [SEP].

        Args:
          ids: `[rows, length]`, padded.
          sizes: `[rows]`, the number of tokens of each row.
          draws: the random numbers, from `draw`.

        Returns:
          `[rows, length]`, the order 1, 2, ... of the predicted tokens, and 0 for all other tokens, such as [CLS] and
          [SEP]; and `[rows, length]` booleans, True for predicted tokens.
        """
        allowed = (ids != self.cls_id) & (ids != self.sep_id)
        allowed &= np.arange(ids.shape[1]) < np.asarray(sizes)[:, None]
        wanted = np.clip(np.rint(sizes / self.k), 1, self.max_predictions_per_seq).astype(np.int64)
        wanted = np.minimum(wanted, allowed.sum(1))
        selected = _select_spans(allowed, self.continues_word[ids], wanted, draws, self.k)

        missing = wanted - selected.sum(1)
        columns = first_allowed(draws["single_order"], allowed & ~selected, int(missing.max(initial=0)))
        _put(selected, columns, missing, True)
        ranks, most = np.zeros(ids.shape, np.int32), int(wanted.max(initial=0))
        _put(ranks, first_allowed(draws["order"], selected, most), wanted, 1 + np.arange(most))
        return ranks, selected


def _put(array: np.ndarray, columns: np.ndarray, counts: np.ndarray, values: np.ndarray | bool) -> None:
    """Writes values to some columns of each row of an array.

    Args:
      array: `[rows, length]`. The function changes this array.
      columns: `[rows, most]`, the columns.
      counts: `[rows]`, the number of columns of each row; the function ignores all further columns.
      values: `[most]`, or one value.
    """
    is_used = np.arange(columns.shape[1]) < counts[:, None]
    array[np.nonzero(is_used)[0], columns[is_used].astype(np.intp)] = np.broadcast_to(values, is_used.shape)[is_used]


def _select_spans(
    allowed: np.ndarray, continues_word: np.ndarray, wanted: np.ndarray, draws: Batch, k: int
) -> np.ndarray:
    """Selects spans of whole words.

    Args:
      allowed: `[rows, length]` booleans.
      continues_word: `[rows, length]` booleans, True for tokens that continue a word.
      wanted: `[rows]`, the largest number of tokens to select in each row.
      draws: the random numbers.
      k: see `RandomOrder`.

    Returns:
      `[rows, length]` booleans, True for selected tokens.
    """
    rows, length = allowed.shape
    # Tokens after the first token of a word. A special token ends a word.
    is_inside = np.zeros((rows, length + 1), bool)
    is_inside[:, 1:-1] = allowed[:, 1:] & allowed[:, :-1] & continues_word[:, 1:]
    is_start = np.pad(allowed, ((0, 0), (0, 1))) & ~is_inside
    next_word, next_end = _next_true(is_start), _next_true(~is_inside)

    row, edges = np.arange(rows), np.zeros((rows, length + 1), np.int8)
    context_start, left = np.zeros(rows, np.int64), wanted.copy()
    for words, context_share in zip(draws["span_words"].T.astype(np.int64), draws["context_shares"].T):
        if not ((context_start < length) & (left > 0)).any():
            break
        context = k * words
        skipped = np.minimum((context_share * context).astype(np.int64), context - 1)
        start = end = next_word[row, np.minimum(context_start + skipped, length)]
        in_span = start < length
        for word in range(int(words.max())):
            word_end = next_end[row, np.minimum(end + 1, length)]
            in_span = in_span & (word < words) & is_start[row, end] & (word_end - start <= left)
            end = np.where(in_span, word_end, end)
        np.add.at(edges, (row, start), end > start)
        np.subtract.at(edges, (row, end), end > start)
        left -= end - start
        # A row is finished if the first word of a span has too many tokens.
        context_start = np.where(end > start, end + context - skipped, length)
    return np.cumsum(edges[:, :-1], axis=1) > 0


def _next_true(mask: np.ndarray) -> np.ndarray:
    """Returns for each column the next column with a True value, or the column itself if its value is True.

    The result is the last column if no True value follows.

    Args:
      mask: `[rows, columns]` booleans.

    Returns:
      `[rows, columns]`.
    """
    last = mask.shape[1] - 1
    columns = np.where(mask, np.arange(last + 1), last)
    return np.minimum.accumulate(columns[:, ::-1], axis=1)[:, ::-1]
