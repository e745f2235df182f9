"""One page about runs: their numbers, curves and tables, as HTML with its pictures inside."""

import base64
import html
import io
import itertools
import os
import urllib.parse
from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple

import jax
import ml_collections
import numpy as np
from etils import epath

from bertjax.common.errors import UserError
from bertjax.common.files import absolute, write_whole
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

PICTURE, ATTENTION = "report.png", "report-attention.png"
CHECKPOINTS = 10  # the last ones of a run are listed
SCORES = 6  # so many are shown of a run, a search or a checkpoint
TEXT = "text"  # the class of a table whose cells are words
DPI, DPI_OF_ATTENTION = 80, 110  # its labels are small
LINES = (
    "Thin lines: training. Dots: held-out text, or the dev set. Dashes: the unigram baseline, or the commoner class."
)
STYLE = """
body { font: 15px/1.45 system-ui, sans-serif; max-width: 1150px; margin: 2em auto; padding: 0 1em; color: #222 }
table { border-collapse: collapse; margin: 1em 0 } td, th { padding: .2em .8em; text-align: right }
th { border-bottom: 1px solid #999; font-weight: 600 } td:first-child, th:first-child { text-align: left }
.text td, .text th { text-align: left; vertical-align: top; overflow-wrap: anywhere } pre { white-space: pre-wrap }
img { max-width: 100% } .note { color: #666 }
"""


def write(folder: epath.PathLike, workdirs: Sequence[epath.PathLike], source: Pretrained | None = None, text: str = "",
          words: Sequence[str] = (), refreshed: float = 0) -> epath.Path:  # fmt: skip
    """Writes the page and its pictures to a folder; returns the path of the page.

    Args:
      workdirs: the folders of runs, or of searches, whose trials are drawn over each other. None is needed where there
        is a source.
      source: a checkpoint to look into, with the attention of `text` and the neighbours of `words`.
      refreshed: seconds after which a browser loads the page again; 0: not.

    Raises `UserError` if a workdir is not one, or if there is nothing to show.
    """
    folder, named, runs, groups = epath.Path(folder), _named(workdirs), [], {}
    for name, workdir in named.items():
        if (workdir / TRIALS).is_dir():
            if not (results := read_results(workdir)):
                raise UserError(f"{workdir}: no run, and {TRIALS}/ in it has no finished trial of a search")
            groups |= _grouped(name, results)
        else:
            runs.append(read_history(workdir, name))
    is_alone = len(runs) + len(groups) == 1  # then its seeds have names and colours of their own
    trials = ((title, trial) for title, found in groups.items() for trial in found)
    histories = [*runs, *(read_history(trial, trial.name if is_alone else title) for title, trial in trials)]
    has_curves = any(history.lines for history in histories)
    if not has_curves and source is None:
        raise UserError(f"{', '.join(map(str, workdirs))}: no metrics yet")
    title = ", ".join(named) or source.path
    parts = [f"<h1>{html.escape(title)}</h1>"]
    if runs:
        parts.append(_table(["", *_COLUMNS], [_summary(run) for run in runs]))
    if groups:
        parts.append(_of_groups(groups))
    if has_curves:
        picture = _png(curves.draw(histories))
        parts += [f'<p class="note">{LINES}</p>', _image(picture, "curves")]
        write_whole(folder / PICTURE, picture)
    if runs and len(named) == 1:
        parts += _of_run(*named.values())
    if rows := _checkpoints(folder, {name: path for name, path in named.items() if not (path / TRIALS).is_dir()}):
        note = "By these names predict, extract and convert take them, and a run as its init_checkpoint."
        parts.append(f'<h2>Checkpoints</h2><p class="note">{note}</p>{_table(["", "scores on held-out data"], rows)}')
    if source is not None:
        parts.append(_of_checkpoint(folder, source, text, words))
    page = f'<!doctype html><html lang="en"><meta charset="utf-8"><title>{html.escape(title)}</title>'
    page += f'<meta http-equiv="refresh" content="{refreshed:g}">' if refreshed else ""
    write_whole(folder / HTML_REPORT, f"{page}<style>{STYLE}</style>{''.join(parts)}</html>\n")
    return folder / HTML_REPORT


def draw(workdir: epath.Path) -> None:
    """Writes the page about a run that has ended, on the first host.

    An error is printed and not raised: the run has ended well, whatever fails here.
    """
    if jax.process_index() == 0:
        try:
            write(workdir, [workdir])
        except Exception as error:
            print(f"{workdir / HTML_REPORT}: not drawn ({error})", flush=True)


def _named(workdirs: Sequence[epath.PathLike]) -> dict[str, epath.Path]:
    """Returns the workdirs, as they were given, by the shortest ends that tell them apart, each once."""
    given = {absolute(workdir): epath.Path(workdir) for workdir in workdirs}
    ends = ({"/".join(path.parts[-length:]): given[path] for path in given} for length in itertools.count(1))
    return next(named for named in ends if len(named) == len(given))


def _of_run(workdir: epath.Path) -> list[str]:
    """Returns what the workdir of one run says: its report, a few predictions, commands and config.

    What is missing, as in the workdirs of older versions, is left out.
    """
    parts = []
    if report := read_report(workdir):
        parts.append(f"<h2>Report</h2><pre>{html.escape(report)}</pre>")
    if samples := read_samples(workdir):
        rows = [list(sample.values()) for sample in samples]
        parts.append(f"<h2>Examples of the dev set</h2>{_table(list(samples[0]), rows, TEXT)}")
    if commands := read_commands(workdir):
        parts.append(f"<h2>Commands</h2>{_table(['started', 'command'], commands, TEXT)}")
    if rows := _changed(require_info(workdir).config):
        note = "The fields of config.json that are not the defaults."
        parts.append(f'<h2>Config</h2><p class="note">{note}</p>{_table(["", "value", "default"], rows, TEXT)}')
    return parts


def _changed(config: ml_collections.ConfigDict) -> list[list[str]]:
    """Returns a row for each field of a config that is not the default: its name, its value and the default."""
    default = pretraining_config() if "stages" in config else fine_tuning_config(config.task)
    default = default.copy_and_resolve_references().unlock()
    default.model = families.model_fields(config.model.family)
    fields, defaults = (dict(_flat(each.to_dict())) for each in (config, default))
    none = ("", False, None)  # values that need no mention where there is no default
    return [
        [name, f"{value}", f"{defaults.get(name, '')}"]
        for name, value in sorted(fields.items())
        if value != defaults.get(name) and not (name not in defaults and value in none)
    ]


def _flat(fields: Mapping, before: str = "") -> Iterator[tuple[str, object]]:
    """Yields the fields of nested sections with their dotted names."""
    for name, value in fields.items():
        if isinstance(value, Mapping):
            yield from _flat(value, f"{before}{name}.")
        else:
            yield f"{before}{name}", value


_COLUMNS = ("steps", "tokens", "hours", "in steps", "last scores")


def _summary(run: History) -> list[str]:
    steps = np.array([run.lines[-1]["step"]]) if run.lines else np.zeros(1, int)
    last = {name.removeprefix("eval/"): value for line in run.lines for name, value in line.items() if "eval/" in name}
    wall = {part: sum(line.get(f"wall/{part}") or 0.0 for line in run.lines) for part in PARTS}
    share = f"{wall['steps'] / sum(wall.values()):.0%}" if sum(wall.values()) else ""
    return [run.name, f"{steps[0]:,}", f"{run.tokens(steps)[0]:,.0f}", f"{run.hours(steps)[0]:.2f}", share, _said(last)]


def _said(scores: Mapping[str, float | None]) -> str:
    """The first scores, without those of single sources of which there is one of all."""
    whole = {name.partition(" (")[0] for name in scores if " (" not in name}
    found = (
        f"{name} {value:.3f}"
        for name, value in scores.items()
        if value is not None and (" (" not in name or name.partition(" (")[0] not in whole)
    )
    return ", ".join(itertools.islice(found, SCORES))


class Link(NamedTuple):
    """A cell that leads to a file or folder."""

    text: str
    target: str


def _checkpoints(folder: epath.Path, workdirs: Mapping[str, epath.Path]) -> list[list[str | Link]]:
    """Returns a row for each of the last checkpoints of runs, with a link from the page in `folder` to where it lies,
    unless one of them is in an object store."""
    rows: list[list[str | Link]] = []
    for workdir in workdirs.values():
        for step in checkpoint.steps(workdir)[-CHECKPOINTS:]:
            name, place = f"{workdir}@{step}", checkpoint.folder_of(workdir) / str(step)
            is_local = "://" not in f"{place} {folder}"
            try:
                found = checkpoint.read_scores(workdir, step)
            except UserError:  # damaged scores do not hide the others
                found = None
            cell = Link(name, os.path.relpath(place, absolute(folder))) if is_local else name
            rows.append([cell, _said(found.scores if found else {})])
    return rows


def _grouped(name: str, results: Mapping[epath.Path, TrialResult]) -> dict[str, dict[epath.Path, TrialResult]]:
    """Returns the trials of a search, with their results, by its name and their settings without the seed."""
    groups = {}
    for trial, result in results.items():
        settings = ",".join(part for part in trial.name.split(",") if not part.startswith("seed="))
        groups.setdefault(f"{name}/{settings}" if settings else name, {})[trial] = result
    return groups


def _of_groups(groups: Mapping[str, Mapping[epath.Path, TrialResult]]) -> str:
    """A row for each setting of each search, with mean and standard deviation over its seeds."""
    results = {title: list(found.values()) for title, found in groups.items()}
    metrics = list(dict.fromkeys(name for found in results.values() for result in found for name in result["scores"]))
    metrics = metrics[:SCORES]
    rows = []
    for title, found in results.items():
        cells = [_mean([result["scores"].get(metric) for result in found]) for metric in metrics]
        baselines = {f"{result['metric']} {100 * result['baseline']:.1f}" for result in found if "baseline" in result}
        failed = sum(result["failed"] for result in found)
        rows.append([title, *cells, ", ".join(sorted(baselines)), str(len(found)), str(failed)])
    return _table(["", *metrics, "baseline", "trials", "failed"], rows)


def _mean(scores: Sequence[float | None]) -> str:
    """Mean and standard deviation in percent; a score that is undefined counts as 0."""
    scores = [score or 0.0 for score in scores]
    spread = f" ± {100 * np.std(scores, ddof=1):.1f}" if len(scores) > 1 else ""
    return f"{100 * np.mean(scores):.1f}{spread}"


def _of_checkpoint(folder: epath.Path, source: Pretrained, text: str, words: Sequence[str]) -> str:
    parts = []
    if isinstance(families.family_of(source.config), ExposesAttention):
        picture = _png(insight.draw(*insight.attention(source, text)), DPI_OF_ATTENTION)
        write_whole(folder / ATTENTION, picture)
        said = html.escape(f"{source.path}; rows attend, columns are attended to: {text}")
        parts.append(f'<h2>Attention, head by head</h2><p class="note">{said}</p>{_image(picture, "attention")}')
    ids = [insight.piece_of(source, word) for word in words] or insight.words_of(source, text)
    near = insight.neighbours(source, ids)
    rows = [[word, ", ".join(f"{other} {share:.2f}" for other, share in found)] for word, found in near.items()]
    return "".join([*parts, f"<h2>Nearest word embeddings</h2>{_table(['', 'cosine'], rows)}"])


def _cell(cell: str | Link) -> str:
    if isinstance(cell, Link):
        return f'<a href="{html.escape(urllib.parse.quote(cell.target, safe="/:"))}">{html.escape(cell.text)}</a>'
    return html.escape(cell)


def _table(titles: Sequence[str], rows: Sequence[Sequence[str | Link]], kind: str = "numbers") -> str:
    head = "".join(f"<th>{html.escape(title)}</th>" for title in titles)
    body = "".join("<tr>" + "".join(f"<td>{_cell(cell)}</td>" for cell in row) + "</tr>" for row in rows)
    return f'<table class="{kind}"><tr>{head}</tr>{body}</table>'


def _png(figure, dpi: int = DPI) -> bytes:
    content = io.BytesIO()
    figure.savefig(content, format="png", dpi=dpi)
    return content.getvalue()


def _image(picture: bytes, name: str) -> str:
    return f'<img alt="{name}" src="data:image/png;base64,{base64.b64encode(picture).decode()}">'
