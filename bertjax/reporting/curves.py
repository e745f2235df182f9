"""Draws runs over each other: loss and scores against steps, tokens and hours, and how the training went.

A score with a number at its end, such as spearman_64 beside spearman, is that of vectors of so many numbers.
"""

import re
from collections.abc import Callable, Iterable, Sequence
from typing import NamedTuple

import numpy as np

from bertjax.objectives.registry import OBJECTIVES
from bertjax.reporting.history import History

COLUMNS = 3
AGAINST = ("steps", "tokens", "hours")
WIDTH = "first numbers of a vector"
POINTS = 1000  # most points of a curve; more are averaged


class Panel(NamedTuple):
    """One plot.

    Attributes:
      trained, scored, baselines: metrics that are drawn as a thin line, as dots on a line, and as a dashed line; of
        each, those that a run has.
      against: steps | tokens | hours | `WIDTH`: then the last scores are drawn as one line against their numbers.
    """

    title: str
    trained: tuple[str, ...] = ()
    scored: tuple[str, ...] = ()
    baselines: tuple[str, ...] = ()
    against: str = "steps"
    is_log: bool = False


TRAINING = (
    Panel("learning rate", ("train/learning_rate",)),
    Panel("gradient norm", ("train/grad_norm",), is_log=True),
    Panel("tokens a second, without padding", ("train/tokens_per_second",)),
    Panel("model FLOPs utilisation", ("train/mfu",)),
)


def draw(histories: Sequence[History]):
    """Returns a Matplotlib figure, with the panels for which there are metrics; runs of one name have one colour."""
    from matplotlib.figure import Figure  # not pyplot, which would choose a display

    panels = [
        panel for panel in (*_pretraining(histories), *_fine_tuning(histories), *TRAINING) if _has_any(panel, histories)
    ]
    rows = max(1, -(-len(panels) // COLUMNS))
    figure = Figure(figsize=(4.6 * COLUMNS, 3.2 * rows + 0.5), layout="constrained")
    axes = figure.subplots(rows, COLUMNS, squeeze=False).ravel()
    names = dict.fromkeys(history.name for history in histories)
    colors = {name: f"C{number % 10}" for number, name in enumerate(names)}
    for axis, panel in zip(axes, panels):
        for history in histories:
            _draw(axis, panel, history, colors[history.name])
        axis.set(title=panel.title, xlabel=panel.against, yscale="log" if panel.is_log else "linear")
        axis.grid(alpha=0.3)
    for axis in axes[len(panels) :]:
        axis.set_axis_off()
    if panels:
        named = {}
        for axis in axes:
            named |= {label: handle for handle, label in zip(*axis.get_legend_handles_labels())}
        figure.legend(named.values(), named, loc="outside upper center", ncols=4, frameon=False)
    return figure


def _pretraining(histories: Iterable[History]) -> list[Panel]:
    """What the objectives of the runs plot, those of one title in one panel."""
    metrics = {name for history in histories for line in history.lines for name in line}
    panels: dict[tuple[str, str], Panel] = {}
    for name in OBJECTIVES.names():
        if not metrics & {f"train/{name}_loss", f"eval/{name}_loss"}:
            continue
        for plot in OBJECTIVES.get(name).metrics.plots:
            found = ((f"train/{name}_{plot.metric}",), (f"eval/{name}_{plot.metric}",))
            found += ((f"eval/{plot.baseline.format(name=name)}",),)
            for against in AGAINST if plot.is_main else AGAINST[:1]:
                before = panels.get((plot.title, against), Panel(plot.title, against=against))
                joined = ((*old, *new) for old, new in zip(before[1:4], found))
                panels[plot.title, against] = Panel(plot.title, *map(tuple, joined), against)
    return list(panels.values())


def _fine_tuning(histories: Iterable[History]) -> list[Panel]:
    """Loss and first score on the dev set against steps, tokens and hours, up to three other scores, and those by
    width."""
    scores = {}
    for history in histories:
        if history.task != "pretraining":
            scores |= {name: None for line in history.lines for name in line if name.startswith("eval/")}
    by_width = {name: tuple(each for each in scores if _width(each, name)) for name in scores}
    others = [name for name in scores if not any(name in found for found in by_width.values())]
    panels = [Panel(f"{name.removeprefix('eval/')}, dev set", scored=(name,)) for name in others[:4]]
    first = [Panel("loss", ("train/loss",)), *panels[:1]] if scores else []
    widths = [
        Panel(f"{name.removeprefix('eval/')}, dev set", scored=found, against=WIDTH)
        for name, found in by_width.items()
        if found
    ]
    return [*(panel._replace(against=against) for panel in first for against in AGAINST), *panels[1:], *widths]


def _width(metric: str, of: str) -> int | None:
    """Returns 64 for spearman_64 of spearman; None if a metric is no such one."""
    found = re.fullmatch(rf"{re.escape(of)}_(\d+)", metric)
    return int(found[1]) if found else None


def _has_any(panel: Panel, histories: Iterable[History]) -> bool:
    metrics = (*panel.trained, *panel.scored)
    return any(len(history.of(metric)[0]) for history in histories for metric in metrics)


def _draw(axis, panel: Panel, history: History, color: str) -> None:
    def x(steps):
        found: dict[str, Callable] = {"tokens": history.tokens, "hours": history.hours}
        return found[panel.against](steps) if panel.against in found else steps

    label, dots = history.name, dict(marker="o", markersize=3, linewidth=1.6)
    if panel.against == WIDTH:
        last = sorted((int(metric.rpartition("_")[2]), history.of(metric)[1][-1:].tolist()) for metric in panel.scored)
        there = [(width, *value) for width, value in last if value]
        if there:
            axis.plot(*zip(*there), color=color, label=label, **dots)
        return
    for metrics, style in (
        (panel.trained, dict(linewidth=0.9, alpha=0.7)),
        (panel.scored, dots),
        (panel.baselines, dict(linestyle="--", linewidth=1, marker="_", markersize=9)),  # one evaluation shows, too
    ):
        for metric in metrics:
            steps, values = history.of(metric)
            if len(steps):
                axis.plot(x(_thinned(steps)), _thinned(values), color=color, label=label, **style)
                label = None


def _thinned(values: np.ndarray) -> np.ndarray:
    """Averages neighbours until there are at most `POINTS`."""
    size = -(-len(values) // POINTS)
    return np.array([part.mean() for part in np.split(values, range(size, len(values), size))]) if size > 1 else values
