"""The tables of RESULTS.md: mean and standard deviation over the seeds of each cell, from the runs' workdirs."""

import json
import pathlib

import numpy as np

from bertjax.training import checkpoint
from experiments.ablations.scaled import COLUMNS, TASKS, Cell, Scale, cells


def scores(folder: pathlib.Path, metric: str) -> list[float]:
    """Returns the scores of the finished trials of a search, in percent."""
    found = [json.loads(path.read_text())["scores"][metric] for path in sorted(folder.glob("runs/*/result.json"))]
    return [100 * (score or 0.0) for score in found]


def heldout(folder: pathlib.Path, step: int = 0) -> dict[str, float]:
    """Returns the held-out scores of pre-training, of a step or of the last one."""
    found = checkpoint.read_scores(folder, step or checkpoint.choose_step(folder, "latest"))
    return found.scores if found else {}


def table(workdir: pathlib.Path, name: str, scale: Scale) -> str:
    """Formats a table in Markdown."""
    has_steps = name == "steps"
    titles = ["", *["steps"] * has_steps, "held-out perplexity", *(TASKS[task].name for task in COLUMNS[name])]
    lines = {}
    for title, cell in cells(name, scale):
        row = lines.setdefault((title, cell.step), [title, *[f"{cell.step:,}"] * has_steps, _perplexity(workdir, cell)])
        row.append(_cell(scores(workdir / cell.folder, TASKS[cell.task].metric)))
    rows = [titles, ["---"] * len(titles), *lines.values()]
    return "\n".join(f"| {' | '.join(row)} |" for row in rows)


def _perplexity(workdir: pathlib.Path, cell: Cell) -> str:
    found = heldout(workdir / cell.model.name, cell.step)
    losses = [found[loss] for loss in ("mlm_loss", "lm_loss") if loss in found]
    return f"{np.exp(losses[0]):.1f}" if losses else ""


def _cell(found: list[float]) -> str:
    spread = f" ± {np.std(found, ddof=1):.1f}" if len(found) > 1 else ""
    return f"{np.mean(found):.1f}{spread}" if found else ""


def write(path: pathlib.Path, workdir: pathlib.Path, name: str, scale: Scale) -> None:
    """Replaces a table in a Markdown file, between `<!-- NAME -->` and `<!-- /NAME -->`; what is around it stays."""
    begin, end = f"<!-- {name} -->", f"<!-- /{name} -->"
    text = path.read_text() if path.exists() else ""
    if begin not in text:
        text = f"{text.rstrip()}\n\n## {name.capitalize()}\n\n{begin}\n{end}\n".lstrip()
    before, after = text.split(begin)[0], text.split(end)[1]
    path.write_text(f"{before}{begin}\n{table(workdir, name, scale)}\n{end}{after}")
