"""Encodes questions with windows of their paragraphs, and reads answers from logits.

A long paragraph is split into overlapping windows, each preceded by the question; the answer is the best span of all
windows. Sizes and rules are as in run_squad.py of Google.
"""

import collections
import dataclasses
import itertools
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

import numpy as np
from ml_collections import ConfigDict

from bertjax.data.loading.examples import Examples
from bertjax.finetuning import metrics
from bertjax.finetuning.encoding import window_starts
from bertjax.finetuning.squad_files import Question
from bertjax.interop.pretrained import Pretrained
from bertjax.text.tokenizer import Encoding, Tokenizer
from bertjax.text.words import whole_characters

N_BEST, MAX_ANSWER_TOKENS = 20, 30
NO_SPAN = float(np.finfo(np.float32).max)  # null odds if there is no span; finite, for JSON


class WindowSizes(NamedTuple):
    """The sizes of sequences.

    Attributes:
      max_seq_length: the number of tokens of a sequence.
      doc_stride: the number of tokens from the beginning of a window to the beginning of the next window.
      max_query_length: the largest number of tokens of a question; longer questions are truncated.
    """

    max_seq_length: int
    doc_stride: int
    max_query_length: int

    @classmethod
    def from_config(cls, config: ConfigDict) -> "WindowSizes":
        """Returns the sizes of a config."""
        return cls(config.max_seq_length, config.data.doc_stride, config.data.max_query_length)

    @classmethod
    def from_checkpoint(cls, source: Pretrained) -> "WindowSizes":
        """Returns the sizes of the run of a checkpoint; for other formats, the sizes of run_squad.py."""
        longest, data = source.max_seq_length, source.settings.get("data", {})
        query_length = min(data.get("max_query_length", 64), max_query_tokens(longest))
        return cls(longest, data.get("doc_stride", 128), query_length)


def max_query_tokens(longest: int) -> int:
    """Returns the largest number of tokens of a question that leaves room for some tokens of the paragraph."""
    return max(1, longest - 8)


@dataclasses.dataclass(frozen=True)
class Window:
    """A part of a paragraph, encoded after the question.

    Attributes:
      question: index of the question.
      first: index in the sequence of the first token of the part.
      none: index of [CLS], which stands for "no answer".
      offsets: `[tokens, 2]`: start and end characters in the paragraph of each token of the part.
      is_best: `[tokens]` booleans: whether this window has the most context of the token (see `best_windows`).
    """

    question: int
    first: int
    none: int
    offsets: np.ndarray
    is_best: np.ndarray


class EncodedQuestions(NamedTuple):
    """The encoded windows of questions.

    Attributes:
      examples: one example per window.
      cut: number of questions that were truncated.
      exact: number of first answers that start and end at token boundaries.
      apart: number of first answers that no window contains in full.
    """

    examples: Examples
    windows: list[Window]
    cut: int
    exact: int
    apart: int

    def notes(self, questions: Sequence[Question], max_query_length: int) -> tuple[str, ...]:
        """Returns lines to print."""
        answerable = sum(bool(question.answers) for question in questions)
        lines = [f"{len(questions)} training questions, {answerable} with an answer, in {len(self.windows)} windows"]
        if within := answerable - self.exact:
            lines.append(f"{within} answers start or end within a token; training uses the whole token")
        if self.apart:
            lines.append(f'{self.apart} answers do not fit in any window; training uses "no answer"')
        if self.cut:
            lines.append(f"{self.cut} questions truncated to {max_query_length} tokens")
        return tuple(lines)


def encode_question_windows(
    questions: Sequence[Question], tokenizer: Tokenizer, sizes: WindowSizes, with_labels: bool
) -> EncodedQuestions:
    """Encodes the windows of all questions.

    The labels `[2]` of a window are the indices of the first and the last token of the question's first answer. If the
    window does not contain this answer, both labels are the index of [CLS].
    """
    queries = tokenizer.encode_ids([question.text for question in questions])
    input_ids, token_types, labels, windows, exact, apart = [], [], [], [], 0, 0
    for index, (question, query, paragraph) in enumerate(zip(questions, queries, _paragraphs(questions, tokenizer))):
        query = query[: sizes.max_query_length]
        first = len(tokenizer.begin) + len(query) + len(tokenizer.between)
        room = sizes.max_seq_length - first - len(tokenizer.end)
        offsets = np.array(paragraph.offsets, np.int32).reshape(-1, 2)
        starts = window_starts(len(paragraph.ids), room, sizes.doc_stride)
        best = best_windows(len(paragraph.ids), starts, room)
        answer = token_span(offsets, question.starts[0], len(question.answers[0])) if question.answers else None
        if answer is not None:
            place = whole_characters(question.context, offsets[answer[0], 0], offsets[answer[1], 1])
            exact += question.context[slice(*place)] == question.answers[0]
        contains_answer = []
        for number, start in enumerate(starts):
            ids = paragraph.ids[start : start + room]
            input_ids.append(np.array(tokenizer.framed(query, ids), np.int32))
            size = len(input_ids[-1])
            token_types.append(tokenizer.token_types(size, size - first))
            part, none = slice(start, start + len(ids)), tokenizer.cls_place(size)
            windows.append(Window(index, first, none, offsets[part], best[part] == number))
            if answer is not None and start <= answer[0] and answer[1] < start + len(ids):
                labels.append([token - start + first for token in answer])
            else:
                labels.append([none, none])
            contains_answer.append(labels[-1] != [none, none])
        apart += bool(question.answers) and not any(contains_answer)
    cut = sum(len(query) > sizes.max_query_length for query in queries)
    examples = Examples(input_ids, token_types, np.array(labels, np.int32) if with_labels else None)
    return EncodedQuestions(examples, windows, cut, exact, apart)


def _paragraphs(questions: Sequence[Question], tokenizer: Tokenizer) -> Iterable[Encoding]:
    """Yields the encoded paragraph of each question. Consecutive questions about a paragraph share the encoding."""
    for context, group in itertools.groupby(questions, key=lambda question: question.context):
        encoding = tokenizer.encode(context)
        yield from (encoding for _ in group)


def best_windows(tokens: int, starts: Sequence[int], room: int) -> np.ndarray:
    """Returns the window with the most context for each token, `[tokens]` (run_squad._check_is_max_context).

    The context of a token is the smaller number of tokens on either side; longer windows win ties.
    """
    position = np.arange(tokens)
    scores = []
    for start in starts:
        end = min(start + room, tokens)
        left, right = position - start, end - 1 - position
        inside = (left >= 0) & (right >= 0)
        scores.append(np.where(inside, np.minimum(left, right) + 0.01 * (end - start), -np.inf))
    return np.argmax(scores, axis=0)


def token_span(offsets: np.ndarray, start: int, length: int) -> tuple[int, int] | None:
    """Returns the first and last token that overlap the characters `[start, start + length)`; None if no token does."""
    inside = np.flatnonzero((offsets[:, 1] > start) & (offsets[:, 0] < start + length))
    return (int(inside[0]), int(inside[-1])) if len(inside) else None


def answers(
    questions: Sequence[Question], windows: Sequence[Window], logits: Sequence[np.ndarray]
) -> dict[str, tuple[list[dict], float]]:
    """Returns {name of the question: (best answers, null odds)}, with the best answer first.

    An answer has `text`, `start` and `end` characters, `probability` among the best answers, and `score`. The null odds
    are the score of "no answer" minus the score of the best answer. `logits` are `[tokens, 2]` per window.
    """
    spans: dict[int, list] = collections.defaultdict(list)
    null: dict[int, float] = {}
    for window, scores in zip(windows, logits):
        null[window.question] = min(null.get(window.question, np.inf), float(scores[window.none].sum()))
        spans[window.question] += _spans(window, scores)
    result: dict[str, tuple[list[dict], float]] = {}
    for index, question in enumerate(questions):
        best: list[dict[str, Any]] = []
        seen: set[str] = set()
        for score, *place in sorted(spans[index], reverse=True):
            start, end = whole_characters(question.context, *place)  # A token can be a part of a character.
            text = question.context[start:end]
            if text and text not in seen and len(best) < N_BEST:
                seen.add(text)
                best.append({"text": text, "start": start, "end": end, "score": score})
        if not best:  # The paragraph has no text, or no likely end follows a likely start.
            result[question.name] = ([], NO_SPAN)
            continue
        for answer, share in zip(best, metrics.softmax([answer["score"] for answer in best])):
            answer["probability"] = float(share)
        result[question.name] = (best, null[index] - best[0]["score"])
    return result


def _spans(window: Window, scores: np.ndarray) -> list[tuple[float, int, int]]:
    """Returns (score, start, end) of the most likely answers in a window, in characters of the paragraph."""
    start, end = (scores[window.first : window.first + len(window.offsets), side] for side in (0, 1))
    spans = []
    for i in np.argsort(-start, kind="stable")[:N_BEST]:
        if not window.is_best[i]:
            continue
        for j in np.argsort(-end, kind="stable")[:N_BEST]:
            if i <= j < i + MAX_ANSWER_TOKENS:
                spans.append((float(start[i] + end[j]), int(window.offsets[i, 0]), int(window.offsets[j, 1])))
    return spans
