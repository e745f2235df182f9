"""Time and memory of vocabularies, records and batches, and the time until the first batch of a late step.

Command:  python -m experiments.benchmarks.data --corpus=TEXT --vocab=vocab.txt
Measures: --measure=NAME,... of
          preparation  python -m bertjax.prepare, and the size of the records
          memory       preparation once for each of --megabytes: whether memory grows with the text
          google       preparation, and create_pretraining_data.py of --google=FOLDER, a google-research/bert checkout
          reader       sequences/s of lengths 128 and 512: static masks, dynamic masks, and compact records without
                       padding; by the readers with and without TensorFlow
          jump         the first batch at steps 0 and 500,000 of a set of real size
          vocabulary   python -m bertjax.vocabulary and the trainer of the tokenizers library
Results:  RESULTS.md
Linux only. Compared sides alternate. Each line has one figure: the median of --runs, and the range.
"""

import itertools
import math
import pathlib
import statistics
import sys
import tempfile
import time
from collections.abc import Iterator

import numpy as np
from absl import flags

from bertjax.cli.app import run_command
from bertjax.common.errors import UserError
from bertjax.config.defaults import pretraining_config
from bertjax.data.batch import RECORD_ARRAYS, RowSize
from bertjax.data.corpus import sentences
from bertjax.data.corpus.corpus import read_documents
from bertjax.data.loading import pipeline
from bertjax.data.loading.masking import masking_of
from bertjax.data.loading.order import Order
from bertjax.data.loading.readers import plain, tf_data
from bertjax.data.loading.transforms import SeededTransform
from bertjax.data.records.layouts import features
from bertjax.data.records.record_sets import RecordSet, count_records, find_records, write_records
from bertjax.distributed.topology import available_cores
from bertjax.text import tokenizer
from experiments.benchmarks import google_records
from experiments.benchmarks.processes import Cost, run
from experiments.benchmarks.timing import in_turns, print_figure

CORPUS = flags.DEFINE_list("corpus", None, "As config.data.corpus.", required=True)
VOCAB = flags.DEFINE_string("vocab", None, "A published uncased vocab.txt of 30,522 tokens.", required=True)
MEASURE = flags.DEFINE_list("measure", "preparation,memory,reader,jump,vocabulary", "What to measure.")
RUNS = flags.DEFINE_integer("runs", 5, "Runs of each side of each measure; memory has one run.")
MEGABYTES = flags.DEFINE_list(
    "megabytes", "50,350", "Megabytes of text: all sizes for memory, the last for vocabulary, else the first."
)
LENGTH = flags.DEFINE_integer("length", 128, "Length of the sequences, except for reader and jump.")
DUPE_FACTOR = flags.DEFINE_integer("dupe_factor", 10, "As config.data.dupe_factor.")
WORKERS = flags.DEFINE_integer("workers", available_cores(), "Processes that prepare.")
GOOGLE = flags.DEFINE_string("google", None, "Folder of google-research/bert, for the measure google.")

VOCAB_SIZE, BATCH_SIZE = 30_522, 256
READERS = {  # fields of config.data
    "static": {},
    "dynamic": {"masking": "dynamic"},
    "compact": {"layout": "compact"},
}
LATE_STEP = 500_000
SHARDS, RECORDS_PER_SHARD, DISTINCT_SHARDS = 100, 90_000, 5  # as in the output of prepare

EXPERIMENT = """
from bertjax.config import named_stages, pretraining_config, stage
def get_config():
    config = pretraining_config()
    config.data.heldout_fraction = 0.0
    config.stages = named_stages(only=stage(1, {length}, {predictions}))
    return config
"""
THEIR_TRAINER = """
import sys, tokenizers
tokenizer = tokenizers.BertWordPieceTokenizer()
tokenizer.train(sys.argv[1], vocab_size=int(sys.argv[2]), show_progress=False)
tokenizer.save(sys.argv[3])
"""


def make_text(folder: pathlib.Path, size: int, *, sentence_lines: bool = False) -> pathlib.Path:
    """Writes the first `size` MB of the corpus to a file, with a blank line between documents; returns its path.

    With `sentence_lines`, each line has one sentence. Raises `UserError` if the corpus is smaller.
    """
    path = folder / f"{size}-{'sentences' if sentence_lines else 'lines'}.txt"
    if path.exists():
        return path
    written = 0
    with path.with_suffix(".partial").open("wb") as file:
        for document in read_documents(CORPUS.value):
            lines = sentences.split(document, "en", True) if sentence_lines else document.lines
            written += file.write(("\n".join(lines) + "\n\n").encode())
            if written >= size * 1e6:
                return path.with_suffix(".partial").rename(path)
    raise UserError(f"--corpus: {written / 1e6:.1f} MB of text, less than the {size} MB of --megabytes")


def predictions(length: int) -> int:
    return math.ceil(0.15 * length)


def experiment(folder: pathlib.Path, length: int) -> pathlib.Path:
    path = folder / f"experiment{length}.py"
    path.write_text(EXPERIMENT.format(length=length, predictions=predictions(length)))
    return path


def prepare(folder: pathlib.Path, text: pathlib.Path, length: int, **data) -> tuple[Cost, RecordSet]:
    """Runs the whole command with a new folder in `folder` as output; `data` are fields of `config.data`."""
    output = pathlib.Path(tempfile.mkdtemp(dir=folder))
    data = {"corpus": text, "dupe_factor": DUPE_FACTOR.value, **data}
    cost = run(
        [
            *(sys.executable, "-m", "bertjax.prepare", f"--config={experiment(folder, length)}"),
            *(f"--output={output}", f"--workers={WORKERS.value}", f"--config.tokenizer.path={VOCAB.value}"),
            *(f"--config.data.{name}={value}" for name, value in data.items()),
        ]
    )
    return cost, find_records(output, length, predictions(length), "train")


def size_of(files: RecordSet) -> int:
    """Returns the bytes of the files."""
    return sum(pathlib.Path(path).stat().st_size for path in files.paths)


def delete(files: RecordSet) -> None:
    for path in files.paths:
        pathlib.Path(path).unlink()


def settings(text: pathlib.Path, length: int) -> str:
    megabytes = text.stat().st_size / 1e6
    return f"{megabytes:.1f} MB, length {length}, dupe_factor {DUPE_FACTOR.value}, {WORKERS.value} workers"


def measure_preparation(folder: pathlib.Path) -> None:
    text, length = make_text(folder, sizes()[0]), LENGTH.value
    megabytes, costs = text.stat().st_size / 1e6, []
    for _ in range(RUNS.value):
        cost, files = prepare(folder, text, length)
        costs.append(cost)
        total, written = files.total, size_of(files) / 1e6
        delete(files)
    name = f"preparation, {settings(text, length)}"
    print_figure(name, [cost.seconds for cost in costs], "s", 1)
    print_figure(name, [megabytes / cost.seconds for cost in costs], "MB/s", 2)
    print_figure(name, [total / cost.seconds for cost in costs], "sequences/s")
    print_figure(f"{name}, peak memory of all processes", [cost.memory / 1e9 for cost in costs], "GB", 2)
    print(f"{name}, records: {total:,} in {written:,.0f} MB, {written / megabytes:.1f} times the text", flush=True)


def measure_memory(folder: pathlib.Path) -> None:
    peaks = []
    for size in sizes():
        text = make_text(folder, size)
        cost, files = prepare(folder, text, LENGTH.value)
        delete(files)
        peaks.append(cost.memory / 1e9)
        print_figure(f"peak memory of all processes, {settings(text, LENGTH.value)}", peaks[-1:], "GB", 3)
    print(f"peak memory, last text to first: {peaks[-1] / peaks[0]:.2f} times", flush=True)


def measure_google(folder: pathlib.Path) -> None:
    text, length = make_text(folder, sizes()[0], sentence_lines=True), LENGTH.value

    def theirs() -> tuple[float, int]:
        output = folder / "google.tfrecord"
        cost = google_records.create(
            GOOGLE.value,
            input_file=text,
            output_file=output,
            vocab_file=VOCAB.value,
            do_lower_case=True,
            max_seq_length=length,
            max_predictions_per_seq=predictions(length),
            dupe_factor=DUPE_FACTOR.value,
        )
        return count_records(str(output)) / cost.seconds, cost.memory

    def ours() -> tuple[float, int]:
        cost, files = prepare(folder, text, length, split_sentences=False)
        delete(files)
        return files.total / cost.seconds, cost.memory

    results = in_turns({"Google's script": theirs, "ours": ours}, RUNS.value)
    for name, found in results.items():
        print_figure(f"{name}, {settings(text, length)}", [rate for rate, _ in found], "sequences/s")
        print_figure(f"{name}, peak memory of all processes", [memory / 1e9 for _, memory in found], "GB", 2)
    their, our = (statistics.median(rate for rate, _ in found) for found in results.values())
    print(f"bertjax / Google: {our / their:.1f} times the sequences/s", flush=True)


def batches(order: Order, data: dict, start: int = 0) -> Iterator:
    """Yields batches; `data` are the fields of `config.data` of the preparation."""
    data, most = {**pretraining_config().data.to_dict(), **data}, predictions(order.row.tokens)
    masking = masking_of(data, tokenizer.load_tokenizer("wordpiece", VOCAB.value), most)
    transforms = [SeededTransform(masking)] if order.files.masking == "dynamic" else []
    return pipeline.train_batches(order, RECORD_ARRAYS, most, start=start, transforms=transforms)


def measure_reader(folder: pathlib.Path) -> None:
    text = make_text(folder, sizes()[0])
    for length in (128, 512):
        sides = {}
        for name, data in READERS.items():
            _, files = prepare(folder, text, length, **data)
            print(f"{name}, length {length}: {size_of(files) / files.total:.0f} bytes a record", flush=True)
            for with_what, module in (("tf.data", tf_data), ("no TensorFlow", plain)):
                given = files, length, data, module
                sides[f"{name}, {with_what}"] = lambda given=given: throughput(*given)
        for name, found in in_turns(sides, RUNS.value).items():
            name = f"reader, {name}, length {length}, batches of {BATCH_SIZE}"
            print_figure(name, [rate for rate, _ in found], "sequences/s")
            print_figure(f"{name}, of one core", [own for _, own in found], "sequences/s")


def throughput(files: RecordSet, length: int, data: dict, module) -> tuple[float, float]:
    """Returns the sequences/s of a reader over three whole shuffle windows, without the first batch: by elapsed time,
    and by the processor time of all cores together."""
    pipeline.reader = lambda: module
    order = Order(files, BATCH_SIZE, 0, RowSize(length, 8))
    stream = batches(order, data)
    next(stream)
    began, of_cores = time.monotonic(), time.process_time()
    read = BATCH_SIZE * sum(1 for _ in itertools.islice(stream, 3 * order.steps))
    seconds, of_cores = time.monotonic() - began, time.process_time() - of_cores
    stream.close()
    return read / seconds, read / of_cores


def measure_jump(folder: pathlib.Path) -> None:
    """Times the first batch. Files are repeated in the set to save disk space, and are read from the page cache."""
    paths = [write_shard(folder / f"{i}.tfrecord", seed=i) for i in range(DISTINCT_SHARDS)]
    files = RecordSet(tuple(itertools.islice(itertools.cycle(paths), SHARDS)), (RECORDS_PER_SHARD,) * SHARDS)

    def seconds_to_first(step: int) -> float:
        began = time.monotonic()
        stream = batches(Order(files, BATCH_SIZE, 0, RowSize(128, 8)), {}, step)
        next(stream)
        seconds = time.monotonic() - began
        stream.close()
        return seconds

    sides = {f"{step:,}": lambda step=step: seconds_to_first(step) for step in (0, LATE_STEP)}
    results = in_turns(sides, RUNS.value)
    for step, seconds in results.items():
        print_figure(f"first batch at step {step} of {SHARDS} shards, {files.total:,} records", seconds, "s", 1)


def write_shard(path: pathlib.Path, seed: int) -> str:
    rng, limits = np.random.default_rng(seed), {"input_ids": VOCAB_SIZE, "masked_lm_ids": VOCAB_SIZE}
    shapes = features(128, predictions(128))
    block = {
        name: rng.integers(limits.get(name, 2), size=(1000, size)).astype(dtype)
        for name, (size, dtype) in shapes.items()
    }
    write_records(path, itertools.repeat(block, RECORDS_PER_SHARD // 1000))
    return str(path)


def measure_vocabulary(folder: pathlib.Path) -> None:
    text = make_text(folder, sizes()[-1])

    def theirs() -> Cost:
        return run([sys.executable, "-c", THEIR_TRAINER, text, VOCAB_SIZE, folder / "tokenizer.json"])

    def ours() -> Cost:
        config = [f"--config={experiment(folder, 128)}", f"--config.data.corpus={text}"]
        config += [f"--config.model.vocab_size={VOCAB_SIZE}", f"--output={folder / 'vocabulary'}"]
        config += [f"--workers={WORKERS.value}"]
        return run([sys.executable, "-m", "bertjax.vocabulary", *config])

    for name, costs in in_turns({"tokenizers' trainer": theirs, "ours": ours}, RUNS.value).items():
        name = f"a vocabulary of {VOCAB_SIZE:,} from {text.stat().st_size / 1e6:.1f} MB, {name}"
        print_figure(name, [cost.seconds for cost in costs], "s", 1)
        print_figure(f"{name}, peak memory of all processes", [cost.memory / 1e9 for cost in costs], "GB", 2)


MEASURES = {
    "preparation": measure_preparation,
    "memory": measure_memory,
    "google": measure_google,
    "reader": measure_reader,
    "jump": measure_jump,
    "vocabulary": measure_vocabulary,
}


def sizes() -> list[int]:
    """Returns the sizes of the texts, in MB."""
    if not MEGABYTES.value or not all(size.isdecimal() for size in MEGABYTES.value):
        raise UserError(f"--megabytes={','.join(MEGABYTES.value)}: must be whole numbers")
    return list(map(int, MEGABYTES.value))


def main(_) -> None:
    if unknown := set(MEASURE.value) - set(MEASURES):
        raise UserError(f"--measure: {unknown.pop()!r} is none of {', '.join(MEASURES)}")
    if "google" in MEASURE.value and not GOOGLE.value:
        raise UserError("--measure=google needs --google=FOLDER, a checkout of google-research/bert")
    for name in MEASURE.value:
        with tempfile.TemporaryDirectory() as folder:
            MEASURES[name](pathlib.Path(folder))


if __name__ == "__main__":
    run_command(main)
