"""Products of bfloat16 factors on a CPU: their values, their gradients, and the fast path of the compiler."""

import functools
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from bertjax.config.model_config import BertConfig, Compute
from bertjax.models.heads import BertForPreTraining
from bertjax.nn.ops.dropout import row_keys
from bertjax.nn.ops.matmul import multiply, project
from tests.nn.reference import random_params

ON_CPU = Compute("float32", "bfloat16", chip="cpu")


def normal(seed: int, *shape: int) -> jax.Array:
    return jax.random.normal(jax.random.key(seed), shape)


def rounded(x):
    """Rounds an array to bfloat16; returns float32."""
    return np.float32(jnp.asarray(x).astype("bfloat16"))


@pytest.mark.parametrize("inputs, features", [(8, (3, 2, 16)), (64, (8,)), (8, (8,))])  # wider, narrower, equal
@pytest.mark.parametrize("outputs_first", [False, True])
def test_factors_are_rounded_to_bfloat16_and_sums_are_float32(inputs, features, outputs_first):
    if outputs_first and len(features) > 1:
        features = (96,)
    x, kernel = normal(0, 4, 16, inputs), normal(1, inputs, *features)
    grad = normal(2, 4, 16, *features)
    stored_kernel = jnp.moveaxis(kernel, 0, -1) if outputs_first else kernel
    product, pull_back = jax.vjp(lambda x, w: project(x, w, ON_CPU, outputs_first), x, stored_kernel)
    of_x, of_kernel = pull_back(grad)
    assert {product.dtype, of_x.dtype, of_kernel.dtype} == {jnp.dtype("float32")}
    axes = list(range(2, grad.ndim))
    expected = np.tensordot(rounded(grad), rounded(x), ([0, 1], [0, 1]))
    if not outputs_first:
        expected = np.moveaxis(expected, -1, 0)
    np.testing.assert_allclose(of_kernel, expected, atol=1e-4)
    np.testing.assert_allclose(product, np.tensordot(rounded(x), rounded(kernel), 1), atol=1e-4)
    expected = np.tensordot(rounded(grad), rounded(kernel), (axes, list(range(1, kernel.ndim))))
    np.testing.assert_allclose(of_x, expected, atol=1e-4)


@pytest.mark.parametrize(
    "k, m, n, transpose_a, transpose_b", [(16, 16, 8, False, False), (8, 32, 64, True, False), (32, 64, 4, False, True)]
)
def test_products_of_transposed_matrices_are_correct(k, m, n, transpose_a, transpose_b):
    a, b = normal(0, 2, 3, m, k), normal(1, 2, 3, k, n)
    arguments = [jnp.swapaxes(x, -1, -2) if turned else x for x, turned in ((a, transpose_a), (b, transpose_b))]
    for compute, expected in ((ON_CPU, rounded(a) @ rounded(b)), (Compute(), np.asarray(a) @ np.asarray(b))):
        product = multiply(*arguments, compute=compute, transpose_a=transpose_a, transpose_b=transpose_b)
        np.testing.assert_allclose(product, expected, atol=1e-4)


SMALL = BertConfig(
    vocab_size=500, hidden_size=64, num_hidden_layers=1, num_attention_heads=4, intermediate_size=256,
    max_position_embeddings=128,
)  # fmt: skip


@pytest.fixture(scope="module")
def step():
    """Returns, by product type, the loss gradient of a small model: (compiled, with random params)."""
    rng = np.random.default_rng(0)
    ids = rng.integers(1, 500, (16, 128))
    segments, types = np.ones_like(ids), (np.arange(128) > 60) * np.ones_like(ids)
    places = np.sort(rng.permuted(np.tile(np.arange(128), (16, 1)), axis=1)[:, :16])
    words = np.take_along_axis(ids, places, axis=1)
    keys = row_keys(jax.random.key(0), jnp.arange(16))
    model = BertForPreTraining(SMALL)
    params = random_params(model, ids, segments, types, places, deviation=0.02)

    def compiled(compute):
        def loss(params):
            logits, pairs = BertForPreTraining(SMALL, compute).apply(
                {"params": params}, ids, segments, types, places, dropout_keys=keys
            )
            chosen = jnp.take_along_axis(jax.nn.log_softmax(logits), words[..., None], axis=-1)
            return -chosen.mean() - jax.nn.log_softmax(pairs)[:, 0].mean()

        return jax.jit(jax.value_and_grad(loss)).lower(params).compile()

    both = {name: compiled(Compute("float32", name, "none", True, "cpu")) for name in ("float32", "bfloat16")}
    return both, params


@pytest.mark.slow
def test_a_step_with_bfloat16_products_equals_the_float32_step_up_to_rounding(step):
    both, params = step
    (loss, exact), (rough_loss, rough) = (both[name](params) for name in ("float32", "bfloat16"))
    assert rough_loss != loss
    np.testing.assert_allclose(rough_loss, loss, rtol=2e-3)
    for path, expected in jax.tree_util.tree_leaves_with_path(exact):
        actual = functools.reduce(lambda tree, key: tree[key.key], path, rough)
        assert actual.dtype == jnp.float32
        error = np.linalg.norm(actual - expected) / (np.linalg.norm(expected) + 1e-6)
        assert error < 3e-2, (jax.tree_util.keystr(path), error)


@pytest.mark.slow
def test_every_product_of_a_step_takes_the_fast_path(step):
    text = step[0]["bfloat16"].as_text()
    types = dict(re.findall(r"%([\w.\-]+) = (\w+)\[", text))
    slow = []
    for shape, first, line in re.findall(r"= f32\[([\d,]*)\]\S* dot\(%([\w.\-]+), ([^\n]*)", text):
        large = np.prod([int(n) for n in shape.split(",") if n]) >= 16 * 64 and not shape.endswith(",1")
        if large and types[first] != "bf16" and "next_sentence" not in line:
            slow.append(line)
    fast = re.findall(r"kind=kCustom.*__ynn_fusion", text)
    # One layer has three products for each of its four kernels, and seven products in attention.
    assert not slow and len(fast) >= 3 * 4 + 7, (slow, len(fast))
