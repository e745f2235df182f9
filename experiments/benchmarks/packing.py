"""The gain of packing in pre-training: shares of real tokens, the reader's speed, real tokens/s of the same steps.

Command:  python -m experiments.benchmarks.packing --corpus=TEXT --vocab=vocab.txt
Measures: for each of --lengths, records are prepared from the text. Padded and packed batches have the same sequences.
          Prints real tokens, rows of a step, and sequences/s of the reader; then steps of --model, alternating
Results:  RESULTS.md
"""

import functools
import itertools
import math
import pathlib
import statistics
import tempfile
import time

import numpy as np
from absl import flags

from bertjax.cli.app import run_command
from bertjax.config.defaults import named_stages, pretraining_config, stage
from bertjax.config.model_config import model_size
from experiments.benchmarks.timing import Steps, in_turns, print_figure

CORPUS = flags.DEFINE_list("corpus", None, "As config.data.corpus.", required=True)
VOCAB = flags.DEFINE_string("vocab", None, "A vocab.txt.", required=True)
LENGTHS = flags.DEFINE_list("lengths", "128,512", "Of the sequences.")
BATCH_SIZE = flags.DEFINE_integer("batch_size", 256, "Sequences per step, for shares and reader.")
STEP_BATCH = flags.DEFINE_list("step_batch_sizes", "32,16", "Sequences per timed step, for each length; 0: none.")
MODEL = flags.DEFINE_string("model", "mini", "A key of config.SIZES.")
STEPS = flags.DEFINE_integer("steps", 4, "Of a round.")
RUNS = flags.DEFINE_integer("runs", 5, "Rounds of each side.")


def make_config(length: int, batch_size: int, packing: bool):
    config = pretraining_config()
    config.data.update(corpus=",".join(CORPUS.value), heldout_fraction=0.0, dupe_factor=2)
    config.tokenizer.path = VOCAB.value
    config.model.update(model_size(MODEL.value))
    config.stages = named_stages(only=stage(1000, length, math.ceil(0.15 * length)))
    config.batch_size, config.packing = batch_size, packing
    return config


def make_task(records: pathlib.Path, length: int, batch_size: int, packing: bool):
    import jax

    from bertjax.distributed.mesh import make_mesh
    from bertjax.pretraining.data import load_stages
    from bertjax.pretraining.task import Pretraining

    config = make_config(length, batch_size, packing)
    mesh = make_mesh(config, jax.devices()[:1])
    return Pretraining(config, mesh, load_stages(config, mesh, records))


def measure_reading(records: pathlib.Path, length: int) -> None:
    """Measures reading over the steps of one shuffle window, with each record once."""
    tasks = {name: make_task(records, length, BATCH_SIZE.value, name == "packed") for name in ("padded", "packed")}

    def read(task) -> tuple[float, float]:
        """Returns sequences/s and the share of real tokens."""
        steps = task.data[0].records.order.steps
        batches, real, places = task.batches(0), 0, 0
        next(batches)
        began = time.monotonic()
        for batch in itertools.islice(batches, steps - 1):
            real, places = real + np.count_nonzero(batch["segments"]), places + batch["segments"].size
        seconds = time.monotonic() - began
        batches.close()
        return (steps - 1) * BATCH_SIZE.value / seconds, real / places

    results = in_turns({name: functools.partial(read, task) for name, task in tasks.items()}, RUNS.value)
    for name, rounds in results.items():
        rows = f"{tasks[name].data[0].rows} rows for {BATCH_SIZE.value} sequences"
        print(f"length {length}, {name}: {rounds[0][1]:.1%} real tokens, {rows}", flush=True)
        print_figure(f"length {length}, {name}: reader", [rate for rate, _ in rounds], "sequences/s")


def measure_steps(records: pathlib.Path, length: int, batch_size: int) -> None:
    def round_of(packing: bool):
        """Returns a function that runs the next steps, and returns real tokens/s."""
        task = make_task(records, length, batch_size, packing)
        train, batches = Steps(task), task.batches(0)

        def run() -> float:
            some = [train.put(batch) for batch in itertools.islice(batches, STEPS.value)]
            began = time.monotonic()
            real = float(sum([train(batch)["tokens"] for batch in some]))  # waits for the steps
            train.state.step.block_until_ready()
            return real / (time.monotonic() - began)

        return run

    sides = {"padded": round_of(False), "packed": round_of(True)}
    in_turns(sides, 1)  # compiles
    results = in_turns(sides, RUNS.value)
    for name, rates in results.items():
        print_figure(f"length {length}, {name}: {MODEL.value}, {batch_size} sequences a step", rates, "real tokens/s")
    ratio = statistics.median(results["packed"]) / statistics.median(results["padded"])
    print(f"length {length}: packed / padded {ratio:.2f}", flush=True)


def main(_) -> None:
    from bertjax.data.preprocessing.preparation import prepare
    from bertjax.distributed.mesh import use_cpu_cores
    from bertjax.distributed.topology import available_cores

    use_cpu_cores(make_config(128, 8, False))
    for length, step_batch in zip(map(int, LENGTHS.value), map(int, STEP_BATCH.value), strict=True):
        with tempfile.TemporaryDirectory() as folder:
            records = pathlib.Path(folder) / "records"
            prepare(make_config(length, BATCH_SIZE.value, False), records, available_cores())
            measure_reading(records, length)
            if step_batch:
                measure_steps(records, length, step_batch)


if __name__ == "__main__":
    run_command(main)
