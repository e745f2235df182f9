"""A student learns from a teacher: its loss beside torch's, and what it learns where labels say nothing."""

import random
import shutil

import flax.linen as nn
import jax
import numpy as np
import pytest

from bertjax.config import BertConfig, UserError, fine_tuning_config
from bertjax.families.modernbert import ModernBertConfig
from bertjax.interop import pretrained, resizing
from bertjax.sharding.mesh import make_mesh
from bertjax.tasks import distillation, finetuning, finetuning_run, squad, validate
from bertjax.tasks.launch import launch
from bertjax.tasks.losses import CrossEntropy, Distilled, SigmoidCrossEntropy, SquaredError
from bertjax.training import checkpoint as checkpoints
from tests.conftest import TOPICS, launch_and_stop, one_device_mesh
from tests.tasks.test_classify import LABELS, write_table

pytestmark = pytest.mark.usefixtures("on_one_device")


def rows_of(count, seed, labels=LABELS):
    """Texts about one topic each, with its label, or with one at random."""
    rng = random.Random(seed)
    topics = rng.choices(sorted(TOPICS), k=count)
    texts = [" ".join(rng.choices(TOPICS[topic], k=4)) for topic in topics]
    given = topics if labels is LABELS else rng.choices(labels, k=count)
    return [{"text": text, "label": label} for text, label in zip(texts, given)]


def config_for(folder, checkpoint, **fields):
    config = fine_tuning_config("classify", text="text", second_text="", label="label", multi_label="", is_number=False)
    config.data.path, config.init_checkpoint = str(folder), str(checkpoint)
    config.update(dict(batch_size=16, max_seq_length=32, log_every_steps=5, epochs=4.0, dtype="float32"))
    config.optimizer.learning_rate = 3e-3
    config.model.update(hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0)
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


def test_a_student_learns_what_the_teacher_says_where_labels_say_nothing(teacher, untold, checkpoint, tmp_path):
    fields = {"distill.teacher": str(teacher), "distill.weight": 1.0, "epochs": 8.0}
    config = config_for(untold, checkpoint, **fields)
    validate(config)
    launch(config, tmp_path)
    assert pretrained.read(tmp_path).scores["accuracy"] > 0.9


def test_batches_have_the_teachers_logits_of_their_examples(teacher, untold, checkpoint, tmp_path):
    """Padded and packed: those that the teacher gives each text, in the order of the data's labels."""
    config = config_for(untold, checkpoint, **{"distill.teacher": str(teacher)})
    finetuning_run.adopt(config, None)
    material = finetuning_run.load_material(config, tmp_path, None)
    train, source = material.dataset.train, pretrained.read(teacher)
    assert len(train.teacher_logits) == len(train) == 200
    padded = train.batch(np.array([5, 0, -1]), 16)["teacher_logits"]
    np.testing.assert_array_equal(padded, [train.teacher_logits[5], train.teacher_logits[0], np.zeros(len(LABELS))])
    config.packing = True
    task = finetuning.FineTuning(config, one_device_mesh(config), material.dataset)
    batch = next(task.batches(0))
    known = {tuple(ids): logits for ids, logits in zip(train.input_ids, train.teacher_logits)}
    rows, numbers = np.nonzero(batch["weights"])
    for row, number in zip(rows, numbers):
        ids = batch["input_ids"][row][batch["segments"][row] == number + 1]
        np.testing.assert_array_equal(batch["teacher_logits"][row, number], known[tuple(ids)])
    assert len(rows) == 16
    # Another order of the labels: that of the data counts.
    turned = distillation._order(source, material.dataset.output_layer, tuple(reversed(LABELS)), "")
    assert turned == [3, 2, 1, 0]


@pytest.mark.slow
def test_a_student_resumes_bit_for_bit_on_eight_devices(teacher, untold, checkpoint, tmp_path, monkeypatch):
    """With smoothed labels and low-rank updates."""
    monkeypatch.setattr(finetuning_run, "make_mesh", make_mesh)

    def config():
        fields = {"distill.teacher": str(teacher), "head.label_smoothing": 0.1, "epochs": 1.0}
        config = config_for(untold, checkpoint, **fields)
        config.lora.update(rank=2, dropout=0.2, targets="query,value")
        config.mesh.update(data=4, fsdp=2)
        config.checkpoint.every_steps = 5
        return config

    launch(config(), tmp_path / "straight")
    launch_and_stop(finetuning.FineTuning, config(), tmp_path / "resumed", step=8)
    launch(config(), tmp_path / "resumed")
    straight, resumed = (
        pretrained.flattened(checkpoints.read_params(tmp_path / name, 13)) for name in ("straight", "resumed")
    )
    assert all(np.array_equal(straight[name], resumed[name]) for name in straight | resumed)


@pytest.mark.parametrize("kind", ["classes", "labels", "number"])
def test_the_loss_and_its_gradient_are_torchs(kind):
    torch = pytest.importorskip("torch")
    rng, heat, weight = np.random.default_rng(0), 3.0, 0.7
    logits, theirs = rng.normal(size=(2, 6, 1 if kind == "number" else 4)).astype(np.float32)
    given = torch.tensor(logits, requires_grad=True)
    if kind == "classes":
        labels = rng.integers(0, 4, 6)
        loss = CrossEntropy(label_smoothing=0.1)
        hard = torch.nn.functional.cross_entropy(given, torch.tensor(labels), label_smoothing=0.1)
        soft = torch.nn.functional.kl_div(
            torch.log_softmax(given / heat, -1), torch.softmax(torch.tensor(theirs) / heat, -1), reduction="batchmean"
        )
    elif kind == "labels":
        labels, loss = rng.integers(0, 2, (6, 4)), SigmoidCrossEntropy()
        hard = torch.nn.functional.binary_cross_entropy_with_logits(given, torch.tensor(labels).float())
        ours, shares = torch.sigmoid(given / heat), torch.sigmoid(torch.tensor(theirs) / heat)
        soft = (shares * (shares / ours).log() + (1 - shares) * ((1 - shares) / (1 - ours)).log()).mean()
    else:
        labels, loss = rng.normal(size=6).astype(np.float32), SquaredError()
        hard = torch.nn.functional.mse_loss(given[:, 0], torch.tensor(labels))
        soft = torch.nn.functional.mse_loss(given, torch.tensor(theirs)) / heat**2
    expected = (1 - weight) * hard + weight * heat**2 * soft
    expected.backward()

    def ours(logits):
        return Distilled(loss, heat, weight)(logits, {"labels": labels, "teacher_logits": theirs})[0].mean()

    value, gradient = jax.value_and_grad(ours)(logits)
    np.testing.assert_allclose(value, expected.item(), rtol=1e-5)
    np.testing.assert_allclose(gradient, given.grad.numpy(), atol=1e-6)


def test_the_logits_stay_when_the_teacher_is_gone_and_are_those_of_this_teacher(teacher, untold, checkpoint, tmp_path):
    shutil.copytree(teacher, tmp_path / "teacher")

    def logits(folder=untold, **fields):
        config = config_for(folder, checkpoint, **({"distill.teacher": str(tmp_path / "teacher")} | fields))
        finetuning_run.adopt(config, None)
        return finetuning_run.load_material(config, tmp_path, None).dataset.train.teacher_logits

    first = logits()
    shutil.rmtree(tmp_path / "teacher")
    assert all((one == other).all() for one, other in zip(logits(), first, strict=True))
    with pytest.raises(UserError, match=r"no checkpoint in .*teacher"):  # of other examples
        logits(data(tmp_path / "other", rows_of(20, 5), rows_of(20, 6)))
    again = logits(**{"distill.teacher": str(teacher)})
    assert all((one == other).all() for one, other in zip(again, first, strict=True))


@pytest.mark.slow
def test_a_student_begins_with_every_nth_layer_of_the_teacher(teacher, untold, checkpoint, tmp_path):
    config = config_for(untold, teacher, keep_layers=1)
    finetuning_run.adopt(config, None)
    opened = finetuning_run.open_run(config, tmp_path, None)
    params = opened.initialize(nn.meta.unbox(jax.jit(opened.task.init_params)(jax.random.key(0))))
    ours, theirs = (pretrained.flattened(each) for each in (params, pretrained.read(teacher).params))
    name = "bert/encoder/layers/output/kernel"
    assert ours[name].shape[0] == 1 and np.array_equal(ours[name][0], theirs[name][1])
    search = config_for(untold, teacher, keep_layers=1, sweep="seed=0")
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


@pytest.mark.parametrize(
    "fields, message",
    [
        ({"distill.temperature": 0.0}, r"config.distill.temperature = 0.0: must be above 0"),
        (
            {"data.label": "topics", "data.multi_label": "list"},
            r"is of another kind of task \(BertForSequenceClassific",
        ),
        ({"distill.teacher": "", "distill.weight": 0.9}, r"config.distill.weight = 0.9: there is no teacher"),
        ({"lora.alpha": 3.0}, r"config.lora.alpha = 3.0: there are no low-rank updates: set lora.rank"),
        ({"distill.weight": 1.5}, r"config.distill.weight = 1.5: must be above 0 and at most 1"),
        ({"keep_layers": 3}, r"config.keep_layers = 3: .* has 2; choose fewer"),
        ({"distill.teacher": "nowhere"}, r"no checkpoint in 'nowhere'"),
        ({"distill.teacher": "{checkpoint}"}, r"config.distill.teacher = .*: has no classifier; choose a fine-tuned"),
        ({"head.class_weights": "balanced"}, r"does not know the weights of head.class_weights"),
        ({"data.is_number": True, "data.label": "number"}, r"has other labels: 4 rows; the data has one number"),
        ({"data.label": "other"}, r"has other labels: court, garden, kitchen, sea; the data has a, b"),
    ],
)
def test_a_mistake_is_one_line(fields, message, teacher, checkpoint, tmp_path):
    rows = [
        each | {"number": i, "other": "ab"[i % 2], "topics": [each["label"]]} for i, each in enumerate(rows_of(20, 4))
    ]
    folder = data(tmp_path / "data", rows, rows)
    given = {"distill.teacher": str(teacher)} | fields
    given = {name: x.format(checkpoint=checkpoint) if isinstance(x, str) else x for name, x in given.items()}
    config = config_for(folder, checkpoint, **given)
    with pytest.raises(UserError, match=message):
        validate(config)
        launch(config, tmp_path / "run")


def test_what_has_no_classes_has_no_teacher(teacher):
    config = fine_tuning_config("squad")
    config.distill.teacher = str(teacher)
    dataset = finetuning.Dataset(squad.output_layers.spans(), (), None, (), "f1")
    with pytest.raises(UserError, match=r"config.distill.teacher = .*: this task has no classes, numbers or tags"):
        distillation._logits(config, dataset, None)
