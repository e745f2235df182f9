"""ModernBERT beside transformers': hidden states, logits and gradients of every class, conversion, packing, windows."""

import dataclasses
import json
import math

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from bertjax import experiment, families, tasks
from bertjax.config import Compute, UserError
from bertjax.families.modernbert import FAMILY, ModernBertConfig
from bertjax.families.with_heads import (
    BertForMaskedLM,
    count_parameters,
)
from bertjax.interop import conversion, huggingface, pretrained
from bertjax.model.plain_attention import plain_attention
from bertjax.model.tiles import Tile
from bertjax.model.window_attention import window_attention
from bertjax.reporting import insight
from bertjax.sharding.mesh import make_mesh
from bertjax.sharding.streams import put_batch
from bertjax.tasks import sweep
from bertjax.tasks.launch import launch
from bertjax.tasks.pretraining import Pretraining
from bertjax.training.schedules import make_schedule
from bertjax.training.sinks.jsonl import read_metrics
from bertjax.training.step import make_program, put_hyperparameters
from tests.conftest import tiny_config
from tests.tasks.test_finetuning import config_for as fine_tuning_config_for
from tests.tasks.test_finetuning import write_sst2

pytestmark = pytest.mark.usefixtures("on_one_device")

TINY = ModernBertConfig(
    vocab_size=300, hidden_size=32, num_hidden_layers=8, num_attention_heads=4, intermediate_size=48,
    max_position_embeddings=1100,
)  # fmt: skip


def random_params(model, config, seed=0):
    """Nothing is 0 or 1, so that nothing can be left out or mixed up unseen."""
    ids = jnp.zeros((1, 8), jnp.int32)
    extra = (ids,) if isinstance(model, BertForMaskedLM) else ()
    params = nn.meta.unbox(jax.jit(model.init)(jax.random.key(seed), ids, ids, ids, *extra)["params"])
    rng = np.random.default_rng(seed)
    params = jax.tree.map(lambda x: np.array(x + rng.normal(0, 0.1, x.shape), np.float32), params)
    if "bias" in params.get("masked_lm", {}):  # padding
        params["masked_lm"]["bias"][config.vocab_size :] = 0
    params["bert"]["embeddings"]["word"]["embedding"][config.vocab_size :] = 0
    return params


def test_published_sizes():
    shapes = {"base": (22, 768, 12, 1152, 149_655_232), "large": (28, 1024, 16, 2624, 395_881_664)}
    for layers, hidden, heads, inner, count in shapes.values():
        config = ModernBertConfig(
            num_hidden_layers=layers, hidden_size=hidden, num_attention_heads=heads, intermediate_size=inner
        )
        ids = jnp.zeros((1, 8), jnp.int32)
        params = jax.eval_shape(BertForMaskedLM(config).init, jax.random.key(0), *[ids] * 4)["params"]
        assert count_parameters(nn.meta.unbox(params), config) == count


OLD = {"global_attn_every_n_layers": 3, "global_rope_theta": 1000.0, "local_rope_theta": 77.0}
NEW = {
    "layer_types": (["full_attention", "sliding_attention", "sliding_attention"] * 3)[:8],
    "rope_parameters": {
        "full_attention": {"rope_type": "default", "rope_theta": 1000.0},
        "sliding_attention": {"rope_type": "default", "rope_theta": 77.0},
    },
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    made = tmp_path_factory.mktemp("modernbert")
    huggingface.write(made, TINY, random_params(BertForMaskedLM(TINY), TINY), None)
    return made


@pytest.mark.slow
@pytest.mark.parametrize("form", [OLD, NEW])
def test_both_forms_of_a_config_are_read(form, folder, tmp_path):
    fields = json.loads((folder / "config.json").read_text())
    for name in (*OLD, *NEW):
        del fields[name]
    (tmp_path / "config.json").write_text(json.dumps(fields | form))
    found = huggingface.read_config(tmp_path / "config.json")
    assert found == dataclasses.replace(TINY, global_rope_theta=1000.0, local_rope_theta=77.0)


@pytest.mark.parametrize(
    "changed, message",
    [
        ({"layer_types": ["full_attention"] * 5}, "layer_types has 5 types, but there are 8 layers"),
        ({"layer_types": ["sliding_attention"] * 8}, "layer_types must be full_attention in every n-th layer"),
        ({"rope_parameters": [1]}, r"rope_parameters \[1\] must have an object for each type of layer"),
        ({"rope_parameters": {"full_attention": 5}}, "rope_parameters .* must have an object for each type"),
        ({"rope_parameters": {"full_attention": {"rope_type": "yarn"}}}, "rope_type 'yarn' is not supported"),
        ({"rope_parameters": {"full_attention": {"rope_theta": 0.0}}}, "global_rope_theta = 0.0: must be above 0"),
        ({"mlp_bias": True}, "mlp_bias True is not supported; supported: False"),
        ({"mlp_dropout": 0.1}, "mlp_dropout 0.1 is not supported; supported: 0.0"),
        ({"hidden_activation": "silu"}, "hidden_activation 'silu' is not supported"),
        ({"classifier_pooling": "max"}, "classifier_pooling = 'max': choose one of cls, mean"),
        ({"hidden_size": "wide"}, "hidden_size is 'wide', which is not a valid int"),
        ({"vocab_size": 301}, "tok_embeddings.weight has shape .*, but its config says"),
    ],
)
def test_what_we_do_not_have_is_named(changed, message, folder, tmp_path):
    for path in folder.iterdir():
        (tmp_path / path.name).write_bytes(path.read_bytes())
    fields = json.loads((folder / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(fields | changed))
    with pytest.raises(UserError, match=message) as error:
        pretrained.read(tmp_path)
    assert "\n" not in str(error.value)


@pytest.mark.slow
def test_a_form_that_transformers_does_not_have_stays_ours(tmp_path):
    config = dataclasses.replace(TINY, glu=False)
    assert random_params(BertForMaskedLM(config), config)["bert"]["encoder"]["first"]["input"]["kernel"].ndim == 2
    with pytest.raises(UserError, match=r"model.glu = False"):
        huggingface.check_form(config)
    with pytest.raises(UserError, match=r"model.family = 'modernbert'"):
        pretrained.tf1.check_form(TINY)


# Attention within a window.


def random_attention(length, half, seed=0):
    rng = np.random.default_rng(seed)
    qkv = jnp.asarray(rng.normal(size=(4, length, 3, 4, 8)), jnp.float32)
    segments = np.sort(rng.integers(1, 4, (4, length)), axis=1)
    segments[:, length - length // 5 :] = 0
    return qkv, jnp.asarray(segments, jnp.int32)


def plain(qkv, segments, half):
    """Every score, and a mask."""
    query, key, value = jnp.moveaxis(qkv, 2, 0)
    place = jnp.arange(qkv.shape[1])
    near = jnp.abs(place - place[:, None]) <= half
    mask = (segments[:, :, None] == segments[:, None]) & near
    scores = jnp.where(mask[:, None], jnp.einsum("bqnd,bknd->bnqk", query, key) / 8**0.5, -jnp.inf)
    context = jnp.einsum("bnqk,bknd->bqnd", nn.softmax(scores), value)
    return context.reshape(*context.shape[:2], -1)


LENGTHS = [(1, 4), (4, 4), (5, 4), (9, 4), (37, 8), (64, 8), (65, 16), (30, 64)]  # of texts, and half of a window


@pytest.mark.slow
@pytest.mark.parametrize(
    "length, half, tile",
    [
        *((*each, None) for each in LENGTHS),
        *((*each, tile) for tile in (Tile(2, 2), Tile(1, 1)) for each in LENGTHS[3:7]),
    ],
)
def test_a_window_is_all_scores_and_a_mask_forwards_and_backwards(length, half, tile):
    qkv, segments = random_attention(length, half)
    weights = jnp.asarray(np.random.default_rng(1).normal(size=(4, length, 32)), jnp.float32)

    def both(attend):
        return jax.jit(jax.value_and_grad(lambda x: ((y := attend(x)) * weights).sum() + 0 * y.sum()))(qkv)

    expected, expected_gradient = both(lambda x: plain(x, segments, half))
    for attend in (
        lambda x: window_attention(x, segments, half, Compute(), tile),
        lambda x: plain_attention(x, segments, None, 0.0, Compute(), tile=tile, window=half),
    ):
        found, gradient = both(attend)
        np.testing.assert_allclose(found, expected, rtol=1e-4, atol=1e-4)
        np.testing.assert_allclose(gradient, expected_gradient, atol=1e-5)


@pytest.mark.slow
def test_a_window_that_holds_the_text_is_global_attention():
    qkv, segments = random_attention(20, 20)
    np.testing.assert_allclose(
        window_attention(qkv, segments, 20, Compute()), plain_attention(qkv, segments, None, 0.0, Compute()), atol=1e-5
    )


@pytest.mark.slow
def test_attention_is_drawn_with_windows_and_adds_up():
    config = dataclasses.replace(TINY, local_attention=4)
    params = random_params(BertForMaskedLM(config), config)
    ids = np.random.default_rng(0).integers(3, 300, (1, 12))
    attention = jax.jit(FAMILY.attention, static_argnums=0)
    found = np.asarray(attention(config, params["bert"], ids, np.ones_like(ids), np.zeros_like(ids)))
    assert found.shape == (8, 4, 12, 12)
    np.testing.assert_allclose(found.sum(-1), 1, rtol=1e-5)
    far = np.abs(np.arange(12) - np.arange(12)[:, None]) > 2
    assert (found[[1, 2, 4, 5, 7]][:, :, far] == 0).all() and (found[[0, 3, 6]] > 0).all()


# In training.


def config_for(records, **fields):
    config = tiny_config(records=records)
    own = dict(vocab_size=150, hidden_size=32, num_hidden_layers=5, num_attention_heads=2, intermediate_size=48)
    config.model = families.model_fields("modernbert", **own, max_position_embeddings=64, local_attention=16)
    config.objective = "mlm"
    config.update(fields)
    tasks.validate(config)
    return config


@pytest.mark.slow
def test_packed_sequences_learn_what_padded_ones_do(records_folder):
    """Positions restart, and windows do not cross sequences."""
    losses, gradients = [], []
    for packing in (False, True):
        config = config_for(records_folder, packing=packing)
        task = Pretraining(config, make_mesh(config, jax.devices()[:1]), records_folder)
        if not packing:
            params = make_program(task, config, task.mesh).init(jax.random.key(0)).params
        batch = next(task.batches(7))
        run = jax.jit(jax.value_and_grad(lambda p, b, task=task: task.loss(p, task.normalize(b))[0]))
        loss, gradient = run(params, batch)
        losses.append(loss), gradients.append(gradient)
    np.testing.assert_allclose(*losses, rtol=1e-5)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-3, atol=1e-6), *gradients)


@pytest.mark.slow
def test_a_sharded_step_is_that_of_one_device(records_folder):
    losses = []
    for mesh, remat in (
        (dict(data=1, fsdp=1, tensor=1), "none"),
        (dict(data=2, fsdp=2, tensor=2), "none"),
        (dict(data=8, fsdp=1, tensor=1), "full"),
    ):
        config = config_for(records_folder, remat=remat)
        config.mesh.update(mesh)
        task = Pretraining(config, make_mesh(config, jax.devices()[: math.prod(mesh.values())]), records_folder)
        program = make_program(task, config, task.mesh)
        state = program.init(jax.random.key(0))
        recipe = put_hyperparameters(0, make_schedule(config.optimizer, 10), task.mesh)
        for batch in [next(task.batches(0)), next(task.batches(1))]:
            state, metrics = program.train_step(state, put_batch(batch, task.mesh), recipe)
        losses.append(jax.device_get(metrics))
    for other in losses[1:]:
        for name, value in losses[0].items():
            np.testing.assert_allclose(other[name], value, rtol=2e-4)


@pytest.mark.slow
def test_it_is_trained_fills_masks_and_is_fine_tuned(records_folder, tmp_path):
    launch(config_for(records_folder), tmp_path / "run")
    lines = [line["train/loss"] for line in read_metrics(tmp_path / "run") if "train/loss" in line]
    assert lines[-1] < lines[0]
    source = pretrained.read_with_tokenizer(tmp_path / "run")
    assert source.predicts_words and "pooler" not in source.params["bert"]
    insight.attention(source, "the ship")
    write_sst2(tmp_path)
    config = fine_tuning_config_for(tmp_path, tmp_path / "run", epochs=4.0, packing=True)
    config.optimizer.learning_rate = 3e-3
    tasks.validate(config)
    launch(config, tmp_path / "tuned")
    tuned = pretrained.read_with_tokenizer(tmp_path / "tuned")
    assert tuned.config.classifier_dropout == 0 and tuned.config.family == "modernbert"
    (found,) = tasks.get("glue").predict(tuned, [("ship sail harbour",)])
    assert found["label"] == "1"
    conversion.convert(tmp_path / "tuned", tmp_path / "out", "huggingface")
    card = (tmp_path / "out/README.md").read_text()
    assert "\nModernBERT of " in card and "text-classification" in card
    assert "| classifier_dropout | 0.0 |" in card and 'tags: ["modernbert", "bertjax"]' in card
    assert sweep.fields_of(config)["classifier_dropout"] == "model.classifier_dropout"


def test_a_classifier_starts_from_the_words_head(folder):
    source = pretrained.read(folder)
    started = FAMILY.start(source.params)
    assert (started["bert"]["pooler"]["dense"]["kernel"] == source.params["masked_lm"]["dense"]["kernel"]).all()
    assert FAMILY.start(started) is started


@pytest.mark.parametrize(
    "field, value, message",
    [
        ("local_attention", 7, "config.model.local_attention = 7: must be even"),
        ("global_rope_theta", 0.0, "config.model.global_rope_theta = 0.0: must be above 0"),
        ("global_attn_every_n_layers", 0, "config.model.global_attn_every_n_layers = 0: must be at least 1"),
        ("num_attention_heads", 32, "makes heads of 1, which rotary positions cannot halve"),
    ],
)
def test_mistakes_are_named(field, value, message):
    config = config_for("unused")
    config.model[field] = value
    with pytest.raises(UserError, match=message) as error:
        tasks.validate(config)
    assert "\n" not in str(error.value)


def test_windows_look_to_both_sides():
    """A causal mask has no window: there is no such field, whatever sets it."""
    with pytest.raises(UserError, match=r"config.model has no field 'causal'") as error:
        experiment.from_arguments(["--config=modern", "--config.model.causal=True"])
    assert "\n" not in str(error.value)


@pytest.mark.slow
def test_initial_values_are_smaller_where_matrices_put_out():
    """Normal values of 0.02, cut off at two of these; those of output matrices are divided by the root of 2 layers.
    The words' head is one of them, in transformers as well."""
    config = ModernBertConfig(
        vocab_size=512, hidden_size=128, num_hidden_layers=8, num_attention_heads=2, intermediate_size=192
    )
    ids = jnp.zeros((1, 8), jnp.int32)
    params = nn.meta.unbox(jax.jit(BertForMaskedLM(config).init)(jax.random.key(0), *[ids] * 4)["params"])
    kernels = {
        "/".join(key.key for key in path): np.asarray(x)
        for path, x in jax.tree_util.tree_leaves_with_path(params)
        if path[-1].key in ("kernel", "embedding")
    }
    assert len(kernels) == 1 + 4 * (1 + 3 + 1) + 1
    for name, kernel in kernels.items():
        expected = 0.02 / 4 if name.endswith(("output/kernel", "masked_lm/dense/kernel")) else 0.02
        assert kernel.std() == pytest.approx(0.8796 * expected, rel=0.03), name  # the deviation of what is not cut off
        assert 1.9 * expected < np.abs(kernel).max() <= 2 * expected, name


def test_fine_tuning_takes_flags_for_fields_of_the_checkpoints_family(folder):
    def adopted(*flags, checkpoint=folder):
        arguments = ["--config=classify", f"--config.init_checkpoint={checkpoint}", "--config.data.path=x", *flags]
        config, _ = experiment.from_arguments(arguments)
        tasks.validate(config)
        pretrained.adopt_model(config, pretrained.read_config(checkpoint), "there")
        tasks.validate(config)
        return config.model

    found = adopted("--config.model.classifier_pooling=mean", "--config.model.classifier_dropout=0.2")
    assert found.classifier_pooling == "mean" and found.classifier_dropout == 0.2 and found.family == "modernbert"
    assert found.global_rope_theta == TINY.global_rope_theta and adopted().classifier_pooling == "cls"
    for flag, message in (
        ("rms_norm_eps=1e-6", "rms_norm_eps = 1e-06: there has model.family = 'modernbert', whose models have no such"),
        ("global_rope_theta=7.0", "config.model.global_rope_theta = 7.0: there has 160000.0; leave it out"),
        ("hidden_act=relu", "config.model.hidden_act = relu: there has gelu; leave it out"),
        ("glu=False", "config.model.glu = False: there has True; leave it out"),
        ("classifier_pooling=max", "config.model.classifier_pooling = 'max': choose one of cls, mean"),
        ("classifier_poling=mean", "config.model has no field 'classifier_poling'"),
    ):
        with pytest.raises(UserError, match=message) as error:
            adopted(f"--config.model.{flag}")
        assert "\n" not in str(error.value)
    with pytest.raises(UserError, match=r"config.model has no field 'classifier_pooling'"):  # its family is known
        experiment.from_arguments(["--config=base", "--config.model.classifier_pooling=mean"])


def test_another_family_cannot_start_from_it(folder):
    config = tiny_config("corpus")
    config.init_checkpoint = str(folder)
    with pytest.raises(UserError, match=r"config.model.family = 'bert': .* has 'modernbert'; begin with an experiment"):
        pretrained.adopt(config)


def test_a_config_of_another_family_does_not_become_one():
    config = tiny_config("corpus")
    config.model.family = "modernbert"
    message = (
        r"config.model.family = 'modernbert': its models do not have the fields of this config, such as .*; begin with"
    )
    with pytest.raises(UserError, match=message):
        tasks.validate(config)
