"""Reads the questions of SQuAD files, and checks the positions of the answers."""

import dataclasses
from typing import Annotated, NotRequired, TypedDict

import msgspec
from etils import epath
from ml_collections import ConfigDict

from bertjax.common.errors import UserError
from bertjax.common.files import parse_texts
from bertjax.data.corpus.tables import cell, column, missing_file, read_text, read_tfds

MOST_NAMED = 5  # the largest number of questions in a message


@dataclasses.dataclass(frozen=True)
class Question:
    """A question. `starts` are the character offsets of `answers` in `context`.

    `answers` and `starts` are empty if the question has no answer or if the answers are unknown.
    """

    name: str
    text: str
    context: str
    answers: tuple[str, ...] = ()
    starts: tuple[int, ...] = ()


def find_squad_file(folder: str, name: str, version: str) -> epath.Path:
    """Returns the file of a split. Raises `UserError` if there is none."""
    path = epath.Path(folder) / f"{name}-{version}.json"
    if not path.exists():
        raise missing_file(folder, path.name)
    return path


class _Answer(TypedDict):
    text: str
    answer_start: Annotated[int, msgspec.Meta(ge=0)]


class _Question(TypedDict):
    id: str | int
    question: str
    answers: NotRequired[list[_Answer]]
    is_impossible: NotRequired[bool]


class _Paragraph(TypedDict):
    context: str
    qas: list[_Question]


class _Article(TypedDict):
    paragraphs: list[_Paragraph]


class _File(TypedDict):
    """A SQuAD file."""

    data: list[_Article]


def read_squad(path: epath.PathLike, with_answers: bool = True) -> list[Question]:
    """Reads a SQuAD file. Raises `UserError` if the format of the file is invalid."""
    questions = []
    try:
        content = parse_texts(read_text(path), _File)
    except ValueError as error:
        raise UserError(f"{path}: not in SQuAD's format ({error})") from None
    for paragraph in (paragraph for article in content["data"] for paragraph in article["paragraphs"]):
        for entry in paragraph["qas"]:
            is_impossible = entry.get("is_impossible", False)
            answers = entry.get("answers", []) if with_answers and not is_impossible else []
            if with_answers and not answers and not is_impossible:
                raise UserError(f"{path}: question {entry['id']} has neither an answer nor is_impossible")
            texts, starts = tuple(x["text"] for x in answers), tuple(x["answer_start"] for x in answers)
            questions.append(Question(str(entry["id"]), entry["question"], paragraph["context"], texts, starts))
    return _checked(path, questions)


def read_tfds_squad(path: str, split: str) -> list[Question]:
    """Reads a split of "tfds:squad/v1.1" or "tfds:squad/v2.0"."""
    questions = []
    for row in read_tfds(path, split):
        name, question, context = (column(row, field) for field in ("id", "question", "context"))
        answers = cell(row, "answers")
        questions.append(Question(name, question, context, tuple(answers["text"]), tuple(answers["answer_start"])))
    return _checked(f"{path}, {split}", questions)


def _checked(path: epath.PathLike, questions: list[Question]) -> list[Question]:
    """Returns the questions. Raises `UserError` for no questions or duplicate ids."""
    if not questions:
        raise UserError(f"{path}: has no question; add at least one")
    seen = set()
    for question in questions:
        if question.name in seen:
            raise UserError(f"{path}: two questions have the id {question.name}")
        seen.add(question.name)
    return questions


def well_placed(data: ConfigDict, train: list[Question], dev: list[Question]) -> tuple[list[Question], tuple[str, ...]]:
    """Returns the questions to train on, and lines to print about answers that are not at their `answer_start`.

    Questions with such an answer are left out of training. Scoring does not use positions.

    Args:
      data: `config.data`.
      train: the training questions.
      dev: the dev questions.

    Raises:
      UserError: if there is such an answer, and `data.on_bad_answer` is not "skip"; or if no question is left.
    """
    kept, notes = [question for question in train if not _misplaced(question)], []
    for name, side in (("training", train), ("dev", dev)):
        if not (bad := [question for question in side if _misplaced(question)]):
            continue
        named = ", ".join(question.name for question in bad[:MOST_NAMED])
        problem = f"{len(bad)} {name} questions have an answer that is not at its answer_start: {named}"
        problem += f" and {len(bad) - MOST_NAMED} more" if len(bad) > MOST_NAMED else ""
        if on_bad_answer(data) == "stop":
            text, start = _misplaced(bad[0])[0]
            raise UserError(
                f"{data.path}: {problem} (in the first, {text[:60]!r} is not at character {start}); correct the "
                f"answers, "
                f"or leave such questions out of training with --config.data.on_bad_answer=skip"
            )
        notes.append(f"{problem}; {'left out' if side is train else 'still scored'}")
    if not kept:
        raise UserError(
            f"{data.path}: no training question has all answers at their answer_start; correct answer_start"
        )
    return kept, tuple(notes)


def _misplaced(question: Question) -> list[tuple[str, int]]:
    """Returns the answers that differ from the paragraph at their `answer_start`."""
    places = zip(question.answers, question.starts)
    return [(text, start) for text, start in places if question.context[start : start + len(text)] != text]


def on_bad_answer(data: ConfigDict) -> str:
    """Returns `data.on_bad_answer`: "stop" or "skip"; runs of older versions have no such field."""
    return data.get("on_bad_answer", "stop")
