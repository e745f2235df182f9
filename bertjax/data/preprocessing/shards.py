"""The second pass of a preparation: the sequences of a shard from all blocks -> a file of records."""

import hashlib
import json
import os
import re
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from etils import epath

from bertjax.common.files import persistently, write_whole
from bertjax.common.sorting import ROWS, gather
from bertjax.data.corpus.selection import SPLITS, is_train, split_of
from bertjax.data.preprocessing.job import Job, RecordShape, tokenizer_of
from bertjax.data.preprocessing.rows import row_type
from bertjax.data.records import lengths, record_sets
from bertjax.data.records.layouts import features_of

SHARD_BYTES = 32 << 20  # most bytes of a shard's rows in memory; some 90 MB as records
MIN_TRAIN_SHARDS = 8  # so that each host of a small pod reads its own files
SHARD_NAME = re.compile(r"(train|heldout)(-\d+)?-\d{5}-of-\d{5}\.(tfrecord|lengths)(\.\w+\.partial)?$")


class Shard(NamedTuple):
    """Shard `index` of `count`: it has the rows of that range of their random keys, see `runs`."""

    shape: RecordShape
    part: str
    index: int
    count: int

    @property
    def path(self) -> str:
        """Relative to the output folder."""
        folder = record_sets.set_folder(self.shape.length)
        return f"{folder}/{self.part}-{self.index:05d}-of-{self.count:05d}.tfrecord"


def shards_of(job: Job, rows: dict[tuple[str, RecordShape], int]) -> list[Shard]:
    """Returns the shards for a number of rows of each part and shape."""
    shards = []
    for (part, shape), total in sorted(rows.items()):
        size = total * row_type(shape, job).itemsize
        count = MIN_TRAIN_SHARDS if is_train(part) and not job.data["stream"] else 1  # a stream has few, whole blocks
        while size > count * SHARD_BYTES:
            count *= 2
        shards += [Shard(shape, part, index, count) for index in range(count)] if total else []
    return shards


def write(wanted: tuple[Shard, Sequence[str]], job: Job) -> dict[str, int]:
    """Writes a shard of the files of its part and shape, unless a run before has done so; returns its entry."""
    shard, paths = wanted
    names = "\n".join(map(os.path.basename, paths))  # each name follows from what is in its file
    identity = hashlib.sha256(names.encode()).hexdigest()[:16]
    done = os.path.join(job.work, f"{shard.path.replace('/', '-')}-{identity}.json")
    if os.path.exists(done):
        with open(done) as file:
            entry = json.load(file)
        path = epath.Path(job.output) / shard.path
        if path.exists() and path.stat().length == entry["bytes"] and lengths.path_of(path).exists():
            return entry
    _, rows = gather(paths, row_type(shard.shape, job), shard.index, shard.count)
    written = write_rows(shard, job, rows)
    write_whole(done, json.dumps(written))
    return written


@persistently
def write_rows(shard: Shard, job: Job, rows: np.ndarray) -> dict[str, int]:
    path = epath.Path(job.output) / shard.path
    how = job.data["layout"], tokenizer_of(job).ends_with_cls and not job.data["stream"]
    parts = (features_of(rows[first : first + ROWS], *how) for first in range(0, len(rows), ROWS))
    return {**lengths.write(path, rows["size"]), **record_sets.write_records(path, parts)}


def sets_of(written: dict[Shard, dict], job: Job) -> dict:
    """Returns the manifest's "sets": the files of each split, what they contain, and of which source if of one."""
    sets = {
        str(shape.length): {"max_predictions_per_seq": shape.predictions, **{split: {} for split in SPLITS}}
        for shape in job.shapes
    }
    for shard in sorted(written):
        split, source = split_of(shard.part, job.sources)
        entry = {**written[shard], **({"source": source} if source else {})}
        sets[str(shard.shape.length)][split][shard.path] = entry
    return sets


def delete_others(output: epath.Path, sets: dict) -> None:
    """Deletes the shards, whole or partial, that other runs have left and `sets` does not name."""
    named = {str(output / name) for found in sets.values() for split in SPLITS for name in found[split]}
    named |= {str(lengths.path_of(name)) for name in named}
    for folder in output.glob("length*"):
        for path in folder.iterdir():
            if SHARD_NAME.match(path.name) and str(path) not in named:
                path.unlink(missing_ok=True)
