"""A checkpoint to fine-tune: tiny, random, with a vocabulary of the words in the topics of tests/conftest.py."""

import jax
import jax.numpy as jnp
import pytest

from bertjax.config.model_config import BertConfig
from bertjax.finetuning import run as finetuning_run
from bertjax.interop import huggingface
from bertjax.models.heads import BertForPreTraining
from bertjax.pretraining import run as pretraining_run
from bertjax.text.tokenizer import SPECIAL_TOKENS, WordPiece
from tests.conftest import TOPICS, one_device_mesh

WORDS = [word for words in TOPICS.values() for word in words]


@pytest.fixture(scope="module")
def on_one_device():
    """Runs use one of the eight devices: faster for tests that are not about devices."""
    with pytest.MonkeyPatch.context() as patch:
        for module in (finetuning_run, pretraining_run):
            patch.setattr(module, "make_mesh", one_device_mesh)
        yield


@pytest.fixture(scope="module", autouse=True)
def runs_on_one_device(on_one_device):
    """Makes all tests of a folder use one device, if the conftest of the folder imports this fixture."""


@pytest.fixture(scope="session")
def checkpoint(built_once):
    import flax.linen as nn

    def build(folder):
        letters = "abcdefghijklmnopqrstuvwxyz"
        pieces = [*SPECIAL_TOKENS, *WORDS, *letters, *("##" + x for x in letters), *".,:?!"]
        config = BertConfig(
            vocab_size=len(pieces), hidden_size=32, num_hidden_layers=1, num_attention_heads=2, intermediate_size=64,
            max_position_embeddings=64, initializer_range=0.1,
        )  # fmt: skip
        ids = jnp.zeros((1, 8), jnp.int32)
        init = jax.jit(BertForPreTraining(config).init)
        params = nn.meta.unbox(init(jax.random.key(0), ids, ids, ids, ids)["params"])
        huggingface.write(folder, config, jax.device_get(params), WordPiece(pieces, lowercase=True))

    return built_once("checkpoint", build)
