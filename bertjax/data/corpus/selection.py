"""Cleans the documents of a corpus, assigns them to training or held-out data, and computes numbers of copies.

A document belongs to a part of the records: "train" or "heldout". With several sources, "heldout-0" has the held-out
documents of the first source, and so on, so that each source can be evaluated separately. If the sources are mixed
when the records are read (`data.mix_when=read`), "train-0" has the training documents of the first source.
"""

import collections
import dataclasses
import functools
import os
import shutil
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
from ml_collections import ConfigDict

from bertjax.common.files import replacing
from bertjax.common.progress import Bar, phase
from bertjax.common.workers import in_order
from bertjax.config.lists import mixture_of
from bertjax.data.corpus import cleaning, corpus, reading, sentences
from bertjax.data.corpus.cleaning import Repeats
from bertjax.data.corpus.reading import Document

SPLITS = ("train", "heldout")
MAX_NAMED = 10  # invalid documents of a group that messages name


class Selected(NamedTuple):
    """A document with its part of the records and its number of copies."""

    document: Document
    part: str
    copies: int
    source: str = ""


def is_train(part: str) -> bool:
    """Returns whether a part of the records is for training."""
    return part.startswith("train")


def split_of(part: str, sources: Sequence[str]) -> tuple[str, str]:
    """Returns the split and the source of a part. The source is "" if the part contains all sources."""
    split, _, number = part.partition("-")
    return split, sources[int(number)] if number else ""


@dataclasses.dataclass(frozen=True)
class Selection:
    """The selection of documents. Each document is selected on its own, so that groups can be read in any order.

    Attributes:
      data: `config.data`, as a dict.
      weights: the weights of the used sources, see `config.lists.mixture_of`.
      repeats: the repeated documents and lines of the corpus.
    """

    data: Mapping
    weights: Mapping[str, float]
    repeats: Repeats = cleaning.NO_REPEATS

    def read(self, group: corpus.Group, counts: collections.Counter) -> Iterator[Selected]:
        """Yields the selected documents of a group; each has at least one copy.

        Args:
          group: the group.
          counts: the counter to increase. The method counts the changes of cleaning, the "bytes" that were read, the
            "documents" and "characters" of each source (each copy counts), the "unused_documents" without copies, and
            the counts of `clean`.
        """
        for position, source, document in self.clean(group, counts):
            rules = self.data["cleaning"]
            if unique := cleaning.without_repeats(document, position, self.repeats, rules, counts):
                selected = self._select(unique, source)
                counts["documents", source] += selected.copies
                counts["characters", source] += selected.copies * sum(map(len, unique.lines))
                counts["unused_documents"] += not selected.copies
                if selected.copies:
                    yield selected

    def clean(self, group: corpus.Group, counts: collections.Counter) -> Iterator[tuple[int, str, Document]]:
        """Yields the documents of a group after the rules that need only one document: (position, source, document).

        Args:
          group: the group.
          counts: the counter to increase. The method counts the documents "read" of each source and the events of
            `ReadOptions`, and adds the names of the first skipped files.
        """
        place = 0
        for portion in group.portions:
            options = _CountedReading(self.data, portion.source, counts)
            for document in corpus.read_portion(portion, options):
                counts["read", portion.source] += 1
                if fault := sentences.find_fault(document, self.data["language"], self.data["split_sentences"]):
                    options.skip_or_stop(fault)
                elif cleaned := cleaning.apply_rules(document, self.data["cleaning"], counts):
                    yield group.number << 32 | place, portion.source, cleaned
                place += 1

    @property
    def parts(self) -> tuple[str, ...]:
        """The parts of the records, parts for training first."""
        train, heldout = (dict.fromkeys(self._part(split, source) for source in self.weights) for split in SPLITS)
        return (*train, *heldout)

    def _part(self, split: str, source: str) -> str:
        """Returns the part of the documents of a source in a split."""
        is_apart = len(self.weights) > 1 and (split == "heldout" or self.data["mix_when"] == "read")
        return f"{split}-{[*self.weights].index(source)}" if is_apart else split

    def _select(self, document: Document, source: str) -> Selected:
        text = "\n".join(document.lines)
        if is_heldout(text, self.data["heldout_fraction"], self.data["seed"]):
            return Selected(document, self._part("heldout", source), 1, source)
        copies, rest = divmod(self.data["dupe_factor"] * self.weights[source], 1)
        copies = int(copies) + (rest > 0 and _share(text, self.data["seed"], b"copy") < rest)
        return Selected(document, self._part("train", source), copies, source)


class _CountedReading(reading.ReadOptions):
    """Counts the events of reading a source; see `Selection.clean`."""

    def __init__(self, data: Mapping, source: str, counts: collections.Counter):
        super().__init__(data["text_column"], data["document"])
        self._skips, self._source, self._counts = data["on_bad_document"] == "skip", source, counts

    def skip_or_stop(self, fault: str, remedy: str = reading.SKIP) -> None:
        """Counts an invalid document, or raises `UserError`, as `data.on_bad_document` determines."""
        if not self._skips:
            super().on_bad(fault, remedy)
        self._counts["bad_documents"] += 1
        if self._counts["bad_documents"] <= MAX_NAMED:
            _print_once(f"left out: {fault}")

    def on_bad(self, fault: str, remedy: str = reading.SKIP) -> None:
        self.skip_or_stop(fault, remedy)
        self._counts["unreadable_documents"] += 1

    def on_read(self, size: int) -> None:
        self._counts["bytes"] += size

    def count(self, event: str) -> None:
        self._counts[event, self._source] += 1

    def on_skipped_file(self, path: str, fault: str) -> None:
        self.count("skipped_files")
        path, fault = reading.printable(path), reading.printable(fault)
        _print_once(f"{path}: not read: {fault}")
        if self._counts["skipped_files", self._source] <= reading.MAX_NAMED:
            self._counts["skipped_file", self._source, path, fault] += 1


def skipped_files(counts: Mapping) -> dict[str, list[tuple[str, str]]]:
    """Returns the first files of each source that were skipped because of their content: (path, fault), by path."""
    skipped: dict[str, list] = {}
    for name in sorted(name for name in counts if isinstance(name, tuple) and name[0] == "skipped_file"):
        _, source, path, fault = name
        skipped.setdefault(source, []).append((path, fault))
    return {source: files[: reading.MAX_NAMED] for source, files in skipped.items()}


def check_selected_sources(counts: Mapping, sources: Iterable[str]) -> None:
    """Raises `UserError` if a source has no documents.

    Args:
      counts: the counts of `Selection.clean`.
      sources: the sources.
    """
    skipped = skipped_files(counts)
    faults = {source: ": ".join(files[0]) for source, files in skipped.items()}
    corpus.check_not_empty({source: counts["read", source] for source in sources}, faults)


@functools.lru_cache(maxsize=10_000)  # a corpus is read several times
def _print_once(text: str) -> None:
    print(text, flush=True)


def selection_of(config: ConfigDict) -> Selection:
    """Returns the selection of a config without repeats, see `with_repeats`."""
    weights = {source: weight for source, weight in mixture_of(config).items() if weight}
    if config.data.mix_when == "read":
        weights = dict.fromkeys(mixture_of(config), 1.0)
    return Selection(config.data.to_dict(), weights)


def heldout_documents(config: ConfigDict, source: str) -> Iterator[Document]:
    """Yields the held-out documents of a source, in order, repeated documents included."""
    selection = selection_of(config)
    counts: collections.Counter = collections.Counter()
    for group in corpus.groups([source]):
        yield from (x.document for x in selection.read(group, counts) if not is_train(x.part))


def is_heldout(text: str, fraction: float, seed: int) -> bool:
    """Returns whether a document is held out: a function of the text, so that all copies are in the same split."""
    return _share(text, seed, b"") < fraction


def _share(text: str, seed: int, purpose: bytes) -> float:
    """Returns a number from 0 to 1, a function of the text."""
    return cleaning.text_hash(text, salt=seed.to_bytes(8, "big") + purpose) / 2**64


def with_repeats(selection: Selection, groups: list[corpus.Group], work: str, pool: Any, ahead: int) -> Selection:
    """Finds the repeats of the corpus if the rules remove repeats.

    Args:
      selection: the selection.
      groups: the corpus.
      work: a folder for temporary files and for the result, which later calls read.
      pool: the pool of workers.
      ahead: the number of tasks that the workers start before their results are needed.

    Returns:
      The selection with repeats.
    """
    rules = selection.data["cleaning"]
    if not cleaning.needs_repeats(rules):
        return selection
    done, folder = os.path.join(work, "repeats.npz"), os.path.join(work, "hashes")
    if not os.path.exists(done):
        shutil.rmtree(folder, ignore_errors=True)  # left by a killed run
        os.makedirs(folder)
        counts: collections.Counter = collections.Counter()
        documents = ((place, document) for group in groups for place, _, document in selection.clean(group, counts))
        write, size = functools.partial(cleaning.write_hashes, folder=folder, rules=rules), 0
        phase("searching for repeated text")
        with Bar("searching for repeated text", [group.bytes for group in groups]) as bar:
            for written in in_order(pool, write, enumerate(cleaning.in_chunks(documents)), ahead):
                size += written
                bar.update(counts["bytes"] - bar.n)
        ranges = 1 + size // cleaning.RANGE_BYTES
        paths = cleaning.merge_hashes(folder, pool, ahead)
        find = functools.partial(cleaning.repeats_in_range, count=ranges, paths=paths, rules=rules)
        repeats = cleaning.merge_repeats(in_order(pool, find, range(ranges), ahead))
        with replacing(done) as partial, partial.open("wb") as file:
            np.savez(file, **repeats._asdict())
        shutil.rmtree(folder)
    with np.load(done) as arrays:
        return dataclasses.replace(selection, repeats=Repeats(**arrays))
