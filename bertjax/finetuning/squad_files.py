"""Questions in SQuAD's files, and which of their answers are where the files say."""

import dataclasses
from typing import Annotated, NotRequired, TypedDict

import msgspec
from etils import epath

from bertjax.common.errors import UserError
from bertjax.common.files import parse_texts
from bertjax.data.corpus.tables import cell, column, read_text, read_tfds

MOST_NAMED = 5  # questions that a message names


@dataclasses.dataclass(frozen=True)
class Question:
    """A question; `starts` are character offsets in `context`. `answers` is empty if there are none or unknown."""

    name: str
    text: str
    context: str
    answers: tuple[str, ...] = ()
    starts: tuple[int, ...] = ()


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
        content = parse_texts(read_text(path), _File)
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


def well_placed(data, train: list[Question], dev: list[Question]) -> tuple[list[Question], tuple[str, ...]]:
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
        if on_bad_answer(data) == "stop":
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


def on_bad_answer(data) -> str:
    """Returns what is to be done with such questions: stop or skip."""
    return data.get("on_bad_answer", "stop")
