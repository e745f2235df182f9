"""Objectives: what ours add to a batch, how they are summed, and one from outside of the package."""

import dataclasses

import jax
import numpy as np
import pytest

from bertjax import objectives, tasks
from bertjax.config import UserError, pretraining_config
from bertjax.data.batches import additions as additions_module
from bertjax.interop import conversion, pretrained
from bertjax.objectives.parts import words
from bertjax.objectives.parts.additions import additions_of
from bertjax.planner.plan import plan
from bertjax.reporting import curves
from bertjax.reporting.history import read_history
from bertjax.sharding.topology import accelerator
from bertjax.stages import stages_of
from bertjax.tasks.launch import launch
from bertjax.tasks.pretraining import Pretraining
from bertjax.text import tokenizer
from bertjax.training import checkpoint
from bertjax.training.sinks.jsonl import read_metrics
from bertjax.training.step import make_program
from tests.conftest import launch_and_stop, one_device_mesh, tiny_config, without_compilation_cache
from tests.objectives import own_objective
from tests.tasks.test_finetuning import config_for as fine_tuning_config_for
from tests.tasks.test_finetuning import write_sst2
from tests.training.test_loop import leaves

pytestmark = pytest.mark.usefixtures("on_one_device")


@pytest.fixture(scope="module", autouse=True)
def registered():
    for name in ("count", "twin"):
        objectives.register(name, own_objective.OBJECTIVE)
    yield
    for name in ("count", "twin"):
        del objectives.OBJECTIVES.registered[name]


def added(name, ids, sizes):
    segments = (np.arange(ids.shape[1]) < sizes[:, None]).astype(np.int32)
    addition = objectives.OBJECTIVES.get(name).addition(pretraining_config(), None, None)
    return addition.add({"input_ids": ids, "segments": segments}, {})


def test_next_and_previous_words():
    ids = np.array([[2, 7, 8, 9, 3, 0], [2, 5, 3, 0, 0, 0], [0, 0, 0, 0, 0, 0]], np.int32)
    found = added("lm", ids, np.array([5, 3, 0]))
    assert found["word_positions"].tolist() == [[0, 1, 2, 0, 0], [0] * 5, [0] * 5]
    assert found["word_ids"].tolist() == [[7, 8, 9, 0, 0], [5, 0, 0, 0, 0], [0] * 5]
    assert found["word_weights"].tolist() == [[1, 1, 1, 0, 0], [1, 0, 0, 0, 0], [0] * 5]
    both = added("bilm", ids, np.array([5, 3, 0]))
    assert all((both[name][:, :5] == found[name]).all() for name in found)
    assert both["word_positions"][:, 5:].tolist() == [[2, 3, 4, 0, 0], [2, 0, 0, 0, 0], [0] * 5]
    assert both["word_ids"][:, 5:].tolist() == [[7, 8, 9, 0, 0], [5, 0, 0, 0, 0], [0] * 5]
    assert (both["word_weights"][:, 5:] == found["word_weights"]).all()


def added_to(batch, additions):
    return additions_module.added(batch, additions, np.arange(4), 256, [0, 0, 2])


def test_what_is_learnt_is_named_or_follows_from_the_model_and_the_data():
    def learnt(**fields):
        config = tiny_config()
        config.update_from_flattened_dict(fields)
        return {term.name: term.weight for term in objectives.of(config)}

    assert learnt() == {"mlm": 1, "nsp": 1}
    assert learnt(**{"data.next_sentence": "order"}) == {"mlm": 1, "sop": 1}
    assert learnt(**{"data.next_sentence": "none"}) == {"mlm": 1}
    assert learnt(**{"data.next_sentence": "none", "model.causal": True}) == {"lm": 1}
    assert learnt(**{"data.next_sentence": "none", "model.family": "lstms"}) == {"bilm": 1}
    assert learnt(objective="mlm") == {"mlm": 1}  # and nothing about the pairs of the records
    assert learnt(objective=".5*count+mlm + 3 * nsp ") == {"count": 0.5, "mlm": 1, "nsp": 3}


@pytest.mark.parametrize(
    "objective, message",
    [
        (
            "mln",
            "config.objective = 'mln': choose one of auxiliary, bilm, generator, lm, mlm, nsp, plm, replaced, sop, "
            "count, twin",
        ),
        ("mlm nsp", "config.objective = 'mlm nsp': write one objective, or a sum such as"),
        ("mlm + ", r"config.objective = 'mlm \+ ': write one objective"),
        ("mlm + 0*nsp", "with weights above 0"),
        ("mlm + 1e3*nsp", r"config.objective = .*write one objective"),
        ("mlm + mlm", r"config.objective = 'mlm \+ mlm': has mlm twice"),
        ("lm", "config.objective = 'lm': a model with these fields of config.model learns words as mlm, not as lm"),
        ("bilm", "config.objective = 'bilm': a model with these fields of config.model learns words as mlm"),
        ("mlm + lm", r"config.objective = 'mlm \+ lm': mlm and lm both predict words; leave one out"),
        ("mlm + count + twin", r"config.objective = .*: twin adds 'chosen_id' to batches, which have it"),
        ("mlm + sop", r"config.data.next_sentence = 'pairs': records need other pairs for objective = .*: set order"),
        ("nsp", r"config.eval.fill_masks = .*: nsp does not teach it; set \(\)"),
    ],
)
def test_what_cannot_be_learnt_is_said(objective, message):
    config = tiny_config("corpus")
    config.objective, config.eval.fill_masks = objective, ("a [MASK]",)
    with pytest.raises(UserError, match=message):
        tasks.validate(config)


@pytest.mark.slow
def test_a_sum_is_weighted_and_each_part_is_reported_as_it_is(records_folder):
    def loss_and_gradient(objective):
        config = tiny_config(records=records_folder)
        config.objective = objective
        task = Pretraining(config, one_device_mesh(config), records_folder)
        batch = next(task.batches(0))
        return task, jax.value_and_grad(lambda p: task.loss(p, task.normalize(batch)), has_aux=True)

    both, run = loss_and_gradient("0.25*mlm + 3*nsp")
    params = make_program(both, both.config, both.mesh).init(jax.random.key(0)).params
    (loss, metrics), gradient = jax.jit(run)(params)
    (words, expected), of_words = jax.jit(loss_and_gradient("mlm")[1])(params)
    (pairs, _), of_pairs = jax.jit(loss_and_gradient("nsp")[1])(params)
    assert metrics["mlm_loss"] == expected["mlm_loss"] == words and metrics["nsp_loss"] == pairs
    np.testing.assert_allclose(loss, 0.25 * words + 3 * pairs, rtol=1e-6)
    jax.tree.map(
        lambda found, a, b: np.testing.assert_allclose(found, 0.25 * a + 3 * b, rtol=1e-4, atol=1e-6),
        gradient, of_words, of_pairs,
    )  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize("part", [1, 3, 5, 64])
def test_logits_of_words_in_parts_give_the_same_loss_and_gradient(records_folder, monkeypatch, part):
    config = tiny_config(records=records_folder)
    task = Pretraining(config, one_device_mesh(config), records_folder)
    batch = next(task.batches(0))
    params = make_program(task, config, task.mesh).init(jax.random.key(0)).params

    def run():
        return jax.jit(jax.value_and_grad(lambda p: task.loss(p, task.normalize(batch)), has_aux=True))(params)

    expected = run()
    monkeypatch.setattr(words, "MOST_BYTES", 0)
    monkeypatch.setattr(words, "PART_BYTES", part * 16 * 4 * 256)  # 16 rows of 256 words
    program = str(jax.make_jaxpr(lambda p: task.loss(p, task.normalize(batch))[0])(params))
    assert "16,5,256" not in program.replace(" ", "") or part >= 5
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-7), run(), expected)


# One from outside.


def config_for(records, **fields):
    config = tiny_config(records=records)
    config.objective = "count + mlm"
    config.update(fields)
    tasks.validate(config)
    return config


@pytest.fixture(scope="module")
def trained(records_folder, tmp_path_factory):
    """The workdirs of a straight run, and of one that was stopped after step 7 and resumed."""
    folder = tmp_path_factory.mktemp("count")
    launch(config_for(records_folder), folder / "straight")
    launch_and_stop(Pretraining, config_for(records_folder), folder / "run", step=7)
    launch(config_for(records_folder), folder / "run")
    return folder / "straight", folder / "run"


@pytest.mark.slow
def test_it_is_trained_and_resumed_bit_for_bit(trained, records_folder):
    straight, resumed = (leaves(checkpoint.read_params(folder, 10)) for folder in trained)
    assert straight.keys() == resumed.keys() and any("counter" in name for name in straight)
    assert all(np.array_equal(straight[name], resumed[name]) for name in straight)
    lines = read_metrics(trained[0])
    losses = [line["train/count_loss"] for line in lines if "train/count_loss" in line]
    assert losses[-1] < losses[0] and all("train/mlm_accuracy" in line for line in lines if "train/loss" in line)
    with pytest.raises(UserError, match=r"config.objective = 'mlm'.*'count \+ mlm'"):
        launch(config_for(records_folder, objective="mlm"), trained[0])


@pytest.mark.slow
def test_it_is_evaluated_with_its_baseline_and_reported(trained):
    last = [line for line in read_metrics(trained[0]) if "eval/count_loss" in line][-1]
    assert {"eval/count_loss", "eval/count_noise", "eval/count_mean_loss", "eval/mlm_loss"} <= last.keys()
    assert 0 < abs(last["eval/count_noise"]) < 0.5  # the mean of many random numbers: evaluation has keys, too
    assert "held-out counts: " in (trained[0] / "report.txt").read_text()
    figure = curves.draw([read_history(trained[0])])
    assert "loss of counts" in [axis.get_title() for axis in figure.axes]


@pytest.mark.slow
@pytest.mark.parametrize("packing", [False, True])
def test_its_random_numbers_are_those_of_the_row(records_folder, packing):
    """The host's by place, the step's by row: the same for another start, in evaluation, and for another batch size."""
    config = config_for(records_folder, packing=packing)
    pieces = tokenizer.load("wordpiece", records_folder / "vocab.txt")
    task = Pretraining(config, one_device_mesh(config), records_folder, tokenizer=pieces)
    batch, told = next(task.batches(7)), task.abstract_batch(1)
    assert {n: (x.shape, x.dtype) for n, x in batch.items()} == {n: (x.shape, x.dtype) for n, x in told.items()}
    for position, expected in enumerate(task.batches(5)):
        if position == 2:
            assert all((batch[name] == expected[name]).all() for name in batch)
            break
    first = batch["count"][:, 0] if packing else batch["count"]
    np.testing.assert_allclose(100 * first, (batch["segments"] == 1).sum(1), rtol=1e-6)
    assert ((batch["segments"] > 0) == batch["inside"]).all()

    params = make_program(task, task.config, task.mesh).init(jax.random.key(0)).params
    scores = task.evaluate(params, step=1).scores
    other = Pretraining(config, one_device_mesh(config), records_folder, tokenizer=pieces)
    other.eval_batch_size, other._statistics = 5, task._statistics
    again = other.evaluate(params, step=1).scores
    for name in ("count_noise", "count_loss"):
        np.testing.assert_allclose(scores[name], again[name], rtol=1e-4)


@pytest.mark.slow
def test_it_is_predicted_with_converted_and_fine_tuned(trained, tmp_path):
    source = pretrained.read_with_tokenizer(trained[1])
    assert source.predicts_words
    conversion.convert(trained[1], tmp_path / "ours", "bertjax")
    again = pretrained.read(tmp_path / "ours")
    assert "counter" in again.params and leaves(again.params).keys() == leaves(source.params).keys()
    write_sst2(tmp_path)
    config = fine_tuning_config_for(tmp_path, trained[1], epochs=4.0, sweep="learning_rate=1e-9,3e-3")
    tasks.validate(config)
    launch(config, tmp_path / "search")
    assert (tmp_path / "search/best").read_text() == "runs/learning_rate=0.003\n"


@pytest.mark.slow
@pytest.mark.tpu_aot
def test_it_is_planned_ahead():
    config = config_for("unused")
    config.model.update(hidden_size=128, vocab_size=256, max_position_embeddings=128)
    with without_compilation_cache():
        (result,) = plan(config, accelerator("v5litepod-4"), [0])
    assert result.fits and result.flops_per_step > 0


def test_masks_do_not_depend_on_what_else_is_added(records_folder):
    """Nor on the order of the sum; what is added is made of the tokens that the records have."""
    pieces, found = tokenizer.load("wordpiece", records_folder / "vocab.txt"), []
    for objective in ("mlm", "mlm + count", "count + mlm"):
        config = config_for(records_folder, objective=objective)
        config.data.masking = "dynamic"
        batch = {"input_ids": np.arange(5, 69)[None].repeat(4, 0).astype(np.int32), "segments": np.ones((4, 64), int)}
        additions = additions_of(config, stages_of(config)[-1], pieces)
        found.append(added_to(batch, additions))
    assert (found[0]["input_ids"] == pieces.mask_id).any()
    for other in found[1:]:
        assert all((other[name] == found[0][name]).all() for name in found[0])
        assert all((other[name] == found[2][name]).all() for name in found[2])
        assert (other["chosen_id"] != pieces.mask_id).all()


def test_what_is_added_must_be_declared(records_folder, monkeypatch):
    undeclared = dataclasses.replace(own_objective.OBJECTIVE, adds={"count": ("sequence", np.float32)})
    monkeypatch.setitem(objectives.OBJECTIVES.registered, "twin", undeclared)
    config = config_for(records_folder, objective="twin + mlm")
    task = Pretraining(config, one_device_mesh(config), records_folder)
    with pytest.raises(ValueError, match=r"objective twin: adds .*chosen_id.* to batches; its `adds` must say so"):
        next(task.batches(0))


@pytest.mark.slow
def test_an_objective_without_words_leaves_them_out_of_packed_rows(records_folder):
    """The records are masked, and so have some."""
    for packing in (False, True):
        config = tiny_config(records=records_folder)
        config.objective, config.packing, config.eval.fill_masks = "nsp", packing, ()
        tasks.validate(config)
        task = Pretraining(config, one_device_mesh(config), records_folder)
        batch, told = next(task.batches(0)), task.abstract_batch(0)
        assert {n: (x.shape, x.dtype) for n, x in batch.items()} == {n: (x.shape, x.dtype) for n, x in told.items()}
        assert ("word_ids" in batch) == (not packing)
        params = make_program(task, task.config, task.mesh).init(jax.random.key(0)).params
        assert set(params) == {"bert", "next_sentence"}
        assert set(task.evaluate(params, 1).scores) == {"nsp_loss", "nsp_accuracy", "nsp_majority"}


@pytest.mark.slow
def test_a_resumed_run_may_write_its_objective_otherwise(trained, records_folder):
    """`mlm+count` is no other, in another order it is: another checkpoint would be the best."""
    launch(config_for(records_folder, objective="1*count+mlm"), trained[0])
    with pytest.raises(UserError, match=r"config\.objective"):
        launch(config_for(records_folder, objective="mlm + count"), trained[0])
