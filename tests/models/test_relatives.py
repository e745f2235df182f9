"""Dropout of BERT's relatives: before the dense layer of RoBERTa's classifier, and in the layers of DistilBERT."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from bertjax.config.model_config import BertConfig, Compute
from bertjax.models import families
from bertjax.models.distilbert.config import DistilBertConfig
from bertjax.models.families import encoder_of
from bertjax.models.heads import (
    BertForMaskedLM,
    BertForQuestionAnswering,
    BertForSequenceClassification,
    BertForTokenClassification,
)
from bertjax.models.roberta.config import RobertaConfig
from bertjax.nn.encoder import Encoder
from bertjax.nn.heads import Classifier
from bertjax.nn.ops.dropout import row_keys
from tests.models.test_modernbert import random_params

TINY = dict(vocab_size=150, hidden_size=64, num_hidden_layers=1, num_attention_heads=2, intermediate_size=32,
            hidden_dropout_prob=0.25)  # fmt: skip
IDS = np.random.default_rng(0).integers(3, 150, (40, 6)).astype(np.int32)
KEYS = row_keys(jax.random.key(7), jnp.arange(len(IDS)))


def read_by_pooler(model, packed=False):
    """Yields the states of first tokens, and the inputs of the pooler, with dropout and without."""
    ones, firsts = np.ones_like(IDS), None
    params = random_params(BertForSequenceClassification(model.config, 2), model.config)["bert"]
    params["pooler"]["dense"] = {"kernel": 0.1 * np.eye(64, dtype=np.float32), "bias": np.zeros(64)}
    if packed:
        ones, firsts = np.repeat([[1, 2]], 3, axis=1) * ones, np.array([[0, 3]] * len(IDS))

    @jax.jit
    def apply(params):
        return [model.apply({"params": params}, IDS, ones, ones * 0, None, keys, firsts) for keys in (KEYS, None)]

    for hidden, pooled in jax.device_get(apply(params)):  # inverts tanh(0.1 x)
        yield (hidden[:, [0, 3]] if packed else hidden[:, 0]), np.arctanh(pooled) / 0.1


@pytest.mark.slow
@pytest.mark.parametrize("packed", [False, True])
def test_the_pooler_of_roberta_reads_states_with_dropout(packed):
    (hidden, read), (hidden_without, read_without) = read_by_pooler(encoder_of(RobertaConfig(**TINY)), packed)
    is_kept = np.abs(read) > 1e-6
    np.testing.assert_allclose(read[is_kept], hidden[is_kept] / 0.75, rtol=1e-3, atol=1e-4)
    assert abs(is_kept.mean() - 0.75) < 0.02
    rows = is_kept.reshape(-1, 64)
    assert len(np.unique(rows, axis=0)) == len(rows)  # every text has a separate mask
    np.testing.assert_allclose(read_without, hidden_without, rtol=1e-3, atol=1e-4)
    (hidden, read), _ = read_by_pooler(encoder_of(BertConfig(**TINY)))  # has no such dropout
    np.testing.assert_allclose(read, hidden, rtol=1e-3, atol=1e-4)


@pytest.mark.slow
def test_pooler_and_classifier_dropout_masks_differ():
    config = RobertaConfig(**TINY | dict(hidden_dropout_prob=0.5))
    (_, read), _ = read_by_pooler(encoder_of(config))
    dense = {"kernel": jnp.eye(64), "bias": jnp.zeros(64)}
    classifier = Classifier(config, 64, config.pooled_dropout_prob)
    after = classifier.apply({"params": {"dense": dense}}, jnp.ones((len(IDS), 64)), KEYS)
    assert abs(((np.abs(read) > 1e-6) == (np.asarray(after) > 0)).mean() - 0.5) < 0.04


@pytest.mark.slow
def test_distilbert_has_no_dropout_on_attention_outputs():
    """Feed-forward layers of zeros ignore their dropout, so only dropout on attention outputs would be random."""
    segments, x = jnp.ones((2, 8), jnp.int32), jax.random.normal(jax.random.key(0), (2, 8, 64))
    keys = jax.random.split(jax.random.key(2), 2)
    for config, is_random in ((DistilBertConfig(**TINY), False), (BertConfig(**TINY), True)):
        config = dataclasses.replace(config, hidden_dropout_prob=0.5, attention_probs_dropout_prob=0.0)
        encoder = Encoder(config, Compute(), families.family_of(config).architecture(config).layers)
        params = random_params(BertForMaskedLM(config), config)["bert"]["encoder"]
        params["layers"]["output"] = jax.tree.map(jnp.zeros_like, params["layers"]["output"])

        @jax.jit
        def states(params, encoder=encoder):
            return [
                encoder.apply({"params": params}, x, segments, row_keys_or_none) for row_keys_or_none in (keys, None)
            ]

        assert np.allclose(*states(params), atol=1e-5) != is_random


@pytest.mark.slow
@pytest.mark.parametrize("pooled, spans", [(0.5, 0.0), (0.0, 0.5)])
def test_head_dropout_depends_on_the_head_type(pooled, spans):
    none = dict(hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0)
    rates = dict(pooled_dropout_prob=pooled, spans_dropout_prob=spans)
    config = dataclasses.replace(DistilBertConfig(**TINY), **none, **rates)
    ids, keys = jnp.ones((2, 8), jnp.int32), jax.random.split(jax.random.key(2), 2)
    for model, is_random in (
        (BertForSequenceClassification(config, 2), pooled > 0),
        (BertForQuestionAnswering(config), spans > 0),
        (BertForTokenClassification(config, 2), False),
    ):
        params = {"params": random_params(model, config)}

        @jax.jit
        def logits(params, model=model):
            return [model.apply(params, ids, ids, ids, row_keys_or_none) for row_keys_or_none in (keys, None)]

        assert np.array_equal(*logits(params)) != is_random
