"""Fine-tuning that trains some of the params, or stops early."""

import dataclasses
import math
import shutil

import flax.linen as nn
import jax
import numpy as np
import pytest
from flax.traverse_util import flatten_dict
from ml_collections import ConfigDict

from bertjax import families
from bertjax.config import Compute, Lora, UserError, fine_tuning_config, param_group, param_groups
from bertjax.data.batches.examples import Examples
from bertjax.families.with_heads import BertForSequenceClassification
from bertjax.interop import conversion, huggingface, pretrained
from bertjax.model import low_rank
from bertjax.model.dropout import row_keys
from bertjax.sharding.mesh import make_mesh, put_batch
from bertjax.sharding.rules import RULES
from bertjax.tasks import classification, metrics, output_layers, validate
from bertjax.tasks.finetuning import Dataset, FineTuning
from bertjax.tasks.pretraining import Pretraining
from bertjax.training import checkpoint as checkpoints
from bertjax.training.schedules import schedule_of
from bertjax.training.step import make_program, put_hyperparameters
from tests.conftest import launch_and_stop, one_device_mesh, tiny_config
from tests.tasks.test_classify import LABELS, write_topics
from tests.tasks.test_classify import config_for as classify_config
from tests.tasks.test_finetuning import config_for, run, write_sst2

pytestmark = pytest.mark.usefixtures("on_one_device")


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("glue")
    write_sst2(folder, train=96, dev=16)
    return folder


@pytest.fixture(scope="session")
def two_layers(checkpoint, built_once):
    """A checkpoint of two layers."""

    def build(folder):
        source = pretrained.read(checkpoint)
        config = dataclasses.replace(source.config, num_hidden_layers=2)
        params = jax.tree_util.tree_map_with_path(
            lambda path, x: np.repeat(x, 2, axis=0) if "layers" in jax.tree_util.keystr(path) else x, source.params
        )
        huggingface.write(folder, config, params, source.tokenizer)

    return built_once("two-layers", build)


def params_of(workdir, step):
    return flatten_dict(checkpoints.read_params(workdir, step), sep="/")


@pytest.mark.slow
def test_frozen_layers_stay_and_resume_as_if_never_stopped(folder, two_layers, capsys):
    def config(freeze_layers=1, still="pooler/dense/bias"):
        config = config_for(folder, two_layers, epochs=1.0, freeze_layers=freeze_layers)
        config.optimizer.layer_decay, config.checkpoint.every_steps = 0.9, 2
        config.optimizer.groups = param_groups(still=param_group(still, learning_rate_factor=0.0))
        return config

    run(config(), folder / "straight")
    said = capsys.readouterr().out
    launch_and_stop(FineTuning, config(), folder / "stopped", step=3)
    for changed, field in (
        (config(0), "config.freeze_layers = 0"),
        (config(1, "masked"), "groups.still.params = 'masked'"),
    ):
        with pytest.raises(UserError, match=f"{field}: .* holds a run with"):
            run(changed, folder / "stopped")
    run(config(), folder / "stopped")
    straight, resumed = (params_of(folder / name, 6) for name in ("straight", "stopped"))
    assert all(np.array_equal(straight[name], resumed[name]) for name in straight | resumed)

    before, stays = flatten_dict(pretrained.read(two_layers).params, sep="/"), {}
    for name in straight.keys() & before.keys():
        change = np.abs(straight[name] - before[name])
        stays[name] = (change == 0).reshape(len(change), -1).all(1).tolist()
    stacked = {name for name in stays if "layers" in name and not name.endswith("query_key_value/bias")}
    assert all(stays[name] == [True, False] for name in stacked) and len(stacked) == 11
    still = {name for name, rows in stays.items() if all(rows)}
    assert still == {name for name in before if "embeddings" in name} | {"bert/pooler/dense/bias"}

    trained = sum(x.size // (2 if "layers" in name else 1) for name, x in straight.items() if name not in still)
    every = sum(x.size for x in straight.values())
    sizes = [2 * 4 * count + 4 for count in (trained, every)]  # two moments, and Adam's count of steps
    counts = f"trains {trained:,} of {every:,} params"
    assert f"{counts}; the optimizer's state has {sizes[0]:,} bytes, not {sizes[1]:,}\n" in said


@pytest.mark.slow
def test_a_run_and_a_search_stop_early_and_know_that_they_have(folder, checkpoint, capsys):
    """With a learning rate that changes nothing, the second epoch is no better."""

    def config(**fields):
        config = config_for(folder, checkpoint, **fields)
        config.eval.patience, config.optimizer.learning_rate = 1, 1e-9
        return config

    run(config(), folder / "early")
    report = (folder / "early/report.txt").read_text()
    assert report.endswith("\nstopped early, at step 12 of 24: 1 evaluation without a better score\n")
    run(config(), folder / "early")
    assert f"already finished: 12 of 24 steps, in {folder / 'early'}\n{report}" in capsys.readouterr().out
    assert pretrained.read(folder / "early").step == 12

    run(config(sweep="seed=0,1", epochs=3.0), folder / "search")
    for trial in ("seed=0", "seed=1"):
        assert "stopped early, at step 12 of 18" in (folder / f"search/runs/{trial}/report.txt").read_text()
    run(config(sweep="seed=0,1,2", epochs=3.0), folder / "search")
    assert capsys.readouterr().out.count("stopped early") == 3


def test_without_held_out_text_there_is_no_patience(records_folder, tmp_path):
    config = tiny_config("text.txt")
    config.eval.patience, config.data.heldout_fraction = 3, 0.0
    with pytest.raises(
        UserError, match=r"data.heldout_fraction = 0.0: no text is held out, by whose score a run could"
    ):
        validate(config)
    shutil.copytree(records_folder, tmp_path / "records")
    (tmp_path / "records/manifest.json").unlink()  # without one, names tell what is held out
    for path in (tmp_path / "records").glob("*/heldout*"):
        path.unlink()
    config = tiny_config(records=tmp_path / "records")
    config.eval.patience = 3
    validate(config)
    with pytest.raises(UserError, match=r"config.eval.patience = 3: .* holds out no text, by whose score"):
        Pretraining(config, one_device_mesh(config), tmp_path / "records")


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
def test_low_rank_updates_are_learnt_resumed_merged_and_used(topics, checkpoint, capsys):
    """Several labels for a text, with weights, packed."""
    folder, dev = topics
    run(lora_config(folder, checkpoint), folder / "lora")
    said = capsys.readouterr().out
    launch_and_stop(FineTuning, lora_config(folder, checkpoint), folder / "lora-stopped", step=13)
    for changes in (dict(rank=2), dict(alpha=1.0), dict(targets="query")):
        other = lora_config(folder, checkpoint)
        other.lora.update(changes)
        with pytest.raises(UserError, match=f"config.lora.{next(iter(changes))} = .* holds a run with"):
            run(other, folder / "lora-stopped")
    run(lora_config(folder, checkpoint), folder / "lora-stopped")
    straight, resumed = (params_of(folder / name, 38) for name in ("lora", "lora-stopped"))
    assert all(np.array_equal(straight[name], resumed[name]) for name in straight | resumed)

    before = flatten_dict(pretrained.read(checkpoint).params, sep="/")
    moved = {name for name in straight.keys() & before.keys() if not np.array_equal(straight[name], before[name])}
    assert moved == {"bert/pooler/dense/kernel", "bert/pooler/dense/bias"}
    updates = {name: x for name, x in straight.items() if "lora" in name}
    layer = "bert/encoder/layers/attention/query_key_value"
    assert {name: x.shape for name, x in updates.items()} == {
        f"{layer}/lora_a": (1, 32, 2, 3), f"{layer}/lora_b": (1, 2, 3, 2, 16),
    }  # fmt: skip
    assert all(np.abs(x).min() > 0 for x in updates.values())
    trained = sum(x.size for name, x in straight.items() if name in {*moved, *updates} or "classifier" in name)
    assert f"trains {trained:,} of " in said and f"state has {8 * trained + 4:,} bytes" in said

    source = pretrained.read(folder / "lora")
    found = flatten_dict(source.params, sep="/")
    assert found.keys() == straight.keys() - updates.keys()
    change = found[f"{layer}/kernel"] - before[f"{layer}/kernel"]
    assert np.linalg.matrix_rank(change[0, :, 2].reshape(32, 32), tol=1e-5) == 3 and (change[:, :, 1] == 0).all()
    found_labels = [each["labels"] for each in classification.predict(source, [(text,) for text, _ in dev])]
    sides = [[[name in each for name in LABELS] for each in side] for side in ([x for _, x in dev], found_labels)]
    assert metrics.f1_of_labels(*sides) == pytest.approx(source.scores) and source.scores["micro_f1"] > 0.6
    conversion.convert(folder / "lora", folder / "lora-hf", "huggingface")
    again = flatten_dict(pretrained.read(folder / "lora-hf").params, sep="/")
    assert all(np.array_equal(again[name], found[name]) for name in found)


@pytest.mark.slow
@pytest.mark.parametrize(
    "family, layers, targets, count",
    [("bert", 1, "all-linear", 4), ("modernbert", 4, "attention,input", 3), ("eurobert", 1, "value,input", 2)],
)
def test_merged_kernels_compute_what_updates_do(family, layers, targets, count):
    sizes = dict(vocab_size=50, hidden_size=16, num_hidden_layers=layers, num_attention_heads=2, intermediate_size=16)
    sizes |= dict(num_key_value_heads=1, head_dim=8) if family == "eurobert" else {}
    config = families.config_of(ConfigDict({"model": families.model_fields(family, **sizes)}))
    lora = Lora(2, 4.0, 0.5, tuple(targets.split(",")))
    model = BertForSequenceClassification(config, 3, Compute(lora=lora))
    rng, ids = np.random.default_rng(0), np.arange(24).reshape(2, 12)
    given = (ids, np.ones_like(ids), np.zeros_like(ids))
    shapes = nn.meta.unbox(jax.eval_shape(model.init, jax.random.key(0), *given)["params"])
    params = jax.tree.map(lambda x: np.float32(rng.normal(0, 0.3, x.shape)), shapes)
    of_a_layer = {path[-2] + "/" + path[-3] for path in flatten_dict(params) if path[-1] == "lora_a"}
    assert len(of_a_layer - {"input/first"}) >= count
    apply = jax.jit(lambda params, keys: model.apply({"params": params}, *given, keys))
    merged = low_rank.merge(params, low_rank.updates_of(params, lora))
    assert not any("lora" in path[-1] for path in flatten_dict(merged))
    plain = jax.jit(BertForSequenceClassification(config, 3).apply)
    np.testing.assert_allclose(apply(params, None), plain({"params": merged}, *given), atol=2e-5)
    first, second, again = (apply(params, row_keys(jax.random.key(seed), np.arange(2))) for seed in (0, 1, 0))
    assert np.abs(first - second).max() > 1e-3 and np.array_equal(first, again)


@pytest.mark.slow
def test_devices_change_nothing_of_what_is_learnt():
    """Low-rank updates and their dropout, with packed classes that have weights."""
    rng = np.random.default_rng(0)
    ids = [rng.integers(5, 100, length) for length in rng.integers(4, 20, 32)]
    examples = Examples(ids, [np.zeros_like(each) for each in ids], np.arange(32) % 5 % 3)
    dataset = Dataset(output_layers.classification(3), ("a", "b", "c"), examples, (), "accuracy")

    def steps(*sizes):
        config = fine_tuning_config("classify", text="text", second_text="", label="a", multi_label="", is_number=False)
        config.unlock()
        config.update(batch_size=16, epochs=2.0, dtype="float32", unroll="no", packing=True)
        config.model.update(vocab_size=100, hidden_size=16, num_hidden_layers=1, num_attention_heads=2)
        config.model.update(intermediate_size=16, max_position_embeddings=32)
        config.model.update(hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0)
        config.lora.update(rank=2, dropout=0.3, targets="all-linear")
        config.head.update(class_weights="a=0.2,b=3", label_smoothing=0.1)
        config.optimizer.update(learning_rate=0.01, warmup_proportion=0.0)
        config.mesh.update(dict(zip(("data", "fsdp", "tensor"), sizes)))
        task = FineTuning(config, make_mesh(config, jax.devices()[: math.prod(sizes)]), dataset)
        program = make_program(task, config, task.mesh)
        hyperparameters = put_hyperparameters(0, schedule_of(config, task.total_steps), task.mesh)
        state, losses = program.init(jax.random.key(0)), []
        with jax.set_mesh(task.mesh), nn.logical_axis_rules(RULES):
            for batch in task.batches(0):
                state, found = program.train_step(state, put_batch(batch, task.mesh), hyperparameters)
                losses.append(float(found["loss"]))
        return flatten_dict(jax.device_get(state.params), sep="/"), losses

    (several, losses), (one, expected) = steps(2, 2, 2), steps(1, 1, 1)
    assert len(losses) == 4 and losses == pytest.approx(expected, rel=2e-5)
    assert any(np.abs(x).max() > 0.01 for name, x in one.items() if name.endswith("lora_b"))
    for name in one:
        np.testing.assert_allclose(several[name], one[name], atol=3e-5, err_msg=name)


@pytest.mark.parametrize("targets, rank, message", [
    ("query,gate", 2, "config.lora.targets: the encoder has no kernel 'gate'; there are attention/key, attention/"),
    ("", 2, r"config.lora.targets = '': name kernels, such as query,value"),
    ("query", -1, r"config.lora.rank = -1: must be at least 0"),
])  # fmt: skip
def test_updates_of_what_is_not_there_are_refused(topics, checkpoint, targets, rank, message):
    folder, _ = topics
    config = lora_config(folder, checkpoint, targets)
    config.lora.rank = rank
    with pytest.raises(UserError, match=message):
        run(config, folder / "refused")
