"""EuroBERT: stacked matrices and tied embeddings. `test_families.py` compares its kernels."""

import dataclasses

import flax.linen as nn

from bertjax.distributed.rules import stacked_axes
from bertjax.interop import conversion, huggingface, pretrained
from bertjax.models.eurobert.config import EuroBertConfig
from bertjax.models.heads import BertForMaskedLM
from tests.models.test_families import abstract_params
from tests.models.test_modernbert import random_params

TINY = EuroBertConfig(
    vocab_size=300, hidden_size=32, num_hidden_layers=1, num_attention_heads=4, num_key_value_heads=2, head_dim=8,
    intermediate_size=48, max_position_embeddings=64,
)  # fmt: skip


def test_optimizers_split_stacked_matrices():
    """Keys and values of all layers, and both halves of a gate, are separate matrices; embedding tables are not
    kernels.
    """
    axes = nn.get_partition_spec({"params": abstract_params(TINY)})["params"]
    layers = axes["bert"]["encoder"]["layers"]
    axes_of_kernels = {
        name: stacked_axes(layers["attention"][name]["kernel"]) for name in ("query", "key_value", "output")
    }
    assert axes_of_kernels == {"query": [0], "key_value": [0, 2], "output": [0]}
    assert stacked_axes(layers["input"]["kernel"]) == [0, 2] and stacked_axes(layers["output"]["kernel"]) == [0]
    assert axes["masked_lm"]["decoder"]["embedding"] == axes["bert"]["embeddings"]["word"]["embedding"]


def test_a_model_with_tied_embeddings_predicts_tokens(tmp_path):
    config = dataclasses.replace(TINY, tie_word_embeddings=True)
    params = random_params(BertForMaskedLM(config), config)
    assert {*params} == {"bert"}
    huggingface.write(tmp_path / "there", config, params, None)
    source = pretrained.read_pretrained(tmp_path / "there")
    assert source.predicts_words and source.architecture == "BertForMaskedLM" and source.config == config
    conversion.convert(tmp_path / "there", tmp_path / "encoder", "huggingface", "EuroBertModel")
    assert not pretrained.read_pretrained(tmp_path / "encoder").predicts_words
