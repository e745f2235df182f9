"""The wait of a run at the end of a stage, when its reader is closed.

Command:  python -m experiments.benchmarks.stage_ends
Measures: the longest wait of --starts processes for a batch after the first batch, and for the end. --at_once processes
          run in parallel, started --apart seconds after each other, because they sleep most of the time. Each process
          reads the batches of two stages like a training run, --seconds of each stage at --steps_per_second. If
          tf.data's autotuning thread is enabled, closing waits for the thread, which sleeps up to a minute.
Results:  RESULTS.md
"""

import concurrent.futures
import itertools
import multiprocessing
import pathlib
import statistics
import tempfile
import time

from absl import flags

from bertjax.cli.app import run_command
from bertjax.config import experiments
from bertjax.distributed.topology import available_cores

STARTS = flags.DEFINE_integer("starts", 20, "Of a run.")
AT_ONCE = flags.DEFINE_integer("at_once", 20, "Processes.")
APART = flags.DEFINE_float("apart", 4, "Seconds between two starts; readers that start together wait for cores.")
SECONDS = flags.DEFINE_float("seconds", 100, "Of each stage.")
STEPS_PER_SECOND = flags.DEFINE_float("steps_per_second", 20, "Of each stage.")


def longest_wait(records: str, seconds: float, steps_per_second: float, starts_after: float) -> float:
    """Reads two stages; returns the longest wait in seconds."""
    time.sleep(starts_after)
    from bertjax.distributed.mesh import make_mesh
    from bertjax.pretraining.data import load_stages
    from bertjax.pretraining.task import Pretraining

    config = experiments.load("quickstart")
    with config.unlocked():
        for stage in config.stages.values():
            stage.steps = round(seconds * steps_per_second)
    mesh = make_mesh(config)
    batches, longest = Pretraining(config, mesh, load_stages(config, mesh, records)).batches(0), 0.0
    for number in itertools.count():
        began = time.monotonic()
        ended = next(batches, None) is None
        longest = max(longest, time.monotonic() - began if number else 0.0)  # the first batch opens files
        if ended:
            return longest
        time.sleep(1 / steps_per_second)


def main(_) -> None:
    from bertjax.data.preprocessing import preparation

    with tempfile.TemporaryDirectory() as folder:
        records = pathlib.Path(folder) / "records"
        preparation.prepare(experiments.load("quickstart"), records, workers=available_cores())
        context = multiprocessing.get_context("spawn")
        with concurrent.futures.ProcessPoolExecutor(AT_ONCE.value, context, max_tasks_per_child=1) as pool:
            given = (str(records), SECONDS.value, STEPS_PER_SECOND.value)
            after = [number % AT_ONCE.value * APART.value for number in range(STARTS.value)]
            waits = [task.result() for task in [pool.submit(longest_wait, *given, seconds) for seconds in after]]
    print(
        f"{len(waits)} starts of two stages of {SECONDS.value:g} s: the longest wait of each is "
        f"{statistics.median(waits):.2f} s in the median, {max(waits):.2f} s at the most"
    )


if __name__ == "__main__":
    run_command(main)
