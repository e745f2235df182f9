"""The settings of a preparation for its workers."""

import dataclasses
import functools
from collections.abc import Mapping
from typing import Any, NamedTuple

from bertjax.text import tokenizer
from bertjax.text.tokenizer import Tokenizer

UNFINISHED = "unfinished"  # folder in the output for files between the passes


class RecordShape(NamedTuple):
    """The sequence length and predictions per sequence of one set of records."""

    length: int
    predictions: int


PartAndShape = tuple[str, RecordShape]  # a part of the records, see `selection`, and the shape of the sequences


@dataclasses.dataclass(frozen=True)
class Job:
    """The settings that a worker needs.

    Attributes:
      shapes: the shapes of the records.
      data: `config.data`, as a dict.
      sources: the used sources of the corpus.
      vocab_size: the vocabulary size of the tokenizer.
      fingerprint: the fingerprint of the tokenizer.
      tokenizer: the arguments of `tokenizer.load_tokenizer`, as pairs.
      work: the folder for files between the passes.
      output: the folder of the records.
    """

    shapes: tuple[RecordShape, ...]
    data: Mapping
    sources: tuple[str, ...]
    vocab_size: int
    fingerprint: str
    tokenizer: tuple[tuple[str, Any], ...]
    work: str
    output: str


def tokenizer_of_job(job: Job) -> Tokenizer:
    """Returns the tokenizer of a job. Loads it once per process."""
    return _load(job.tokenizer, job.fingerprint)


@functools.lru_cache(maxsize=1)
def _load(settings: tuple[tuple[str, Any], ...], fingerprint: str) -> Tokenizer:
    return tokenizer.load_tokenizer(**dict(settings))
