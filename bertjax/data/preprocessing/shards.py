"""The second pass of a preparation: writes the sequences of a shard, from all blocks, as a file of records."""

import hashlib
import json
import os
import re
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
from etils import epath

from bertjax.common.files import persistently, write_whole
from bertjax.common.sorting import ROWS, gather
from bertjax.data.corpus.selection import SPLITS, is_train, split_of
from bertjax.data.preprocessing.job import Job, PartAndShape, RecordShape, tokenizer_of_job
from bertjax.data.preprocessing.rows import row_type
from bertjax.data.records import lengths, record_sets
from bertjax.data.records.layouts import features_of

SHARD_BYTES = 32 << 20  # maximum bytes of the rows of a shard in memory; about 90 MB as records
MIN_TRAIN_SHARDS = 8  # so that each host of a small pod reads its own files
SHARD_NAME = re.compile(r"(train|heldout)(-\d+)?-\d{5}-of-\d{5}\.(tfrecord|lengths)(\.\w+\.partial)?$")


class Shard(NamedTuple):
    """Shard `index` of `count` of a part: the rows whose random keys are in one of `count` ranges."""

    shape: RecordShape
    part: str
    index: int  # type: ignore[assignment]  # hides `tuple.index`
    count: int  # type: ignore[assignment]  # hides `tuple.count`

    @property
    def path(self) -> str:
        """The path relative to the output folder."""
        folder = record_sets.set_folder(self.shape.length)
        return f"{folder}/{self.part}-{self.index:05d}-of-{self.count:05d}.tfrecord"


def shards_of(job: Job, rows: Mapping[PartAndShape, int]) -> list[Shard]:
    """Returns the shards for the number of rows of each part and shape."""
    shards = []
    for (part, shape), total in sorted(rows.items()):
        size = total * row_type(shape, job).itemsize
        count = (
            MIN_TRAIN_SHARDS if is_train(part) and not job.data["stream"] else 1
        )  # blocks of a stream are not divided
        while size > count * SHARD_BYTES:
            count *= 2
        shards += [Shard(shape, part, index, count) for index in range(count)] if total else []
    return shards


def write_shard(shard_and_paths: tuple[Shard, Sequence[str]], job: Job) -> dict[str, int]:
    """Writes a shard, unless an earlier run has written it.

    Args:
      shard_and_paths: the shard, and the files of all rows of its part and shape.
      job: the preparation.

    Returns:
      The entry of the shard in the manifest.
    """
    shard, paths = shard_and_paths
    names = "\n".join(map(os.path.basename, paths))  # the name of a file contains a hash of its content
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
    """Writes rows as the records of a shard; returns the entry of the shard in the manifest."""
    path = epath.Path(job.output) / shard.path
    layout, ends_with_cls = job.data["layout"], tokenizer_of_job(job).ends_with_cls and not job.data["stream"]
    parts = (features_of(rows[first : first + ROWS], layout, ends_with_cls) for first in range(0, len(rows), ROWS))
    return {**lengths.write_lengths(path, rows["size"]), **record_sets.write_records(path, parts)}


def sets_of(written: Mapping[Shard, dict], job: Job) -> dict[str, dict[str, Any]]:
    """Returns the field "sets" of the manifest: the files of each split by length."""
    sets: dict[str, dict[str, Any]] = {
        str(shape.length): {"max_predictions_per_seq": shape.predictions, **{split: {} for split in SPLITS}}
        for shape in job.shapes
    }
    for shard in sorted(written):
        split, source = split_of(shard.part, job.sources)
        entry = {**written[shard], **({"source": source} if source else {})}
        sets[str(shard.shape.length)][split][shard.path] = entry
    return sets


def delete_others(output: epath.Path, sets: dict) -> None:
    """Deletes complete and partial shards that `sets` does not name, such as shards of earlier runs."""
    used = {str(output / name) for files in sets.values() for split in SPLITS for name in files[split]}
    used |= {str(lengths.path_of(name)) for name in used}
    for folder in output.glob("length*"):
        for path in folder.iterdir():
            if SHARD_NAME.match(path.name) and str(path) not in used:
                path.unlink(missing_ok=True)
