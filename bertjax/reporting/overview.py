"""The runs within folders, a line each."""

import dataclasses
import time
from collections.abc import Iterator, Sequence

from etils import epath

from bertjax.common import lock
from bertjax.common.errors import UserError
from bertjax.common.files import absolute
from bertjax.config import stages
from bertjax.models import families
from bertjax.training.checkpoints.workdir import CONFIG, REPORT, TRIAL_RESULT, TRIALS, RunInfo, read_info
from bertjax.training.trackers.jsonl import METRICS, read_metrics

DEPTH = 4  # folders below the given one that are looked through
UNITS = ((86_400, "d"), (3_600, "h"), (60, "min"))  # seconds
SUMMARY = "sweep.md"  # a search writes it at its end


@dataclasses.dataclass(frozen=True)
class Listed:
    """What is shown of a run."""

    run: str
    trains: str
    step: str = ""
    loss: str = ""
    evaluation: str = ""
    state: str = ""
    changed: str = ""  # how long ago


def rows(folders: Sequence[str]) -> list[Listed]:
    """Returns the runs within folders, by their paths. Raises `UserError` if there is no such folder."""
    found = []
    for folder in folders:
        if not (path := epath.Path(folder)).is_dir():
            raise UserError(f"no folder {folder!r}; name one with runs")
        rows = [_row(workdir, path) for workdir in _workdirs(path, DEPTH)]
        found += [dataclasses.replace(row, run=f"{folder}: {row.run}") for row in rows] if len(folders) > 1 else rows
    return found


def table(rows: Sequence[Listed]) -> str:
    """Returns the rows as lines in columns, under the names of the columns; columns without values are left out."""
    names = [field.name for field in dataclasses.fields(Listed)]
    lines = [names, *([getattr(row, name) for name in names] for row in rows)]
    widths = [max(len(line[column]) for line in lines[1:]) for column in range(len(names))]
    kept = [(column, max(width, len(names[column]))) for column, width in enumerate(widths) if width]
    return "\n".join("  ".join(line[column].ljust(width) for column, width in kept).rstrip() for line in lines)


def _workdirs(folder: epath.Path, depth: int) -> Iterator[epath.Path]:
    """Yields the workdirs within a folder, those of a search as one, unless it is the folder."""
    if ((folder / CONFIG).exists() and (folder / METRICS).exists()) or (_is_search(folder) and depth < DEPTH):
        yield folder
    elif depth:
        for each in sorted(folder.iterdir()):
            if each.is_dir() and not each.name.startswith("."):
                yield from _workdirs(each, depth - 1)


def _is_search(folder: epath.Path) -> bool:
    if not (folder / TRIALS).is_dir():
        return False
    return (folder / SUMMARY).exists() or any((trial / TRIAL_RESULT).exists() for trial in (folder / TRIALS).iterdir())


def _row(workdir: epath.Path, within: epath.Path) -> Listed:
    name = str(workdir.relative_to(within)) if workdir != within else absolute(workdir).name
    if _is_search(workdir):
        trials = [trial for trial in (workdir / TRIALS).iterdir() if (trial / CONFIG).exists()]
        ended = sum(_state(trial) == "finished" for trial in trials)
        state = "running" if lock.is_held(workdir) else "finished" if ended == len(trials) else "stopped"
        return Listed(name, f"search, {len(trials)} trials", f"{ended} ended", state=state)
    try:
        info = read_info(workdir)
    except UserError as error:  # one that cannot be read does not hide the others
        return Listed(name, "", state=f"unreadable: {error}")
    lines = read_metrics(workdir)
    step = _step(workdir, lines)
    total = _total_steps(info)
    changed = time.time() - (workdir / METRICS).stat().mtime
    return Listed(
        name,
        f"{info.config.task}, {_model(info)}",
        f"{step:,} of {total:,}" if total else f"{step:,}",
        _last(lines, "train/loss"),
        _evaluation(lines),
        _state(workdir),
        _age(changed),
    )


def _step(workdir: epath.Path, lines: list[dict]) -> int:
    """Returns the last step that was logged, or the step of the last checkpoint if that is later."""
    from bertjax.training.checkpoints import checkpoint

    return max([line["step"] for line in lines[-1:]] + checkpoint.steps(workdir)[-1:], default=0)


def _state(workdir: epath.Path) -> str:
    if lock.is_held(workdir):
        return "running"
    return "finished" if (workdir / REPORT).exists() else "stopped"


def _model(info: RunInfo) -> str:
    config = families.config_of(info.config)
    return f"{config.family} {config.num_hidden_layers} x {config.hidden_size}"


def _total_steps(info: RunInfo) -> int | None:
    if info.total_steps:
        return info.total_steps
    if "stages" in info.config:
        return stages.total_steps(info.config)
    if not info.train_examples:
        return None
    from bertjax.data.loading.examples import count_steps  # imports JAX

    return count_steps(info.config, info.train_examples)


def _last(lines: list[dict], metric: str) -> str:
    found = next((line[metric] for line in reversed(lines) if line.get(metric) is not None), None)
    return "" if found is None else f"{found:.3f}"


def _evaluation(lines: list[dict]) -> str:
    """The first score of the last evaluation, which is the task's own."""
    for line in reversed(lines):
        for name, value in line.items():
            if name.startswith("eval/") and value is not None:
                return f"{name.removeprefix('eval/')} {value:.3f}"
    return ""


def _age(seconds: float) -> str:
    for size, unit in UNITS:
        if seconds >= size:
            return f"{seconds / size:.0f} {unit} ago"
    return "now"
