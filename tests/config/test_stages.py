"""Stages of pre-training: the fields that change, from the config to the step, with resumes and branches."""

import itertools

import flax.linen as nn
import jax
import numpy as np
import pytest

from bertjax.cli.overrides import from_arguments
from bertjax.common.errors import UserError
from bertjax.config import experiments
from bertjax.config.defaults import named_stages, stage
from bertjax.config.stages import config_after, config_in, stages_of, steps_for, total_steps
from bertjax.data.batch import RowSize
from bertjax.data.loading.order import Order
from bertjax.data.preprocessing.preparation import prepare
from bertjax.data.records.record_sets import RecordSet, mix_sources
from bertjax.distributed.mesh import make_mesh
from bertjax.interop import conversion, pretrained
from bertjax.launch.start import launch
from bertjax.launch.validate import validate
from bertjax.models import families
from bertjax.nn.ops.dropout import row_keys
from bertjax.pretraining.task import Pretraining
from bertjax.text import tokenizer
from bertjax.training.checkpoints import checkpoint
from bertjax.training.checkpoints.workdir import require_info
from bertjax.training.optim.schedules import schedule_of
from bertjax.training.step import Program
from bertjax.training.trackers.jsonl import read_metrics
from tests.checkpoints import on_one_device  # noqa: F401  a fixture
from tests.conftest import launch_and_stop, preparing_in_process, pretraining_task, tiny_config

pytestmark = pytest.mark.usefixtures("on_one_device")
THREE = dict(
    begin=stage(0, 32, 10, tokens=32.0 * (2 * 4 + 2 * 8 + 2 * 12), ramp_from=4, ramp_tokens=32.0 * (2 * 4 + 2 * 8),
                batch_size=12),
    context=stage(3, 64, 20, model=dict(global_rope_theta=1e6), optimizer=dict(
        schedule="trapezoid", decay_proportion=1.0, decay="sqrt", decay_to=0.5)),
    decay=stage(2, 64, 20, batch_size=4, data=dict(masked_lm_prob=0.1), optimizer=dict(
        learning_rate=5e-4, schedule="trapezoid", decay_proportion=1.0, decay_to=0.1)),
)  # fmt: skip
SHORT = dict(  # of the same types, which need three programs
    begin=stage(0, 32, 10, tokens=32.0 * (2 * 4 + 2 * 8), ramp_from=4, ramp_tokens=32.0 * 2 * 4),
    context=stage(2, 32, 10, model=dict(global_rope_theta=1e6)),
    decay=stage(2, 32, 10, batch_size=4, data=dict(masked_lm_prob=0.1), optimizer=dict(learning_rate=5e-4)),
)


@pytest.fixture(scope="module")
def records(corpus_file, tmp_path_factory):
    """Full sentences with dynamic masks."""
    folder, config = tmp_path_factory.mktemp("stages") / "records", tiny_config(corpus_file)
    config.data.update(masking="dynamic", next_sentence="none", dupe_factor=1)
    with preparing_in_process():
        prepare(config, folder)
    return folder


def modern_config(records, stages=THREE, **fields):
    config = tiny_config(records=records)
    sizes = dict(vocab_size=150, hidden_size=16, num_hidden_layers=1, num_attention_heads=2, intermediate_size=32)
    config.model = families.model_fields("modernbert", **sizes, max_position_embeddings=64, local_attention=16)
    config.data.update(masking="dynamic", next_sentence="none", masked_lm_prob=0.3, dupe_factor=1)
    config.optimizer.update(learning_rate=1e-3, schedule="constant", warmup_steps=0, warmup_tokens=400.0)
    config.stages = named_stages(**stages)
    config.batch_size = 8
    config.update(fields)
    config.lock()
    validate(config)
    return config


def task_of(config, records):
    pieces = tokenizer.load_tokenizer("wordpiece", records / "vocab.txt")
    return pretraining_task(config, make_mesh(config, jax.devices()[:1]), records, tokenizer=pieces)


def leaves(tree):
    return [np.asarray(x) for x in jax.tree.leaves(tree)]


def assert_equal_ends(folder, other, step: int) -> None:
    """Asserts that the params of two runs at a step are identical."""
    jax.tree.map(np.testing.assert_array_equal, *(checkpoint.read_params(workdir, step) for workdir in (folder, other)))


def test_stages_of_bert_are_ordered_by_length():
    config = tiny_config("x")
    config.stages = named_stages(long=stage(3, 64, 10), short=stage(5, 32, 5))
    assert [(s.name, s.steps, s.first_step, s.batch_size, s.grows) for s in stages_of(config)] == [
        ("short", 5, 0, config.batch_size, False), ("long", 3, 5, config.batch_size, False),
    ]  # fmt: skip
    assert all(config_in(config, s).to_dict() == config.to_dict() for s in stages_of(config))
    schedule = schedule_of(config, 8)
    assert type(schedule).__name__ == "Linear" and schedule.total_steps == 8


def test_steps_follow_from_tokens_and_growing_batches(records):
    config = modern_config(records)
    planned = stages_of(config)
    assert [(s.name, s.steps, s.batch_size, s.first_step, s.sequences_before, s.grows) for s in planned] == [
        ("begin", 2, 4, 0, 0, True), ("begin", 2, 8, 2, 8, True), ("begin", 2, 12, 4, 24, False),
        ("context", 3, 8, 6, 0, False), ("decay", 2, 4, 9, 24, False),
    ]  # fmt: skip
    assert total_steps(config) == 11
    thetas = [config_after(config, step).model.global_rope_theta for step in (0, 6, 7, 9, 10, 11, 12)]
    assert thetas == [160_000.0, 160_000.0, 1e6, 1e6, 160_000.0, 160_000.0, 160_000.0]
    # The largest stage has the most tokens in a microbatch.
    stages = dict(a=stage(2, 32, 10, batch_size=16), b=stage(2, 64, 20, batch_size=4, microbatches=1))
    assert task_of(modern_config(records, stages), records).largest_stage_index() == 0
    assert task_of(config, records).largest_stage_index() == 3
    assert [steps_for(planned, tokens) for tokens in (1, 128, 129, 256, 257, 512, 10**9)] == [1, 1, 2, 2, 3, 3, 11]


@pytest.mark.parametrize("size, peak, weight_decay, warmup, ramp, share", [
    ("17m", 3e-3, 3e-4, 4e9, 125e9, 1),
    ("150m", 8e-4, 1e-5, 3e9, 50e9, 1),
    ("1b", 5e-4, 5e-5, 2e9, 3e9, 1 / 3),
])  # fmt: skip
def test_ettins_phases_equal_the_published_configs(size, peak, weight_decay, warmup, ramp, share):
    config = experiments.load(f"modern:{size}")
    stages = stages_of(config)
    tokens = {name: sum(s.steps * s.tokens_per_step for s in stages if s.name == name) for name in config.stages}
    assert tokens == pytest.approx(dict(pretraining=1.7e12, context=250e9 * share, decay=50e9 * share), rel=1e-3)
    growing = [s for s in stages if s.grows]
    assert sum(s.steps * s.tokens_per_step for s in growing) == pytest.approx(ramp, rel=5e-3)
    assert len({s.steps for s in growing}) == 1 and growing[0].batch_size < growing[-1].batch_size < 4608
    rate, warm = schedule_of(config, total_steps(config)), steps_for(stages, warmup)
    first, second, last = (next(s for s in stages if s.name == name) for name in ("pretraining", "context", "decay"))
    for step, part in (
        (steps_for(stages, warmup / 2), 0.5), (warm + 1, 1), (second.first_step, 1), (last.first_step - 1, 0.5),
        (second.first_step + second.steps // 4, 0.75), (last.first_step, 0.5), (last.first_step + last.steps, 0.02),
    ):  # fmt: skip
        assert float(rate(step)) == pytest.approx(part * peak, rel=0.01)
    assert (first.length, second.length, last.length) == (1024, 7999, 7999)
    models = [config_in(config, phase).model for phase in (first, second, last)]
    assert [model.global_rope_theta for model in models] == [10_000, 160_000, 160_000]
    assert [model.local_rope_theta for model in models] == [10_000, 10_000, 160_000]
    assert [config_in(config, phase).data.masked_lm_prob for phase in (first, second, last)] == [0.3, 0.3, 0.15]
    assert config.optimizer.weight_decay == weight_decay


def test_a_schedule_counts_tokens(records):
    """The warm-up of 400 tokens has steps of 128 tokens, then of 256 tokens."""
    config = modern_config(records)
    rate = schedule_of(config, 11)
    warm, falls = np.array([0, 128, 256, 400, 400, 400]) / 400, 1 - 0.5 * (np.arange(3) / 3) ** 0.5
    expected = 1e-3 * np.array([*warm, *falls, 0.5, 0.5 * 0.55])
    np.testing.assert_allclose([float(rate(step)) for step in range(11)], expected, rtol=1e-5)


@pytest.mark.slow
def test_batches_and_steps_have_the_settings_of_their_stage(records):
    """Sizes and masks of batches are equal for any start step; the positions have the rotary angles of the stage."""
    config = modern_config(records)
    task = task_of(config, records)
    batches = list(task.batches(0))
    assert [batch["input_ids"].shape for batch in batches] == [
        *[(4, 32)] * 2, *[(8, 32)] * 2, *[(12, 32)] * 2, *[(8, 64)] * 3, *[(4, 64)] * 2,
    ]  # fmt: skip
    shares = [batch["word_weights"].sum() / (batch["segments"] > 0).sum() for batch in batches]
    np.testing.assert_allclose(shares[:9], 0.3, atol=0.04)
    np.testing.assert_allclose(shares[9:], 0.1, atol=0.03)
    for step in (5, 9):
        again = next(task.batches(step))
        assert all((again[name] == batches[step][name]).all() for name in again)
    # A step has the rotary angles of its stage.
    other = config.copy_and_resolve_references().unlock()
    other.model.global_rope_theta = 1e6
    plain = task_of(other.lock(), records)
    program = Program(task, config, task.mesh)
    params, batch = program.init(jax.random.key(0)).params, batches[7]
    # With initial params, heads attend to all positions alike.
    params = jax.tree.map(lambda x: x + 0.3 * jax.random.normal(jax.random.key(x.size), x.shape), params)
    (first, _), (second, second_config) = task.loss_and_config(5), task.loss_and_config(7)
    assert first == task.loss and second_config.model.global_rope_theta == 1e6
    losses = [
        float(jax.jit(lambda *arrays, loss=loss: loss(*arrays))(params, loss.normalize(batch))[0])
        for loss in (first, second, plain.loss)
    ]
    assert losses[1] == losses[2] != losses[0]
    assert program.step_of(*task.loss_and_config(0)) is program.step_of(*task.loss_and_config(10)) is program.train_step
    second_step = program.step_of(*task.loss_and_config(6))
    assert second_step is program.step_of(*task.loss_and_config(8)) is not program.train_step


def test_no_record_is_read_twice_while_the_batch_grows(monkeypatch):
    """Records are shuffled in windows of 4 records per lane; both batch sizes have the same number of lanes."""
    monkeypatch.setattr("bertjax.data.loading.order.SHUFFLE_WINDOW", 4)
    files = RecordSet(("a", "b", "c"), (20, 40, 12))
    read, before = [], 0
    for batch_size, steps in [(4, 8), (12, 1)]:
        order = Order(files, batch_size, 0, RowSize(32, 1, 5), before)
        for lane in range(order.lanes):
            spans = itertools.islice(order.spans(lane, 0), 8)
            taken = [(path, number) for path, first, count in spans for number in range(first, first + count)]
            read += taken[: steps * batch_size // order.lanes]
        before += batch_size * steps
    assert len(read) == len(set(read)) == 44


def averaged(records):
    """A run of all stages that averages its params and saves every step."""
    config = modern_config(records, SHORT).unlock()
    config.optimizer.average = 0.8
    config.log_every_steps = config.checkpoint.every_steps = 1
    config.checkpoint.keep, config.eval.every_steps = 20, 100
    return config.lock()


@pytest.fixture(scope="module")
def straight(records, tmp_path_factory, on_one_device):  # noqa: F811
    folder = tmp_path_factory.mktemp("straight")
    launch(averaged(records), folder)
    return folder


@pytest.mark.slow
def test_resume_at_stage_boundaries_gives_identical_params(records, straight, tmp_path):
    for step in (2, 6):  # the batch grows; another stage begins
        launch_and_stop(Pretraining, averaged(records), tmp_path / "stopped", step + 1)
        assert checkpoint.steps(tmp_path / "stopped")[-1] == step
    launch(averaged(records), tmp_path / "stopped")
    assert_equal_ends(straight, tmp_path / "stopped", 8)
    lines = [line for line in read_metrics(straight) if "train/learning_rate" in line]
    rate = schedule_of(averaged(records), 8)
    assert [line["train/learning_rate"] for line in lines] == [float(rate(step)) for step in range(8)]


@pytest.mark.slow
def test_a_checkpoint_is_read_with_averaged_params_and_rotary_angles_of_its_stage(records, straight, tmp_path):
    params = [leaves(checkpoint._read_item(straight, step, "params", None)) for step in range(1, 6)]
    average = leaves(checkpoint.read_params(straight, 1))
    for step, new_params in enumerate(params[1:], 1):
        decay = min(0.8, (1 + step) / (10 + step))
        average = [decay * old + (1 - decay) * new for old, new in zip(average, new_params)]
    for saved, expected in zip(leaves(checkpoint.read_params(straight, 5)), average):
        np.testing.assert_allclose(saved, expected, rtol=1e-4, atol=1e-6)
    assert any(abs(a - b).max() > 1e-5 for a, b in zip(average, params[-1]))
    source = pretrained.read_pretrained(straight)
    assert all((a == b).all() for a, b in zip(leaves(source.params), leaves(checkpoint.read_params(straight, 8))))
    scores = task_of(averaged(records), records).evaluator.run(jax.device_put(source.params), 8).scores
    assert scores["mlm_loss"] == pytest.approx(checkpoint.read_scores(straight, 8).scores["mlm_loss"], rel=1e-5)
    # A checkpoint is read with the rotary angles of its stage. The converted folder has no steps.
    angles = [pretrained.read_pretrained(f"{straight}@{step}").config.global_rope_theta for step in (6, 8)]
    assert angles == [1e6, 160_000.0]
    conversion.convert(f"{straight}@6", tmp_path / "converted", "bertjax")
    assert pretrained.read_pretrained(tmp_path / "converted").config.global_rope_theta == 1e6


def constant(records, steps, **fields):
    """A run of `steps` steps at a constant rate that saves every fourth step."""
    config = modern_config(records or "set below", dict(only=stage(steps, 32, 10)), **fields).unlock()
    config.eval.every_steps, config.checkpoint.every_steps, config.checkpoint.keep = 100, 4, 5
    return config


def falling(records, steps, parent=None):
    """The same schedule until step 8; then the rate falls."""
    config = constant(records, steps)
    config.optimizer.update(schedule="trapezoid", decay_proportion=(steps - 8) / steps, decay="sqrt")
    if parent is not None:
        config.branch_from, config.data.records = f"{parent}@8", ""
        validate(config)  # a branch needs no corpus
    return config.lock()


@pytest.fixture(scope="module")
def parent(records, tmp_path_factory, on_one_device):  # noqa: F811
    folder = tmp_path_factory.mktemp("parent")
    launch(constant(records, 12).lock(), folder)
    return folder


@pytest.mark.slow
def test_a_branch_gives_the_params_of_an_uninterrupted_run(records, parent, tmp_path, capsys):
    """The branch is interrupted and resumed."""
    launch(falling(records, 14), tmp_path / "straight")
    line = f"branching off from {parent}, step 8"
    capsys.readouterr()
    launch_and_stop(Pretraining, falling(records, 14, parent), tmp_path / "branch", 13)
    assert line in capsys.readouterr().out
    launch(falling(records, 14, parent), tmp_path / "branch")
    assert line not in capsys.readouterr().out
    assert_equal_ends(tmp_path / "branch", tmp_path / "straight", 14)
    assert not (tmp_path / "branch" / "records").exists()  # the branch reads the records of the parent
    assert require_info(tmp_path / "branch").config.branch_from == f"{parent}@8"
    assert checkpoint.steps(parent) == [4, 8, 12]
    with pytest.raises(UserError, match=r"config.branch_from = '': .* holds a run with '.*@8'"):
        launch(falling(records, 14), tmp_path / "branch")
    config = constant(records, 12)
    config.optimizer.average = 0.9
    with pytest.raises(UserError, match=r"config.optimizer.average = 0.9: .* holds a run with 0.0"):
        launch(config.lock(), parent)


@pytest.mark.slow
@pytest.mark.parametrize("branch_from, fields, message", [
    ("{parent}@7", {}, r"branch_from = .*@7: the run has no checkpoint of this step; choose one of the steps 4, 8, 12"),
    ("{parent}", {}, r"must be WORKDIR@STEP or WORKDIR@latest"),
    ("{parent}/nowhere@8", {}, "no finished checkpoint in"),
    ("{parent}@12", {}, r"must be before step 10, .* add steps"),
    ("{parent}@8", {"model.hidden_size": 64}, r"branch_from = .*@8': model.hidden_size = 64 must be 16, as"),
    ("{parent}@8", {"optimizer.name": "lamb"}, r"branch_from = .*@8': optimizer.name = 'lamb' must be 'adam'"),
])  # fmt: skip
def test_invalid_branches_are_refused(records, parent, tmp_path, branch_from, fields, message):
    config = falling(records, 10).unlock()
    config.branch_from = branch_from.format(parent=parent)
    config.update_from_flattened_dict(fields)
    with pytest.raises(UserError, match=message) as error:
        launch(config.lock(), tmp_path / "branch")
    assert "\n" not in str(error.value) and not checkpoint.steps(tmp_path / "branch")


@pytest.mark.slow
def test_z_loss_is_added_in_training_only(records):
    losses, gradients, task = [], [], task_of(constant(records, 4).lock(), records)
    params = jax.jit(lambda key: nn.unbox(task.init_params(key)))(jax.random.key(0))
    batch = task.loss.normalize(next(task.batches(0)))
    keys = row_keys(jax.random.key(0), jax.numpy.arange(len(batch["input_ids"])))
    for z_loss in (0.0, 0.5):
        task = task_of(constant(records, 4, z_loss=z_loss).lock(), records)
        (loss, _), gradient = jax.jit(jax.value_and_grad(task.loss, has_aux=True))(params, batch, keys)
        losses += [float(loss), float(jax.jit(task.loss)(params, batch)[0])]
        gradients.append(np.asarray(gradient["masked_lm"]["bias"]))
    # At the start all tokens have nearly equal probabilities.
    assert losses[2] - losses[0] == pytest.approx(0.5 * np.log(150) ** 2, rel=0.05) and losses[3] == losses[1]
    # d log(Z)^2 / d bias = 2 log(Z) softmax, which is nearly equal for all tokens.
    difference = (gradients[1] - gradients[0])[:150]
    np.testing.assert_allclose(difference, 2 * 0.5 * np.log(150) / 150, rtol=0.5)


@pytest.mark.parametrize("changed, message", [
    (stage(0, 32, 10), r"stages.only.steps = 0: must be at least 1, or tokens must be above 0"),
    (stage(4, 32, 10, tokens=1e3), r"stages.only.tokens = 1000.0: must be 0 with steps = 4"),
    (stage(4, 32, 10, model=dict(global_rope_theta=0.0)), r"model.global_rope_theta = 0.0: must be above 0"),
    (stage(4, 32, 10, model=dict(hidden_size=64)), r"only.model.hidden_size = 64: must be removed"),
    (stage(4, 32, 10, data=dict(masked_lm_prob=0.7)), r"only.data.masked_lm_prob = 0.7: must be above 0 and at"),
    (stage(4, 32, 10, data=dict(masked_lm_prob=0.4)), r"must be at least 12 for data.masked_lm_prob = 0.4"),
    (stage(4, 32, 10, data=dict(masked_lm_split=(0.5, 0.1, 0.1))), r"only.data.masked_lm_split = .*three shares"),
    (stage(4, 32, 10, batch_size=3, microbatches=2), r"only.batch_size = 3: must be a multiple of microbatches"),
    (stage(4, 32, 10, ramp_from=2), r"only.ramp_from = 2: must be the first batch size, together with ramp_tokens"),
    (stage(4, 32, 10, ramp_from=8, ramp_tokens=1e3), r"only.ramp_from = 8: must be below batch_size = 8"),
    (stage(4, 32, 10, ramp_from=4, ramp_tokens=1.0), r"only.ramp_tokens = 1.0: must give each batch size"),
    (stage(4, 32, 10, ramp_from=4, ramp_tokens=1e5), r"only.ramp_tokens = 100000.0: must be reached before"),
    (stage(0, 32, 10, tokens=50), r"only.tokens = 50.0: must give at least one step of 8 sequences of 32"),
    (stage(4, 32, 10, batch_size=1000, ramp_from=1, ramp_tokens=1e9), r"at most 64 batch sizes, not 1000"),
    (stage(4, 32, 10, optimizer=dict(learning_rate="x")), r"learning_rate = 'x': must be a value such as 0.001"),
    (stage(0, 32, 10, tokens=None), r"only.tokens = None: must be a whole number"),
    (stage(4, 32, 10, optimizer=dict(name="lamb")), r"only.optimizer.name = 'lamb': must be removed"),
])  # fmt: skip
def test_mistakes_in_a_stage_are_named(changed, message):
    with pytest.raises(UserError, match=message) as error:
        modern_config("somewhere", dict(only=changed))
    assert "\n" not in str(error.value)


def test_a_batch_size_that_devices_do_not_divide_is_named(records):
    config = modern_config(records, dict(only=stage(4, 32, 10, batch_size=6)))
    with pytest.raises(UserError, match=r"config.stages.only: the batch size 6 must be a multiple of 8"):
        pretraining_task(config, make_mesh(config), records)


def test_static_masks_cannot_change_between_stages():
    config = tiny_config("x").unlock()
    config.stages = named_stages(only=stage(4, 32, 10, data=dict(masked_lm_prob=0.1)))
    with pytest.raises(UserError, match=r"records store the static masks; set data.masking=dynamic"):
        validate(config)


def test_flags_change_a_stage():
    changes = "decay.batch_size=512 decay.model.local_rope_theta=5e4 decay.optimizer.decay_to=.1 "
    changes += "pretraining.tokens=1e12 context.data.masked_lm_split=(.5,.25,.25)"
    flags = [f"--config.stages.{change}" for change in changes.split()]
    config, _ = from_arguments(["--config=modern:17m", "--config.data.corpus=x", *flags])
    validate(config)
    last = stages_of(config)[-1]
    assert (last.batch_size, last.changes["model.local_rope_theta"]) == (512, 5e4)
    assert config_in(config, last).optimizer.decay_to == 0.1
    for wrong in ("stages.decay.seed", "stages.decay.model.hidden_size", "stages.nowhere.steps"):
        with pytest.raises(UserError, match="has no field"):
            from_arguments(["--config=modern:17m", f"--config.{wrong}=1"])


# Sources that are mixed at reading time.


@pytest.fixture(scope="module")
def two_sources(tmp_path_factory):
    """Records of two sources without common words. The first source is twice as long as the second."""
    folder = tmp_path_factory.mktemp("sources")
    for name, words, size in (("sea", "ship sail wave", 80), ("land", "tree hill road", 40)):
        rng = np.random.default_rng(len(name))
        lines = [" ".join(rng.choice(words.split(), 9)) + "." for _ in range(8 * size)]
        documents = ["\n".join(lines[i : i + 8]) for i in range(0, len(lines), 8)]
        (folder / f"{name}.txt").write_text("\n\n".join(documents))
    config = two_stages(folder)
    pieces = [*tokenizer.SPECIAL_TOKENS, *"ship sail wave tree hill road .".split()]
    (folder / "vocab.txt").write_text("\n".join(pieces))
    with preparing_in_process():
        manifest = prepare(config, folder / "records")
    return folder, manifest


def two_stages(folder, records="", **changes):
    begin, end = dict(mixture=f"{folder}/land.txt=2"), dict(mixture=f"{folder}/sea.txt=0")
    config = modern_config(records or "set below", dict(begin=stage(12, 32, 10))).unlock()
    config.stages = named_stages(begin=stage(12, 32, 10, data=begin), end=stage(8, 64, 20, data=end))
    corpus = f"{folder}/sea.txt,{folder}/land.txt"
    config.data.update(corpus=corpus, records=str(records), mix_when="read", **changes)
    config.tokenizer.path, config.model.vocab_size, config.batch_size = f"{folder}/vocab.txt", 12, 16
    return config.lock()


def test_a_mixture_changes_between_stages(two_sources):
    folder, manifest = two_sources
    config = two_stages(folder, folder / "records")
    validate(config)
    task = task_of(config, folder / "records")
    sea, land = set(range(5, 8)), set(range(8, 11))
    shares = []
    for batch in task.batches(0):
        words = [set(row) & (sea | land) for row in np.where(batch["segments"] > 0, batch["input_ids"], 0).tolist()]
        is_land = [len(row & land) > len(row & sea) for row in words]
        shares.append(np.mean(is_land))
    assert np.mean(shares[:12]) == pytest.approx(0.5, abs=0.06)  # 40 documents twice, 80 documents once
    assert set(shares[12:]) == {1.0}
    assert [task.data[i].records.shares[f"{folder}/sea.txt"] > 0 for i in (0, 1)] == [True, False]
    train = manifest["sets"]["32"]["train"]
    assert {entry["source"] for entry in train.values()} == {f"{folder}/sea.txt", f"{folder}/land.txt"}


def test_copies_of_files_approximate_mixture_weights():
    files = RecordSet(("a", "b", "c"), (4, 4, 4), sources=("x", "x", "y"), lengths=np.arange(12))
    for weights in ({"x": 1, "y": 2}, {"x": 1, "y": 0.37}, {"x": 2.6, "y": 1}, {"x": 0, "y": 1}):
        mixed = mix_sources(files, weights)
        counts = {name: sum(n for n, source in zip(mixed.counts, mixed.sources) if source == name) for name in "xy"}
        assert counts["y"] * weights["x"] == pytest.approx(counts["x"] * weights["y"] / 2, rel=0.02), counts
        begins = np.cumsum([0, *mixed.counts])
        for path, first, last in zip(mixed.paths, begins, begins[1:]):
            assert mixed.lengths[first:last].tolist() == list(range(4 * "abc".index(path), 4 * "abc".index(path) + 4))
    spread = mix_sources(files, {"x": 1, "y": 2}).sources
    assert spread in (("x", "y", "x", "y"), ("y", "x", "y", "x"))


def test_invalid_mixtures_are_named(two_sources):
    folder, _ = two_sources

    def mistaken(message, records="", **fields):
        config = two_stages(folder, records).unlock()
        config.update_from_flattened_dict(fields)
        with pytest.raises(UserError, match=message):
            launch(config, folder / "run") if records else validate(config)

    message = r"data.mixture = .*: 'sky.txt' is not a source of the text; choose from .*sea.txt"
    mistaken(message, **{"stages.end.data.mixture": "sky.txt=2"})
    prepared = {"data.mix_when": "prepared"}
    mistaken(r"stages.begin.data.mixture = .*; set data.mix_when=read", **prepared)
    message = r"data.mix_when = 'prepared': the records in .* were prepared with 'read'"
    mistaken(message, folder / "records", **prepared, stages=named_stages(begin=stage(12, 32, 10)))
