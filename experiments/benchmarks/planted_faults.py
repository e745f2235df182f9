"""Plants programming mistakes in the package, one at a time, and counts how many of them the tests catch.

Command:  python -m experiments.benchmarks.planted_faults --check
          python -m experiments.benchmarks.planted_faults --contexts=COVERAGE [--marker="not slow"] [--output=FILE.json]
          python -m experiments.benchmarks.planted_faults --curves
Needs:    pip install -e '.[test]' coverage; COVERAGE is a data file of coverage.py with a context for each test,
          measured on the same source files
Results:  RESULTS.md, "The tests"

`planted_faults.toml` lists the faults. The script plants each fault in a copy of the checkout and runs the tests that
execute the line of the fault, the fastest tests first, until a test fails. The tests of a line outside of functions are
the tests that execute any function of the file. Outcomes:

caught:          a test fails
not caught:      all tests of the line pass, or no test executes the line
out of time:     no test has failed after --limit seconds
does not import: pytest cannot collect the tests, so that the fault is not valid
"""

import argparse
import ast
import collections
import concurrent.futures
import contextlib
import dataclasses
import json
import math
import os
import pathlib
import queue
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import tomllib
from collections.abc import Iterable, Mapping, Sequence

ROOT = pathlib.Path(__file__).resolve().parents[2]
FAULTS = pathlib.Path(__file__).with_suffix(".toml")
CURVES = "tests/test_curves.py"
PYTEST = (sys.executable, "-m", "pytest", "-o", "addopts=", "-q", "-p", "no:cacheprovider")  # -qq counts no tests
SESSION_SECONDS = (20, 60, 200, 600)  # limits of the first three pytest sessions, and of all further ones
UNLISTED_SECONDS = 5.0  # assumed of a test without a duration, for the size of a session
NO_TESTS = 5  # pytest's exit status
OUTCOMES = {None: "out of time", 1: "caught", **dict.fromkeys((2, 3, 4), "does not import")}  # by pytest's exit status


@dataclasses.dataclass(frozen=True)
class Fault:
    """A mistake: `line`, without its indentation, occurs once in `file`, and `replacement` takes its place."""

    name: str
    kind: str
    file: str
    line: str
    replacement: str
    curves: bool = False

    def number(self, root: pathlib.Path) -> int:
        """Returns the number of the line in a checkout, from 1. Raises `ValueError` unless the line occurs once."""
        lines = (root / self.file).read_text().splitlines()
        numbers = [number for number, line in enumerate(lines, 1) if line.strip() == self.line]
        if len(numbers) != 1:
            raise ValueError(f"{self.name}: the line occurs {len(numbers)} times in {self.file}; it must occur once")
        return numbers[0]

    def content(self, root: pathlib.Path) -> str:
        """Returns the content of the file with the fault."""
        lines, index = (root / self.file).read_text().splitlines(keepends=True), self.number(root) - 1
        lines[index] = lines[index].replace(self.line, self.replacement)
        return "".join(lines)


def read_faults() -> list[Fault]:
    return [Fault(**entry) for entry in tomllib.loads(FAULTS.read_text())["fault"]]


def check(faults: Sequence[Fault]) -> None:
    """Compiles the files with their faults, and prints the number of faults by kind and by folder."""
    for fault in faults:
        compile(fault.content(ROOT), fault.file, "exec")
    files, curves = {fault.file for fault in faults}, sum(fault.curves for fault in faults)
    print(f"{len(faults)} faults in {len(files)} files, {curves} of them with curves")
    folders = [str(pathlib.PurePath(fault.file).parent) for fault in faults]
    for title, names in (("kind", [fault.kind for fault in faults]), ("folder", folders)):
        counts = sorted(collections.Counter(names).items())
        print("\n".join(["", f"| {title} | faults |", "|---|---|", *(f"| {name} | {n} |" for name, n in counts)]))


# The tests that execute a line.


def lines_of(source: str, number: int) -> set[int]:
    """Returns the lines of the statement at a line; outside of functions also the lines of all functions."""
    nodes = list(ast.walk(ast.parse(source)))
    functions = [node for node in nodes if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)]
    bodies = {line for node in functions for line in range(node.body[0].lineno, node.end_lineno + 1)}
    around = [node for node in nodes if isinstance(node, ast.stmt) and node.lineno <= number <= node.end_lineno]
    statement = max(around, key=lambda node: (node.lineno, -node.end_lineno))
    last = number if hasattr(statement, "body") else statement.end_lineno
    return {number, *range(statement.lineno, last + 1)} | (set() if number in bodies else bodies)


def covering_tests(data, fault: Fault, root: pathlib.Path) -> set[str]:
    """Returns the node ids of the tests that execute the line of a fault; a context ends with the id of its test.

    `data`: `coverage.CoverageData`, whose files may have another root.
    """
    lines, contexts = lines_of((root / fault.file).read_text(), fault.number(root)), set()
    for path in data.measured_files():
        if path.endswith(f"/{fault.file}"):
            by_line = data.contexts_by_lineno(path)
            contexts |= {context for line in lines for context in by_line.get(line, ())}
    matches = (re.search(r"(?:^|\|)(tests/.*::.*)", context) for context in contexts)
    return {match[1] for match in matches if match}


def collected(copy: pathlib.Path, marker: str, environment: Mapping[str, str], *paths: str) -> set[str]:
    """Returns the node ids of the tests that a marker expression selects."""
    command = [*PYTEST, "--collect-only", "-m", marker, *paths]
    environment = {**environment, "PYTHONPATH": str(copy)}
    done = subprocess.run(command, cwd=copy, env=environment, capture_output=True, text=True)
    if done.returncode:
        raise RuntimeError(f"pytest cannot collect the tests without a fault:\n{done.stdout[-3000:]}")
    return {line for line in done.stdout.splitlines() if line.startswith("tests/") and "::" in line}


def sessions_of(tests: Iterable[str], durations: Mapping[str, float], unlisted: float) -> list[list[str]]:
    """Divides tests among pytest sessions, in ascending order of their durations."""
    sessions, left = [], 0.0
    for test in sorted(tests, key=lambda test: (durations.get(test, unlisted), test)):
        seconds = durations.get(test, min(unlisted, UNLISTED_SECONDS))
        if not sessions or seconds > left:
            left = SESSION_SECONDS[min(len(sessions), len(SESSION_SECONDS) - 1)]
            sessions.append([])
        sessions[-1].append(test)
        left -= seconds
    return sessions


# Runs the tests.


def copy_checkout(folder: pathlib.Path) -> pathlib.Path:
    """Copies the files that git tracks or does not ignore."""
    command = ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"]
    for name in subprocess.run(command, cwd=ROOT, capture_output=True, check=True, text=True).stdout.split("\0"):
        if name and (ROOT / name).is_file():
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(ROOT / name, folder / name)
    return folder


def run_tests(copy: pathlib.Path, tests: Sequence[str], seconds: float, environment: Mapping[str, str]):
    """Runs tests in a copy of the checkout until a test fails.

    Returns pytest's exit status (None: the time is over), the number of tests that ran, and the test that failed.
    """
    with tempfile.TemporaryDirectory() as folder, open(f"{folder}/output", "w+", errors="replace") as output:
        (pathlib.Path(folder) / "tests").write_text("\n".join(tests))
        command = [*PYTEST, "-x", "-rfE", "-m", "", f"@{folder}/tests"]
        options = dict(cwd=copy, env={**environment, "PYTHONPATH": str(copy)}, stdout=output, stderr=output)
        process = subprocess.Popen(command, **options, start_new_session=True)
        try:
            status = process.wait(seconds)
        except subprocess.TimeoutExpired:
            status = None
        with contextlib.suppress(ProcessLookupError):  # the tests may have started processes
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()
        output.seek(0)
        lines = output.read().splitlines()
    ends = [line for line in lines if re.search(r"\d+ (passed|failed|skipped|errors?)\b.* in [\d.]+s", line)]
    count = sum(map(int, re.findall(r"(\d+) (?:passed|failed|skipped|errors?)\b", "".join(ends[-1:]))))
    failures = [line.partition(" ")[2] for line in lines if line.startswith(("FAILED tests/", "ERROR tests/"))]
    failed = [test for test in tests for failure in failures if f"{failure} - ".startswith(f"{test} - ")]
    return status, count, max(failed, key=len, default="")


def examine(fault: Fault, tests: set[str], copy: pathlib.Path, environment: Mapping, arguments) -> dict:
    """Runs the tests of a fault until a test fails; returns the result."""
    began, count, outcome, failed = time.monotonic(), 0, "not caught", ""
    path, intact, faulty = copy / fault.file, (copy / fault.file).read_text(), fault.content(copy)
    waiting = collections.deque(sessions_of(tests, arguments.seconds, arguments.unlisted))
    while waiting and outcome == "not caught":
        session, left = waiting.popleft(), arguments.limit - (time.monotonic() - began)
        path.write_text(faulty)
        status, ran, failed = run_tests(copy, session, max(left, 0), environment)
        path.write_text(intact)
        count += ran
        is_checked = status == 1 and failed and arguments.verify_green
        if is_checked and run_tests(copy, [failed], arguments.limit, environment)[0]:
            rest = [test for test in session if test != failed]  # the test also fails without the fault
            waiting.extendleft([rest] if rest else [])  # without names, pytest would run all tests
        elif status not in (0, NO_TESTS):
            outcome = OUTCOMES.get(status, f"exit status {status}")
    result = dict(outcome=outcome, test=failed if outcome == "caught" else "", covering=len(tests), ran=count)
    return {**key_of(fault, arguments.marker), **result, "seconds": round(time.monotonic() - began, 1)}


def key_of(fault: Fault, marker: str) -> dict:
    """Returns the key of a result."""
    return dict(name=fault.name, line=fault.line, replacement=fault.replacement, marker=marker)


def tests_of(faults: Sequence[Fault], copy: pathlib.Path, environment: Mapping, arguments) -> list[set[str]]:
    """Returns the node ids of the tests of each fault."""
    if arguments.curves:
        return [collected(copy, "", environment, CURVES)] * len(faults)
    import coverage

    data, selected = coverage.CoverageData(arguments.contexts), collected(copy, arguments.marker, environment)
    data.read()
    return [covering_tests(data, fault, copy) & selected for fault in faults]


def examine_all(faults: Sequence[Fault], arguments) -> list[dict]:
    """Examines faults in parallel, and stores each result at once; returns the results of all faults."""
    output = pathlib.Path(arguments.output)
    stored = json.loads(output.read_text()) if output.is_file() else []
    keys = [] if arguments.again else [key_of(fault, arguments.marker) for fault in faults]
    results = {each["name"]: each for each in stored for key in keys if key.items() <= each.items()}
    missing = [fault for fault in faults if fault.name not in results]
    with tempfile.TemporaryDirectory() as folder:
        environment = {"JAX_COMPILATION_CACHE_DIR": f"{folder}/compiled", **os.environ}
        copies: queue.Queue[pathlib.Path] = queue.Queue()
        for number in range(arguments.jobs):
            copies.put(copy := copy_checkout(pathlib.Path(folder) / f"copy{number}"))
        tests = tests_of(missing, copy, environment, arguments)

        def examine_in_copy(fault: Fault, tests: set[str]) -> dict:
            copy = copies.get()
            try:
                return examine(fault, tests, copy, environment, arguments)
            finally:
                copies.put(copy)

        with concurrent.futures.ThreadPoolExecutor(arguments.jobs) as pool:
            waiting = [pool.submit(examine_in_copy, *pair) for pair in zip(missing, tests)]
            try:
                for result in map(concurrent.futures.Future.result, concurrent.futures.as_completed(waiting)):
                    results[result["name"]] = result
                    kept = [x for x in stored if x["name"] not in results or x["marker"] != arguments.marker]
                    output.write_text(json.dumps([*kept, *results.values()], indent=1) + "\n")
                    print(f"{result['name']}: {result['outcome']} {result['test']}", file=sys.stderr, flush=True)
            finally:
                pool.shutdown(wait=False, cancel_futures=True)
    return [results[fault.name] for fault in faults]


def table(faults: Sequence[Fault], results: Sequence[dict]) -> str:
    """Returns the results as Markdown."""
    rows = ["| fault | kind | covering tests | tests run | seconds | caught by |", "|---|---|---|---|---|---|"]
    for fault, each in zip(faults, results):
        numbers = f"{each['covering']} | {each['ran']} | {each['seconds']:.0f}"
        rows.append(f"| {fault.name} | {fault.kind} | {numbers} | {each['test'] or each['outcome']} |")
    caught = sum(each["outcome"] == "caught" for each in results)
    return "\n".join([*rows, "", f"{caught} of {len(results)} caught"])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", action="store_true", help="only check that each fault can be planted")
    parser.add_argument("--curves", action="store_true", help=f"run {CURVES} for the faults with curves = true")
    parser.add_argument("--contexts", help="data file of coverage.py with a context for each test")
    parser.add_argument("--durations", help="JSON file {node id: seconds}, such as tests/durations.json")
    parser.add_argument("--unlisted", type=float, default=math.inf, help="seconds of other tests; inf: run them last")
    parser.add_argument("--marker", default="not slow", help="marker expression that selects tests; empty: all tests")
    parser.add_argument("--names", help="names of the faults, separated by commas; all faults by default")
    parser.add_argument("--jobs", type=int, default=2, help="faults that are examined at a time")
    parser.add_argument("--limit", type=float, default=3600, help="seconds for each fault")
    parser.add_argument("--output", default=os.devnull, help="JSON file of results; its faults do not run again")
    parser.add_argument("--again", action="store_true", help="run faults again that --output has a result of")
    parser.add_argument("--verify-green", action="store_true", help="run each failed test without the fault, too")
    arguments = parser.parse_args()
    faults = read_faults()
    names = arguments.names.split(",") if arguments.names else [fault.name for fault in faults]
    if unknown := set(names) - {fault.name for fault in faults}:
        parser.error(f"--names: there is no fault {', '.join(sorted(unknown))}")
    faults = [fault for fault in faults if fault.name in names and (fault.curves or not arguments.curves)]
    if arguments.check:
        check(faults)
    elif not arguments.contexts and not arguments.curves:
        parser.error("give --contexts=COVERAGE, --curves or --check")
    else:
        arguments.marker = CURVES if arguments.curves else arguments.marker
        arguments.seconds = json.loads(pathlib.Path(arguments.durations).read_text()) if arguments.durations else {}
        print(table(faults, examine_all(faults, arguments)))


if __name__ == "__main__":
    main()
