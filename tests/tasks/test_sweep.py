"""The search over hyperparameters: every run once, compiled once, the best kept, failures shown."""

import json
import shutil

import pytest
from etils import epath

from bertjax import experiment
from bertjax.config import UserError, fine_tuning_config
from bertjax.interop import pretrained
from bertjax.reporting import curves, page
from bertjax.reporting.history import read_history
from bertjax.tasks import launch, sweep, validate
from bertjax.tasks.finetuning import FineTuning
from bertjax.tasks.sweep import Result
from bertjax.training import checkpoint as checkpoints
from bertjax.training import workdir as workdirs
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


@pytest.mark.parametrize("text, message", [
    ("rate=1", r"config.sweep = 'rate=1': 'rate=1' is not understood; write"),
    ("seed", r"'seed' is not understood"),
    ("epochs=two", r"'two': invalid values for epochs"),
])  # fmt: skip
def test_a_search_that_is_not_understood(text, message):
    with pytest.raises(UserError, match=message):
        parse(text)


def test_any_field_of_the_optimizer_can_be_searched():
    assert parse("weight_decay=0,0.1 bias_correction=False")[1] == {"bias_correction": False, "weight_decay": 0.1}


@pytest.mark.slow
def test_a_search_is_compiled_once_goes_on_and_keeps_the_best(checkpoint, tmp_path, monkeypatch, with_pictures):
    """The first trial learns nothing, and the second one is stopped in its last evaluation."""
    write_sst2(tmp_path, train=192)
    config = config_for(tmp_path, checkpoint, sweep="learning_rate=1e-8,3e-3 epochs=5", max_seq_length=16)
    config.checkpoint.every_steps = 20
    validate(config)
    programs, starts = [], []
    evaluate, batches, make_program = FineTuning.evaluate, FineTuning.batches, sweep.make_program

    def watched(self, start_step):
        starts.append(start_step)
        return batches(self, start_step)

    def stopped(self, *given):
        if len(starts) == 2:
            raise KeyboardInterrupt
        return evaluate(self, *given)

    monkeypatch.setattr(sweep, "make_program", lambda *given: programs.append(make_program(*given)) or programs[-1])
    monkeypatch.setattr(FineTuning, "batches", watched)
    with monkeypatch.context() as patch:
        patch.setattr(FineTuning, "evaluate", stopped)
        with pytest.raises(KeyboardInterrupt):
            launch.launch(config, tmp_path / "run")
    (program,) = programs
    assert program.train_step._cache_size() == 1  # of two runs
    worse, best = (tmp_path / f"run/runs/learning_rate={rate},epochs=5" for rate in ("1e-08", "0.003"))
    assert checkpoints.steps(best)[-1] == 60 and not (best / sweep.RESULT).exists()
    launch.launch(config, tmp_path / "run")
    assert starts == [0, 0, 60] and read_metrics(best)[-1]["step"] == 60  # each trial once

    results = [json.loads((folder / sweep.RESULT).read_text()) for folder in (worse, best)]
    score = results[1]["scores"]["accuracy"]
    assert [result["failed"] for result in results] == [True, False] and score > 0.8
    assert checkpoints.steps(best) and not checkpoints.steps(worse)
    said = (tmp_path / "run" / sweep.SUMMARY).read_text()
    assert said.startswith("| learning rate | epochs | accuracy, mean | best | standard deviation | runs | failed |\n")
    assert f"| 0.003 | 5 | {100 * score:.2f} | {100 * score:.2f} |  | 1 | 0 |" in said
    assert f"best: runs/{best.name}, accuracy" in said
    source = pretrained.read(tmp_path / "run")  # the folder of the search stands for its best run
    assert source.labels == ("0", "1") and source.path == f"{best}@60"
    drawn = (tmp_path / "run" / page.PAGE).read_text()  # with a row for each setting
    assert all(f"<td>run/{folder.name}</td>" in drawn for folder in (worse, best)) and "<td>accuracy " in drawn
    launch.draw(best)  # as a run that is no trial
    assert "<td>60</td>" in (best / page.PAGE).read_text()
    panels = [(axis.get_title(), axis.get_xlabel()) for axis in curves.draw([read_history(best)]).axes]
    assert panels[:6] == [(title, x) for title in ("loss", "accuracy, dev set") for x in ("steps", "tokens", "hours")]


def test_another_search_goes_on_with_the_trials_that_are_there(checkpoint, tmp_path, monkeypatch):
    write_sst2(tmp_path, train=48)
    trained, workdir = [], tmp_path / "run"

    def run(kind, config, folder, *_, **more):
        trained.append(folder.name)
        opened = kind.open(config, folder, None)
        workdirs.write_info(folder, opened.info, opened.tokenizer)
        (folder / "checkpoints/1").mkdir(parents=True)
        return scored(0.6 + config.seed / 10)

    def search(text, **fields):
        launch.launch(config_for(tmp_path, checkpoint, sweep=text, **fields), workdir)
        return [path.parent.name for path in workdir.glob("runs/*/checkpoints")]

    monkeypatch.setattr(sweep, "run_one", run)
    assert search("seed=0,1") == ["seed=1"] and trained == ["seed=0", "seed=1"]
    assert search("seed=2,0,1") == ["seed=2"] and trained[2:] == ["seed=2"]
    # A narrower search, of trials that are not the best of all, changes nothing of that.
    assert search("epochs=5 seed=0") == ["seed=2"] and trained[3:] == ["epochs=5,seed=0"]
    assert (workdir / "best").read_text() == "runs/seed=2\n"
    with pytest.raises(UserError, match=r"seed=0: trained with other settings, max_seq_length = 24 \(was 32\); choose"):
        search("seed=0", max_seq_length=24)
    shutil.copytree(tmp_path / "SST-2", tmp_path / "other/SST-2")
    config = config_for(tmp_path / "other", checkpoint, sweep="seed=3")  # one best trial of two data sets
    with pytest.raises(UserError, match=r"seed=0: trained with other settings, data.path = .*; choose another"):
        launch.launch(config, workdir)
    for text, folder, message in (
        ("", workdir, r"holds a search, and this is a single run; choose another --workdir"),
        ("seed=0", workdir / "runs/seed=2", r"holds a single run, and this is a search; choose another --workdir"),
    ):
        with pytest.raises(UserError, match=message):
            launch.launch(config_for(tmp_path, checkpoint, sweep=text), folder)


def scored(score, metric="accuracy"):
    scores = Scores({metric: score}, score)
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


def test_a_trial_whose_score_is_no_number_fails_and_does_not_end_the_search(checkpoint, tmp_path, monkeypatch):
    """Such as the correlation of predictions that are all the same."""
    scores = Scores({"accuracy": None}, None)
    monkeypatch.setattr(sweep, "run_one", lambda *_, **more: Trained(None, scores, None, None))
    write_sst2(tmp_path, train=48)
    launch.launch(config_for(tmp_path, checkpoint, sweep="seed=0"), tmp_path / "run")
    assert "| 0.00 | 0.00 |  | 1 | 1 |" in (tmp_path / "run" / sweep.SUMMARY).read_text()


@pytest.mark.parametrize(
    "search, programs",
    [("learning_rate=1e-5,1e-4 epochs=1,2 seed=0,1", 1), ("class_weights=,1=9", 2), ("weight_decay=0,0.1", 2),
     ("freeze_layers=0,1", 2), ("hidden_dropout_prob=0,0.1", 2), ("temperature=0.05,0.5", 2)],
)  # fmt: skip
def test_trials_share_a_program_unless_a_field_is_compiled_into_it(search, programs, checkpoint, tmp_path, monkeypatch):
    write_sst2(tmp_path, train=48)
    config = config_for(tmp_path, checkpoint)
    if "temperature" in search:  # vectors of texts, whose loss has fields
        config = experiment.load("embed")
        config.data.update(path=f"{tmp_path}/SST-2", form="scored", texts="sentence,sentence", label="label")
        config.init_checkpoint, config.max_seq_length = str(checkpoint), 32
    config.sweep, compiled = search, []

    def run(kind, config, folder, program_of, **_):
        opened = kind.open(config, folder, None)
        compiled.append(program_of(opened))
        return scored(1.0, opened.task.dataset.metric)

    monkeypatch.setattr(sweep, "run_one", run)
    launch.launch(config, tmp_path / "run")
    assert len(compiled) == len(sweep.parse(config)) and len(set(map(id, compiled))) == programs


def test_a_table_has_every_score():
    scores = [{"f1": 0.5, "accuracy": 0.9}, {"f1": 0.7, "accuracy": 0.6}]
    head, _, row = sweep.table([Result({"seed": 0}, each, False) for each in scores], ("f1", "accuracy")).splitlines()
    columns = "mean | best | standard deviation"
    assert head == f"| f1, {columns} | accuracy, {columns} | runs | failed |"
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
