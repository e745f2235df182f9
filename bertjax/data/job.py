"""What the workers of a preparation need to know."""

import dataclasses
import os
from typing import NamedTuple

from bertjax.text import tokenizer
from bertjax.text.tokenizer import Tokenizer

SPLITS = ("train", "heldout")


class Stage(NamedTuple):
    """The sequence length and predictions per sequence of one set of records."""

    length: int
    predictions: int


@dataclasses.dataclass(frozen=True)
class Job:
    """The settings that a worker needs."""

    stages: tuple[Stage, ...]
    data: dict  # config.data
    vocab_size: int
    tokenizer: dict  # arguments of tokenizer.load
    spill: str  # folder
    output: str  # folder


class Worker(NamedTuple):
    job: Job
    tokenizer: Tokenizer


_worker: Worker  # of this process


def start_worker(job: Job) -> None:
    global _worker
    os.environ["TOKENIZERS_PARALLELISM"] = "false"
    _worker = Worker(job, tokenizer.load(**job.tokenizer))


def this_worker() -> Worker:
    return _worker
