"""Draws the curves of several runs together: loss and scores against steps, tokens and hours, and training metrics.

A score that ends in a number, such as spearman_64, is the score of embeddings that are truncated to this dimension.
"""

import re
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from bertjax.objectives.registry import OBJECTIVES
from bertjax.reporting.history import History

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

COLUMNS = 3
AGAINST = ("steps", "tokens", "hours")
WIDTH = "first numbers of an embedding"
POINTS = 1000  # maximum points of a curve; a longer curve is drawn as averages of neighbors


class Panel(NamedTuple):
    """A plot of metrics. A run may have only some of the metrics.

    Attributes:
      title: the title of the plot.
      against: steps, tokens, hours, or `WIDTH`. With `WIDTH`, a line shows the last scores against the dimension.
      trained: metrics drawn as a thin line.
      scored: metrics drawn as dots on a line.
      baselines: metrics drawn as a dashed line.
      is_log: whether the y axis is logarithmic.
    """

    title: str
    against: str = "steps"
    trained: tuple[str, ...] = ()
    scored: tuple[str, ...] = ()
    baselines: tuple[str, ...] = ()
    is_log: bool = False


TRAINING = (
    Panel("learning rate", trained=("train/learning_rate",)),
    Panel("gradient norm", trained=("train/grad_norm",), is_log=True),
    Panel("tokens a second, without padding", trained=("train/tokens_per_second",)),
    Panel("model FLOPs utilisation", trained=("train/mfu",)),
)


def draw_curves(histories: Sequence[History]) -> "Figure":
    """Returns a figure with the panels for which there are metrics. Runs with the same name have the same color."""
    from matplotlib.figure import Figure  # not pyplot, which would choose a display

    panels = (*_pretraining_panels(histories), *_fine_tuning_panels(histories), *TRAINING)
    panels = tuple(panel for panel in panels if _has_metrics(panel, histories))
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
        handles = {label: handle for axis in axes for handle, label in zip(*axis.get_legend_handles_labels())}
        figure.legend(handles.values(), list(handles), loc="outside upper center", ncols=4, frameon=False)
    return figure


def _pretraining_panels(histories: Iterable[History]) -> list[Panel]:
    """Returns the panels of the objectives of the runs. Plots with the same title share a panel."""
    metrics = {name for history in histories for line in history.lines for name in line}
    panels: dict[tuple[str, str], Panel] = {}
    for name in OBJECTIVES.names():
        if not metrics & {f"train/{name}_loss", f"eval/{name}_loss"}:
            continue
        for plot in OBJECTIVES.get(name).metrics.plots:
            for against in AGAINST if plot.is_main else AGAINST[:1]:
                panel = panels.get((plot.title, against), Panel(plot.title, against))
                panels[plot.title, against] = panel._replace(
                    trained=(*panel.trained, f"train/{name}_{plot.metric}"),
                    scored=(*panel.scored, f"eval/{name}_{plot.metric}"),
                    baselines=(*panel.baselines, f"eval/{plot.baseline.format(name=name)}"),
                )
    return list(panels.values())


def _fine_tuning_panels(histories: Iterable[History]) -> list[Panel]:
    """Returns the panels of fine-tuning runs.

    The loss and the first score on the dev set are drawn against steps, tokens and hours, up to three other scores
    against steps, and scores of truncated embeddings against the dimension.
    """
    lines = (line for history in histories if history.task != "pretraining" for line in history.lines)
    names = list(dict.fromkeys(name for line in lines for name in line if name.startswith("eval/")))
    if not names:
        return []
    by_width = {
        name: tuple(other for other in names if re.fullmatch(rf"{re.escape(name)}_\d+", other)) for name in names
    }
    scores = [name for name in names if not any(name in truncated for truncated in by_width.values())]
    panels = [Panel(_dev_title(name), scored=(name,)) for name in scores[:4]]
    main = [Panel("loss", trained=("train/loss",)), *panels[:1]]
    widths = [Panel(_dev_title(name), WIDTH, scored=truncated) for name, truncated in by_width.items() if truncated]
    return [*(panel._replace(against=against) for panel in main for against in AGAINST), *panels[1:], *widths]


def _dev_title(metric: str) -> str:
    return f"{metric.removeprefix('eval/')}, dev set"


def _has_metrics(panel: Panel, histories: Iterable[History]) -> bool:
    metrics = (*panel.trained, *panel.scored)
    return any(len(history.values_of(metric)[0]) for history in histories for metric in metrics)


def _draw(axis: "Axes", panel: Panel, history: History, color: str) -> None:
    dots: dict[str, Any] = dict(marker="o", markersize=3, linewidth=1.6)
    if panel.against == WIDTH:
        scores = {int(metric.rpartition("_")[2]): history.values_of(metric)[1][-1:] for metric in panel.scored}
        points = [(width, values[0]) for width, values in sorted(scores.items()) if len(values)]
        if points:
            axis.plot(*zip(*points), color=color, label=history.name, **dots)
        return
    dashes: dict[str, Any] = dict(linestyle="--", linewidth=1, marker="_", markersize=9)  # visible with one evaluation
    styles = (panel.trained, dict(linewidth=0.9, alpha=0.7)), (panel.scored, dots), (panel.baselines, dashes)
    label: str | None = history.name
    for metrics, style in styles:
        for metric in metrics:
            steps, values = history.values_of(metric)
            if len(steps):
                x = _thinned(steps)
                x = x if panel.against == "steps" else getattr(history, panel.against)(x)
                axis.plot(x, _thinned(values), color=color, label=label, **style)
                label = None


def _thinned(values: np.ndarray) -> np.ndarray:
    """Averages neighbors so that at most `POINTS` values remain."""
    size = -(-len(values) // POINTS)
    return np.array([part.mean() for part in np.split(values, range(size, len(values), size))]) if size > 1 else values
