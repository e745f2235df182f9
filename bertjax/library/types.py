"""The types of the arguments and results of the public API."""

import os
from collections.abc import Iterable
from typing import Any, TypedDict

Path = str | os.PathLike[str]
Params = dict[str, Any]
Texts = str | Iterable[str]
Parts = str | Iterable[str | tuple[str, ...]]  # texts that may have several parts, such as pairs


class Classified(TypedDict, total=False):
    """The class, the labels or the score of a text or of a pair of texts.

    Attributes:
      label: the class.
      labels: the labels, of a task with several labels per text.
      probabilities: {label: probability}.
      score: the number that a regression task predicts.
      cut: True if the text was truncated.
    """

    label: str
    labels: list[str]
    probabilities: dict[str, float]
    score: float
    cut: bool


class Entity(TypedDict):
    """An entity of a text.

    Attributes:
      type: the type of the entity, such as PER.
      text: the words of the entity.
      start: the index of the first character of the entity in the text.
      end: the index of the character after the entity.
    """

    type: str
    text: str
    start: int
    end: int


class Tagged(TypedDict, total=False):
    """The words of a text with their tags.

    Attributes:
      words: the words.
      tags: the tag of each word.
      offsets: [start, end] of each word in the text, in characters: the first character, and the character after the
        word.
      entities: the entities, if all tags are BIO tags.
    """

    words: list[str]
    tags: list[str]
    offsets: list[list[int]]
    entities: list[Entity]


class Answer(TypedDict, total=False):
    """The answer to a question.

    Attributes:
      answer: the answer; "" if the context has no answer.
      start: the index of the first character of the answer in the context.
      end: the index of the character after the answer.
      probability: the probability of the answer.
      null_odds: the score of no answer minus the score of the best answer; None if the context has no possible answer.
      cut: True if the question was truncated.
    """

    answer: str
    start: int
    end: int
    probability: float
    null_odds: float | None
    cut: bool
