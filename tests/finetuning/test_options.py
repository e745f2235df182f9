"""Options of fine-tuning: windows of long texts, distillation, frozen layers, LoRA, early stopping."""

import dataclasses
import itertools
import math
import random
import shutil

import flax.linen as nn
import jax
import numpy as np
import pytest
from flax.traverse_util import flatten_dict

from bertjax.common.errors import UserError
from bertjax.config.defaults import param_group, param_groups
from bertjax.config.model_config import BertConfig
from bertjax.distributed.mesh import make_mesh, put_batch
from bertjax.finetuning import classification, distillation, encoding, metrics
from bertjax.finetuning import run as finetuning_run
from bertjax.finetuning.task import FineTuning
from bertjax.finetuning.tasks import classify
from bertjax.inference import heads
from bertjax.interop import huggingface, pretrained, resizing
from bertjax.launch.validate import validate
from bertjax.models.modernbert.config import ModernBertConfig
from bertjax.text.tokenizer import SPECIAL_TOKENS, WordPiece
from bertjax.training.checkpoints import checkpoint as checkpoints
from bertjax.training.optim.schedules import schedule_of
from bertjax.training.step import Program, put_hyperparameters
from tests.conftest import TOPICS, launch_and_stop, one_device_mesh, pretraining_task, tiny_config
from tests.finetuning.test_classify import LABELS, write_table, write_topics
from tests.finetuning.test_classify import config_for as classify_config
from tests.finetuning.test_finetuning import config_for as glue_config
from tests.finetuning.test_finetuning import run, write_sst2

PIECES = WordPiece([*SPECIAL_TOKENS, *"abcdefghijklmnopqrstuvwxyz"], lowercase=True)


# Windows of texts that are longer than a sequence.


@pytest.mark.parametrize("stride", [1, 3, 5, 100])
def test_windows_cover_the_whole_text(stride):
    texts = [" ".join("abcdefghijklmnopqrstuvwxyz"[:length]) for length in (1, 6, 7, 20, 26)]
    ids, types, owners, lost = encoding.encode_windows(PIECES, texts, None, 8, stride)
    short, short_types, _ = encoding.encode_pairs(PIECES, texts[:2], None, 8)
    assert not any(lost) and owners.tolist()[:3] == [0, 1, 2] and sorted(owners) == owners.tolist()
    for which in (0, 1):
        np.testing.assert_array_equal(ids[which], short[which])
        np.testing.assert_array_equal(types[which], short_types[which])
    for number, text in enumerate(texts):
        windows = [ids_of_window[1:-1].tolist() for ids_of_window, owner in zip(ids, owners) if owner == number]
        assert {i for window in windows for i in window} == set(PIECES.encode(text).ids)
        steps = np.diff([window[0] for window in windows])
        assert (steps == min(stride, 6)).all() and all(len(window) <= 6 for window in windows)
        assert all(ids_of_window[0] == PIECES.cls_id and ids_of_window[-1] == PIECES.sep_id for ids_of_window in ids)


def test_all_windows_of_a_pair_contain_the_first_text():
    ids, types, owners, lost = encoding.encode_windows(
        PIECES, ["a b", "a b c d e f"], ["c d e f g h i j", "x y z"], 9, 2
    )
    decoded = [PIECES.decode(ids_of_window) for ids_of_window in ids]
    expected = [*(f"[CLS] a b [SEP] {window} [SEP]" for window in ("c d e f", "e f g h", "g h i j"))]
    assert decoded == [*expected, "[CLS] a b c [SEP] x y z [SEP]"]
    assert lost == [0, 3] and owners.tolist() == [0, 0, 0, 1]
    assert types[0].tolist() == [0, 0, 0, 0, 1, 1, 1, 1, 1] and types[3].tolist() == [0, 0, 0, 0, 0, 1, 1, 1, 1]


def test_window_logits_are_combined_by_text():
    logits, owners = [np.array(row, np.float32) for row in ([1, 4], [3, 2], [7, 7])], np.array([0, 0, 1])
    assert np.array_equal(classification.Windows("mean", 1).combined(logits, owners), [[2, 3], [7, 7]])
    assert np.array_equal(classification.Windows("max", 1).combined(logits, owners), [[3, 4], [7, 7]])


@pytest.fixture(scope="module")
def late(tmp_path_factory):
    """Texts whose topic follows from the last words alone."""
    folder, rng = tmp_path_factory.mktemp("late"), random.Random(0)
    for name, count in (("train", 240), ("dev", 60)):
        topics = rng.choices(sorted(TOPICS), k=count)
        texts = [" ".join([*"abcdefgh"] * 3 + rng.choices(TOPICS[topic], k=4)) for topic in topics]
        rows = [{"text": text, "topics": topic} for text, topic in zip(texts, topics)]
        write_table(folder / f"{name}.jsonl", rows)
    return folder, rows


@pytest.mark.slow
def test_windows_train_on_words_beyond_the_truncation(late, checkpoint, tmp_path):
    folder, dev = late
    config = classify_config(folder, checkpoint, multi_label="", windows="mean", doc_stride=12)
    config.update(dict(max_seq_length=16, epochs=4.0, packing=True))
    run(config, tmp_path)
    source = pretrained.read_pretrained(tmp_path)
    accuracy = source.scores["accuracy"]
    cut, _, _ = encoding.encode_pairs(source.tokenizer, [row["text"] for row in dev], None, 16)
    assert accuracy > 0.9 and len({tuple(ids) for ids in cut}) == 1  # truncated texts are all equal
    predictions = list(classify.TASK.predict(source, [(row["text"],) for row in dev]))
    right = [prediction["label"] == row["topics"] for prediction, row in zip(predictions, dev)]
    assert len(predictions) == len(dev) and np.mean(right) == pytest.approx(accuracy) and "cut" not in predictions[0]


# Distillation.


@pytest.fixture(scope="session")
def two_layers(checkpoint, built_once):
    """A checkpoint of two layers."""

    def build(folder):
        source = pretrained.read_pretrained(checkpoint)
        bert = source.params["bert"]
        bert = bert | {"encoder": jax.tree.map(lambda x: np.concatenate([x, x + 0.01]), bert["encoder"])}
        config = dataclasses.replace(source.config, num_hidden_layers=2)
        huggingface.write(folder, config, source.params | {"bert": bert}, source.tokenizer)

    return built_once("two-layers", build)


def rows_of(count, seed, labels=LABELS):
    """Texts about one topic each, labelled with the topic or with a random topic."""
    rng = random.Random(seed)
    topics = rng.choices(sorted(TOPICS), k=count)
    texts = [" ".join(rng.choices(TOPICS[topic], k=4)) for topic in topics]
    row_labels = topics if labels is LABELS else rng.choices(labels, k=count)
    return [{"text": text, "label": label} for text, label in zip(texts, row_labels)]


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
    run(config_for(folder, checkpoint), folder / "run")
    assert pretrained.read_pretrained(folder / "run").scores["accuracy"] > 0.9
    return folder / "run"


@pytest.fixture(scope="module")
def untold(tmp_path_factory):
    """Training texts with random labels, and a dev set with correct labels."""
    return data(tmp_path_factory.mktemp("untold"), rows_of(200, 2, list(LABELS)), rows_of(40, 3))


@pytest.mark.slow
def test_a_student_reaches_the_teacher_with_random_labels(teacher, untold, checkpoint, tmp_path):
    fields = {"distill.teacher": str(teacher), "distill.weight": 1.0, "epochs": 8.0}
    run(config_for(untold, checkpoint, **fields), tmp_path)
    assert pretrained.read_pretrained(tmp_path).scores["accuracy"] > 0.9


@pytest.mark.slow
def test_batches_have_the_teacher_logits_of_the_examples(teacher, untold, checkpoint, tmp_path):
    """Padded and packed batches have the teacher logits of each text, in the label order of the data."""
    config = config_for(untold, checkpoint, **{"distill.teacher": str(teacher), "packing": True})
    config, _ = finetuning_run.resolve(config, None)
    dataset = finetuning_run.load_inputs(config, tmp_path, None).data
    train, logits = dataset.train, dataset.train.teacher_logits
    assert len(logits) == len(train) == 200
    source, rows = pretrained.read_pretrained(teacher), rows_of(200, 2, list(LABELS))[:8]
    predicted = classify.TASK.predict(source, [(row["text"],) for row in rows])
    expected = [[item["probabilities"][label] for label in LABELS] for item in predicted]
    np.testing.assert_allclose([metrics.softmax(item) for item in logits[:8]], expected, rtol=1e-4, atol=1e-6)
    padded = train.batch(np.array([5, 0, -1]), 16)["teacher_logits"]
    np.testing.assert_array_equal(padded, [logits[5], logits[0], np.zeros(len(LABELS))])
    batch = next(FineTuning(config, one_device_mesh(config), dataset).batches(0))
    known = {tuple(ids): item for ids, item in zip(train.input_ids, logits)}
    rows, numbers = np.nonzero(batch["weights"])
    for row, number in zip(rows, numbers):
        ids = batch["input_ids"][row][batch["segments"][row] == number + 1]
        np.testing.assert_array_equal(batch["teacher_logits"][row, number], known[tuple(ids)])
    assert len(rows) == 16
    with pytest.raises(UserError, match=r"config.distill.teacher = .*: this task has no classes, numbers or tags"):
        distillation._teacher_targets(config, dataclasses.replace(dataset, head=heads.SpanHead()), None)
    # The teacher has another label order: logits follow the label order of the data.
    assert distillation._order(source, dataset.head, LABELS[::-1], "") == [3, 2, 1, 0]


@pytest.mark.slow
def test_teacher_logits_are_cached_for_one_teacher(teacher, untold, checkpoint, tmp_path):
    shutil.copytree(teacher, tmp_path / "teacher")

    def logits(folder=untold, path=tmp_path / "teacher"):
        config = config_for(folder, checkpoint, **{"distill.teacher": str(path)})
        config, _ = finetuning_run.resolve(config, None)
        return finetuning_run.load_inputs(config, tmp_path, None).data.train.teacher_logits

    first = logits()
    shutil.rmtree(tmp_path / "teacher")
    np.testing.assert_array_equal(logits(), first)
    with pytest.raises(UserError, match=r"no checkpoint in .*teacher"):  # of other examples
        logits(data(tmp_path / "other", rows_of(20, 5), rows_of(20, 6)))
    np.testing.assert_array_equal(logits(path=teacher), first)


@pytest.mark.slow
def test_a_student_starts_from_every_nth_layer_of_the_teacher(untold, two_layers, tmp_path):
    bert = pretrained.read_pretrained(two_layers).params["bert"]
    config = config_for(untold, two_layers, keep_layers=1)
    config, _ = finetuning_run.resolve(config, None)
    opened = finetuning_run.KIND.open(config, tmp_path, None)
    params = opened.initial_params(nn.meta.unbox(jax.jit(opened.task.init_params)(jax.random.key(0))))
    kept = params["bert"]["encoder"]["layers"]["output"]["kernel"]
    assert len(kept) == 1 and np.array_equal(kept[0], bert["encoder"]["layers"]["output"]["kernel"][1])
    search = config_for(untold, two_layers, keep_layers=1, sweep="seed=0")
    search, _ = finetuning_run.resolve(search, None)
    search, _ = finetuning_run.resolve(search, None)  # the sweep resolves the config, then its trial does
    assert search.model.num_hidden_layers == 1
    arrays = {"bert/encoder/layers/output/bias": np.arange(12), "bert/embeddings/norm/bias": np.arange(3)}
    for layers, kept in ((6, [1, 3, 5, 7, 9, 11]), (4, [2, 5, 8, 11]), (5, [1, 3, 6, 8, 11]), (12, list(range(12)))):
        arrays_kept = resizing.with_layers(arrays, BertConfig(), layers)
        assert arrays_kept["bert/encoder/layers/output/bias"].tolist() == kept
        assert arrays_kept["bert/embeddings/norm/bias"].tolist() == [0, 1, 2]
    with pytest.raises(UserError, match=r"layers of model.family = 'modernbert' share params or differ"):
        resizing.with_layers({"bert/encoder/first/output/kernel": np.zeros(3)}, ModernBertConfig(), 2)


@pytest.mark.slow
@pytest.mark.parametrize("fields, message", [
    ({"distill.temperature": 0.0}, r"config.distill.temperature = 0.0: must be above 0"),
    ({"data.label": "topics", "data.multi_label": "list"}, r"was fine-tuned for another type of task \(BertForS"),
    ({"distill.teacher": "", "distill.weight": 0.9}, r"config.distill.weight = 0.9: needs a teacher"),
    ({"lora.alpha": 3.0}, r"config.lora.alpha = 3.0: needs low-rank updates: set lora.rank"),
    ({"distill.weight": 1.5}, r"config.distill.weight = 1.5: must be above 0 and at most 1"),
    ({"keep_layers": 2}, r"config.keep_layers = 2: .* has 1 layers; set at most 1"),
    ({"distill.teacher": "{checkpoint}"}, r"config.distill.teacher = .*: has no classifier; choose a fine-tuned"),
    ({"head.class_weights": "balanced"}, r"cannot be combined with head.class_weights"),
    ({"data.is_number": True, "data.label": "number"}, r"has the labels 4 rows, but the data has one number"),
    ({"data.label": "other"}, r"has the labels court, garden, kitchen, sea, but the data has a, b"),
])  # fmt: skip
def test_mistakes_raise_errors_of_one_line(fields, message, teacher, checkpoint, tmp_path):
    rows = rows_of(20, 4)
    rows = [row | {"number": i, "other": "ab"[i % 2], "topics": [row["label"]]} for i, row in enumerate(rows)]
    fields = {"distill.teacher": str(teacher)} | fields
    fields = {name: x.format(checkpoint=checkpoint) if isinstance(x, str) else x for name, x in fields.items()}
    config = config_for(data(tmp_path / "data", rows, rows), checkpoint, **fields)
    with pytest.raises(UserError, match=message):
        run(config, tmp_path / "run")


# Frozen layers, early stopping.


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("glue")
    write_sst2(folder, train=96, dev=16)
    return folder


def params_of(workdir, step):
    return flatten_dict(checkpoints.read_params(workdir, step), sep="/")


@pytest.mark.slow
def test_frozen_layers_stay_constant_and_resume_gives_identical_params(folder, two_layers, capsys):
    def config(freeze_layers=1, still="pooler/dense/bias"):
        config = glue_config(folder, two_layers, epochs=1.0, freeze_layers=freeze_layers)
        config.optimizer.layer_decay, config.checkpoint.every_steps = 0.9, 2
        config.optimizer.groups = param_groups(still=param_group(still, learning_rate_factor=0.0))
        return config

    run(config(), folder / "straight")
    printed = capsys.readouterr().out
    launch_and_stop(FineTuning, config(), folder / "stopped", step=3)
    for changed, field in ((config(0), "freeze_layers = 0"), (config(1, "masked"), "groups.still.params = 'masked'")):
        with pytest.raises(UserError, match=f"{field}: .* holds a run with"):
            run(changed, folder / "stopped")
    run(config(), folder / "stopped")
    straight, resumed = (params_of(folder / name, 6) for name in ("straight", "stopped"))
    assert all(np.array_equal(straight[name], resumed[name]) for name in straight | resumed)

    before, stays = flatten_dict(pretrained.read_pretrained(two_layers).params, sep="/"), {}
    for name in straight.keys() & before.keys():
        change = np.abs(straight[name] - before[name])
        stays[name] = (change == 0).reshape(len(change), -1).all(1).tolist()
    stacked = {name for name in stays if "layers" in name and not name.endswith("query_key_value/bias")}
    assert all(stays[name] == [True, False] for name in stacked) and len(stacked) == 11
    still = {name for name, rows in stays.items() if all(rows)}
    assert still == {name for name in before if "embeddings" in name} | {"bert/pooler/dense/bias"}

    trained = sum(x.size // (2 if "layers" in name else 1) for name, x in straight.items() if name not in still)
    every = sum(x.size for x in straight.values())
    sizes = [2 * 4 * count + 4 for count in (trained, every)]  # two moments, and the step count of Adam
    counts = f"trains {trained:,} of {every:,} params"
    assert f"{counts}; the optimizer's state has {sizes[0]:,} bytes, not {sizes[1]:,}\n" in printed


@pytest.mark.slow
def test_early_stopping_ends_a_run_and_a_sweep_for_good(folder, checkpoint, capsys):
    """With a negligible learning rate, the second epoch has an equal score."""

    def config(**fields):
        config = glue_config(folder, checkpoint, **fields)
        config.eval.patience, config.optimizer.learning_rate = 1, 1e-9
        return config

    run(config(), folder / "early")
    report = (folder / "early/report.txt").read_text()
    assert report.endswith("\nstopped early, at step 12 of 24: 1 evaluation without a better score\n")
    run(config(), folder / "early")
    assert f"already finished: 12 of 24 steps, in {folder / 'early'}\n{report}" in capsys.readouterr().out
    assert pretrained.read_pretrained(folder / "early").step == 12

    run(config(sweep="seed=0,1", epochs=3.0), folder / "search")
    for trial in ("seed=0", "seed=1"):
        assert "stopped early, at step 12 of 18" in (folder / f"search/runs/{trial}/report.txt").read_text()


def test_early_stopping_needs_held_out_text(records_folder, tmp_path):
    config = tiny_config("text.txt")
    config.eval.patience, config.data.heldout_fraction = 3, 0.0
    with pytest.raises(UserError, match=r"data.heldout_fraction = 0.0: must be above 0, because early stopping"):
        validate(config)
    shutil.copytree(records_folder, tmp_path / "records")
    (tmp_path / "records/manifest.json").unlink()  # without a manifest, file names define the held-out records
    for path in (tmp_path / "records").glob("*/heldout*"):
        path.unlink()
    config = tiny_config(records=tmp_path / "records")
    config.eval.patience = 3
    validate(config)
    with pytest.raises(UserError, match=r"config.eval.patience = 3: early stopping needs held-out records"):
        pretraining_task(config, one_device_mesh(config), tmp_path / "records")


@pytest.fixture(scope="module")
def topics(tmp_path_factory):
    """(folder of texts that have several labels, the rows of the dev set)."""
    folder = tmp_path_factory.mktemp("topics")
    return folder, write_topics(folder, train=300, dev=30)


def lora_config(folder, checkpoint, targets="query,value"):
    config = classify_config(folder, checkpoint)
    config.update(dict(packing=True, epochs=2.0))
    config.optimizer.learning_rate, config.head.class_weights = 2e-2, "balanced"
    config.lora.update(rank=3, alpha=12.0, dropout=0.2, targets=targets)
    config.checkpoint.every_steps = 10
    return config


@pytest.mark.slow
def test_lora_updates_are_trained_resumed_merged_and_used(topics, checkpoint, capsys):
    """Multi-label data with class weights, packed."""
    folder, dev = topics
    run(lora_config(folder, checkpoint), folder / "lora")
    printed = capsys.readouterr().out
    launch_and_stop(FineTuning, lora_config(folder, checkpoint), folder / "lora-stopped", step=13)
    for changes in (dict(rank=2), dict(alpha=1.0), dict(targets="query")):
        other = lora_config(folder, checkpoint)
        other.lora.update(changes)
        with pytest.raises(UserError, match=f"config.lora.{next(iter(changes))} = .* holds a run with"):
            run(other, folder / "lora-stopped")
    run(lora_config(folder, checkpoint), folder / "lora-stopped")
    straight, resumed = (params_of(folder / name, 38) for name in ("lora", "lora-stopped"))
    assert all(np.array_equal(straight[name], resumed[name]) for name in straight | resumed)

    before = flatten_dict(pretrained.read_pretrained(checkpoint).params, sep="/")
    moved = {name for name in straight.keys() & before.keys() if not np.array_equal(straight[name], before[name])}
    assert moved == {"bert/pooler/dense/kernel", "bert/pooler/dense/bias"}
    updates = {name: x for name, x in straight.items() if "lora" in name}
    layer = "bert/encoder/layers/attention/query_key_value"
    assert {name: x.shape for name, x in updates.items()} == {
        f"{layer}/lora_a": (1, 32, 2, 3), f"{layer}/lora_b": (1, 2, 3, 2, 16),
    }  # fmt: skip
    assert all(np.abs(x).min() > 0 for x in updates.values())
    trained = sum(x.size for name, x in straight.items() if name in {*moved, *updates} or "classifier" in name)
    assert f"trains {trained:,} of " in printed and f"state has {8 * trained + 4:,} bytes" in printed

    source = pretrained.read_pretrained(folder / "lora")
    arrays = flatten_dict(source.params, sep="/")
    assert arrays.keys() == straight.keys() - updates.keys()
    change = arrays[f"{layer}/kernel"] - before[f"{layer}/kernel"]
    assert np.linalg.matrix_rank(change[0, :, 2].reshape(32, 32), tol=1e-5) == 3 and (change[:, :, 1] == 0).all()
    found_labels = [each["labels"] for each in classify.TASK.predict(source, [(text,) for text, _ in dev])]
    sides = [[[name in each for name in LABELS] for each in side] for side in ([x for _, x in dev], found_labels)]
    assert metrics.f1_of_labels(*sides) == pytest.approx(source.scores) and source.scores["micro_f1"] > 0.6


@pytest.mark.slow
def test_params_are_equal_on_any_number_of_devices(topics, checkpoint, tmp_path):
    """LoRA with dropout, and packed texts with class weights."""

    def steps(*sizes):
        config = lora_config(topics[0], checkpoint, "all-linear")
        config.mesh.update(dict(zip(("data", "fsdp", "tensor"), sizes)))
        config, _ = finetuning_run.resolve(config, None)
        dataset = finetuning_run.load_inputs(config, tmp_path, None).data
        task = FineTuning(config, make_mesh(config, jax.devices()[: math.prod(sizes)]), dataset)
        program = Program(task, config, task.mesh)
        hyperparameters = put_hyperparameters(0, schedule_of(config, task.total_steps), task.mesh)
        state, losses = program.init(jax.random.key(0)), []
        for batch in itertools.islice(task.batches(0), 4):
            state, metrics = program.train_step(state, put_batch(batch, task.mesh), hyperparameters)
            losses.append(float(metrics["loss"]))
        return flatten_dict(jax.device_get(state.params), sep="/"), losses

    (several, losses), (one, expected) = steps(2, 2, 2), steps(1, 1, 1)
    assert losses == pytest.approx(expected, rel=2e-5)
    assert any(np.abs(x).max() > 0.01 for name, x in one.items() if name.endswith("lora_b"))
    for name in one:
        np.testing.assert_allclose(several[name], one[name], atol=3e-5, err_msg=name)


@pytest.mark.parametrize("targets, rank, message", [
    ("query,gate", 2, "config.lora.targets: the encoder has no kernel 'gate'; there are attention/key, attention/"),
    ("", 2, r"config.lora.targets = '': must name kernels, such as query,value"),
    ("query", -1, r"config.lora.rank = -1: must be at least 0"),
])  # fmt: skip
def test_lora_on_missing_modules_is_refused(topics, checkpoint, targets, rank, message):
    folder, _ = topics
    config = lora_config(folder, checkpoint, targets)
    config.lora.rank = rank
    with pytest.raises(UserError, match=message):
        run(config, folder / "refused")
