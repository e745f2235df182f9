"""The optimizer compared with Google's rules, step by step in float64."""

import dataclasses
import functools
import math
import re

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import PartitionSpec

from bertjax.common.errors import UserError
from bertjax.config.defaults import param_group, param_groups, pretraining_config
from bertjax.distributed.mesh import make_mesh
from bertjax.launch.validate import validate
from bertjax.models import families
from bertjax.models.heads import BertForFeatureBasedTagging, BertForMaskedLM, BertForPreTraining
from bertjax.training.optim import optimizers
from bertjax.training.optim.optimizers import make_optimizer
from bertjax.training.optim.schedules import make_schedule
from bertjax.training.state import abstract_axes, abstract_state, make_init, make_layout
from tests.conftest import tiny_config
from tests.markers import slow_case

TINY = families.config_of(tiny_config())

PARAMS = {
    "dense": {"kernel": np.array([[0.5, -1.0], [2.0, 0.1]]), "bias": np.array([0.3, -0.2])},
    "norm": {"scale": np.array([1.0, 0.9]), "bias": np.array([0.0, 0.4])},
    "word": {"embedding": np.array([[0.7, -0.3]])},
}


def unnamed(params):
    """Returns logical axes without names."""
    return jax.tree.map(lambda x: PartitionSpec(*[None] * x.ndim), params)


def google_adam(params, gradients, total, lr=1e-4, warmup=2, correct=False):
    """AdamWeightDecayOptimizer.apply_gradients and create_optimizer in NumPy."""
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
@pytest.mark.parametrize("size", [0.1, 30.0])  # below the clipping norm, and above
def test_five_steps_equal_googles_optimizer(correct, size):
    config = pretraining_config().optimizer
    config.update(warmup_steps=2, bias_correction=correct)
    optimizer, schedule = make_optimizer(config, unnamed(PARAMS)), make_schedule(config, 10)
    rng = np.random.default_rng(0)
    gradients = [jax.tree.map(lambda x: size * rng.normal(size=x.shape), PARAMS) for _ in range(5)]
    params = jax.tree.map(lambda x: jnp.asarray(x, jnp.float32), PARAMS)
    state = optimizer.init(params)
    step_of = jax.jit(optimizer.update)
    for step, gradient in enumerate(gradients):
        gradient = jax.tree.map(jnp.float32, gradient)
        updates, state = step_of(gradient, state, params, learning_rate=schedule(step))
        params = jax.tree.map(jnp.add, params, updates)
    expected = google_adam(PARAMS, gradients, total=10, correct=correct)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, atol=1e-6), params, expected)


def test_a_hundred_steps_equal_stable_adamw():
    """Computes the formula in NumPy, tensor by tensor; the tensors of a stack are separate."""
    config = pretraining_config().optimizer
    config.update(name="stable_adamw", schedule="trapezoid", learning_rate=0.02, warmup_steps=10, beta2=0.98)
    config.update(decay_proportion=0.5, decay="sqrt", decay_to=0.1, weight_decay=0.003, max_grad_norm=1e9)
    rng = np.random.default_rng(0)
    params = {"layers": {"kernel": rng.normal(size=(3, 4, 5))}, "norm": {"scale": rng.normal(size=6)}}
    axes = {"layers": {"kernel": PartitionSpec("layers", "embed", "mlp")}, "norm": {"scale": PartitionSpec("embed")}}
    optimizer, schedule = make_optimizer(config, axes), make_schedule(config, 100)
    params_of_bertjax = jax.tree.map(jnp.float32, params)
    state, step_of = optimizer.init(params_of_bertjax), jax.jit(optimizer.update)

    tensors = {("kernel", i): params["layers"]["kernel"][i].copy() for i in range(3)} | {
        "scale": params["norm"]["scale"].copy()
    }
    m = {name: np.zeros_like(x) for name, x in tensors.items()}
    v = {name: np.zeros_like(x) for name, x in tensors.items()}
    divided = 0
    for step in range(100):
        size = np.exp(rng.normal(0, 2, 3))  # occasionally a gradient is far larger
        kernel, scale = size[:, None, None] * rng.normal(size=(3, 4, 5)), rng.normal(size=6)
        updates, state = step_of({"layers": {"kernel": jnp.float32(kernel)}, "norm": {"scale": jnp.float32(scale)}},
                                 state, params_of_bertjax, learning_rate=schedule(step))  # fmt: skip
        params_of_bertjax = jax.tree.map(jnp.add, params_of_bertjax, updates)

        rate = 0.02 * (min(step / 10, 1)) * (1 - 0.9 * np.sqrt(max(0, step - 50) / 50))
        for name, g in ({("kernel", i): kernel[i] for i in range(3)} | {"scale": scale}).items():
            m[name] = 0.9 * m[name] + 0.1 * g
            v[name] = 0.98 * v[name] + 0.02 * g**2
            mean, square = m[name] / (1 - 0.9 ** (step + 1)), v[name] / (1 - 0.98 ** (step + 1))
            excess = max(1.0, np.sqrt((g**2 / np.maximum(square, 1e-12)).mean()))
            divided += excess > 1.5
            decay = 0.003 * rate / 0.02 * tensors[name] if name != "scale" else 0
            tensors[name] = tensors[name] - rate / excess * mean / (np.sqrt(square) + 1e-6) - decay
    assert 20 < divided < 300
    np.testing.assert_allclose(params_of_bertjax["norm"]["scale"], tensors["scale"], rtol=2e-4, atol=2e-5)
    for i in range(3):
        np.testing.assert_allclose(params_of_bertjax["layers"]["kernel"][i], tensors["kernel", i], rtol=2e-4, atol=2e-5)


def updates_of(optimizer, params, gradient, learning_rate):
    """Returns the updates of the first step."""
    params, gradient = (jax.tree.map(jnp.float32, tree) for tree in (params, gradient))

    @jax.jit
    def update(params, gradient):
        return optimizer.update(gradient, optimizer.init(params), params, learning_rate=learning_rate)[0]

    return jax.device_get(update(params, gradient))


def test_lamb_equals_the_definition_per_matrix():
    """Compares algorithm 2 of You et al. 2020 on separate matrices, in float64, with bertjax on stacked arrays."""
    rng = np.random.default_rng(3)
    params = {
        "query_key_value": {"kernel": rng.normal(size=(2, 4, 3, 2, 2)), "bias": rng.normal(size=(2, 3, 2, 2))},
        "output": {"kernel": 5 * rng.normal(size=(2, 6, 4))},
        "word": {"embedding": np.zeros((5, 4))},
    }
    axes = {
        "query_key_value": {
            "kernel": PartitionSpec("layers", "embed", "projections", "heads", "kv"),
            "bias": PartitionSpec("layers", "projections", "heads", "kv"),
        },
        "output": {"kernel": PartitionSpec("layers", "mlp", "embed")},
        "word": {"embedding": PartitionSpec(None, None)},
    }
    config = pretraining_config().optimizer
    config.update(name="lamb", bias_correction=True, max_grad_norm=1e9)
    gradient = jax.tree.map(lambda x: rng.normal(size=x.shape), params)
    updates = updates_of(make_optimizer(config, axes), params, gradient, 0.1)

    def check(*path, is_matrix=True, at=...):
        p, g, update = (functools.reduce(dict.__getitem__, path, tree)[at] for tree in (params, gradient, updates))
        direction = g / (np.abs(g) + 1e-6)  # in the first step: m / (sqrt(v) + epsilon), both corrected
        ratio = 1
        if is_matrix:
            direction = direction + 0.01 * p
            ratio = np.linalg.norm(p) / np.linalg.norm(direction) or 1  # all zero: no norm to scale to
        np.testing.assert_allclose(update, -0.1 * direction * ratio, rtol=1e-4)

    for layer in range(2):
        for which in range(3):
            check("query_key_value", "kernel", at=(layer, slice(None), which))
        check("output", "kernel", at=layer)
    check("query_key_value", "bias", is_matrix=False)
    check("word", "embedding")


TRAPEZOID = dict(schedule="trapezoid", decay_proportion=0.2, warmup_steps=0)


@pytest.mark.parametrize("fields, total, rates", [
    (dict(learning_rate=1e-4, warmup_steps=10_000), 1_000_000,  # the value of the paper
     {0: 0, 5_000: 5e-5, 9_999: 0.9999e-4, 10_000: 0.99e-4, 500_000: 5e-5, 1_000_000: 0, 2_000_000: 0}),
    (dict(warmup_steps=0), 10, {0: 2.0}),
    (dict(schedule="cosine"), 110, {0: 0, 5: 1.0, 10: 2.0, 35: 1 + 0.5**0.5, 60: 1.0, 110: 0, 200: 0}),
    (dict(schedule="constant"), 110, {0: 0, 5: 1, 10: 2, 109: 2, 500: 2}),
    (TRAPEZOID, 110, {0: 2.0, 88: 2.0, 99: 1.0, 110: 0, 200: 0}),
    (TRAPEZOID | dict(decay_to=0.5), 110, {0: 2.0, 88: 2.0, 99: 1.5, 110: 1.0, 200: 1.0}),
    (TRAPEZOID | dict(decay_to=0.5, decay="cosine"), 110, {0: 2.0, 88: 2.0, 99: 1.5, 110: 1.0, 200: 1.0}),
    (TRAPEZOID | dict(decay_to=0.5, decay="sqrt"), 110,
     {0: 2.0, 88: 2.0, 89: 2 - (1 / 22) ** 0.5, 99: 2 - 0.5**0.5, 110: 1.0, 200: 1.0}),
])  # fmt: skip
def test_schedules_equal_their_formulas(fields, total, rates):
    config = pretraining_config().optimizer
    config.update(dict(learning_rate=2.0, warmup_steps=10), **fields)
    schedule = make_schedule(config, total)
    tolerance = 5e-7 * config.learning_rate
    np.testing.assert_allclose([schedule(step) for step in rates], [*rates.values()], rtol=0, atol=tolerance)


@pytest.mark.parametrize("model, inputs", [
    (BertForPreTraining(TINY), 4),
    (BertForFeatureBasedTagging(TINY, labels=3, layers="weighted_sum_all", lstm_size=8, lstm_layers=2), 3),
], ids=["pre-training", "LSTM"])  # fmt: skip
def test_weight_decay_excludes_norms_and_biases(model, inputs):
    """Google excludes params with LayerNorm or bias in their names. Without a gradient, only decay moves a param."""
    boxed = abstract_params(model, inputs)
    params = jax.tree.map(lambda x: np.ones(x.shape), nn.meta.unbox(boxed))
    optimizer = make_optimizer(pretraining_config().optimizer, nn.get_partition_spec(boxed))
    updates = updates_of(optimizer, params, jax.tree.map(np.zeros_like, params), 0.5)
    # The weights of layers are not in Google's code; their decay would prefer equal weights.
    left_alone = re.compile(r"norm/(scale|bias)$|bias$|^layer_(weights|scale)$")
    for path, update in jax.tree_util.tree_leaves_with_path(updates):
        name = jax.tree_util.keystr(path, simple=True, separator="/")
        np.testing.assert_allclose(update, 0 if left_alone.search(name) else -0.5 * 0.01, err_msg=name)


def test_groups_have_separate_rates_and_decays():
    config = pretraining_config().optimizer
    config.groups = param_groups(
        still=param_group("^word/", learning_rate_factor=0.0),
        norms=param_group("norm/scale|bias", weight_decay=0.5),
        slow=param_group("kernel", learning_rate_factor=0.1),
    )
    for name, options in (("adam", ""), ("lion", "b1=0.5")):  # without a gradient, only decay is left
        config.update(name=name, options=options)
        optimizer = make_optimizer(config, unnamed(PARAMS))
        updates = updates_of(optimizer, PARAMS, jax.tree.map(np.zeros_like, PARAMS), 0.2)
        expected = jax.tree.map(lambda x: -0.2 * 0.5 * x, PARAMS)
        expected["dense"]["kernel"] = -0.2 * 0.1 * 0.01 * PARAMS["dense"]["kernel"]
        expected["word"]["embedding"] = np.zeros((1, 2))
        jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-6), updates, expected)


@pytest.mark.parametrize("name, options, made", [
    ("adamw", "b1=0.8", lambda rate: optax.adamw(rate, b1=0.8, weight_decay=0.0)),
    ("lion", "", lambda rate: optax.lion(rate, weight_decay=0.0)),
    ("sm3", "momentum=0.5", lambda rate: optax.chain(optax.scale_by_sm3(0.5), optax.scale_by_learning_rate(rate))),
    ("adafactor", "min_dim_size_to_factor=2 momentum=0.9", lambda rate: optax.adafactor(
        rate, min_dim_size_to_factor=2, momentum=0.9)),
])  # fmt: skip
def test_optax_optimizers_equal_optax(name, options, made):
    """With the bertjax schedule, decay and clipping; the rate of each step also affects the momentum."""
    config = pretraining_config().optimizer
    config.update(name=name, options=options, warmup_steps=2)
    optimizers.validate(config)
    optimizer, rate = make_optimizer(config, unnamed(PARAMS)), make_schedule(config, 10)
    optax_optimizer = made(rate)
    params = expected = jax.tree.map(jnp.float32, PARAMS)
    state, their_state, rng = optimizer.init(params), optax_optimizer.init(params), np.random.default_rng(0)
    our_step, their_step = jax.jit(optimizer.update), jax.jit(optax_optimizer.update)
    for step in range(4):
        gradient = jax.tree.map(lambda x: jnp.float32(0.1 * rng.normal(size=x.shape)), params)
        update, state = our_step(gradient, state, params, learning_rate=rate(step))
        theirs_update, their_state = their_step(gradient, their_state, expected)
        params = optax.apply_updates(params, update)
        for part, name in (("dense", "kernel"), ("word", "embedding")):
            theirs_update[part][name] -= rate(step) * 0.01 * expected[part][name]
        expected = optax.apply_updates(expected, theirs_update)
        jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-7), params, expected)


def matrices_of_bert(tree):
    """Yields the matrices of two stacked layers."""
    layers = tree["bert"]["encoder"]["layers"]
    for layer in range(2):
        for projection in range(3):
            yield layers["attention"]["query_key_value"]["kernel"][layer, :, projection].reshape(16, 16)
        yield layers["attention"]["output"]["kernel"][layer].reshape(16, 16)
        yield layers["intermediate"]["kernel"][layer]
        yield layers["output"]["kernel"][layer]


def matrices_of_modernbert(tree):
    """Yields the matrices of layers in groups; a gated product has two matrices."""
    encoder = tree["bert"]["encoder"]
    layers = [encoder["first"], encoder["rest"]["layer_0"]]
    layers += [jax.tree.map(lambda x: x[1], encoder["groups"]["layer_2"])]
    for layer in layers:
        yield from (layer["input"]["kernel"][:, half] for half in range(2))
        yield from (layer["attention"]["query_key_value"]["kernel"][:, part].reshape(16, 16) for part in range(3))
        yield layer["output"]["kernel"]


@pytest.mark.parametrize("family, layers, matrices", [
    slow_case("bert", 2, matrices_of_bert), slow_case("modernbert", 8, matrices_of_modernbert),
])  # fmt: skip
def test_muon_orthogonalizes_the_matrices_of_a_stack_separately(family, layers, matrices):
    """Each matrix has the update of optax; Adam updates embeddings and heads."""
    sizes = dict(vocab_size=64, hidden_size=16, num_attention_heads=2, intermediate_size=24)
    boxed = abstract_params(
        BertForMaskedLM(families.FAMILIES.get(family).config_class(**sizes, num_hidden_layers=layers))
    )
    params = jax.tree.map(lambda x: np.zeros(x.shape), nn.meta.unbox(boxed))
    rng = np.random.default_rng(0)
    gradient = jax.tree.map(lambda x: np.float32(1e-3 * rng.normal(size=x.shape)), params)
    assert optax.global_norm(gradient) < 1  # otherwise it would be clipped
    config = tiny_config().optimizer
    config.update(name="muon", weight_decay=0.0)
    optimizers.validate(config)
    updates = updates_of(make_optimizer(config, nn.get_partition_spec(boxed)), params, gradient, 1.0)
    muon = optax.contrib.muon(1.0)
    single = jax.jit(lambda x: muon.update(x, muon.init(x), jnp.zeros_like(x))[0])
    for our_update, one in zip(matrices(updates), matrices(gradient), strict=True):
        np.testing.assert_allclose(our_update, single(one), atol=1e-4)
    for path in (("bert", "embeddings", "word", "embedding"), ("masked_lm", "dense", "kernel")):
        update = functools.reduce(lambda tree, name: tree[name], path, updates)
        assert np.std(np.abs(update)) < 0.01  # the first step of Adam has a constant size


def abstract_params(model, inputs=4):
    ids = jnp.zeros((1, 8), jnp.int32)
    return jax.eval_shape(model.init, jax.random.key(0), *[ids] * inputs)["params"]


@pytest.mark.parametrize("name, options, count", [
    ("adam", "", 2), ("muon", "", 1), slow_case("adafactor", "min_dim_size_to_factor=8", 0),
    slow_case("stable_adamw", "", 2), slow_case("lion", "", 1), slow_case("sm3", "", 1), slow_case("prodigy", "", 4),
])  # fmt: skip
def test_moments_are_sharded_by_shape(name, options, count):
    """Arrays of the optimizer state have the sharding of the param on a mesh of eight, if they have its shape."""
    config, model = tiny_config(), BertForMaskedLM(dataclasses.replace(TINY, num_hidden_layers=2))
    config.mesh.update(data=2, fsdp=2, tensor=2)
    config.optimizer.update(name=name, options=options)

    def init_params(key):
        return model.init(key, *[jnp.zeros((1, 8), jnp.int32)] * 4)["params"]

    optimizer = make_optimizer(config.optimizer, abstract_axes(init_params))
    layout = make_layout(init_params, optimizer, make_mesh(config))
    init = make_init(init_params, optimizer, layout)
    state = init(jax.random.key(0)) if name == "adam" else abstract_state(init, layout)
    kernel = state.params["bert"]["encoder"]["layers"]["intermediate"]["kernel"]
    assert math.prod(kernel.sharding.shard_shape(kernel.shape)) == kernel.size / 8
    moments = [x for x in jax.tree.leaves(state.opt_state) if x.shape == kernel.shape]
    assert all(x.sharding == kernel.sharding for x in moments) and len(moments) == count


@pytest.mark.parametrize("fields, message", [
    (dict(name="adm"), r"config.optimizer.name = 'adm': choose one of adam, lamb, stable_adamw, muon"),
    (dict(name="lbfgs"), r"config.optimizer.name = 'lbfgs': an update with options '', a gradient and"),
    (dict(name="lion", options="b3=1"), r"config.optimizer.options = 'b3=1': 'b3=1' is not understood; write NAME=VALUE"
                                        r", where NAME is an argument of lion: b1, b2, mu_dtype"),
    (dict(options="b1=0.5"), r"config.optimizer.options = 'b1=0.5': adam has no options; set the fields of"),
    (dict(schedule="wave"), r"config.optimizer.schedule = 'wave': choose one of linear, constant, cosine, trapezoid"),
    (dict(decay_proportion=0.0), r"config.optimizer.decay_proportion = 0.0: must be above 0 and at most 1"),
    (dict(groups=param_groups(a=param_group("("))), r"optimizer.groups.a.params = '\(': must be a regular expression"),
    (dict(groups=param_groups(a="b")), r"optimizer.groups.a = 'b': write param_groups\(a=param_group\(PATTERN"),
    (dict(groups=param_groups(a=param_group(5))), r"optimizer.groups.a = .*: write param_groups\(a=param_group\("),
    (dict(name="muon", options="ns_coeffs=3"), r"optimizer.name = 'muon': an update with options 'ns_coeffs=3'"),
    (dict(name="noisy_sgd"), r"config.optimizer.name = 'noisy_sgd': the state has a random key, which checkpoints"),
    (dict(name="sgd", options="momentum=x"), r"optimizer.name = 'sgd': an update with options 'momentum=x', a"),
    (dict(groups=param_groups(a=param_group("b", -1.0))), r"groups.a.learning_rate_factor = -1.0: must be at least 0"),
    (dict(groups=param_groups(a=param_group("b", weight_decay=2.0))), r"groups.a.weight_decay = 2.0: must be at least"),
])  # fmt: skip
def test_invalid_optimizers_are_refused(fields, message):
    config = tiny_config("text.txt")
    for field, value in fields.items():
        config.optimizer[field] = value
    with pytest.raises(UserError, match=message):
        validate(config)
