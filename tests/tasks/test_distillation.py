"""A student learns from a teacher: its loss beside torch's, and what it learns where labels say nothing."""

import dataclasses
import random
import shutil

import flax.linen as nn
import jax
import numpy as np
import pytest

from bertjax.config import BertConfig, UserError, fine_tuning_config
from bertjax.families.modernbert import ModernBertConfig
from bertjax.interop import huggingface, pretrained, resizing
from bertjax.tasks import classification, distillation, finetuning, finetuning_run, metrics, squad, validate
from bertjax.tasks.launch import launch
from bertjax.tasks.losses import CrossEntropy, Distilled, SigmoidCrossEntropy, SquaredError
from tests.conftest import TOPICS, one_device_mesh
from tests.tasks.test_classify import LABELS, write_table
from tests.tasks.test_classify import config_for as classify_config

pytestmark = pytest.mark.usefixtures("on_one_device")


def rows_of(count, seed, labels=LABELS):
    """Texts about one topic each, with its label, or with one at random."""
    rng = random.Random(seed)
    topics = rng.choices(sorted(TOPICS), k=count)
    texts = [" ".join(rng.choices(TOPICS[topic], k=4)) for topic in topics]
    given = topics if labels is LABELS else rng.choices(labels, k=count)
    return [{"text": text, "label": label} for text, label in zip(texts, given)]


def config_for(folder, checkpoint, **fields):
    config = classify_config(folder, checkpoint, label="label", multi_label="")
    config.update_from_flattened_dict(fields)
    return config


def data(folder, train, dev):
    folder.mkdir(exist_ok=True)
    for name, rows in (("train", train), ("dev", dev)):
        write_table(folder / f"{name}.jsonl", rows)
    return folder


@pytest.fixture(scope="module")
def teacher(checkpoint, tmp_path_factory):
    folder = data(tmp_path_factory.mktemp("teacher"), rows_of(200, 0), rows_of(40, 1))
    launch(config_for(folder, checkpoint), folder / "run")
    assert pretrained.read(folder / "run").scores["accuracy"] > 0.9
    return folder / "run"


@pytest.fixture(scope="module")
def untold(tmp_path_factory):
    """Training texts whose labels are random, and a dev set whose labels are right."""
    return data(tmp_path_factory.mktemp("untold"), rows_of(200, 2, list(LABELS)), rows_of(40, 3))


@pytest.mark.slow
def test_a_student_learns_what_the_teacher_says_where_labels_say_nothing(teacher, untold, checkpoint, tmp_path):
    fields = {"distill.teacher": str(teacher), "distill.weight": 1.0, "epochs": 8.0}
    config = config_for(untold, checkpoint, **fields)
    validate(config)
    launch(config, tmp_path)
    assert pretrained.read(tmp_path).scores["accuracy"] > 0.9


@pytest.mark.slow
def test_batches_have_the_teachers_logits_of_their_examples(teacher, untold, checkpoint, tmp_path):
    """Padded and packed: those that the teacher gives each text, in the order of the data's labels."""
    config = config_for(untold, checkpoint, **{"distill.teacher": str(teacher), "packing": True})
    finetuning_run.adopt(config, None)
    dataset = finetuning_run.load_material(config, tmp_path, None).dataset
    train, logits = dataset.train, dataset.train.teacher_logits
    assert len(logits) == len(train) == 200
    source, rows = pretrained.read(teacher), rows_of(200, 2, list(LABELS))[:8]
    predicted = classification.predict(source, [(row["text"],) for row in rows])
    expected = [[each["probabilities"][label] for label in LABELS] for each in predicted]
    np.testing.assert_allclose([metrics.softmax(each) for each in logits[:8]], expected, rtol=1e-4, atol=1e-6)
    padded = train.batch(np.array([5, 0, -1]), 16)["teacher_logits"]
    np.testing.assert_array_equal(padded, [logits[5], logits[0], np.zeros(len(LABELS))])
    batch = next(finetuning.FineTuning(config, one_device_mesh(config), dataset).batches(0))
    known = {tuple(ids): each for ids, each in zip(train.input_ids, logits)}
    rows, numbers = np.nonzero(batch["weights"])
    for row, number in zip(rows, numbers):
        ids = batch["input_ids"][row][batch["segments"][row] == number + 1]
        np.testing.assert_array_equal(batch["teacher_logits"][row, number], known[tuple(ids)])
    assert len(rows) == 16
    # Another order of the labels: that of the data counts.
    assert distillation._order(source, dataset.output_layer, LABELS[::-1], "") == [3, 2, 1, 0]


@pytest.mark.parametrize("kind", ["classes", "labels", "number"])
def test_the_loss_and_its_gradient_are_torchs(kind):
    torch = pytest.importorskip("torch")
    F = torch.nn.functional

    rng, heat, weight = np.random.default_rng(0), 3.0, 0.7
    logits, theirs = rng.normal(size=(2, 6, 1 if kind == "number" else 4)).astype(np.float32)
    ours, teacher = torch.tensor(logits, requires_grad=True), torch.tensor(theirs)
    if kind == "classes":
        labels, loss = rng.integers(0, 4, 6), CrossEntropy(label_smoothing=0.1)
        hard = F.cross_entropy(ours, torch.tensor(labels), label_smoothing=0.1)
        soft = F.kl_div(torch.log_softmax(ours / heat, -1), torch.softmax(teacher / heat, -1), reduction="batchmean")
    elif kind == "labels":
        labels, loss = rng.integers(0, 2, (6, 4)), SigmoidCrossEntropy()
        hard = F.binary_cross_entropy_with_logits(ours, torch.tensor(labels).float())
        chances, shares = torch.sigmoid(ours / heat), torch.sigmoid(teacher / heat)
        soft = (shares * (shares / chances).log() + (1 - shares) * ((1 - shares) / (1 - chances)).log()).mean()
    else:
        labels, loss = rng.normal(size=6).astype(np.float32), SquaredError()
        hard, soft = F.mse_loss(ours[:, 0], torch.tensor(labels)), F.mse_loss(ours, teacher) / heat**2
    expected = (1 - weight) * hard + weight * heat**2 * soft
    expected.backward()

    def distilled(logits):
        return Distilled(loss, heat, weight)(logits, {"labels": labels, "teacher_logits": theirs})[0].mean()

    value, gradient = jax.jit(jax.value_and_grad(distilled))(logits)
    np.testing.assert_allclose(value, expected.item(), rtol=1e-5)
    np.testing.assert_allclose(gradient, ours.grad.numpy(), atol=1e-6)


@pytest.mark.slow
def test_the_logits_stay_when_the_teacher_is_gone_and_are_those_of_this_teacher(teacher, untold, checkpoint, tmp_path):
    shutil.copytree(teacher, tmp_path / "teacher")

    def logits(folder=untold, path=tmp_path / "teacher"):
        config = config_for(folder, checkpoint, **{"distill.teacher": str(path)})
        finetuning_run.adopt(config, None)
        return finetuning_run.load_material(config, tmp_path, None).dataset.train.teacher_logits

    first = logits()
    shutil.rmtree(tmp_path / "teacher")
    np.testing.assert_array_equal(logits(), first)
    with pytest.raises(UserError, match=r"no checkpoint in .*teacher"):  # of other examples
        logits(data(tmp_path / "other", rows_of(20, 5), rows_of(20, 6)))
    np.testing.assert_array_equal(logits(path=teacher), first)


@pytest.mark.slow
def test_a_student_begins_with_every_nth_layer_of_the_teacher(teacher, untold, checkpoint, tmp_path):
    source = pretrained.read(checkpoint)
    bert = source.params["bert"]
    bert = bert | {"encoder": jax.tree.map(lambda x: np.concatenate([x, x + 1]), bert["encoder"])}
    two = dataclasses.replace(source.config, num_hidden_layers=2)
    (tmp_path / "two").mkdir()
    huggingface.write(tmp_path / "two", two, source.params | {"bert": bert}, source.tokenizer)
    config = config_for(untold, tmp_path / "two", keep_layers=1)
    finetuning_run.adopt(config, None)
    opened = finetuning_run.open_run(config, tmp_path, None)
    params = opened.initialize(nn.meta.unbox(jax.jit(opened.task.init_params)(jax.random.key(0))))
    kept = params["bert"]["encoder"]["layers"]["output"]["kernel"]
    assert len(kept) == 1 and np.array_equal(kept[0], bert["encoder"]["layers"]["output"]["kernel"][1])
    search = config_for(untold, tmp_path / "two", keep_layers=1, sweep="seed=0")
    finetuning_run.adopt(search, None)
    finetuning_run.adopt(search, None)  # of the search, and of its trial
    assert search.model.num_hidden_layers == 1
    arrays = {"bert/encoder/layers/output/bias": np.arange(12), "bert/embeddings/norm/bias": np.arange(3)}
    for layers, kept in ((6, [1, 3, 5, 7, 9, 11]), (4, [2, 5, 8, 11]), (5, [1, 3, 6, 8, 11]), (12, list(range(12)))):
        found = resizing.with_layers(arrays, BertConfig(), layers)
        assert found["bert/encoder/layers/output/bias"].tolist() == kept
        assert found["bert/embeddings/norm/bias"].tolist() == [0, 1, 2]
    with pytest.raises(UserError, match=r"layers of model.family = 'modernbert' are not alike"):
        resizing.with_layers({"bert/encoder/first/output/kernel": np.zeros(3)}, ModernBertConfig(), 2)


@pytest.mark.slow
@pytest.mark.parametrize("fields, message", [
    ({"distill.temperature": 0.0}, r"config.distill.temperature = 0.0: must be above 0"),
    ({"data.label": "topics", "data.multi_label": "list"}, r"is of another kind of task \(BertForSequenceClassific"),
    ({"distill.teacher": "", "distill.weight": 0.9}, r"config.distill.weight = 0.9: there is no teacher"),
    ({"lora.alpha": 3.0}, r"config.lora.alpha = 3.0: there are no low-rank updates: set lora.rank"),
    ({"distill.weight": 1.5}, r"config.distill.weight = 1.5: must be above 0 and at most 1"),
    ({"keep_layers": 2}, r"config.keep_layers = 2: .* has 1; choose fewer"),
    ({"distill.teacher": "nowhere"}, r"no checkpoint in 'nowhere'"),
    ({"distill.teacher": "{checkpoint}"}, r"config.distill.teacher = .*: has no classifier; choose a fine-tuned"),
    ({"head.class_weights": "balanced"}, r"does not know the weights of head.class_weights"),
    ({"data.is_number": True, "data.label": "number"}, r"has other labels: 4 rows; the data has one number"),
    ({"data.label": "other"}, r"has other labels: court, garden, kitchen, sea; the data has a, b"),
])  # fmt: skip
def test_a_mistake_is_one_line(fields, message, teacher, checkpoint, tmp_path):
    rows = rows_of(20, 4)
    rows = [row | {"number": i, "other": "ab"[i % 2], "topics": [row["label"]]} for i, row in enumerate(rows)]
    fields = {"distill.teacher": str(teacher)} | fields
    fields = {name: x.format(checkpoint=checkpoint) if isinstance(x, str) else x for name, x in fields.items()}
    config = config_for(data(tmp_path / "data", rows, rows), checkpoint, **fields)
    with pytest.raises(UserError, match=message):
        validate(config)
        launch(config, tmp_path / "run")


@pytest.mark.slow
def test_what_has_no_classes_has_no_teacher(teacher):
    config = fine_tuning_config("squad")
    config.distill.teacher = str(teacher)
    dataset = finetuning.Dataset(squad.output_layers.spans(), (), None, (), "f1")
    with pytest.raises(UserError, match=r"config.distill.teacher = .*: this task has no classes, numbers or tags"):
        distillation._logits(config, dataset, None)
