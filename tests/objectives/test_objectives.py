"""Objectives: the arrays that they add to a batch, their weighted sum, and a user-defined objective."""

import copy
import itertools

import flax.linen as nn
import jax
import numpy as np
import pytest

from bertjax.common.errors import UserError
from bertjax.config.defaults import named_stages, stage
from bertjax.config.stages import stages_of
from bertjax.data.batch import BatchSpec, per_row, per_sequence
from bertjax.data.loading.transforms import apply_transforms
from bertjax.launch.validate import validate
from bertjax.models import families
from bertjax.objectives.parsing import learn, parse_objective
from bertjax.objectives.parts import words
from bertjax.objectives.parts.transforms import transforms_of
from bertjax.objectives.registry import OBJECTIVES, register
from bertjax.text import tokenizer
from tests.conftest import one_device_mesh, pretraining_task, tiny_config
from tests.models.test_families import params_and_loss_after_a_step
from tests.objectives import own_objective

pytestmark = pytest.mark.usefixtures("on_one_device")


@pytest.fixture(scope="module", autouse=True)
def registered():
    for name in ("count", "twin"):
        register(name, own_objective.OBJECTIVE)
    yield
    for name in ("count", "twin"):
        del OBJECTIVES.registered[name]


def test_the_objective_is_configured_or_follows_from_model_and_data():
    def learnt(**fields):
        config = tiny_config()
        config.update_from_flattened_dict(fields)
        return {term.name: term.weight for term in parse_objective(config)}

    assert learnt() == {"mlm": 1, "nsp": 1}
    assert learnt(**{"data.next_sentence": "order"}) == {"mlm": 1, "sop": 1}
    assert learnt(**{"data.next_sentence": "none"}) == {"mlm": 1}
    assert learnt(**{"data.next_sentence": "none", "model.causal": True}) == {"lm": 1}
    assert learnt(**{"data.next_sentence": "none", "model.family": "lstms"}) == {"bilm": 1}
    assert learnt(objective="mlm") == {"mlm": 1}  # no objective for the pairs of the records
    assert learnt(objective=".5*count+mlm + 3 * nsp ") == {"count": 0.5, "mlm": 1, "nsp": 3}


@pytest.mark.parametrize("objective, message", [
    ("mln", "config.objective = 'mln': choose one of auxiliary, bilm, generator, lm, mlm, .*, sop, count, twin"),
    ("mlm nsp", "config.objective = 'mlm nsp': must be an objective, or a sum such as"),
    ("mlm + ", r"config.objective = 'mlm \+ ': must be an objective"),
    ("mlm + 0*nsp", "with weights above 0"),
    ("mlm + 1e3*nsp", r"config.objective = .*must be an objective"),
    ("mlm + mlm", r"config.objective = 'mlm \+ mlm': contains mlm twice"),
    ("lm", "config.objective = 'lm': the objective needs a causal language model, and config.model is a masked"),
    ("bilm", "config.objective = 'bilm': the objective needs a bidirectional language model, and config"),
    ("mlm + lm", r"config.objective = 'mlm \+ lm': mlm and lm both predict tokens; remove one"),
    ("mlm + count + twin", r"config.objective = .*: twin adds an array 'chosen_id', and batches already"),
    ("mlm + sop", r"config.data.next_sentence = 'pairs': objective = .* needs order; set order"),
    ("nsp", r"config.eval.fill_masks = .*: models trained on nsp cannot fill masks; set \(\)"),
])  # fmt: skip
def test_unsupported_objectives_are_refused(objective, message):
    config = tiny_config("corpus")
    config.objective, config.eval.fill_masks = objective, ("a [MASK]",)
    with pytest.raises(UserError, match=message):
        validate(config)


def config_for(records="unused", objective="count + mlm", **fields):
    config = tiny_config(records=records)
    config.model.update(hidden_size=16, intermediate_size=32)
    config.objective, config.stages = objective, named_stages(only=stage(10, 32, 5))
    config.eval.fill_masks = ()
    config.update_from_flattened_dict(fields)
    validate(config)
    return config


def task_for(records, *arguments, **fields):
    config = config_for(records, *arguments, **fields)
    pieces = tokenizer.load_tokenizer("wordpiece", records / "vocab.txt")
    return pretraining_task(config, one_device_mesh(config), records, tokenizer=pieces)


def params_of(task, deviation=0.1):
    """Returns random params without 0."""
    rng = np.random.default_rng(0)

    def value(path, x):
        return (rng.normal(0, deviation, x.shape) + (path[-1].key == "scale")).astype(x.dtype)

    shapes = nn.meta.unbox(jax.eval_shape(task.init_params, jax.random.key(0)))
    return jax.tree_util.tree_map_with_path(value, shapes)


@pytest.mark.slow
@pytest.mark.parametrize("part", [1, 3, 64])
def test_chunked_logits_give_equal_loss_and_gradient(records_folder, monkeypatch, part):
    task = task_for(records_folder, "mlm")
    batch, params = next(task.batches(0)), params_of(task)

    def traced():
        gradient = jax.value_and_grad(lambda params: task.loss(params, task.loss.normalize(batch)), has_aux=True)
        return jax.jit(gradient).trace(params)

    expected = traced()
    monkeypatch.setattr(words, "MAX_LOGIT_BYTES", 0)
    monkeypatch.setattr(words, "CHUNK_BYTES", part * 16 * 4 * 256)  # 16 rows of 256 words
    in_parts = traced()
    assert "16,5,256" not in str(in_parts.jaxpr).replace(" ", "") or part >= 5
    actual, expected = (program.lower().compile()(params) for program in (in_parts, expected))
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-7), actual, expected)


@pytest.mark.slow
@pytest.mark.parametrize("family, objective, settings, fields", [
    ("bert", "50*replaced + generator", dict(generator=dict(width=0.5, embeddings="disentangled")),
     {"model.num_attention_heads": 4}),
    ("bert", "lm + auxiliary", {}, {"model.causal": True, "model.num_hidden_layers": 2, "data.next_sentence": "none",
                                    "data.masking": "dynamic"}),
    ("mpnet", "mplm", {}, {"data.masking": "dynamic"}),
    ("deberta_v2", "50*replaced + generator", dict(generator=dict(width=1.0, layers=0.5, embeddings="disentangled")),
     {"model.num_hidden_layers": 2}),
])  # fmt: skip
def test_a_step_on_eight_devices_with_microbatches_equals_one_device(
    family, objective, settings, fields, records_folder
):
    """With dropout, and with the random numbers of the objectives."""
    config = config_for(records_folder)
    if family != "bert":
        names = "vocab_size", "hidden_size", "num_attention_heads", "intermediate_size", "max_position_embeddings"
        config.model = families.model_fields(family, **{name: config.model[name] for name in names})
        config.model.num_hidden_layers = 1
    config.optimizer.update(name="sgd", schedule="constant", learning_rate=1.0, warmup_steps=0, weight_decay=0.0)
    config.update_from_flattened_dict(fields)
    learn(config, objective, **settings)
    several = copy.deepcopy(config)
    several.mesh.update(data=2, fsdp=2, tensor=2)
    several.microbatches = 2
    expected, loss = params_and_loss_after_a_step(config, 1, records_folder)
    params, sharded_loss = params_and_loss_after_a_step(several, 8, records_folder)
    np.testing.assert_allclose(sharded_loss, loss, rtol=2e-4)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, atol=2e-4), params, expected)


# A user-defined objective.


def assert_as_planned(task, batch):
    """Compares the shapes and types of a batch with the shapes and types for the planner."""
    planned = task.data[0].abstract_batch()
    assert {n: (x.shape, x.dtype) for n, x in batch.items()} == {n: (x.shape, x.dtype) for n, x in planned.items()}


@pytest.mark.parametrize("packing", [False, True])
def test_host_random_numbers_are_a_function_of_the_row(records_folder, packing):
    """A batch is equal after another start."""
    task = task_for(records_folder, packing=packing)
    batch, (_, _, expected) = next(task.batches(7)), itertools.islice(task.batches(5), 3)
    assert_as_planned(task, batch)
    assert all((batch[name] == expected[name]).all() for name in batch)
    first = batch["count"][:, 0] if packing else batch["count"]
    np.testing.assert_allclose(100 * first, (batch["segments"] == 1).sum(1), rtol=1e-6)
    assert ((batch["segments"] > 0) == batch["inside"]).all()


def test_masks_do_not_depend_on_other_objectives(records_folder):
    """Masks do not depend on the order of the sum; the objectives read the unmasked tokens of the records."""
    pieces, masked_ids = tokenizer.load_tokenizer("wordpiece", records_folder / "vocab.txt"), []
    for objective in ("mlm", "mlm + count", "count + mlm"):
        config = config_for(records_folder, objective, **{"data.masking": "dynamic"})
        batch = {"input_ids": np.arange(5, 69)[None].repeat(4, 0).astype(np.int32), "segments": np.ones((4, 64), int)}
        transforms = transforms_of(config, stages_of(config)[-1], pieces)
        masked_ids.append(apply_transforms(batch, transforms, np.arange(4), 256, [0, 0, 2]))
    assert (masked_ids[0]["input_ids"] == pieces.mask_id).any()
    for other in masked_ids[1:]:
        assert all((other[name] == masked_ids[0][name]).all() for name in masked_ids[0])
        assert all((other[name] == masked_ids[2][name]).all() for name in masked_ids[2])
        assert (other["chosen_id"] != pieces.mask_id).all()


@pytest.mark.parametrize("twin, message", [
    (own_objective.Count, "config.objective = 'twin': is registered as <class .*; register an instance of"),
    (type("PerRow", (own_objective.Count,), dict(batch_spec=lambda *_: BatchSpec(shade=per_row())))(),
     "twin adds 'shade' per row to batches; declare the array per sequence or per token"),
    (type("Undecorated", (own_objective.Count,), dict(__annotations__=dict(rate=float), rate=0.1))(),
     "objective 'twin': its class declares the setting 'rate', but is not a dataclass; decorate the class with"),
])  # fmt: skip
def test_mistakes_in_a_user_objective_are_named(monkeypatch, twin, message):
    monkeypatch.setitem(OBJECTIVES.registered, "twin", twin)
    config = tiny_config("corpus")
    config.objective = "mlm + twin"
    with pytest.raises(UserError, match=message):
        validate(config)


def test_undeclared_batch_arrays_are_refused(records_folder, monkeypatch):
    class Undeclared(own_objective.Count):
        def batch_spec(self, config, stage):
            return BatchSpec(count=per_sequence(np.float32))

    monkeypatch.setitem(OBJECTIVES.registered, "twin", Undeclared())
    task = task_for(records_folder, "twin + mlm")
    with pytest.raises(ValueError, match=r"objective twin: its transform adds .*chosen_id.* to batches; declare these"):
        next(task.batches(0))
