"""Training of embeddings: invariance to microbatches, devices and packing; several data sets, teachers, bad input."""

import dataclasses
import functools
import itertools
import random

import flax.linen as nn
import jax
import numpy as np
import pytest
from ml_collections import ConfigDict

from bertjax.common.errors import UserError
from bertjax.data.loading.examples import Examples, PackedOrder, TrainingOrder
from bertjax.data.loading.mixture import MixedOrder, steps_per_dataset, tempered_steps
from bertjax.distributed.mesh import GROUPS, make_mesh, put_batch
from bertjax.embedding import datasets, loss_settings, losses
from bertjax.finetuning import distillation
from bertjax.finetuning import run as finetuning_run
from bertjax.finetuning.encoding import encode_pairs
from bertjax.finetuning.task import FineTuning
from bertjax.inference import tasks
from bertjax.interop import pretrained
from bertjax.launch.start import launch
from bertjax.launch.validate import validate
from bertjax.training.checkpoints import checkpoint as checkpoints
from bertjax.training.checkpoints.workdir import read_info, write_info
from bertjax.training.optim.schedules import make_schedule
from bertjax.training.step import Program, put_hyperparameters
from bertjax.training.trackers.jsonl import read_metrics
from experiments import embed
from tests.conftest import TOPICS
from tests.finetuning.test_classify import write_table

FORMS = {
    "pairs": dict(texts="query,positive,negative"),
    "scored": dict(texts="one,other", label="score"),
    "labelled": dict(texts="one,other", label="same"),
    "sentences": dict(texts="query"),
}


def rows_of(count: int, seed: int) -> list[dict]:
    """Texts about a topic; every fourth query or positive is repeated. Also pairs, some of them about one topic."""
    rng, rows = random.Random(seed), []

    def text(topic):
        return " ".join(rng.choices(TOPICS[topic], k=rng.randint(2, 6)))

    for i in range(count):
        (topic, other), is_same = rng.sample(sorted(TOPICS), 2), rng.random() < 0.5
        row = {"query": text(topic), "positive": text(topic), "negative": text(other), "one": text(topic)}
        row |= {"other": text(topic if is_same else other), "same": int(is_same), "score": is_same + rng.random() / 2}
        row |= {name: rows[-1][name] for name, every in (("query", 4), ("positive", 3)) if rows and i % every == 0}
        rows.append(row)
    return rows


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    path = tmp_path_factory.mktemp("texts")
    for name, count in (("train", 42), ("dev", 30)):
        write_table(path / f"{name}.jsonl", rows_of(count, count))
    return path


def config_for(folder, checkpoint, form="pairs", **fields):
    config = embed.get_config()
    config.data.update(path=str(folder), form=form, **FORMS[form])
    config.data.dev.update(form="scored", **FORMS["scored"])
    config.init_checkpoint = str(checkpoint)
    config.update(dict(batch_size=16, max_seq_length=16, log_every_steps=1, keep_layers=1, dtype="float32"))
    config.optimizer.learning_rate = 3e-3
    config.update_from_flattened_dict(fields)
    return config


def task_of(config, tmp_path, devices=1):
    config, _ = finetuning_run.resolve(config, None)
    material = finetuning_run.load_inputs(config, tmp_path, None)
    return FineTuning(config, make_mesh(config, jax.devices()[:devices]), material.data)


# The whole training step.


def gradient_of(config, tmp_path, data=1, fsdp=1, microbatches=1):
    """Returns the gradient of a batch that is not full, with dropout, and the metrics."""
    config.mesh.update(data=data, fsdp=fsdp, tensor=1)
    config.microbatches, config.packing = microbatches, False
    config.optimizer.update(name="sgd", warmup_proportion=0.0, learning_rate=1.0, weight_decay=0.0, max_grad_norm=1e9)
    task = task_of(config, tmp_path, data * fsdp)
    program = Program(task, config, task.mesh)
    hyperparameters = put_hyperparameters(0, make_schedule(config.optimizer, 1000), task.mesh)
    state = program.init(jax.random.key(0))
    before = jax.device_get(state.params)
    batch = min(itertools.islice(task.batches(0), 3), key=lambda batch: batch["weights"].sum())
    assert batch["weights"].sum() == 10  # of 16 rows
    state, metrics = program.train_step(state, put_batch(batch, task.mesh), hyperparameters)
    return jax.tree.map(np.subtract, before, jax.device_get(state.params)), jax.device_get(metrics)


# Form and settings.
SEVERAL = {
    "infonce": ("pairs", {"loss.symmetric": True, "loss.widths": "8"}),
    "triplet": ("pairs", {"loss.distance_metric": "euclidean", "loss.widths": "8"}),
    "guided": ("pairs", {"loss.name": "", "loss.guide": "{teacher}"}),
    "angle": ("scored", {}),
    "online_contrastive": ("labelled", {}),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", SEVERAL)
def test_microbatches_and_devices_change_neither_loss_nor_gradient(name, teacher, folder, checkpoint, tmp_path):
    form, fields = SEVERAL[name]
    fields = {"loss.name": name} | {field: str(teacher) if x == "{teacher}" else x for field, x in fields.items()}
    expected, metrics = gradient_of(config_for(folder, checkpoint, form, **fields), tmp_path)
    result, again = gradient_of(config_for(folder, checkpoint, form, **fields), tmp_path, 2, 2, 2)
    assert metrics["loss"] > 0.1 and metrics["grad_norm"] > 0.1
    jax.tree.map(functools.partial(np.testing.assert_allclose, rtol=1e-4, atol=2e-5), expected, result)
    for name in ("loss", "accuracy", "grad_norm"):
        np.testing.assert_allclose(again[name], metrics[name], rtol=1e-4, err_msg=name)


def packed(examples):
    """Packs all examples into one batch in which some slots have no example."""
    return next(PackedOrder(examples, len(examples), 0, 64, 1).batches(range(1), np.arange))


@pytest.fixture(scope="module")
def encode(folder, checkpoint, tmp_path_factory):
    """Returns the embeddings of a batch of any layout; compiled once per shape."""
    task = task_of(config_for(folder, checkpoint), tmp_path_factory.mktemp("encode"))
    params = nn.meta.unbox(jax.jit(task.init_params)(jax.random.key(0)))
    compiled = jax.jit(task.loss.outputs)

    def vectors_of(batch, keys=None):
        return compiled(params, {name: x for name, x in batch.items() if name not in NO_INPUTS}, keys)

    return vectors_of


NO_INPUTS = ("labels", "weights", "dropout_rows", "guide_embeddings")
FORM_OF = {
    "infonce": "pairs", "guided": "pairs", "triplet": "pairs", "cosent": "scored", "angle": "scored",
    "contrastive": "labelled", "online_contrastive": "labelled",
}  # fmt: skip
LOSS_FIELDS: dict = {"triplet": {"loss.distance_metric": "manhattan", "loss.triplet_margin": 20.0}}


@pytest.mark.slow
@pytest.mark.parametrize("name", FORM_OF)
def test_packing_missing_examples_and_groups_change_neither_loss_nor_gradient(
    name, encode, teacher, folder, checkpoint, tmp_path
):
    texts = "query,positive,negative" if name in ("triplet", "guided") else "one,other"
    fields = {"data.texts": texts, "loss.name": name, **LOSS_FIELDS.get(name, {})}
    if name == "guided":
        fields |= {"loss.name": "", "loss.guide": str(teacher)}
    task = task_of(config_for(folder, checkpoint, FORM_OF[name], **fields), tmp_path)
    examples = task.data.train
    whole, missing = np.arange(42), np.array([*range(20), -1, *range(20, 42), -1])
    batches = [(packed(examples), 1), (examples.batch(whole, 16), 1), (examples.batch(missing, 16), 4)]
    batches.append((examples.batch(np.append(missing, np.full(4, -1)), 16), 8))
    several = batches[0][0]
    assert several["segments"].max() > 2 * examples.choices and (several["weights"] == 0).any()

    def loss(vectors, batch, groups):
        parts = jax.tree.map(lambda x: x.reshape(groups, -1, *x.shape[1:]), (vectors, task.loss.normalize(batch)))
        return jax.vmap(lambda *arrays: task.loss.loss_of_outputs(*arrays)[0], axis_name=GROUPS)(*parts).sum()

    results = []
    for batch, groups in batches:
        vectors, there = encode(batch), batch["weights"] > 0
        value, gradient = jax.jit(jax.value_and_grad(loss), static_argnums=2)(vectors, batch, groups)
        order = np.argsort(np.asarray(vectors)[there][..., 0].sum(1))
        results.append((value, *(np.asarray(x)[there][order] for x in (vectors, gradient))))
        assert not np.asarray(gradient)[~there].any()
    for other in results[1:]:
        jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-4, atol=2e-5), results[0], other)


@pytest.mark.slow
@pytest.mark.parametrize("is_packed", [False, True])
def test_two_embeddings_of_one_sentence_differ_by_dropout(is_packed, encode, folder, checkpoint, tmp_path):
    examples = task_of(config_for(folder, checkpoint, "sentences"), tmp_path).data.train
    batch = packed(examples) if is_packed else examples.batch(np.arange(len(examples)), 16)
    for keys, differs in ((jax.random.split(jax.random.key(1), len(batch["input_ids"])), True), (None, False)):
        vectors = np.asarray(encode(batch, keys))[batch["weights"] > 0]
        assert vectors.shape == (42, 2, 32)
        distances = np.abs(vectors[:, 0] - vectors[:, 1]).max(-1)
        assert (distances > 1e-3).all() if differs else (distances < 1e-5).all()


def test_equal_texts_are_not_negatives():
    """Compares the loss with NumPy code that removes candidates one by one."""
    rng = np.random.default_rng(0)
    words = rng.integers(0, 5, (12, 3))  # few distinct texts, so that all types of duplicates occur
    vectors = rng.normal(size=(5, 8)).astype(np.float32)
    vectors /= np.linalg.norm(vectors, axis=1, keepdims=True)
    logits = vectors @ vectors.T / 0.05

    def cross_entropy(text_number, right, candidates):
        return (
            np.log(np.exp([logits[text_number, other] for other in (right, *candidates)]).sum())
            - logits[text_number, right]
        )

    expected, masked = [], 0
    for i, (query, positive, _) in enumerate(words):
        candidates = [words[j, 1] for j in range(12) if j != i and words[j, 0] != query] + list(words[:, 2])
        queries = [words[j, 0] for j in range(12) if j != i and words[j, 1] != positive]
        kept = [[text for text in texts if text not in (query, positive)] for texts in (candidates, queries)]
        masked += 3 * 12 - 2 - sum(map(len, kept))
        expected.append((cross_entropy(query, positive, kept[0]) + cross_entropy(positive, query, kept[1])) / 2)
    batch = {"weights": np.ones(12, np.float32), "labels": words}
    loss = losses.InBatchNegatives(temperature=0.05, symmetric=True)
    losses_of_batch, _ = jax.jit(jax.vmap(lambda v: loss(v, batch), axis_name=GROUPS))(vectors[words][None])
    assert masked > 100
    np.testing.assert_allclose(losses_of_batch[0], expected, rtol=1e-4, atol=1e-5)


# Several data sets.


def examples_of(count: int, name: int) -> Examples:
    """Sequences that contain the name of their data set and their number."""
    ids = [np.array([name, i, *[7] * (i % 5)], np.int32) for i in range(count)]
    return Examples(ids, [np.zeros_like(x) for x in ids])


@pytest.mark.parametrize("is_packed", [False, True])
def test_every_batch_has_one_data_set_and_data_sets_are_used_by_weight(is_packed):
    sizes, weights, size = (40, 24, 64), (1.0, 2.0, 0.5), 8
    sets = [examples_of(count, name) for name, count in enumerate(sizes, 1)]
    orders = [PackedOrder(x, size, 0, 64, 1) if is_packed else TrainingOrder(x, size, 0, 64) for x in sets]
    order = MixedOrder(orders, steps_per_dataset(sizes, weights, size), seed=0)
    steps = order.steps_per_epoch
    assert steps == 5 + 6 + 4
    batches = list(order.batches(range(2 * steps), np.arange))

    def read(batch):
        """Returns the data set and the number of each example."""
        if not is_packed:
            return [tuple(ids[:2]) for ids in batch["input_ids"][batch["weights"] > 0]]
        rows, numbers = np.nonzero(batch["weights"])
        return [tuple(batch["input_ids"][r, (s := batch["first_tokens"][r, n]) : s + 2]) for r, n in zip(rows, numbers)]

    contents = [read(batch) for batch in batches]
    assert all(len({name for name, _ in each}) == 1 for each in contents)
    for epoch in range(2):
        used = list(itertools.chain(*contents[epoch * steps : (epoch + 1) * steps]))
        counts = {name: [used.count((name, i)) for i in range(count)] for name, count in enumerate(sizes, 1)}
        assert set(counts[1]) == {1} and set(counts[2]) == {2} and sum(counts[3]) == 32
    of_third = [each for each in itertools.chain(*contents) if each[0] == 3]
    assert len(set(of_third)) == len(of_third) == 64  # half in each epoch
    names = [each[0][0] for each in contents]
    assert names[:steps] != names[steps:] and names != sorted(names)
    for start in (7, 20):
        again = itertools.islice(order.batches(range(start, 2 * steps), np.arange), 3)
        assert [read(batch) for batch in again] == contents[start : start + 3]


def mixed(folder, checkpoint, **fields):
    config = config_for(folder, checkpoint, **{"epochs": 2.0} | fields).unlock()
    config.data.sets.similar = embed.text_set(str(folder), "scored", FORMS["scored"]["texts"], "score", weight=2.0)
    validate(config.lock())
    return config


@pytest.mark.parametrize("sizes, temperature, expected", [
    ((800, 80, 8), 1.0, [100, 10, 1]), ((800, 80, 8), 2.0, [78, 25, 8]), ((800, 80, 8), 1e9, [37, 37, 37]),
    ((8000, 1), 0.1, [1000, 1]), ((9, 9), 1.0, [2, 2]), ((4, 42), 1.0, [1, 6]), ((1, 1, 1), 1.0, [1, 1, 1]),
])  # fmt: skip
def test_datasets_are_sampled_by_temperature(sizes, temperature, expected):
    assert tempered_steps(sizes, temperature, 8) == expected
    assert sum(expected) == sum(-(-size // 8) for size in sizes)


def test_sampling_determines_the_steps_of_an_epoch(folder, checkpoint, tmp_path):
    """The similar set is used twice by its weight; without the weight, its share depends on its size."""
    task = task_of(mixed(folder, checkpoint), tmp_path)
    assert task.data.steps_of_sets(16) == [3, 6]
    config = config_for(folder, checkpoint, **{"data.sampling": "temperature", "data.temperature": 1e9}).unlock()
    write_table(tmp_path / "small.jsonl", rows_of(4, 4))
    config.data.sets.small = embed.text_set(str(tmp_path / "small.jsonl"), texts="query,positive")
    validate(config.lock())
    task = task_of(config, tmp_path)
    assert task.data.steps_of_sets(16) == [2, 2] and task.data.count(16) == 64
    batches = [batch["labels"].shape[-1] for batch in itertools.islice(task.batches(0), 4)]
    assert sorted(batches) == [2, 2, 3, 3]
    assert [batch["labels"].shape[-1] for batch in itertools.islice(task.batches(1), 3)] == batches[1:]
    with config.unlocked():
        config.data.update(sampling="proportional", temperature=1.0)
    validate(config)
    assert task_of(config, tmp_path).data.steps_of_sets(16) == [3, 1]
    with config.unlocked():
        config.data.sets.small.weight = 2.0
    with pytest.raises(UserError, match=r"config.data.sets.small.weight = 2.0: has no effect with data.sampling=prop"):
        validate(config)


@pytest.mark.parametrize("packing", [False, True])
def test_batches_of_equal_tokens_have_unequal_numbers_of_examples(packing, folder, checkpoint, tmp_path):
    config = config_for(folder, checkpoint, batch_by="tokens", batch_size=4, packing=packing)
    validate(config)
    task = task_of(config, tmp_path)
    counts = [int((batch["weights"] > 0).sum()) for batch in task.batches(0)]
    assert len(counts) == task.total_steps and len(set(counts)) > 1
    assert sum(counts) == len(task.data.train) * round(task.total_steps / task._order.steps_per_epoch)


def test_a_set_has_its_own_prompts(folder, checkpoint, tmp_path):
    config = config_for(folder, checkpoint, **{"data.query_prompt": "ship ", "data.document_prompt": "sail "}).unlock()
    texts = "query,positive"
    config.data.texts = texts
    config.data.sets.inherits = embed.text_set(str(folder), texts=texts)
    config.data.sets.changes = embed.text_set(str(folder), texts=texts, query_prompt="rose ", document_prompt="none")
    config.data.sets.scored = embed.text_set(str(folder), "scored", "one,other", "score", query_prompt="none")
    assert {"query_prompt", "document_prompt"}.isdisjoint(config.data.sets.inherits)  # as in configs of older versions
    validate(config.lock())
    tokenizer = pretrained.read_pretrained(checkpoint).tokenizer
    row = rows_of(42, 42)[3]
    inherited = ("ship query", "sail positive")
    expected = [inherited, ("rose query", "positive"), inherited, ("one", "other")]  # sets in the order of their names
    for examples, words in zip(task_of(config, tmp_path).data.train_sets, expected, strict=True):
        for ids, text in zip(examples.input_ids[2 * 3 : 2 * 4], words):
            prompt, _, column = text.rpartition(" ")
            (encoded,), _, _ = encode_pairs(tokenizer, [f"{prompt} {row[column]}".strip()], None, 16)
            np.testing.assert_array_equal(ids, encoded)


@pytest.mark.slow
def test_a_run_on_several_data_sets_improves_the_score(folder, checkpoint, tmp_path):
    launch(mixed(folder, checkpoint), tmp_path)
    lines = read_metrics(tmp_path)
    scores = [line["eval/spearman"] for line in lines if "eval/spearman" in line]
    assert lines[-1]["step"] == 2 * (3 + 6) and scores[-1] > 0.5


NEW_FIELDS = (
    "loss.name", "loss.distance_metric", "loss.triplet_margin", "loss.guide", "loss.guide_margin", "data.sampling",
    "data.temperature", "batch_by", "distill.student_temperature", "distill.teacher_temperature",
)  # fmt: skip


@pytest.mark.slow
def test_a_config_of_an_older_version_trains_and_resumes_without_differences(folder, checkpoint, tmp_path, capsys):
    """The config of the run, or the user's experiment file, lacks the fields of later versions."""
    config = mixed(folder, checkpoint)
    with config.unlocked():
        for field in NEW_FIELDS:
            section, _, name = field.rpartition(".")
            del (config[section] if section else config)[name]
    launch(config, tmp_path / "run")
    run_config = read_info(tmp_path / "run").config
    assert "name" not in run_config.loss and "sampling" not in run_config.data
    launch(mixed(folder, checkpoint), tmp_path / "run")
    output = capsys.readouterr().out
    assert "already finished" in output and "(was " not in output


# Distillation.


@pytest.fixture(scope="module")
def teacher(folder, checkpoint, tmp_path_factory):
    """A workdir with the params of the checkpoint, and with prompts."""
    workdir = tmp_path_factory.mktemp("teacher")
    config = config_for(folder, checkpoint, **{"data.query_prompt": "ship ", "data.document_prompt": "sail "})
    config, _ = finetuning_run.resolve(config, None)
    opened = finetuning_run.KIND.open(config, workdir, None)
    write_info(workdir, opened.info, opened.tokenizer)
    checkpoints.write_params(workdir, {"bert": pretrained.read_pretrained(checkpoint).params["bert"]})
    return workdir


@pytest.mark.slow
@pytest.mark.parametrize("target", ["vectors", "scores", "kl"])
def test_examples_have_the_vectors_or_scores_of_the_teacher(target, teacher, folder, checkpoint, tmp_path):
    fields = {"distill.teacher": str(teacher), "distill.what": target}
    config = (mixed if target == "vectors" else config_for)(folder, checkpoint, **fields)
    config, _ = finetuning_run.resolve(config, None)
    dataset = finetuning_run.load_inputs(config, tmp_path, None).data
    source, row = pretrained.read_pretrained(teacher), rows_of(42, 42)[3]
    # `predict` prepends the query prompt to all texts.
    prompted = dataclasses.replace(source, settings=source.settings.copy_and_resolve_references().unlock())
    prompted.settings.data.query_prompt = ""
    texts = ["ship " + row["query"], "sail " + row["positive"], "sail " + row["negative"]]
    vectors = np.array(
        [prediction["vector"] for prediction in tasks.get("embed").predict(prompted, [(text,) for text in texts])]
    )
    cosines = vectors[1:] @ vectors[0]
    expected = {"vectors": vectors, "scores": cosines[:1] - cosines[1:], "kl": cosines}[target]
    np.testing.assert_allclose(dataset.train.teacher_logits[3], expected, atol=1e-5)
    for examples in dataset.train_sets:
        assert len(examples.teacher_logits) == len(examples)
    in_rows = packed(dataset.train)
    assert in_rows["teacher_logits"].shape == (*in_rows["weights"].shape, *expected.shape)
    # Another format of a data set has other prompts: the teacher computes its logits again.
    path = tmp_path / distillation.FILE
    key, forms = str(np.load(path)["key"]), dataset.forms
    assert len(distillation._read(path, key, forms)) == sum(map(len, dataset.train_sets))
    assert len(forms) == len(dataset.train_sets)
    assert distillation._read(path, key, (*forms[:-1], "other")) is None
    assert distillation._read(path, "other", forms) is None


@pytest.mark.parametrize("target", ["scores", "kl"])
def test_scores_in_the_data_are_targets(target, folder, checkpoint, tmp_path):
    fields = {"distill.what": target, "distill.weight": 1.0, "data.label": "score,same"}
    data = task_of(config_for(folder, checkpoint, **fields), tmp_path).data
    columns = np.array([[row["score"], row["same"]] for row in rows_of(42, 42)], np.float32)
    expected = columns if target == "kl" else columns[:, :1] - columns[:, 1:]
    np.testing.assert_array_equal(np.stack(data.train.teacher_logits), expected)
    np.testing.assert_array_equal(data.train.batch(np.array([5, -1]), 16)["teacher_logits"][0], expected[5])
    assert not (tmp_path / distillation.FILE).exists()


@pytest.mark.slow
def test_a_file_with_scores_is_divided_and_trains(folder, checkpoint, tmp_path):
    """The dev set has the columns of scores, too, and ignores them."""
    dev = {f"data.dev.{name}": "" for name in ("form", "texts", "label")}
    fields = {"distill.what": "kl", "distill.student_temperature": 0.1, "data.label": "score,same", "epochs": 2.0}
    launch(config_for(folder, checkpoint, **{**fields, **dev, "data.path": str(folder / "train.jsonl")}), tmp_path)
    lines = read_metrics(tmp_path)
    assert any("eval/ndcg@10" in line for line in lines)
    assert "train/loss" in "".join(map(str, lines))


def test_the_distillation_loss_is_the_distance_of_vectors_or_scores():
    rng = np.random.default_rng(0)
    student, teacher = (x / np.linalg.norm(x, axis=-1, keepdims=True) for x in rng.normal(size=(2, 6, 3, 8)))
    cosines = [(x[:, :1] * x[:, 1:]).sum(-1) for x in (student, teacher)]
    scores = [x[:, :1] - x[:, 1:] for x in cosines]
    loss = loss_settings.make_loss(embed.get_config().loss, ())
    np.testing.assert_allclose(
        loss.divergence(2 * student, teacher, 1.0), 1 - (student * teacher).sum(-1).mean(-1), atol=1e-6
    )
    expected = np.square(scores[0] - scores[1]).mean(-1)
    np.testing.assert_allclose(loss.divergence(student, scores[1], 1.0), expected, atol=1e-6)


def test_a_certain_teacher_of_lists_gives_the_cross_entropy_of_infonce():
    student = np.random.default_rng(0).normal(size=(6, 4, 8)).astype(np.float32)
    student /= np.linalg.norm(student, axis=-1, keepdims=True)
    fields = embed.get_config().loss
    distill = ConfigDict(dict(what="kl", student_temperature=fields.temperature, teacher_temperature=0.01))
    loss = loss_settings.make_loss(fields, (), distill)
    logits = (student[:, :1] * student[:, 1:]).sum(-1) / fields.temperature
    expected = np.log(np.exp(logits).sum(-1)) - logits[:, 0]
    scores = np.tile(np.array([1, 0, 0], np.float32), (6, 1))  # the positive, and two negatives
    np.testing.assert_allclose(loss.divergence(student, scores, 2.0), expected, rtol=1e-4, atol=1e-5)


# A guide.


def test_examples_have_the_embeddings_of_the_guide(teacher, folder, checkpoint, tmp_path, monkeypatch):
    config = mixed(folder, checkpoint, **{"loss.guide": str(teacher)})
    config, _ = finetuning_run.resolve(config, None)
    train, scored = finetuning_run.load_inputs(config, tmp_path, None).data.train_sets
    row, embedder = rows_of(42, 42)[3], tasks.get("embed").embedder(pretrained.read_pretrained(teacher), prompt="")
    texts = ["ship " + row["query"], "sail " + row["positive"], "sail " + row["negative"]]
    np.testing.assert_allclose(train.guide_embeddings[3], embedder(texts)[0], atol=1e-5)
    assert len(train.guide_embeddings) == len(train) and scored.guide_embeddings is None
    batch = train.batch(np.array([-1, 3]), 16)
    np.testing.assert_array_equal(batch["guide_embeddings"][1], train.guide_embeddings[3])
    assert not batch["guide_embeddings"][0].any()
    # The workdir has the embeddings: a run resumes without the guide.
    monkeypatch.setattr(pretrained, "read_with_tokenizer", None)
    again = finetuning_run.load_inputs(config, tmp_path, None).data.train
    np.testing.assert_array_equal(np.stack(again.guide_embeddings), np.stack(train.guide_embeddings))


def test_the_planner_needs_no_guide(checkpoint):
    config = config_for("", checkpoint, **{"loss.guide": "missing"})
    config, _ = finetuning_run.resolve(config, None, with_data=False)
    data = tasks.get("embed").sample_data(config, np.arange(5))
    assert data.train.batch(np.arange(2), 8)["guide_embeddings"].shape == (2, 3, 32)


# Mistakes.

SCORED, LABELLED, SENTENCES = (
    {f"data.{name}": x for name, x in (FORMS[form] | {"form": form}).items()}
    for form in ("scored", "labelled", "sentences")
)
TEACHER = {"distill.teacher": "{teacher}"}
GIVEN = {"distill.what": "kl", "data.label": "score,same"}


@pytest.mark.parametrize("fields, message", [
    ({"batch_size": 1}, r"config.batch_size = 1: must be at least 2: the loss compares"),
    ({"batch_by": "token"}, r"config.batch_by = 'token': choose one of examples, tokens"),
    ({"loss.widths": "64"}, r"config.loss.widths = '64': 64 must be at most 32, the width of an embedding"),
    ({"loss.widths": "8,a"}, r"config.loss.widths = '8,a': must be widths, such as 256,128,64"),
    ({"loss.temperature": 0.0}, r"config.loss.temperature = 0.0: must be above 0"),
    ({"loss.name": "triple"}, r"config.loss.name = 'triple': unknown loss 'triple'; choose from infonce, triplet"),
    ({"loss.name": "triplet,infonce"}, r"config.loss.name = .*: triplet and infonce train on the same form"),
    ({"loss.name": "angle"}, r"config.loss.name = 'angle': angle trains on the forms scored, which no"),
    ({"loss.name": "triplet", "data.texts": "query,positive"}, r"data.texts = .*: the loss triplet needs form=pairs"),
    ({"loss.name": "triplet", "loss.symmetric": True}, r"config.loss.symmetric = True: cannot be combined with loss."),
    ({"loss.name": "triplet", "loss.triplet_margin": 5.0}, r"config.loss.triplet_margin = 5.0: .* at most 2"),
    ({"loss.distance_metric": "cos"}, r"config.loss.distance_metric = 'cos': choose one of cosine, eu"),
    ({"loss.triplet_margin": 1.0}, r"config.loss.triplet_margin = 1.0: applies to the loss triplet; set loss.name"),
    ({"loss.guide": "{checkpoint}"}, r"config.loss.guide = .*: computes no embeddings \(BertFor.*\)"),
    ({"loss.guide": "{teacher}", "loss.symmetric": True}, r"config.loss.guide = .*: cannot be combined with loss.sy"),
    ({"loss.guide": "{teacher}", "loss.name": "triplet"}, r"config.loss.guide = .*: selects in-batch negatives of"),
    (SCORED | {"loss.guide": "{teacher}"}, r"config.loss.guide = .*: selects in-batch negatives of the loss infonce"),
    ({"loss.guide_margin": 0.1}, r"config.loss.guide_margin = 0.1: needs a guide: set loss.guide"),
    ({"data.sampling": "sizes"}, r"config.data.sampling = 'sizes': choose one of weights, proportional, temperature"),
    ({"data.sampling": "proportional"}, r"config.data.sampling = 'proportional': needs several training sets: add d"),
    ({"data.temperature": 0.0}, r"config.data.temperature = 0.0: must be above 0"),
    ({"data.temperature": 2.0}, r"config.data.temperature = 2.0: applies to data.sampling=temperature; set data.sam"),
    ({"data.form": "pair"}, r"config.data.form = 'pair': choose one of pairs, scored"),
    ({"data.texts": "query"}, r"config.data.texts = 'query': must name two columns or more: query, positive, neg"),
    ({"data.dev.texts": ""}, r"config.data.texts = 'query,positive,negative': must name two columns, because scored"),
    ({"data.dev.label": "query"}, r"dev.jsonl:1: query is '.*', expected a number"),
    ({"data.dev.path": "nowhere"}, r"config.data.dev.path = 'nowhere': no such file or folder"),
    ({"data.path": "{folder}/train.jsonl"}, r"config.data.dev.path = '': data.dev has another form"),
    ({"data.texts": "query,document"}, r"train.jsonl:1: no column 'document'; choose data.texts from query, positive"),
    ({"data.texts": "query,empty"}, r"train.jsonl:1: empty is empty; an example needs 2 texts"),
    (SCORED | {"data.label": "one"}, r":1: one is '.*', expected a number"),
    (SCORED | {"data.label": "constant"}, r"train.jsonl: all scores, in column 'constant', are 3; use data with"),
    (LABELLED | {"data.label": "score"}, r"score is .*, expected 1 .* set form=scored"),
    ({"distill.what": "scores"}, r"config.distill.what = 'scores': needs a teacher"),
    ({"distill.what": "all"}, r"config.distill.what = 'all': choose one of vectors, scores, kl"),
    ({"distill.teacher": "{checkpoint}"}, r"config.distill.teacher = .*: computes no embeddings \(BertFor.*\)"),
    (TEACHER | {"head.dense": 8}, r"embeddings is 32, .* is 8; set head.dense=32, or "),
    (TEACHER | SENTENCES | {"distill.what": "scores"}, r"have no scores of pairs; set distill.what=v"),
    ({"distill.what": "kl"}, r"config.distill.what = 'kl': needs a teacher: set .*, or name the columns of the scores"),
    ({"data.label": "score,same"}, r"config.data.label = 'score,same': names scores of documents, which have no"),
    (GIVEN | {"data.label": "score,same,same"}, r"config.data.label = .*: must name 2 columns, the score of each"),
    (GIVEN | {"data.label": "score,one"}, r"train.jsonl:1: one is '.*', expected a number"),
    (GIVEN | {"data.label": "score,two"}, r"train.jsonl:1: no column 'two'; choose data.label from"),
    (GIVEN | TEACHER, r"config.distill.teacher = .*: cannot be combined with the scores of documents in data.label"),
    (TEACHER | SCORED | {"distill.what": "kl"}, r"config.data.texts = .*: distill.what=kl needs form=pairs with neg"),
    (TEACHER | {"distill.student_temperature": 0.1}, r"config.distill.student_temperature = 0.1: applies to distill"),
    (GIVEN | {"distill.teacher_temperature": -1.0}, r"config.distill.teacher_temperature = -1.0: must be above 0"),
    (TEACHER | {"distill.temperature": 3.0}, r"distill.temperature = 3.0: applies to logits, .*; leave the field"),
])  # fmt: skip
def test_mistakes_raise_errors_of_one_line(fields, message, teacher, checkpoint, tmp_path):
    rows = [row | {"empty": "", "constant": 3} for row in rows_of(20, 0)]
    write_table(tmp_path / "train.jsonl", rows)
    write_table(tmp_path / "dev.jsonl", rows)
    named = dict(folder=tmp_path, checkpoint=checkpoint, teacher=teacher)
    fields = {name: x.format(**named) if isinstance(x, str) else x for name, x in fields.items()}
    with pytest.raises(UserError, match=message) as error:
        config = config_for(tmp_path, checkpoint, **fields)
        validate(config)
        task_of(config, tmp_path)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize("fields, message", [
    (dict(form="scores"), r".form = 'scores': choose one of"),
    (dict(weight=0.0), r".weight = 0.0: must be above 0; or leave the set out"),
    (dict(path="{empty}"), r".path = '.*': the folder has no train.csv or train.tsv or train.jsonl"),
    (dict(texts="one,two"), r"train.jsonl:1: no column 'two'; choose data.texts from query, positive"),
    (dict(path="{empty}/one.csv"), r".path = '.*': has one example, expected at least 2, beca"),
    (dict(form="scored", label="score", document_prompt="none"), r".document_prompt = 'none': has no effect with form"),
    (dict(form="squad"), r".path = '.*': the folder has no train-v1.1.json or train-v2.0.json"),
    ("train.csv", r" = 'train.csv': must be text_set\(path, ...\)"),
])  # fmt: skip
def test_a_mistake_in_a_data_set_names_the_data_set(fields, message, folder, checkpoint, tmp_path):
    config = config_for(folder, checkpoint).unlock()
    write_table(tmp_path / "one.csv", rows_of(1, 0))
    if isinstance(fields, dict):
        source_fields = dict(path=str(folder), texts="query,positive") | fields
        fields = embed.text_set(**source_fields | {"path": source_fields["path"].format(empty=tmp_path)})
    config.data.sets.more = fields
    with pytest.raises(UserError, match="config.data.sets.more" + message if message[0] in ". " else message):
        validate(config)
        task_of(config, tmp_path)


def test_equal_texts_have_equal_numbers(checkpoint):
    """The prompt is part of the text: with different prompts, equal words of a query and a document are different
    inputs.
    """
    tokenizer = pretrained.read_pretrained(checkpoint).tokenizer
    text_set = datasets.TextSet([("ship", "sail"), ("sail", "ship"), ("ship", "wave")])
    for document, expected in (("", [[0, 1], [1, 0], [0, 2]]), ("rose ", [[0, 1], [2, 3], [0, 4]])):
        prompts = {datasets.QUERY: "", datasets.DOCUMENT: document}
        encoded = datasets.encode_set(text_set, "pairs", prompts, tokenizer, 16)
        assert encoded.numbers.tolist() == expected and len(encoded.examples) == np.max(expected) + 1
        labels = datasets.training_examples(encoded, text_set.labels).labels
        assert labels.tolist() == [[0, 1], [1, 0], [0, 2]]  # the excluded negatives do not depend on prompts
