"""Compares the numbers of two commits: 20 steps of each family and each objective, bit for bit.

Command:  PYTHONPATH=OTHER_CHECKOUT python experiments/benchmarks/same_numbers.py write OLD.json [NAMES]
          PYTHONPATH=. python experiments/benchmarks/same_numbers.py write NEW.json [NAMES]
          python experiments/benchmarks/same_numbers.py compare OLD.json NEW.json
Needs:    pip install -e '.[test]', and the same machine and the same versions for both commits

The runs are the runs of `tests/curves.py` in the checkout that PYTHONPATH names, with 20 steps. `write` stores for each
run: the metrics of each step, the scores of the evaluation, a checksum of each file of records, a checksum and the
dtype of each parameter of the checkpoint, and the number of programs that XLA compiled. `compare` prints each value
that differs. The exit status of `compare` is 1 if a value differs or if the new commit compiles more programs.
"""

import argparse
import hashlib
import json
import pathlib
import sys
import tempfile

STEPS = 20
COMPILED = "/jax/core/compile/backend_compile_duration"  # the event of JAX for a program that XLA compiles


def run(name: str) -> dict:
    """Trains the run of this name, and returns its numbers as JSON."""
    import jax
    import numpy as np
    from flax.traverse_util import flatten_dict

    import bertjax
    from tests import curves

    compiled: list[str] = []

    def count(event: str, seconds: float, **details: object) -> None:
        if event == COMPILED:
            compiled.append(event)

    jax.clear_caches()
    jax.monitoring.register_event_duration_secs_listener(count)
    with tempfile.TemporaryDirectory() as folder:
        numbers = curves.train(curves.configs()[name], pathlib.Path(folder))
        programs = len(compiled)
        jax.monitoring.clear_event_listeners()
        records = sorted(pathlib.Path(folder).glob("run/records/**/*.tfrecord*"))
        params = flatten_dict(bertjax.load(f"{folder}/run").params, sep="/")
        return {
            "numbers": {label: [value.hex() for value in values] for label, values in numbers.items()},
            "records": {path.name: hashlib.sha256(path.read_bytes()).hexdigest() for path in records},
            "params": {path: _checksum(np.asarray(array)) for path, array in sorted(params.items())},
            "programs": programs,
        }


def _checksum(array) -> str:
    return f"{array.dtype} {array.shape} {hashlib.sha256(array.tobytes()).hexdigest()}"


def write(output: pathlib.Path, names: list[str]) -> None:
    """Writes the numbers of the runs to a JSON file."""
    import pytest

    from tests import curves
    from tests.conftest import one_device_mesh

    curves.STEPS = STEPS
    numbers = {}
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("bertjax.pretraining.run.make_mesh", one_device_mesh)
        patch.setattr("bertjax.distributed.mesh.cpu_dtype", lambda: "float32")
        patch.setattr("bertjax.reporting.page.write_page", lambda *_: None)
        for name in names or curves.configs():
            numbers[name] = run(name)
            print(f"{name}: {numbers[name]['programs']} programs", flush=True)
    output.write_text(json.dumps(numbers, indent=1))


def compare(old: pathlib.Path, new: pathlib.Path) -> int:
    """Prints the values that differ. Returns the exit status."""
    status, before, after = 0, json.loads(old.read_text()), json.loads(new.read_text())
    for name in sorted(before.keys() & after.keys()):
        lines = []
        for part in ("numbers", "records", "params"):
            for label in sorted(before[name][part].keys() | after[name][part].keys()):
                values = before[name][part].get(label), after[name][part].get(label)
                if values[0] != values[1]:
                    lines.append(f"  {part}: {label}: {_shortened(values[0])} -> {_shortened(values[1])}")
        programs = before[name]["programs"], after[name]["programs"]
        if programs[1] > programs[0]:
            lines.append(f"  programs: {programs[0]} -> {programs[1]}")
        count = sum(map(len, before[name]["numbers"].values())), len(before[name]["params"])
        print(
            f"{name}: " + (f"{len(lines)} values differ" if lines else f"equal ({count[0]} numbers, {count[1]} arrays)")
        )
        print("\n".join(lines[:20]), end="\n" if lines else "")
        status |= bool(lines)
    if before.keys() != after.keys():
        print(f"runs of one file only: {', '.join(sorted(before.keys() ^ after.keys()))}")
    return status


def _shortened(value: object) -> str:
    """Returns a value for a printed line; a curve is shortened to its last number."""
    return str(float.fromhex(value[-1])) if isinstance(value, list) else str(value)[:60]


def main() -> None:
    """Runs the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(dest="command", required=True)
    writing = commands.add_parser("write", help="train the runs and store their numbers")
    writing.add_argument("output", type=pathlib.Path)
    writing.add_argument("names", nargs="*", help="the runs; all runs, if none is named")
    comparing = commands.add_parser("compare", help="compare two files")
    comparing.add_argument("old", type=pathlib.Path)
    comparing.add_argument("new", type=pathlib.Path)
    arguments = parser.parse_args()
    if arguments.command == "write":
        write(arguments.output, arguments.names)
    else:
        sys.exit(compare(arguments.old, arguments.new))


if __name__ == "__main__":
    main()
