"""RoBERTa's classifier in training: its dropout before the dense layer, which BERT has not."""

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from bertjax.config import BertConfig, Compute
from bertjax.families.bert.model import BertModel
from bertjax.families.roberta import FAMILY, RobertaConfig
from bertjax.families.roberta.model import RobertaModel
from bertjax.model.dropout import row_keys
from bertjax.model.heads import Classifier

TINY = dict(vocab_size=150, hidden_size=64, num_hidden_layers=1, num_attention_heads=2, intermediate_size=32,
            hidden_dropout_prob=0.25)  # fmt: skip
IDS = np.random.default_rng(0).integers(3, 150, (40, 6)).astype(np.int32)


def read_by_pooler(model, packed=False):
    """Returns the states of first tokens, and what the pooler reads of them, for every row of a step."""
    ones, firsts = np.ones_like(IDS), None
    keys = row_keys(jax.random.key(7), jnp.arange(len(IDS)))
    params = nn.meta.unbox(jax.jit(model.init)(jax.random.key(0), IDS, ones, ones * 0))
    params["params"]["pooler"]["dense"]["kernel"] = 0.1 * jnp.eye(64)  # tanh(0.1 x) can be undone
    if packed:
        ones, firsts = np.repeat([[1, 2]], 3, axis=1) * ones, np.array([[0, 3]] * len(IDS))
    given = (IDS, ones, ones * 0, None)
    hidden, pooled = jax.jit(model.apply)(params, *given, keys, firsts)
    hidden = np.asarray(hidden)
    return (hidden[:, [0, 3]] if packed else hidden[:, 0]), np.arctanh(np.asarray(pooled)) / 0.1


@pytest.mark.slow
@pytest.mark.parametrize("packed", [False, True])
def test_the_pooler_of_roberta_reads_states_with_dropout(packed):
    hidden, read = read_by_pooler(RobertaModel(RobertaConfig(**TINY)), packed)
    is_kept = np.abs(read) > 1e-6
    np.testing.assert_allclose(read[is_kept], hidden[is_kept] / 0.75, rtol=1e-3, atol=1e-4)
    assert abs(is_kept.mean() - 0.75) < 0.02
    rows = is_kept.reshape(-1, 64)
    assert len(np.unique(rows, axis=0)) == len(rows)  # each text has a mask of its own


@pytest.mark.slow
def test_its_mask_is_not_that_of_the_classifier():
    config = RobertaConfig(**TINY | dict(hidden_dropout_prob=0.5))
    _, read = read_by_pooler(RobertaModel(config))
    keys, ones = row_keys(jax.random.key(7), jnp.arange(len(IDS))), jnp.ones((len(IDS), 64))
    dense = {"kernel": jnp.eye(64), "bias": jnp.zeros(64)}
    after = Classifier(config, 64, config.pooled_dropout_prob).apply({"params": {"dense": dense}}, ones, keys)
    assert abs(((np.abs(read) > 1e-6) == (np.asarray(after) > 0)).mean() - 0.5) < 0.04


@pytest.mark.slow
def test_the_pooler_of_bert_reads_states_as_they_are():
    hidden, read = read_by_pooler(BertModel(BertConfig(**TINY)))
    np.testing.assert_allclose(read, hidden, rtol=1e-3, atol=1e-4)


@pytest.mark.slow
def test_without_keys_nothing_is_dropped():
    config = RobertaConfig(**TINY)
    model, ones = FAMILY.model(config, Compute()), np.ones_like(IDS)
    params = model.init(jax.random.key(0), IDS, ones, ones * 0)
    np.testing.assert_array_equal(
        model.apply(params, IDS, ones, ones * 0)[1], BertModel(config).apply(params, IDS, ones, ones * 0)[1]
    )
