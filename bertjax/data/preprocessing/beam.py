"""The preparation as Apache Beam pipelines, for clusters. The bytes of the records are the same as in `preparation`.

Groups are read in parallel. Blocks are converted to sequences on any machine. The sequences of a shard are gathered by
a range of random keys, as in `preparation`. A step holds at most one block or one shard, as arrays.
"""

import collections
import contextlib
import dataclasses
import itertools
import json
import logging
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence

import numpy as np
from etils import epath
from ml_collections import ConfigDict

try:
    import apache_beam as beam
    from apache_beam.options.pipeline_options import PipelineOptions
except ImportError:
    beam = None  # type: ignore[assignment]

from bertjax.common.errors import UserError
from bertjax.common.files import write_whole
from bertjax.common.sorting import ROWS, divide, merge_parts
from bertjax.data.corpus import cleaning
from bertjax.data.corpus.cleaning import Repeats
from bertjax.data.corpus.corpus import Group
from bertjax.data.corpus.selection import Selection, check_selected_sources, is_train
from bertjax.data.preprocessing import blocks, shards, vocabulary
from bertjax.data.preprocessing.blocks import Block
from bertjax.data.preprocessing.job import Job
from bertjax.data.preprocessing.rows import row_type
from bertjax.data.preprocessing.shards import Shard
from bertjax.data.preprocessing.word_counts import sample_words
from bertjax.text.tokenizer import Tokenizer
from bertjax.text.vocabulary_learning import COUNTED_LETTERS

HASH_RANGES = 1024  # ranges of hashes; one machine compares a range
COUNTED_TOGETHER = 100_000  # words


@contextlib.contextmanager
def pipeline(options: Sequence[str]) -> Iterator:
    """Runs a pipeline with options of Beam. Raises `UserError` if the pipeline fails."""
    if beam is None:
        raise UserError("--runner needs Apache Beam: pip install 'bertjax[beam]'")
    logging.getLogger("apache_beam.runners.common").setLevel(
        logging.CRITICAL
    )  # otherwise, Beam also prints errors that are raised below
    try:
        with beam.Pipeline(options=PipelineOptions([*options])) as running:
            yield running
    except Exception as error:  # runners raise many types, and wrap the errors of steps
        lines = str(error).strip().splitlines() or [type(error).__name__]
        user_error = re.search(r"UserError: (.*?)(?: \[while running.*)?$", str(error), re.MULTILINE)
        raise UserError(user_error[1] if user_error else f"the Beam pipeline failed: {lines[-1][:300]}") from None


# Repeated text.


def find_repeats(selection: Selection, groups: list[Group], work: epath.Path, options: Sequence[str]) -> str | None:
    """Finds the repeats of the corpus. Returns the path of the result; None if the rules do not remove repeats."""
    rules, path = selection.data["cleaning"], work / "repeats.npz"
    if not cleaning.needs_repeats(rules):
        return None

    def write(ranges: Iterable[Repeats]) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        with path.open("wb") as file:
            np.savez(file, **cleaning.merge_repeats(ranges)._asdict())

    with pipeline(options) as running:
        (
            running
            | beam.Create(groups)
            | "spread groups" >> beam.Reshuffle()
            | "hash" >> beam.FlatMap(_hashes, selection)
            | beam.GroupByKey()
            | "compare" >> beam.Map(_repeats_of, rules)
            | beam.combiners.ToList()  # type: ignore[attr-defined]
            | "write" >> beam.Map(write)
        )
    return str(path)


def _hashes(group: Group, selection: Selection) -> Iterator[tuple[int, tuple[str, np.ndarray, np.ndarray]]]:
    """Yields (range, (kind, hashes, positions or documents))."""
    documents = ((position, document) for position, _, document in selection.clean(group, collections.Counter()))
    for chunk in cleaning.in_chunks(documents):
        for kind, (keys, rows) in cleaning.hashes_of(chunk, selection.data["cleaning"]).items():
            order = np.argsort(keys, kind="stable")
            for index, place in divide(keys[order], HASH_RANGES):
                yield index, (kind, keys[order][place], rows[order][place])


def _repeats_of(hashes: tuple[int, Iterable], rules: Mapping) -> Repeats:
    """Returns the repeats in one range of hashes."""
    parts = collections.defaultdict(list)
    for kind, keys, rows in hashes[1]:
        parts[kind].append((keys, rows))
    return cleaning.repeats_among({kind: merge_parts(runs, cleaning.ROW) for kind, runs in parts.items()}, rules)


# The vocabulary.


def learn_tokenizer(
    config: ConfigDict,
    groups: list[Group],
    selection: Selection,
    repeats: str | None,
    work: epath.Path,
    options: Sequence[str],
) -> Tokenizer:
    """Learns or extends a vocabulary, like `vocabulary.learn_tokenizer`."""
    words = work / "words"
    work.mkdir(parents=True, exist_ok=True)
    with pipeline(options) as running:
        (
            running
            | beam.Create(groups)
            | "spread groups" >> beam.Reshuffle()
            | "read" >> beam.ParDo(_Read(selection, repeats))
            | "training" >> beam.Filter(lambda block: is_train(block.part))
            | "spread blocks" >> beam.Reshuffle()
            | "count" >> beam.FlatMap(lambda block: vocabulary.count_block(block, config).items())
            | beam.CombinePerKey(sum)
            | "as lines" >> beam.Map(json.dumps)
            | beam.io.WriteToText(str(words))
        )

    def parts() -> Iterator[dict[str, int]]:
        for path in words.parent.glob("words-*"):
            with path.open() as file:
                lines = map(json.loads, file)
                while counts := dict(itertools.islice(lines, COUNTED_TOGETHER)):
                    yield counts

    return vocabulary.learn_from(config, sample_words(parts(), COUNTED_LETTERS[config.tokenizer.kind]))


# The records.


def write_all(
    job: Job, groups: list[Group], selection: Selection, repeats: str | None, options: Sequence[str]
) -> tuple[Mapping[str, int], Mapping, dict[Shard, dict]]:
    """Writes all shards.

    Returns:
      The statistics by split, the counts of `Selection.read`, and the entry of each shard in the manifest.
    """
    result = epath.Path(job.work) / "result.json"

    def write_result(_: None, statistics: Mapping, counts: list, written: list) -> None:
        write_whole(result, json.dumps([list(statistics.items()), counts, written]))

    with pipeline(options) as running:
        read = (
            running
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
        empty = rows | "all shards" >> beam.FlatMap(_empty_shards, job)  # a shard may have no rows
        written = (
            [parts, empty]
            | beam.Flatten()
            | "bring shards together" >> beam.GroupByKey()
            | "write shards" >> beam.Map(_write_shard, job)
        )
        statistics = sequences.statistics | "sum statistics" >> beam.CombinePerKey(sum)
        counts = read.counts | "sum counts" >> beam.CombinePerKey(sum)
        (
            running
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
    check_selected_sources(counts, selection.weights)
    entries = {Shard(job.shapes[number], *rest): entry for (number, *rest), entry in written}
    return collections.Counter(dict(statistics)), counts, entries


if beam is not None:

    class _Read(beam.DoFn):
        """Converts a group to blocks. The output "counts" has the counts of `Selection.read`."""

        def __init__(self, selection: Selection, repeats: str | None):
            """Stores the arguments; workers receive a copy."""
            self.selection, self.repeats = selection, repeats

        def setup(self) -> None:
            """Reads the repeats, once per worker."""
            if self.repeats:
                with epath.Path(self.repeats).open("rb") as file, np.load(file) as arrays:
                    self.selection = dataclasses.replace(self.selection, repeats=Repeats(**arrays))

        def process(self, group: Group) -> Iterator:
            """Yields the blocks of a group and the counts."""
            counts: collections.Counter = collections.Counter()
            yield from blocks.blocks_of(group, self.selection, counts)
            for item in counts.items():
                yield beam.pvalue.TaggedOutput("counts", item)

    class _MakeSequences(beam.DoFn):
        """Converts a block to chunks of sequences, sorted by key. The other outputs are "statistics" and "rows"."""

        def __init__(self, job: Job):
            """Stores the settings; workers receive a copy."""
            self.job = job

        def process(self, block: Block) -> Iterator:
            """Yields chunks of sequences, statistics, and the number of rows by part and shape."""
            statistics, rows = blocks.sequences_of(block, self.job)
            for name, count in blocks.of_split(block.part, statistics, self.job).items():
                yield beam.pvalue.TaggedOutput("statistics", (name, count))
            for number, (keys, arrays) in enumerate(rows):
                yield beam.pvalue.TaggedOutput("rows", ((block.part, number), len(keys)))
                keys, ordered = merge_parts([(keys, np.concatenate(arrays))], arrays[0].dtype)
                for first in range(0, len(keys), ROWS):
                    place = slice(first, first + ROWS)
                    yield block.part, number, (*block.number, first), keys[place].tobytes(), ordered[place].tobytes()


def _shards_of(job: Job, part: str, number: int, rows: int) -> list[Shard]:
    return shards.shards_of(job, {(part, job.shapes[number]): rows})


def _empty_shards(part_and_rows: tuple[tuple[str, int], int], job: Job) -> Iterator[tuple[tuple, tuple]]:
    """Yields the shards of a part and shape without content."""
    (part, number), rows = part_and_rows
    for shard in _shards_of(job, part, number, rows):
        yield (number, shard.part, shard.index, shard.count), ((), b"", b"")


def _by_shard(chunk: tuple, job: Job, rows: Mapping[tuple[str, int], int]) -> Iterator[tuple[tuple, tuple]]:
    """Yields (shard, (place in the corpus, keys, rows)) of a chunk of sequences."""
    part, number, place, key_bytes, row_bytes = chunk
    count = len(_shards_of(job, part, number, rows[part, number]))
    keys, data = np.frombuffer(key_bytes, np.uint64), np.frombuffer(row_bytes, row_type(job.shapes[number], job))
    for index, in_shard in divide(keys, count):
        yield (number, part, index, count), (place, keys[in_shard].tobytes(), data[in_shard].tobytes())


def _write_shard(gathered: tuple[tuple, Iterable[tuple]], job: Job) -> tuple[list, dict]:
    (number, *rest), parts = gathered
    shard = Shard(job.shapes[number], *rest)
    kind = row_type(shard.shape, job)
    parts = ((np.frombuffer(keys, np.uint64), np.frombuffer(rows, kind)) for _, keys, rows in sorted(parts))
    return [number, *rest], shards.write_rows(shard, job, merge_parts(parts, kind)[1])
