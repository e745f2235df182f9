"""Replaced words: the words that are drawn and read, the gradients of both models, scores, and configs."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from bertjax import experiment, families, objectives, tasks
from bertjax.config import UserError, named_stages, pretraining_config, stage
from bertjax.families.electra import ElectraConfig
from bertjax.families.with_heads import BertForMaskedLM
from bertjax.objectives.parts import words
from bertjax.objectives.parts.model import EncodedBatch, drawn
from bertjax.tasks.pretraining import Pretraining
from bertjax.tasks.pretraining_rows import RowSize
from bertjax.training.sinks.jsonl import read_metrics
from tests.conftest import one_device_mesh, tiny_config
from tests.objectives.test_objectives import assert_as_planned, params_of

pytestmark = pytest.mark.usefixtures("on_one_device")
SIZES = dict(vocab_size=150, hidden_size=32, num_attention_heads=2, intermediate_size=64, max_position_embeddings=64)


def config_for(records="unused", family="bert", steps=4, depth=2, **settings):
    config = tiny_config(records=records)
    config.model = families.model_fields(family, **SIZES, num_hidden_layers=depth)
    config.model.update({name: 0.0 for name in config.model if "dropout" in name})
    objectives.learn(config, "50*replaced + generator", generator=dict(width=0.5) | settings)
    config.stages, config.eval.fill_masks = named_stages(only=stage(steps, 32, 5)), ()
    return config


def task_for(*given, **settings):
    config = config_for(*given, **settings)
    tasks.validate(config)
    return Pretraining(config, one_device_mesh(config), config.data.records)


def keys_of(rows, seed=0):
    return jax.vmap(functools.partial(jax.random.fold_in, jax.random.key(seed)))(jnp.arange(rows))


# What is drawn.


def test_words_are_drawn_from_the_softmax():
    logits = np.random.default_rng(0).normal(0, 1.5, (1, 2, 60)).astype(np.float32)
    logits[..., 50:] = np.finfo(np.float32).min  # rows that pad the vocabulary
    rows = 40_000
    found = np.asarray(jax.jit(drawn)(jnp.broadcast_to(logits, (rows, 2, 60)), keys_of(rows)))
    expected = np.asarray(jax.nn.softmax(logits))[0]
    for place in range(2):
        counts = np.bincount(found[:, place], minlength=60)
        assert not counts[50:].any()
        chi_square = ((counts[:50] - rows * expected[place][:50]) ** 2 / (rows * expected[place][:50])).sum()
        assert chi_square < 95  # 49 degrees of freedom: 1 in 10,000
    both = np.histogram2d(*found.T, bins=[range(61), range(61)])[0] / rows
    assert np.abs(both - np.outer(*expected)).max() < 0.005  # places are independent
    assert (found == np.asarray(jax.jit(drawn)(jnp.broadcast_to(logits, (rows, 2, 60)), keys_of(rows)))).all()
    parts = [drawn(jnp.broadcast_to(logits[:, i : i + 1], (9, 1, 60)), keys_of(9), 60 * i) for i in range(2)]
    assert (np.concatenate(parts, 1) == found[:9]).all()


@pytest.fixture(scope="module")
def task(records_folder):
    return task_for(records_folder, depth=1, embeddings="disentangled")


@pytest.fixture(scope="module")
def params(task):
    return params_of(task, deviation=0.5)


def rewritten(task, params, batch, keys):
    """Returns the batch that the encoder reads, and the generator's loss."""
    objective = task.terms[1].objective

    def rewrite(model, batch, keys):
        given = EncodedBatch(batch, model.bert, {"generator": model.generator}, None, None)
        encoded, (loss, _) = objective.rewrite(given, batch["word_weights"], keys)
        return {name: encoded.batch[name] for name in ("input_ids", "original_ids")}, loss

    return task.model.apply({"params": params}, batch, keys, method=rewrite)


@pytest.mark.slow
def test_the_encoder_reads_words_that_the_generator_finds_likely(task, params, monkeypatch):
    batch = {name: x[:4] for name, x in next(task.batches(0)).items()}
    run = jax.jit(lambda keys: jax.lax.map(lambda key: rewritten(task, params, batch, key), keys)[0])
    many = jax.vmap(lambda seed: keys_of(4, seed))(jnp.arange(1500))
    found = jax.device_get(run(many))
    original = batch["input_ids"].copy()
    is_predicted = np.zeros(original.shape, bool)
    for row in range(4):
        used = batch["word_weights"][row] > 0
        original[row, batch["word_positions"][row, used]] = batch["word_ids"][row, used]
        is_predicted[row, batch["word_positions"][row, used]] = True
    assert is_predicted.any() and not is_predicted[:, 0].any()
    assert (found["original_ids"] == original).all()
    assert (found["input_ids"][:, ~is_predicted] == original[~is_predicted]).all()

    whole = task.terms[1].objective.finished(params)
    own = task.terms[1].objective.models(task.model.config)["generator"]
    inputs = (batch[name] for name in ("input_ids", "segments", "token_types", "word_positions"))
    logits = jax.jit(BertForMaskedLM(own).apply)({"params": whole["generator"]}, *inputs)
    for row, place in np.argwhere(batch["word_weights"] > 0)[::4]:
        probabilities = np.asarray(jax.nn.softmax(logits[row, place]))
        drawn_words = found["input_ids"][:, row, batch["word_positions"][row, place]]
        counts = np.bincount(drawn_words, minlength=len(probabilities))
        assert np.abs(counts / 1500 - probabilities).max() < 0.06
    words_of_rows = found["input_ids"][:, is_predicted]
    assert len(np.unique(words_of_rows, axis=0)) > 1000

    # Logits that are made in parts give the same words and loss.
    expected = jax.jit(lambda keys: rewritten(task, params, batch, keys))(keys_of(4))
    monkeypatch.setattr(words, "MOST_BYTES", 0)
    monkeypatch.setattr(words, "PART_BYTES", 2 * 4 * 4 * 256)
    again = jax.jit(lambda keys: rewritten(task, params, batch, keys))(keys_of(4))
    assert (again[0]["input_ids"] == expected[0]["input_ids"]).all()
    np.testing.assert_allclose(again[1], expected[1], rtol=1e-5)


# Who learns from what.


@pytest.mark.slow
@pytest.mark.parametrize("family, embeddings", [("bert", "shared"), ("modernbert", "disentangled")])
def test_only_shared_tables_connect_the_two_losses(records_folder, family, embeddings):
    task = task_for(records_folder, family, depth=1, embeddings=embeddings)
    batch, params = next(task.batches(0)), params_of(task)

    def losses(params):
        weights = task.normalize(batch)["weights"]
        found, _ = task.model.apply({"params": params}, batch, weights, None, keys_of(16))
        return jnp.stack([found["replaced"][0], found["generator"][0]])

    def has_gradient(tree):
        return [bool(np.any(x)) for x in jax.tree.leaves(tree)]

    both = jax.device_get(jax.jit(jax.jacrev(losses))(params))
    of_replaced, of_words = jax.tree.map(lambda x: x[0], both), jax.tree.map(lambda x: x[1], both)
    assert all(has_gradient([of_replaced["bert"]["encoder"], of_replaced["replaced_tokens"]]))
    assert not any(has_gradient([of_words["bert"]["encoder"], of_words["replaced_tokens"]]))
    generator = dict(of_replaced["generator"])
    of_difference = has_gradient(generator.pop("difference", {}))
    assert not any(has_gradient(generator)) and all(has_gradient(of_words["generator"]["masked_lm"]))
    assert bool(of_difference) == (embeddings == "disentangled") and all(of_difference)
    assert not any(has_gradient(of_words["generator"].get("difference", {})))
    assert any(has_gradient(of_replaced["bert"]["embeddings"])) == (embeddings == "shared")
    assert all(has_gradient(of_words["bert"]["embeddings"]))
    finished = task.terms[1].objective.finished(params)
    assert "difference" not in finished["generator"] and "word" in finished["generator"]["bert"]["embeddings"]


@pytest.mark.slow
def test_packed_rows_are_rewritten_where_words_are_predicted(records_folder):
    config = config_for(records_folder, depth=1)
    config.packing, config.stages = True, named_stages(only=stage(4, 64, 10))
    tasks.validate(config)
    task = Pretraining(config, one_device_mesh(config), records_folder)
    batch = next(task.batches(0))
    assert_as_planned(task, batch)
    assert batch["segments"].max() > 1
    params, batch = params_of(task), {name: x for name, x in batch.items() if name != "dropout_rows"}
    found, _ = jax.jit(lambda batch: rewritten(task, params, batch, keys_of(len(batch["input_ids"]))))(batch)
    changed = {(row, place) for row, place in np.argwhere(found["input_ids"] != batch["input_ids"])}
    used = np.argwhere(batch["word_weights"] > 0)
    assert changed and changed <= {(row, batch["word_positions"][row, place]) for row, place in used}
    weights = task.terms[0].objective.weights(batch)
    assert weights.sum() == (batch["segments"] > 0).sum()


@pytest.mark.slow
def test_scores_of_a_run_fit_together(pretrained):
    workdir = pretrained("electra")
    scores = [line for line in read_metrics(workdir) if "eval/replaced_loss" in line][-1]
    share, at_replaced, at_original, accuracy, majority = (
        scores[f"eval/replaced_{name}"]
        for name in ("share", "accuracy_at_replaced", "accuracy_at_original", "accuracy", "majority")
    )
    assert majority == pytest.approx(1 - share) and 0 < share < 0.5
    assert accuracy == pytest.approx(share * at_replaced + (1 - share) * at_original)
    report = (workdir / "report.txt").read_text()
    assert "held-out replaced words: loss" in report and "held-out masked words by the generator: loss" in report


# Configs.


def test_sizes_of_generators():
    def generator(family, embeddings="shared", width=0.5, layers=0.5, **fields):
        config = config_for("unused", family, embeddings=embeddings, width=width, layers=layers)
        config.model.update(fields)
        (term,) = (term for term in objectives.of(config) if term.name == "generator")
        return term.objective.models(families.config_of(config))["generator"]

    def sizes(config):
        heads = config.num_attention_heads, config.head_size
        return config.hidden_size, config.embedding_size, *heads, config.intermediate_size, config.num_hidden_layers

    assert sizes(generator("electra")) == (16, 128, 1, 16, 32, 1)
    assert sizes(generator("bert", causal=False)) == (16, 32, 1, 16, 32, 1)
    assert isinstance(generator("bert"), ElectraConfig) and sizes(generator("bert", "apart"))[:2] == (16, 16)
    assert sizes(generator("modernbert")) == (16, 32, 1, 16, 32, 1)
    assert (
        type(generator("modernbert", width=1))
        is type(generator("modernbert", "apart"))
        is families.FAMILIES.get("modernbert").config
    )
    assert sizes(generator("eurobert", "apart", num_key_value_heads=1))[:2] == (16, 16)
    thirds = generator("bert", width=1 / 3, layers=1.0, hidden_size=768, num_attention_heads=12, intermediate_size=3072)
    assert sizes(thirds) == (256, 768, 4, 64, 1024, 2)


def test_flops_are_those_of_both_models(records_folder):
    task, alone = task_for(records_folder), config_for(records_folder)
    alone.objective = "mlm"
    del alone.unlock()["objectives"]
    alone = Pretraining(alone, task.mesh, records_folder)
    own = task.terms[1].objective.models(task.model.config)["generator"]
    row = RowSize(32, 1, 5)
    layers, transform, table = families.of(own).layer_flops(own, 32), 16 * 32, 32 * 256
    head = 2 * 32 * (32 * 32 + 32)
    of_words = alone.terms[0].objective.flops(alone.model.config, row)
    expected = 3 * 16 * (layers + 2 * 5 * (transform + table) + head - of_words)
    assert task.flops(0, 1) - alone.flops(0, 1) == expected


def test_equal_settings_make_equal_terms():
    assert objectives.of(config_for()) == objectives.of(config_for()) != objectives.of(config_for(layers=0.5))
    base = experiment.from_arguments(["--config=base", "--config.objectives.generator.width=1/3",
                                      "--config.objective=50*replaced + generator"])[0]  # fmt: skip
    assert base.objectives.generator.to_dict() == dict(width=1 / 3, layers=1.0, embeddings="shared")
    assert "objectives" not in pretraining_config()


@pytest.mark.parametrize("fields, message", [
    (dict(width=1.5), "config.objectives.generator.width = 1.5: must be above 0 and at most 1"),
    (dict(width=0.3), "generator.width = 0.3: makes 0.6 of model.num_attention_heads = 2; choose one that gives"),
    (dict(width=0.1), "generator.width = 0.1: makes 0.2 of model.num_attention_heads = 2"),
    (dict(layers=0.2), "generator.layers = 0.2: makes 0.4 of model.num_hidden_layers = 2"),
    (dict(embeddings="none"), "generator.embeddings = 'none': choose one of shared, apart, disentangled"),
    ({"objective": "replaced"}, "config.objective = 'replaced': nothing replaces words: write '50.replaced"),
    ({"objective": "generator"}, "config.objective = 'generator': nothing would read the words of the generator"),
    ({"objective": "mlm"}, "config.objectives.generator: mlm is learnt, without it; leave it out"),
    ({"objective": "mlm + replaced + generator"}, "mlm and generator both predict words; leave one out"),
    ({"model.causal": True, "data.next_sentence": "none"}, "learns words as lm, not as mlm"),
    ({"eval.fill_masks": ("a [MASK]",)}, r"replaced \+ generator does not teach it; set \(\)"),
    ({"eval.bits_windows": 3, "init_checkpoint": "x", "data.corpus": "x"}, "eval.bits_windows = 3: a model that"),
    ({"eval.patience": 3}, r"eval.patience = 3: goes by the loss of replaced.*write 'generator \+ 50\*replaced'"),
    ({"stages.only.objective": "mlm", "embeddings": "disentangled"}, "mlm is learnt, without it"),
    ({"model.family": "roberta"}, "model.family = 'roberta' shares no embeddings with a narrower one; set apart"),
])  # fmt: skip
def test_what_cannot_be_learnt_is_said(fields, message):
    settings = {name: value for name, value in fields.items() if name in ("width", "layers", "embeddings")}
    config = config_for("records", fields.get("model.family", "bert"), **settings)
    with config.unlocked():
        for name, value in fields.items():
            if name not in settings and name != "model.family":
                config.update_from_flattened_dict({name: value}) if name in config else _set(config, name, value)
    with pytest.raises(UserError, match=message) as error:
        tasks.validate(config)
    assert "\n" not in str(error.value)


def _set(config, name, value):
    *sections, last = name.split(".")
    for section in sections:
        config = config[section]
    config[last] = value


def test_two_that_rewrite_are_refused(monkeypatch):
    twin = dataclasses.replace(objectives.OBJECTIVES.get("replaced"), rewrite=lambda *given: None)
    monkeypatch.setitem(objectives.OBJECTIVES.registered, "twin", twin)
    config = config_for()
    config.objective += " + twin"
    with pytest.raises(UserError, match="generator and twin both change what is read; leave one out"):
        tasks.validate(config)
