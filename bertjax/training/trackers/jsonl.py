"""The tracker that writes metrics.jsonl. Each line is a JSON object with a step and metrics of this step."""

import contextlib
import json
import math
from collections.abc import Mapping

from etils import epath
from ml_collections import ConfigDict

from bertjax.common.files import GrowingFile, parse_json, read_whole

METRICS = "metrics.jsonl"


def read_metrics(workdir: epath.PathLike) -> list[dict]:
    """Returns the lines of `metrics.jsonl` as dicts. Skips invalid lines, such as a line that a crash truncated."""
    path = epath.Path(workdir) / METRICS
    lines = []
    for text in read_whole(path).splitlines() if path.exists() else ():
        with contextlib.suppress(ValueError, KeyError, TypeError):
            line = parse_json(text, dict[str, float | None])
            if (step := line["step"]) is not None:
                lines.append({**line, "step": int(step)})
    return lines


def nonfinite_to_none(metrics: Mapping[str, float]) -> dict[str, float | None]:
    """Replaces NaN and infinity by None, because JSON cannot represent them."""
    return {name: float(value) if math.isfinite(value) else None for name, value in metrics.items()}


class JsonLines:
    """Writes `metrics.jsonl`. Every run has this tracker."""

    def __init__(self, workdir: epath.Path, start_step: int, config: ConfigDict):
        """Opens the file, and deletes the lines of steps after `start_step`, because the run repeats these steps."""
        del config
        kept = [line for line in read_metrics(workdir) if line["step"] <= start_step]
        content = "".join(json.dumps(line) + "\n" for line in kept).encode()
        self._file = GrowingFile(workdir / METRICS, content)

    def write(self, step: int, metrics: Mapping[str, float]) -> None:
        """Appends a line with the metrics of a step."""
        self._file.write((json.dumps({"step": step, **nonfinite_to_none(metrics)}) + "\n").encode())

    def flush(self) -> None:
        """Uploads the lines if the workdir is in an object store."""
        self._file.flush()

    close = flush
