"""What a preparation is, and what its workers need to know of it."""

import dataclasses
import functools
from collections.abc import Mapping
from typing import NamedTuple

from bertjax.text import tokenizer
from bertjax.text.tokenizer import Tokenizer

UNFINISHED = "unfinished"  # folder in the output of what is kept between the passes


class RecordShape(NamedTuple):
    """The sequence length and predictions per sequence of one set of records."""

    length: int
    predictions: int


@dataclasses.dataclass(frozen=True)
class Job:
    """The settings that a worker needs.

    Attributes:
      data: `config.data`, as a dict.
      sources: the sources of the corpus that are used.
      tokenizer: arguments of `tokenizer.load`, as pairs.
      work: the folder of what is kept between the passes.
      output: the folder of the records.
    """

    shapes: tuple[RecordShape, ...]
    data: Mapping
    sources: tuple[str, ...]
    vocab_size: int
    fingerprint: str  # the tokenizer's fingerprint
    tokenizer: tuple[tuple[str, object], ...]
    work: str
    output: str


def tokenizer_of(job: Job) -> Tokenizer:
    """Loads the tokenizer of a job, once in a process."""
    return _load(job.tokenizer, job.fingerprint)


@functools.lru_cache(maxsize=1)
def _load(settings: tuple[tuple[str, object], ...], fingerprint: str) -> Tokenizer:
    return tokenizer.load(**dict(settings))
