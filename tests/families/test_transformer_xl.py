"""Transformer-XL's published sizes, and their FLOPs with a memory."""

import math

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from bertjax.families import transformer_xl
from bertjax.families.transformer_xl import TransformerXLConfig
from bertjax.families.transformer_xl.model import TransformerXLModel
from bertjax.families.with_heads import BertForMaskedLM, count_parameters
from bertjax.tasks.exported.straight import straight

ENWIK8 = dict(
    vocab_size=204, hidden_size=512, num_hidden_layers=12, num_attention_heads=8, intermediate_size=2048,
    memory_length=512,
)  # fmt: skip


def params_of(config):
    ids = jnp.zeros((1, 8), jnp.int32)
    shapes = jax.eval_shape(BertForMaskedLM(config).init, jax.random.key(0), *[ids] * 4)
    return nn.meta.unbox(shapes["params"])


def products(config, rows, length, has_memory) -> int:
    """The FLOPs of all matrix products of the layers, by what they are traced to."""
    model = TransformerXLModel(config)
    ids = jax.ShapeDtypeStruct((rows, length), jnp.int32)
    params = jax.eval_shape(model.init, jax.random.key(0), ids, ids, ids)
    memory = jax.eval_shape(lambda: transformer_xl.FAMILY.new_memory(config, rows, jnp.float32))
    leaves, tree = jax.tree.flatten((params, ids, memory if has_memory else None))

    def encode(*leaves):
        params, ids, memory = jax.tree.unflatten(tree, leaves)
        found = model.apply(params, ids, jnp.ones_like(ids), ids, memory=memory, method="encode")
        return jax.tree.leaves(found)

    found = 0
    for equation in straight(encode, *leaves).jaxpr.eqns:
        if equation.primitive.name == "dot_general":
            (contracted, _), _ = equation.params["dimension_numbers"]
            sizes = [equation.invars[0].aval.shape[axis] for axis in contracted]
            found += 2 * math.prod((*equation.outvars[0].aval.shape, *sizes))
    return found


@pytest.mark.slow
@pytest.mark.parametrize("sizes, length, millions", [(dict(), 150, 151), (ENWIK8, 512, 41)])
def test_published_sizes_and_their_flops(sizes, length, millions):
    """Those of tables 1 and 2. FLOPs are those of a row more, since all rows share what distances are projected to."""
    config, family = TransformerXLConfig(**sizes), transformer_xl.FAMILY
    params = params_of(config)
    assert round(count_parameters(params, config) / 1e6) == millions
    alone, together = (
        products(config, 2, length, has_memory) - products(config, 1, length, has_memory)
        for has_memory in (False, True)
    )
    assert family.layer_flops(config, length) == alone
    assert family.layer_flops(config, length) + family.memory_flops(config, length) == together


def test_params_show_the_config_and_their_layers():
    for untie_biases in (False, True):
        config = TransformerXLConfig(**ENWIK8 | dict(untie_biases=untie_biases))
        params = params_of(config)
        shown = transformer_xl.FAMILY.shown(params)
        assert all(getattr(config, name) in values for name, values in shown.items()) and len(shown) == 7
        encoder = params["bert"]["encoder"]
        path = ("encoder", "layers", "biases", "content") if untie_biases else ("encoder", "biases", "content")
        assert ("biases" in encoder["layers"]) == untie_biases
        numbers = transformer_xl.FAMILY.layer_numbers(config, path)
        np.testing.assert_array_equal(numbers, 1 + np.arange(12) if untie_biases else 0)
