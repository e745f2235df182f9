"""The checker of benchmark rows accepts the example of the issue form, and names each mistake."""

import json
import re

import pytest

from experiments.benchmarks.check_row import main
from tests.processes import ROOT


@pytest.fixture
def example():
    """The example row in the issue form."""
    form = (ROOT / ".github/ISSUE_TEMPLATE/benchmark.yml").read_text()
    return json.loads(re.search(r"^        (\{$.*?^        \})$", form, re.MULTILINE | re.DOTALL)[1])


def outcome(row, tmp_path, capsys):
    path = tmp_path / "row.json"
    path.write_text(row if isinstance(row, str) else json.dumps(row))
    status, printed = main([str(path)]), capsys.readouterr()
    return status, printed.out, printed.err


def test_the_example_of_the_form_becomes_a_row(example, tmp_path, capsys):
    example |= {"runs": [30.0, 10.0, 20.5], "others": {"transformers 5.24": [40, 50, 60, 70]}}
    status, row, _ = outcome(example, tmp_path, capsys)
    assert status == 0
    assert f"| {example['name']} | bertjax | transformers 5.24 |\n|---|---|---|\n" in row
    assert "| 20.5 ms (10 to 30, 3 runs) | 55 ms (40 to 70, 4 runs) |" in row
    assert example["command"] in row and example["commit"][:8] in row


@pytest.mark.parametrize("change, message", [
    ({"runs": [1.0, 2.0]}, "runs: has 2 runs; measure at least 3"),
    ({"runs": [1.0, 2.0, -3.0]}, "runs: has the result -3.0; each result must be a positive number"),
    ({"others": {"x": [1.0]}}, "x: has 1 runs"),
    ({"section": "Speed"}, "section = 'Speed': not a heading of RESULTS.md"),
    ({"commit": "main"}, "commit = 'main': not 40 hexadecimal digits"),
    ({"versions": {"python": "3.12"}}, "versions: has no 'jax'"),
    ({"hardware": " "}, "hardware: is empty"),
    ({"runs": "12 ms"}, "row.json: damaged, or not in the expected format"),
])  # fmt: skip
def test_a_mistake_in_a_row_is_one_line(example, change, message, tmp_path, capsys):
    status, row, error = outcome(example | change, tmp_path, capsys)
    assert status == 1 and not row and message in error and error.count("\n") == 1


def test_a_file_that_is_no_json_is_refused(tmp_path, capsys):
    status, _, error = outcome("12 ms", tmp_path, capsys)
    assert status == 1 and "row.json: damaged" in error
