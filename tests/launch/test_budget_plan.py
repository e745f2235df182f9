"""The plan of a run: the survey of the text, steps that take the budget, and equal numbers on resume."""

import copy
import json
import math
import random
import time
import types

import pytest

from bertjax.cli.overrides import from_arguments
from bertjax.common.errors import UserError
from bertjax.config import budget, experiments
from bertjax.config.defaults import fine_tuning_config, named_stages, pretraining_config, stage
from bertjax.config.stages import stages_of, total_steps
from bertjax.data.corpus.selection import heldout_documents
from bertjax.launch.budget import plan, steps, survey
from bertjax.launch.budget.steps import StepTimes, fields_that_fit, scaled_stages
from bertjax.launch.start import launch
from bertjax.launch.validate import validate
from bertjax.training.checkpoints.workdir import require_info
from tests.checkpoints import on_one_device  # noqa: F401
from tests.conftest import make_corpus, tiny_config


def config_of(*arguments):
    return from_arguments(["command", *arguments])[0]


def surveyed(tmp_path, content, name="text.txt", **fields):
    (tmp_path / name).write_text(content)
    config = config_of("--config=text", f"--config.data.corpus={tmp_path / name}")
    config.data.update(fields)
    return config, survey.survey(config)


def opened(config, total):
    return types.SimpleNamespace(config=config, task=types.SimpleNamespace(total_steps=total))


@pytest.mark.parametrize("seconds", [300, 3000, 30_000])
@pytest.mark.parametrize("stages", [
    dict(one=stage(1000, 128, 20)), dict(short=stage(900, 128, 20), long=stage(100, 512, 77, batch_size=64)),
    dict(short=stage(0, 128, 20, tokens=32e6)),
], ids=["one", "two", "tokens"])  # fmt: skip
def test_pretraining_takes_the_budget(stages, seconds, tmp_path):
    config = pretraining_config()
    config.stages = named_stages(**stages)
    config.data.corpus = "text.txt"
    total, measured, elapsed = total_steps(config), StepTimes(steps=500.0, evaluation=4.0, compiling=20.0), 60.0
    fields = fields_that_fit(opened(config, total), tmp_path, budget.parse_budget(f"{seconds}s"), measured, elapsed)
    plan.set_fields(config, fields)
    validate(config)
    of_steps = measured.steps * total_steps(config) / total
    # The loop evaluates at regular intervals, and at the end.
    evaluations = math.ceil(total_steps(config) / config.eval.every_steps)
    used = elapsed + of_steps + evaluations * measured.evaluation + 0.7 * measured.compiling + steps.END_SECONDS
    assert 0.93 * seconds <= used <= seconds
    assert config.eval.every_steps <= total_steps(config) and config.optimizer.warmup_steps == pytest.approx(
        10_000 * total_steps(config) / total, rel=0.02, abs=2
    )


def test_batch_growth_is_scaled_or_removed():
    config = config_of("--config=modern:17m")
    for factor in (1e-2, 1e-6):
        changed = copy.deepcopy(config)
        plan.set_fields(changed, {"stages": scaled_stages(config, factor)})
        changed.data.corpus = "text.txt"
        validate(changed)
        first, *_, last = stages_of(changed)
        assert first.grows == (factor == 1e-2) and last.steps >= 1
    assert [stage_of_plan.name for stage_of_plan in stages_of(changed)] == ["pretraining", "context", "decay"]


def test_a_token_budget_sets_the_steps(tmp_path):
    config = pretraining_config()
    arguments = opened(config, total_steps(config)), tmp_path, budget.parse_budget("655.36M tokens")
    plan.set_fields(config, fields_that_fit(*arguments, StepTimes(1e7, 1.0, 1.0), 60.0))
    assert sum(part.steps * part.tokens_per_step for part in stages_of(config)) == pytest.approx(655.36e6, rel=0.01)


@pytest.mark.parametrize("seconds", [2000, 600, 150])
def test_fine_tuning_never_exceeds_the_epochs_of_the_config(seconds, tmp_path):
    config, measured = fine_tuning_config("classify"), StepTimes(steps=900.0, evaluation=10.0, compiling=20.0)
    fields = fields_that_fit(opened(config, 300), tmp_path, budget.parse_budget(f"{seconds}s"), measured, 50.0)
    epochs = fields.get("epochs", config.epochs)
    used = 50 + steps.END_SECONDS + 10 + epochs * 300 + math.ceil(epochs) * 10
    assert used <= seconds and (epochs == 3.0 if seconds == 2000 else used > 0.9 * seconds)


def test_an_evaluation_takes_a_third_of_the_training_time_of_its_sequences():
    config = fine_tuning_config("classify")
    config.batch_size = 16
    run = opened(config, 10)
    run.task.data = types.SimpleNamespace(dev=[types.SimpleNamespace(examples=range(count)) for count in (30, 18)])
    assert steps._evaluation_seconds(run, 100.0) == pytest.approx(100 / 160 * 48 / 3)


def test_too_small_a_budget_names_a_sufficient_one(tmp_path):
    for config in (pretraining_config(), fine_tuning_config("classify")):
        arguments = opened(config, 300), tmp_path, budget.parse_budget("1min"), StepTimes(900.0, 10.0, 20.0), 70.0
        with pytest.raises(UserError, match=r"no step is left; set --config.budget=\dmin or more"):
            fields_that_fit(*arguments)


def test_steps_that_the_user_has_set_are_kept(tmp_path):
    config = config_of("--config=quickstart", "--config.stages.short.steps=77", "--config.budget=1h")
    arguments = (
        opened(config, total_steps(config)),
        tmp_path,
        budget.parse_budget("1h"),
        StepTimes(500.0, 4.0, 20.0),
        60.0,
    )
    assert fields_that_fit(*arguments) == {}


def test_a_survey_counts_documents_letters_and_words(tmp_path):
    russian = "".join(chr(letter) for letter in range(0x430, 0x450))
    words = ["".join(random.Random(seed).choices(russian, k=6)) for seed in range(50)]
    documents = [" ".join(random.Random(seed).choices(words, k=30)) + "." for seed in range(40)]
    _, totals = surveyed(tmp_path, "\n\n".join(documents + make_corpus(40).split("\n\n")))
    assert totals.text.documents == 80 and totals.files == 1 and totals.is_whole and totals.document == "blank_line"
    assert set(totals.scripts) == {"CYRILLIC", "LATIN"} and totals.text.latin == pytest.approx(totals.scripts["LATIN"])
    assert totals.text.bytes == pytest.approx((tmp_path / "text.txt").stat().st_size, rel=0.05)
    pieces = survey.learn_from_survey("bpe", False, 20_000, totals)  # more than the text has
    assert pieces.vocab_size < 20_000 and 1 < survey.bytes_per_token(pieces, totals.sample) < 12


def test_lines_are_documents_without_blank_lines(tmp_path):
    assert (
        surveyed(tmp_path, "\n".join(f"This is line {number} of a text." for number in range(50)))[1].document == "line"
    )
    with pytest.raises(UserError, match=r"has 1 document in .* bytes; at least 20 are needed, .*data.document=line"):
        surveyed(tmp_path, "All of it is one line. " * 500)


def test_a_survey_reads_only_the_beginning_of_a_huge_file(tmp_path, monkeypatch):
    monkeypatch.setattr(survey, "MOST_BYTES", 400_000)
    content = make_corpus(300)
    (tmp_path / "text.txt").write_text(content * (1_000_000 // len(content)))
    with (tmp_path / "text.txt").open("ab") as file:
        file.truncate(50 * 10**9)  # a sparse file takes no space
    config = config_of("--config=text", f"--config.data.corpus={tmp_path / 'text.txt'}")
    totals = survey.survey(config)
    assert not totals.is_whole and totals.text.bytes == pytest.approx(50e9, rel=0.05)
    with pytest.raises(UserError, match=r"preparing [45]\d\.\d GB of text takes about .*--config.budget=\d+h, or name"):
        plan._with_sizes(config, began=time.monotonic())
    (tmp_path / "nothing.txt").touch()
    with (tmp_path / "nothing.txt").open("ab") as file:
        file.truncate(50 * 10**9)
    config.data.corpus = str(tmp_path / "nothing.txt")
    with pytest.raises(UserError, match=r"no words in the first \d{3},\d{3} bytes; name files with text"):
        survey.survey(config)


def test_text_in_another_field_is_named(tmp_path):
    with pytest.raises(UserError, match=r"empty.txt': no words in the text; name files with text$"):
        surveyed(tmp_path, "", "empty.txt")
    with pytest.raises(UserError, match=r"fields with text: body; set --config.data.text_column=body"):
        surveyed(tmp_path, '{"body": "some text", "id": 3}\n' * 50, "text.jsonl")


def test_masked_texts_are_held_out_sentences(tmp_path):
    config, totals = surveyed(tmp_path, make_corpus(200), heldout_fraction=0.1)
    texts = survey.masked_texts(config, totals)
    assert len(texts) == 3 and all(text.count("[MASK]") == 1 for text in texts)
    heldout = "\n".join(line for document in heldout_documents(config, config.data.corpus) for line in document.lines)
    assert all(set(text.split()) - {"[MASK]"} <= set(heldout.split()) for text in texts)
    assert all(text.split("[MASK]")[0] in heldout for text in texts)
    assert texts == survey.masked_texts(config, totals)


def test_sizes_follow_changed_flags_until_steps_are_measured(tmp_path):
    """The start was interrupted during the preparation of the text; equal flags keep the numbers."""
    (tmp_path / "text.txt").write_text(make_corpus(100))

    def begun(*arguments):
        config = config_of("--config=text", f"--config.data.corpus={tmp_path / 'text.txt'}", *arguments)
        validate(config)
        return plan.begin(config, tmp_path / "run", time.monotonic())

    first, again = begun(), begun()
    assert first == again
    wide = begun("--config.model.hidden_size=400", "--config.stages.short.length=32", "--config.microbatches=4")
    assert (wide.model.hidden_size, wide.model.intermediate_size) == (
        400,
        600,
    ) and 400 % wide.model.num_attention_heads == 0
    assert wide.stages.short.max_predictions_per_seq == 10 and wide.batch_size % 4 == 0
    bert = begun("--config.recipe=bert")
    assert (bert.model.family, bert.tokenizer.kind, bert.data.masked_lm_prob) == ("bert", "wordpiece", 0.15)
    assert bert.model.intermediate_size == 4 * bert.model.hidden_size
    two = begun("--config.stages.long.length=64", "--config.data.masked_lm_prob=0.2")
    assert [(part.length, part.max_predictions_per_seq) for part in stages_of(two)] == [(64, 13), (128, 26)]
    few = begun("--config.data.masked_lm_prob=0.4", "--config.stages.short.length=32")
    assert [(part.length, part.max_predictions_per_seq) for part in stages_of(few)] == [(32, 13)]
    for wrong, message in (
        (["--config.recipe=bert", "--config.model.local_attention=64"], "config.recipe = 'bert': .*'local_attention'"),
        (["--config.tokenizer.kind=unigram"], "config.tokenizer.kind = 'unigram': bertjax cannot learn this kind"),
        (["--config.init_checkpoint=somewhere"], "config.init_checkpoint = .* use --config=adapt with a budget"),
    ):
        with pytest.raises(UserError, match=message):
            begun(*wrong)


def test_fields_of_an_experiment_are_kept_like_flags(tmp_path):
    (tmp_path / "text.txt").write_text(make_corpus(100))
    config = experiments.load("text")
    config.data.corpus, config.batch_size, config.recipe = str(tmp_path / "text.txt"), 12, "bert"
    begun = plan.begin(config, tmp_path / "run", time.monotonic())
    assert begun.batch_size == 12 and begun.data.corpus == config.data.corpus and begun.model.family == "bert"


TINY = (
    "--config=text", "--config.budget=9k tokens", "--config.model.hidden_size=32", "--config.model.num_hidden_layers=1",
    "--config.stages.short.length=32", "--config.dtype=float32",
)  # fmt: skip


@pytest.mark.usefixtures("in_process", "on_one_device")
def test_a_plan_is_stored_and_reused_on_resume(tmp_path, capsys, monkeypatch):
    """From the text to the report; the same command resumes the run with any budget, and a branch has the numbers of
    the run.
    """
    monkeypatch.setattr(steps, "MEASURED_SECONDS", 0.01)
    (tmp_path / "text.txt").write_text(make_corpus(100))
    arguments = [*TINY, f"--config.data.corpus={tmp_path / 'text.txt'}"]
    launch(config_of(*arguments), tmp_path / "run")
    printed, stored = capsys.readouterr().out, json.loads((tmp_path / "run" / "plan.json").read_text())
    for name in ("text", "held out", "vocabulary", "model", "stage short", "tokens", "time", "memory"):
        line = next(line for line in stored["lines"] if line.startswith(f"{name}: "))
        assert line in printed and "(--config." in line
    config = require_info(tmp_path / "run").config
    assert config.model.hidden_size == 32 and config.model.intermediate_size == 48
    assert sum(part.steps * part.tokens_per_step for part in stages_of(config)) == pytest.approx(9000, rel=0.15)
    assert "[MASK]" in printed[printed.index("held-out masked words") :]

    launch(config_of(*arguments, "--config.budget=90k tokens"), tmp_path / "run")
    resumed = capsys.readouterr().out
    without = config_of(*arguments)
    without.budget = ""
    with pytest.raises(UserError, match="must be set for a recipe"):
        validate(without)
    assert "already finished" in resumed and "config.budget = '90k tokens' changes nothing" in resumed
    total = total_steps(config)
    more = (f"--config.branch_from={tmp_path / 'run'}@latest", f"--config.stages.short.steps={total + 2}")
    stored["fields"]["optimizer.learning_rate"] = 0.00123
    (tmp_path / "run" / "plan.json").write_text(json.dumps(stored))
    branch = plan.begin(config_of(*arguments, *more), tmp_path / "branch", began=0.0)
    assert total_steps(branch) == total + 2 and branch.optimizer.learning_rate == 0.00123
    assert branch.model == config.model and branch.batch_size == config.batch_size


@pytest.mark.slow
def test_any_run_takes_a_budget_and_keeps_the_steps_on_resume(tmp_path, capsys, in_process, on_one_device, monkeypatch):  # noqa: F811
    """The run resumes without the flag as well; a run that was started without a budget does not get a budget."""
    monkeypatch.setattr(steps, "measure_steps", lambda *_: StepTimes(steps=400.0, evaluation=0.0, compiling=0.0))
    (tmp_path / "text.txt").write_text(make_corpus(100))
    config = tiny_config(tmp_path / "text.txt")  # ten steps
    budgeted = config.copy_and_resolve_references()
    budgeted.budget = "4min"
    launch(budgeted, tmp_path / "run")
    total = total_steps(require_info(tmp_path / "run").config)
    assert total in (4, 5) and f"step {total}/{total} loss" in capsys.readouterr().out
    launch(config.copy_and_resolve_references(), tmp_path / "run")
    assert f"already finished: {total} steps" in capsys.readouterr().out
    launch(config.copy_and_resolve_references(), tmp_path / "without")
    with pytest.raises(UserError, match="was started without a budget; choose another --workdir"):
        launch(budgeted, tmp_path / "without")
