"""How fast text becomes records and records become batches, in how much memory, and how soon a late step is there.

Command:  python experiments/benchmarks/data.py --corpus=TEXT --vocab=vocab.txt
          with --google=FOLDER, a checkout of google-research/bert: whole commands, ours beside its
          create_pretraining_data.py, in turns on the same text, one sentence a line
Results:  RESULTS.md
Linux only: memory is read from /proc.
"""

import itertools
import math
import os
import pathlib
import shutil
import statistics
import subprocess
import sys
import tempfile
import threading
import time

import numpy as np
from absl import app, flags

from bertjax.config import named_stages, pretraining_config, stage
from bertjax.data import pipeline, preparation
from bertjax.data.corpus import read_documents
from bertjax.data.records import RecordSet, count_records, features, find_records, write_records
from bertjax.sharding.topology import available_cores
from bertjax.text import sentences

CORPUS = flags.DEFINE_list("corpus", None, "As config.data.corpus.", required=True)
VOCAB = flags.DEFINE_string("vocab", None, "A published uncased vocab.txt of 30,522 pieces.", required=True)
WORKERS = flags.DEFINE_integer("workers", available_cores(), "Processes that prepare.")
DUPE_FACTOR = flags.DEFINE_integer("dupe_factor", 2, "As config.data.dupe_factor.")

GOOGLE = flags.DEFINE_string("google", None, "Folder of google-research/bert: compares the preparation, and no more.")
MEGABYTES = flags.DEFINE_integer("megabytes", 5, "Of text, for the comparison with Google's script.")
LENGTH = flags.DEFINE_integer("length", 128, "Of its sequences.")

BATCH_SIZE = 256
RUNS = 5
LATE_STEP = 500_000
SHARDS, RECORDS_PER_SHARD, DISTINCT_SHARDS = 100, 90_000, 5  # as prepare makes them


class PeakMemory:
    """The most memory that this process and its children held together, pages that they share counted once."""

    def __enter__(self):
        self.bytes, self._stop = 0, threading.Event()
        self._thread = threading.Thread(target=self._watch)
        self._thread.start()
        return self

    def __exit__(self, *_):
        self._stop.set()
        self._thread.join()

    def _watch(self):
        while not self._stop.wait(0.2):
            self.bytes = max(self.bytes, sum(map(proportional_set_size, family(os.getpid()))))


def family(parent: int) -> list[int]:
    """A process and all that descend from it."""
    parents = {}
    for stat in pathlib.Path("/proc").glob("[0-9]*/stat"):
        try:
            parents[int(stat.parent.name)] = int(stat.read_text().rpartition(")")[2].split()[1])
        except OSError:  # it has just ended
            continue
    found = [parent]
    for process in found:
        found += [child for child, its_parent in parents.items() if its_parent == process]
    return found


def proportional_set_size(process: int) -> int:
    try:
        lines = pathlib.Path(f"/proc/{process}/smaps_rollup").read_text().splitlines()
        return next(int(line.split()[1]) << 10 for line in lines if line.startswith("Pss:"))
    except (OSError, StopIteration):
        return 0


def measure_preparation(folder: str) -> RecordSet:
    config = pretraining_config()
    config.data.update(corpus=CORPUS.value, dupe_factor=DUPE_FACTOR.value)
    config.tokenizer.path = VOCAB.value
    config.stages = named_stages(short=stage(1, 128, 20), long=stage(1, 512, 77))
    with PeakMemory() as peak:
        began = time.monotonic()
        manifest = preparation.prepare(config, folder, WORKERS.value)
        seconds = time.monotonic() - began
    characters = manifest["corpus"]["train_characters"] + manifest["corpus"]["heldout_characters"]
    tokens = manifest["corpus"]["train_tokens"] + manifest["corpus"]["heldout_tokens"]
    print(
        f"preparation: {characters / 1e6:.1f} M characters, {tokens / 1e6:.1f} M tokens, {WORKERS.value} workers, "
        f"dupe_factor {DUPE_FACTOR.value}, lengths 128 and 512: {seconds:.1f} s, {characters / 1e6 / seconds:.2f} M "
        f"characters/s, peak memory {peak.bytes / 1e9:.2f} GB"
    )
    return find_records(folder, 128, 20, "train", 30522)


# Their script wants TensorFlow 1, whose names TensorFlow 2 still has.
THEIRS = """
import runpy, sys
import tensorflow.compat.v1
sys.modules["tensorflow"] = tensorflow.compat.v1
sys.argv = sys.argv[1:]
runpy.run_path(sys.argv[0], run_name="__main__")
"""
EXPERIMENT = """
from bertjax.config import named_stages, pretraining_config, stage
def get_config():
    config = pretraining_config()
    config.data.update(split_sentences=False, heldout_fraction=0.0)
    config.stages = named_stages(only=stage(1, {length}, {predictions}))
    return config
"""


def compare_with_google(folder: pathlib.Path) -> None:
    text, size = folder / "text.txt", 0
    with text.open("w") as file:
        for document in read_documents(CORPUS.value):
            size += file.write("\n".join(sentences.split(document, "en", True)) + "\n\n")
            if size > MEGABYTES.value * 1e6:
                break
    length, predictions = LENGTH.value, math.ceil(0.15 * LENGTH.value)
    (folder / "experiment.py").write_text(EXPERIMENT.format(length=length, predictions=predictions))

    def theirs() -> int:
        output = folder / "google.tfrecord"
        script = f"{GOOGLE.value}/create_pretraining_data.py"
        values = dict(input_file=text, output_file=output, vocab_file=VOCAB.value, do_lower_case=True)
        values |= dict(max_seq_length=length, max_predictions_per_seq=predictions, dupe_factor=DUPE_FACTOR.value)
        command = [sys.executable, "-c", THEIRS, script, *(f"--{name}={value}" for name, value in values.items())]
        subprocess.run(command, check=True, capture_output=True, env={**os.environ, "PYTHONPATH": GOOGLE.value})
        return count_records(str(output))

    def ours() -> int:
        output = folder / "ours"
        shutil.rmtree(output, ignore_errors=True)
        settings = {"data.corpus": text, "tokenizer.path": VOCAB.value, "data.dupe_factor": DUPE_FACTOR.value}
        command = [sys.executable, "-m", "bertjax.prepare", f"--config={folder}/experiment.py", f"--output={output}"]
        command += [f"--workers={WORKERS.value}", *(f"--config.{name}={value}" for name, value in settings.items())]
        subprocess.run(command, check=True, capture_output=True)
        return find_records(output, length, predictions, "train").total

    rates = {theirs: [], ours: []}
    for _ in range(RUNS):
        for side, found in rates.items():
            began = time.monotonic()
            found.append(side() / (time.monotonic() - began))
            print(f"{side.__name__}: {found[-1]:,.0f} sequences/s", flush=True)
    our, their = (statistics.median(rates[side]) for side in (ours, theirs))
    print(
        f"{size / 1e6:.1f} M characters, length {length}, dupe_factor {DUPE_FACTOR.value}, {WORKERS.value} workers: "
        f"{our:,.0f} sequences/s, theirs {their:,.0f}: {our / their:.1f} times as many (medians of {RUNS})"
    )


def batches(files: RecordSet, start: int = 0):
    return pipeline.train_batches(files, 128, 20, batch_size=BATCH_SIZE, seed=0, start=start)


def measure_throughput(files: RecordSet) -> None:
    lanes = math.gcd(BATCH_SIZE, pipeline.MAX_LANES)
    batches_per_window = pipeline.window_size(files, 0, lanes) * lanes // BATCH_SIZE
    rates = []
    for _ in range(RUNS):
        stream = batches(files)
        next(stream)
        began = time.monotonic()
        count = sum(1 for _ in itertools.islice(stream, 3 * batches_per_window))
        rates.append(count * BATCH_SIZE / (time.monotonic() - began))
        stream.close()
    print(
        f"pipeline: batches of {BATCH_SIZE} sequences of 128: median {statistics.median(rates):,.0f} sequences/s "
        f"({min(rates):,.0f} to {max(rates):,.0f} in {RUNS} runs)"
    )


def measure_jump(folder: str) -> None:
    """On a set of real size. Its files recur, to spare the disk: the reading is the same, from the page cache."""
    paths = [write_shard(f"{folder}/{i}.tfrecord", seed=i) for i in range(DISTINCT_SHARDS)]
    files = RecordSet(tuple(itertools.islice(itertools.cycle(paths), SHARDS)), (RECORDS_PER_SHARD,) * SHARDS)
    for step in (0, LATE_STEP):
        seconds = []
        for _ in range(RUNS):
            began = time.monotonic()
            stream = batches(files, step)
            next(stream)
            seconds.append(time.monotonic() - began)
            stream.close()
        print(
            f"first batch at step {step:,} of {SHARDS} shards, {files.total:,} records: median "
            f"{statistics.median(seconds):.1f} s ({min(seconds):.1f} to {max(seconds):.1f} in {RUNS} runs)"
        )


def write_shard(path: str, seed: int) -> str:
    rng = np.random.default_rng(seed)
    sizes = features(128, 20)
    block = {name: rng.integers(30522, size=(1000, size)).astype(dtype) for name, (size, dtype) in sizes.items()}
    write_records(path, itertools.repeat(block, RECORDS_PER_SHARD // 1000))
    return path


def main(_):
    with tempfile.TemporaryDirectory() as folder:
        if GOOGLE.value:
            if not pathlib.Path(GOOGLE.value, "create_pretraining_data.py").exists():
                raise app.UsageError(f"--google={GOOGLE.value}: no create_pretraining_data.py in it")
            compare_with_google(pathlib.Path(folder))
            return
        files = measure_preparation(f"{folder}/records")
        measure_throughput(files)
        measure_jump(folder)


if __name__ == "__main__":
    app.run(main)
