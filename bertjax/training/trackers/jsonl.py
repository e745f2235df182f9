"""metrics.jsonl: one line of numbers a step, which reports and resumed runs read."""

import contextlib
import json
import math
from collections.abc import Mapping

from etils import epath

from bertjax.common.files import GrowingFile, parse_json, read_whole

METRICS = "metrics.jsonl"


def read_metrics(workdir: epath.PathLike) -> list[dict]:
    """Returns the lines of `metrics.jsonl`, without one that a crash cut off."""
    path = epath.Path(workdir) / METRICS
    lines = []
    for line in read_whole(path).splitlines() if path.exists() else ():
        with contextlib.suppress(ValueError, KeyError, TypeError):
            found = parse_json(line, dict[str, float | None])
            lines.append({**found, "step": int(found["step"])})
    return lines


def finite(metrics: Mapping[str, float]) -> dict[str, float | None]:
    """Replaces NaN and infinity by None: JSON has neither."""
    return {name: float(value) if math.isfinite(value) else None for name, value in metrics.items()}


class JsonLines:
    """The tracker that every run has. Drops the lines that are void."""

    def __init__(self, workdir: epath.Path, start_step: int, config):
        del config
        kept = [line for line in read_metrics(workdir) if line["step"] <= start_step]
        content = "".join(json.dumps(line) + "\n" for line in kept).encode()
        self._file = GrowingFile(workdir / METRICS, content)

    def write(self, step: int, metrics: Mapping[str, float]) -> None:
        self._file.write((json.dumps({"step": step, **finite(metrics)}) + "\n").encode())

    def flush(self) -> None:
        self._file.flush()

    def close(self) -> None:
        self._file.flush()
