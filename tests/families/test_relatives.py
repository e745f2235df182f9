"""DistilBERT: which of its layers have dropout."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from bertjax.config import BertConfig, Compute
from bertjax.families.distilbert import DistilBertConfig
from bertjax.families.with_heads import (
    BertForMaskedLM,
    BertForQuestionAnswering,
    BertForSequenceClassification,
    BertForTokenClassification,
)
from bertjax.model.encoder import Encoder
from tests.families.test_modernbert import random_params

SIZES = dict(
    vocab_size=150, hidden_size=32, num_hidden_layers=1, num_attention_heads=2, intermediate_size=64,
    max_position_embeddings=64,
)  # fmt: skip
DISTILBERT = DistilBertConfig(**SIZES)


@pytest.mark.slow
def test_what_attention_adds_has_no_dropout_in_distilbert():
    """With feed-forward layers of zeros, whose dropout does nothing, only that would be random."""
    segments, x = jnp.ones((2, 8), jnp.int32), jax.random.normal(jax.random.key(0), (2, 8, 32))
    keys = jax.random.split(jax.random.key(2), 2)
    for config, is_random in ((DISTILBERT, False), (BertConfig(**SIZES), True)):
        config = dataclasses.replace(config, hidden_dropout_prob=0.5, attention_probs_dropout_prob=0.0)
        encoder = Encoder(config, Compute())
        params = random_params(BertForMaskedLM(config), config)["bert"]["encoder"]
        params["layers"]["output"] = jax.tree.map(jnp.zeros_like, params["layers"]["output"])

        @jax.jit
        def states(params, encoder=encoder):
            return [encoder.apply({"params": params}, x, segments, each) for each in (keys, None)]

        assert np.allclose(*states(params), atol=1e-5) != is_random


@pytest.mark.parametrize("pooled, spans", [(0.5, 0.0), (0.0, 0.5)])
def test_an_output_layer_has_the_dropout_of_its_kind(pooled, spans):
    none = dict(hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0)
    rates = dict(pooled_dropout_prob=pooled, spans_dropout_prob=spans)
    config = dataclasses.replace(DISTILBERT, **none, **rates)
    ids, keys = jnp.ones((2, 8), jnp.int32), jax.random.split(jax.random.key(2), 2)
    for model, is_random in (
        (BertForSequenceClassification(config, 2), pooled > 0),
        (BertForQuestionAnswering(config), spans > 0),
        (BertForTokenClassification(config, 2), False),
    ):
        params = {"params": random_params(model, config)}

        @jax.jit
        def logits(params, model=model):
            return [model.apply(params, ids, ids, ids, each) for each in (keys, None)]

        assert np.array_equal(*logits(params)) != is_random
