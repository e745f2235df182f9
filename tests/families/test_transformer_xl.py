"""Transformer-XL's published sizes, and their FLOPs with a memory."""

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from bertjax.families import transformer_xl
from bertjax.families.transformer_xl import TransformerXLConfig
from bertjax.families.with_heads import BertForMaskedLM, count_parameters

ENWIK8 = dict(
    vocab_size=204, hidden_size=512, num_hidden_layers=12, num_attention_heads=8, intermediate_size=2048,
    memory_length=512,
)  # fmt: skip


def params_of(config):
    ids = jnp.zeros((1, 8), jnp.int32)
    shapes = jax.eval_shape(BertForMaskedLM(config).init, jax.random.key(0), *[ids] * 4)
    return nn.meta.unbox(shapes["params"])


@pytest.mark.parametrize("sizes, length, millions", [(dict(), 150, 151), (ENWIK8, 512, 41)])
def test_published_sizes_and_their_flops(sizes, length, millions):
    """Those of tables 1 and 2. A memory adds keys, values and distances for its tokens, and scores for its pairs."""
    config = TransformerXLConfig(**sizes)
    params = params_of(config)
    assert round(count_parameters(params, config) / 1e6) == millions
    family, hidden, layers = transformer_xl.FAMILY, config.hidden_size, config.num_hidden_layers
    matrices = sum(x.size for path, x in jax.tree_util.tree_leaves_with_path(params["bert"]["encoder"])
                   if path[-1].key == "kernel")  # fmt: skip
    scores = 3 * layers * length * hidden
    assert family.layer_flops(config, length) == 2 * length * (matrices + scores)
    of_keys = 3 * layers * hidden**2 * config.memory_length
    assert family.memory_flops(config, length) == 2 * (of_keys + scores * config.memory_length)


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
