"""One page about runs: their numbers, curves and tables, as HTML with its pictures inside."""

import base64
import html
import io
import itertools
from collections.abc import Sequence

import numpy as np
from etils import epath

from bertjax.config import UserError
from bertjax.files import absolute, write_whole
from bertjax.interop.pretrained import Pretrained
from bertjax.reporting import curves, insight
from bertjax.reporting.history import History, read_history, read_results
from bertjax.training.clocks import PARTS
from bertjax.training.workdir import RUNS

PAGE, PICTURE, ATTENTION = "report.html", "report.png", "report-attention.png"
DPI = 80
STYLE = """
body { font: 15px/1.45 system-ui, sans-serif; max-width: 1150px; margin: 2em auto; padding: 0 1em; color: #222 }
table { border-collapse: collapse; margin: 1em 0 } td, th { padding: .2em .8em; text-align: right }
th { border-bottom: 1px solid #999; font-weight: 600 } td:first-child, th:first-child { text-align: left }
img { max-width: 100% } .note { color: #666 }
"""


class Search:
    """The finished trials of a search, by their settings without the seed."""

    def __init__(self, workdir: epath.Path, name: str):
        found = read_results(workdir)
        self.name, self.results = name, {}
        for folder, result in found.items():
            settings = ",".join(part for part in folder.name.split(",") if not part.startswith("seed="))
            self.results.setdefault(settings, []).append(result)
        self.histories = [read_history(folder, f"{name}/{folder.name}") for folder in found]


def write(folder: epath.PathLike, workdirs: Sequence[epath.PathLike], source: Pretrained | None = None, text: str = "",
          words: Sequence[str] = ()) -> epath.Path:  # fmt: skip
    """Writes the page and its pictures to a folder; returns the path of the page.

    Args:
      workdirs: of runs, or of searches, whose trials are drawn over each other.
      source: a checkpoint to look into, with the attention of `text` and the neighbours of `words`.

    Raises `UserError` if a workdir is not one, or has no metrics.
    """
    folder, runs, searches = epath.Path(folder), [], []
    for name, workdir in _named(workdirs).items():
        if (workdir / RUNS).is_dir():
            searches.append(Search(workdir, name))
        else:
            runs.append(read_history(workdir, name))
    histories = [*runs, *(history for search in searches for history in search.histories)]
    if not any(history.lines for history in histories):
        raise UserError(f"{', '.join(map(str, workdirs))}: no metrics yet")
    title = ", ".join([*(run.name for run in runs), *(search.name for search in searches)])
    parts = [f"<h1>{html.escape(title)}</h1>", _table(["", *_COLUMNS], [_summary(run) for run in runs]) if runs else ""]
    if searches:
        parts.append(_of_searches(searches))
    picture = _png(curves.draw(histories))
    parts.append(_image(picture, "curves"))
    write_whole(folder / PICTURE, picture)
    if source is not None:
        parts.append(_of_checkpoint(folder, source, text, words))
    page = f'<!doctype html><html lang="en"><meta charset="utf-8"><title>{html.escape(title)}</title>'
    write_whole(folder / PAGE, f"{page}<style>{STYLE}</style>{''.join(parts)}</html>\n")
    return folder / PAGE


def _named(workdirs: Sequence[epath.PathLike]) -> dict[str, epath.Path]:
    """Returns the workdirs by the shortest ends of their paths that tell them apart, each once."""
    paths = list(dict.fromkeys(map(absolute, workdirs)))
    ends = ({"/".join(path.parts[-length:]): path for path in paths} for length in itertools.count(1))
    return next(named for named in ends if len(named) == len(paths))


_COLUMNS = ("steps", "tokens", "hours", "in steps", "last scores")


def _summary(run: History) -> list[str]:
    steps = np.array([run.lines[-1]["step"]]) if run.lines else np.zeros(1, int)
    last = {name.removeprefix("eval/"): value for line in run.lines for name, value in line.items() if "eval/" in name}
    scores = ", ".join(f"{name} {value:.3f}" for name, value in last.items() if value is not None)
    wall = {part: sum(line.get(f"wall/{part}") or 0.0 for line in run.lines) for part in PARTS}
    share = f"{wall['steps'] / sum(wall.values()):.0%}" if sum(wall.values()) else ""
    return [run.name, f"{steps[0]:,}", f"{run.tokens(steps)[0]:,.0f}", f"{run.hours(steps)[0]:.2f}", share, scores]


def _of_searches(searches: Sequence[Search]) -> str:
    """A row for each setting of each search, with mean and standard deviation over its seeds."""
    groups = {(search.name, settings): found for search in searches for settings, found in search.results.items()}
    metrics = list(dict.fromkeys(name for found in groups.values() for result in found for name in result["scores"]))[
        :6
    ]
    rows = []
    for (name, settings), found in groups.items():
        cells = [_mean([result["scores"].get(metric) for result in found]) for metric in metrics]
        baselines = {f"{result['metric']} {100 * result['baseline']:.1f}" for result in found if "baseline" in result}
        failed = sum(result["failed"] for result in found)
        title = f"{name}/{settings}" if settings else name
        rows.append([title, *cells, ", ".join(sorted(baselines)), str(len(found)), str(failed)])
    return _table(["", *metrics, "baseline", "trials", "failed"], rows)


def _mean(scores: Sequence[float | None]) -> str:
    """Mean and standard deviation in percent; a score that is undefined counts as 0."""
    scores = [score or 0.0 for score in scores]
    spread = f" ± {100 * np.std(scores, ddof=1):.1f}" if len(scores) > 1 else ""
    return f"{100 * np.mean(scores):.1f}{spread}"


def _of_checkpoint(folder: epath.Path, source: Pretrained, text: str, words: Sequence[str]) -> str:
    parts = []
    if source.config.encoder == "transformer":
        picture = _png(insight.draw(*insight.attention(source, text)))
        write_whole(folder / ATTENTION, picture)
        said = "Rows attend, columns are attended to; " + html.escape(text)
        parts.append(f'<h2>Attention, head by head</h2><p class="note">{said}</p>{_image(picture, "attention")}')
    ids = [insight.piece_of(source, word) for word in words] or insight.words_of(source, text)
    near = insight.neighbours(source, ids)
    rows = [[word, ", ".join(f"{other} {share:.2f}" for other, share in found)] for word, found in near.items()]
    return "".join([*parts, f"<h2>Nearest word embeddings</h2>{_table(['', 'cosine'], rows)}"])


def _table(titles: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    head = "".join(f"<th>{html.escape(title)}</th>" for title in titles)
    body = "".join("<tr>" + "".join(f"<td>{html.escape(cell)}</td>" for cell in row) + "</tr>" for row in rows)
    return f"<table><tr>{head}</tr>{body}</table>"


def _png(figure) -> bytes:
    content = io.BytesIO()
    figure.savefig(content, format="png", dpi=DPI)
    return content.getvalue()


def _image(picture: bytes, name: str) -> str:
    return f'<img alt="{name}" src="data:image/png;base64,{base64.b64encode(picture).decode()}">'
