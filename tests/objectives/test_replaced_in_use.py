"""Replaced words beside all else: stages, checkpoints that are read and begun with, frozen layers, meshes, plans."""

import dataclasses
import functools
import json
import shutil

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax.traverse_util import flatten_dict

from bertjax import families, objectives, tasks
from bertjax.config import ModelConfig, UserError, field, named_stages, size, stage
from bertjax.interop import conversion, pretrained
from bertjax.interop.pretrained import Pretrained, flattened
from bertjax.objectives.generator import GeneratorSettings, config_of
from bertjax.objectives.parts.model import EncodedBatch
from bertjax.planner.plan import plan
from bertjax.sharding.mesh import make_mesh
from bertjax.sharding.topology import accelerator
from bertjax.tasks import pretraining_run
from bertjax.tasks.launch import launch
from bertjax.tasks.pretraining import Pretraining
from bertjax.training import checkpoint, frozen
from bertjax.training.checkpoint import Scores
from bertjax.training.sinks.jsonl import read_metrics
from bertjax.training.workdir import RunInfo, write_info
from tests.conftest import one_device_mesh
from tests.interop.test_model_card import read_card
from tests.objectives.test_objectives import params_of
from tests.objectives.test_replaced import config_for, keys_of

pytestmark = pytest.mark.usefixtures("on_one_device")
TABLE = "bert/embeddings/word/embedding"


def task_of(config):
    return Pretraining(config, one_device_mesh(config), None)


def shapes_of(task):
    return nn.meta.unbox(jax.eval_shape(task.init_params, jax.random.key(0)))


def made_run(folder, *given, step=4, scores=(), **settings):
    """Makes a run with random params; returns its folder and the params."""
    config = config_for(*given, **settings)
    tasks.validate(config)
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
    """A copy of a run whose config.json says something else."""
    shutil.copytree(source, folder)
    content = json.loads((folder / "config.json").read_text())
    change(content)
    (folder / "config.json").write_text(json.dumps(content))
    return folder


# Stages.


@pytest.mark.parametrize("which", ["of a stage", "of the run"])
def test_disentangled_embeddings_are_learnt_in_all_stages(which):
    config = config_for(embeddings="disentangled")
    config.stages = named_stages(short=stage(4, 32, 5), long=stage(4, 64, 10))
    if which == "of a stage":
        config.objective, config.stages.short.objective = "mlm", config.objective
    else:
        config.stages.long.objective = "mlm"
    message = r"config.stages.long: learns mlm, without generator, from whose .* objectives.generator.embeddings=shared"
    with pytest.raises(UserError, match=message):
        tasks.validate(config)
    config.objectives.generator.embeddings = "shared"
    tasks.validate(config)


# Checkpoints.


@pytest.mark.parametrize("objective", ["50*replaced + generator + mine", "mine + 50*replaced + generator"])
def test_a_run_that_learnt_something_unknown_as_well_is_read_whole(disentangled, tmp_path, objective):
    run = changed_info(disentangled[0], tmp_path / "run", lambda content: content.update(objective=objective))
    source = pretrained.read(run)
    jax.tree.map(np.testing.assert_array_equal, source.params, pretrained.read(disentangled[0]).params)
    assert "generator" in source.parts and "--part=generator" in source.no_words
    conversion.convert(run, tmp_path / "part", "huggingface", part="generator")


def test_a_run_with_other_settings_is_refused(disentangled):
    config = config_for(embeddings="shared")
    with pytest.raises(UserError, match=r"config.objectives.generator.embeddings = 'shared': .* holds a run with 'dis"):
        launch(config, disentangled[0])


def test_what_a_run_that_starts_from_it_leaves_is_said_in_short(disentangled, capsys):
    encoder = jax.tree.map(jnp.asarray, pretrained.read(disentangled[0]).params["bert"])
    pretrained.initialize({"bert": encoder}, disentangled[0], encoder_only=True)
    layers = ("dense/bias", "dense/kernel", "output/bias", "output/kernel")
    names = ", ".join(["generator", *(f"replaced_tokens/{layer}" for layer in layers)])
    assert capsys.readouterr().out.endswith(f"arrays loaded; not used: {names}\n")


@pytest.mark.slow
def test_both_halves_are_read_and_converted(disentangled, tmp_path):
    run, stored = disentangled[0], flattened(disentangled[1])
    source = pretrained.read(run)
    assert f"generator/{TABLE}" not in stored
    summed = stored[TABLE] + stored["generator/difference/word/embedding"]
    np.testing.assert_array_equal(flattened(source.params)[TABLE], summed)
    np.testing.assert_array_equal(flattened(source.params)[f"generator/{TABLE}"], stored[TABLE])
    assert not source.predicts_words and "bertjax.convert --part=generator" in source.no_words

    conversion.convert(run, tmp_path / "ours", "bertjax")
    jax.tree.map(np.testing.assert_array_equal, pretrained.read(tmp_path / "ours").params, source.params)
    said = conversion.convert(run, tmp_path / "encoder", "huggingface")
    assert "left out, for which BertModel has no place: generator, replaced_tokens" in said
    np.testing.assert_array_equal(flattened(pretrained.read(tmp_path / "encoder").params)[TABLE][:150], summed[:150])
    for origin, to in ((run, "huggingface"), (tmp_path / "ours", "bertjax")):
        conversion.convert(origin, tmp_path / f"part-{to}", to, part="generator")
        part = pretrained.read(tmp_path / f"part-{to}")
        assert part.predicts_words and part.config.family == "electra" and part.config.hidden_size == 16
        np.testing.assert_array_equal(flattened(part.params)[TABLE][:150], stored[TABLE][:150])
    assert "generator_loss" in (tmp_path / "part-huggingface/README.md").read_text()
    with pytest.raises(UserError, match=r"--part=teacher: .* has generator"):
        conversion.convert(run, tmp_path / "none", "bertjax", part="teacher")
    with pytest.raises(UserError, match=r"--part=generator: .* has trained no other model than its own"):
        conversion.convert(tmp_path / "encoder", tmp_path / "none", "bertjax", part="generator")


@pytest.mark.parametrize("path, value", [
    *((("objectives",), value) for value in (3, {"generator": 3})),
    *((("objectives", "generator"), {name: value}) for name, value in (
        ("width", "a"), ("width", None), ("wide", 1), ("embeddings", ["shared"]), ("layers", 7))),
    *((("stages", "only", "objective"), value) for value in (3, "50*", "mlm + mlm")),
])  # fmt: skip
def test_damaged_settings_are_one_line(disentangled, tmp_path, path, value):
    def change(content):
        functools.reduce(dict.__getitem__, path[:-1], content)[path[-1]] = value

    run = changed_info(disentangled[0], tmp_path / "run", change)
    with pytest.raises(UserError, match=r"config.json: damaged, or written by another version") as error:
        pretrained.read(run)
    assert "\n" not in str(error.value)


def begun_with(run, **settings):
    """The params that a run begins with, from those of another; what is left fresh is 0."""
    config = config_for(**settings)
    config.init_checkpoint = str(run)
    tasks.validate(config)
    zeros = jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), shapes_of(task_of(config)))
    return pretrained.initialize(zeros, run, start=functools.partial(pretraining_run._started, config)), config


@pytest.mark.parametrize("before, after", [
    ("disentangled", "disentangled"), ("disentangled", "apart"), ("shared", "shared"), ("shared", "disentangled"),
    ("shared", "apart"), ("apart", "disentangled"),
])  # fmt: skip
def test_both_models_begin_with_those_of_a_checkpoint(tmp_path, before, after, capsys):
    run, _ = made_run(tmp_path / "run", width=1.0, embeddings=before)
    params, config = begun_with(run, width=1.0, embeddings=after)
    said = capsys.readouterr().out
    assert "left fresh" not in said and "not used" not in said
    (term,) = (term for term in objectives.of(config) if term.name == "generator")
    found, expected = flattened(term.objective.finished(params)), flattened(pretrained.read(run).params)
    assert found.keys() == expected.keys()
    for name, x in expected.items():
        np.testing.assert_allclose(found[name], x, atol=1e-5, err_msg=name)


@pytest.mark.parametrize("before, after, message", [
    ("disentangled", "shared", "= 'shared': the generator of init_checkpoint has other embeddings than the model; set"),
    ("apart", "disentangled", "= 'disentangled': the generator of init_checkpoint has embeddings of other sizes than"),
])  # fmt: skip
def test_embeddings_that_cannot_be_shared_are_refused(tmp_path, before, after, message):
    run, _ = made_run(tmp_path / "run", embeddings=before)
    with pytest.raises(UserError, match=f"config.objectives.generator.embeddings {message}"):
        begun_with(run, embeddings=after)


def test_other_runs_begin_with_the_model_alone(disentangled, capsys):
    """Fine-tuning loads the encoder, whose embeddings have the difference; so do masked words."""
    run, stored = disentangled[0], flattened(disentangled[1])
    summed = stored[TABLE] + stored["generator/difference/word/embedding"]
    config = config_for()
    config.objective = "mlm"
    del config.unlock()["objectives"]
    zeros = jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), shapes_of(task_of(config)))
    for encoder_only in (True, False):
        found = flattened(pretrained.initialize(zeros, run, encoder_only=encoder_only))
        np.testing.assert_array_equal(found[TABLE], summed)
        assert "masked_lm" in capsys.readouterr().out.partition("left fresh: ")[2].partition(";")[0]


@pytest.mark.parametrize("family, embeddings, fields", [
    ("bert", "shared", dict(output="plain")), ("bert", "apart", dict(output="plain")),
    ("eurobert", "apart", dict(tie_word_embeddings=True, num_key_value_heads=1)),
])  # fmt: skip
def test_a_plain_output_that_was_never_learnt_predicts_nothing(family, embeddings, fields):
    config = config_for("unused", family, embeddings=embeddings)
    config.model.update(fields)
    params = shapes_of(task_of(config))
    assert "masked_lm" not in params
    known = dict(path="run", format="bertjax", config=families.config_of(config), tokenizer=None, ignored=[])
    source = Pretrained(params=params, settings=config, **known)
    assert not source.predicts_words and "its generator has one: bertjax.convert --part=generator" in source.no_words
    config.objective = "mlm"
    assert source.predicts_words


def test_cards_say_what_was_learnt(disentangled, tmp_path):
    recipe = {"objective": "50*replaced + generator", "generator.width": "0.5", "generator.embeddings": "disentangled"}
    for part in ("", "generator"):
        conversion.convert(disentangled[0], tmp_path / f"card{part}", "huggingface", "", "mit", part)
        metadata, rows, text = read_card(tmp_path / f"card{part}")
        assert recipe.items() <= rows.items()
        assert ("with bertjax as the generator of another." in text) == bool(part)
    assert metadata["pipeline_tag"] == "fill-mask"
    assert {name for name in rows if "_loss" in name or "_share" in name} == {"generator_loss", "unigram_loss"}


# Layers, sizes, meshes.


def test_the_difference_belongs_to_the_embeddings():
    config = config_for(embeddings="disentangled")
    task = task_of(config)
    params = shapes_of(task)
    factors = flatten_dict(frozen.layer_factors(task, 0.5, params, params, {}))
    assert factors["bert", "embeddings", "word", "embedding"] == 0.25  # two layers below the output
    assert all(x == 0.25 for path, x in factors.items() if path[:2] == ("generator", "difference"))
    assert all(x == 1 for path, x in factors.items() if path[:2] in (("generator", "bert"), ("generator", "masked_lm")))
    config.freeze_layers = 1
    found = frozen.find(task, config, params)
    whole = {path[:3] for path, rows in found.items() if rows is None}
    assert {path[:2] for path in whole} == {("bert", "embeddings"), ("generator", "difference")}
    assert {path[:2] for path in found} - {path[:2] for path in whole} == {("bert", "encoder")}


@dataclasses.dataclass(frozen=True)
class BareConfig(ModelConfig):
    """The model has no heads."""

    vocab_size: int = size(150)
    hidden_size: int = size(32)
    num_hidden_layers: int = size(4)
    max_position_embeddings: int = size(64)
    initializer_range: float = field(0.02)
    family: str = field("bare", "form")


def test_a_model_without_heads_has_a_generator(monkeypatch):
    bare = families.Family(None, lambda config: "masked", None, None, config=BareConfig)
    monkeypatch.setitem(families.FAMILIES.registered, "bare", bare)
    config = config_for(embeddings="apart", layers=0.5)
    config.model = families.model_fields("bare")
    tasks.validate(config)
    found = config_of(families.config_of(config), GeneratorSettings(width=0.25, layers=0.5, embeddings="apart"))
    assert (found.hidden_size, found.num_hidden_layers) == (8, 2)


@pytest.mark.parametrize("axes", [dict(data=1, tensor=-1), dict(data=-1, tensor=4), dict(data=1, fsdp=-1)])
def test_a_mesh_must_divide_the_generator_too(monkeypatch, tmp_path, axes):
    config = config_for(width=0.25)
    config.model.update(num_attention_heads=4, hidden_size=24)
    config.mesh.update(axes)
    monkeypatch.setattr(pretraining_run, "make_mesh", lambda config: make_mesh(config, jax.devices()[:4]))
    tasks.validate(config)
    what = "num_attention_heads = 1" if "tensor" in axes else "hidden_size = 6"
    axis = "tensor" if "tensor" in axes else "fsdp"
    message = f"objectives.generator: the generator has {what}: must be a multiple of the 4 devices along mesh.{axis},"
    with pytest.raises(UserError, match=message):
        launch(config, tmp_path)


def test_a_checkpoint_says_how_wide_a_generator_can_be(disentangled):
    def adapting(width):
        config = config_for(width=width)
        config.model = families.model_fields("bert")
        config.init_checkpoint, config.adapt.model = str(disentangled[0]), True
        tasks.validate(config)
        pretraining_run.KIND.adopt(config, None)
        return config

    assert adapting(0.5).model.num_attention_heads == 2  # 12 by default
    with pytest.raises(UserError, match=r"makes 0.25 of model.num_attention_heads = 2; choose one that gives a whole"):
        adapting(1 / 8)
    config = adapting(0.5)
    config.objective = "lm"  # for a checkpoint that sees earlier tokens only
    config.data.update(next_sentence="none", masking="dynamic")
    del config.unlock()["objectives"]
    tasks.validate(config)
    with pytest.raises(UserError, match="learns words as mlm, not as lm"):
        tasks.validate(config, is_adopted=True)


# Whole runs.


@pytest.fixture(scope="module")
def modern(records_folder, tmp_path_factory):
    """A ModernBERT that learns replaced words and pairs, then masked words alone, in embeddings that are shared."""
    config = config_for(records_folder, "modernbert", depth=1, width=0.5)
    config.objective = f"{config.objective} + nsp"
    config.stages = named_stages(short=stage(3, 32, 5), long=stage(2, 64, 10, objective="mlm"))
    config.eval.update(every_steps=3, max_sequences=16)
    config.checkpoint.every_steps, config.log_every_steps = 3, 1
    tasks.validate(config)
    folder = tmp_path_factory.mktemp("modern")
    launch(config, folder)
    return folder


@pytest.mark.slow
def test_stages_may_leave_replaced_words(modern, tmp_path):
    lines = read_metrics(modern)
    by_step = {line["step"]: set() for line in lines}
    for line in lines:
        by_step[line["step"]] |= {name for name in line if "_loss" in name}
    names = {"replaced_loss", "generator_loss", "nsp_loss"}
    assert {f"train/{name}" for name in names} <= by_step[3] and {f"eval/{name}" for name in names} <= by_step[3]
    assert "train/mlm_loss" in by_step[5] and "eval/mlm_loss" in by_step[5] and "train/nsp_loss" not in by_step[5]
    assert pretrained.read(modern).predicts_words
    with pytest.raises(UserError, match="embeddings have 32 numbers and its hidden states 16, which no model with"):
        conversion.convert(modern, tmp_path / "part", "huggingface", part="generator")


@pytest.mark.slow
def test_what_is_plotted_is_measured(modern):
    names = {name for line in read_metrics(modern) for name in line}
    for name in ("replaced", "generator"):
        for plot in objectives.OBJECTIVES.get(name).plots:
            drawn = {f"train/{name}_{plot.metric}", f"eval/{name}_{plot.metric}"}
            assert drawn | {f"eval/{plot.baseline.format(name=name)}"} <= names


def test_a_generator_with_embeddings_of_its_own_is_a_modernbert(tmp_path):
    run, params = made_run(tmp_path / "run", "unused", "modernbert", embeddings="apart")
    conversion.convert(run, tmp_path / "part", "huggingface", part="generator")
    part = pretrained.read(tmp_path / "part")
    assert (part.config.family, part.config.hidden_size, part.predicts_words) == ("modernbert", 16, True)
    own = params["generator"]["bert"]["embeddings"]["word"]["embedding"]
    np.testing.assert_array_equal(part.params["bert"]["embeddings"]["word"]["embedding"][:150], own[:150])


@pytest.mark.slow
def test_the_generator_has_dropout_of_its_own(records_folder):
    config = config_for(records_folder, depth=1)
    config.model.hidden_dropout_prob = 0.3
    task = Pretraining(config, one_device_mesh(config), records_folder)
    batch, params = next(task.batches(0)), params_of(task)

    @jax.jit
    def loss_of(dropout_keys):
        def rewrite(model):
            given = EncodedBatch(batch, model.bert, {"generator": model.generator}, None, dropout_keys)
            return task.terms[1].objective.rewrite(given, batch["word_weights"], keys_of(16))[1][0]

        return task.model.apply({"params": params}, method=rewrite)

    losses = [float(loss_of(keys_of(16, seed))) for seed in (1, 2, 1)]
    assert losses[0] == losses[2] != losses[1]


@pytest.mark.tpu_aot
def test_a_plan_needs_a_mesh_that_divides_the_generator():
    config = config_for("unused", "electra", width=0.25)
    config.model.num_attention_heads = 4
    config.mesh.update(data=1, tensor=-1)
    with pytest.raises(UserError, match="the generator has num_attention_heads = 1: must be a multiple of the 4"):
        plan(config, accelerator("v5litepod-4"), [0])
