"""Log lines about the steps of a run, with a clock that the tests set."""

import itertools
import types

import pytest

from bertjax.common import progress
from bertjax.data.corpus import python_docs, reading
from bertjax.training.monitoring.logging import Progress


@pytest.fixture
def clock(monkeypatch):
    now = types.SimpleNamespace(seconds=0.0)
    monkeypatch.setattr(progress, "time", types.SimpleNamespace(monotonic=lambda: now.seconds))
    return now


def lines_of(clock, capsys, seconds_per_step, total, minutes, **more):
    """Returns (second, line) of a run that begins after 100 s of compilation, which do not count as training."""
    clock.seconds, printed = 100.0, []
    shown = Progress(total, 0, flops=lambda start, stop: stop - start, **more)
    shown.start(0.0)
    for step in range(1, 1 + min(total, int(60 * minutes / seconds_per_step))):
        clock.seconds += seconds_per_step
        shown.advance(step, clock.seconds - 100)
        printed += [(clock.seconds - 100, line) for line in capsys.readouterr().out.splitlines()]
    return printed


def test_a_line_at_the_first_step_then_every_ten_seconds_then_every_minute(clock, capsys):
    printed = lines_of(clock, capsys, 0.25, total=2000, minutes=5)
    assert printed[0] == (0.25, "step 1/2000") and printed[1] == (9.25, "step 37/2000 0.25 s a step 0:08:11 left")
    gaps = [(later - earlier, earlier) for (earlier, _), (later, _) in itertools.pairwise(printed)]
    assert all(gap <= (10 if earlier < 45 else 60) for gap, earlier in gaps) and len(printed) < 14


def test_a_run_of_more_than_a_day_names_the_budget_once(clock, capsys):
    printed = lines_of(clock, capsys, 21.0, total=1_000_000, minutes=3, suggests_budget=True)
    (when,) = [second for second, line in printed if line.startswith("this run will take about 243 days 1:19 on this")]
    assert when < 60 and "--config.budget=8h" in printed[0][1]
    assert "budget" not in str(lines_of(clock, capsys, 1.0, 10_000, 2, suggests_budget=True))


def test_work_of_unknown_and_of_known_size_is_described(clock, capsys):
    for sizes in ([], [4_000_000]):
        with progress.Bar("converting the text", sizes) as bar:
            for _ in range(2):
                clock.seconds += 10
                bar.update(1_000_000)
    assert capsys.readouterr().out.splitlines() == [
        "converting the text: 1.0 MB in 0:00:10",
        "converting the text: 2.0 MB in 0:00:20",
        "converting the text: 1.0 MB of 4.0 MB, 0:00:30 left",
        "converting the text: 2.0 MB of 4.0 MB, 0:00:20 left",
    ]


def test_docstrings_are_read_with_progress_lines(clock, capsys, monkeypatch):
    def documents():
        for number in range(3):
            clock.seconds += 5
            yield reading.Document(str(number), ["a line"])

    monkeypatch.setattr(python_docs, "_find_documents", documents)
    assert len(python_docs.read_python_docs.__wrapped__()) == 3
    assert capsys.readouterr().out == "reading docstrings: 2 documents in 0:00:10\n"


def test_work_whose_first_part_is_unfinished_is_described_by_its_time(clock, capsys):
    with progress.Bar("counting words", []) as bar:
        clock.seconds += 10
        bar.update(0)
    assert capsys.readouterr().out == "counting words: 0:00:10 so far\n"
