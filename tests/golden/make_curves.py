"""Writes tests/golden/curves/ anew, and draws the old curves beside the new ones.

Command: python -m tests.golden.make_curves [--drawing=curves.svg] [NAMES]; three minutes on two cores
"""

import argparse
import pathlib
import tempfile

import matplotlib.figure
import pytest

from tests import curves
from tests.conftest import one_device_mesh


def draw(old: dict[str, dict], new: dict[str, dict], path: pathlib.Path) -> None:
    """Draws one row per run and one column per curve: the old values dashed, the new values solid."""
    figure = matplotlib.figure.Figure(figsize=(12, 2.5 * len(new)), layout="constrained")
    panels = figure.subplots(len(new), len(curves.CURVES), squeeze=False)
    for row, (name, values) in zip(panels, new.items()):
        for panel, label in zip(row, curves.CURVES):
            if name in old:
                panel.plot(old[name][label], "--", color="tab:orange", label="old", linewidth=2)
            panel.plot(values[label], color="tab:blue", label="new", linewidth=1)
            panel.set_title(f"{name}: {label}", fontsize=9)
    panels[0, 0].legend()
    figure.savefig(path)


def largest_difference(old: dict[str, list[float]], new: dict[str, list[float]]) -> str:
    """Returns the curve with the largest relative difference, and the difference."""
    differences = {
        label: max(abs(a - b) / max(abs(a), 1e-6) for a, b in zip(old[label], values))
        for label, values in new.items()
        if label in old
    }
    label = max(differences, key=differences.get)
    return f"{label} differs by {differences[label]:.1e}"


def main() -> None:
    configs = curves.configs()
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", choices=[[], *configs], help="the runs; all, if none is named")
    parser.add_argument("--drawing", default="curves.svg", type=pathlib.Path)
    parser.add_argument("--dry-run", action="store_true", help="only draw and compare")
    arguments = parser.parse_args()
    old, new = {}, {}
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("bertjax.pretraining.run.make_mesh", one_device_mesh)
        patch.setattr("bertjax.distributed.mesh.cpu_dtype", lambda: "float32")
        patch.setattr("bertjax.reporting.page.write_page", lambda *_: None)
        for name in arguments.names or configs:
            if curves.path_of(name).exists():
                old[name] = curves.read(name)
            with tempfile.TemporaryDirectory() as folder:
                new[name] = curves.train(configs[name], pathlib.Path(folder))
            print(f"{name}: {largest_difference(old[name], new[name]) if name in old else 'new'}", flush=True)
            if not arguments.dry_run:
                curves.write(name, new[name])
    draw(old, new, arguments.drawing)
    print(f"drawn: {arguments.drawing}")


if __name__ == "__main__":
    main()
