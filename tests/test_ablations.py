"""What runs the paper's comparisons: everything once and in order, going on where it was, and the tables of it."""

import json
import subprocess
import sys

import numpy as np
import pytest

from bertjax.config import UserError, pretraining_config
from bertjax.stages import stages_of
from bertjax.training.workdir import RunInfo, write_info
from experiments.ablations import scaled, tables
from experiments.ablations.suite import Suite, run_all
from tests.processes import ROOT, environment_with

TRIAL = scaled.SCALES["trial"]


@pytest.fixture
def data(tmp_path):
    reviews, articles = "sentence\tlabel\n" + 600 * "good\t1\n", json.dumps({"data": [1, 2, 3]})
    files = {
        **dict.fromkeys(("conll2003/eng.train", "conll2003/eng.testa"), "any"),
        **dict.fromkeys((f"glue/{task}/{part}.tsv" for task in ("MRPC", "STS-B") for part in ("train", "dev")), "any"),
        **dict.fromkeys(("glue/SST-2/train.tsv", "glue/SST-2/dev.tsv"), reviews),
        **dict.fromkeys(("squad/train-v1.1.json", "squad/dev-v1.1.json"), articles),
    }
    for name in ("books", "wiki-000", "wiki-001", "wiki-simple-000"):
        files[f"corpora/{name}.txt"] = "any"
    for name, text in files.items():
        (tmp_path / "data" / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / "data" / name).write_text(text)
    return tmp_path / "data"


class Recorded(Suite):
    """Notes what would be started, and leaves what it would have left."""

    started: list

    def _start(self, module, folder, config, settings, *arguments):
        self.started.append((module, folder.name, settings))
        folder.mkdir(parents=True, exist_ok=True)
        if module == "vocabulary":
            (folder / "vocab.txt").touch()
        elif module == "prepare":
            (folder / "manifest.json").touch()
        elif "sweep" in settings:
            for seed in settings["sweep"].removeprefix("seed=").split(","):
                (folder / f"runs/seed={seed}").mkdir(parents=True)
                scores = dict.fromkeys(("accuracy", "f1", "spearman"), 0.5 + 0.1 * int(seed))
                result = {"scores": scores, "failed": False, "metric": "accuracy", "baseline": 0.42}
                (folder / f"runs/seed={seed}/result.json").write_text(json.dumps(result))
        else:
            (folder / "report.txt").touch()


def recorded(data, tmp_path) -> Recorded:
    suite = Recorded("trial", tmp_path / "work", data)
    object.__setattr__(suite, "started", [])
    return suite


@pytest.mark.parametrize("jobs", [1, 2])
def test_everything_runs_once_after_what_it_needs(data, tmp_path, jobs):
    wanted = [cell for table in scaled.TABLES for _, cell in scaled.cells(table, TRIAL)]
    runs = [run for cell in wanted for run in (cell.model, cell)]
    suite, written = recorded(data, tmp_path), []
    run_all(suite, runs, jobs, lambda to_do: written.append(len(to_do)))
    names = [name for _, name, _ in suite.started]
    assert len(set(names)) == len(names) and set(names) == {
        "vocabulary", *(f"records-{cell.model.records}" for cell in wanted), *(run.name for run in runs)
    }  # fmt: skip
    for cell in wanted:
        assert names.index(f"records-{cell.model.records}") < names.index(cell.model.name) < names.index(cell.name)
    assert names.index("vocabulary") < names.index("records-pairs") and written[-1] == 0

    again = recorded(data, tmp_path)
    run_all(again, runs, jobs, lambda to_do: None)
    assert not again.started


def test_the_data_are_the_first_part_of_all(data, tmp_path):
    suite = recorded(data, tmp_path)
    run_all(
        suite, [scaled.BERT, *(scaled.Cell(scaled.BERT, task) for task in ("sst2", "squad"))], 1, lambda to_do: None
    )
    settings = {name: settings for _, name, settings in suite.started}
    corpora = settings["vocabulary"]["data.corpus"].split(",")
    assert [path.rpartition("/")[2] for path in corpora] == ["books.txt", "wiki-000.txt", "wiki-simple-000.txt"]
    assert settings["bert-sst2"]["init_checkpoint"] == f"{tmp_path}/work/bert@latest"
    lines = [
        (settings["bert-sst2"]["data.path"] / f"SST-2/{part}.tsv").read_text().splitlines() for part in ("train", "dev")
    ]
    assert [len(part) for part in lines] == [1 + TRIAL.sentences, 1 + 600] and lines[0][0] == "sentence\tlabel"
    parts = [
        json.loads((settings["bert-squad"]["data.path"] / f"{part}-v1.1.json").read_text()) for part in ("train", "dev")
    ]
    assert parts == [{"data": [1, 2]}, {"data": [1, 2]}]


def test_after_an_interrupt_nothing_starts(data, tmp_path):
    suite = Suite("trial", tmp_path / "work", data)
    suite.interrupt()
    with pytest.raises(KeyboardInterrupt, match="interrupted; the same command goes on"):
        run_all(suite, [scaled.BERT], 2, lambda to_do: None)
    assert not suite.processes


@pytest.mark.parametrize("name", scaled.SCALES)
def test_no_model_is_fine_tuned_at_positions_that_it_has_not_learnt(name):
    for table in scaled.TABLES:
        for title, cell in scaled.cells(table, scaled.SCALES[name]):
            stages, done = stages_of(scaled.get_config(f"{name}/{cell.model.name}")), 0
            for stage in stages:
                if not cell.step or done < cell.step:
                    learnt, done = stage.length, done + stage.steps
            length = cell.settings(scaled.SCALES[name]).get("max_seq_length", 128)
            assert length <= learnt or cell.model is scaled.RANDOM, f"{table}, {title}: {cell.name} has {length}"


def test_what_fails_is_said_in_one_line(data, tmp_path):
    (data / "corpora/books.txt").write_text("")
    suite = Suite("trial", tmp_path / "work", data)
    for path in data.glob("corpora/wiki*"):
        path.unlink()
    with pytest.raises(UserError, match=r"^[^\n]*\(.*work/vocabulary.log\)$") as caught:
        run_all(suite, [scaled.BERT], 1, lambda to_do: None)
    assert not str(caught.value).startswith("error")


def test_a_run_that_was_killed_is_no_mistake_of_the_user(data, tmp_path, monkeypatch):
    monkeypatch.setattr(sys, "executable", tmp_path / "python")
    (tmp_path / "python").write_text("#!/bin/sh\necho step 300\nkill -9 $$\n")
    (tmp_path / "python").chmod(0o755)
    with pytest.raises(UserError, match=r"^vocabulary vocabulary: killed by SIGKILL, .*--jobs \(.*vocabulary.log\)$"):
        run_all(Suite("trial", tmp_path / "work", data), [scaled.BERT], 1, lambda to_do: None)


def test_a_table_takes_the_place_of_the_one_before(data, tmp_path):
    folder = tmp_path / "work/bert"
    write_info(folder, RunInfo(pretraining_config()), None)
    run_all(
        recorded(data, tmp_path),
        [scaled.Cell(scaled.RANDOM, "sst2"), scaled.Cell(scaled.BERT, "sst2")],
        1,
        lambda _: None,
    )
    path = tmp_path / "new/RESULTS.md"
    tables.write(path, tmp_path / "work", "objective", TRIAL)  # makes the folder
    path.write_text("before\n\n<!-- objective -->\nold\n<!-- /objective -->\n\nafter\n")
    for _ in range(2):
        tables.write(path, tmp_path / "work", "objective", TRIAL)
        tables.write(path, tmp_path / "work", "size", TRIAL)
    text = path.read_text()
    assert text.startswith("before\n\n<!-- objective -->\n|  | steps |") and "old" not in text
    assert "after\n\n## Size\n" in text and text.count("<!-- size -->") == 1
    assert "\n| BERT |  |  |  |  | 55.0 ± 7.1 |  |  |  |  |\n" in text  # of 50 and 60
    assert "\n| baseline |  |  |  |  | 42.0 |  |  |  |  |\n" in text and text.count("| baseline |") == 1
    assert (tmp_path / "new/objective.png").exists() and "![objective](objective.png)" in text


def test_scores_after_fewer_steps_stand_beside_those_of_the_end(data, tmp_path):
    wanted = [cell for _, cell in scaled.cells("steps", TRIAL)]
    run_all(recorded(data, tmp_path), [run for cell in wanted for run in (cell.model, cell)], 1, lambda to_do: None)
    assert {cell.name for cell in wanted} == {
        "no_nsp@20-conll-32", "no_nsp-conll-32", "ltr@20-conll-32", "ltr-conll-32"
    }  # fmt: skip
    (axis,) = tables.draw(tmp_path / "work", "steps", TRIAL).axes
    assert [list(bars[0].get_xdata()) for bars in axis.containers] == [[20, 40], [20, 40]]
    np.testing.assert_allclose([list(bars[0].get_ydata()) for bars in axis.containers], 55.0)


@pytest.mark.parametrize(
    "missing, flag, message",
    [
        ("conll2003/eng.train", "--tables=features", "--data=data: no conll2003/eng.train in it"),
        ("glue/STS-B/dev.tsv", "--tables=objective", "--data=data: no glue/STS-B/dev.tsv in it"),
        ("", "--results=data", "--results=data: a folder; name a file in it, such as data/RESULTS.md"),
        ("corpora", "--tables=size", "--data=data: no corpora in it"),
        ("", "--jobs=999", "--jobs=999: from 1 to "),
        ("", "--tables=sizes", "--tables=sizes: there are objective, size"),
    ],
)
def test_mistakes_are_told_at_once(data, missing, flag, message):
    if missing:
        (data / missing).rename(data.parent / "elsewhere")
    command = [sys.executable, "-m", "experiments.ablations", "--scale=trial", "--data=data", flag]
    done = subprocess.run(
        command, cwd=data.parent, env=environment_with(PYTHONPATH=str(ROOT)), capture_output=True, text=True
    )
    assert done.returncode == 1 and len(done.stderr.splitlines()) == 1 and message in done.stderr, done.stderr
    assert not (data.parent / "runs").exists()
