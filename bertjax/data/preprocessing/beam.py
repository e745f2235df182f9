"""The preparation as Apache Beam pipelines: on a cluster, with the same functions and, byte for byte, the same records.

Groups are read in parallel, blocks made into sequences wherever there is room, and the sequences of a shard brought
together by a range of their random keys, as in `preparation`. No step holds more than a block or a shard, as arrays.
"""

import collections
import contextlib
import dataclasses
import itertools
import json
import logging
import re
from collections.abc import Iterable, Iterator, Sequence

import numpy as np
from etils import epath

try:
    import apache_beam as beam
    from apache_beam.options.pipeline_options import PipelineOptions
except ImportError:
    beam = None

from bertjax.common.errors import UserError
from bertjax.common.files import write_whole
from bertjax.common.sorting import ROWS, divide, merge
from bertjax.data.corpus import cleaning
from bertjax.data.corpus.cleaning import Repeats
from bertjax.data.corpus.corpus import Group
from bertjax.data.corpus.selection import Selection, check_not_empty, is_train
from bertjax.data.preprocessing import blocks, shards, vocabulary
from bertjax.data.preprocessing.blocks import Block
from bertjax.data.preprocessing.job import Job
from bertjax.data.preprocessing.rows import row_type
from bertjax.data.preprocessing.shards import Shard
from bertjax.data.preprocessing.word_counts import sample
from bertjax.text.vocabulary_learning import COUNTED_LETTERS

HASH_RANGES = 1024  # each is compared on one machine
COUNTED_TOGETHER = 100_000  # words


@contextlib.contextmanager
def pipeline(options: Sequence[str]) -> Iterator:
    """Runs a pipeline with Beam's own options. Raises `UserError` if it fails."""
    if beam is None:
        raise UserError("--runner needs Apache Beam: pip install 'bertjax[beam]'")
    logging.getLogger("apache_beam.runners.common").setLevel(logging.CRITICAL)  # it prints what is raised below
    try:
        with beam.Pipeline(options=PipelineOptions([*options])) as made:
            yield made
    except Exception as error:  # runners raise many types, and wrap what a step raises
        lines = str(error).strip().splitlines() or [type(error).__name__]
        said = re.search(r"UserError: (.*?)(?: \[while running.*)?$", str(error), re.MULTILINE)
        raise UserError(said[1] if said else f"the Beam pipeline failed: {lines[-1][:300]}") from None


# What is left out.


def find_repeats(selection: Selection, groups: list[Group], work: epath.Path, options: Sequence[str]) -> str | None:
    """As `selection.with_repeats`; returns the path of what repeats, None if the corpus is not cleaned of it."""
    rules, path = selection.data["cleaning"], work / "repeats.npz"
    if not cleaning.needs_repeats(rules):
        return None

    def write(ranges: Iterable[Repeats]) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        with path.open("wb") as file:
            np.savez(file, **cleaning.merge_repeats(ranges)._asdict())

    with pipeline(options) as made:
        (
            made
            | beam.Create(groups)
            | "spread groups" >> beam.Reshuffle()
            | "hash" >> beam.FlatMap(_hashes, selection)
            | beam.GroupByKey()
            | "compare" >> beam.Map(_repeats_of, rules)
            | beam.combiners.ToList()
            | "write" >> beam.Map(write)
        )
    return str(path)


def _hashes(group: Group, selection: Selection):
    """Yields (range, (kind, hashes, positions or documents))."""
    documents = ((position, document) for position, _, document in selection.clean(group, collections.Counter()))
    for chunk in cleaning.in_chunks(documents):
        for kind, (keys, rows) in cleaning.hashes_of(chunk, selection.data["cleaning"]).items():
            order = np.argsort(keys, kind="stable")
            for index, place in divide(keys[order], HASH_RANGES):
                yield index, (kind, keys[order][place], rows[order][place])


def _repeats_of(hashes, rules) -> Repeats:
    parts = [(kind, (keys, rows)) for kind, keys, rows in hashes[1]]

    def of_kind(kind):
        return merge((part for name, part in parts if name == kind), np.dtype(np.int64))

    return cleaning.repeats_among(of_kind, rules)


# The vocabulary.


def learn_tokenizer(
    config, groups: list[Group], selection: Selection, repeats: str | None, work: epath.Path, options: Sequence[str]
):
    """As `vocabulary.learn_tokenizer`."""
    words = work / "words"
    work.mkdir(parents=True, exist_ok=True)
    with pipeline(options) as made:
        (
            made
            | beam.Create(groups)
            | "spread groups" >> beam.Reshuffle()
            | "read" >> beam.ParDo(_Read(selection, repeats))
            | "training" >> beam.Filter(lambda block: is_train(block.part))
            | "spread blocks" >> beam.Reshuffle()
            | "count" >> beam.FlatMap(_count, vocabulary.words_of(config))
            | beam.CombinePerKey(sum)
            | "as lines" >> beam.Map(json.dumps)
            | beam.io.WriteToText(str(words))
        )

    def parts():
        for path in words.parent.glob("words-*"):
            with path.open() as file:
                lines = map(json.loads, file)
                while some := dict(itertools.islice(lines, COUNTED_TOGETHER)):
                    yield some

    return vocabulary.learn_from(config, sample(parts(), COUNTED_LETTERS[config.tokenizer.kind]))


def _count(block: Block, how: vocabulary.Words):
    yield from vocabulary.count_block(block, how).items()


# The records.


def write_all(job: Job, groups: list[Group], selection: Selection, repeats: str | None, options: Sequence[str]):
    """Writes all shards. Returns the statistics, the counts of `Selection.read`, and what each shard contains."""
    result = epath.Path(job.work) / "result.json"

    def write_result(_, statistics, counts, written) -> None:
        write_whole(result, json.dumps([list(statistics.items()), counts, written]))

    with pipeline(options) as made:
        read = (
            made
            | beam.Create(groups)
            | "spread groups" >> beam.Reshuffle()
            | "read" >> beam.ParDo(_Read(selection, repeats)).with_outputs("counts", main="blocks")
        )
        sequences = (
            read.blocks
            | "spread blocks" >> beam.Reshuffle()
            | "make sequences" >> beam.ParDo(_MakeSequences(job)).with_outputs("statistics", "rows", main="pieces")
        )
        rows = sequences.rows | "count rows" >> beam.CombinePerKey(sum)
        parts = sequences.pieces | "choose shards" >> beam.FlatMap(_by_shard, job, beam.pvalue.AsDict(rows))
        empty = rows | "all shards" >> beam.FlatMap(_empty_shards, job)  # a range may have no rows
        written = (
            [parts, empty]
            | beam.Flatten()
            | "bring shards together" >> beam.GroupByKey()
            | "write shards" >> beam.Map(_write_shard, job)
        )
        statistics = sequences.statistics | "sum statistics" >> beam.CombinePerKey(sum)
        counts = read.counts | "sum counts" >> beam.CombinePerKey(sum)
        (
            made
            | "once" >> beam.Create([None])
            | "write result"
            >> beam.Map(
                write_result,
                beam.pvalue.AsDict(statistics),
                beam.pvalue.AsList(counts),
                beam.pvalue.AsList(written),
            )
        )
    statistics, counts, written = json.loads(result.read_text())
    counts = collections.Counter({tuple(name) if isinstance(name, list) else name: n for name, n in counts})
    check_not_empty(counts, selection.weights)
    contents = {Shard(job.shapes[number], *rest): found for (number, *rest), found in written}
    return collections.Counter(dict(statistics)), counts, contents


if beam is not None:

    class _Read(beam.DoFn):
        """Group -> blocks; "counts": what `Selection.read` counts."""

        def __init__(self, selection: Selection, repeats: str | None):
            self.selection, self.repeats = selection, repeats

        def setup(self):
            if self.repeats:
                with epath.Path(self.repeats).open("rb") as file, np.load(file) as arrays:
                    self.selection = dataclasses.replace(self.selection, repeats=Repeats(**arrays))

        def process(self, group: Group):
            counts = collections.Counter()
            yield from blocks.blocks_of(group, self.selection, counts)
            for item in counts.items():
                yield beam.pvalue.TaggedOutput("counts", item)

    class _MakeSequences(beam.DoFn):
        """Block -> pieces of its sequences in the order of their keys; "statistics"; "rows" by part and length."""

        def __init__(self, job: Job):
            self.job = job

        def process(self, block: Block):
            statistics, rows = blocks.sequences_of(block, self.job)
            for name, count in blocks.of_split(block.part, statistics, self.job).items():
                yield beam.pvalue.TaggedOutput("statistics", (name, count))
            for number, (keys, pieces) in enumerate(rows):
                yield beam.pvalue.TaggedOutput("rows", ((block.part, number), len(keys)))
                keys, together = merge([(keys, np.concatenate(pieces))], pieces[0].dtype)
                for first in range(0, len(keys), ROWS):
                    place = slice(first, first + ROWS)
                    yield block.part, number, (*block.number, first), keys[place].tobytes(), together[place].tobytes()


def _shards_of(job: Job, part: str, number: int, rows: int) -> list[Shard]:
    return shards.shards_of(job, {(part, job.shapes[number]): rows})


def _empty_shards(of_part, job: Job):
    (part, number), rows = of_part
    for shard in _shards_of(job, part, number, rows):
        yield (number, shard.part, shard.index, shard.count), ((), b"", b"")


def _by_shard(piece, job: Job, rows: dict[tuple[str, int], int]):
    """Yields (shard, (place in the corpus, keys, rows)) of a piece."""
    part, number, place, keys, data = piece
    count = len(_shards_of(job, part, number, rows[part, number]))
    keys, data = np.frombuffer(keys, np.uint64), np.frombuffer(data, row_type(job.shapes[number], job))
    for index, its in divide(keys, count):
        yield (number, part, index, count), (place, keys[its].tobytes(), data[its].tobytes())


def _write_shard(gathered, job: Job) -> tuple[list, dict]:
    (number, *rest), parts = gathered
    shard = Shard(job.shapes[number], *rest)
    kind = row_type(shard.shape, job)
    parts = ((np.frombuffer(keys, np.uint64), np.frombuffer(rows, kind)) for _, keys, rows in sorted(parts))
    (epath.Path(job.output) / shard.path).parent.mkdir(parents=True, exist_ok=True)
    return [number, *rest], shards.write_rows(shard, job, merge(parts, kind)[1])
