"""The list of runs, and the page that is drawn again during a run."""

import json
import re
import time

import pytest

from bertjax.common import lock
from bertjax.common.errors import UserError
from bertjax.reporting import overview
from tests.processes import run as command
from tests.processes import start
from tests.reporting.test_report import made_run, made_trial


def test_runs_are_listed_with_their_state(tmp_path):
    finished, going_on = made_run(tmp_path / "finished", [5.0, 4.0]), made_run(tmp_path / "b/going on", [6.0])
    with (finished / "metrics.jsonl").open("a") as file:
        file.write(json.dumps({"step": 30, "train/loss": 3.25}) + "\n")
    (finished / "report.txt").write_text("done\n")
    (made_run(tmp_path / "early", []) / "checkpoints/7").mkdir(parents=True)  # stopped before the first line
    (finished / "checkpoints/20").mkdir(parents=True)
    for seed in range(2):
        (tmp_path / "search/runs").mkdir(parents=True, exist_ok=True)
        made_trial(tmp_path / f"search/runs/seed={seed}", 0.5)
    (tmp_path / "search/runs/seed=0/report.txt").write_text("done\n")
    made_run(tmp_path / "torn", [1.0])
    (tmp_path / "torn/config.json").write_text('{"task": ')
    with lock.held(going_on, "--workdir"):
        assert lock.is_held(going_on) and not lock.is_held(finished)
        rows = {row.run: row for row in overview.rows([str(tmp_path)])}
    assert set(rows) == {"finished", "b/going on", "search", "torn", "early"}
    states = [rows[name].state for name in ("finished", "b/going on", "search")]
    assert states == ["finished", "running", "stopped"]
    assert rows["finished"].step == "30 of 1,000,000" and rows["finished"].loss == "3.250"
    assert rows["early"].step == "7 of 1,000,000" and rows["early"].state == "stopped"
    assert rows["finished"].evaluation == "mlm_loss 4.500"
    assert rows["finished"].trains == "pretraining, bert 12 x 768" and rows["finished"].changed == "now"
    assert rows["search"].trains == "sweep, 2 trials" and rows["search"].step == "1 ended"
    assert "torn" in rows["torn"].state
    assert [row.run for row in overview.rows([str(tmp_path / "search")])] == ["runs/seed=0", "runs/seed=1"]
    lines = overview.table(list(rows.values())).splitlines()
    assert lines[0].split() == ["run", "trains", "step", "loss", "evaluation", "state", "changed"]
    column = lines[0].index("state")
    assert {line[column:].split()[0] for line in lines[1:]} == {"finished", "running", "stopped", "unreadable:"}


def test_a_folder_without_runs_is_reported_in_one_line(tmp_path):
    with pytest.raises(UserError, match="no folder"):
        overview.rows([str(tmp_path / "missing")])
    done = command("runs", tmp_path, cwd=tmp_path)
    assert done.returncode == 1 and done.stderr.startswith(f"error: no runs in {tmp_path}; bertjax train starts a run")


@pytest.mark.slow
def test_the_page_follows_a_run_until_it_ends(tmp_path):
    run, page = made_run(tmp_path / "run", [5.0]), tmp_path / "run/report.html"
    with lock.held(run, "--workdir"):
        watching, deadline = start("report", run, "--watch=0.2", cwd=tmp_path), time.monotonic() + 60

        def wait_for(text):
            while not page.exists() or text not in page.read_text():
                assert watching.poll() is None and time.monotonic() < deadline, watching.describe()
                time.sleep(0.05)
            return page.read_text()

        shown = wait_for("mlm_loss 5.500")
        assert re.search(r'http-equiv="refresh" content="0.2"', shown) and "<td>10</td>" in shown
        with (run / "metrics.jsonl").open("a") as file:
            file.write(json.dumps({"step": 30, "eval/mlm_loss": 4.125}) + "\n")
        shown = wait_for("mlm_loss 4.125")
        assert "<td>30</td>" in shown and "mlm_loss 5.500" not in shown
    assert watching.wait(60) == 0 and "refresh" not in page.read_text()
    assert watching.stdout.splitlines()[0] == str(page)
