"""What `metrics.jsonl` says of a run: each metric by steps, tokens and hours."""

import dataclasses
import functools

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
      lines: the lines of `metrics.jsonl`.
      batch_size: sequences of a step.
    """

    name: str
    task: str
    lines: list[dict]
    batch_size: int

    def of(self, metric: str) -> tuple[np.ndarray, np.ndarray]:
        """Returns the steps at which a metric was logged, and its values, `[times]` each."""
        found = [(line["step"], line[metric]) for line in self.lines if line.get(metric) is not None]
        return np.array([step for step, _ in found]), np.array([value for _, value in found])

    def tokens(self, steps: np.ndarray) -> np.ndarray:
        """Returns how many tokens, without padding, training had read at some steps."""
        return np.interp(steps, *self._tokens)

    def hours(self, steps: np.ndarray) -> np.ndarray:
        """Returns the hours of all processes of the run at some steps, evaluations and waiting included."""
        return np.interp(steps, *self._hours)

    @functools.cached_property
    def _tokens(self) -> tuple[np.ndarray, np.ndarray]:
        found = [(line["step"], tokens) for line in self.lines if (tokens := self._tokens_per_step(line))]
        steps, of_step = np.array(found).reshape(-1, 2).T
        return np.append(0, steps), np.append(0, np.cumsum(np.diff(steps, prepend=0) * of_step))

    def _tokens_per_step(self, line: dict) -> float | None:
        if found := line.get("train/tokens_per_step"):
            return found
        tokens, sequences = (line.get(f"train/{unit}_per_second") for unit in ("tokens", "sequences"))
        return self.batch_size * tokens / sequences if tokens and sequences else None  # a line of an older version

    @functools.cached_property
    def _hours(self) -> tuple[np.ndarray, np.ndarray]:
        found = [(line["step"], sum(line.get(f"wall/{part}") or 0.0 for part in PARTS)) for line in self.lines]
        steps, seconds = np.array([(0, 0.0), *found]).T
        return steps, np.cumsum(seconds) / 3600


def read_history(workdir: epath.PathLike, name: str = "") -> History:
    """Reads the metrics of a run; by default it has the name of its folder.

    Raises `UserError` if that is not the workdir of a run.
    """
    info = require_info(workdir)
    return History(name or epath.Path(workdir).name, info.config.task, read_metrics(workdir), info.config.batch_size)


def read_results(workdir: epath.PathLike) -> dict[epath.Path, TrialResult]:
    """Returns the results of the finished trials of a search, by their folders; none if it is not a search."""
    paths = sorted((epath.Path(workdir) / TRIALS).glob(f"*/{TRIAL_RESULT}"))
    return {path.parent: read_json(path, TrialResult) for path in paths}
