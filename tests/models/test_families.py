"""The contract of every family: steps on eight devices, packed rows, FLOPs, kernels, conversion, tuning, bad input."""

import dataclasses
import functools
import json
import math
import re
import shutil

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from bertjax import library
from bertjax.common.errors import UserError
from bertjax.config.defaults import fine_tuning_config, named_stages, stage
from bertjax.config.model_config import Compute
from bertjax.distributed.mesh import make_mesh, put_batch
from bertjax.distributed.rules import RULES
from bertjax.export.inline_jaxpr import straight
from bertjax.inference import tasks
from bertjax.interop import conversion, huggingface, pretrained, tf1
from bertjax.launch.start import launch
from bertjax.launch.validate import validate
from bertjax.models import families
from bertjax.models.family import HuggingFaceFamily, TwoStreamAttention
from bertjax.models.heads import BertForMaskedLM, count_parameters, model_flops
from bertjax.models.transformer_xl.config import TransformerXLConfig
from bertjax.models.transformer_xl.family import FAMILY as TRANSFORMER_XL
from bertjax.nn.kernels import pallas, triton
from bertjax.text import tokenizer, vocabulary_learning
from bertjax.training.checkpoints import checkpoint, workdir
from bertjax.training.optim.schedules import schedule_of
from bertjax.training.step import Program, put_hyperparameters
from tests.conftest import TOPICS, make_corpus, pretraining_task, tiny_config
from tests.markers import slow_case
from tests.models import own_family
from tests.models.test_modernbert import random_params
from tests.nn.reference import packed
from tests.text.test_tokenizer import of_mpnet

pytestmark = pytest.mark.usefixtures("on_one_device")

SIZES = dict(
    vocab_size=150, hidden_size=16, num_hidden_layers=1, num_attention_heads=2, intermediate_size=32,
    max_position_embeddings=64,
)  # fmt: skip
FAMILIES = {
    "bert": {}, "roberta": {}, "distilbert": {}, "electra": dict(embedding_size=8),
    "albert": dict(embedding_size=8, num_hidden_layers=4, num_hidden_groups=2),
    "xlm_roberta_xl": {}, "lstms": {}, "xlnet": {},
    "modernbert": dict(num_hidden_layers=2, global_attn_every_n_layers=2, local_attention=16),
    "eurobert": dict(num_key_value_heads=2, head_dim=8), "transformer_xl": dict(memory_length=8),
    "neobert": {},
    "ultrabert": dict(
        num_hidden_layers=3, num_key_value_heads=2, head_dim=8, prediction_head_size=24, layer_types="sliding,full",
        sliding_window=8,
    ),
    "deberta_v2": dict(position_buckets=8, conv_kernel_size=3), "mpnet": dict(position_offset=2),
    "nomic_bert": {}, "gte": {}, "jina_embeddings_v3": {}, "megatron_bert": {}, "mixer": dict(mixing_act="relu"),
}  # fmt: skip
WRITTEN = [name for name in FAMILIES if name not in ("lstms", "transformer_xl", "mixer")]  # by transformers as well
LABELS = {"sea": "1", "court": "0"}


@pytest.fixture(scope="module", autouse=True)
def registered():
    families.register("mixer", own_family.FAMILY)
    yield
    del families.FAMILIES.registered["mixer"]


def test_every_family_fulfils_the_contract():
    assert {*families.FAMILIES.names()} == FAMILIES.keys()
    assert {name for name in FAMILIES if isinstance(families.FAMILIES.get(name), HuggingFaceFamily)} == {*WRITTEN}


def model_config(family, **fields):
    return families.FAMILIES.get(family).config_class(**{"family": family, **SIZES, **FAMILIES[family], **fields})


def config_for(family, records="unused", **fields):
    config = tiny_config(records=records)
    config.model = families.model_fields(family, **{**SIZES, **FAMILIES[family]})
    config.model.update({name: 0.0 for name in config.model if "dropout" in name})
    config.data.update(masking="dynamic", next_sentence="none")
    config.eval.fill_masks, config.stages = (), named_stages(only=stage(10, 64, 10))
    config.optimizer.update(name="sgd", schedule="constant", learning_rate=1.0, warmup_steps=0, weight_decay=0.0)
    config.update_from_flattened_dict(fields)
    return config


def abstract_params(config):
    ids = jnp.zeros((1, 8), jnp.int32)
    return jax.eval_shape(BertForMaskedLM(config).init, jax.random.key(0), *[ids] * 4)["params"]


# Costs.

ENWIK8 = dict(
    vocab_size=204, hidden_size=512, num_hidden_layers=12, num_attention_heads=8, intermediate_size=2048,
    memory_length=512,
)  # fmt: skip


@pytest.mark.parametrize("family, fields, count", [
    ("modernbert", dict(num_hidden_layers=22, hidden_size=768, num_attention_heads=12, intermediate_size=1152),
     149_655_232),
    ("modernbert", dict(num_hidden_layers=28, hidden_size=1024, num_attention_heads=16, intermediate_size=2624),
     395_881_664),
    ("distilbert", {}, 66_985_530),
    ("electra", {}, 13_546_682),
    # The encoder with its pooler, whose size is the size of the dense layer in the LM head; LayerNorm and bias.
    ("mpnet", dict(position_offset=2), 109_486_464 + 1_536 + 30_527),
    ("electra", dict(embedding_size=768), 33_740_602),  # the generator of the base size
    ("albert", {}, 11_221_680),
    ("albert", dict(hidden_size=4096, num_attention_heads=64, intermediate_size=16384), 206_368_944),
    ("xlm_roberta_xl", dict(position_offset=2), 3_482_741_760),
    ("megatron_bert", {}, 333_671_808),  # MegatronBertForMaskedLM of transformers
    ("eurobert", dict(tie_word_embeddings=True), 211_766_016),
    ("eurobert", {}, 211_766_016 + 128_256 * 768),  # with a separate LM head
    ("eurobert", dict(hidden_size=1152, num_hidden_layers=26, num_attention_heads=18, num_key_value_heads=6,
                      intermediate_size=4096, tie_word_embeddings=True), 607_874_688),
    ("eurobert", dict(hidden_size=2304, num_hidden_layers=32, num_attention_heads=18, num_key_value_heads=6,
                      head_dim=128, intermediate_size=6144, tie_word_embeddings=True), 2_107_590_912),
    ("neobert", {}, 221_665_536 + 30_522 * 769),  # 172 tensors; the encoder and the LM head
    ("xlnet", dict(num_hidden_layers=12, hidden_size=768, num_attention_heads=12, intermediate_size=3072),
     116_718_336 + 32_000),  # the encoder, and the bias of the LM head
    ("xlnet", dict(num_hidden_layers=24, hidden_size=1024, num_attention_heads=16, intermediate_size=4096),
     360_268_800 + 32_000),
    ("deberta_v2", {}, 183_831_552 + 720_228),  # DeBERTa-v3-base, and the LM head
    ("deberta_v2", dict(vocab_size=251_000), 278_218_752 + 843_128),  # mDeBERTa-v3-base
    ("deberta_v2", dict(num_hidden_layers=24, hidden_size=1024, num_attention_heads=16, intermediate_size=4096),
     434_012_160 + 1_179_748),  # DeBERTa-v3-large
    ("deberta_v2", dict(num_hidden_layers=24, hidden_size=1536, num_attention_heads=24, intermediate_size=6144,
                        conv_kernel_size=3), 884_593_152 + 2_492_004),  # DeBERTa-v2-xlarge
    # The encoder, and the LM head: a dense layer, LayerNorm and bias.
    ("nomic_bert", {}, 136_731_648 + 768 * 768 + 768 + 1_536 + 30_528),
    ("gte", {}, 305_368_320 + 768 * 768 + 768 + 1_536 + 250_048),
    ("jina_embeddings_v3", {}, 558_314_496 + 1024 * 1024 + 1024 + 2_048 + 250_002),
    ("transformer_xl", {}, 151_106_305),  # 151 and 41 million in tables 1 and 2 of the paper
    ("transformer_xl", ENWIK8, 41_055_436),
])  # fmt: skip
def test_parameter_counts_equal_published_sizes(family, fields, count):
    config = families.FAMILIES.get(family).config_class(**fields)
    assert count_parameters(nn.meta.unbox(abstract_params(config)), config) == count


@pytest.mark.parametrize("untie_biases", [False, True])
def test_transformer_xl_config_and_layers_are_inferred_from_params(untie_biases):
    config = TransformerXLConfig(**ENWIK8 | dict(untie_biases=untie_biases))
    params = nn.meta.unbox(abstract_params(config))
    inferred = TRANSFORMER_XL.infer_config(params)
    assert all(getattr(config, name) in values for name, values in inferred.items()) and len(inferred) == 7
    path = ("encoder", "layers", "biases", "content") if untie_biases else ("encoder", "biases", "content")
    assert ("biases" in params["bert"]["encoder"]["layers"]) == untie_biases
    numbers = TRANSFORMER_XL.layer_ids(config, path)
    np.testing.assert_array_equal(numbers, 1 + np.arange(12) if untie_biases else 0)


def matrix_products(config, rows, length, words, new_memory=None) -> int:
    """Returns the FLOPs of all matrix products of a forward pass, from the traced program."""
    ids, places = (jax.ShapeDtypeStruct((rows, size), jnp.int32) for size in (length, words))
    memory = [jax.eval_shape(lambda: new_memory(config, rows, jnp.float32))] if new_memory else []
    leaves, tree = jax.tree.flatten((nn.meta.unbox(abstract_params(config)), ids, places, memory))

    def predict(*leaves):
        params, ids, places, memory = jax.tree.unflatten(tree, leaves)
        inputs = ids, jnp.ones_like(ids), jnp.zeros_like(ids), places, *memory
        method = "predict_with_memory" if memory else "__call__"
        return jax.tree.leaves(BertForMaskedLM(config).apply({"params": params}, *inputs, method=method))

    total = 0
    for equation in straight(predict, *leaves).jaxpr.eqns:
        if equation.primitive.name == "dot_general":
            (contracted, _), _ = equation.params["dimension_numbers"]
            sizes = [equation.invars[0].aval.shape[axis] for axis in contracted]
            total += 2 * math.prod((*equation.outvars[0].aval.shape, *sizes))
    return total


@pytest.mark.parametrize("family", ["bert", *map(slow_case, sorted(FAMILIES.keys() - {"bert"}))])
def test_flops_equal_the_matrix_products(family):
    """Compares the FLOPs of one additional row, because Transformer-XL and XLNet project the distances once for all
    rows.

    The formula of XLNet omits the product with two segment vectors.
    """
    # Within windows, blocks have padding.
    family_fields = {"modernbert": dict(global_attn_every_n_layers=1), "ultrabert": dict(layer_types="full")}
    config, length, words = model_config(family, max_position_embeddings=24, **family_fields.get(family, {})), 24, 6
    expected = model_flops(config, 1, length, words, pooled=0)
    if isinstance(families.FAMILIES.get(family), TwoStreamAttention):
        expected += families.FAMILIES.get(family).query_flops(config, length, words)
    traced = matrix_products(config, 2, length, words) - matrix_products(config, 1, length, words)
    assert expected <= traced < 1.005 * expected and (traced == expected or family == "xlnet")
    if family == "transformer_xl":
        definition = families.FAMILIES.get(family)
        two, one = (matrix_products(config, rows, length, words, definition.new_memory) for rows in (2, 1))
        assert two - one == expected + definition.memory_flops(config, length)


# Training.


def params_and_loss_after_a_step(config, devices, records):
    """Returns the params after a step of gradient descent from random params, and the loss."""
    validate(config)
    mesh, rng = make_mesh(config, jax.devices()[:devices]), np.random.default_rng(0)
    task = pretraining_task(
        config, mesh, records, tokenizer=tokenizer.load_tokenizer("wordpiece", records / "vocab.txt")
    )
    program = Program(task, config, mesh)

    def value(path, x):  # large enough for attention to matter
        return (rng.normal(0, 0.3, x.shape) + ("scale" in jax.tree_util.keystr(path[-1:]))).astype(x.dtype)

    state = jax.device_put(jax.tree_util.tree_map_with_path(value, program.state), program.layout.state)
    recipe = put_hyperparameters(0, schedule_of(config, 10), mesh)
    batch = next(task.batches(0))
    assert not config.packing or batch["segments"].max() > 1
    state, metrics = program.train_step(state, put_batch(batch, mesh), recipe)
    return jax.device_get((state.params, metrics["loss"]))


@pytest.mark.slow
# other layers than BERT
@pytest.mark.parametrize(
    "family",
    [
        "albert",
        "xlm_roberta_xl",
        "modernbert",
        "eurobert",
        "deberta_v2",
        "mpnet",
        "nomic_bert",
        "gte",
        "jina_embeddings_v3",
        "neobert",
        "ultrabert",
        "xlnet",
        "transformer_xl",
        "lstms",
    ],
)
def test_packed_step_on_eight_devices_equals_padded_step_on_one(family, records_folder):
    """Rows of families without packing stay padded."""
    one = config_for(family, records_folder)
    eight = config_for(family, records_folder, packing=families.FAMILIES.get(family).supports_packing, remat="full")
    eight.mesh.update(data=2, fsdp=2, tensor=2)
    expected, loss = params_and_loss_after_a_step(one, 1, records_folder)
    params, sharded_loss = params_and_loss_after_a_step(eight, 8, records_folder)
    np.testing.assert_allclose(sharded_loss, loss, rtol=1e-5)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-3, atol=1e-5), params, expected)


WIDE = dict(
    vocab_size=300, hidden_size=256, num_hidden_layers=2, num_attention_heads=4, intermediate_size=32,
    max_position_embeddings=160,
)  # fmt: skip
GROUPED = dict(hidden_size=128, num_hidden_layers=1, num_key_value_heads=2, head_dim=64)


@pytest.mark.slow
@pytest.mark.parametrize("family, fields, chip", [
    ("eurobert", GROUPED, pallas.EMULATED), ("eurobert", GROUPED, triton.EMULATED),
    ("modernbert", dict(global_attn_every_n_layers=2, local_attention=32), pallas.EMULATED),
    ("nomic_bert", {}, pallas.EMULATED), ("gte", {}, pallas.EMULATED), ("gte", {}, triton.EMULATED),
    ("jina_embeddings_v3", {}, triton.EMULATED),
    ("ultrabert", GROUPED | dict(layer_types="sliding", sliding_window=40), triton.EMULATED),
])  # fmt: skip
def test_kernels_give_equal_results_on_any_mesh(family, fields, chip):
    """Compares states and gradients of the plain path on one device with the kernels' on eight devices."""
    config = families.FAMILIES.get(family).config_class(**WIDE | fields)
    ids, segments = np.random.default_rng(0).integers(0, 300, (4, 160)), packed(4, 160)
    plain = families.FAMILIES.get(family).build(config, Compute())
    params = {"params": random_params(BertForMaskedLM(config), config)["bert"]}

    def loss(params, model):
        states = model.apply(params, ids, segments, ids, method="encode")
        return jnp.square(states).sum() + states[:, :, ::7].sum(), states

    differentiate = jax.jit(jax.value_and_grad(loss, has_aux=True), static_argnums=1)
    (_, expected), of_params = differentiate(params, plain)
    mesh = jax.make_mesh((2, 2, 2), ("data", "fsdp", "tensor"), axis_types=(jax.sharding.AxisType.Auto,) * 3)
    with jax.set_mesh(mesh), nn.logical_axis_rules(RULES):
        (_, computed), of_same = differentiate(params, dataclasses.replace(plain, compute=Compute(chip=chip)))
    np.testing.assert_allclose(computed, expected, atol=2e-5)
    for a, b in zip(jax.tree.leaves(of_params), jax.tree.leaves(of_same), strict=True):
        np.testing.assert_allclose(b, a, atol=2e-5 * max(1.0, np.abs(a).max()))


@pytest.mark.parametrize("family, fields, mesh, message", [
    ("electra", dict(embedding_size=15), dict(fsdp=2),
     "config.model.embedding_size = 15: must be a multiple of the 2 devices"),
    ("eurobert", dict(num_attention_heads=4), dict(tensor=4),
     "num_key_value_heads = 2: must be a multiple of the 4 devices"),
])  # fmt: skip
def test_a_mesh_must_divide_the_sizes_of_the_family(family, fields, mesh, message):
    config = config_for(family)
    config.mesh.update(mesh)
    config.model.update(fields)
    with pytest.raises(UserError, match=message):
        make_mesh(config)


@pytest.mark.parametrize("family, field, value, message", [
    ("modernbert", "model.local_attention", 7, "config.model.local_attention = 7: must be even"),
    ("modernbert", "model.global_rope_theta", 0.0, "config.model.global_rope_theta = 0.0: must be above 0"),
    ("modernbert", "model.global_attn_every_n_layers", 0, "global_attn_every_n_layers = 0: must be at least 1"),
    ("modernbert", "model.num_attention_heads", 16, "must give an even head size for rotary positions, but .* = 1"),
    ("eurobert", "model.num_key_value_heads", 3, "num_key_value_heads = 3: must divide model.num_attention_heads = 2"),
    ("eurobert", "model.head_dim", 7, "config.model.head_dim = 7: must be even, because rotary positions"),
    ("eurobert", "model.rope_theta", 0.0, "config.model.rope_theta = 0.0: must be above 0"),
    ("eurobert", "model.rope_scaling", "ntk factor=2", "config.model.rope_scaling = 'ntk factor=2': choose one of lin"),
    ("eurobert", "model.rope_scaling", "linear 2", "config.model.rope_scaling = 'linear 2': linear needs the fields"),
    ("modernbert", "model.local_rope_scaling", "linear factor=x", "local_rope_scaling = .*: linear needs numbers"),
    ("eurobert", "model.rope_scaling", "linear factor=nan", "nan': the fields of linear must be above 0"),
    ("eurobert", "model.rope_scaling", "linear factor=2 factor=3", "linear needs the fields factor=NUMBER"),
    ("gte", "model.rope_scaling", "llama3 factor=2 low_freq_factor=4 high_freq_factor=4 original_length=8",
     "low_freq_factor must be below high_freq_factor"),
    ("ultrabert", "model.layer_types", "full,local", "config.model.layer_types = 'full,local': must be the types full"),
    ("ultrabert", "model.full_rope_scaling", "yarn", "config.model.full_rope_scaling = 'yarn': yarn needs the fields"),
    ("ultrabert", "model.head_dim", 7, "config.model.head_dim = 7: must be even, because rotary positions"),
    ("neobert", "model.num_attention_heads", 16, "must give an even head size for rotary positions, but .* = 1"),
    ("albert", "model.num_hidden_groups", 3, "num_hidden_groups = 3: must divide model.num_hidden_layers = 4"),
    ("albert", "freeze_layers", 1, "config.freeze_layers = 1: must be a multiple of 2, the number of layers that sha"),
    ("deberta_v2", "model.position_buckets", 1, "position_buckets = 1: must be at least 2, or -1 for no buckets"),
    ("deberta_v2", "model.conv_kernel_size", 4, "conv_kernel_size = 4: must be odd, or 0 for no convolution"),
    ("deberta_v2", "model.pos_att_type", "p2p", "config.model.pos_att_type = 'p2p': choose one of "),
    ("mpnet", "model.position_offset", 0, "config.model.position_offset = 0: must be at least 1"),
    ("nomic_bert", "model.num_attention_heads", 16, "must give an even head size for rotary positions, but .* = 1"),
    ("nomic_bert", "model.type_vocab_size", 0, "config.model.type_vocab_size = 0: must be at least 1"),
    ("gte", "model.rope_scaling", "ntk factor=2", "config.model.rope_scaling = 'ntk factor=2': choose one of linear"),
    ("jina_embeddings_v3", "model.hidden_act", "tanh", "model.hidden_act = 'tanh': choose one of gelu, gelu_new, relu"),
    ("mixer", "model.mixing_act", "tanh", "config.model.mixing_act = 'tanh': choose one of gelu, relu"),
    ("mixer", "packing", True, "config.packing = True: model.family = 'mixer' does not support packed rows"),
    ("bert", "model.family", "mixr", "'mixr': choose one of albert, bert, deberta_v2, .*, roberta, .*, xlnet, mixer"),
    ("bert", "model.family", "modernbert",
     "config.model.family = 'modernbert': config.model must have the fields of this family, but .*; start from"),
])  # fmt: skip
def test_a_mistake_in_the_config_raises_one_line(family, field, value, message):
    config = config_for(family)
    config.update_from_flattened_dict({field: value})
    with pytest.raises(UserError, match=message) as error:
        validate(config)
    assert "\n" not in str(error.value)


# Checkpoints.


@pytest.fixture(scope="module")
def run_of(tmp_path_factory):
    """Returns a function from the name of a family to the workdir of a run that has random params."""

    @functools.cache
    def make(family):
        folder, config = tmp_path_factory.mktemp("runs") / family, config_for(family)
        special = tokenizer.XLNET if family == "xlnet" else tokenizer.SPECIAL_TOKENS
        kind = "wordpiece" if family == "mpnet" else "sentencepiece"
        words = vocabulary_learning.count_words(kind, make_corpus(80).split("\n"))
        pieces = vocabulary_learning.learn_new_vocabulary(kind, words, 83, special=special)
        pieces = of_mpnet(pieces) if family == "mpnet" else pieces
        config.model.vocab_size, config.tokenizer.kind = pieces.vocab_size, pieces.kind
        model = families.config_of(config)
        checkpoint.write_params(folder, random_params(BertForMaskedLM(model), model))
        workdir.write_info(folder, workdir.RunInfo(config.lock(), tokenizer=workdir.tokenizer_entry(pieces)), pieces)
        return folder

    return make


def assert_equal(actual, expected):
    """Asserts that two checkpoints and their tokenizers are equal."""
    jax.tree.map(np.testing.assert_array_equal, actual.params, expected.params)
    assert actual.labels == expected.labels
    for text in ("the ship", "An anchor near the harbour."):
        (ids,), (expected_ids,) = actual.tokenizer.encode_ids([text]), expected.tokenizer.encode_ids([text])
        assert actual.tokenizer.framed(ids, ids) == expected.tokenizer.framed(expected_ids, expected_ids)


@pytest.mark.parametrize("family", ["roberta", *map(slow_case, sorted(FAMILIES.keys() - {"roberta"}))])
def test_a_converted_run_round_trips(family, run_of, tmp_path):
    source = pretrained.read_with_tokenizer(run_of(family))
    assert source.predicts_words and source.config.family == family
    conversion.convert(run_of(family), tmp_path / "bertjax", "bertjax")
    assert_equal(from_bertjax := pretrained.read_with_tokenizer(tmp_path / "bertjax"), source)
    assert from_bertjax.config == source.config
    if family in WRITTEN:
        conversion.convert(run_of(family), tmp_path / "huggingface", "huggingface")
        assert_equal(from_huggingface := pretrained.read_with_tokenizer(tmp_path / "huggingface"), source)
        lost = dict(max_position_embeddings=512) if family == "xlnet" else {}  # XLNet has no position embeddings
        assert from_huggingface.config == dataclasses.replace(source.config, **lost) and from_huggingface.predicts_words
    else:
        with pytest.raises(
            UserError, match=f"--format=huggingface does not support a model with model.family = '{family}'"
        ):
            conversion.convert(run_of(family), tmp_path / "huggingface", "huggingface")
    if family != "bert":
        with pytest.raises(UserError, match=f"model.family = '{family}'"):
            tf1.check_exportable(source.config)


@pytest.mark.parametrize("family, stated", [("gte", "nomic_bert"), ("gte", "modernbert"), ("bert", "eurobert")])
def test_a_run_with_the_name_of_another_family_is_refused(family, stated, run_of, tmp_path):
    shutil.copytree(run_of(family), tmp_path / "run")
    info = workdir.read_info(tmp_path / "run")
    changed = config_for(stated)
    changed.model.vocab_size = info.config.model.vocab_size
    with info.config.unlocked():
        info.config.model = changed.model
    workdir.write_info(tmp_path / "run", info, pretrained.read_with_tokenizer(run_of(family)).tokenizer)
    with pytest.raises(UserError, match=r"config.json: (model\.|the params of model\.family = )") as error:
        pretrained.read_pretrained(tmp_path / "run")
    assert "\n" not in str(error.value)


@pytest.mark.slow
@pytest.mark.parametrize("family", sorted(FAMILIES))
def test_unsupported_operations_raise_one_line_with_a_fix(family, run_of, tmp_path):
    model = library.load(run_of(family))
    kernel = np.eye(model.config.hidden_size, 3, dtype=np.float32)
    params = {**model.params, "classifier": {"dense": {"kernel": kernel, "bias": kernel[0]}}}
    changes = dict(params=params, labels=("O", "B-X", "I-X"), architecture="BertForTokenClassification")
    tagger = library.Model(dataclasses.replace(model.source, **changes))
    assert model.embed("the ship", pool="mean").shape == (1, model.config.hidden_size)
    if family != "modernbert":  # taggers of ModernBERT have one more layer
        assert len(tagger.tag("the ship saw")[0]["tags"]) == 3
    uses = [functools.partial(conversion.convert, run_of(family), tmp_path / to, to) for to in pretrained.FORMATS]
    uses += [lambda: model.embed("the ship"), lambda: model.fill_mask("the [MASK]"), lambda: model.generate("the", 1)]
    lines = []
    for use in uses:
        try:
            assert use()
        except UserError as error:
            lines.append(str(error))
    kept = "use --format=huggingface or --format=bertjax" if family in WRITTEN else "use --format=bertjax"
    for line in lines:
        assert "\n" not in line
        assert re.search(f"available methods are .*embed, encode|in Python pool='mean'|; {kept}$", line), line


@pytest.fixture(scope="module")
def reviews(tmp_path_factory):
    """Returns a folder with files in the format of SST-2, whose labels follow from the topics."""
    folder = tmp_path_factory.mktemp("reviews") / "SST-2"
    folder.mkdir()
    for name, count in (("train", 96), ("dev", 16)):
        rng = np.random.default_rng(count)
        topics = [("sea", "court")[number % 2] for number in range(count)]
        lines = [f"{' '.join(rng.choice(TOPICS[topic], 4))}\t{LABELS[topic]}" for topic in topics]
        (folder / f"{name}.tsv").write_text("\n".join(["sentence\tlabel", *lines, ""]))
    return folder.parent


@pytest.mark.slow
@pytest.mark.parametrize(
    "family",
    [
        "electra",
        "albert",
        "modernbert",
        "eurobert",
        "deberta_v2",
        "mpnet",
        "nomic_bert",
        "gte",
        "jina_embeddings_v3",
        "ultrabert",
        "neobert",
        "xlnet",
    ],
)  # BERT: tests/finetuning/test_finetuning.py
def test_a_classifier_is_trained_predicts_and_is_converted(family, run_of, reviews, tmp_path):
    config = fine_tuning_config("glue", name="sst2")
    config.data.path, config.init_checkpoint = str(reviews), str(run_of(family))
    config.update(dict(batch_size=16, max_seq_length=32, epochs=8.0, dtype="float32", unroll="no", log_every_steps=99))
    config.update(dict(packing=families.FAMILIES.get(family).supports_packing))
    config.optimizer.learning_rate, config.eval.every_steps = 1e-2, 99
    validate(config)
    launch(config, tmp_path / "tuned")
    tuned = pretrained.read_with_tokenizer(tmp_path / "tuned")
    texts = [(" ".join(TOPICS[topic][:5]),) for topic in LABELS]
    predictions = list(tasks.get("glue").predict(tuned, texts))
    assert [prediction["label"] for prediction in predictions] == [*LABELS.values()]
    to = "huggingface" if family in WRITTEN else "bertjax"
    assert "left out" not in conversion.convert(tmp_path / "tuned", tmp_path / "converted", to)
    assert_equal(converted := pretrained.read_with_tokenizer(tmp_path / "converted"), tuned)
    assert converted.architecture == tuned.architecture == "BertForSequenceClassification"
    if family in WRITTEN:
        card = (tmp_path / "converted/README.md").read_text()
        fields = json.loads((tmp_path / "converted/config.json").read_text())
        assert "text-classification" in card and f'"{fields["model_type"]}", "bertjax"]' in card
        assert fields["architectures"][0].endswith("ForSequenceClassification")


# Folders of transformers.


@pytest.fixture(scope="module")
def folder_of(tmp_path_factory):
    """Returns a function from the name of a family to a folder with random params, written by transformers."""

    @functools.cache
    def make(family):
        folder, config = tmp_path_factory.mktemp("folders") / family, model_config(family)
        huggingface.write(folder, config, random_params(BertForMaskedLM(config), config), None)
        return folder

    return make


def with_fields(folder, changed: dict, copy):
    """Copies the folder with changed fields in config.json; a field of `...` is removed."""
    copy.mkdir()
    for path in folder.iterdir():
        (copy / path.name).symlink_to(path)
    fields = json.loads((folder / "config.json").read_text()) | changed
    (copy / "config.json").unlink()
    (copy / "config.json").write_text(json.dumps({name: x for name, x in fields.items() if x is not ...}))
    return copy


ROPE = "rope_parameters"


@pytest.mark.parametrize("family, changed, message", [
    ("modernbert", {"layer_types": ["full_attention"] * 5}, "5 entries; expected num_hidden_layers = 2"),
    ("modernbert", {"layer_types": ["sliding_attention"] * 2}, "layer_types must be full_attention in layers 0, n"),
    ("modernbert", {ROPE: [1]}, r"rope_parameters \[1\] must be a JSON object with the keys"),
    ("modernbert", {ROPE: {"full_attention": 5}}, "rope_parameters.full_attention 5 must be a JSON object"),
    ("modernbert", {ROPE: {"full_attention": {"rope_type": "yarn"}}}, "rope_parameters.full_attention.factor is None"),
    ("modernbert", {ROPE: {"full_attention": {"rope_theta": 0.0}}}, "global_rope_theta = 0.0: must be above 0"),
    ("modernbert", {ROPE: {"rope_type": "default"}}, "rope_parameters .* must be a JSON object with the keys"),
    ("modernbert", {"rope_scaling": {"rope_type": "dynamic"}}, "rope_scaling.rope_type 'dynamic' is not supported"),
    ("modernbert", {"rope_scaling": {"factor": 4.0}}, "rope_scaling.factor 4.0 is not supported; supported: par"),
    ("modernbert", {"rope_scaling": {"rope_type": "linear", "factor": -1.0}}, "fields of linear must be above 0"),
    ("modernbert", {"rope_scaling": {"type": "linear", "factor": 2.0}}, "type is 'linear'; expected 'default', the r"),
    ("modernbert", {"layer_types": ["full_attention", "conv"]}, r"layer_types \[.*\] must be a list of full_attention"),
    ("modernbert", {"layer_types": 2}, "layer_types 2 must be a list of full_attention and sliding_attention"),
    ("modernbert", {"sliding_window": None}, "sliding_window is None; expected int"),
    ("modernbert", {"head_dim": [4]}, r"head_dim \[4\] is not supported; supported: 8"),
    ("modernbert", {"mlp_bias": True}, "mlp_bias True is not supported; supported: False"),
    ("modernbert", {"mlp_dropout": 0.1}, "mlp_dropout 0.1 is not supported; supported: 0.0"),
    ("modernbert", {"hidden_activation": "silu"}, "hidden_activation 'silu' is not supported"),
    ("modernbert", {"classifier_pooling": "max"}, "classifier_pooling = 'max': choose one of cls, mean"),
    ("modernbert", {"hidden_size": "wide"}, "hidden_size is 'wide'; expected int"),
    ("modernbert", {"vocab_size": 151}, "tok_embeddings.weight has shape .*; expected"),
    ("eurobert", {"rope_theta": ..., ROPE: ...}, "rope_theta is missing, but required; add the field"),
    ("eurobert", {ROPE: {"rope_type": "longrope"}}, "rope_type 'longrope' is not supported; supported: 'default', "),
    ("eurobert", {ROPE: {"rope_type": ["yarn"]}}, r"rope_type \['yarn'\] is not supported; supported: 'default', "),
    ("eurobert", {ROPE: {"rope_type": "linear", "type": "yarn"}}, "rope_parameters.type is 'yarn'; expected 'linear'"),
    ("eurobert", {ROPE: {"rope_type": "yarn", "factor": 2.0, "mscale": 1.0}}, "rope_parameters.mscale 1.0 is not supp"),
    ("eurobert", {ROPE: {"rope_theta": 1e4, "partial_rotary_factor": 0.5}}, "partial_rotary_factor 0.5 is not support"),
    ("eurobert", {ROPE: [1]}, r"rope_parameters \[1\] must be a JSON object"),
    ("eurobert", {"rope_scaling": {"type": "linear"}}, "rope_scaling.factor is None; expected a number"),
    ("eurobert", {"hidden_act": "gelu"}, "hidden_act 'gelu' is not supported; supported: 'silu'"),
    ("eurobert", {"attention_bias": True}, "attention_bias True is not supported; supported: False"),
    ("eurobert", {"attention_dropout": 0.1}, "attention_dropout 0.1 is not supported; supported: 0.0"),
    ("eurobert", {"classifier_pooling": "cls"}, "classifier_pooling = 'cls': choose one of bos, mean, late"),
    ("eurobert", {"num_key_value_heads": 1}, "self_attn.k_proj.weight has shape .*; expected"),
    ("eurobert", {"tie_word_embeddings": True},
     "lm_head.weight differs from model.embed_tokens.weight; expected equal"),
    ("ultrabert", {"layer_types": ["full_attention"]}, "layer_types has 1 entries; expected num_hidden_layers = 3"),
    ("ultrabert", {"attention_windows": [8, 4, 0], "layer_types": ...}, r"windows has the values \[4, 8\] in lay"),
    ("ultrabert", {"attention_windows": 8}, "attention_windows 8 must be a list of num_hidden_layers = 3 numbers"),
    ("ultrabert", {ROPE: ..., "rope_theta": [1.0, 2.0, 3.0]}, r"rope_theta has the values \[1.0, 3.0\] in layers of"),
    ("ultrabert", {ROPE: ..., "rope_theta": 1e4}, "rope_theta 10000.0 must be a list of num_hidden_layers = 3 numbers"),
    ("ultrabert", {ROPE: {"full_attention": {"rope_theta": 1e4}}}, "sliding_attention.rope_theta is None"),
    ("ultrabert", {ROPE: {"rope_theta": 1e4}}, "rope_parameters .* must be a JSON object with the keys full_att"),
    ("ultrabert", {ROPE: {"full_attention": 5}}, "rope_parameters.full_attention 5 must be a JSON object"),
    ("ultrabert", {"rope_scaling": {"type": "linear"}}, "rope_scaling {.*} is not supported; supported: None"),
    ("ultrabert", {"attention_dropout": 0.1}, "attention_dropout 0.1 is not supported; supported: 0.0"),
    ("ultrabert", {"classifier_pooling": "late"}, "classifier_pooling = 'late': choose one of cls, mean"),
    ("ultrabert", {"prediction_head_size": 16}, "head.linear1.weight has shape .*; expected"),
    ("ultrabert", {"sliding_window": 0}, "sliding_window = 0: must be at least 1"),
    ("ultrabert", {"tie_word_embeddings": True}, "head.decoder.weight differs from model.embed_tokens.weight; expect"),
    ("neobert", {"ngpt": True}, "ngpt True is not supported; supported: False"),
    ("neobert", {"rope": False}, "rope False is not supported; supported: True"),
    ("neobert", {"hidden_act": "gelu"}, "hidden_act 'gelu' is not supported; supported: 'SwiGLU'"),
    ("neobert", {"dim_head": 4}, "dim_head 4 is not supported; supported: 8"),
    ("neobert", {"max_length": ...}, "max_length is missing, but required; add the field"),
    ("neobert", {"intermediate_size": 96}, r"ffn.w12.weight has shape \(64, 16\); expected \(128, 16\)"),
    ("neobert", {"auto_map": {"AutoModel": "mine.Model"}}, "auto_map .* is not supported; supported: None"),
    ("deberta_v2", {"pos_att_type": "c2p|p2p"}, "pos_att_type 'c2p|p2p' is not supported; supported: p2c, c2p"),
    ("deberta_v2", {"pos_att_type": 5}, "pos_att_type 5 is not supported; supported: p2c, c2p"),
    ("deberta_v2", {"attention_head_size": 4}, "attention_head_size 4 is not supported; supported: 8"),
    ("deberta_v2", {"embedding_size": 8}, "embedding_size 8 is not supported; supported: 16"),
    ("deberta_v2", {"pooler_hidden_size": 8}, "pooler_hidden_size 8 is not supported; supported: 16"),
    ("deberta_v2", {"pooler_hidden_act": "tanh"}, "pooler_hidden_act 'tanh' is not supported; supported: 'gelu'"),
    ("deberta_v2", {"conv_groups": 2}, "conv_groups 2 is not supported; supported: 1"),
    ("deberta_v2", {"conv_kernel_size": 2}, "conv_kernel_size = 2: must be odd"),
    ("deberta_v2", {"norm_rel_ebd": "batch_norm"}, "norm_rel_ebd = 'batch_norm': choose one of none, layer_norm"),
    ("deberta_v2", {"position_buckets": 16}, r"rel_embeddings.weight has shape \(16, 16\); expected \(32, 16\)"),
    ("deberta_v2", {"relative_attention": "yes"}, "relative_attention is 'yes'; expected bool"),
    ("distilbert", {"hidden_size": 64}, "hidden_size is 64; expected 16, the value of dim; delete hidden_size"),
    ("distilbert", {"per_layer_config": {"0": {}}}, "per_layer_config .* is not supported; supported: None"),
    ("distilbert", {"architectures": 5}, "config.json: damaged, or not in the expected format"),
    ("distilbert", {"model_type": ["distilbert"]}, r"model_type \['distilbert'\] is not supported"),
    ("distilbert", {"model_type": ..., "architectures": ["DistilBertModel"]},
     "model_type is missing; set it to 'distilbert', the type of DistilBertModel"),
    ("roberta", {"model_type": ..., "architectures": ["XLMRobertaModel"]}, "model_type is missing; set it to 'xlm-rob"),
    ("xlm_roberta_xl", {"model_type": ..., "architectures": ["XLMRobertaXLModel"]}, "set it to 'xlm-roberta-xl', the"),
    ("distilbert", {"dim": ...}, "config.json: dim is missing, but required; add the field"),
    ("distilbert", {"n_layers": "six"}, "config.json: n_layers is 'six'; expected int"),
    ("distilbert", {"dim": 33}, "config.json: dim = 33: must be a multiple of n_heads = 2"),
    ("distilbert", {"qa_dropout": 1.0}, "config.json: qa_dropout = 1.0: must be at least 0 and below 1"),
    ("distilbert", {"activation": "silu"}, "config.json: activation 'silu' is not supported; supported: gelu"),
    ("distilbert", {"quantization_config": {}}, "config.json: quantization_config {} is not supported"),
    ("distilbert", {"hidden_dim": 65}, "layer_0/intermediate/dense/kernel has shape"),
    ("roberta", {"position_embedding_type": "relative_key"}, "position_embedding_type 'relative_key' is not supported"),
    ("roberta", {"auto_map": {"AutoModel": "mine.Roberta"}}, "auto_map .* is not supported; supported: None"),
    ("roberta", {"is_decoder": True}, "is_decoder True is not supported; supported: False"),
    ("roberta", {"pad_token_id": 300}, "max_position_embeddings is 65; expected more than .* = 301"),
    ("roberta", {"pad_token_id": None}, "pad_token_id is None; expected an integer of at least 0"),
    ("megatron_bert", {"is_decoder": True}, "is_decoder True is not supported; supported: False"),
    ("megatron_bert", {"model_type": ..., "architectures": ["MegatronBertModel"]}, "set it to 'megatron-bert', the"),
    ("xlm_roberta_xl", {"is_decoder": True}, "is_decoder True is not supported; supported: False"),
    ("xlm_roberta_xl", {"pad_token_id": 300}, "max_position_embeddings is 65; expected more than .* = 301"),
    ("roberta", {"hidden_act": "silu"}, "hidden_act 'silu' is not supported"),
    ("electra", {"embedding_size": ...}, "config.json: embedding_size is missing"),
    ("electra", {"embedding_size": 24}, r"word_embeddings has shape \(150, 8\); expected \(150, 24\)"),
    ("electra", {"hidden_act": "relu"}, "config.json: hidden_act 'relu' is not supported; supported: 'gelu'"),
    ("electra", {"architectures": ["ElectraForMultipleChoice"], "summary_type": "mean"},
     "config.json: summary_type 'mean' is not supported; supported: 'first'"),
    ("mpnet", {"relative_attention_num_buckets": 64}, "relative_attention_num_buckets 64 is not supported; sup.*: 32"),
    ("mpnet", {"pad_token_id": 0}, "pad_token_id 0 is not supported; supported: 1"),
    ("mpnet", {"hidden_act": "gelu_new"}, "hidden_act 'gelu_new' is not supported; supported: 'gelu'"),
    ("mpnet", {"max_position_embeddings": 2}, "max_position_embeddings is 2; expected more than .* = 2"),
    ("mpnet", {"num_attention_heads": 4}, "relative_attention_embeddings has shape .*; expected"),
    ("nomic_bert", {"hidden_size": ..., "n_embd": 16}, "n_embd 16 is not supported, .*; load the model with tr"),
    ("nomic_bert", {"head_dim": 4}, "head_dim 4 is not supported; supported: 8"),
    ("nomic_bert", {"hidden_act": "tanh"}, "hidden_act 'tanh' is not supported; supported: gelu, .*, silu"),
    ("gte", {"model_type": "new"}, "model_type 'new' is not supported; .* such as hub:alibaba-nlp-community/gte-multi"),
    ("gte", {"type_vocab_size": 2}, r"token_type_embeddings.weight has shape \(1, 16\); expected \(2, 16\)"),
    ("gte", {ROPE: {"rope_type": "dynamic", "factor": 8.0}}, "rope_parameters.rope_type 'dynamic' is not supported"),
    ("gte", {"vocab_size": ...}, "config.json: vocab_size is missing, but required; add the field"),
    ("jina_embeddings_v3", {"auto_map": {"AutoModel": "x.Y"}}, "auto_map .* is not supported; supported: None"),
    ("jina_embeddings_v3", {"intermediate_size": 33}, r"mlp.fc1.weight has shape \(32, 16\); expected \(33, 16\)"),
    ("jina_embeddings_v3", {ROPE: {"rope_theta": 0.0}}, "config.json: rope_theta = 0.0: must be above 0"),
    ("roberta", {"position_embedding_type": "rotary"}, "'rotary' is not supported; .*jinaai/jina-embeddings-v3-hf"),
    ("albert", {"inner_group_num": 2}, "inner_group_num 2 is not supported; supported: 1"),
    ("albert", {"num_hidden_groups": 3}, "num_hidden_groups = 3: must divide num_hidden_layers = 4"),
    ("albert", {"hidden_act": "silu"}, "hidden_act 'silu' is not supported; supported: gelu"),
    ("albert", {"classifier_dropout_prob": 1.0}, "classifier_dropout_prob = 1.0: must be at least 0 and below 1"),
    ("xlnet", {"attn_type": "uni"}, "attn_type 'uni' is not supported; supported: 'bi'"),
    ("xlnet", {"clamp_len": 64}, "clamp_len 64 is not supported; supported: -1"),
    ("xlnet", {"d_head": 4}, "d_head 4 is not supported; supported: d_model / n_head"),
    ("xlnet", {"n_layer": 0}, "n_layer = 0: must be at least 1"),
    ("xlnet", {"d_inner": None}, "d_inner is None; expected int"),
    ("xlnet", {"architectures": ["XLNetForSequenceClassification"], "summary_type": "mean"},
     "summary_type 'mean' is not"),
])  # fmt: skip
def test_a_folder_with_an_unsupported_model_raises_one_line(family, changed, message, folder_of, tmp_path):
    with pytest.raises(UserError, match=message) as error:
        pretrained.read_pretrained(with_fields(folder_of(family), changed, tmp_path / "copy"))
    assert "\n" not in str(error.value)


@pytest.mark.parametrize("family, changed, expected", [
    ("modernbert", {"layer_types": ..., ROPE: ..., "global_attn_every_n_layers": 2, "global_rope_theta": 1000.0,
                    "local_rope_theta": 77.0}, dict(global_rope_theta=1000.0, local_rope_theta=77.0)),
    ("modernbert", {"layer_types": ["full_attention", "sliding_attention"], "global_attn_every_n_layers": ...,
                    "global_rope_theta": ..., "local_rope_theta": ..., ROPE: {
                        "full_attention": {"rope_type": "default", "rope_theta": 1000.0},
                        "sliding_attention": {"rope_type": "default", "rope_theta": 77.0}}},
     dict(global_rope_theta=1000.0, local_rope_theta=77.0)),
    ("modernbert", {"rope_scaling": {"type": "default", "rope_theta": 9}},
     dict(global_rope_theta=9.0, local_rope_theta=9.0)),
    ("modernbert", {ROPE: {"full_attention": {"rope_theta": 7.0}}, "local_rope_theta": ...},
     dict(global_rope_theta=7.0)),
    ("modernbert", {"sliding_window": 3}, dict(local_attention=6)),
    ("modernbert", {"layer_norm_eps": 0.5, "position_embedding_type": "sans_pos"}, {}),  # transformers reads norm_eps
    ("roberta", {"layer_norm_eps": ...}, dict(layer_norm_eps=1e-12)),  # the default of transformers
    ("distilbert", {"dim": ..., "hidden_size": 16}, {}),
    ("eurobert", {"rope_theta": ..., ROPE: {"rope_type": "default", "rope_theta": 9}}, dict(rope_theta=9.0)),
    ("eurobert", {"rope_scaling": {"rope_theta": 5.0}}, dict(rope_theta=5.0)),
    ("eurobert", {"auto_map": {"AutoModel": "modeling_eurobert.EuroBertModel"}, "bos_token": "x"}, {}),
    ("eurobert", {"rope_theta": 250000, ROPE: ..., "head_dim": ...}, {}),  # like the published configs
    ("eurobert", {"classifier_pooling": ..., "clf_pooling": "mean"}, dict(classifier_pooling="mean")),
    ("nomic_bert", {ROPE: ..., "head_dim": 8}, {}),  # without the fields, transformers uses the base of the family
    ("nomic_bert", {"auto_map": {"AutoModel": "a/b--modeling_hf_nomic_bert.NomicBertModel"}, "n_embd": 16}, {}),
    ("gte", {ROPE: {"rope_type": "linear", "factor": 4.0, "rope_theta": 5e4}},
     dict(rope_theta=5e4, rope_scaling="linear factor=4.0")),
    ("jina_embeddings_v3", {ROPE: ..., "rope_theta": 9}, dict(rope_theta=9.0)),
    ("eurobert", {"rope_scaling": {"type": "linear", "factor": 2}}, dict(rope_scaling="linear factor=2.0")),
    ("eurobert", {"rope_scaling": {}}, {}),
    ("eurobert", {"original_max_position_embeddings": 32, ROPE: dict(
        rope_type="yarn", factor=2.0, rope_theta=9.0, original_max_position_embeddings=16)},
     dict(rope_theta=9.0, rope_scaling="yarn factor=2.0 original_length=32 beta_fast=32.0 beta_slow=1.0")),
    ("modernbert", {ROPE: {"full_attention": {"rope_theta": 7.0}}, "local_rope_theta": ...,
                    "rope_scaling": {"rope_type": "linear", "factor": 2.0}},
     dict(global_rope_theta=7.0, global_rope_scaling="linear factor=2.0", local_rope_scaling="linear factor=2.0")),
    # The fields of old folders.
    ("ultrabert", {"layer_types": ..., "sliding_window": ..., ROPE: ..., "attention_windows": [4, None, 4],
                   "rope_theta": [1.0, 2.0, 1.0], "head_dim": None},
     dict(sliding_window=4, sliding_rope_theta=1.0, full_rope_theta=2.0)),
    ("ultrabert", {"layer_types": ["full_attention"] * 3, ROPE: {"full_attention": {
        "rope_type": "linear", "factor": 2.0, "rope_theta": 3.0}}, "rope_theta": 5.0},
     dict(layer_types="full", full_rope_theta=3.0, full_rope_scaling="linear factor=2.0")),
    ("ultrabert", {"layer_types": ..., ROPE: None, "num_key_value_heads": None},
     dict(layer_types="sliding,sliding,full")),
    ("neobert", {"auto_map": {"AutoModel": "model.NeoBERT"}, "hidden_act": "swiglu", "intermediate_size": 47}, {}),
    ("deberta_v2", {"pos_att_type": "c2p | P2C", "attention_head_size": 8, "pooler_hidden_size": 16}, {}),
    ("deberta_v2", {"conv_act": ..., "legacy": ...}, {}),
    ("deberta_v2", {"pos_att_type": None, "share_att_key": ...}, dict(pos_att_type="", share_att_key=False)),
])  # fmt: skip
def test_all_config_versions_are_read(family, changed, expected, folder_of, tmp_path):
    config = pretrained.read_pretrained(with_fields(folder_of(family), changed, tmp_path / "copy")).config
    assert config == model_config(family, **expected)
    assert all(isinstance(getattr(config, name), float) for name in vars(config) if "rope_theta" in name)


@pytest.mark.parametrize("family, fields, message", [
    ("bert", dict(causal=True), r"model.causal = True"), ("bert", dict(positions="none"), r"model.positions = 'none'"),
    ("bert", dict(norm="pre"), r"model.norm = 'pre'"), ("distilbert", dict(norm="pre"), r"model.norm = 'pre'"),
    ("electra", dict(norm="pre"), r"model.norm = 'pre'"), ("megatron_bert", dict(causal=True), r"model.causal = True"),
    ("modernbert", dict(glu=False), r"model.glu = False"),
    ("neobert", dict(intermediate_size=12), r"model.intermediate_size = 12"),
    ("mpnet", dict(position_offset=1), r"model.position_offset = 1"),
])  # fmt: skip
def test_a_model_that_transformers_does_not_have_is_refused(family, fields, message):
    with pytest.raises(UserError, match=message):
        huggingface.check_exportable(model_config(family, **fields))
    if family == "bert":
        with pytest.raises(UserError, match=message):
            tf1.check_exportable(model_config(family, **fields))
