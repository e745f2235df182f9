"""Transformer-XL's published sizes, and the layers of its params. `test_families.py` compares its FLOPs."""

import flax.linen as nn
import numpy as np
import pytest

from bertjax.families import transformer_xl
from bertjax.families.transformer_xl import TransformerXLConfig
from bertjax.families.with_heads import count_parameters
from tests.families.test_families import abstract_params

ENWIK8 = dict(
    vocab_size=204, hidden_size=512, num_hidden_layers=12, num_attention_heads=8, intermediate_size=2048,
    memory_length=512,
)  # fmt: skip


@pytest.mark.parametrize("sizes, millions", [(dict(), 151), (ENWIK8, 41)])
def test_published_sizes(sizes, millions):
    """The sizes are in tables 1 and 2 of the paper."""
    config = TransformerXLConfig(**sizes)
    assert round(count_parameters(nn.meta.unbox(abstract_params(config)), config) / 1e6) == millions


@pytest.mark.parametrize("untie_biases", [False, True])
def test_params_show_the_config_and_their_layers(untie_biases):
    config = TransformerXLConfig(**ENWIK8 | dict(untie_biases=untie_biases))
    params = nn.meta.unbox(abstract_params(config))
    shown = transformer_xl.FAMILY.shown(params)
    assert all(getattr(config, name) in values for name, values in shown.items()) and len(shown) == 7
    path = ("encoder", "layers", "biases", "content") if untie_biases else ("encoder", "biases", "content")
    assert ("biases" in params["bert"]["encoder"]["layers"]) == untie_biases
    numbers = transformer_xl.FAMILY.layer_numbers(config, path)
    np.testing.assert_array_equal(numbers, 1 + np.arange(12) if untie_biases else 0)
