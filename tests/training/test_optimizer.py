"""The optimizer against Google's rules, step by step in float64."""

import re

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from bertjax.config import bert_config, pretraining_config
from bertjax.model.bert import BertForFeatureBasedTagging, BertForPreTraining
from bertjax.training.optimizer import Schedule, make_optimizer, make_schedule
from tests.conftest import tiny_config

TINY = bert_config(tiny_config())

PARAMS = {
    "dense": {"kernel": np.array([[0.5, -1.0], [2.0, 0.1]]), "bias": np.array([0.3, -0.2])},
    "norm": {"scale": np.array([1.0, 0.9]), "bias": np.array([0.0, 0.4])},
    "word": {"embedding": np.array([[0.7, -0.3]])},
}


def google_adam(params, gradients, total, lr=1e-4, warmup=2, correct=False):
    """AdamWeightDecayOptimizer.apply_gradients and create_optimizer, in NumPy."""
    flat = {(a, b): x.copy() for a, leaves in params.items() for b, x in leaves.items()}
    m = {k: np.zeros_like(x) for k, x in flat.items()}
    v = {k: np.zeros_like(x) for k, x in flat.items()}
    for step, gradient in enumerate(gradients):
        g = {(a, b): x for a, leaves in gradient.items() for b, x in leaves.items()}
        norm = np.sqrt(sum((x**2).sum() for x in g.values()))
        g = {k: x / max(norm, 1.0) for k, x in g.items()}
        rate = lr * step / warmup if step < warmup else lr * (1 - step / total)
        for k in flat:
            m[k] = 0.9 * m[k] + 0.1 * g[k]
            v[k] = 0.999 * v[k] + 0.001 * g[k] ** 2
            scale_m, scale_v = (1 - 0.9 ** (step + 1), 1 - 0.999 ** (step + 1)) if correct else (1, 1)
            update = m[k] / scale_m / (np.sqrt(v[k] / scale_v) + 1e-6)
            if k[1] in ("kernel", "embedding"):
                update = update + 0.01 * flat[k]
            flat[k] = flat[k] - rate * update
    return {a: {b: flat[a, b] for b in leaves} for a, leaves in params.items()}


@pytest.mark.parametrize("correct", [False, True])
@pytest.mark.parametrize("size", [0.1, 30.0])  # below the norm that is clipped, and above
def test_five_steps_of_googles_optimizer(correct, size):
    config = pretraining_config().optimizer
    config.update(warmup_steps=2, bias_correction=correct)
    optimizer, schedule = make_optimizer(config), make_schedule(config, 10)
    rng = np.random.default_rng(0)
    gradients = [jax.tree.map(lambda x: size * rng.normal(size=x.shape), PARAMS) for _ in range(5)]
    params = jax.tree.map(lambda x: jnp.asarray(x, jnp.float32), PARAMS)
    state = optimizer.init(params)
    for step, gradient in enumerate(gradients):
        gradient = jax.tree.map(jnp.float32, gradient)
        updates, state = optimizer.update(gradient, state, params, learning_rate=schedule(step))
        params = jax.tree.map(jnp.add, params, updates)
    expected = google_adam(PARAMS, gradients, total=10, correct=correct)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, atol=1e-6), params, expected)


def test_lamb_steps_by_the_size_of_each_matrix():
    """Algorithm 2 of You et al. 2020 on the matrices by themselves, in float64, against ours on the stacked arrays."""
    rng = np.random.default_rng(3)
    stacked = {
        "layers": {
            "query_key_value": {"kernel": rng.normal(size=(2, 4, 3, 2, 2)), "bias": rng.normal(size=(2, 3, 2, 2))},
            "output": {"kernel": 5 * rng.normal(size=(2, 6, 4))},
        },
        "word": {"embedding": np.zeros((5, 4))},
    }
    config = pretraining_config().optimizer
    config.update(name="lamb", bias_correction=True, max_grad_norm=1e9)
    optimizer = make_optimizer(config)
    gradient = jax.tree.map(lambda x: rng.normal(size=x.shape), stacked)
    params = jax.tree.map(jnp.float32, stacked)
    gradient32 = jax.tree.map(jnp.float32, gradient)
    updates, _ = optimizer.update(gradient32, optimizer.init(params), params, learning_rate=0.1)

    def expected(p, g, is_matrix=True):
        direction = g / (np.abs(g) + 1e-6)  # of the first step: m / (sqrt(v) + epsilon), both corrected
        if not is_matrix:
            return -0.1 * direction
        direction = direction + 0.01 * p
        ratio = np.linalg.norm(p) / np.linalg.norm(direction)
        return -0.1 * direction * (ratio if ratio > 0 else 1)

    ours, qkv, out = updates["layers"], ("query_key_value", "kernel"), ("output", "kernel")
    for layer in range(2):
        for which in range(3):
            p, g, u = (tree[qkv[0]][qkv[1]][layer, :, which] for tree in (stacked["layers"], gradient["layers"], ours))
            np.testing.assert_allclose(u, expected(p, g), rtol=1e-4)
        p, g, u = (tree[out[0]][out[1]][layer] for tree in (stacked["layers"], gradient["layers"], ours))
        np.testing.assert_allclose(u, expected(p, g), rtol=1e-4)
    bias = (tree["query_key_value"]["bias"] for tree in (stacked["layers"], gradient["layers"]))
    np.testing.assert_allclose(ours["query_key_value"]["bias"], expected(*bias, is_matrix=False), rtol=1e-4)
    word = expected(stacked["word"]["embedding"], gradient["word"]["embedding"])  # all zero: nothing to scale to
    np.testing.assert_allclose(updates["word"]["embedding"], word, rtol=1e-4)


def test_learning_rate_of_the_paper():
    rate = Schedule(1e-4, 10_000, 1_000_000)
    expected = {0: 0, 5_000: 5e-5, 9_999: 0.9999e-4, 10_000: 0.99e-4, 500_000: 5e-5, 1_000_000: 0, 2_000_000: 0}
    for step, value in expected.items():
        assert abs(float(rate(step)) - value) < 1e-10
    assert float(Schedule(1.0, 0, 10)(0)) == 1.0


ENCODER = {
    "bert/embeddings/word/embedding", "bert/embeddings/position/embedding", "bert/embeddings/token_type/embedding",
    "bert/encoder/layers/attention/query_key_value/kernel", "bert/encoder/layers/attention/output/kernel",
    "bert/encoder/layers/intermediate/kernel", "bert/encoder/layers/output/kernel",
}  # fmt: skip
LSTM = {
    f"lstm/{direction}_{layer}/{gate}/kernel"
    for direction in ("forward", "backward") for layer in (0, 1)
    for gate in ("ii", "if", "ig", "io", "hi", "hf", "hg", "ho")
}  # fmt: skip


@pytest.mark.parametrize(
    "model, inputs, decays, also_left_alone",
    [
        (
            BertForPreTraining(TINY),
            4,
            ENCODER | {"bert/pooler/dense/kernel", "masked_lm/dense/kernel", "next_sentence/dense/kernel"},
            set(),
        ),
        (
            BertForFeatureBasedTagging(TINY, labels=3, layers="weighted_sum_all", lstm_size=8, lstm_layers=2),
            3,
            ENCODER | LSTM | {"classifier/dense/kernel"},
            {"layer_weights", "layer_scale"},  # which are not Google's; to decay them would be to prefer equal weights
        ),
    ],
    ids=["pre-training", "LSTM"],
)
def test_what_decays(model, inputs, decays, also_left_alone):
    """Google leaves out what has LayerNorm or bias in its name. Without a gradient nothing but decay moves a param."""
    ids = jnp.zeros((1, 8), jnp.int32)
    abstract = nn.meta.unbox(jax.eval_shape(model.init, jax.random.key(0), *[ids] * inputs)["params"])
    optimizer = make_optimizer(pretraining_config().optimizer)

    @jax.jit
    def update(params):
        gradient = jax.tree.map(jnp.zeros_like, params)
        return optimizer.update(gradient, optimizer.init(params), params, learning_rate=0.5)[0]

    updates = update(jax.tree.map(lambda x: np.ones(x.shape, np.float32), abstract))
    moved = {
        jax.tree_util.keystr(path, simple=True, separator="/"): np.unique(update)
        for path, update in jax.tree_util.tree_leaves_with_path(updates)
    }
    assert {name for name, values in moved.items() if (values != 0).all()} == decays
    assert all(np.allclose(moved[name], -0.5 * 0.01) for name in decays)
    left_alone = {name for name, values in moved.items() if (values == 0).all()}
    assert left_alone == moved.keys() - decays
    google = {name for name in left_alone if re.search(r"norm/(scale|bias)$|bias$", name)}
    assert left_alone - google == also_left_alone and len(google) > 10
