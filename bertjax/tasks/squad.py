"""SQuAD 1.1 and 2.0: answers to questions as spans of a paragraph (Devlin et al. 2019, sections 4.2 and 4.3).

A long paragraph is split into overlapping windows, each preceded by the question; the answer is the best span of all
windows. Sizes and rules are those of Google's run_squad.py.
"""

import collections
import dataclasses
import json
from collections.abc import Iterable, Iterator, Sequence
from typing import Annotated, NamedTuple, NotRequired, TypedDict

import msgspec
import numpy as np
from etils import epath

from bertjax.config import UserError
from bertjax.data.batches.examples import Examples
from bertjax.data.documents.tables import TFDS, cell, column, read_text, read_tfds
from bertjax.files import parse_json
from bertjax.interop.pretrained import Pretrained
from bertjax.tasks import metrics, output_layers
from bertjax.tasks.finetuning import Dataset, FineTuningTask, InputForm, Split
from bertjax.tasks.output_layers import OutputLayer
from bertjax.tasks.overlap import seen_in_training
from bertjax.tasks.pairs import window_starts
from bertjax.text.tokenizer import Encoding, Tokenizer
from bertjax.validation import at_least_one, one_of, require

VERSIONS = ("v1.1", "v2.0")
N_BEST, MAX_ANSWER_TOKENS = 20, 30
MOST_NAMED = 5  # questions that a message names
THRESHOLD = "null_threshold"  # null odds above which the answer is empty, tuned on the dev set of v2.0
NO_SPAN = float(np.finfo(np.float32).max)  # null odds if no span was found; finite, for JSON


@dataclasses.dataclass(frozen=True)
class Question:
    """A question; `starts` are character offsets in `context`. `answers` is empty if there are none or unknown."""

    name: str
    text: str
    context: str
    answers: tuple[str, ...] = ()
    starts: tuple[int, ...] = ()


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
        train, dev = (read_examples(data.path, split) for split in ("train", "validation"))
    else:
        train, dev = (read(find_file(data.path, name, data.version)) for name in ("train", "dev"))
    train, notes = _well_placed(data, train, dev)
    if data.version == "v1.1" and not all(question.answers for question in (*train, *dev)):
        raise UserError("config.data.version = 'v1.1': the data has questions without an answer; use squad.py:v2.0")
    sizes = dict(
        max_seq_length=config.max_seq_length, doc_stride=data.doc_stride, max_query_length=data.max_query_length
    )
    encoded = encode(train, tokenizer, **sizes, with_labels=True)
    dev_examples, dev_windows, dev_cut, *_ = encode(dev, tokenizer, **sizes, with_labels=False)
    notes += encoded.notes(train, data.max_query_length)
    notes += (f"{dev_cut} dev questions truncated to {data.max_query_length} tokens",) if dev_cut else ()
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
        return {name: json.dumps(content, ensure_ascii=False, indent=1) + "\n" for name, content in written.items()}

    return Split(examples, score, decide, files, read_logits)


def labelled(source: Pretrained, path: str) -> tuple[OutputLayer, Split]:
    """Returns the output layer, and the questions in a file of SQuAD's format with how they are scored."""
    questions, version = read(path), source.settings.data.version
    if version == "v1.1" and not all(question.answers for question in questions):
        raise UserError(f"{path}: has questions without an answer; the run is one on v1.1, which has none")
    examples, windows, *_ = encode(questions, source.tokenizer, **_sizes(source), with_labels=False)
    return output_layers.spans(), _split(questions, examples, windows, version, source.decided.get(THRESHOLD, np.inf))


def find_file(folder: str, name: str, version: str) -> epath.Path:
    """Returns the file of a split. Raises `UserError` if there is none."""
    path = epath.Path(folder) / f"{name}-{version}.json"
    if not path.exists():
        raise UserError(f"config.data.path = {folder!r}: no {path.name} in it")
    return path


class _Answer(TypedDict):
    text: str
    answer_start: Annotated[int, msgspec.Meta(ge=0)]


class _Asked(TypedDict):
    id: str | int
    question: str
    answers: NotRequired[list[_Answer]]
    is_impossible: NotRequired[bool]


class _Paragraph(TypedDict):
    context: str
    qas: list[_Asked]


class _Article(TypedDict):
    paragraphs: list[_Paragraph]


class _File(TypedDict):
    """A SQuAD file."""

    data: list[_Article]


def read(path: epath.PathLike, with_answers: bool = True) -> list[Question]:
    """Reads a SQuAD file. Raises `UserError` if its format is invalid."""
    questions = []
    try:
        content = parse_json(read_text(path), _File)
    except ValueError as error:
        raise UserError(f"{path}: not in SQuAD's format ({error})") from None
    for paragraph in (paragraph for article in content["data"] for paragraph in article["paragraphs"]):
        for asked in paragraph["qas"]:
            is_impossible = asked.get("is_impossible", False)
            given = asked.get("answers", []) if with_answers and not is_impossible else []
            if with_answers and not given and not is_impossible:
                raise UserError(f"{path}: question {asked['id']} has neither an answer nor is_impossible")
            answers, starts = (tuple(answer[field] for answer in given) for field in ("text", "answer_start"))
            questions.append(Question(str(asked["id"]), asked["question"], paragraph["context"], answers, starts))
    return _checked(path, questions)


def read_examples(path: str, split: str) -> list[Question]:
    """Reads a split of "tfds:squad/v1.1" or "tfds:squad/v2.0"."""
    questions = []
    for row in read_tfds(path, split):
        given = cell(row, "answers")
        question, context = column(row, "question"), column(row, "context")
        answers = tuple(given["text"]), tuple(given["answer_start"])
        questions.append(Question(column(row, "id"), question, context, *answers))
    return _checked(f"{path}, {split}", questions)


def _checked(path: epath.PathLike, questions: list[Question]) -> list[Question]:
    """Returns the questions. Raises `UserError` for no questions or duplicate ids."""
    if not questions:
        raise UserError(f"{path}: no question in it")
    seen = set()
    for question in questions:
        if question.name in seen:
            raise UserError(f"{path}: two questions have the id {question.name}")
        seen.add(question.name)
    return questions


def _well_placed(data, train: list[Question], dev: list[Question]) -> tuple[list[Question], tuple[str, ...]]:
    """Returns the questions to train on, and lines to print about answers that are not at their `answer_start`.

    Questions with such an answer are left out of training; scoring needs no places. Raises `UserError` if there is one
    and `data.on_bad_answer` is not to skip them.
    """
    kept, notes = [question for question in train if not _misplaced(question)], []
    for name, side in (("training", train), ("dev", dev)):
        if not (bad := [question for question in side if _misplaced(question)]):
            continue
        named = ", ".join(question.name for question in bad[:MOST_NAMED])
        found = f"{len(bad)} {name} questions have an answer that is not at its answer_start: {named}"
        found += f" and {len(bad) - MOST_NAMED} more" if len(bad) > MOST_NAMED else ""
        if _on_bad_answer(data) == "stop":
            text, start = _misplaced(bad[0])[0]
            raise UserError(
                f"{data.path}: {found} (there, {text[:60]!r} is not at character {start}); mend them, or leave such "
                f"questions out of training with --config.data.on_bad_answer=skip"
            )
        notes.append(f"{found}; {'left out' if side is train else 'scored all the same'}")
    if not kept:
        raise UserError(f"{data.path}: no training question has all its answers at their answer_start")
    return kept, tuple(notes)


def _misplaced(question: Question) -> list[tuple[str, int]]:
    """Returns the answers that the paragraph does not have where they should start."""
    places = zip(question.answers, question.starts)
    return [(text, start) for text, start in places if question.context[start : start + len(text)] != text]


def _on_bad_answer(data) -> str:
    return data.get("on_bad_answer", "stop")


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
            text = question.context[offsets[answer[0], 0] : offsets[answer[1], 1]]
            exact += text == question.answers[0]
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
        for score, start, end in sorted(found[index], reverse=True):
            text = question.context[start:end]
            if text not in seen and len(best) < N_BEST:
                seen.add(text)
                best.append({"text": text, "start": start, "end": end, "score": score})
        if not best:  # an empty paragraph, or no likely end after a likely start
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
    questions, threshold = read(path, with_answers=False), source.decided.get(THRESHOLD, np.inf)
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
    bad = _on_bad_answer(config.data)
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
