"""RoBERTa's classifier in training: its dropout before the dense layer, which BERT has not."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from bertjax.config import BertConfig
from bertjax.families.bert.model import BertModel
from bertjax.families.roberta import RobertaConfig
from bertjax.families.roberta.model import RobertaModel
from bertjax.families.with_heads import BertForSequenceClassification
from bertjax.model.dropout import row_keys
from bertjax.model.heads import Classifier
from tests.families.test_modernbert import random_params

TINY = dict(vocab_size=150, hidden_size=64, num_hidden_layers=1, num_attention_heads=2, intermediate_size=32,
            hidden_dropout_prob=0.25)  # fmt: skip
IDS = np.random.default_rng(0).integers(3, 150, (40, 6)).astype(np.int32)
KEYS = row_keys(jax.random.key(7), jnp.arange(len(IDS)))


def read_by_pooler(model, packed=False):
    """Returns the states of first tokens, and the states that the pooler reads, with dropout and without."""
    ones, firsts = np.ones_like(IDS), None
    params = random_params(BertForSequenceClassification(model.config, 2), model.config)["bert"]
    params["pooler"]["dense"] = {"kernel": 0.1 * np.eye(64, dtype=np.float32), "bias": np.zeros(64)}
    if packed:
        ones, firsts = np.repeat([[1, 2]], 3, axis=1) * ones, np.array([[0, 3]] * len(IDS))

    @jax.jit
    def apply(params):
        return [model.apply({"params": params}, IDS, ones, ones * 0, None, keys, firsts) for keys in (KEYS, None)]

    for hidden, pooled in jax.device_get(apply(params)):  # tanh(0.1 x) can be undone
        yield (hidden[:, [0, 3]] if packed else hidden[:, 0]), np.arctanh(pooled) / 0.1


@pytest.mark.parametrize("packed", [False, True])
def test_the_pooler_of_roberta_reads_states_with_dropout(packed):
    (hidden, read), (hidden_without, read_without) = read_by_pooler(RobertaModel(RobertaConfig(**TINY)), packed)
    is_kept = np.abs(read) > 1e-6
    np.testing.assert_allclose(read[is_kept], hidden[is_kept] / 0.75, rtol=1e-3, atol=1e-4)
    assert abs(is_kept.mean() - 0.75) < 0.02
    rows = is_kept.reshape(-1, 64)
    assert len(np.unique(rows, axis=0)) == len(rows)  # each text has a mask of its own
    np.testing.assert_allclose(read_without, hidden_without, rtol=1e-3, atol=1e-4)


def test_its_mask_is_not_that_of_the_classifier():
    config = RobertaConfig(**TINY | dict(hidden_dropout_prob=0.5))
    (_, read), _ = read_by_pooler(RobertaModel(config))
    dense = {"kernel": jnp.eye(64), "bias": jnp.zeros(64)}
    classifier = Classifier(config, 64, config.pooled_dropout_prob)
    after = classifier.apply({"params": {"dense": dense}}, jnp.ones((len(IDS), 64)), KEYS)
    assert abs(((np.abs(read) > 1e-6) == (np.asarray(after) > 0)).mean() - 0.5) < 0.04


def test_the_pooler_of_bert_reads_states_as_they_are():
    (hidden, read), _ = read_by_pooler(BertModel(BertConfig(**TINY)))
    np.testing.assert_allclose(read, hidden, rtol=1e-3, atol=1e-4)
