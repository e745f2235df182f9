"""SQuAD 1.1 and 2.0: answers to questions as spans of a paragraph (Devlin et al. 2019, sections 4.2 and 4.3).

A long paragraph is split into overlapping windows, each preceded by the question; the answer is the best span of all
windows. Sizes and rules are those of Google's run_squad.py.
"""

import collections
import dataclasses
import json
from collections.abc import Iterable, Iterator, Sequence
from typing import NamedTuple

import numpy as np

from bertjax.common.errors import UserError
from bertjax.config.limits import at_least_one, one_of, require
from bertjax.data.corpus.tables import TFDS
from bertjax.data.loading.examples import Examples
from bertjax.finetuning import metrics
from bertjax.finetuning.contamination import seen_in_training
from bertjax.finetuning.encoding import window_starts
from bertjax.finetuning.table_summary import TableSummary
from bertjax.finetuning.task import Dataset, FineTuningTask, InputForm, Split
from bertjax.finetuning.tasks import squad_files
from bertjax.finetuning.tasks.squad_files import Question
from bertjax.inference import output_layers
from bertjax.inference.output_layers import OutputLayer
from bertjax.interop.pretrained import Pretrained
from bertjax.text.tokenizer import Encoding, Tokenizer
from bertjax.text.words import whole_characters
from bertjax.training.checkpoints import workdir

VERSIONS = ("v1.1", "v2.0")
N_BEST, MAX_ANSWER_TOKENS = 20, 30
THRESHOLD = "null_threshold"  # null odds above which the answer is empty, tuned on the dev set of v2.0
NO_SPAN = float(np.finfo(np.float32).max)  # null odds if no span was found; finite, for JSON


@dataclasses.dataclass(frozen=True)
class Window:
    """A part of a paragraph, as it is encoded after its question.

    Args:
      question: index of the question.
      first: index in the sequence of the first token of the part.
      none: index of [CLS], which stands for "no answer".
      offsets: `[tokens, 2]`: start and end characters in the paragraph of each token of the part.
      is_best: `[tokens]` booleans: whether this window shows the token with the most context (see `best_windows`).
    """

    question: int
    first: int
    none: int
    offsets: np.ndarray
    is_best: np.ndarray


class Answers(NamedTuple):
    """The answers to the questions of a dev set.

    Args:
      found: `answers` of each question.
      texts: the final answer to each question; "" for no answer.
      threshold: the odds above which there is no answer, in v2.0.
    """

    found: dict[str, tuple[list[dict], float]]
    texts: dict[str, str]
    threshold: float | None


def load(config, tokenizer: Tokenizer) -> Dataset:
    """Loads train-v*.json and dev-v*.json of the folder, or the splits of TFDS.

    Raises `UserError` for missing or invalid files.
    """
    data = config.data
    if data.path.startswith(TFDS):
        train, dev = (squad_files.read_examples(data.path, split) for split in ("train", "validation"))
    else:
        paths = (squad_files.find_file(data.path, name, data.version) for name in ("train", "dev"))
        train, dev = map(squad_files.read, paths)
    found = len(train)
    train, notes = squad_files.well_placed(data, train, dev)
    if data.version == "v1.1" and not all(question.answers for question in (*train, *dev)):
        raise UserError("config.data.version = 'v1.1': the data has questions without an answer; use squad.py:v2.0")
    sizes = dict(
        max_seq_length=config.max_seq_length, doc_stride=data.doc_stride, max_query_length=data.max_query_length
    )
    encoded = encode(train, tokenizer, **sizes, with_labels=True)
    dev_encoded = encode(dev, tokenizer, **sizes, with_labels=False)
    dev_examples, dev_windows, dev_cut, *_ = dev_encoded
    notes += encoded.notes(train, data.max_query_length)
    notes += (f"{dev_cut} dev questions truncated to {data.max_query_length} tokens",) if dev_cut else ()
    skipped = {"with an answer that is not at its answer_start": found - len(train)}
    for name, side, made, left in (("training", train, encoded, skipped), ("dev", dev, dev_encoded, {})):
        how = dict(rows="questions", skipped=left, parts=2)
        notes += tuple(TableSummary(name, len(side), made.examples, tokenizer, **how).lines(config.max_seq_length))
    asked, asked_in_dev = ([(question.text, question.context) for question in side] for side in (train, dev))
    notes += tuple(seen_in_training(asked, ("dev questions", asked_in_dev)))
    split = _split(dev, dev_examples, dev_windows, data.version)
    unanswerable = sum(not question.answers for question in dev) / len(dev)  # the share that "no answer" gets right
    more = ("exact_match",)
    return Dataset(output_layers.spans(), (), encoded.examples, (split,), "f1", notes, unanswerable, more)


def _split(
    questions: Sequence[Question],
    examples: Examples,
    windows: Sequence[Window],
    version: str,
    threshold: float | None = None,
) -> Split:
    """Returns questions with how their answers are scored.

    `threshold`: the null odds above which there is no answer in v2.0; None: tuned on these questions.
    """
    golds = {question.name: question.answers for question in questions}
    has_unanswerable = version == "v2.0"

    def read_logits(logits: list[np.ndarray]) -> Answers:
        found, used = answers(questions, windows, logits), None
        texts = {name: best[0]["text"] if best else "" for name, (best, _) in found.items()}
        if has_unanswerable:
            odds = {name: null for name, (_, null) in found.items()}
            used = metrics.best_null_threshold(golds, texts, odds)[0] if threshold is None else threshold
            texts = {name: "" if odds[name] > used else text for name, text in texts.items()}
        return Answers(found, texts, used)

    def score(answers: Answers) -> dict[str, float]:
        scores = metrics.squad_scores(golds, answers.texts, version)
        return {name: value / 100 for name, value in scores.items()}

    def decide(answers: Answers) -> dict[str, float]:
        return {THRESHOLD: answers.threshold} if has_unanswerable else {}

    def files(answers: Answers) -> dict[str, str]:
        nbest = {name: best for name, (best, _) in answers.found.items()}
        written = {"predictions.json": answers.texts, "nbest_predictions.json": nbest}
        if has_unanswerable:
            written["null_odds.json"] = {name: null for name, (_, null) in answers.found.items()}
        texts = {name: json.dumps(content, ensure_ascii=False, indent=1) + "\n" for name, content in written.items()}
        rows = []
        for question in (questions[number] for number in workdir.sample_indices(len(questions))):
            right = "; ".join(dict.fromkeys(question.answers))
            rows.append((question.text, right or "no answer", answers.texts[question.name] or "no answer"))
        return texts | workdir.samples_file(rows)

    return Split(examples, score, decide, files, read_logits)


def labelled(source: Pretrained, path: str) -> tuple[OutputLayer, Split]:
    """Returns the output layer, and the questions in a file of SQuAD's format with how they are scored."""
    questions, version = squad_files.read(path), source.settings.data.version
    if version == "v1.1" and not all(question.answers for question in questions):
        raise UserError(f"{path}: has questions without an answer; the run is one on v1.1, which has none")
    examples, windows, *_ = encode(questions, source.tokenizer, **_sizes(source), with_labels=False)
    summary = TableSummary("labelled", len(questions), examples, source.tokenizer, rows="questions", parts=2)
    split = _split(questions, examples, windows, version, source.decided.get(THRESHOLD, np.inf))
    return output_layers.spans(), dataclasses.replace(split, note="\n".join(summary.lines(source.max_seq_length)))


class EncodedQuestions(NamedTuple):
    """The encoded windows of questions.

    Args:
      examples: one per window.
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


def encode(
    questions: Sequence[Question],
    tokenizer: Tokenizer,
    max_seq_length: int,
    doc_stride: int,
    max_query_length: int,
    with_labels: bool,
) -> EncodedQuestions:
    """Encodes the windows of all questions.

    Labels `[2]` are the first and last token of the first answer; both are [CLS] if the window does not contain it.
    """
    asked = tokenizer.encode_ids([question.text for question in questions])
    input_ids, token_types, labels, windows, exact, apart = [], [], [], [], 0, 0
    for index, (question, query, paragraph) in enumerate(zip(questions, asked, _paragraphs(questions, tokenizer))):
        query = query[:max_query_length]
        first = len(tokenizer.begin) + len(query) + len(tokenizer.between)
        room = max_seq_length - first - len(tokenizer.end)
        offsets = np.array(paragraph.offsets, np.int32).reshape(-1, 2)
        starts = window_starts(len(paragraph.ids), room, doc_stride)
        best = best_windows(len(paragraph.ids), starts, room)
        answer = token_span(offsets, question.starts[0], len(question.answers[0])) if question.answers else None
        if answer is not None:
            place = whole_characters(question.context, offsets[answer[0], 0], offsets[answer[1], 1])
            exact += question.context[slice(*place)] == question.answers[0]
        held = False
        for which, start in enumerate(starts):
            ids = paragraph.ids[start : start + room]
            input_ids.append(np.array(tokenizer.framed(query, ids), np.int32))
            size = len(input_ids[-1])
            token_types.append(tokenizer.token_types(size, size - first))
            part, none = slice(start, start + len(ids)), tokenizer.cls_place(size)
            windows.append(Window(index, first, none, offsets[part], best[part] == which))
            inside = answer is not None and start <= answer[0] and answer[1] < start + len(ids)
            held = held or inside
            labels.append([answer[0] - start + first, answer[1] - start + first] if inside else [none, none])
        apart += bool(question.answers) and not held
    cut = sum(len(query) > max_query_length for query in asked)
    examples = Examples(input_ids, token_types, np.array(labels, np.int32) if with_labels else None)
    return EncodedQuestions(examples, windows, cut, exact, apart)


def _paragraphs(questions: Sequence[Question], tokenizer: Tokenizer) -> Iterable[Encoding]:
    """Yields the encoded paragraph of each question; encodes it once for consecutive questions about it."""
    before, encoding = None, None
    for question in questions:
        if question.context is not before:
            before, encoding = question.context, tokenizer.encode(question.context)
        yield encoding


def best_windows(tokens: int, starts: Sequence[int], room: int) -> np.ndarray:
    """`[tokens]`: index of the window with the most context for each token (run_squad._check_is_max_context).

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
    """Returns the first and last token that overlap characters `[start, start + length)`; None if none do."""
    inside = np.flatnonzero((offsets[:, 1] > start) & (offsets[:, 0] < start + length))
    return (int(inside[0]), int(inside[-1])) if len(inside) else None


def answers(
    questions: Sequence[Question], windows: Sequence[Window], logits: Sequence[np.ndarray]
) -> dict[str, tuple[list[dict], float]]:
    """Returns, per question, its best answers, best first, and its null odds.

    An answer has `text`, `start` and `end` characters, `probability` among the best answers, and `score`. The null odds
    are the score of "no answer" minus that of the best answer. `logits` are `[tokens, 2]` per window.
    """
    found: dict[int, list] = collections.defaultdict(list)
    null: dict[int, float] = {}
    for window, scores in zip(windows, logits):
        null[window.question] = min(null.get(window.question, np.inf), float(scores[window.none].sum()))
        found[window.question] += _spans(window, scores)
    result = {}
    for index, question in enumerate(questions):
        best, seen = [], set()
        for score, *place in sorted(found[index], reverse=True):
            start, end = whole_characters(question.context, *place)  # a piece may be a space or a letter of these
            text = question.context[start:end]
            if text and text not in seen and len(best) < N_BEST:
                seen.add(text)
                best.append({"text": text, "start": start, "end": end, "score": score})
        if not best:  # a paragraph without text, or no likely end after a likely start
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


def predict(source: Pretrained, texts: Sequence[tuple[str, ...]]) -> Iterator[dict]:
    """Yields, per question, `answer`, `start` and `end` characters, `probability`, `null_odds`, and `cut` if truncated.

    The answer is empty if the null odds exceed the threshold that was tuned on the dev set.
    """
    questions = [Question(str(i), question, context) for i, (question, context) in enumerate(texts)]
    threshold = source.decided.get(THRESHOLD, np.inf)
    sizes = _sizes(source)
    lengths = [len(ids) for ids in source.tokenizer.encode_ids([question.text for question in questions])]
    found = _answers_by(source, questions, sizes)
    for question, length in zip(questions, lengths):
        best, null = found[question.name]
        is_none = not best or null > threshold
        top = {"text": "", "start": 0, "end": 0, "probability": 0.0} if is_none else best[0]
        yield {
            "answer": top["text"],
            **{name: top[name] for name in ("start", "end", "probability")},
            "null_odds": null if best else None,
            **({"cut": True} if length > sizes["max_query_length"] else {}),
        }


def submission(source: Pretrained, path: str) -> tuple[str, str]:
    """Returns SQuAD's predictions.json for the questions in a file of SQuAD's format, and a summary."""
    questions, threshold = squad_files.read(path, with_answers=False), source.decided.get(THRESHOLD, np.inf)
    found = _answers_by(source, questions, _sizes(source))
    texts = {name: best[0]["text"] if best and null <= threshold else "" for name, (best, null) in found.items()}
    empty = sum(not text for text in texts.values())
    return json.dumps(texts, ensure_ascii=False, indent=1) + "\n", f"{len(texts)} answers, {empty} of them empty,"


def _sizes(source: Pretrained) -> dict[str, int]:
    """Returns the sizes of the checkpoint's run, or those of run_squad.py if unknown."""
    longest, data = source.max_seq_length, source.settings.get("data", {})
    return dict(
        max_seq_length=longest,
        doc_stride=data.get("doc_stride", 128),
        max_query_length=min(data.get("max_query_length", 64), most_query_tokens(longest)),
    )


def _answers_by(source: Pretrained, questions: Sequence[Question], sizes: dict[str, int]) -> dict:
    examples, windows, *_ = encode(questions, source.tokenizer, **sizes, with_labels=False)
    return answers(questions, windows, output_layers.predict(output_layers.spans(), source, examples))


def most_query_tokens(longest: int) -> int:
    """Returns how many tokens of a question leave room for some of its paragraph."""
    return max(1, longest - 8)


def validate(config) -> None:
    query, most = config.data.max_query_length, most_query_tokens(config.max_seq_length)
    one_of(config, "data.version", VERSIONS)
    bad = squad_files.on_bad_answer(config.data)
    require(bad in ("stop", "skip"), "data.on_bad_answer", bad, "choose one of stop, skip")
    at_least_one(config, "data.doc_stride")
    require(1 <= query <= most, "data.max_query_length", query, f"must be 1 to max_seq_length - 8 = {most}")


TASK = FineTuningTask(
    architecture="BertForQuestionAnswering",
    inputs=InputForm(range(2, 3), '"question ||| paragraph"'),
    load=load,
    predict=predict,
    output_layer=lambda source: output_layers.spans(),
    method="answer",
    validate=validate,
    identity=("data.version",),
    submission=submission,
    labelled=labelled,
)
