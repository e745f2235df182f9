"""Replaced token detection: sampling, configs, reading checkpoints and starting from checkpoints, layers, meshes."""

import functools
import json
import shutil

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax.traverse_util import flatten_dict

from bertjax.cli.overrides import from_arguments
from bertjax.common.errors import UserError
from bertjax.config.defaults import named_stages, pretraining_config, stage
from bertjax.config.model_config import Compute
from bertjax.data.batch import RowSize
from bertjax.distributed.mesh import make_mesh
from bertjax.interop import conversion, initialization, pretrained
from bertjax.interop.pretrained import Pretrained, flattened, read_pretrained
from bertjax.launch.start import launch
from bertjax.launch.validate import validate
from bertjax.models import families
from bertjax.models.electra.config import ElectraConfig
from bertjax.models.heads import model_flops
from bertjax.objectives.encoded_batch import EncodedBatch
from bertjax.objectives.objective import JointModel, Objective
from bertjax.objectives.parsing import learn, parse_objective
from bertjax.objectives.parts.generator import separate_params
from bertjax.objectives.parts.pretraining_model import sample_tokens
from bertjax.objectives.registry import OBJECTIVES
from bertjax.pretraining import init_checkpoint
from bertjax.pretraining import run as pretraining_run
from bertjax.training.checkpoints import checkpoint
from bertjax.training.checkpoints.workdir import RunInfo, write_info
from bertjax.training.optim import frozen
from bertjax.training.scores import Scores
from bertjax.training.trackers.jsonl import read_metrics
from tests.conftest import one_device_mesh, pretraining_task, tiny_config
from tests.interop.test_model_card import read_card
from tests.markers import slow_case
from tests.objectives.test_objectives import assert_as_planned, params_of

pytestmark = pytest.mark.usefixtures("on_one_device")
SIZES = dict(vocab_size=150, hidden_size=32, num_attention_heads=2, intermediate_size=64, max_position_embeddings=64)


def config_for(records="unused", family="bert", steps=4, depth=2, **settings):
    config = tiny_config(records=records)
    config.model = families.model_fields(family, **SIZES, num_hidden_layers=depth)
    config.model.update({name: 0.0 for name in config.model if "dropout" in name})
    learn(config, "50*replaced + generator", generator=dict(width=0.5) | settings)
    config.stages, config.eval.fill_masks = named_stages(only=stage(steps, 32, 5)), ()
    return config


def task_of(config, records=None):
    return pretraining_task(config, one_device_mesh(config), records)


def keys_of(rows, seed=0):
    return jax.vmap(functools.partial(jax.random.fold_in, jax.random.key(seed)))(jnp.arange(rows))


# Sampled tokens.


@pytest.mark.slow
def test_tokens_are_sampled_from_the_softmax():
    logits = np.random.default_rng(0).normal(0, 1.5, (1, 2, 60)).astype(np.float32)
    logits[..., 50:] = np.finfo(np.float32).min  # rows that pad the vocabulary
    rows = 40_000
    sampled = np.asarray(jax.jit(sample_tokens)(jnp.broadcast_to(logits, (rows, 2, 60)), keys_of(rows)))
    expected = np.asarray(jax.nn.softmax(logits))[0]
    for place in range(2):
        counts = np.bincount(sampled[:, place], minlength=60)
        assert not counts[50:].any()
        chi_square = ((counts[:50] - rows * expected[place][:50]) ** 2 / (rows * expected[place][:50])).sum()
        assert chi_square < 95  # 49 degrees of freedom: 1 in 10,000
    both = np.histogram2d(*sampled.T, bins=[range(61), range(61)])[0] / rows
    assert np.abs(both - np.outer(*expected)).max() < 0.005  # positions are independent
    assert (sampled == np.asarray(jax.jit(sample_tokens)(jnp.broadcast_to(logits, (rows, 2, 60)), keys_of(rows)))).all()
    parts = [sample_tokens(jnp.broadcast_to(logits[:, i : i + 1], (9, 1, 60)), keys_of(9), 60 * i) for i in range(2)]
    assert (np.concatenate(parts, 1) == sampled[:9]).all()


def rewritten(task, params, batch, keys):
    """Returns the input batch of the encoder, and the loss of the generator."""
    objective = task.loss.terms[1].objective

    def rewrite(model, batch, keys):
        encoded_batch = EncodedBatch(batch, model.bert, {"generator": model.generator}, None, None)
        encoded = objective.rewrite(encoded_batch, batch["word_weights"], keys)
        return {name: encoded.batch[name] for name in ("input_ids", "original_ids")}, encoded.joint_loss[0]

    return task.loss.model.apply({"params": params}, batch, keys, method=rewrite)


@pytest.mark.slow
def test_packed_rows_are_replaced_at_predicted_positions(records_folder):
    config = config_for(records_folder, depth=1)
    config.packing, config.stages = True, named_stages(only=stage(4, 64, 10))
    validate(config)
    task = pretraining_task(config, one_device_mesh(config), records_folder)
    batch = next(task.batches(0))
    assert_as_planned(task, batch)
    assert batch["segments"].max() > 1
    params, batch = params_of(task), {name: x for name, x in batch.items() if name != "dropout_rows"}
    rewritten_batch, _ = jax.jit(lambda batch: rewritten(task, params, batch, keys_of(len(batch["input_ids"]))))(batch)
    changed = {(row, place) for row, place in np.argwhere(rewritten_batch["input_ids"] != batch["input_ids"])}
    used = np.argwhere(batch["word_weights"] > 0)
    assert changed and changed <= {(row, batch["word_positions"][row, place]) for row, place in used}
    weights = task.loss.terms[0].objective.weights(batch)
    assert weights.sum() == (batch["segments"] > 0).sum()


@pytest.mark.parametrize("family", ["bert", slow_case("deberta_v2")])
def test_disentangled_embeddings_separate_the_gradients(family, records_folder):
    """The encoder reads the embeddings of the generator plus the difference. The loss of `replaced` changes the
    difference, and changes neither the embeddings nor other params of the generator."""
    config = config_for(records_folder, family, width=1.0, layers=0.5, embeddings="disentangled")
    task = task_of(config, records_folder)
    batch, params = next(task.batches(0)), params_of(task)
    batch = {name: jnp.asarray(x) for name, x in batch.items()}
    rows = len(batch["input_ids"])

    def loss_of(name, params):
        weights = {term.name: term.objective.weights(batch) for term in task.loss.terms}
        losses, _ = task.loss.model.apply({"params": params}, batch, weights, None, keys_of(rows))
        return losses[name][0]

    largest = {}
    for name in ("replaced", "generator"):
        gradient = jax.jit(jax.grad(functools.partial(loss_of, name)))(params)
        largest[name] = {path: float(jnp.abs(x).max()) for path, x in flatten_dict(gradient).items()}
    assert params["generator"]["difference"].keys() == params["bert"]["embeddings"].keys()
    for path, size in largest["replaced"].items():
        of_generator = path[:2] in (("bert", "embeddings"), ("generator", "bert"), ("generator", "masked_lm"))
        assert of_generator == (size == 0) or path[1] == "pooler", path
    for path, size in largest["generator"].items():
        of_encoder = path[:2] in (("bert", "encoder"), ("generator", "difference")) or path[0] == "replaced_tokens"
        assert of_encoder == (size == 0) or path[1] == "pooler", path

    # A change of the embeddings of the generator changes the embeddings of the encoder by the same amount.
    def moved(by_base, by_difference):
        changed = jax.tree.map(lambda x: x, params)
        changed["bert"]["embeddings"]["word"]["embedding"] += by_base
        changed["generator"]["difference"]["word"]["embedding"] += by_difference
        encoder, _ = separate_params(changed["bert"], changed["generator"])
        return np.asarray(encoder["embeddings"]["word"]["embedding"])

    np.testing.assert_allclose(moved(0.5, -0.5), moved(0, 0), atol=1e-6)


# Configs.


def test_generator_sizes_follow_the_config():
    def generator(family, embeddings="shared", width=0.5, layers=0.5, **fields):
        config = config_for("unused", family, embeddings=embeddings, width=width, layers=layers)
        config.model.update(fields)
        (term,) = (term for term in parse_objective(config) if term.name == "generator")
        return term.objective.models(families.config_of(config))["generator"]

    def sizes(config):
        heads = config.num_attention_heads, config.head_size
        return config.hidden_size, config.embedding_size, *heads, config.intermediate_size, config.num_hidden_layers

    assert sizes(generator("electra")) == (16, 128, 1, 16, 32, 1)
    assert sizes(generator("bert", causal=False)) == (16, 32, 1, 16, 32, 1)
    assert isinstance(generator("bert"), ElectraConfig) and sizes(generator("bert", "apart"))[:2] == (16, 16)
    assert sizes(generator("modernbert")) == (16, 32, 1, 16, 32, 1)
    for config in (generator("modernbert", width=1), generator("modernbert", "apart")):
        assert type(config) is families.FAMILIES.get("modernbert").config_class
    assert sizes(generator("eurobert", "apart", num_key_value_heads=1))[:2] == (16, 16)
    assert sizes(generator("deberta_v2", "disentangled", width=1)) == (32, 32, 2, 16, 64, 1)
    thirds = generator("bert", width=1 / 3, layers=1.0, hidden_size=768, num_attention_heads=12, intermediate_size=3072)
    assert sizes(thirds) == (256, 768, 4, 64, 1024, 2)


def test_flops_include_both_models(records_folder):
    task, alone = task_of(config_for(records_folder)), config_for(records_folder)
    alone.objective = "mlm"
    del alone.unlock()["objectives"]
    alone = pretraining_task(alone, task.mesh, records_folder)
    generator_model = task.loss.terms[1].objective.models(task.loss.model.config)["generator"]
    head, of_words = (
        2 * 32 * (32 * 32 + 32),
        alone.loss.terms[0].objective.flops(alone.loss.model.config, RowSize(32, 1, 5)),
    )
    expected = 3 * (model_flops(generator_model, 16, 32, 5, pooled=0) + 16 * (head - of_words))
    assert task.flops(0, 1) - alone.flops(0, 1) == expected


def test_equal_settings_give_equal_objectives():
    assert parse_objective(config_for()) == parse_objective(config_for()) != parse_objective(config_for(layers=0.5))
    base = from_arguments(["--config=base", "--config.objectives.generator.width=1/3",
                                      "--config.objective=50*replaced + generator"])[0]  # fmt: skip
    assert base.objectives.generator.to_dict() == dict(width=1 / 3, layers=1.0, embeddings="shared")
    assert "objectives" not in pretraining_config()


@pytest.mark.parametrize("fields, message", [
    (dict(width=1.5), "config.objectives.generator.width = 1.5: must be above 0 and at most 1"),
    (dict(width=0.3), "generator.width = 0.3: the generator would have model.num_attention_heads = 0.6, which must be"),
    (dict(width=0.1), "generator.width = 0.1: the generator would have model.num_attention_heads = 0.2"),
    (dict(layers=0.2), "generator.layers = 0.2: the generator would have model.num_hidden_layers = 0.4"),
    (dict(embeddings="none"), "generator.embeddings = 'none': choose one of shared, apart, disentangled"),
    ({"objective": "replaced"}, "config.objective = 'replaced': replaced needs an objective that replaces tokens"),
    ({"objective": "generator"}, "config.objective = 'generator': generator needs the objective replaced; set"),
    ({"objective": "mlm"}, "config.objectives.generator: the run trains mlm, not generator; remove the field"),
    ({"objective": "mlm + replaced + generator"}, "mlm and generator both predict tokens; remove one"),
    ({"model.causal": True, "data.next_sentence": "none"}, "needs a masked language model, and config"),
    ({"eval.fill_masks": ("a [MASK]",)}, r"replaced \+ generator cannot fill masks; set \(\)"),
    ({"eval.bits_windows": 3, "init_checkpoint": "x", "data.corpus": "x"}, "eval.bits_windows = 3: an encoder that"),
    ({"eval.patience": 3}, r"eval.patience = 3: early stopping reads .*set objective = 'generator \+ 50\*replaced'"),
    ({"stages.only.objective": "mlm", "embeddings": "disentangled"}, "the run trains mlm, not generator"),
    (dict(family="roberta"), "model.family = 'roberta' cannot share embeddings with a narrower generator; set apart"),
])  # fmt: skip
def test_unsupported_configs_are_refused(fields, message):
    settings = {name: value for name, value in fields.items() if name in ("family", "width", "layers", "embeddings")}
    config = config_for("records", **settings)
    with config.unlocked():
        config.update_from_flattened_dict({name: fields[name] for name in fields.keys() - settings.keys()})
    with pytest.raises(UserError, match=message) as error:
        validate(config)
    assert "\n" not in str(error.value)


def test_two_rewriting_objectives_are_refused(monkeypatch):
    class Twin(Objective, JointModel):
        def loss(self, encoded, weights, keys):
            return encoded.joint_loss

        def rewrite(self, encoded, weights, keys):
            return encoded

    monkeypatch.setitem(OBJECTIVES.registered, "twin", Twin())
    config = config_for()
    config.objective += " + twin"
    with pytest.raises(UserError, match="generator and twin both change the inputs of the encoder; remove one"):
        validate(config)


TABLE = "bert/embeddings/word/embedding"


def shapes_of(task):
    return nn.meta.unbox(jax.eval_shape(task.init_params, jax.random.key(0)))


def made_run(folder, *arguments, step=4, scores=(), **settings):
    """Makes a run with random params; returns its folder and the params."""
    config = config_for(*arguments, **settings)
    validate(config)
    params = params_of(task_of(config), deviation=1.0)
    checkpoint.write_params(folder, params)
    (folder / "checkpoints/0").rename(folder / f"checkpoints/{step}")
    write_info(folder, RunInfo(config.lock()), None)
    checkpoint.write_scores(folder, step, Scores(dict(scores)))
    return folder, params


@pytest.fixture(scope="module")
def disentangled(tmp_path_factory):
    scores = dict(replaced_loss=0.2, replaced_share=0.1, generator_loss=3.0, unigram_loss=4.0, generator_accuracy=0.2)
    return made_run(tmp_path_factory.mktemp("made") / "run", embeddings="disentangled", scores=scores)


def changed_info(source, folder, change):
    """Copies a run with changed fields in config.json."""
    shutil.copytree(source, folder)
    content = json.loads((folder / "config.json").read_text())
    change(content)
    (folder / "config.json").write_text(json.dumps(content))
    return folder


# Stages.


def test_disentangled_embeddings_are_trained_in_all_stages():
    config = config_for(embeddings="disentangled")
    message = r"config.stages.long: the stage trains mlm, not generator; .* objectives.generator.embeddings=shared"
    of_mlm, of_replaced = {"objective": "mlm"}, {"objective": config.objective}
    for of_run, of_short, of_long in ((of_replaced, {}, of_mlm), (of_mlm, of_replaced, {})):
        config.update(of_run)
        config.stages = named_stages(short=stage(4, 32, 5, **of_short), long=stage(4, 64, 10, **of_long))
        with pytest.raises(UserError, match=message):
            validate(config)
    config.objectives.generator.embeddings = "shared"
    validate(config)


# Checkpoints.


@pytest.mark.slow
@pytest.mark.parametrize("objective", ["50*replaced + generator + mine", "mine + 50*replaced + generator"])
def test_a_run_with_an_unknown_objective_is_read_completely(disentangled, tmp_path, objective):
    run = changed_info(disentangled[0], tmp_path / "run", lambda content: content.update(objective=objective))
    source = pretrained.read_pretrained(run)
    jax.tree.map(np.testing.assert_array_equal, source.params, pretrained.read_pretrained(disentangled[0]).params)
    assert "generator" in source.parts and "--part=generator" in source.no_words_reason
    conversion.convert(run, tmp_path / "part", "huggingface", part="generator")


def test_a_run_with_other_settings_is_refused(disentangled):
    config = config_for(embeddings="shared")
    with pytest.raises(UserError, match=r"config.objectives.generator.embeddings = 'shared': .* holds a run with 'dis"):
        launch(config, disentangled[0])


@pytest.mark.slow
def test_generator_and_discriminator_are_read_and_converted(disentangled, tmp_path):
    run, stored = disentangled[0], flattened(disentangled[1])
    source = pretrained.read_pretrained(run)
    assert f"generator/{TABLE}" not in stored
    summed = stored[TABLE] + stored["generator/difference/word/embedding"]
    np.testing.assert_array_equal(flattened(source.params)[TABLE], summed)
    np.testing.assert_array_equal(flattened(source.params)[f"generator/{TABLE}"], stored[TABLE])
    assert not source.predicts_words and "bertjax convert --part=generator" in source.no_words_reason

    conversion.convert(run, tmp_path / "ours", "bertjax")
    jax.tree.map(np.testing.assert_array_equal, pretrained.read_pretrained(tmp_path / "ours").params, source.params)
    printed = conversion.convert(run, tmp_path / "encoder", "huggingface")
    assert "left out, because BertModel cannot store them: generator, replaced_tokens" in printed
    np.testing.assert_array_equal(
        flattened(pretrained.read_pretrained(tmp_path / "encoder").params)[TABLE][:150], summed[:150]
    )
    for origin, to in ((run, "huggingface"), (tmp_path / "ours", "bertjax")):
        conversion.convert(origin, tmp_path / f"part-{to}", to, part="generator")
        part = pretrained.read_pretrained(tmp_path / f"part-{to}")
        assert part.predicts_words and part.config.family == "electra" and part.config.hidden_size == 16
        np.testing.assert_array_equal(flattened(part.params)[TABLE][:150], stored[TABLE][:150])
    assert "generator_loss" in (tmp_path / "part-huggingface/README.md").read_text()
    with pytest.raises(UserError, match=r"--part=teacher: .* has generator"):
        conversion.convert(run, tmp_path / "none", "bertjax", part="teacher")
    with pytest.raises(UserError, match=r"--part=generator: .* has no second model"):
        conversion.convert(tmp_path / "encoder", tmp_path / "none", "bertjax", part="generator")


@pytest.mark.parametrize("name, value", [
    *(("objectives", value) for value in (3, {"generator": 3})),
    *(("objectives", {"generator": value}) for value in (
        {"width": "a"}, {"width": None}, {"wide": 1}, {"embeddings": ["shared"]}, {"layers": 7})),
    *(("objective", value) for value in (3, "50*", "mlm + mlm")),
])  # fmt: skip
def test_damaged_settings_raise_one_line(disentangled, tmp_path, name, value):
    run = changed_info(disentangled[0], tmp_path / "run", lambda content: content.update({name: value}))
    with pytest.raises(UserError, match=r"config.json: damaged, or written by another version") as error:
        pretrained.read_pretrained(run)
    assert "\n" not in str(error.value)


def begun_with(run, **settings):
    """Returns the initial params of a run that starts from other params; fresh params are 0."""
    config = config_for(**settings)
    config.init_checkpoint = str(run)
    validate(config)
    zeros = jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), shapes_of(task_of(config)))
    return initialization.initialize(zeros, run, start=functools.partial(init_checkpoint.import_params, config)), config


@pytest.mark.parametrize("before, after", [
    ("disentangled", "disentangled"), ("shared", "apart"), slow_case("disentangled", "apart"),
    slow_case("shared", "shared"), slow_case("shared", "disentangled"), slow_case("apart", "disentangled"),
])  # fmt: skip
def test_both_models_start_from_a_checkpoint(tmp_path, before, after, capsys):
    run, _ = made_run(tmp_path / "run", width=1.0, embeddings=before)
    params, config = begun_with(run, width=1.0, embeddings=after)
    printed = capsys.readouterr().out
    assert "initialized at random" not in printed and "not used" not in printed
    (term,) = (term for term in parse_objective(config) if term.name == "generator")
    arrays, expected = (
        flattened(term.objective.export_params(params)),
        flattened(pretrained.read_pretrained(run).params),
    )
    assert arrays.keys() == expected.keys()
    for name, x in expected.items():
        np.testing.assert_allclose(arrays[name], x, atol=1e-5, err_msg=name)


@pytest.mark.parametrize("before, after, message", [
    ("disentangled", "shared", "= 'shared': the generator of init_checkpoint has embeddings of other values than"),
    ("apart", "disentangled", "= 'disentangled': the generator of init_checkpoint has embeddings of other shapes than"),
])  # fmt: skip
def test_embeddings_that_cannot_be_shared_are_refused(tmp_path, before, after, message):
    run, _ = made_run(tmp_path / "run", embeddings=before)
    with pytest.raises(UserError, match=f"config.objectives.generator.embeddings {message}"):
        begun_with(run, embeddings=after)


def test_other_runs_start_from_the_discriminator_only(disentangled, capsys):
    """Fine-tuning loads the encoder, whose embeddings include the difference; so does masked language modelling."""
    run, stored = disentangled[0], flattened(disentangled[1])
    summed = stored[TABLE] + stored["generator/difference/word/embedding"]
    config = config_for()
    config.objective = "mlm"
    del config.unlock()["objectives"]
    zeros = jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), shapes_of(task_of(config)))
    for encoder_only in (True, False):
        arrays = flattened(initialization.initialize(zeros, run, encoder_only=encoder_only))
        np.testing.assert_array_equal(arrays[TABLE], summed)
        assert "masked_lm" in capsys.readouterr().out.partition("initialized at random: ")[2].partition(";")[0]


@pytest.mark.parametrize("family, embeddings, fields", [
    ("bert", "shared", dict(output="plain")), ("bert", "apart", dict(output="plain")),
    ("eurobert", "apart", dict(tie_word_embeddings=True, num_key_value_heads=1)),
])  # fmt: skip
def test_an_untrained_lm_head_predicts_nothing(family, embeddings, fields):
    config = config_for("unused", family, embeddings=embeddings)
    config.model.update(fields)
    params = shapes_of(task_of(config))
    assert "masked_lm" not in params
    known = dict(path="run", format="bertjax", config=families.config_of(config), tokenizer=None, ignored=[])
    source = Pretrained(params=params, settings=config, **known)
    assert (
        not source.predicts_words
        and "write the generator, which has this head, with bertjax convert --part=generator" in source.no_words_reason
    )
    config.objective = "mlm"
    assert source.predicts_words


def test_model_cards_name_the_objectives(disentangled, tmp_path):
    recipe = {"objective": "50*replaced + generator", "generator.width": "0.5", "generator.embeddings": "disentangled"}
    for part in ("", "generator"):
        conversion.convert(disentangled[0], tmp_path / f"card{part}", "huggingface", "", "mit", part)
        metadata, rows, text = read_card(tmp_path / f"card{part}")
        assert recipe.items() <= rows.items()
        assert ("with bertjax as the generator of another." in text) == bool(part)
    assert metadata["pipeline_tag"] == "fill-mask"
    assert {name for name in rows if "_loss" in name or "_share" in name} == {"generator_loss", "unigram_loss"}


# Layers, sizes, meshes.


def test_the_embedding_difference_belongs_to_the_embeddings():
    config = config_for(embeddings="disentangled")
    task = task_of(config)
    params = shapes_of(task)
    factors = flatten_dict(frozen.layer_factors(task, 0.5, params, params, {}))
    assert factors["bert", "embeddings", "word", "embedding"] == 0.25  # two layers below the head
    assert all(x == 0.25 for path, x in factors.items() if path[:2] == ("generator", "difference"))
    assert all(x == 1 for path, x in factors.items() if path[:2] in (("generator", "bert"), ("generator", "masked_lm")))
    config.freeze_layers = 1
    is_frozen = frozen.find_frozen(task, config, params)
    whole = {path[:3] for path, rows in is_frozen.items() if rows is None}
    assert {path[:2] for path in whole} == {("bert", "embeddings"), ("generator", "difference")}
    assert {path[:2] for path in is_frozen} - {path[:2] for path in whole} == {("bert", "encoder")}


@pytest.mark.parametrize("axes", [dict(data=1, tensor=-1), dict(data=-1, tensor=4), dict(data=1, fsdp=-1)])
def test_a_mesh_must_divide_the_generator_too(monkeypatch, tmp_path, axes):
    config = config_for(width=0.25)
    config.model.update(num_attention_heads=4, hidden_size=24)
    config.mesh.update(axes)
    monkeypatch.setattr(pretraining_run, "make_mesh", lambda config: make_mesh(config, jax.devices()[:4]))
    validate(config)
    field, axis = ("num_attention_heads = 1", "tensor") if "tensor" in axes else ("hidden_size = 6", "fsdp")
    message = f"objectives.generator: the generator has {field}: must be a multiple of the 4 devices along mesh.{axis},"
    with pytest.raises(UserError, match=message):
        launch(config, tmp_path)


@pytest.mark.slow
def test_the_checkpoint_limits_the_width_of_the_generator(disentangled):
    def adapting(width):
        config = config_for(width=width)
        config.model = families.model_fields("bert")
        config.init_checkpoint, config.adapt.model = str(disentangled[0]), True
        validate(config)
        config, _ = pretraining_run.KIND.resolve(config, None)
        return config

    assert adapting(0.5).model.num_attention_heads == 2  # 12 by default
    with pytest.raises(UserError, match=r"would have model.num_attention_heads = 0.25, which must be a whole number"):
        adapting(1 / 8)
    config = adapting(0.5)
    config.objective = "lm"  # the objective of a checkpoint with causal attention
    config.data.update(next_sentence="none", masking="dynamic")
    del config.unlock()["objectives"]
    validate(config)
    with pytest.raises(UserError, match=r"needs a causal language model, and config\.model is a masked"):
        validate(config, is_adopted=True)


@pytest.mark.slow
def test_later_stages_may_drop_replaced_token_detection(records_folder, tmp_path):
    """A ModernBERT trains on replaced tokens and pairs, then on masked tokens alone, with shared embeddings."""
    config = config_for(records_folder, "modernbert", depth=1, width=0.5)
    config.objective = f"{config.objective} + nsp"
    config.stages = named_stages(short=stage(3, 32, 5), long=stage(2, 64, 10, objective="mlm"))
    config.eval.update(every_steps=3, max_sequences=16)
    config.checkpoint.every_steps, config.log_every_steps = 3, 1
    validate(config)
    launch(config, tmp_path)
    lines = read_metrics(tmp_path)
    names = {step: {name for line in lines if line["step"] == step for name in line} for step in (3, 5)}
    losses = {f"{part}/{name}_loss" for part in ("train", "eval") for name in ("replaced", "generator", "nsp")}
    assert losses <= names[3] and not losses & names[5] and {"train/mlm_loss", "eval/mlm_loss"} <= names[5]
    for name in ("replaced", "generator"):
        for plot in OBJECTIVES.get(name).metrics.plots:
            drawn_names = {f"train/{name}_{plot.metric}", f"eval/{name}_{plot.metric}"}
            assert drawn_names | {f"eval/{plot.baseline.format(name=name)}"} <= names[3]
    assert pretrained.read_pretrained(tmp_path).predicts_words
    with pytest.raises(
        UserError, match="the embedding size 32 and the hidden size 16 must be equal in a separate model with"
    ):
        conversion.convert(tmp_path, tmp_path / "part", "huggingface", part="generator")


def test_a_generator_with_separate_embeddings_is_exported_as_modernbert(tmp_path):
    run, params = made_run(tmp_path / "run", "unused", "modernbert", embeddings="apart")
    conversion.convert(run, tmp_path / "part", "huggingface", part="generator")
    part = pretrained.read_pretrained(tmp_path / "part")
    assert (part.config.family, part.config.hidden_size, part.predicts_words) == ("modernbert", 16, True)
    table = params["generator"]["bert"]["embeddings"]["word"]["embedding"]
    np.testing.assert_array_equal(part.params["bert"]["embeddings"]["word"]["embedding"][:150], table[:150])


@pytest.mark.slow
@pytest.mark.extra_packages
def test_a_trained_deberta_v3_is_exported_to_transformers(pretrained, tmp_path):
    """Ten steps of the recipe of DeBERTa-v3. The discriminator is a DebertaV2Model, and the generator, with half of the
    layers, a DebertaV2ForMaskedLM."""
    torch, transformers = pytest.importorskip("torch"), pytest.importorskip("transformers")
    run = pretrained("deberta-v3")
    source = read_pretrained(run)
    ids = np.random.default_rng(0).integers(5, source.config.vocab_size, (2, 24))
    mask = (np.arange(24) < np.array([[24], [17]])).astype(np.int32)
    inputs = dict(input_ids=torch.tensor(ids), attention_mask=torch.tensor(mask))
    for part, layers in (("", 2), ("generator", 1)):
        folder = tmp_path / f"folder{part}"
        conversion.convert(run, folder, "huggingface", part=part)
        model_class = transformers.DebertaV2ForMaskedLM if part else transformers.DebertaV2Model
        model, missing = model_class.from_pretrained(folder, output_loading_info=True)
        assert not missing["missing_keys"] and model.config.num_hidden_layers == layers
        config = source.parts[part] if part else source.config
        params = source.params[part]["bert"] if part else source.params["bert"]
        with torch.no_grad():
            expected = model.eval()(**inputs, output_hidden_states=True).hidden_states[-1].numpy()
        encoder = families.family_of(config).build(config, Compute())
        states = encoder.apply({"params": params}, ids, mask, np.zeros_like(ids), method="encode")
        np.testing.assert_allclose(np.asarray(states)[mask > 0], expected[mask > 0], atol=1e-4)
