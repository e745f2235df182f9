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
TINY = BertConfig(
    vocab_size=65, hidden_size=32, num_hidden_layers=2, num_attention_heads=2, intermediate_size=64,
    max_position_embeddings=40, initializer_range=0.4, causal=True,
)  # fmt: skip


def made(config):
    model, ids = BertForMaskedLM(config), jnp.zeros((1, 8), jnp.int32)
    return model, nn.meta.unbox(jax.jit(model.init)(jax.random.key(3), ids, ids, ids, ids)["params"])


def seeing_back(model, params, row, memory):
    """The logits of a Transformer-XL whose tokens see no farther than its memory reaches, read token by token."""
    config, rows = model.config, []
    kept = families.of(config).new_memory(config, 1, jnp.float32)

    @jax.jit
    def read(token, kept):
        ones = jnp.ones((1, 1), jnp.int32)
        given = dict(masked_positions=0 * ones, memory=kept, method="remember")
        return model.apply({"params": params}, token, ones, 0 * ones, **given)

    for place in range(row.shape[1]):
        logits, kept = read(row[:, place : place + 1], kept)
        rows.append(logits[:, 0])
    assert kept.states.shape[2] == memory
    return np.stack(rows, axis=1)


def without_cache(model, params, text, tokens):
    """The most likely piece after the whole text, again and again."""
    ids = [PIECES.cls_id, *PIECES.encode(text).ids]
    run = jax.jit(model.apply)
    for _ in range(min(tokens, model.config.max_position_embeddings - len(ids))):
        row = np.pad(ids, (0, model.config.max_position_embeddings - len(ids)))[None]
        if memory := getattr(model.config, "memory_length", 0):
            logits = seeing_back(model, params, row, memory)[0, len(ids) - 1]
        else:
            segments = (np.arange(row.shape[1]) < len(ids))[None].astype(int)
            logits = run({"params": params}, row, segments, row * 0, np.array([[len(ids) - 1]]))[0, 0]
        banned = [PIECES.pad_id, PIECES.unk_id, PIECES.cls_id, PIECES.mask_id]
        logits = np.array(logits)
        logits[banned] = -1e9
        piece = int(logits.argmax())
        if piece == PIECES.sep_id:
            break
        ids.append(piece)
    return PIECES.decode(ids[1:])


RELATIVE = TransformerXLConfig(
    vocab_size=65, hidden_size=32, num_hidden_layers=2, num_attention_heads=2, intermediate_size=64,
    max_position_embeddings=40, memory_length=7, initializer_range=0.4,
)  # fmt: skip
CAUSAL = [TINY, dataclasses.replace(TINY, norm="pre", positions="each_layer"),
          dataclasses.replace(TINY, positions="sinusoidal"), RELATIVE]  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize("config", CAUSAL, ids=["post", "pre", "sinusoidal", "relative"])
@pytest.mark.parametrize("text, tokens", [("w1", 8), ("w5 w7 w9 w2 w3", 30), ("w4 " * 38, 9)])
def test_a_cache_changes_nothing(config, text, tokens):
    model, params = made(config)
    found = generate(model, params, PIECES, text, tokens, Sampling(temperature=0.0))
    assert found == without_cache(model, params, text, tokens)
    assert found.startswith(text.strip())


@pytest.mark.slow
def test_the_most_likely_piece_is_chosen_where_no_other_may_be():
    model, params = made(TINY)
    most_likely = generate(model, params, PIECES, "w1 w2", 12, Sampling(temperature=0.0))
    for sampling in (Sampling(top_k=1), Sampling(top_p=1e-6), Sampling(temperature=1e-6)):
        assert generate(model, params, PIECES, "w1 w2", 12, sampling) == most_likely
    others = {generate(model, params, PIECES, "w1 w2", 12, Sampling(), seed) for seed in range(4)}
    assert len(others) == 4 and others == {
        generate(model, params, PIECES, "w1 w2", 12, Sampling(), seed) for seed in range(4)
    }


@pytest.mark.parametrize(
    "sampling, allowed",
    [
        (Sampling(), [0.4, 0.3, 0.2, 0.1]),
        (Sampling(top_k=2), [0.4 / 0.7, 0.3 / 0.7, 0, 0]),
        (Sampling(top_p=0.65), [0.4 / 0.7, 0.3 / 0.7, 0, 0]),  # the fewest that have 65 % or more
        (Sampling(top_p=0.75), [0.4 / 0.9, 0.3 / 0.9, 0.2 / 0.9, 0]),
        (Sampling(temperature=0.5), np.array([16, 9, 4, 1]) / 30),
        (Sampling(top_k=3, top_p=0.75), [0.4 / 0.7, 0.3 / 0.7, 0, 0]),  # of the three, which have 90 %
    ],
)
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
