"""What BERT chose otherwise than others: causal attention, positions, where LayerNorm is, a BiLSTM on top."""

import dataclasses
import math

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from bertjax.config import BertConfig, UserError, fields_of, model_size
from bertjax.families.bert.model import BertModel
from bertjax.families.lstms.model import LstmsModel
from bertjax.families.with_heads import (
    BertForMaskedLM,
    BertForQuestionAnswering,
    BertForSequenceClassification,
    BertForTokenClassification,
    forward_flops,
    lstm_flops,
)
from bertjax.model.encoder import sinusoids

TINY = BertConfig(
    vocab_size=60, hidden_size=32, num_hidden_layers=2, num_attention_heads=2, intermediate_size=64,
    max_position_embeddings=24, initializer_range=0.3,
)  # fmt: skip


def made(module, config, **fields):
    """A model with random params, none of which is 0 or 1."""
    model, ids = module(config, **fields), jnp.zeros((1, 8), jnp.int32)
    params = nn.meta.unbox(jax.jit(model.init)(jax.random.key(0), ids, ids, ids)["params"])
    params = jax.tree.map(lambda x: x + 0.1 * jax.random.normal(jax.random.key(x.size), x.shape), params)
    return lambda *inputs, **named: jax.jit(model.apply)({"params": params}, *inputs, **named), params


def row(seed, length=12):
    rng = np.random.default_rng(seed)
    return rng.integers(5, 60, (1, length)), np.ones((1, length), int), np.zeros((1, length), int)


@pytest.mark.slow
@pytest.mark.parametrize("norm", ["post", "pre"])
def test_a_causal_model_sees_what_was_before_and_nothing_else(norm):
    run, _ = made(BertModel, dataclasses.replace(TINY, causal=True, norm=norm))
    ids, segments, types = row(0)
    before, pooled = run(ids, segments, types)
    for place in (0, 5, 11):
        changed = ids.copy()
        changed[0, place] = (changed[0, place] + 1) % 60
        after, other = run(changed, segments, types)
        differs = (after != before).any(-1)[0]
        np.testing.assert_array_equal(differs, np.arange(12) >= place)
        assert (other != pooled).any()  # the last token has seen all of it


@pytest.mark.slow
def test_a_causal_model_is_pooled_at_the_last_token_of_each_example():
    run, _ = made(BertModel, dataclasses.replace(TINY, causal=True))
    examples = [row(seed, length)[0][0] for seed, length in ((0, 5), (1, 3), (2, 7))]
    alone = []
    for ids in examples:  # padded
        padded = np.pad(ids, (0, 9))[None]
        segments = (np.arange(len(ids) + 9) < len(ids))[None].astype(int)
        alone.append(run(padded, segments, np.zeros_like(padded))[1][0])
    ids = np.pad(np.concatenate(examples), (0, 3))[None]
    segments = np.repeat([1, 2, 3, 0], [5, 3, 7, 3])[None]
    positions = np.concatenate([np.arange(n) for n in (5, 3, 7, 3)])[None]
    first_tokens = np.array([[0, 5, 8, 0]])  # of three examples; the row has room for a fourth
    _, pooled = run(ids, segments, np.zeros_like(ids), positions, None, first_tokens)
    np.testing.assert_allclose(pooled[0, :3], np.stack(alone), atol=2e-5)


def test_sinusoids_are_those_of_the_original_transformer():
    """Vaswani et al. 2017, section 3.5: PE(pos, 2i) = sin(pos / 10000^(2i/d)), PE(pos, 2i + 1) = cos of the same."""
    size = 6
    found = sinusoids(9, size) * size**0.5
    for position in range(9):
        for i in range(size // 2):
            angle = position / 10_000 ** (2 * i / size)
            np.testing.assert_allclose(found[position, 2 * i], math.sin(angle), atol=1e-6)
            np.testing.assert_allclose(found[position, 2 * i + 1], math.cos(angle), atol=1e-6)


@pytest.mark.slow
@pytest.mark.parametrize(
    "positions, knows_order", [("learned", True), ("sinusoidal", True), ("each_layer", True), ("none", False)]
)
def test_only_positions_tell_the_order_of_words(positions, knows_order):
    run, params = made(BertModel, dataclasses.replace(TINY, positions=positions))
    assert ("position" in params["embeddings"]) == (positions == "learned")
    assert ("position" in params["encoder"]["layers"]) == (positions == "each_layer")
    ids, segments, types = row(0)
    order = np.random.default_rng(1).permutation(12)
    straight, _ = run(ids, segments, types)
    shuffled, _ = run(ids[:, order], segments, types)
    assert (np.abs(shuffled - straight[:, order]).max() > 0.1) == knows_order


@pytest.mark.slow
@pytest.mark.parametrize("positions", ["learned", "sinusoidal"])
def test_no_output_depends_on_what_fine_tuning_may_change(positions):
    config = dataclasses.replace(TINY, positions=positions)
    run, params = made(BertModel, config)
    changed = dataclasses.replace(
        config, **{name: 0.01 for name in fields_of(config, "") if name.endswith(("prob", "range"))}
    )
    expected, found = run(*row(0)), BertModel(changed).apply({"params": params}, *row(0))
    np.testing.assert_allclose(found[0], expected[0], atol=1e-5)


@pytest.mark.slow
def test_features_of_a_model_that_ends_with_a_layernorm_are_its_output():
    model, ids = BertModel(dataclasses.replace(TINY, norm="pre")), jnp.arange(8)[None] + 5
    params = model.init(jax.random.key(0), ids, ids * 0 + 1, ids * 0)["params"]
    run = dict(segments=ids * 0 + 1, token_types=ids * 0, method="encode")
    states = model.apply({"params": params}, ids, every_layer=True, **run)
    assert states.shape == (3, 1, 8, 32)
    np.testing.assert_array_equal(states[-1], model.apply({"params": params}, ids, **run))
    np.testing.assert_allclose(states[-1].mean(-1), 0, atol=1e-5)


@pytest.mark.slow
@pytest.mark.parametrize(
    "module", [BertForSequenceClassification, BertForTokenClassification, BertForQuestionAnswering]
)
def test_a_bilstm_on_top_reads_both_ways_and_no_padding(module):
    labels = {} if module is BertForQuestionAnswering else {"labels": 3}
    run, params = made(module, dataclasses.replace(TINY, causal=True), lstm_size=16, **labels)
    assert params["lstm"]["forward_0"]["hi"]["kernel"].shape == (16, 16) and "pooler" not in params["bert"]
    ids, segments, types = row(0)
    logits = run(ids, segments, types)
    wider = [np.pad(x, ((0, 0), (0, 7)), constant_values=value) for x, value in ((ids, 9), (segments, 0), (types, 0))]
    padded = run(*wider)
    padded = padded if module is BertForSequenceClassification else padded[:, :12]
    np.testing.assert_allclose(padded, logits, atol=1e-5)
    ids[0, 11] = 5 if ids[0, 11] != 5 else 6
    changed = run(ids, segments, types)  # which the first token of a causal model sees through the BiLSTM alone
    assert (changed != logits).any(-1).all()


@pytest.mark.slow
def test_two_lstms_see_one_side_each():
    """In all layers: the first half of a state what was before, the other half what comes, padding never."""
    config = dataclasses.replace(TINY, family="lstms", positions="none")
    model, (ids, segments, types) = LstmsModel(config), row(0)
    ids, segments, types = (np.pad(x, ((0, 0), (0, 4))) for x in (ids, segments, types))
    params = nn.meta.unbox(model.init(jax.random.key(0), ids, segments, types)["params"])
    assert "layers" not in params["encoder"] and params["encoder"]["backward_1"]["hi"]["kernel"].shape == (16, 16)
    run = jax.jit(lambda ids: model.apply({"params": params}, ids, segments, types, every_layer=True, method="encode"))
    before, place = run(ids), np.arange(12)
    assert before.shape == (3, 1, 16, 32)
    for changed_at in (0, 5, 11, 13):
        changed = ids.copy()
        changed[0, changed_at] = (changed[0, changed_at] + 1) % 60
        differs = (run(changed) != before)[1:, 0, :12]
        is_padding = changed_at >= 12
        np.testing.assert_array_equal(differs[..., :16].any(-1), [(place >= changed_at) & (not is_padding)] * 2)
        np.testing.assert_array_equal(differs[..., 16:].any(-1), [(place <= changed_at) & (not is_padding)] * 2)


@pytest.mark.slow
def test_two_lstms_are_pooled_where_each_has_read_the_whole_row():
    model, (ids, segments, types) = LstmsModel(dataclasses.replace(TINY, family="lstms", positions="none")), row(0)
    ids, segments, types = (np.pad(x, ((0, 0), (0, 4))) for x in (ids, segments, types))
    params = nn.meta.unbox(model.init(jax.random.key(0), ids, segments, types)["params"])
    params["pooler"]["dense"]["kernel"] = jnp.eye(32)  # it shows what it reads
    run = jax.jit(lambda ids: model.apply({"params": params}, ids, segments, types)[1].reshape(2, 16))
    before = run(ids)
    for changed_at in (0, 5, 11, 13):
        changed = ids.copy()
        changed[0, changed_at] = (changed[0, changed_at] + 1) % 60
        assert (run(changed) != before).any(-1).tolist() == [changed_at < 12] * 2  # padding is not read


@pytest.mark.slow
def test_each_lstm_predicts_the_words_that_it_has_not_seen():
    config = dataclasses.replace(TINY, family="lstms", positions="none")
    ids, segments, types = row(0)
    positions = np.array([[0, 5, 10, 1, 6, 11]])  # the words after the first three, and before the others
    model = BertForMaskedLM(config)
    params = model.init(jax.random.key(0), ids, segments, types, positions)["params"]
    run = jax.jit(lambda ids: model.apply({"params": params}, ids, segments, types, positions))
    before = run(ids)
    for place in range(12):
        changed = ids.copy()
        changed[0, place] = (changed[0, place] + 1) % 60
        differs = (run(changed) != before)[0, :, : config.vocab_size].any(-1)
        assert differs.tolist() == [*(place <= at for at in (0, 5, 10)), *(place >= at for at in (1, 6, 11))]


def test_flops_of_two_lstms():
    """Four gates of 16 units a direction, which read 32 numbers in the first layer and 16 in the second."""
    config = dataclasses.replace(TINY, family="lstms")
    assert forward_flops(config, 3, 7, 0, pooled=0) == 3 * 7 * 2 * 2 * 4 * 16 * ((32 + 16) + (16 + 16))


def test_flops_of_a_bilstm():
    """Two directions of four gates, each of an input and a state, 2 FLOPs a multiply-add, per token and layer."""
    model = BertForTokenClassification(TINY, 3, lstm_size=16, lstm_layers=2)
    assert lstm_flops(model, 5, 7) == 5 * 7 * 2 * 2 * 4 * 16 * ((32 + 16) + (2 * 16 + 16))
    assert lstm_flops(BertForTokenClassification(TINY, 3), 5, 7) == 0


def test_sizes_have_names_or_numbers():
    assert model_size("12-768-12") == model_size("base") == model_size("gpt2")
    assert model_size("gpt2-xl") == dict(
        num_hidden_layers=48, hidden_size=1600, num_attention_heads=25, intermediate_size=6400
    )
    with pytest.raises(UserError, match=r"unknown model size '12-768': choose one of .*, or LAYERS-HIDDEN-HEADS"):
        model_size("12-768")
