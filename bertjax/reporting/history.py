"""Reads the metrics of a run from `metrics.jsonl`: each metric by steps, tokens and hours."""

import dataclasses
import functools
from typing import Any

import numpy as np
from etils import epath

from bertjax.common.files import read_json
from bertjax.training.checkpoints.workdir import TRIAL_RESULT, TRIALS, TrialResult, require_info
from bertjax.training.monitoring.clocks import PARTS
from bertjax.training.trackers.jsonl import read_metrics


@dataclasses.dataclass(frozen=True)
class History:
    """The metrics of a run.

    Args:
      name: the name of the run.
      task: `config.task`.
      lines: the lines of `metrics.jsonl`.
      batch_size: the number of sequences of a step.
    """

    name: str
    task: str
    lines: list[dict[str, Any]]
    batch_size: int

    def values_of(self, metric: str) -> tuple[np.ndarray, np.ndarray]:
        """Returns the steps at which a metric was logged, and the values; both `[times]`."""
        lines = [line for line in self.lines if line.get(metric) is not None]
        return np.array([line["step"] for line in lines]), np.array([line[metric] for line in lines])

    def tokens(self, steps: np.ndarray) -> np.ndarray:
        """Returns the number of tokens, without padding, that training had read at some steps."""
        return np.interp(steps, *self._tokens)

    def hours(self, steps: np.ndarray) -> np.ndarray:
        """Returns the hours of all processes of the run up to some steps, including evaluations and waiting."""
        return np.interp(steps, *self._hours)

    @functools.cached_property
    def _tokens(self) -> tuple[np.ndarray, np.ndarray]:
        pairs = [(line["step"], tokens) for line in self.lines if (tokens := self._tokens_per_step(line))]
        steps, of_step = np.array(pairs).reshape(-1, 2).T
        return np.append(0, steps), np.append(0, np.cumsum(np.diff(steps, prepend=0) * of_step))

    def _tokens_per_step(self, line: dict[str, Any]) -> float | None:
        if count := line.get("train/tokens_per_step"):
            return float(count)
        # Older versions log the tokens and the sequences per second.
        tokens, sequences = (line.get(f"train/{unit}_per_second") for unit in ("tokens", "sequences"))
        return self.batch_size * tokens / sequences if tokens and sequences else None

    @functools.cached_property
    def _hours(self) -> tuple[np.ndarray, np.ndarray]:
        pairs = [(line["step"], sum(line.get(f"wall/{part}") or 0.0 for part in PARTS)) for line in self.lines]
        steps, seconds = np.array([(0, 0.0), *pairs]).T
        return steps, np.cumsum(seconds) / 3600


def read_history(workdir: epath.PathLike, name: str = "") -> History:
    """Reads the metrics of a run. The default of `name` is the name of the folder.

    Raises:
      UserError: the folder is not the workdir of a run.
    """
    info = require_info(workdir)
    return History(name or epath.Path(workdir).name, info.config.task, read_metrics(workdir), info.config.batch_size)


def read_results(workdir: epath.PathLike) -> dict[epath.Path, TrialResult]:
    """Returns {folder: result} of the finished trials of a sweep; empty if the workdir does not contain a sweep."""
    paths = sorted((epath.Path(workdir) / TRIALS).glob(f"*/{TRIAL_RESULT}"))
    return {path.parent: read_json(path, TrialResult) for path in paths}
