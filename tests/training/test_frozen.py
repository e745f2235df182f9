"""Frozen params and layer-wise rates, compared with optax's AdamW, and with the layers that a param changes."""

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax.traverse_util import flatten_dict, unflatten_dict
from ml_collections import ConfigDict

from bertjax.common.errors import UserError
from bertjax.config.defaults import param_group, param_groups
from bertjax.config.model_config import BertConfig, Compute
from bertjax.distributed.mesh import make_mesh, put_batch
from bertjax.models import families
from bertjax.training.optim.schedules import schedule_of
from bertjax.training.step import Program, put_hyperparameters
from tests.markers import slow_case
from tests.models import own_family
from tests.training.toy import Toy, toy_config

TINY = dict(vocab_size=20, hidden_size=8, num_attention_heads=2, intermediate_size=16, max_position_embeddings=16)


@pytest.mark.parametrize("family, layers", [
    ("bert", 2), ("mixer", 2), *map(slow_case, ("electra", "lstms", "modernbert", "eurobert", "gte"), (1, 3, 7, 2, 2)),
])  # fmt: skip
def test_layer_ids_are_the_first_layer_that_the_params_change(family, layers):
    """States are the embeddings and the outputs of all layers. States from a layer's index on depend on its params."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(families.FAMILIES.registered, "mixer", own_family.FAMILY)
        family_fields = dict(num_key_value_heads=1, head_dim=4) if family == "eurobert" else {}
        config = ConfigDict({"model": families.model_fields(family, **TINY, **family_fields, num_hidden_layers=layers)})
        config = families.config_of(config)
        model = families.family_of(config).build(config, Compute())
        ids = jnp.arange(1, 7)[None]
        inputs, rng = (ids, jnp.ones_like(ids), jnp.zeros_like(ids)), np.random.default_rng(0)
        shapes = flatten_dict(nn.meta.unbox(jax.eval_shape(model.init, jax.random.key(0), *inputs)["params"]))
        params = {path: np.float32(rng.normal(size=x.shape)) for path, x in shapes.items()}

        @jax.jit
        def states(params):
            return model.apply({"params": unflatten_dict(params)}, *inputs, every_layer=True, method="encode")

        def first_change(path, row):
            """Returns the first state that changes with a param, or with one of its layers; None without a change."""
            other = params[path].copy()
            other[row] *= 0.5
            changed = np.abs(states(params | {path: other}) - before).max((1, 2, 3)) > 1e-5
            return changed.argmax() if changed.any() else None

        before, seen = states(params), set()
        for path in params:
            numbers = families.layer_ids(config, ("bert", *path))
            if numbers is None:
                assert path[0] == "pooler" or path == ("encoder", "norm", "scale")
                continue
            for row in np.ndindex(numbers.shape):
                first = first_change(path, row or ...)
                assert first in (None, numbers[row]), (path, row)
                seen.add(first)
    assert seen - {None} == {*range(layers + 1)}


class Layered(Toy):
    """Three stacked layers of x + tanh(x W + b), after a product with an embedding; and a head."""

    layers, hidden = 3, 4

    def init_params(self, key):
        keys = iter(jax.random.split(key, 5))

        def normal(*shape):
            return 0.5 * jax.random.normal(next(keys), shape)

        def named(x, *axes):
            return nn.LogicallyPartitioned(x, axes)

        kernel, bias = normal(self.layers, self.hidden, self.hidden), normal(self.layers, self.hidden)
        dense = {"kernel": named(kernel, "layers", "embed", "mlp"), "bias": named(bias, "layers", "mlp")}
        return {
            "bert": {
                "embeddings": {"word": {"embedding": named(normal(3, self.hidden), "vocab", "embed")}},
                "encoder": {"layers": {"dense": dense}},
            },
            "classifier": {"kernel": named(normal(self.hidden, 1), "embed", None), "bias": jnp.zeros(1)},
        }

    def layer_ids(self, path):
        return families.layer_ids(BertConfig(num_hidden_layers=self.layers), path)

    def __call__(self, params, batch, dropout_keys=None):
        x, dense = batch["x"] @ params["bert"]["embeddings"]["word"]["embedding"], params["bert"]["encoder"]["layers"]
        for layer in range(self.layers):
            x = x + jnp.tanh(x @ dense["dense"]["kernel"][layer] + dense["dense"]["bias"][layer])
        guess = (x @ params["classifier"]["kernel"])[:, 0] + params["classifier"]["bias"]
        loss = (batch["weights"] * jnp.square(guess - batch["y"])).sum()
        return loss, {"tokens": jnp.float32(1), "padding": jnp.float32(0)}


def config_for(**optimizer):
    config = toy_config()
    config.optimizer.update(dict(learning_rate=0.02, schedule="constant", warmup_steps=0, weight_decay=0.05))
    config.optimizer.update(dict(bias_correction=True, epsilon=1e-8), **optimizer)
    return config


def train(task, steps, program=None):
    """Returns the program, and the params at the start and after each step."""
    program = program or Program(task, task.config, task.mesh)
    hyperparameters = put_hyperparameters(0, schedule_of(task.config, task.total_steps), task.mesh)
    state = program.init(jax.random.key(1))
    history = [jax.device_get(state.params)]
    for batch in [batch for batch, _ in zip(task.batches(0), range(steps))]:
        state, _ = program.train_step(state, put_batch(batch, task.mesh), hyperparameters)
        history.append(jax.device_get(state.params))
    return program, state, history


def split(params) -> dict[tuple[str, int], np.ndarray]:
    """Returns the arrays of a tree by name and layer; the layer of the head is 4."""
    dense = params["bert"]["encoder"]["layers"]["dense"]
    arrays = {("embedding", 0): params["bert"]["embeddings"]["word"]["embedding"]}
    arrays |= {(name, 1 + layer): dense[name][layer] for name in dense for layer in range(3)}
    return arrays | {(f"classifier {name}", 4): x for name, x in params["classifier"].items()}


def loss_of(arrays, batch):
    """Computes the loss of `Layered` from arrays by layer."""
    x = batch["x"] @ arrays["embedding", 0]
    for layer in (1, 2, 3):
        x = x + jnp.tanh(x @ arrays["kernel", layer] + arrays["bias", layer])
    guess = (x @ arrays["classifier kernel", 4])[:, 0] + arrays["classifier bias", 4]
    return ((guess - batch["y"]) ** 2).mean()


# Gradients are clipped to the norm of 0.5, and not to 1e9.
@pytest.mark.parametrize(
    "decay, freeze, still, norm", [(0.7, 2, "", 0.5), (1.0, 1, "kernel", 0.5), slow_case(0.7, 0, "", 1e9)]
)
def test_three_steps_equal_optax_adamw_with_one_optimizer_per_layer(decay, freeze, still, norm):
    config = config_for(layer_decay=decay, max_grad_norm=norm)
    config.freeze_layers = freeze
    config.optimizer.groups = param_groups(slow=param_group("classifier/bias", 0.5, weight_decay=0.2))
    if still:
        config.optimizer.groups = param_groups(**config.optimizer.groups, still=param_group(f"layers.*{still}", 0.0))
    task = Layered(config)
    _, state, (params, *history) = train(task, 3)

    def optimizer_of(name, layer):
        if (freeze and layer <= freeze) or name == still:
            return None
        rate = 0.02 * (0.5 if name == "classifier bias" else decay ** max(0, 3 - layer))
        return optax.adamw(rate, weight_decay={"classifier bias": 0.2, "bias": 0.0}.get(name, 0.05))

    expected = split(params)
    trained = {key: optimizer for key in expected if (optimizer := optimizer_of(*key))}
    states = {key: optimizer.init(expected[key]) for key, optimizer in trained.items()}

    @jax.jit
    def step(arrays, states, batch):
        gradient = jax.grad(loss_of)(arrays, batch)
        size = jnp.maximum(1, optax.global_norm([gradient[key] for key in trained]) / norm)
        for key, optimizer in trained.items():
            update, states[key] = optimizer.update(gradient[key] / size, states[key], arrays[key])
            arrays[key] = arrays[key] + update
        return arrays, states

    for batch, actual in zip(task.batches(0), history):
        expected, states = step(expected, states, batch)
        for key, x in split(actual).items():
            np.testing.assert_allclose(x, expected[key], atol=1e-6 if key in trained else 0, err_msg=str(key))
    moments = {x.shape for x in jax.tree.leaves(state.opt_state) if x.ndim}
    assert ((3, 4, 4) in moments) == (not freeze and not still) and ((1, 4, 4) in moments) == (freeze == 2)
    assert ((3, 4) in moments) == (not freeze) and ((2, 4) in moments) == (freeze == 1)


@pytest.mark.slow
def test_frozen_layers_are_equal_on_several_devices():
    """Devices may split an array along its layers, some of which are frozen."""
    config = config_for(layer_decay=0.7)
    config.freeze_layers, config.mesh.data = 1, 3
    config.batch_size = 12
    task = Layered(config, make_mesh(config, jax.devices()[:3]))
    config = config.copy_and_resolve_references()
    config.mesh.data = 1
    one = Layered(config)
    one.hidden = task.hidden = 5  # 3 layers of 5 x 5: three devices can split only the layers
    (program, _, (*_, several)), (_, _, (*_, alone)) = train(task, 3), train(one, 3)
    kernel = program.layout.state.params["bert"]["encoder"]["layers"]["dense"]["kernel"]
    assert kernel.spec[0] == "data"
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, atol=1e-6), several, alone)


@pytest.mark.parametrize("changes, message", [
    (dict(freeze_layers=4), "config.freeze_layers = 4: must be at most 3, the number of layers"),
    (dict(still="."), "config.optimizer.groups: all params are frozen; set a learning_rate_factor above 0"),
    (dict(still="gamma"), "config.optimizer.groups.still.params = 'gamma': matches no param"),
])  # fmt: skip
def test_unsupported_freezing_is_refused(changes, message):
    config = config_for()
    config.freeze_layers = changes.get("freeze_layers", 0)
    if "still" in changes:
        config.optimizer.groups = param_groups(still=param_group(changes["still"], 0.0))
    with pytest.raises(UserError, match=message):
        Program(Layered(config), config, Layered(config).mesh)
    config = config_for(layer_decay=0.9)
    with pytest.raises(UserError, match=r"layer_decay = 0\.9: the model family does not number layers"):
        Program(Toy(config), config, Toy(config).mesh)
