"""Selects the documents of a corpus that are used: cleaned, held out or not, and how often.

A document goes to a part of the records: "train", or "heldout". If there are several sources, "heldout-0" has the
held-out documents of the first source, and so on, so that each source can be evaluated by itself. If the sources are
mixed when they are read (`data.mix_when`), "train-0" has the training documents of the first source.
"""

import collections
import dataclasses
import functools
import os
import shutil
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import NamedTuple

import numpy as np

from bertjax.common.files import replacing
from bertjax.common.progress import Bar, phase
from bertjax.common.workers import in_order
from bertjax.config.lists import mixture_of
from bertjax.data.corpus import cleaning, corpus, reading, sentences
from bertjax.data.corpus.cleaning import Repeats
from bertjax.data.corpus.reading import Document

SPLITS = ("train", "heldout")
SHOWN = 10  # how many documents that are no text are named in a group: the first ones


class Selected(NamedTuple):
    document: Document
    part: str
    copies: int  # how often it is used
    source: str = ""


def is_train(part: str) -> bool:
    return part.startswith("train")


def split_of(part: str, sources: Sequence[str]) -> tuple[str, str]:
    """Returns the split of a part, and the source that all of it is from; "" if it is not of one of several."""
    split, _, number = part.partition("-")
    return split, sources[int(number)] if number else ""


@dataclasses.dataclass(frozen=True)
class Selection:
    """How documents are selected. Each is judged by itself, so that groups can be read in any order, on any machine.

    Attributes:
      data: `config.data`, as a dict.
      weights: the weights of the sources that are used, see `config.lists.mixture_of`.
      repeats: what `cleaning` found to repeat in the corpus.
    """

    data: Mapping
    weights: Mapping[str, float]
    repeats: Repeats = cleaning.NO_REPEATS

    def read(self, group: corpus.Group, counts: collections.Counter) -> Iterator[Selected]:
        """Yields the selected documents of a group, each of which is used at least once.

        Increases `counts` by the changes of cleaning, by the "bytes" that were read, as stored, by the documents and
        characters of each source, copies counted, by the "unused_documents" that a mixture does not draw, and by the
        counts of `clean`.
        """
        for position, source, document in self.clean(group, counts):
            if document := cleaning.without_repeats(document, position, self.repeats, self.data["cleaning"], counts):
                selected = self._select(document, source)
                counts["documents", source] += selected.copies
                counts["characters", source] += selected.copies * sum(map(len, document.lines))
                counts["unused_documents"] += not selected.copies
                if selected.copies:
                    yield selected

    def clean(self, group: corpus.Group, counts: collections.Counter) -> Iterator[tuple[int, str, Document]]:
        """Yields position, source and text of the documents that are used as far as can be said of them alone.

        Increases `counts` by the documents that were "read", and by the events that `Reading.count` names, each of a
        source; the first skipped files are named.
        """
        data, skips = self.data, self.data["on_bad_document"] == "skip"

        def on_read(size: int) -> None:
            counts["bytes"] += size

        def on_bad(fault: str, remedy: str = reading.SKIP) -> None:
            if not skips:
                reading.stop_at(fault, remedy)
            counts["bad_documents"] += 1
            if counts["bad_documents"] <= SHOWN:
                _say_once(f"left out: {fault}")

        def on_bad_in_file(fault: str, remedy: str = reading.SKIP) -> None:
            on_bad(fault, remedy)
            counts["unreadable_documents"] += 1

        def count(what: str, *details: str, source: str) -> None:
            counts[what, source] += 1
            if details:
                path, fault = map(reading.printable, details)
                _say_once(f"{path}: not read: {fault}")
                if counts[what, source] <= reading.NAMED:
                    counts["skipped_file", source, path, fault] += 1

        def documents() -> Iterator[tuple[str, Document]]:
            for portion in group.portions:
                of_source = functools.partial(count, source=portion.source)
                how = reading.Reading(data["text_column"], data["document"], on_bad_in_file, on_read, of_source)
                yield from ((portion.source, document) for document in corpus.read_portion(portion, how))

        for place, (source, document) in enumerate(documents()):
            counts["read", source] += 1
            if fault := sentences.find_fault(document, data["language"], data["split_sentences"]):
                on_bad(fault)
            elif cleaned := cleaning.apply_rules(document, self.data["cleaning"], counts):
                yield group.number << 32 | place, source, cleaned

    @property
    def parts(self) -> tuple[str, ...]:
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


def skipped_files(counts: Mapping) -> dict[str, list[tuple[str, str]]]:
    """Returns the first files of each source that are not read for what is in them: (path, fault), by path."""
    found: dict[str, list] = {}
    for name in sorted(name for name in counts if isinstance(name, tuple) and name[0] == "skipped_file"):
        _, source, path, fault = name
        found.setdefault(source, []).append((path, fault))
    return {source: files[: reading.NAMED] for source, files in found.items()}


def check_not_empty(counts: Mapping, sources: Iterable[str]) -> None:
    """Raises `UserError` if one of the sources has no documents. `counts` are those of `Selection.clean`."""
    skipped = skipped_files(counts)
    faults = {source: ": ".join(files[0]) for source, files in skipped.items()}
    corpus.check_not_empty({source: counts["read", source] for source in sources}, faults)


@functools.lru_cache(maxsize=10_000)  # a corpus is read several times
def _say_once(text: str) -> None:
    print(text, flush=True)


def selection_of(config) -> Selection:
    """The selection of a config, before repeats are known."""
    weights = {source: weight for source, weight in mixture_of(config).items() if weight}
    if config.data.mix_when == "read":
        weights = dict.fromkeys(mixture_of(config), 1.0)
    return Selection(config.data.to_dict(), weights)


def heldout_documents(config, source: str) -> Iterator[Document]:
    """Yields the documents of a source that are held out, in order, whether or not they repeat others."""
    selection, counts = selection_of(config), collections.Counter()
    for group in corpus.groups([source]):
        yield from (each.document for each in selection.read(group, counts) if not is_train(each.part))


def is_heldout(text: str, fraction: float, seed: int) -> bool:
    """Returns whether a document is held out. A hash of its text decides, so all copies land in the same split."""
    return _share(text, seed, b"") < fraction


def _share(text: str, seed: int, purpose: bytes) -> float:
    """A number from 0 to 1, the same for the same text."""
    return cleaning.text_hash(text, salt=seed.to_bytes(8, "big") + purpose) / 2**64


def with_repeats(selection: Selection, groups: list[corpus.Group], work: str, pool, ahead: int) -> Selection:
    """Finds what repeats in the corpus, if it is to be left out; keeps the result in the folder `work`."""
    rules = selection.data["cleaning"]
    if not cleaning.needs_repeats(rules):
        return selection
    done, folder = os.path.join(work, "repeats.npz"), os.path.join(work, "hashes")
    if not os.path.exists(done):
        shutil.rmtree(folder, ignore_errors=True)  # left by a killed run
        os.makedirs(folder)
        counts = collections.Counter()
        found = ((position, document) for group in groups for position, _, document in selection.clean(group, counts))
        write, size = functools.partial(cleaning.write_hashes, folder=folder, rules=rules), 0
        phase("looking for repeated text")
        with Bar("looking for repeated text", [group.bytes for group in groups]) as bar:
            for written in in_order(pool, write, enumerate(cleaning.in_chunks(found)), ahead):
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
