"""Variants of BERT: causal attention, positions, the position of LayerNorm, a BiLSTM on top."""

import dataclasses
import functools
import math

import jax
import numpy as np
import pytest

from bertjax.common.errors import UserError
from bertjax.config.model_config import BertConfig, fields_with_roles, model_size
from bertjax.models.elmo.model import ElmoModel
from bertjax.models.families import encoder_of
from bertjax.models.heads import (
    BertForMaskedLM,
    BertForQuestionAnswering,
    BertForSequenceClassification,
    BertForTokenClassification,
    lstm_flops,
    model_flops,
)
from bertjax.nn.positions import sinusoids
from tests.markers import slow_case
from tests.nn.reference import random_params

TINY = BertConfig(
    vocab_size=60, hidden_size=16, num_hidden_layers=1, num_attention_heads=2, intermediate_size=32,
    max_position_embeddings=24, initializer_range=0.3,
)  # fmt: skip
LSTMS = dataclasses.replace(TINY, num_hidden_layers=2, hidden_size=32, family="lstms", positions="none")


def made(module, config, *more_inputs, **fields):
    """Returns a compiled model with random params without 0 and 1, and the params."""
    model, ids = module(config, **fields), np.zeros((1, 8), np.int32)
    params = random_params(model, ids, ids, ids, *more_inputs, deviation=0.3)
    apply = jax.jit(model.apply, static_argnames=("method", "every_layer"))
    return lambda *inputs, **named: jax.tree.map(np.asarray, apply({"params": params}, *inputs, **named)), params


def row(seed, length=12, width=12):
    """Returns a text: ids, segments and token types, padded to a width."""
    ids = np.random.default_rng(seed).integers(5, 60, length)
    return (
        np.pad(ids, (0, width - length))[None],
        (np.arange(width) < length)[None].astype(int),
        np.zeros((1, width), int),
    )


def changed_at(ids, place: int):
    """Returns ids with another token at one position."""
    return np.where(np.arange(ids.shape[1]) == place, (ids + 1) % 60, ids)


@pytest.mark.parametrize("norm", ["post", "pre"])
def test_a_causal_model_depends_on_earlier_tokens_only(norm):
    run, _ = made(encoder_of, dataclasses.replace(TINY, causal=True, norm=norm))
    ids, segments, types = row(0)
    before, pooled = run(ids, segments, types)
    for place in (0, 5, 11):
        after, other = run(changed_at(ids, place), segments, types)
        np.testing.assert_array_equal((after != before).any(-1)[0], np.arange(12) >= place)
        assert (other != pooled).any()  # the last token depends on all tokens


def test_a_causal_model_is_pooled_at_the_last_token_of_each_example():
    run, _ = made(encoder_of, dataclasses.replace(TINY, causal=True))
    sizes = (5, 3, 7)
    examples = [row(seed, size, 18) for seed, size in enumerate(sizes)]
    _, alone = run(*map(np.concatenate, zip(*examples)))
    ids = np.pad(np.concatenate([ids[0, :size] for (ids, *_), size in zip(examples, sizes)]), (0, 3))[None]
    segments = np.repeat([1, 2, 3, 0], [*sizes, 3])[None]
    positions = np.concatenate([np.arange(n) for n in (*sizes, 3)])[None]
    first_tokens = np.array([[0, 5, 8, 0]])  # of three examples; the row has room for a fourth
    _, pooled = run(ids, segments, np.zeros_like(ids), positions, None, first_tokens)
    np.testing.assert_allclose(pooled[0, :3], alone, atol=2e-5)


def test_sinusoids_equal_the_original_transformer():
    """Vaswani et al. 2017, section 3.5: PE(pos, 2i) = sin(pos / 10000^(2i/d)), PE(pos, 2i + 1) = cos of the same."""
    size = 6
    table = sinusoids(9, size) * size**0.5
    for position in range(9):
        for i in range(size // 2):
            angle = position / 10_000 ** (2 * i / size)
            np.testing.assert_allclose(table[position, 2 * i], math.sin(angle), atol=1e-6)
            np.testing.assert_allclose(table[position, 2 * i + 1], math.cos(angle), atol=1e-6)


@pytest.mark.parametrize(
    "positions, knows_order",
    [("learned", True), ("none", False), slow_case("sinusoidal", True), slow_case("each_layer", True)],
)
def test_only_positions_encode_word_order(positions, knows_order):
    run, params = made(encoder_of, dataclasses.replace(TINY, positions=positions))
    assert ("position" in params["embeddings"]) == (positions == "learned")
    assert ("position" in params["encoder"]["layers"]) == (positions == "each_layer")
    ids, segments, types = row(0)
    order = np.random.default_rng(1).permutation(12)
    straight, _ = run(ids, segments, types)
    shuffled, _ = run(ids[:, order], segments, types)
    assert (np.abs(shuffled - straight[:, order]).max() > 0.1) == knows_order


def test_fields_that_fine_tuning_may_change_do_not_change_outputs():
    """Sinusoidal positions do not depend on initializer_range either."""
    config = dataclasses.replace(TINY, positions="sinusoidal")
    run, params = made(encoder_of, config)
    names = (name for name in fields_with_roles(config, "") if name.endswith(("prob", "range")))
    other = encoder_of(dataclasses.replace(config, **dict.fromkeys(names, 0.01)))
    np.testing.assert_allclose(jax.jit(other.apply)({"params": params}, *row(0))[0], run(*row(0))[0], atol=1e-5)


def test_features_of_a_model_that_ends_with_a_layernorm_are_its_output():
    model = encoder_of(dataclasses.replace(TINY, norm="pre"))
    variables = {"params": random_params(model, *row(0), deviation=0.3)}
    variables["params"]["encoder"]["norm"] = {"scale": np.ones(16), "bias": np.zeros(16)}
    encode = jax.jit(functools.partial(model.apply, method="encode"), static_argnames="every_layer")
    states = encode(variables, *row(0), every_layer=True)
    assert states.shape == (2, 1, 12, 16)
    np.testing.assert_array_equal(states[-1], encode(variables, *row(0)))
    np.testing.assert_allclose(states[-1].mean(-1), 0, atol=1e-5)


@pytest.mark.parametrize(
    "module", [BertForTokenClassification, *map(slow_case, [BertForSequenceClassification, BertForQuestionAnswering])]
)
def test_a_bilstm_reads_both_directions_and_no_padding(module):
    labels = {} if module is BertForQuestionAnswering else {"labels": 3}
    run, params = made(module, dataclasses.replace(TINY, causal=True), lstm_size=8, **labels)
    assert params["lstm"]["forward_0"]["hi"]["kernel"].shape == (8, 8) and "pooler" not in params["bert"]
    ids, segments, types = row(0)
    logits = run(ids, segments, types)
    wider = [np.pad(x, ((0, 0), (0, 7)), constant_values=value) for x, value in ((ids, 9), (segments, 0), (types, 0))]
    padded = run(*wider)
    padded = padded if module is BertForSequenceClassification else padded[:, :12]
    np.testing.assert_allclose(padded, logits, atol=1e-5)
    # the first token of a causal model depends on the changed token through the BiLSTM only
    changed = run(changed_at(ids, 11), segments, types)
    assert (changed != logits).any(-1).all()


def test_the_two_lstms_read_opposite_directions():
    """In all layers, the first half of a state depends on earlier tokens, the second half on later tokens, never on
    padding.

    Each half is pooled at the end of its direction.
    """
    model, (ids, segments, types) = ElmoModel(LSTMS), row(0, width=16)
    params = random_params(model, ids, segments, types, deviation=0.3)
    assert "layers" not in params["encoder"] and params["encoder"]["backward_1"]["hi"]["kernel"].shape == (16, 16)
    params["pooler"]["dense"]["kernel"], variables = np.eye(32), {"params": params}  # the output shows the inputs

    @jax.jit
    def run(ids):
        states = model.apply(variables, ids, segments, types, every_layer=True, method="encode")
        return states, model.apply(variables, ids, segments, types)[1].reshape(2, 16)

    (before, pooled), place = run(ids), np.arange(12)
    assert before.shape == (3, 1, 16, 32)
    for at in (0, 5, 11, 13):
        states, other_pooled = run(changed_at(ids, at))
        differs, is_read = np.asarray(states != before)[1:, 0, :12], at < 12
        np.testing.assert_array_equal(differs[..., :16].any(-1), [(place >= at) & is_read] * 2)
        np.testing.assert_array_equal(differs[..., 16:].any(-1), [(place <= at) & is_read] * 2)
        assert (other_pooled != pooled).any(-1).tolist() == [is_read] * 2


def test_the_lstms_predict_unseen_tokens():
    ids, segments, types = row(0)
    # the tokens after the first three tokens, and before the remaining ones
    positions = np.array([[0, 5, 10, 1, 6, 11]])
    run, _ = made(BertForMaskedLM, dataclasses.replace(LSTMS, num_hidden_layers=1), np.zeros((1, 6), int))
    before = run(ids, segments, types, positions)
    for place in range(12):
        differs = (run(changed_at(ids, place), segments, types, positions) != before)[0, :, :60].any(-1)
        assert differs.tolist() == [*(place <= at for at in (0, 5, 10)), *(place >= at for at in (1, 6, 11))]


def test_flops_of_two_lstms_equal_the_gate_products():
    """Four gates of 16 units per direction, with 32 inputs in the first layer and 16 inputs in the second layer."""
    assert model_flops(LSTMS, 3, 7, 0, pooled=0) == 3 * 7 * 2 * 2 * 4 * 16 * ((32 + 16) + (16 + 16))


def test_flops_of_a_bilstm_equal_the_gate_products():
    """Two directions of four gates with an input and a state, 2 FLOPs per multiply-add, per token and layer."""
    model = BertForTokenClassification(TINY, 3, lstm_size=8, lstm_layers=2)
    assert lstm_flops(model, 5, 7) == 5 * 7 * 2 * 2 * 4 * 8 * ((16 + 8) + (2 * 8 + 8))
    assert lstm_flops(BertForTokenClassification(TINY, 3), 5, 7) == 0


def test_model_sizes_are_names_or_numbers():
    assert model_size("12-768-12") == model_size("base") == model_size("gpt2")
    assert model_size("gpt2-xl") == dict(
        num_hidden_layers=48, hidden_size=1600, num_attention_heads=25, intermediate_size=6400
    )
    with pytest.raises(UserError, match=r"unknown model size '12-768': choose one of .*, or LAYERS-HIDDEN-HEADS"):
        model_size("12-768")
