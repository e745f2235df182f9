"""The tables and plots of RESULTS.md: mean and standard deviation over the seeds of each cell, from the workdirs."""

import pathlib

import numpy as np

from bertjax.reporting.history import read_history, read_results
from bertjax.training.checkpoints import checkpoint
from experiments.ablations.scaled import COLUMNS, TASKS, Scale, cells

DPI = 80
FEATURES = "CoNLL"  # title of the plot of features, whose rows are the columns of the table
PREDICTED = {"mlm_loss": "masked", "lm_loss": "next", "bilm_loss": "next and previous"}  # predicted words


def scores(folder: pathlib.Path, metric: str) -> list[float]:
    """Returns the scores of the finished trials of a sweep, in percent."""
    return [100 * (result["scores"].get(metric) or 0.0) for result in read_results(folder).values()]


def baseline(folder: pathlib.Path, metric: str) -> str:
    """Formats the baseline of the finished trials (`TrialResult`), in percent; "" if they have none."""
    results = read_results(folder).values()
    most = max((result.get("baseline", 0.0) for result in results if result.get("metric") == metric), default=0.0)
    return f"{100 * most:.1f}" if most else ""


def table(workdir: pathlib.Path, name: str, scale: Scale) -> str:
    """Formats a table in Markdown. The last row has the baselines of the tasks."""
    titles = [
        "",
        "steps",
        "M tokens",
        "hours",
        "perplexity of held-out words",
        *(TASKS[task].name for task in COLUMNS[name]),
    ]
    rows, baselines = {}, dict.fromkeys(COLUMNS[name], "")
    for title, cell in cells(name, scale):
        row = rows.setdefault((title, cell.step), [title, *_pretraining(workdir / cell.model.name, cell.step)])
        row.append(_cell(scores(workdir / cell.name, TASKS[cell.task].metric)))
        baselines[cell.task] = baselines[cell.task] or baseline(workdir / cell.name, TASKS[cell.task].metric)
    if any(baselines.values()):
        rows["baseline"] = ["baseline", *[""] * 4, *baselines.values()]
    lines = [titles, ["---"] * len(titles), *rows.values()]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def _pretraining(folder: pathlib.Path, step: int) -> list[str]:
    """Returns steps, tokens, hours and held-out perplexity of a model, at a step or at its end."""
    if not checkpoint.steps(folder):
        return [""] * 4
    step = step or checkpoint.resolve_step(folder, "latest")
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
    """Returns a Matplotlib figure of the scores, a panel per task: against steps in the table of steps, else by row."""
    from matplotlib.figure import Figure

    panels: dict[str, dict[str, list]] = {}  # task -> row -> (steps, mean, standard deviation) of its cells
    for title, cell in cells(name, scale):
        if found := scores(workdir / cell.name, TASKS[cell.task].metric):
            task, row = (FEATURES, TASKS[cell.task].name) if name == "features" else (TASKS[cell.task].name, title)
            steps = cell.step or sum(steps for steps, _ in scale.stages)
            panels.setdefault(task, {}).setdefault(row, []).append((steps, np.mean(found), np.std(found, ddof=1)))
    most = max(map(len, panels.values()), default=0)
    size = (4.6, 3.4) if name == "steps" else (max(6.0, 1.6 + 2.2 * len(panels)), 1.1 + 0.3 * most)
    figure = Figure(figsize=size, layout="constrained")
    axes = figure.subplots(1, len(panels) or 1, sharey=name != "steps", squeeze=False)[0]
    for (task, rows), axis in zip(panels.items(), axes):
        for row, found in rows.items():
            steps, means, spreads = zip(*found)
            if name == "steps":
                axis.errorbar(steps, means, spreads, marker="o", capsize=3, label=row)
            else:
                axis.errorbar(means, [row], xerr=spreads, marker="o", capsize=3, color="C0")
        axis.set_title(task.replace(", ", ",\n"), fontsize="small")  # also fits weighted_sum_with_embeddings
        axis.grid(alpha=0.3)
    if name == "steps":
        axes[0].set(xlabel="steps of pre-training")
        axes[0].legend(frameon=False)
    else:
        axes[0].invert_yaxis()  # the first row at the top
    return figure


def write(path: pathlib.Path, workdir: pathlib.Path, name: str, scale: Scale) -> None:
    """Replaces a table and its plot in a Markdown file."""
    path.parent.mkdir(parents=True, exist_ok=True)
    draw(workdir, name, scale).savefig(path.with_name(f"{name}.png"), dpi=DPI)
    put(path, name, f"{table(workdir, name, scale)}\n\n![{name}]({name}.png)")


def put(path: pathlib.Path, name: str, content: str) -> None:
    """Replaces the text between `<!-- NAME -->` and `<!-- /NAME -->` in a Markdown file, or adds such a section."""
    path.parent.mkdir(parents=True, exist_ok=True)
    begin, end = f"<!-- {name} -->", f"<!-- /{name} -->"
    text = path.read_text() if path.exists() else ""
    if begin not in text:
        text = f"{text.rstrip()}\n\n## {name.capitalize()}\n\n{begin}\n{end}\n".lstrip()
    before, after = text.split(begin)[0], text.split(end)[1]
    path.write_text(f"{before}{begin}\n{content}\n{end}{after}")
