"""Shared parts of the benchmarks: timed calls, alternating rounds, training steps, and the tables of their results."""

import statistics
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import TypeVar

Key = TypeVar("Key")
Result = TypeVar("Result")


def seconds_of(run: Callable[[], object]) -> float:
    """Returns the seconds of a call."""
    start = time.perf_counter()
    run()
    return time.perf_counter() - start


def calls_per_second(run: Callable[[], object], seconds: float) -> float:
    """Calls a function repeatedly for `seconds` seconds, and returns the number of calls per second."""
    count, start = 0, time.perf_counter()
    while (passed := time.perf_counter() - start) < seconds:
        run()
        count += 1
    return count / passed


def in_turns(sides: Mapping[Key, Callable[[], Result]], rounds: int) -> dict[Key, list[Result]]:
    """Calls each side once in each round, so that a slow minute of the machine slows all sides; returns the results."""
    results: dict[Key, list[Result]] = {name: [] for name in sides}
    for _ in range(rounds):
        for name, run in sides.items():
            results[name].append(run())
    return results


class Steps:
    """Training steps of a task from step 0, on batches of the caller, without checkpoints and reports.

    Attributes:
      program: the compiled functions of the task.
      state: the state after the last step.
    """

    def __init__(self, task):
        import jax

        from bertjax.training.optim.schedules import schedule_of
        from bertjax.training.step import Program, put_hyperparameters

        self._mesh, self.program = task.mesh, Program(task, task.config, task.mesh)
        self._hyperparameters = put_hyperparameters(0, schedule_of(task.config, task.total_steps), task.mesh)
        self.state = self.program.init(jax.random.key(0))

    def put(self, batch: dict) -> dict:
        """Copies a batch to the devices."""
        from bertjax.distributed.mesh import put_batch

        return put_batch(batch, self._mesh)

    def __call__(self, batch: dict) -> dict:
        """Runs a step on a batch on the devices, and returns the metrics."""
        self.state, metrics = self.program.train_step(self.state, batch, self._hyperparameters)
        return metrics

    def compiled_text(self, batch: dict) -> str:
        """Returns the compiled program of a step."""
        return self.program.train_step.lower(self.state, batch, self._hyperparameters).compile().as_text()


def epoch_timer(opened) -> Callable[[], float]:
    """Returns a function that trains an epoch from the initial params, and returns the seconds per step.

    Args:
      opened: a `FineTuningRun`.
    """
    import jax

    task, train = opened.task, Steps(opened.task)
    params = opened.initial_params(train.state.params)

    def epoch() -> None:
        for batch in task.batches(0):
            metrics = train(train.put(batch))
        float(metrics["loss"])  # waits for the steps

    def run() -> float:
        copies = jax.tree.map(lambda x: x.copy(), params)  # the step donates the memory of its state
        train.state = train.program.init(jax.random.key(0)).replace(params=copies)
        return seconds_of(epoch) / task.total_steps

    return run


def summary(seconds: Sequence[float]) -> dict[str, float]:
    """Returns the median, the least and the most seconds, for a line of JSON."""
    return {"seconds": statistics.median(seconds), "least": min(seconds), "most": max(seconds)}


def spread(values: Sequence[float], digits: int = 0) -> str:
    """Formats values as "median (least - most)"."""
    median, least, most = (f"{value:,.{digits}f}" for value in (statistics.median(values), min(values), max(values)))
    return f"{median} ({least} - {most})"


def mean_and_deviation(values: Sequence[float], digits: int = 1) -> str:
    """Formats several values as "mean ± standard deviation", one value as itself, and no values as ""."""
    if not values:
        return ""
    deviation = f" ± {statistics.stdev(values):.{digits}f}" if len(values) > 1 else ""
    return f"{statistics.fmean(values):.{digits}f}{deviation}"


def table_row(cells: Iterable[object]) -> str:
    """Returns a row of a table in Markdown."""
    return f"| {' | '.join(map(str, cells))} |"


def table_header(names: Sequence[str]) -> str:
    """Returns the two header lines of a table in Markdown."""
    return f"{table_row(names)}\n{'|---' * len(names)}|"


def print_figure(figure: str, values: Sequence[float], unit: str, digits: int = 0) -> None:
    """Prints the median of the values of several runs, and the least and the most value."""
    median, least, most = (f"{value:,.{digits}f}" for value in (statistics.median(values), min(values), max(values)))
    runs = f" ({least} to {most} in {len(values)} runs)" if len(values) > 1 else ""
    print(f"{figure}: {median} {unit}{runs}", flush=True)
