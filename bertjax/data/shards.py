"""The second pass of a preparation: the buckets of a shard from all blocks -> a shuffled file of records."""

import os
from typing import NamedTuple

import numpy as np
import tqdm
from etils import epath

from bertjax.data import records
from bertjax.data.blocks import BUCKETS, ROWS, Spilled, spill_path
from bertjax.data.job import SPLITS, Job, Stage, this_worker
from bertjax.data.layouts import features_of
from bertjax.data.sequences import row_type
from bertjax.data.workers import in_order

SHARD_BYTES = 32 << 20  # of rows in memory; some 90 MB as records
MIN_TRAIN_SHARDS = 8  # so that each host of a small pod reads its own files


class Shard(NamedTuple):
    path: str  # relative to the output folder
    stage: Stage
    seed: tuple[int, ...]
    slices: list[tuple[int, int, int]]  # (block, first row, number of rows)


def write_all(job: Job, blocks: list[Spilled], pool, ahead: int) -> dict:
    """Writes all sets of records; returns the manifest's "sets", with an entry for each file."""
    sets = {
        str(stage.length): {"max_predictions_per_seq": stage.predictions, **{split: {} for split in SPLITS}}
        for stage in job.stages
    }
    shards = []
    for stage in job.stages:
        (epath.Path(job.output) / records.set_folder(stage.length)).mkdir(exist_ok=True)
        for split in SPLITS:
            shards += shards_of(job, stage, split, [block for block in blocks if block.split == split])
    with tqdm.tqdm(desc="writing shards", total=len(shards), disable=None, leave=False) as bar:
        for shard, entry in zip(shards, in_order(pool, write, shards, ahead)):
            split = os.path.basename(shard.path).split("-")[0]
            sets[str(shard.stage.length)][split][shard.path] = entry
            bar.update()
    return sets


def shards_of(job: Job, stage: Stage, split: str, blocks: list[Spilled]) -> list[Shard]:
    if not blocks:
        return []
    sizes = np.array([block.bucket_sizes[stage] for block in blocks])  # [blocks, BUCKETS]
    size = sizes.sum() * row_type(stage, job).itemsize
    count, least = 1, MIN_TRAIN_SHARDS if split == "train" else 1
    while count < least or (count < BUCKETS and size > count * SHARD_BYTES):
        count *= 2
    ends = np.cumsum(sizes, axis=1)
    shards = []
    for i in range(count):
        low, high = i * BUCKETS // count, (i + 1) * BUCKETS // count
        first, last = ends[:, low] - sizes[:, low], ends[:, high - 1]
        shards.append(
            Shard(
                path=f"{records.set_folder(stage.length)}/{split}-{i:05d}-of-{count:05d}.tfrecord",
                stage=stage,
                seed=(job.data["seed"], stage.length, SPLITS.index(split), i),
                slices=[(b.number, int(a), int(z - a)) for b, a, z in zip(blocks, first, last) if z > a],
            )
        )
    return shards


def write(shard: Shard) -> dict[str, int]:
    """Writes a shard; returns its entry for the manifest."""
    job = this_worker().job
    stored = row_type(shard.stage, job)
    parts = [
        np.fromfile(spill_path(job.spill, shard.stage, block), stored, count, offset=first * stored.itemsize)
        for block, first, count in shard.slices
    ]
    rows = np.concatenate(parts) if parts else np.empty(0, stored)
    order = np.random.default_rng(shard.seed).permutation(len(rows))
    layout = job.data["layout"]
    blocks = (features_of(rows[order[first : first + ROWS]], layout) for first in range(0, len(rows), ROWS))
    return records.write_records(epath.Path(job.output) / shard.path, blocks)
