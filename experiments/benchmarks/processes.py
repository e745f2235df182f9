"""Runs commands one at a time, and measures their time and memory. Linux only: memory is read from /proc."""

import os
import pathlib
import subprocess
import tempfile
import time
from typing import NamedTuple

from bertjax.common.errors import UserError


class Cost(NamedTuple):
    """The time and memory of a command.

    Attributes:
      seconds: elapsed time.
      memory: peak memory in bytes of the command and its children, with shared pages counted once, sampled every 0.2
        seconds.
    """

    seconds: float
    memory: int


def run(command: list, **environment: str) -> Cost:
    """Runs a command to its end. Raises `UserError` with the end of its output if it fails."""
    with tempfile.TemporaryFile() as output:
        began, memory = time.monotonic(), 0
        command = [str(part) for part in command]
        process = subprocess.Popen(command, stdout=output, stderr=output, env={**os.environ, **environment})
        try:
            while process.returncode is None:
                memory = max(memory, sum(map(_proportional_set_size, _family(process.pid))))
                try:
                    process.wait(0.2)
                except subprocess.TimeoutExpired:
                    continue
        finally:
            process.terminate()
        seconds = time.monotonic() - began
        if process.returncode:
            output.seek(0)
            last = " ".join(output.read()[-500:].decode(errors="replace").split())
            raise UserError(f"{' '.join(command)[:200]}: exit code {process.returncode}: {last}")
    return Cost(seconds, memory)


def _family(parent: int) -> list[int]:
    """Returns a process and all its descendants."""
    parents = {}
    for stat in pathlib.Path("/proc").glob("[0-9]*/stat"):
        try:
            parents[int(stat.parent.name)] = int(stat.read_text().rpartition(")")[2].split()[1])
        except OSError:  # the process has just ended
            continue
    found = [parent]
    for process in found:
        found += [child for child, its_parent in parents.items() if its_parent == process]
    return found


def _proportional_set_size(process: int) -> int:
    try:
        lines = pathlib.Path(f"/proc/{process}/smaps_rollup").read_text().splitlines()
        return next(int(line.split()[1]) << 10 for line in lines if line.startswith("Pss:"))
    except (OSError, StopIteration):
        return 0
