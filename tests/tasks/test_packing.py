"""Packed sequences beside the same ones padded: losses, gradients, and what they do not see of each other."""

import itertools
import math
import random

import flax.linen as nn
import jax
import numpy as np
import pytest
from jax.sharding import Mesh

from bertjax import tasks
from bertjax.config import BertConfig, UserError, stage
from bertjax.data.batches.examples import Examples, packed_evaluation
from bertjax.data.preparation import prepare
from bertjax.sharding.mesh import make_mesh, put_batch
from bertjax.tasks import output_layers
from bertjax.tasks.output_layers import Predictor, apply
from bertjax.tasks.pretraining import Pretraining
from bertjax.tasks.pretraining_rows import row_size
from bertjax.text import tokenizer
from bertjax.training.schedules import make_schedule
from bertjax.training.step import make_program, put_hyperparameters
from experiments import features
from tests.conftest import TOPICS, one_device_mesh, preparing_in_process, tiny_config

BERT = BertConfig(
    vocab_size=50, hidden_size=16, num_hidden_layers=1, num_attention_heads=2, intermediate_size=16,
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
    lines = (f"A {rng.choice(words)}." for _ in range(800))
    documents = iter(lambda: list(itertools.islice(lines, rng.randint(2, 6))), [])
    (folder / "text.txt").write_text("\n\n".join(map("\n".join, documents)))
    with preparing_in_process():
        prepare(config_of("", False, folder / "text.txt"), folder / "records")
    return folder / "records"


def config_of(records, packing, corpus="", **mesh):
    config = tiny_config(corpus, records)
    config.packing = packing
    config.model.update(hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0)
    config.mesh.update(mesh)
    return config


@pytest.mark.slow
@pytest.mark.parametrize("objective", ["masked words and pairs", "next words"])
def test_loss_and_gradient_of_pretraining_are_those_of_padded_sequences(objective, short_records, tmp_path):
    """And so no sequence sees another one, or predicts the first word of the next one in its row."""
    fields, records = {}, short_records
    if objective == "next words":
        fields, records = {"data.masking": "dynamic", "data.next_sentence": "none"}, tmp_path
        config = config_of("", False, short_records.parent / "text.txt")
        config.update_from_flattened_dict(fields | {"data.short_seq_prob": 0.9})
        with preparing_in_process():
            prepare(config, records)
    pieces, found, params = tokenizer.load("wordpiece", records / "vocab.txt"), [], None
    for packing in (False, True):
        config = config_of(records, packing)
        config.update_from_flattened_dict(fields)
        config.model.causal = bool(fields)
        task = Pretraining(config, one_device_mesh(config), records, tokenizer=pieces)
        params = params or nn.meta.unbox(jax.jit(task.init_params)(jax.random.key(0)))
        batch, told = next(task.batches(3)), task.abstract_batch(0)
        assert {n: (x.shape, x.dtype) for n, x in batch.items()} == {n: (x.shape, x.dtype) for n, x in told.items()}
        step = jax.value_and_grad(lambda p, b, task=task: task.loss(p, task.normalize(b)), has_aux=True)
        found.append((len(batch["input_ids"]), *jax.jit(step)(params, batch)))
        if fields:  # all words but [CLS]; the last [SEP] of a sequence predicts nothing
            assert batch["word_weights"].sum() == (batch["segments"] > 0).sum() - 2 * batch["sequence_weights"].sum()
    (rows, (loss, metrics), gradient), (fewer, (packed_loss, packed_metrics), packed_gradient) = found
    assert fewer < 16 == rows and packed_metrics.pop("padding") < metrics.pop("padding") / 2
    assert_close((packed_loss, packed_metrics, packed_gradient), (loss, metrics, gradient))


def after_a_step(records, microbatches=1, **mesh):
    """Returns how many rows 48 packed sequences have, and the params and metrics after a step with much dropout."""
    config = config_of(records, True, **mesh)
    config.batch_size, config.microbatches = 48, microbatches
    config.model.update(hidden_dropout_prob=0.3, attention_probs_dropout_prob=0.3)
    devices = jax.devices()[: math.prod(mesh.values())]
    task = Pretraining(config, make_mesh(config, devices), records)
    assert task.rows[0] % (microbatches * len(devices) // mesh.get("tensor", 1)) == 0
    program = make_program(task, config, task.mesh)
    hyperparameters = put_hyperparameters(0, make_schedule(config.optimizer, 10), task.mesh)
    batch = put_batch(next(task.batches(0)), task.mesh)
    state, metrics = program.train_step(program.init(jax.random.key(0)), batch, hyperparameters)
    return task.rows[0], jax.device_get(state.params), jax.device_get(metrics)


@pytest.fixture(scope="module")
def on_one(short_records):
    return after_a_step(short_records)


@pytest.mark.slow
@pytest.mark.parametrize("mesh, microbatches", [(dict(data=4, fsdp=2), 3), (dict(data=2, fsdp=2, tensor=2), 1)])
def test_a_packed_step_is_the_same_on_any_mesh(short_records, on_one, mesh, microbatches):
    """With its dropout, though the number of rows, of which some are empty, may be another one."""
    (rows, expected, others), (its_rows, params, metrics) = on_one, after_a_step(short_records, microbatches, **mesh)
    assert rows < 48 and (microbatches == 1 or rows < its_rows)
    assert_close(metrics["loss"], others["loss"])
    assert_close(metrics["grad_norm"], others["grad_norm"], 1e-4)
    assert_close(params, expected, 2e-5)


@pytest.mark.parametrize("prob", [0.02, 0.15, 0.5])
def test_there_is_room_for_the_masked_tokens_of_any_row(prob):
    rng = random.Random(0)
    for length in (16, 128, 512):
        config = config_of("", True)
        config.data.masked_lm_prob = prob
        row = row_size(config, stage(1, length, length))
        for _ in range(1000):
            left, sizes = length, []
            while left >= 3 and len(sizes) < row.sequences:
                sizes.append(rng.choice([3, 4, 5, 10, left, rng.randint(3, left)]))
                sizes[-1] = min(sizes[-1], left)
                left -= sizes[-1]
            assert sum(max(1, round(prob * size)) for size in sizes) <= row.predictions, (prob, length, sizes)


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


@pytest.fixture(scope="module", params=OUTPUT_LAYERS)
def fine_tuning(request):
    output_layer, examples = OUTPUT_LAYERS[request.param], examples_of(request.param)
    model = output_layer.make_model(BERT)
    ids = np.zeros((1, 8), np.int32)
    params = nn.meta.unbox(jax.jit(model.init)(jax.random.key(1), ids, ids, ids)["params"])
    params = jax.tree.map(lambda x: x + 0.1 * np.random.default_rng(x.size).normal(size=x.shape).astype("f4"), params)

    return output_layer, model, params, examples


def test_loss_of_each_task_is_that_of_padded_examples(fine_tuning):
    """And so no example sees another one."""
    output_layer, model, params, examples = fine_tuning

    @jax.jit
    def compute(batch):
        losses, correct = output_layer.loss(apply(model, output_layer.pooled, params, batch), batch)
        weights = batch["weights"] / batch["weights"].sum()
        return (weights * losses).sum(), (weights * correct).sum()

    packed = examples.packed(*next(packed_evaluation(examples, 1000, 64, 1)))
    assert packed["segments"].max() > max(1, examples.choices)
    assert_close(compute(examples.batch(np.arange(len(examples)), 12)), compute(packed))


def test_predictions_of_packed_examples_are_those_of_padded_ones(fine_tuning):
    """The packed ones on four devices, the padded ones on one."""
    output_layer, model, params, examples = fine_tuning

    def predicted(devices, packs):
        mesh = Mesh(np.array(jax.devices()[:devices]).reshape(devices, 1, 1), ("data", "fsdp", "tensor"))
        return Predictor(model, output_layer.pooled, mesh, 8, packs)(params, examples)

    packed, padded = predicted(4, True), predicted(1, False)
    assert len(packed) == len(padded) == len(examples)
    for one, other in zip(packed, padded):
        assert one.shape == other.shape
        assert_close(one, other)


def test_what_cannot_be_packed_is_refused():
    config = features.get_config()
    config.packing = True
    with pytest.raises(UserError, match=r"config.packing = True: a BiLSTM .* reads whole rows"):
        tasks.validate(config, with_data=False)
