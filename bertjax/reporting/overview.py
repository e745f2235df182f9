"""Lists the runs within folders, one line per run."""

import re
import time
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

from etils import epath

from bertjax.common import lock
from bertjax.common.errors import UserError
from bertjax.common.files import absolute
from bertjax.config import stages
from bertjax.models import families
from bertjax.training.checkpoints.workdir import CONFIG, REPORT, TRIAL_RESULT, TRIALS, RunInfo, require_info
from bertjax.training.trackers.jsonl import METRICS, read_metrics

DEPTH = 4  # levels of folders below the named folder that are searched
UNITS = ((86_400, "d"), (3_600, "h"), (60, "min"))  # seconds
SUMMARY = "sweep.md"  # a sweep writes this file at the end


class Listed(NamedTuple):
    """The line of a run. `changed`: the time since the last metrics."""

    run: str
    trains: str = ""
    step: str = ""
    loss: str = ""
    evaluation: str = ""
    state: str = ""
    changed: str = ""


def rows(folders: Sequence[str]) -> list[Listed]:
    """Returns the runs within folders, in the order of their paths. Raises `UserError` if a folder does not exist."""
    listed = []
    for folder in folders:
        if not (path := epath.Path(folder)).is_dir():
            raise UserError(f"no folder {folder!r}; name a folder with runs")
        prefix = f"{folder}: " if len(folders) > 1 else ""
        for workdir in _workdirs(path, DEPTH):
            name = str(workdir.relative_to(path)) if workdir != path else absolute(workdir).name
            listed.append((_search_row if _is_search(workdir) else _run_row)(workdir, f"{prefix}{name}"))
    return listed


def table(rows: Sequence[Listed]) -> str:
    """Returns lines with the rows in columns, below the names of the columns. Omits columns without values."""
    columns = zip(Listed._fields, *rows)
    padded = [[cell.ljust(max(map(len, column))) for cell in column] for column in columns if any(column[1:])]
    return "\n".join("  ".join(line).rstrip() for line in zip(*padded))


def _workdirs(folder: epath.Path, depth: int) -> Iterator[epath.Path]:
    """Yields the workdirs within a folder. A sweep is one workdir, unless the sweep is the named folder."""
    if ((folder / CONFIG).exists() and (folder / METRICS).exists()) or (_is_search(folder) and depth < DEPTH):
        yield folder
    elif depth:
        for path in sorted(folder.iterdir()):
            if path.is_dir() and not path.name.startswith("."):
                yield from _workdirs(path, depth - 1)


def _is_search(folder: epath.Path) -> bool:
    trials = folder / TRIALS
    return trials.is_dir() and (
        (folder / SUMMARY).exists() or any((trial / TRIAL_RESULT).exists() for trial in trials.iterdir())
    )


def _search_row(workdir: epath.Path, name: str) -> Listed:
    trials = [trial for trial in (workdir / TRIALS).iterdir() if (trial / CONFIG).exists()]
    ended = sum(_state(trial) == "finished" for trial in trials)
    state = "running" if lock.is_held(workdir) else "finished" if ended == len(trials) else "stopped"
    return Listed(name, f"sweep, {len(trials)} trials", f"{ended} ended", state=state)


def _run_row(workdir: epath.Path, name: str) -> Listed:
    try:
        info = require_info(workdir)
    except UserError as error:  # the other runs are listed
        return Listed(name, state=f"unreadable: {error}")
    lines = read_metrics(workdir)
    model = families.config_of(info.config)
    step, total = _last_step(workdir, lines), _total_steps(info)
    return Listed(
        name,
        f"{info.config.task}, {model.family} {model.num_hidden_layers} x {model.hidden_size}",
        f"{step:,} of {total:,}" if total else f"{step:,}",
        _last(lines, "train/loss").rpartition(" ")[2],
        _last(lines, "eval/.*").removeprefix("eval/"),  # the first score of an evaluation is the main score of the task
        _state(workdir),
        _age(time.time() - (workdir / METRICS).stat().mtime),
    )


def _last_step(workdir: epath.Path, lines: list[dict[str, Any]]) -> int:
    """Returns the last step that was logged, or the step of the last checkpoint if that step is later."""
    from bertjax.training.checkpoints import checkpoint

    return max([line["step"] for line in lines[-1:]] + checkpoint.steps(workdir)[-1:], default=0)


def _state(workdir: epath.Path) -> str:
    if lock.is_held(workdir):
        return "running"
    return "finished" if (workdir / REPORT).exists() else "stopped"


def _total_steps(info: RunInfo) -> int | None:
    if info.total_steps:
        return info.total_steps
    if "stages" in info.config:
        return stages.total_steps(info.config)
    if not info.train_examples:
        return None
    from bertjax.data.loading.examples import count_steps  # imports JAX

    return count_steps(info.config, info.train_examples)


def _last(lines: list[dict[str, Any]], pattern: str) -> str:
    """Returns the metric with a matching name in the last such line, as "NAME VALUE"; "" if no name matches.

    If several names in the line match, returns the first metric.
    """
    metrics = ((name, value) for line in reversed(lines) for name, value in line.items() if value is not None)
    return next((f"{name} {value:.3f}" for name, value in metrics if re.fullmatch(pattern, name)), "")


def _age(seconds: float) -> str:
    for size, unit in UNITS:
        if seconds >= size:
            return f"{seconds / size:.0f} {unit} ago"
    return "now"
