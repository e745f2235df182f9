"""Continuing a text: with a cache as without one, from the pieces that sampling allows."""

import dataclasses

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from bertjax import families
from bertjax.config import BertConfig, UserError
from bertjax.families.transformer_xl import TransformerXLConfig
from bertjax.families.with_heads import BertForMaskedLM
from bertjax.tasks.generation import Sampling, _choose, generate
from bertjax.text.tokenizer import SPECIAL_PIECES, WordPiece

WORDS = [f"w{i}" for i in range(60)]
PIECES = WordPiece([*SPECIAL_PIECES, *WORDS], lowercase=True)
SIZES = dict(
    vocab_size=65, hidden_size=16, num_hidden_layers=1, num_attention_heads=2, intermediate_size=16,
    max_position_embeddings=40, initializer_range=0.6,
)  # fmt: skip
TINY = BertConfig(**SIZES, causal=True)


def made(config):
    model, ids = BertForMaskedLM(config), jnp.zeros((1, 8), jnp.int32)
    return model, nn.meta.unbox(jax.jit(model.init)(jax.random.key(3), ids, ids, ids, ids)["params"])


def next_logits(model, params):
    """Returns (ids) -> the logits of the next piece, without a cache."""
    config, run = model.config, jax.jit(model.apply)

    @jax.jit
    def read(token, kept):
        ones = jnp.ones((1, 1), jnp.int32)
        given = dict(masked_positions=0 * ones, memory=kept, method="remember")
        return model.apply({"params": params}, token, ones, 0 * ones, **given)

    def seeing_back(ids):
        """Of a Transformer-XL whose tokens see no farther than its memory reaches, read token by token."""
        kept = families.of(config).new_memory(config, 1, jnp.float32)
        for token in ids:
            logits, kept = read(np.array([[token]]), kept)
        assert kept.states.shape[2] == config.memory_length
        return logits[0, 0]

    def whole(ids):
        row = np.pad(ids, (0, config.max_position_embeddings - len(ids)))[None]
        segments = (np.arange(row.shape[1]) < len(ids))[None].astype(int)
        return run({"params": params}, row, segments, row * 0, np.array([[len(ids) - 1]]))[0, 0]

    return seeing_back if hasattr(config, "memory_length") else whole


def without_cache(next_logits, text, tokens):
    """The most likely piece after the whole text, again and again."""
    ids = [PIECES.cls_id, *PIECES.encode(text).ids]
    for _ in range(min(tokens, TINY.max_position_embeddings - len(ids))):
        logits = np.array(next_logits(ids))
        logits[[PIECES.pad_id, PIECES.unk_id, PIECES.cls_id, PIECES.mask_id]] = -1e9
        piece = int(logits.argmax())
        if piece == PIECES.sep_id:
            break
        ids.append(piece)
    return PIECES.decode(ids[1:])


CONFIGS = {
    "post": TINY,
    "pre": dataclasses.replace(TINY, norm="pre", positions="each_layer"),
    "sinusoidal": dataclasses.replace(TINY, positions="sinusoidal"),
    "relative": TransformerXLConfig(**SIZES, memory_length=7),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", CONFIGS)
def test_a_cache_changes_nothing(name):
    """For as long as the model has room, after a short prompt or a long one."""
    model, params = made(CONFIGS[name])
    text = " ".join(["w5 w7 w9 w2 w3"] * (7 if name == "pre" else 1))
    found = generate(model, params, PIECES, text, 100, Sampling(temperature=0.0))
    assert found == without_cache(next_logits(model, params), text, 100)
    assert found.startswith(text) and found != text


def test_a_seed_gives_the_same_text_again_and_another_seed_another_text():
    model, params = made(TINY)
    texts = [[generate(model, params, PIECES, "w1 w2", 12, Sampling(), seed) for seed in range(3)] for _ in range(2)]
    assert texts[0] == texts[1] and len(set(texts[0])) == 3


@pytest.mark.parametrize("sampling, allowed", [
    (Sampling(), [0.4, 0.3, 0.2, 0.1]),
    (Sampling(top_k=2), [0.4 / 0.7, 0.3 / 0.7, 0, 0]),
    (Sampling(top_p=0.65), [0.4 / 0.7, 0.3 / 0.7, 0, 0]),  # the fewest that have 65 % or more
    (Sampling(top_p=0.75), [0.4 / 0.9, 0.3 / 0.9, 0.2 / 0.9, 0]),
    (Sampling(temperature=0.5), np.array([16, 9, 4, 1]) / 30),
    *(
        (sampling, [1, 0, 0, 0])
        for sampling in (Sampling(0.0), Sampling(1e-6), Sampling(top_k=1), Sampling(top_p=1e-6))
    ),
    (Sampling(top_k=3, top_p=0.75), [0.4 / 0.7, 0.3 / 0.7, 0, 0]),  # of the three, which have 90 %
])  # fmt: skip
def test_pieces_come_as_often_as_sampling_says(sampling, allowed):
    logits = jnp.log(jnp.array([[0.4, 0.3, 0.2, 0.1]]))
    chosen = jax.vmap(lambda key: _choose(logits, sampling, key)[0])(jax.random.split(jax.random.key(0), 20_000))
    np.testing.assert_allclose(np.bincount(chosen, minlength=4) / 20_000, allowed, atol=0.015)


def test_what_cannot_be_continued_is_refused():
    model, params = made(TINY)
    with pytest.raises(UserError, match=r"has 41 tokens, and the model no room for more than 40"):
        generate(model, params, PIECES, "w4 " * 40, 3, Sampling())
    bert = BertForMaskedLM(dataclasses.replace(TINY, causal=False))
    with pytest.raises(UserError, match=r"only a left-to-right model \(model.causal\) continues a text"):
        generate(bert, params, PIECES, "w4", 3, Sampling())
