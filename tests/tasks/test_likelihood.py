"""Likelihoods of texts against a loop over their tokens, and minimal pairs."""

import dataclasses
import json
import lzma

import jax
import numpy as np
import pytest

from bertjax import families
from bertjax.config import BertConfig, UserError
from bertjax.families.transformer_xl import TransformerXLConfig
from bertjax.families.with_heads import BertForMaskedLM
from bertjax.tasks import bits, likelihood
from bertjax.text.tokenizer import SPECIAL_PIECES, WordPiece

WORDS = [*"abcdefghij", "ship", "sail", "the", "."]
PIECES = WordPiece([*SPECIAL_PIECES, *WORDS], lowercase=True)
SIZES = dict(
    vocab_size=PIECES.vocab_size, hidden_size=16, num_hidden_layers=1, num_attention_heads=2, intermediate_size=16
)
CONFIG = BertConfig(**SIZES, max_position_embeddings=40)


def model_of(config):
    model, ids = BertForMaskedLM(config), np.zeros((1, 8), np.int32)
    params = jax.jit(model.init)(jax.random.key(0), ids, ids, ids, ids[:, :1])["params"]
    params = jax.tree.map(lambda x: x + np.float32(0.3 * np.random.default_rng(x.size).normal(size=x.shape)), params)
    return model, params


@pytest.fixture(scope="module")
def texts():
    """Of three lengths only, since each is compiled for."""
    rng = np.random.default_rng(0)
    return ["", "the", *(" ".join(rng.choice(WORDS, rng.choice([2, 6, 20]))) for _ in range(16))]


@pytest.mark.slow
def test_a_model_with_a_memory_reads_long_texts_in_parts(texts):
    """Two parts of 16 tokens, of which the second remembers all of the first, are one of 32; longer texts are read."""
    whole = TransformerXLConfig(**SIZES, memory_length=32)
    model, params = model_of(whole)
    parts = BertForMaskedLM(dataclasses.replace(whole, memory_length=16, max_position_embeddings=16))
    found, expected = (list(likelihood.log_likelihoods(each, params, PIECES, texts)) for each in (parts, model))
    np.testing.assert_allclose(found, expected, rtol=1e-4)
    assert sum(len(text.split()) > 16 for text in texts) > 3
    longer = " ".join(texts[2:12])
    hidden = [[False] * len(longer.split(" "))]
    scores = bits.bits_per_byte(parts, params, PIECES, [longer], hidden, 16)
    (total,) = likelihood.log_likelihoods(parts, params, PIECES, [longer])
    assert scores["bytes"] == len(longer) and scores["words"] == len(longer.split(" "))
    assert scores["bits_per_byte"] == pytest.approx(-total / np.log(2) / len(longer))


@pytest.mark.slow
@pytest.mark.parametrize("causal", [False, True])
def test_a_text_has_the_sum_over_its_tokens(texts, causal, monkeypatch):
    """Each computed alone, without padding; in portions and batches that are not full."""
    monkeypatch.setattr(likelihood, "TOGETHER", 7)
    monkeypatch.setattr(likelihood, "MOST_ROWS", 5)
    model, params = model_of(dataclasses.replace(CONFIG, causal=causal))

    @jax.jit
    def log_softmax(ids, places):
        one = jax.numpy.ones_like(ids)
        logits = model.apply({"params": params}, ids, one, one - one, places)[:, 0, : PIECES.vocab_size]
        return jax.nn.log_softmax(logits)

    found = list(likelihood.log_likelihoods(model, params, PIECES, texts))
    assert found[0] == 0 and len(found) == len(texts)
    for text, ours in list(zip(texts, found))[1:12]:
        ids = np.array([PIECES.cls_id, *PIECES.encode(text).ids, PIECES.sep_id], np.int32)
        places, rows = np.arange(1, len(ids) - 1), np.tile(ids, (len(ids) - 2, 1))
        for row, place in zip(rows, places):
            if causal:
                row[place:] = PIECES.pad_id  # nothing after it may matter
            else:
                row[place] = PIECES.mask_id
        expected = np.asarray(log_softmax(rows, places[:, None] - causal))[np.arange(len(places)), ids[places]]
        assert ours == pytest.approx(expected.sum(), rel=1e-4)


def test_pairs_are_compared_and_counted(texts):
    model, params = model_of(CONFIG)
    sums = list(likelihood.log_likelihoods(model, params, PIECES, texts[1:11]))
    pairs = [likelihood.Pair(a, b, "x" if i % 2 else "y", "p") for i, (a, b) in enumerate(zip(texts[1:6], texts[6:11]))]
    pairs.append(likelihood.Pair("the ship", "the ship", "same", "p"))
    *is_right, of_same = likelihood.compare(model, params, PIECES, pairs)
    assert is_right == [a > b for a, b in zip(sums[:5], sums[5:])] and not of_same
    found = likelihood.shares(pairs, [*is_right, of_same], "paradigm")
    assert found == {"y": (np.mean(is_right[::2]), 3), "x": (np.mean(is_right[1::2]), 2), "same": (0, 1)}


def test_pairs_of_both_forms_are_read(tmp_path):
    lines = [{"good": f"a{i}", "bad": "b", "paradigm": "x", "phenomenon": "p"} for i in range(3)]
    lines += [{"sentence_good": "c", "sentence_bad": "d", "UID": "y", "linguistics_term": "q", "pairID": 3}]
    (tmp_path / "pairs.jsonl.xz").write_bytes(lzma.compress("\n\n".join(map(json.dumps, lines)).encode()))
    found = likelihood.read_pairs(str(tmp_path / "pairs.jsonl.xz"), most=2)
    assert found == [("a0", "b", "x", "p"), ("a1", "b", "x", "p"), ("c", "d", "y", "q")]
    assert len(likelihood.read_pairs(str(tmp_path / "pairs.jsonl.xz"))) == 4


@pytest.mark.parametrize("content, message", [
    ("", r"pairs.jsonl: has no pairs"),
    ('{"good": "a"}', r':1: needs "bad" with a sentence; it has good'),
    ('{"good": " ", "bad": "b"}', r':1: needs "good" with a sentence'),
    ('{"good": "a", "bad": "b"}\nthe ship', r":2: not a JSON object: 'the ship'"),
])  # fmt: skip
def test_what_is_no_pair_is_named(content, message, tmp_path):
    (tmp_path / "pairs.jsonl").write_text(content)
    with pytest.raises(UserError, match=message):
        likelihood.read_pairs(str(tmp_path / "pairs.jsonl"))


def test_models_and_texts_without_likelihoods_are_named():
    model, params = model_of(CONFIG)
    with pytest.raises(UserError, match="has 52 tokens, more than the model's 40 positions"):
        list(likelihood.log_likelihoods(model, params, PIECES, ["ship " * 50]))
    neighbours = BertForMaskedLM(families.FAMILIES.get("lstms").config(family="lstms", **SIZES))
    with pytest.raises(UserError, match="this one does neither"):
        list(likelihood.log_likelihoods(neighbours, {}, PIECES, ["ship"]))
