"""Writes a page about runs: one HTML file with numbers, tables and embedded pictures of curves.

`templates/report.html` defines the layout. Jinja escapes all texts.
"""

import base64
import contextlib
import io
import itertools
import os
import urllib.parse
from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import jax
import jinja2
import numpy as np
from etils import epath
from flax.traverse_util import flatten_dict
from ml_collections import ConfigDict

from bertjax.common.errors import UserError
from bertjax.common.files import absolute, write_whole
from bertjax.common.progress import phase
from bertjax.config.defaults import fine_tuning_config, pretraining_config
from bertjax.interop.pretrained import Pretrained
from bertjax.models import families
from bertjax.models.family import ExposesAttention
from bertjax.reporting import curves, insight
from bertjax.reporting.history import History, read_history, read_results
from bertjax.training.checkpoints import checkpoint
from bertjax.training.checkpoints.workdir import (
    HTML_REPORT,
    TRIALS,
    TrialResult,
    read_commands,
    read_report,
    read_samples,
    require_info,
)
from bertjax.training.monitoring.clocks import PARTS

if TYPE_CHECKING:
    from matplotlib.figure import Figure

PICTURE, ATTENTION = "report.png", "report-attention.png"
MAX_CHECKPOINTS = 10  # the last checkpoints of a run
MAX_SCORES = 6  # of a run, a sweep or a checkpoint
DPI, ATTENTION_DPI = 80, 110  # the labels of the attention are small
TEMPLATES = jinja2.Environment(loader=jinja2.PackageLoader(__package__), autoescape=True)

Trials = dict[epath.Path, TrialResult]


class Checkpoint(NamedTuple):
    """A checkpoint in the list: its name, its scores, and its path relative to the page; "" in an object store."""

    name: str
    scores: str
    link: str


def write_page(
    folder: epath.PathLike,
    workdirs: Sequence[epath.PathLike],
    source: Pretrained | None = None,
    text: str = "",
    words: Sequence[str] = (),
    refreshed: float = 0,
) -> epath.Path:
    """Writes the page and its pictures to a folder, and returns the path of the page.

    Args:
      folder: the folder.
      workdirs: the workdirs of runs, or of sweeps, whose trials share a plot. May be empty with a source.
      source: a checkpoint whose attention and word embeddings are shown.
      text: the text for the attention.
      words: the words whose nearest embeddings are listed; by default the words of the text.
      refreshed: seconds after which a browser loads the page again; 0: never.

    Raises:
      UserError: a workdir is not the workdir of a run, or there is nothing to show.
    """
    folder, named = epath.Path(folder), _short_names(workdirs)
    runs = {name: workdir for name, workdir in named.items() if not (workdir / TRIALS).is_dir()}
    groups: dict[str, Trials] = {}
    for name, workdir in named.items():
        if name not in runs:
            groups |= _trials_by_settings(name, workdir)
    run_histories = [read_history(workdir, name) for name, workdir in runs.items()]
    # If there is only one group of trials, the plots show the name and the color of each trial, not of the group.
    is_alone = len(runs) + len(groups) == 1
    trials = ((trial, trial.name if is_alone else title) for title, results in groups.items() for trial in results)
    histories = [*run_histories, *(read_history(trial, name) for trial, name in trials)]
    values: dict[str, Any] = {"refreshed": refreshed, "runs": [_summary(history) for history in run_histories]}
    if groups:
        values |= _scores_of_groups(groups)
    if any(history.lines for history in histories):
        values["curves"] = _save(curves.draw_curves(histories), folder / PICTURE, DPI)
    elif source is None:
        raise UserError(f"{', '.join(map(str, workdirs))}: no metrics yet; wait until the run logs metrics")
    if len(named) == 1 and runs:
        values |= _content_of(*runs.values())
    values["checkpoints"] = _checkpoints(folder, runs.values())
    if source is not None:
        values |= _insight(folder, source, text, words)
    page = TEMPLATES.get_template("report.html").render(title=", ".join(named) or values["source"], **values)
    write_whole(folder / HTML_REPORT, page + "\n")
    return folder / HTML_REPORT


def draw(workdir: epath.Path) -> None:
    """Writes the page about a finished run, on the first host. Prints errors, because the run itself has succeeded."""
    if jax.process_index() == 0:
        phase(f"drawing {workdir / HTML_REPORT}")
        try:
            write_page(workdir, [workdir])
        except Exception as error:
            print(f"{workdir / HTML_REPORT}: not drawn ({error})", flush=True)


def _short_names(workdirs: Sequence[epath.PathLike]) -> dict[str, epath.Path]:
    """Returns {shortest unique end of the path: workdir}, without repetitions."""
    paths = {absolute(workdir): epath.Path(workdir) for workdir in workdirs}
    ends = ({"/".join(path.parts[-length:]): paths[path] for path in paths} for length in itertools.count(1))
    return next(named for named in ends if len(named) == len(paths))


def _content_of(workdir: epath.Path) -> dict[str, Any]:
    """Returns the report, a few predictions, the commands and the config of a run.

    The workdirs of older versions lack some of these parts.
    """
    return {
        "report": read_report(workdir),
        "samples": [list(sample.values()) for sample in read_samples(workdir)],
        "commands": read_commands(workdir),
        "config": _changed_fields(require_info(workdir).config),
    }


def _changed_fields(config: ConfigDict) -> list[tuple[str, Any, Any]]:
    """Returns the fields of a config that do not have their defaults: (name, value, default)."""
    default_config = pretraining_config() if "stages" in config else fine_tuning_config(config.task)
    default_config = default_config.copy_and_resolve_references().unlock()
    default_config.model = families.model_fields(config.model.family)
    fields, defaults = (flatten_dict(fields.to_dict(), sep=".") for fields in (config, default_config))
    empty = ("", False, None)  # these values are not shown if there is no default
    return [
        (name, value, defaults.get(name, ""))
        for name, value in sorted(fields.items())
        if (value != defaults[name] if name in defaults else value not in empty)
    ]


def _summary(run: History) -> list[str]:
    """Returns the name, steps, tokens, hours, the fraction of the time in steps, and the last scores of a run."""
    steps = np.array([run.lines[-1]["step"]]) if run.lines else np.zeros(1, int)
    scores = {name.removeprefix("eval/"): x for line in run.lines for name, x in line.items() if "eval/" in name}
    seconds = {part: sum(line.get(f"wall/{part}") or 0.0 for line in run.lines) for part in PARTS}
    total = sum(seconds.values())
    share = f"{seconds['steps'] / total:.0%}" if total else ""
    hours = f"{run.hours(steps)[0]:.2f}"
    return [run.name, f"{steps[0]:,}", f"{run.tokens(steps)[0]:,.0f}", hours, share, _first_scores(scores)]


def _first_scores(scores: Mapping[str, float | None]) -> str:
    """Formats the first scores. Omits "loss (SOURCE)", the score of a single source, if there is a score "loss"."""
    of_all = {name for name in scores if " (" not in name}
    shown = (
        f"{name} {value:.3f}"
        for name, value in scores.items()
        if value is not None and (name in of_all or name.partition(" (")[0] not in of_all)
    )
    return ", ".join(itertools.islice(shown, MAX_SCORES))


def _checkpoints(folder: epath.Path, workdirs: Iterable[epath.Path]) -> list[Checkpoint]:
    """Returns the last checkpoints of runs, with links from the page in `folder`."""
    checkpoints = []
    for workdir in workdirs:
        for step in checkpoint.steps(workdir)[-MAX_CHECKPOINTS:]:
            path, scores, link = checkpoint.folder_of(workdir) / str(step), None, ""
            if "://" not in f"{path} {folder}":
                link = urllib.parse.quote(os.path.relpath(path, absolute(folder)), safe="/:")
            with contextlib.suppress(UserError):  # the other checkpoints are shown if these scores are damaged
                scores = checkpoint.read_scores(workdir, step)
            checkpoints.append(Checkpoint(f"{workdir}@{step}", _first_scores(scores.scores if scores else {}), link))
    return checkpoints


def _trials_by_settings(name: str, sweep: epath.Path) -> dict[str, Trials]:
    """Returns the finished trials of a sweep: {name of the sweep and settings without the seed: trials}."""
    groups: dict[str, Trials] = {}
    for trial, result in read_results(sweep).items():
        settings = ",".join(part for part in trial.name.split(",") if not part.startswith("seed="))
        groups.setdefault(f"{name}/{settings}" if settings else name, {})[trial] = result
    if not groups:
        raise UserError(f"{sweep}: neither a run nor a sweep with finished trials; name the workdir of a run")
    return groups


def _scores_of_groups(groups: Mapping[str, Trials]) -> dict[str, Any]:
    """Returns the metrics, and a row for each group: mean and standard deviation of each metric over the seeds."""
    results = {title: list(trials.values()) for title, trials in groups.items()}
    names = dict.fromkeys(name for trials in results.values() for trial in trials for name in trial["scores"])
    metrics, rows = list(names)[:MAX_SCORES], []
    for title, trials in results.items():
        scores = [_mean([trial["scores"].get(metric) for trial in trials]) for metric in metrics]
        baselines = {f"{trial['metric']} {100 * trial['baseline']:.1f}" for trial in trials if "baseline" in trial}
        failed = sum(trial["failed"] for trial in trials)
        rows.append([title, *scores, ", ".join(sorted(baselines)), len(trials), failed])
    return {"metrics": metrics, "groups": rows}


def _mean(scores: Sequence[float | None]) -> str:
    """Formats mean and standard deviation in percent; an undefined score counts as 0."""
    values = np.array([score or 0.0 for score in scores])
    spread = f" ± {100 * values.std(ddof=1):.1f}" if len(values) > 1 else ""
    return f"{100 * values.mean():.1f}{spread}"


def _insight(folder: epath.Path, source: Pretrained, text: str, words: Sequence[str]) -> dict[str, Any]:
    """Returns the picture of the attention, if the model has attention, and the nearest word embeddings."""
    values: dict[str, Any] = {"source": source.path, "text": text}
    if isinstance(families.family_of(source.config), ExposesAttention):
        figure = insight.draw_attention(*insight.attention(source, text))
        values["attention"] = _save(figure, folder / ATTENTION, ATTENTION_DPI)
    ids = [insight.token_id_of(source, word) for word in words] or insight.word_ids(source, text)
    nearest = insight.neighbours(source, ids).items()
    values["neighbours"] = [
        (word, ", ".join(f"{token} {cosine:.2f}" for token, cosine in near)) for word, near in nearest
    ]
    return values


def _save(figure: "Figure", path: epath.Path, dpi: int) -> str:
    """Writes a picture, and returns its content in base64."""
    content = _png(figure, dpi)
    write_whole(path, content)
    return base64.b64encode(content).decode()


def _png(figure: "Figure", dpi: int) -> bytes:
    content = io.BytesIO()
    figure.savefig(content, format="png", dpi=dpi)
    return content.getvalue()
