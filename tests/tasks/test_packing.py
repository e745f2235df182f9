"""Packed sequences beside the same ones padded: losses, gradients, and what they do not see of each other."""

import dataclasses
import itertools
import random

import flax.linen as nn
import jax
import numpy as np
import pytest
from jax.sharding import Mesh

from bertjax.config import BertConfig, UserError, named_stages, stage
from bertjax.data.batches.examples import Examples, packed_evaluation
from bertjax.data.preparation import prepare
from bertjax.families.with_heads import BertForPreTraining
from bertjax.sharding.mesh import make_mesh, put_batch
from bertjax.tasks import output_layers, pretraining_run
from bertjax.tasks.output_layers import Predictor, apply
from bertjax.tasks.pretraining import Pretraining
from bertjax.tasks.pretraining_rows import row_size
from bertjax.text import tokenizer
from bertjax.training import checkpoint
from bertjax.training.run import run
from bertjax.training.schedules import make_schedule
from bertjax.training.sinks.jsonl import read_metrics
from bertjax.training.step import make_program, put_hyperparameters
from experiments import features
from tests.conftest import TOPICS, one_device_mesh, preparing_in_process, tiny_config

BERT = BertConfig(
    vocab_size=50, hidden_size=32, num_hidden_layers=2, num_attention_heads=2, intermediate_size=64,
    max_position_embeddings=32, hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0,
)  # fmt: skip


def assert_close(one, other, tolerance=1e-5):
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=tolerance, atol=tolerance), one, other)


# Pre-training.


@pytest.fixture(scope="module")
def short_records(tmp_path_factory):
    """Of documents so short that few pairs are as long as they may be."""
    folder, rng = tmp_path_factory.mktemp("short"), random.Random(0)
    words = [word for topic in TOPICS.values() for word in topic]
    lines = (f"A {rng.choice(words)}." for _ in range(2000))
    documents = iter(lambda: list(itertools.islice(lines, rng.randint(2, 6))), [])
    (folder / "text.txt").write_text("\n\n".join(map("\n".join, documents)))
    with preparing_in_process():
        prepare(config_of("", False, folder / "text.txt"), folder / "records")
    return folder / "records"


@pytest.fixture(scope="module")
def dynamic_records(short_records, tmp_path_factory):
    """Of the same text, not masked, of full sentences."""
    folder = tmp_path_factory.mktemp("dynamic") / "records"
    config = config_of("", False, short_records.parent / "text.txt")
    config.data.update(masking="dynamic", next_sentence="none", short_seq_prob=0.9)
    with preparing_in_process():
        prepare(config, folder)
    return folder


def config_of(records, packing, corpus="", **mesh):
    config = tiny_config(corpus, records)
    config.packing = packing
    config.model.update(hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0)
    config.mesh.update(mesh)
    return config


@pytest.fixture(scope="module")
def padded(short_records):
    config = config_of(short_records, False)
    return Pretraining(config, one_device_mesh(config), short_records)


@pytest.fixture(scope="module")
def packed(short_records):
    config = config_of(short_records, True)
    return Pretraining(config, one_device_mesh(config), short_records)


@pytest.mark.slow
@pytest.mark.parametrize("step", [0, 6])
def test_next_words_of_packed_sequences_are_those_of_padded_ones(dynamic_records, step):
    """All of them, and of no sequence that follows in a row."""
    losses, gradients = [], []
    for packing in (False, True):
        config = config_of(dynamic_records, packing)
        config.model.causal, config.data.masking, config.data.next_sentence = True, "dynamic", "none"
        pieces = tokenizer.load("wordpiece", dynamic_records / "vocab.txt")
        task = Pretraining(config, one_device_mesh(config), dynamic_records, tokenizer=pieces)
        if not packing:
            params = make_program(task, task.config, task.mesh).init(jax.random.key(0)).params
        batch = next(task.batches(step))
        told = task.abstract_batch(step // 6)
        assert {n: (x.shape, x.dtype) for n, x in batch.items()} == {n: (x.shape, x.dtype) for n, x in told.items()}
        sequences = int(batch["sequence_weights"].sum())
        assert batch["word_weights"].sum() == (batch["segments"] > 0).sum() - 2 * sequences  # [CLS], last [SEP]
        (loss, metrics), gradient = loss_and_gradient(task)(params, batch)
        assert metrics.keys() == {"lm_loss", "lm_accuracy", "tokens", "padding"}
        losses.append(loss), gradients.append(gradient)
    assert_close(*losses)
    assert_close(*gradients)


@pytest.fixture(scope="module")
def params(padded):
    return make_program(padded, padded.config, padded.mesh).init(jax.random.key(0)).params


def loss_and_gradient(task):
    return jax.jit(jax.value_and_grad(lambda p, b: task.loss(p, task.normalize(b)), has_aux=True))


@pytest.mark.slow
@pytest.mark.parametrize("step", [0, 3, 6, 9])  # of both stages
def test_loss_and_gradient_of_pretraining_are_those_of_padded_sequences(padded, packed, params, step):
    batch, other = next(padded.batches(step)), next(packed.batches(step))
    (loss, metrics), gradient = loss_and_gradient(padded)(params, batch)
    (packed_loss, packed_metrics), packed_gradient = loss_and_gradient(packed)(params, other)
    assert len(other["input_ids"]) < 16 == len(batch["input_ids"])
    assert packed_metrics.pop("padding") < metrics.pop("padding") / 2
    assert_close(packed_loss, loss)
    assert_close(packed_metrics, metrics)
    assert_close(packed_gradient, gradient)


def test_the_planner_is_told_the_shapes_of_packed_batches(packed):
    for number, start in ((0, 0), (1, 6)):
        real, told = next(packed.batches(start)), packed.abstract_batch(number)
        assert {n: (x.shape, x.dtype) for n, x in real.items()} == {n: (x.shape, x.dtype) for n, x in told.items()}


@pytest.mark.slow
@pytest.mark.parametrize(
    "mesh, microbatches", [(dict(data=8), 1), (dict(data=2, fsdp=2, tensor=2), 1), (dict(data=1, fsdp=2, tensor=1), 3)]
)
def test_a_packed_step_on_a_mesh_is_that_of_padded_sequences_on_one_device(padded, short_records, mesh, microbatches):
    def after_a_step(task):
        program = make_program(task, task.config, task.mesh)
        hyperparameters = put_hyperparameters(0, make_schedule(task.config.optimizer, 10), task.mesh)
        state = program.init(jax.random.key(0))
        state, metrics = program.train_step(state, put_batch(next(task.batches(0)), task.mesh), hyperparameters)
        return jax.device_get(state.params), jax.device_get(metrics)

    config = config_of(short_records, True, **mesh)
    config.batch_size, config.microbatches = 48, microbatches
    devices = jax.devices()[: int(np.prod(list(mesh.values())))]
    task = Pretraining(config, make_mesh(config, devices), short_records)
    assert task.rows[0] % (microbatches * len(devices) // mesh.get("tensor", 1)) == 0 and task.rows[0] < 48
    whole = config_of(short_records, False)
    whole.batch_size = 48
    whole = Pretraining(whole, one_device_mesh(whole), short_records)
    (params, metrics), (expected, others) = after_a_step(task), after_a_step(whole)
    assert_close(metrics["loss"], others["loss"])
    assert_close(metrics["grad_norm"], others["grad_norm"], 1e-4)
    assert_close(params, expected, 2e-5)


@pytest.mark.slow
def test_dropout_of_packed_rows_is_the_same_on_any_mesh(short_records):
    """Though the number of rows, of which some are empty, is another one."""

    def after_a_step(devices, microbatches, **mesh):
        config = config_of(short_records, True, **mesh)
        config.batch_size, config.microbatches = 48, microbatches
        config.model.update(hidden_dropout_prob=0.3, attention_probs_dropout_prob=0.3)
        task = Pretraining(config, make_mesh(config, jax.devices()[:devices]), short_records)
        program = make_program(task, task.config, task.mesh)
        hyperparameters = put_hyperparameters(0, make_schedule(task.config.optimizer, 10), task.mesh)
        batch = put_batch(next(task.batches(0)), task.mesh)
        return task.rows[0], program.train_step(program.init(jax.random.key(0)), batch, hyperparameters)[1]

    (rows, alone), (other_rows, divided) = after_a_step(1, 1), after_a_step(8, 3, fsdp=2)
    assert rows < other_rows
    assert_close(divided["loss"], alone["loss"])
    assert_close(divided["grad_norm"], alone["grad_norm"], 1e-4)


@pytest.mark.parametrize("prob", [0.02, 0.05, 0.1, 0.15, 0.3, 0.5])
def test_there_is_room_for_the_masked_tokens_of_any_row(prob):
    rng = random.Random(0)
    for length in (16, 128, 512):
        config = config_of("", True)
        config.data.masked_lm_prob = prob
        row = row_size(config, stage(1, length, length))
        for _ in range(2000):
            left, sizes = length, []
            while left >= 3 and len(sizes) < row.sequences:
                sizes.append(rng.choice([3, 4, 5, 10, left, rng.randint(3, left)]))
                sizes[-1] = min(sizes[-1], left)
                left -= sizes[-1]
            assert sum(max(1, round(prob * size)) for size in sizes) <= row.predictions, (prob, length, sizes)


@pytest.mark.slow
def test_a_packed_run_ends_where_the_padded_one_does(short_records, tmp_path):
    """50 steps; `train/real_tokens_share` says how they differ."""
    ends, shares, losses = [], [], []
    for packing in (False, True):
        config = config_of(short_records, packing)
        config.stages, config.batch_size = named_stages(short=stage(50, 32, 5)), 64
        config.eval.every_steps = config.checkpoint.every_steps = 50
        workdir = tmp_path / str(packing)
        run(pretraining_run.KIND, config, workdir)
        ends.append(checkpoint.read_params(workdir, 50))
        lines = read_metrics(workdir)
        losses.append([line["train/loss"] for line in lines if "train/loss" in line])
        shares.append(np.mean([line["train/real_tokens_share"] for line in lines if "train/loss" in line]))
    assert shares[0] < 0.6 < 0.8 < shares[1]
    np.testing.assert_allclose(*losses, rtol=1e-3)
    assert losses[0][-1] < losses[0][0] - 0.3
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, atol=2e-3), *ends)


def test_sentence_pairs_do_not_see_each_other(packed, params):
    """Another token in one pair changes its own outputs, and neither loss nor gradient of any other."""
    batch = next(packed.batches(0))
    rows = np.flatnonzero(batch["segments"].max(1) > 1)[:3]
    assert len(rows) == 3
    batch = {name: x[rows] for name, x in batch.items()}

    def outputs(batch):
        return BertForPreTraining(packed.model.config).apply(
            {"params": params}, batch["input_ids"], batch["segments"], batch["token_types"],
            batch["word_positions"], positions=batch["positions"], first_tokens=batch["first_tokens"],
        )  # fmt: skip

    def loss_of_first(params, batch):
        weights = {name: batch[name] for name in ("word_weights", "sequence_weights")}
        numbers = np.take_along_axis(batch["segments"], batch["word_positions"], 1)
        weights["word_weights"] = weights["word_weights"] * (numbers == 1)
        weights["sequence_weights"] = weights["sequence_weights"] * (np.arange(8) == 0)
        return packed.loss(params, {**batch, **weights})[0]

    changed = dict(
        batch, input_ids=np.where(batch["segments"] == 2, (batch["input_ids"] + 7) % 150, batch["input_ids"])
    )
    (words, pairs), (other_words, other_pairs) = outputs(batch), outputs(changed)
    of_second = np.take_along_axis(batch["segments"], batch["word_positions"], 1) == 2
    used = batch["word_weights"] > 0
    np.testing.assert_array_equal(words[used & ~of_second], other_words[used & ~of_second])
    assert (words[used & of_second] != other_words[used & of_second]).any(-1).all()
    there = np.arange(8) < batch["segments"].max(1)[:, None]
    second = np.arange(8) == 1
    np.testing.assert_array_equal(pairs[there & ~second], other_pairs[there & ~second])
    assert (pairs[there & second] != other_pairs[there & second]).any(-1).all()
    gradient = jax.jit(jax.grad(loss_of_first))
    jax.tree.map(np.testing.assert_array_equal, gradient(params, batch), gradient(params, changed))


# Fine-tuning.


def examples_of(kind, count=20, seed=0):
    rng = np.random.default_rng(seed)
    choices = 3 if kind == "choice" else 0
    ids = [rng.integers(1, 50, rng.integers(4, 13)) for _ in range(count * max(1, choices))]
    types = [(np.arange(len(x)) > 2).astype(int) for x in ids]
    labels = {
        "classification": rng.integers(0, 4, count),
        "regression": rng.random(count),
        "multi_label": rng.integers(0, 2, (count, 4)),
        "choice": rng.integers(0, 3, count),
        "tagging": [np.where(rng.random(len(x)) < 0.3, -1, rng.integers(0, 4, len(x))) for x in ids],
        "spans": [np.sort(rng.integers(0, len(x), 2)) for x in ids],
    }[kind]
    return Examples(ids, types, labels, choices, per_token=kind == "tagging")


OUTPUT_LAYERS = {
    "classification": output_layers.classification(4),
    "regression": output_layers.regression(),
    "multi_label": output_layers.multi_label(4),
    "choice": output_layers.choice(),
    "tagging": output_layers.tagging(4),
    "spans": output_layers.spans(),
}


def batches_of(examples):
    """All of them in a padded batch, and in a packed one; and which is the first of that."""
    found, *places = next(packed_evaluation(examples, 1000, 64, 1))
    return examples.batch(np.arange(len(examples)), 12), examples.packed(found, *places), found[0]


@pytest.fixture(scope="module", params=OUTPUT_LAYERS)
def fine_tuning(request):
    output_layer, examples = OUTPUT_LAYERS[request.param], examples_of(request.param)
    model = output_layer.make_model(BERT)
    ids = np.zeros((1, 8), np.int32)
    params = model.init(jax.random.key(1), ids, ids, ids)["params"]
    params = nn.meta.unbox(params)
    params = jax.tree.map(lambda x: x + 0.1 * jax.random.normal(jax.random.key(x.size), x.shape), params)

    def loss(params, batch):
        losses, correct = output_layer.loss(apply(model, output_layer.pooled, params, batch), batch)
        weights = batch["weights"] / batch["weights"].sum()
        return (weights * losses).sum(), (weights * correct).sum()

    return output_layer, model, params, examples, loss


@pytest.mark.slow
def test_loss_and_gradient_of_each_task_are_those_of_padded_examples(fine_tuning):
    *_, params, examples, loss = fine_tuning
    padded, packed, _ = batches_of(examples)
    assert packed["segments"].max() > max(1, examples.choices)
    compute = jax.jit(jax.value_and_grad(loss, has_aux=True))
    (one, correct), gradient = compute(params, padded)
    (other, packed_correct), packed_gradient = compute(params, packed)
    assert_close((one, correct), (other, packed_correct))
    assert_close(gradient, packed_gradient)


@pytest.mark.slow
def test_examples_do_not_see_each_other(fine_tuning):
    *_, params, examples, loss = fine_tuning
    _, packed, first = batches_of(examples)
    owners = np.arange(len(examples.input_ids)) // max(1, examples.choices)
    ids = [(x + 7) % 49 + 1 if i == first else x for i, x in zip(owners, examples.input_ids)]
    _, changed, _ = batches_of(dataclasses.replace(examples, input_ids=ids))
    assert (packed["input_ids"] != changed["input_ids"]).sum() == examples.tokens[first]

    def without_first(batch):
        weights = batch["weights"].copy()
        if examples.per_token:
            weights[0, batch["segments"][0] == 1] = 0
        else:
            weights[0, 0] = 0
        return {**batch, "weights": weights}

    compute = jax.jit(jax.value_and_grad(loss, has_aux=True))
    same = compute(params, without_first(packed)), compute(params, without_first(changed))
    jax.tree.map(np.testing.assert_array_equal, *same)
    assert compute(params, packed)[0][0] != compute(params, changed)[0][0]


@pytest.mark.slow
@pytest.mark.parametrize("devices", [1, 4])
def test_predictions_of_packed_examples_are_those_of_padded_ones(fine_tuning, devices):
    output_layer, model, params, examples, _ = fine_tuning
    mesh = Mesh(np.array(jax.devices()[:devices]).reshape(devices, 1, 1), ("data", "fsdp", "tensor"))
    padded, packed = (
        Predictor(model, output_layer.pooled, mesh, 8, packs)(params, examples) for packs in (False, True)
    )
    assert len(packed) == len(padded) == len(examples)
    for one, other in zip(packed, padded):
        assert one.shape == other.shape
        assert_close(one, other)


def test_what_cannot_be_packed_is_refused():
    from bertjax import tasks

    config = features.get_config()
    config.packing = True
    with pytest.raises(UserError, match=r"config.packing = True: a BiLSTM .* reads whole rows"):
        tasks.validate(config, with_data=False)
