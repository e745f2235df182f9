"""Likelihoods of texts compared with a loop over their tokens; minimal pairs; text generation."""

import dataclasses
import json
import lzma

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from bertjax.common.errors import UserError
from bertjax.config.model_config import BertConfig
from bertjax.inference import bits_per_byte, likelihood
from bertjax.inference.generation import Sampling, _choose, generate
from bertjax.models import families
from bertjax.models.heads import BertForMaskedLM
from bertjax.models.transformer_xl.config import TransformerXLConfig
from bertjax.text.tokenizer import SPECIAL_TOKENS, Bytes, WordPiece
from tests.conftest import make_corpus
from tests.text.test_tokenizer import SIZE, learn

WORDS = [*"abcdefghij", "ship", "sail", "the", "straße", "."]
PIECES = WordPiece([*SPECIAL_TOKENS, *WORDS], lowercase=True)
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
    """Texts of only three lengths, because each length is compiled."""
    rng = np.random.default_rng(0)
    return ["", "the", *(" ".join(rng.choice(WORDS, rng.choice([2, 6, 20]))) for _ in range(16))]


@pytest.mark.parametrize("kind", [*SIZE, "bytes"])
def test_whole_words_are_masked_with_the_preceding_space(kind):
    """A space may be a whole token, also before the first word."""
    made = Bytes() if kind == "bytes" else learn(kind, make_corpus(60).split("\n"), SIZE[kind])
    text = "onion the rheco ship o"
    for number, word in enumerate(text.split()):
        ((_, positions, pieces),) = bits_per_byte.masked(text, [number == i for i in range(5)], made)
        assert positions == list(range(positions[0], positions[0] + len(pieces)))
        letters = "".join(made.pieces[i] for i in pieces).replace("#", "").lstrip("\u2581\u0120")
        assert letters == word and (kind == "wordpiece" or made.pieces[pieces[0]][0] in "\u2581\u0120")


@pytest.mark.slow
def test_a_recurrent_model_reads_long_texts_in_segments(texts):
    """Two segments of 16 tokens with a full memory equal one segment of 32 tokens; longer texts are accepted."""
    whole = TransformerXLConfig(**SIZES, memory_length=32)
    model, params = model_of(whole)
    parts = BertForMaskedLM(dataclasses.replace(whole, memory_length=16, max_position_embeddings=16))
    likelihoods, expected = (
        list(likelihood.log_likelihoods(scorer, params, PIECES, texts)) for scorer in (parts, model)
    )
    np.testing.assert_allclose(likelihoods, expected, rtol=1e-4)
    assert sum(len(text.split()) > 16 for text in texts) > 3
    longer = " ".join(texts[2:12])
    hidden = [[False] * len(longer.split(" "))]
    scores = bits_per_byte.bits_per_byte(parts, params, PIECES, [longer], hidden, 16)
    (total,) = likelihood.log_likelihoods(parts, params, PIECES, [longer])
    size = len(longer.encode())
    assert scores["bytes"] == size > len(longer) and scores["words"] == len(longer.split(" "))
    assert scores["bits_per_byte"] == pytest.approx(-total / np.log(2) / size)


@pytest.mark.slow
@pytest.mark.parametrize("causal", [False, True])
def test_the_likelihood_of_a_text_is_the_sum_over_tokens(texts, causal, monkeypatch):
    """Each text is computed alone, without padding, and in chunks and batches that are not full."""
    monkeypatch.setattr(likelihood, "TEXTS_AT_ONCE", 7)
    monkeypatch.setattr(likelihood, "MAX_ROWS", 5)
    model, params = model_of(dataclasses.replace(CONFIG, causal=causal))

    @jax.jit
    def log_softmax(ids, places):
        one = jax.numpy.ones_like(ids)
        logits = model.apply({"params": params}, ids, one, one - one, places)[:, 0, : PIECES.vocab_size]
        return jax.nn.log_softmax(logits)

    likelihoods = list(likelihood.log_likelihoods(model, params, PIECES, texts))
    assert likelihoods[0] == 0 and len(likelihoods) == len(texts)
    for text, likelihood_of_text in list(zip(texts, likelihoods))[1:12]:
        ids = np.array([PIECES.cls_id, *PIECES.encode(text).ids, PIECES.sep_id], np.int32)
        places, rows = np.arange(1, len(ids) - 1), np.tile(ids, (len(ids) - 2, 1))
        for row, place in zip(rows, places):
            if causal:
                row[place:] = PIECES.pad_id  # later tokens must not matter
            else:
                row[place] = PIECES.mask_id
        expected = np.asarray(log_softmax(rows, places[:, None] - causal))[np.arange(len(places)), ids[places]]
        assert likelihood_of_text == pytest.approx(expected.sum(), rel=1e-4)


@pytest.mark.slow
def test_pairs_are_compared_and_counted(texts):
    model, params = model_of(CONFIG)
    sums = list(likelihood.log_likelihoods(model, params, PIECES, texts[1:11]))
    pairs = [likelihood.Pair(a, b, "x" if i % 2 else "y", "p") for i, (a, b) in enumerate(zip(texts[1:6], texts[6:11]))]
    pairs.append(likelihood.Pair("the ship", "the ship", "same", "p"))
    *is_right, of_same = likelihood.compare(model, params, PIECES, pairs)
    assert is_right == [a > b for a, b in zip(sums[:5], sums[5:])] and not of_same
    shares = likelihood.shares(pairs, [*is_right, of_same], "paradigm")
    assert shares == {"y": (np.mean(is_right[::2]), 3), "x": (np.mean(is_right[1::2]), 2), "same": (0, 1)}


def test_pairs_of_both_forms_are_read(tmp_path):
    lines = [{"good": f"a{i}", "bad": "b", "paradigm": "x", "phenomenon": "p"} for i in range(3)]
    lines += [{"sentence_good": "c", "sentence_bad": "d", "UID": "y", "linguistics_term": "q", "pairID": 3}]
    (tmp_path / "pairs.jsonl.xz").write_bytes(lzma.compress("\n\n".join(map(json.dumps, lines)).encode()))
    read = likelihood.read_pairs(str(tmp_path / "pairs.jsonl.xz"), most=2)
    assert read == [("a0", "b", "x", "p"), ("a1", "b", "x", "p"), ("c", "d", "y", "q")]
    assert len(likelihood.read_pairs(str(tmp_path / "pairs.jsonl.xz"))) == 4


@pytest.mark.parametrize("content, message", [
    ("", r"pairs.jsonl: has no pairs"),
    ('{"good": "a"}', r':1: needs "bad" with a sentence; the line has good'),
    ('{"good": " ", "bad": "b"}', r':1: needs "good" with a sentence'),
    ('{"good": "a", "bad": "b"}\nthe ship', r":2: not a JSON object: 'the ship'"),
])  # fmt: skip
def test_invalid_pairs_are_named(content, message, tmp_path):
    (tmp_path / "pairs.jsonl").write_text(content)
    with pytest.raises(UserError, match=message):
        likelihood.read_pairs(str(tmp_path / "pairs.jsonl"))


def test_models_and_texts_without_likelihoods_are_refused():
    model, params = model_of(CONFIG)
    with pytest.raises(UserError, match="has 52 tokens, more than the model's 40 positions"):
        list(likelihood.log_likelihoods(model, params, PIECES, ["ship " * 50]))
    neighbours = BertForMaskedLM(families.FAMILIES.get("lstms").config_class(family="lstms", **SIZES))
    with pytest.raises(UserError, match="this model is bidirectional"):
        list(likelihood.log_likelihoods(neighbours, {}, PIECES, ["ship"]))
    with pytest.raises(UserError, match="continues a text; this model reads in both directions"):
        generate(neighbours, {}, PIECES, "ship", 5, Sampling())


# Generation with a cache equals generation without a cache, from the tokens that sampling allows.


def without_cache(model, params, text, tokens):
    """Appends the most likely token after the whole text, repeatedly."""
    ids, room, run = [PIECES.cls_id, *PIECES.encode(text).ids], CAUSAL.max_position_embeddings, jax.jit(model.apply)
    for _ in range(min(tokens, room - len(ids))):
        row = np.pad(ids, (0, room - len(ids)))[None]
        segments = (np.arange(room) < len(ids))[None].astype(int)
        logits = np.array(run({"params": params}, row, segments, row * 0, np.array([[len(ids) - 1]]))[0, 0])
        logits[[PIECES.pad_id, PIECES.unk_id, PIECES.cls_id, PIECES.mask_id]] = -1e9
        piece = int(logits.argmax())
        if piece == PIECES.sep_id:
            break
        ids.append(piece)
    return PIECES.decode(ids[1:])


CAUSAL = dataclasses.replace(CONFIG, causal=True)
CONTINUED = {
    "post": CAUSAL,
    "pre": dataclasses.replace(CAUSAL, norm="pre", positions="each_layer"),
    "sinusoidal": dataclasses.replace(CAUSAL, positions="sinusoidal"),
    "relative": TransformerXLConfig(**SIZES, memory_length=40, max_position_embeddings=40),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", CONTINUED)
def test_generation_with_and_without_cache_is_equal(name):
    """Generates until the model has no position left, after a short prompt and a long prompt."""
    model, params = model_of(CONTINUED[name])
    text = " ".join(["ship a c the d"] * (7 if name == "pre" else 1))
    generated = generate(model, params, PIECES, text, 100, Sampling(temperature=0.0))
    assert generated == without_cache(model, params, text, 100)
    assert generated.startswith(text) and generated != text


def test_sampled_text_depends_on_the_seed_only():
    model, params = model_of(CAUSAL)
    texts = [[generate(model, params, PIECES, "a b", 12, Sampling(), seed) for seed in range(3)] for _ in range(2)]
    assert texts[0] == texts[1] and len(set(texts[0])) == 3
    random_tokens = generate(model, params, PIECES, "a b", 12, Sampling(temperature=100.0), seed=1)
    assert len(set(random_tokens.split())) > 4, "every position has a separate key"


@pytest.mark.parametrize("sampling, allowed", [
    (Sampling(), [0.4, 0.3, 0.2, 0.1]),
    (Sampling(top_k=2), [0.4 / 0.7, 0.3 / 0.7, 0, 0]),
    (Sampling(top_p=0.65), [0.4 / 0.7, 0.3 / 0.7, 0, 0]),  # the smallest set with 65 % or more
    (Sampling(top_p=0.75), [0.4 / 0.9, 0.3 / 0.9, 0.2 / 0.9, 0]),
    (Sampling(temperature=0.5), np.array([16, 9, 4, 1]) / 30),
    *((greedy, [1, 0, 0, 0]) for greedy in (Sampling(0.0), Sampling(1e-6), Sampling(top_k=1), Sampling(top_p=1e-6))),
    (Sampling(top_k=3, top_p=0.75), [0.4 / 0.7, 0.3 / 0.7, 0, 0]),  # top_p applies to the three tokens, which have 90 %
])  # fmt: skip
def test_sampling_frequencies_equal_the_probabilities(sampling, allowed):
    logits = jnp.log(jnp.array([[0.4, 0.3, 0.2, 0.1]]))
    chosen = jax.vmap(lambda key: _choose(logits, sampling, key)[0])(jax.random.split(jax.random.key(0), 20_000))
    np.testing.assert_allclose(np.bincount(chosen, minlength=4) / 20_000, allowed, atol=0.015)


def test_invalid_generation_is_refused():
    model, params = model_of(CAUSAL)
    with pytest.raises(UserError, match=r"has 41 tokens, but the model has only 40 positions"):
        generate(model, params, PIECES, "a " * 40, 3, Sampling())
    bert = BertForMaskedLM(dataclasses.replace(CAUSAL, causal=False))
    with pytest.raises(UserError, match=r"only a left-to-right model \(model.causal\) continues a text"):
        generate(bert, params, PIECES, "a", 3, Sampling())
