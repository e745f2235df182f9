"""The tables and pictures of RESULTS.md: mean and standard deviation over the seeds of each cell, from the workdirs."""

import pathlib

import numpy as np

from bertjax.reporting import curves
from bertjax.reporting.history import read_history, read_results
from bertjax.training import checkpoint
from experiments.ablations.scaled import COLUMNS, TASKS, Scale, cells, models

DPI = 60
PREDICTED = {"mlm_loss": "masked", "lm_loss": "next", "bilm_loss": "next and previous"}  # words, of which a loss is


def scores(folder: pathlib.Path, metric: str) -> list[float]:
    """Returns the scores of the finished trials of a search, in percent."""
    return [100 * (result["scores"].get(metric) or 0.0) for result in read_results(folder).values()]


def table(workdir: pathlib.Path, name: str, scale: Scale) -> str:
    """Formats a table in Markdown."""
    titles = [
        "",
        "steps",
        "M tokens",
        "hours",
        "perplexity of held-out words",
        *(TASKS[task].name for task in COLUMNS[name]),
    ]
    rows = {}
    for title, cell in cells(name, scale):
        row = rows.setdefault((title, cell.step), [title, *_pretraining(workdir / cell.model.name, cell.step)])
        row.append(_cell(scores(workdir / cell.name, TASKS[cell.task].metric)))
    lines = [titles, ["---"] * len(titles), *rows.values()]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def _pretraining(folder: pathlib.Path, step: int) -> list[str]:
    """Steps, tokens, hours and held-out perplexity of a model, at a step or at its end."""
    if not checkpoint.steps(folder):
        return [""] * 4
    step = step or checkpoint.choose_step(folder, "latest")
    history, found = read_history(folder), checkpoint.read_scores(folder, step)
    words = [
        f"{np.exp(found.scores[loss]):.1f}, {of}" for loss, of in PREDICTED.items() if found and loss in found.scores
    ]
    tokens, hours = history.tokens(np.array([step]))[0], history.hours(np.array([step]))[0]
    return [f"{step:,}", f"{tokens / 1e6:.1f}", f"{hours:.2f}", words[0] if words else ""]


def _cell(found: list[float]) -> str:
    spread = f" ± {np.std(found, ddof=1):.1f}" if len(found) > 1 else ""
    return f"{np.mean(found):.1f}{spread}" if found else ""


def draw(workdir: pathlib.Path, name: str, scale: Scale):
    """Returns a Matplotlib figure: scores against steps in the table of steps, else how the models were pre-trained."""
    if name != "steps":
        folders = [workdir / model.name for model in models(name, scale).values()]
        return curves.draw([read_history(folder) for folder in folders if checkpoint.steps(folder)])
    from matplotlib.figure import Figure

    tasks = COLUMNS[name]
    figure = Figure(figsize=(4.6 * len(tasks), 3.4), layout="constrained")
    for task, axis in zip(tasks, figure.subplots(1, len(tasks), squeeze=False)[0]):
        for title in models(name, scale):
            found = {
                cell.step or sum(steps for steps, _ in scale.stages): values
                for row, cell in cells(name, scale)
                if row == title and cell.task == task and (values := scores(workdir / cell.name, TASKS[task].metric))
            }
            means = [np.mean(values) for values in found.values()]
            spreads = [np.std(values, ddof=1) for values in found.values()]
            axis.errorbar(list(found), means, spreads, marker="o", capsize=3, label=title)
        axis.set(title=f"{TASKS[task].name}, dev set", xlabel="steps of pre-training")
        axis.grid(alpha=0.3)
        axis.legend(frameon=False)
    return figure


def write(path: pathlib.Path, workdir: pathlib.Path, name: str, scale: Scale) -> None:
    """Replaces a table and its picture in a Markdown file: what is between `<!-- NAME -->` and `<!-- /NAME -->`."""
    draw(workdir, name, scale).savefig(path.with_name(f"{name}.png"), dpi=DPI)
    begin, end = f"<!-- {name} -->", f"<!-- /{name} -->"
    text = path.read_text() if path.exists() else ""
    if begin not in text:
        text = f"{text.rstrip()}\n\n## {name.capitalize()}\n\n{begin}\n{end}\n".lstrip()
    before, after = text.split(begin)[0], text.split(end)[1]
    content = f"{table(workdir, name, scale)}\n\n![{name}]({name}.png)"
    path.write_text(f"{before}{begin}\n{content}\n{end}{after}")
