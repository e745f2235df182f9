"""The search over hyperparameters: every run once, compiled once, the best kept, failures shown."""

import json

import numpy as np
import pytest
from etils import epath

from bertjax.config import UserError, fine_tuning_config
from bertjax.interop import pretrained
from bertjax.reporting import curves, page
from bertjax.reporting.history import read_history
from bertjax.tasks import launch, sweep, validate
from bertjax.tasks.finetuning import FineTuning
from bertjax.tasks.sweep import Result
from bertjax.training import checkpoint as checkpoints
from bertjax.training import workdir
from bertjax.training.checkpoint import Scores
from bertjax.training.divergence import Diverged
from bertjax.training.loop import Trained
from bertjax.training.sinks.jsonl import read_metrics
from tests.tasks.test_finetuning import config_for, write_sst2

pytestmark = pytest.mark.usefixtures("on_one_device")


def parse(text):
    config = fine_tuning_config("glue", name="sst2")
    config.sweep = text
    return sweep.parse(config)


def test_the_papers_search_is_24_runs():
    runs = parse("paper")
    assert len(runs) == 24 and runs[0] == {"batch_size": 16, "learning_rate": 5e-5, "epochs": 2.0}
    assert len(parse("paper seed=0,1,2")) == 72
    assert parse("seed=1,2") == [{"seed": 1}, {"seed": 2}]
    assert len({sweep.name_of(settings) for settings in parse("paper seed=20240101,20240102,20240101")}) == 48


@pytest.mark.parametrize(
    "text, message",
    [
        ("rate=1", r"config.sweep = 'rate=1': 'rate=1' is not understood; write"),
        ("seed", r"'seed' is not understood"),
        ("epochs=two", r"'two': invalid values for epochs"),
    ],
)
def test_a_search_that_is_not_understood(text, message):
    with pytest.raises(UserError, match=message):
        parse(text)


def test_any_field_of_the_optimizer_can_be_searched():
    assert parse("weight_decay=0,0.1 bias_correction=False")[1] == {"bias_correction": False, "weight_decay": 0.1}


def test_a_search_is_compiled_once_goes_on_and_keeps_the_best(checkpoint, tmp_path, monkeypatch, capsys):
    write_sst2(tmp_path, train=192)
    compiled, trained = [], []

    def watched_program(*arguments, _real=sweep.make_program):
        compiled.append(_real(*arguments))
        return compiled[-1]

    def watched_run(kind, config, folder, *rest, _real=sweep.run_one, **more):
        if len(trained) == 2 and not stopped:
            stopped.append(True)
            raise KeyboardInterrupt
        trained.append(folder.name)
        return _real(kind, config, folder, *rest, **more)

    stopped: list[bool] = []
    monkeypatch.setattr(sweep, "make_program", watched_program)
    monkeypatch.setattr(sweep, "run_one", watched_run)
    config = config_for(tmp_path, checkpoint, sweep="learning_rate=1e-8,3e-3 epochs=5 seed=0,1", max_seq_length=16)
    validate(config)
    with pytest.raises(KeyboardInterrupt):
        launch.launch(config, tmp_path / "run")
    (program,) = compiled
    assert program.train_step._cache_size() == 1  # of two runs
    launch.launch(config_for(tmp_path, checkpoint, sweep=config.sweep, max_seq_length=16), tmp_path / "run")
    assert trained == [sweep.name_of(settings) for settings in sweep.parse(config)]  # each of them once

    results = {
        folder.name: json.loads((folder / sweep.RESULT).read_text()) for folder in (tmp_path / "run/runs").iterdir()
    }
    assert results.keys() == set(trained)
    scores = {name: result["scores"]["accuracy"] for name, result in results.items()}
    best = max(scores, key=scores.get)
    assert "0.003" in best and scores[best] > 0.8
    assert [results[name]["failed"] for name in trained] == [True, True, False, False]
    assert [name for name in trained if checkpoints.steps(tmp_path / "run/runs" / name)] == [best]
    said = (tmp_path / "run" / sweep.SUMMARY).read_text()
    assert said.splitlines()[0] == (
        "| learning rate | epochs | accuracy, mean | best | standard deviation | runs | failed |"
    )
    pair = [100 * scores[name] for name in trained[2:]]
    assert f"| 0.003 | 5 | {np.mean(pair):.2f} | {max(pair):.2f} | {np.std(pair, ddof=1):.2f} | 2 | 0 |" in said
    assert f"best: runs/{best}, accuracy" in said
    # The folder of the search stands for its best run.
    source = pretrained.read(tmp_path / "run")
    assert source.labels == ("0", "1") and source.path == f"{tmp_path / 'run/runs' / best}@60"
    folder = tmp_path / "run/runs" / best
    assert not checkpoints.is_resumable(folder, 60)  # no optimizer state is written only to be deleted

    # Another search goes on with what there is of it; with other settings than before it does not.
    wider = config_for(tmp_path, checkpoint, sweep="learning_rate=3e-3 epochs=5 seed=2,0,1", max_seq_length=16)
    launch.launch(wider, tmp_path / "run")
    assert len(trained) == 5 and trained[-1].endswith("seed=2")
    (kept,) = [folder for folder in (tmp_path / "run/runs").iterdir() if checkpoints.steps(folder)]
    top = {name: score for name, score in scores.items() if "0.003" in name}
    top[trained[-1]] = json.loads((tmp_path / "run/runs" / trained[-1] / sweep.RESULT).read_text())["scores"][
        "accuracy"
    ]
    assert top[kept.name] == max(top.values()) and pretrained.read(tmp_path / "run").path.startswith(str(kept))
    # A narrower one, of runs that are not the best of all, changes nothing of that.
    launch.launch(config_for(tmp_path, checkpoint, sweep="learning_rate=1e-8 epochs=5", max_seq_length=16, seed=7),
           tmp_path / "run")  # fmt: skip
    assert (
        len(trained) == 6 and pretrained.read(tmp_path / "run").path.startswith(str(kept)) and checkpoints.steps(kept)
    )
    other = config_for(tmp_path, checkpoint, sweep="learning_rate=3e-3 epochs=5 seed=0", max_seq_length=24)
    with pytest.raises(UserError, match=r"seed=0: trained with other settings, max_seq_length = 24 \(was 16\); choose"):
        launch.launch(other, tmp_path / "run")
    with pytest.raises(UserError, match=r"holds a search, and this is a single run; choose another --workdir"):
        launch.launch(config_for(tmp_path, checkpoint, max_seq_length=16), tmp_path / "run")
    with pytest.raises(UserError, match=r"holds a single run, and this is a search; choose another --workdir"):
        launch.launch(wider, kept)


def scored(accuracy):
    scores = Scores({"accuracy": accuracy}, accuracy)
    return Trained(None, scores, 1, scores)


def test_what_failed_is_tried_again_and_stays_in_the_table(checkpoint, tmp_path, monkeypatch):
    write_sst2(tmp_path, train=48)
    seeds = []

    def run(kind, config, folder, *_, **more):
        seeds.append(config.seed)
        if config.seed < 1000:
            raise Diverged("the loss is no number")
        return scored(0.0 if config.seed < 2000 else 1.0)

    monkeypatch.setattr(sweep, "run_one", run)
    config = config_for(tmp_path, checkpoint, sweep="seed=5,2005,6", restarts=3)
    launch.launch(config, tmp_path / "run")
    assert seeds == [5, 1005, 3005, 2005, 6, 1006, 2006]  # 2005 was to come anyway
    assert "| 42.86 | 100.00 | 53.45 | 7 | 4 |" in (tmp_path / "run" / sweep.SUMMARY).read_text()


def written(kind, config, folder, *_, **more):
    """As a run that ended at once."""
    opened = kind.open(config, folder, None)
    workdir.write_info(folder, opened.info, opened.tokenizer)
    return scored(1.0)


def test_a_trial_whose_score_is_no_number_fails_and_does_not_end_the_search(checkpoint, tmp_path, monkeypatch):
    """Such as the correlation of predictions that are all the same."""
    scores = Scores({"accuracy": None}, None)
    monkeypatch.setattr(sweep, "run_one", lambda *_, **more: Trained(None, scores, None, None))
    write_sst2(tmp_path, train=48)
    launch.launch(config_for(tmp_path, checkpoint, sweep="seed=0"), tmp_path / "run")
    assert "| 0.00 | 0.00 |  | 1 | 1 |" in (tmp_path / "run" / sweep.SUMMARY).read_text()


def test_searches_on_different_data_do_not_share_a_workdir(checkpoint, tmp_path, monkeypatch):
    """The best of them all would be kept, and the others' checkpoints deleted."""
    write_sst2(tmp_path, train=48)
    other = tmp_path / "other"
    other.mkdir()
    write_sst2(other, train=48)
    monkeypatch.setattr(sweep, "run_one", written)
    launch.launch(config_for(tmp_path, checkpoint, sweep="seed=0"), tmp_path / "run")
    launch.launch(config_for(tmp_path, checkpoint, sweep="epochs=2 seed=1"), tmp_path / "run")
    with pytest.raises(
        UserError, match=r"epochs=2,seed=1: trained with other settings, data.path = .*; choose another"
    ):
        launch.launch(config_for(other, checkpoint, sweep="seed=2"), tmp_path / "run")


@pytest.mark.slow
def test_a_run_of_a_search_that_was_stopped_in_its_middle_goes_on(checkpoint, tmp_path, monkeypatch, with_pictures):
    write_sst2(tmp_path, train=96)
    config = config_for(tmp_path, checkpoint, sweep="epochs=2,4", max_seq_length=16)
    config.checkpoint.every_steps = 5
    evaluate = FineTuning.evaluate

    def stopped(self, params, step, after_batch):
        if step == 24:  # the last of the second run: saved, but not evaluated yet
            raise KeyboardInterrupt
        return evaluate(self, params, step, after_batch)

    with monkeypatch.context() as patch:
        patch.setattr(FineTuning, "evaluate", stopped)
        with pytest.raises(KeyboardInterrupt):
            launch.launch(config, tmp_path / "run")
    folder = tmp_path / "run/runs/epochs=4"
    assert checkpoints.steps(folder)[-1] == 24 and not (folder / sweep.RESULT).exists()
    starts, batches = [], FineTuning.batches

    def watched(self, start_step):
        starts.append(start_step)
        return batches(self, start_step)

    monkeypatch.setattr(FineTuning, "batches", watched)
    launch.launch(config, tmp_path / "run")
    assert starts == [24] and read_metrics(folder)[-1]["step"] == 24 and (folder / sweep.RESULT).exists()
    assert "| 2 |" in (tmp_path / "run" / sweep.SUMMARY).read_text()
    drawn = (tmp_path / "run" / page.PAGE).read_text()  # with a row for each setting
    assert all(f"<td>run/epochs={epochs}</td>" in drawn for epochs in (2, 4)) and "<td>accuracy " in drawn
    launch.draw(folder)  # as a run that is no trial
    assert "<td>24</td>" in (folder / page.PAGE).read_text()
    panels = [(axis.get_title(), axis.get_xlabel()) for axis in curves.draw([read_history(folder)]).axes]
    assert panels[:6] == [(title, x) for title in ("loss", "accuracy, dev set") for x in ("steps", "tokens", "hours")]


def test_a_table_has_every_score():
    results = [Result({"seed": i}, {"f1": f1, "accuracy": accuracy}, False) for i, (f1, accuracy) in
               enumerate([(0.5, 0.9), (0.7, 0.6)])]  # fmt: skip
    head, _, row = sweep.table(results, ("f1", "accuracy")).splitlines()
    assert head == (
        "| f1, mean | best | standard deviation | accuracy, mean | best | standard deviation | runs | failed |"
    )
    assert row == "| 60.00 | 70.00 | 14.14 | 75.00 | 90.00 | 21.21 | 2 | 0 |"


def test_correlations_that_are_none_count_as_nothing():
    results = [Result({"epochs": 2}, {"spearman": None}, True), Result({"epochs": 2}, {"spearman": 0.5}, False)]
    assert "| 2 | 25.00 | 50.00 | 35.36 | 2 | 1 |" in sweep.table(results, ("spearman",))


@pytest.mark.parametrize(
    "scores, best",
    [([0.5, 0.7], "runs/b, f1 70.00"), ([0.7, 0.7], "runs/a, f1 70.00"), ([None, -0.1], "runs/b, f1 -10.00")],
)
def test_the_trial_that_is_named_has_the_checkpoint(tmp_path, scores, best):
    """Also of two that are equal; one that diverged is worse than any."""
    for name, score in zip("ba" if scores[0] == scores[1] else "ab", scores):
        (tmp_path / "runs" / name / "checkpoints").mkdir(parents=True)
        (tmp_path / "runs" / name / sweep.RESULT).write_text(json.dumps({"scores": {"f1": score}, "failed": False}))
    assert sweep.keep_best(epath.Path(tmp_path), "f1") == f"best: {best}"
    kept = [path.parent.name for path in tmp_path.glob("runs/*/checkpoints")]
    assert kept == [best[5]] and (tmp_path / "best").read_text() == f"runs/{best[5]}\n"


def test_every_run_of_a_search_is_checked_before_the_first(checkpoint, tmp_path):
    config = config_for(tmp_path, checkpoint, sweep="batch_size=16,12")
    with pytest.raises(UserError, match=r"config.batch_size = 12: .* must be a multiple of the 8 devices"):
        launch.launch(config, tmp_path / "run")
