"""DistilBERT and ELECTRA, made of BERT's modules: costs, training, fine-tuning and conversion, bad input."""

import dataclasses
import functools
import json

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from bertjax import families, tasks
from bertjax.config import BertConfig, Compute, UserError, named_stages, stage
from bertjax.families.distilbert import DistilBertConfig
from bertjax.families.electra import ElectraConfig
from bertjax.families.with_heads import (
    BertForMaskedLM,
    BertForQuestionAnswering,
    BertForSequenceClassification,
    BertForTokenClassification,
    count_parameters,
    forward_flops,
)
from bertjax.interop import conversion, huggingface, pretrained
from bertjax.model.encoder import Encoder
from bertjax.sharding.mesh import make_mesh
from bertjax.tasks.launch import launch
from bertjax.training.sinks.jsonl import read_metrics
from tests.conftest import tiny_config
from tests.families.test_modernbert import random_params
from tests.tasks.test_finetuning import config_for as fine_tuning_config_for
from tests.tasks.test_finetuning import write_sst2

pytestmark = pytest.mark.usefixtures("on_one_device")

SIZES = dict(
    vocab_size=150, hidden_size=32, num_hidden_layers=2, num_attention_heads=2, intermediate_size=64,
    max_position_embeddings=64,
)  # fmt: skip
CONFIGS = {"distilbert": DistilBertConfig(**SIZES), "electra": ElectraConfig(**SIZES, embedding_size=16)}


@pytest.mark.parametrize(
    "config, count",
    [
        (DistilBertConfig(), 66_985_530),
        (ElectraConfig(), 13_546_682),
        (ElectraConfig(embedding_size=768), 33_740_602),  # base's generator
    ],
)
def test_published_sizes(config, count):
    ids = jnp.zeros((1, 8), jnp.int32)
    params = jax.eval_shape(BertForMaskedLM(config).init, jax.random.key(0), *[ids] * 4)["params"]
    assert count_parameters(nn.meta.unbox(params), config) == count


@pytest.mark.slow
@pytest.mark.parametrize("name", CONFIGS)
def test_flops_are_those_of_the_matrix_products(name):
    """Against XLA's count, with one layer (it counts the body of a scan once)."""
    sizes = dict(num_hidden_layers=1, hidden_size=128, intermediate_size=512)
    sizes |= dict(embedding_size=512) if name == "electra" else {}  # so much that its projection cannot be left out
    config = dataclasses.replace(CONFIGS[name], **sizes)
    ids, positions = jnp.zeros((4, 32), jnp.int32), jnp.zeros((4, 5), jnp.int32)
    model = BertForMaskedLM(config)
    params = nn.meta.unbox(jax.eval_shape(model.init, jax.random.key(0), ids, ids, ids, positions)["params"])
    apply = jax.jit(lambda p: model.apply({"params": p}, ids, ids, ids, positions))
    counted = apply.lower(params).compile().cost_analysis()["flops"]
    assert 1 <= counted / forward_flops(config, 4, 32, 5, pooled=0) < 1.1  # the rest: norms, softmax, GELU


def config_for(name, records, **fields):
    config = tiny_config(records=records)
    config.model = families.model_fields(**dataclasses.asdict(CONFIGS[name]))
    config.objective, config.stages = "mlm", named_stages(short=stage(10, 32, 5))
    config.update(fields)
    tasks.validate(config)
    return config


@pytest.mark.slow
@pytest.mark.parametrize("name", CONFIGS)
def test_a_folder_is_trained_further_fine_tuned_and_written(name, records_folder, tmp_path):
    config = CONFIGS[name]
    huggingface.write(tmp_path / "theirs", config, random_params(BertForMaskedLM(config), config), None)
    launch(config_for(name, records_folder, init_checkpoint=str(tmp_path / "theirs")), tmp_path / "run")
    losses = [line["train/loss"] for line in read_metrics(tmp_path / "run") if "train/loss" in line]
    assert losses[-1] < losses[0]
    write_sst2(tmp_path)
    tuning = fine_tuning_config_for(tmp_path, tmp_path / "run", epochs=4.0, packing=True)
    tasks.validate(tuning)
    launch(tuning, tmp_path / "tuned")
    assert "left out" not in conversion.convert(tmp_path / "tuned", tmp_path / "written", "huggingface")
    ours, again = (pretrained.read_with_tokenizer(tmp_path / folder) for folder in ("tuned", "written"))
    assert again.labels == ours.labels == ("0", "1") and again.architecture == "BertForSequenceClassification"
    jax.tree.map(np.testing.assert_array_equal, ours.params, again.params)
    predicted = [next(tasks.get("glue").predict(source, [("ship sail harbour",)])) for source in (ours, again)]
    assert [each["label"] for each in predicted] == ["1", "1"]
    fields = json.loads((tmp_path / "written/config.json").read_text())
    assert fields["model_type"] == name and fields["architectures"][0].endswith("ForSequenceClassification")


def test_embeddings_are_split_over_devices_as_hidden_states_are():
    config = config_for("electra", "unused")
    config.mesh.fsdp = 2
    make_mesh(config)
    config.model.embedding_size = 15
    with pytest.raises(UserError, match=r"config.model.embedding_size = 15: must be a multiple of the 2 devices"):
        make_mesh(config)


@pytest.mark.slow
def test_what_attention_adds_has_no_dropout_in_distilbert():
    """With feed-forward layers of zeros, whose dropout does nothing, only that would be random."""
    for config, is_random in ((CONFIGS["distilbert"], False), (BertConfig(**SIZES), True)):
        config = dataclasses.replace(config, hidden_dropout_prob=0.5, attention_probs_dropout_prob=0.0)
        encoder, segments = Encoder(config, Compute()), jnp.ones((2, 8), jnp.int32)
        x = jax.random.normal(jax.random.key(0), (2, 8, 32))
        params = nn.meta.unbox(encoder.init(jax.random.key(1), x, segments)["params"])
        params["layers"]["output"] = jax.tree.map(jnp.zeros_like, params["layers"]["output"])
        keys = jax.random.split(jax.random.key(2), 2)
        with_dropout, without = (encoder.apply({"params": params}, x, segments, each) for each in (keys, None))
        assert np.allclose(with_dropout, without, atol=1e-5) != is_random


@pytest.mark.slow
@pytest.mark.parametrize("pooled, spans", [(0.5, 0.0), (0.0, 0.5)])
def test_an_output_layer_has_the_dropout_of_its_kind(pooled, spans):
    none = dict(hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0)
    rates = dict(pooled_dropout_prob=pooled, spans_dropout_prob=spans)
    config = dataclasses.replace(CONFIGS["distilbert"], num_hidden_layers=1, **none, **rates)
    ids, keys = jnp.ones((2, 8), jnp.int32), jax.random.split(jax.random.key(2), 2)
    for model, is_random in (
        (BertForSequenceClassification(config, 2), pooled > 0),
        (BertForQuestionAnswering(config), spans > 0),
        (BertForTokenClassification(config, 2), False),
    ):
        params = random_params(model, config)
        apply = jax.jit(functools.partial(model.apply, {"params": params}, ids, ids, ids))
        assert np.array_equal(apply(keys), apply(None)) != is_random


@pytest.mark.slow
@pytest.mark.parametrize(
    "name, changed, message",
    [
        ("distilbert", {"dim": None}, r"config.json: dim is missing; the config of such a model needs it"),
        ("distilbert", {"n_layers": "six"}, r"config.json: n_layers is 'six', which is not a valid int"),
        ("distilbert", {"dim": 33}, r"config.json: dim = 33: must be a multiple of n_heads = 2"),
        ("distilbert", {"qa_dropout": 1.0}, r"config.json: qa_dropout = 1.0: must be at least 0 and below 1"),
        ("distilbert", {"activation": "silu"}, r"config.json: activation 'silu' is not supported; supported: gelu"),
        ("distilbert", {"quantization_config": {}}, r"config.json: quantization_config: quantized weights are not"),
        ("distilbert", {"hidden_dim": 65}, r"layer_0/intermediate/dense/kernel has shape"),
        ("electra", {"embedding_size": None}, r"config.json: embedding_size is missing"),
        ("electra", {"embedding_size": 24}, r"word_embeddings has shape \(150, 16\), but its config says \(150, 24\)"),
        ("electra", {"hidden_act": "relu"}, r"config.json: hidden_act 'relu' is not supported; supported: 'gelu'"),
        (
            "electra",
            {"architectures": ["ElectraForMultipleChoice"], "summary_type": "mean"},
            r"config.json: summary_type 'mean' is not supported; supported: 'first'",
        ),
    ],
)
def test_what_is_wrong_in_a_folder_is_named_as_the_folder_names_it(name, changed, message, tmp_path):
    huggingface.write(tmp_path, CONFIGS[name], random_params(BertForMaskedLM(CONFIGS[name]), CONFIGS[name]), None)
    fields = json.loads((tmp_path / "config.json").read_text()) | changed
    (tmp_path / "config.json").write_text(json.dumps({key: x for key, x in fields.items() if x is not None}))
    with pytest.raises(UserError, match=message) as error:
        pretrained.read(tmp_path)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize("name", CONFIGS)
def test_a_form_that_transformers_does_not_have_stays_ours(name):
    config = dataclasses.replace(CONFIGS[name], norm="pre")
    with pytest.raises(UserError, match=r"model.norm = 'pre'"):
        huggingface.check_form(config)
    huggingface.check_form(CONFIGS[name])
    with pytest.raises(UserError, match=f"model.family = '{name}'"):
        pretrained.tf1.check_form(CONFIGS[name])
