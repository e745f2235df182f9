"""EuroBERT: its published sizes, what is read of a config, and that it trains, packs, shards and has kernels."""

import dataclasses
import functools
import json

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from bertjax import families, tasks
from bertjax.config import Compute, UserError
from bertjax.families.eurobert import EuroBertConfig
from bertjax.families.eurobert.model import EuroBertModel
from bertjax.families.with_heads import BertForMaskedLM, count_parameters, forward_flops
from bertjax.interop import conversion, huggingface, pretrained
from bertjax.model import gpu_kernels, kernels
from bertjax.model.attention import RMSNorm
from bertjax.reporting import insight
from bertjax.sharding.mesh import make_mesh
from bertjax.sharding.rules import RULES, stacked
from bertjax.sharding.streams import put_batch
from bertjax.tasks.launch import launch
from bertjax.tasks.pretraining import Pretraining
from bertjax.training.schedules import make_schedule
from bertjax.training.sinks.jsonl import read_metrics
from bertjax.training.step import make_program, put_hyperparameters
from tests.conftest import tiny_config
from tests.families.test_modernbert import random_params
from tests.model.test_flash_attention import packed
from tests.tasks.test_finetuning import config_for as fine_tuning_config_for
from tests.tasks.test_finetuning import write_sst2

pytestmark = pytest.mark.usefixtures("on_one_device")

TINY = EuroBertConfig(
    vocab_size=300, hidden_size=32, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2, head_dim=8,
    intermediate_size=48, max_position_embeddings=64,
)  # fmt: skip


def shapes_of(config):
    ids = jnp.zeros((1, 8), jnp.int32)
    return jax.eval_shape(BertForMaskedLM(config).init, jax.random.key(0), *[ids] * 4)["params"]


@pytest.mark.parametrize(
    "sizes, encoder",
    [
        (dict(), 211_766_016),
        (
            dict(hidden_size=1152, num_hidden_layers=26, num_attention_heads=18, num_key_value_heads=6,
                 intermediate_size=4096),
            607_874_688,
        ),
        (
            dict(hidden_size=2304, num_hidden_layers=32, num_attention_heads=18, num_key_value_heads=6, head_dim=128,
                 intermediate_size=6144),
            2_107_590_912,
        ),
    ],
)  # fmt: skip
def test_published_sizes_and_their_flops(sizes, encoder):
    config = EuroBertConfig(**sizes)
    params = nn.meta.unbox(shapes_of(config))
    assert count_parameters(params, config) == encoder + 128256 * config.hidden_size  # the output layer of its own
    tied = dataclasses.replace(config, tie_word_embeddings=True)
    assert count_parameters(nn.meta.unbox(shapes_of(tied)), tied) == encoder
    products = jax.tree_util.tree_leaves_with_path(params["bert"]["encoder"])
    matrices = sum(leaf.size for path, leaf in products if path[-1].key == "kernel")
    of_scores = 2 * 512**2 * config.num_attention_heads * config.head_dim * config.num_hidden_layers
    head = config.hidden_size * config.padded_vocab_size
    pooled = config.hidden_size**2 + 2 * config.hidden_size
    assert forward_flops(config, 3, 512, 77) == 3 * 2 * (512 * matrices + of_scores + 77 * head + pooled)


def test_matrices_that_are_stacked_are_known_to_optimizers():
    """Keys and values of all layers, and both halves of a gate, are matrices of their own; tables are no kernels."""
    axes = nn.get_partition_spec({"params": shapes_of(TINY)})["params"]
    layers = axes["bert"]["encoder"]["layers"]
    found = {name: stacked(layers["attention"][name]["kernel"]) for name in ("query", "key_value", "output")}
    assert found == {"query": [0], "key_value": [0, 2], "output": [0]}
    assert stacked(layers["input"]["kernel"]) == [0, 2] and stacked(layers["output"]["kernel"]) == [0]
    assert axes["masked_lm"]["decoder"]["embedding"] == axes["bert"]["embeddings"]["word"]["embedding"]


@pytest.mark.slow
def test_rms_norm_and_its_gradient_are_the_definition():
    x, grad = jax.random.normal(jax.random.key(0), (2, 3, 5, 32))
    norm, scale = RMSNorm(TINY, Compute()), jnp.linspace(0.5, 2, 32)

    def definition(x, scale):
        return x / jnp.sqrt(jnp.square(x).mean(-1, keepdims=True) + TINY.rms_norm_eps) * scale

    expected, of_definition = jax.vjp(definition, x, scale)
    found, of_norm = jax.vjp(lambda x, scale: norm.apply({"params": {"scale": scale}}, x), x, scale)
    np.testing.assert_allclose(found, expected, atol=1e-6)
    for a, b in zip(of_norm(grad), of_definition(grad), strict=True):
        np.testing.assert_allclose(a, b, atol=1e-5)
    tiny = jnp.full((1, 32), 1e-3, jnp.bfloat16)  # its square is lost beside eps in bfloat16
    half = RMSNorm(TINY, Compute(dtype="bfloat16"))
    found = half.apply({"params": {"scale": scale}}, tiny)
    np.testing.assert_allclose(found.astype(jnp.float32), definition(tiny.astype(jnp.float32), scale), rtol=1e-2)


@pytest.mark.slow
@pytest.mark.parametrize("chip", [kernels.EMULATED, gpu_kernels.EMULATED])
def test_kernels_give_the_same_on_any_mesh(chip):
    """States and gradients, of the plain path on one device, and of the kernels on eight."""
    sizes = dict(hidden_size=128, num_attention_heads=4, head_dim=64, intermediate_size=256)
    config = dataclasses.replace(TINY, **sizes, max_position_embeddings=160)
    ids, segments = jax.random.randint(jax.random.key(0), (4, 160), 0, 300), packed(4, 160)
    plain = EuroBertModel(config)
    make = jax.jit(functools.partial(plain.init, method="encode"))
    params = nn.meta.unbox(make(jax.random.key(1), ids, segments, ids))

    def loss(params, model):
        states = model.apply(params, ids, segments, ids, method="encode")
        return jnp.square(states).sum() + states[:, :, ::7].sum(), states

    differentiate = jax.jit(jax.value_and_grad(loss, has_aux=True), static_argnums=1)
    (_, expected), of_params = differentiate(params, plain)
    mesh = jax.make_mesh((2, 2, 2), ("data", "fsdp", "tensor"), axis_types=(jax.sharding.AxisType.Auto,) * 3)
    with jax.set_mesh(mesh), nn.logical_axis_rules(RULES):
        (_, found), of_same = differentiate(params, dataclasses.replace(plain, compute=Compute(chip=chip)))
    np.testing.assert_allclose(found, expected, atol=2e-5)
    for a, b in zip(jax.tree.leaves(of_params), jax.tree.leaves(of_same), strict=True):
        np.testing.assert_allclose(b, a, atol=2e-5 * max(1.0, np.abs(a).max()))


# Its config.


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    made = tmp_path_factory.mktemp("eurobert")
    huggingface.write(made, TINY, random_params(BertForMaskedLM(TINY), TINY), None)
    return made


def with_fields(folder, changed: dict, tmp_path):
    """Copies the folder, with other fields in config.json; None: without it."""
    for path in folder.iterdir():
        (tmp_path / path.name).write_bytes(path.read_bytes())
    fields = json.loads((folder / "config.json").read_text()) | changed
    given = {name: x for name, x in fields.items() if x is not None or name not in changed}
    (tmp_path / "config.json").write_text(json.dumps(given))
    return tmp_path


@pytest.mark.slow
@pytest.mark.parametrize(
    "changed, expected",
    [
        (dict(rope_theta=None, rope_parameters={"rope_type": "default", "rope_theta": 9}), dict(rope_theta=9.0)),
        (dict(rope_theta=250000, rope_parameters=None, head_dim=None), {}),  # as the published ones
        (dict(classifier_pooling=None, clf_pooling="mean"), dict(classifier_pooling="mean")),
    ],
)
def test_all_forms_of_a_config_are_read(changed, expected, folder, tmp_path):
    source = pretrained.read(with_fields(folder, changed, tmp_path))
    assert source.config == dataclasses.replace(TINY, **expected) and isinstance(source.config.rope_theta, float)


@pytest.mark.parametrize(
    "changed, message",
    [
        (dict(rope_theta=None, rope_parameters=None), "rope_theta is missing; the config of such a model needs it"),
        (dict(rope_parameters={"rope_type": "yarn"}), "rope_type 'yarn' is not supported; supported: 'default'"),
        (dict(rope_parameters=[1]), r"rope_parameters \[1\] must be an object"),
        (dict(rope_scaling={"type": "linear"}), "rope_scaling .* is not supported; supported: None"),
        (dict(hidden_act="gelu"), "hidden_act 'gelu' is not supported; supported: 'silu'"),
        (dict(attention_bias=True), "attention_bias True is not supported; supported: False"),
        (dict(attention_dropout=0.1), "attention_dropout 0.1 is not supported; supported: 0.0"),
        (dict(classifier_pooling="cls"), "classifier_pooling = 'cls': choose one of bos, mean, late"),
        (dict(num_key_value_heads=4), "self_attn.k_proj.weight has shape .*, but its config says"),
        (dict(tie_word_embeddings=True), "lm_head.weight is not model.embed_tokens.weight, although config.json has"),
    ],
)
def test_what_we_do_not_have_is_named(changed, message, folder, tmp_path):
    with pytest.raises(UserError, match=message) as error:
        pretrained.read(with_fields(folder, changed, tmp_path))
    assert "\n" not in str(error.value)


# In training.


def config_for(records, **fields):
    config = tiny_config(records=records)
    own = {name: x for name, x in dataclasses.asdict(TINY).items() if name not in ("family", "vocab_size")}
    config.model = families.model_fields("eurobert", **own, vocab_size=150)
    config.objective = "mlm"
    config.update(fields)
    tasks.validate(config)
    return config


@pytest.mark.slow
def test_packed_sequences_learn_what_padded_ones_do(records_folder):
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
def test_packed_texts_are_pooled_as_rows_of_their_own():
    ids = np.random.default_rng(0).integers(3, 300, (2, 6)).astype(np.int32)
    places, ones = np.arange(12)[None] % 6, np.ones_like(ids)
    segments, firsts = np.repeat([[1, 2]], 6, axis=1), np.array([[0, 6]])
    params, row = jax.jit(EuroBertModel(TINY).init)(jax.random.key(0), ids, ones, ids), ids.reshape(1, -1)
    kinds = [EuroBertModel(dataclasses.replace(TINY, classifier_pooling=kind)) for kind in ("bos", "mean", "late")]

    @jax.jit
    def pool(params):
        return [
            (model.apply(params, ids, ones, ids)[1], model.apply(params, row, segments, row, places, None, firsts)[1])
            for model in kinds
        ]

    found = pool(nn.meta.unbox(params))
    for apart, together in found:
        np.testing.assert_allclose(together[0], apart, atol=1e-5)
    assert not np.allclose(found[0][0], found[1][0], atol=1e-3) and not np.allclose(found[1][0], found[2][0], atol=1e-3)


@pytest.mark.slow
def test_a_sharded_step_is_that_of_one_device(records_folder):
    losses = []
    for devices, axes in ((1, dict(data=1, fsdp=1, tensor=1)), (8, dict(data=2, fsdp=2, tensor=2))):
        config = config_for(records_folder, remat="full" if devices > 1 else "none")
        config.mesh.update(axes)
        task = Pretraining(config, make_mesh(config, jax.devices()[:devices]), records_folder)
        program = make_program(task, config, task.mesh)
        state = program.init(jax.random.key(0))
        recipe = put_hyperparameters(0, make_schedule(config.optimizer, 10), task.mesh)
        for step in (0, 1):
            state, metrics = program.train_step(state, put_batch(next(task.batches(step)), task.mesh), recipe)
        losses.append(jax.device_get(metrics))
    for name in losses[0]:
        np.testing.assert_allclose(losses[0][name], losses[1][name], rtol=2e-4)


@pytest.mark.slow
def test_it_is_trained_continued_and_fine_tuned(records_folder, tmp_path):
    launch(config_for(records_folder), tmp_path / "run")
    lines = [line["train/loss"] for line in read_metrics(tmp_path / "run") if "train/loss" in line]
    assert lines[-1] < lines[0]
    source = pretrained.read_with_tokenizer(tmp_path / "run")
    assert source.predicts_words and {*source.params} == {"bert", "masked_lm"} and "pooler" not in source.params["bert"]
    insight.attention(source, "the ship")
    conversion.convert(tmp_path / "run", tmp_path / "folder", "huggingface")
    assert pretrained.read(tmp_path / "folder").architecture == "BertForMaskedLM"

    continued = config_for(records_folder, init_checkpoint=str(tmp_path / "folder"))
    pretrained.adopt(continued)
    continued.model.tie_word_embeddings = True
    with pytest.raises(UserError, match=r"tie_word_embeddings = True: .* has False; set --config"):
        pretrained.adopt(continued)

    write_sst2(tmp_path)
    config = fine_tuning_config_for(tmp_path, tmp_path / "folder", epochs=4.0, packing=True)
    tasks.validate(config)
    launch(config, tmp_path / "tuned")
    tuned = pretrained.read_with_tokenizer(tmp_path / "tuned")
    assert tuned.config.classifier_pooling == "late" and "pooler" in tuned.params["bert"]
    (found,) = tasks.get("glue").predict(tuned, [("ship sail harbour",)])
    assert found["label"] == "1"
    conversion.convert(tmp_path / "tuned", tmp_path / "out", "huggingface")
    card = (tmp_path / "out/README.md").read_text()
    assert "\nEuroBERT of " in card and "text-classification" in card


def test_one_whose_words_are_tied_predicts_them(tmp_path):
    config = dataclasses.replace(TINY, tie_word_embeddings=True)
    params = random_params(BertForMaskedLM(config), config)
    assert {*params} == {"bert"}
    huggingface.write(tmp_path / "there", config, params, None)
    source = pretrained.read(tmp_path / "there")
    assert source.predicts_words and source.architecture == "BertForMaskedLM" and source.config == config
    conversion.convert(tmp_path / "there", tmp_path / "encoder", "huggingface", "EuroBertModel")
    assert not pretrained.read(tmp_path / "encoder").predicts_words


@pytest.mark.parametrize(
    "field, value, message",
    [
        ("num_key_value_heads", 3, "config.model.num_key_value_heads = 3: must divide model.num_attention_heads = 4"),
        ("head_dim", 7, "config.model.head_dim = 7: must be even: rotary positions halve it"),
        ("rope_theta", 0.0, "config.model.rope_theta = 0.0: must be above 0"),
    ],
)
def test_mistakes_are_named(field, value, message):
    config = config_for("unused")
    config.model[field] = value
    with pytest.raises(UserError, match=message):
        tasks.validate(config)


def test_a_mesh_splits_heads_that_are_shared():
    config = config_for("unused")
    config.mesh.update(data=2, fsdp=1, tensor=4)
    with pytest.raises(UserError, match="num_key_value_heads = 2: must be a multiple of the 4 devices"):
        make_mesh(config)
