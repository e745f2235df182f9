"""Masked and permuted language modelling (MPNet): visible tokens and positions, the drawn order, FLOPs, mistakes."""

import dataclasses
import itertools
import math

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from bertjax.common.errors import UserError
from bertjax.config.defaults import named_stages, stage
from bertjax.config.model_config import Compute
from bertjax.data.batch import RowSize
from bertjax.data.loading.masking import PermutedMasking, TokenMasking
from bertjax.export.inline_jaxpr import straight
from bertjax.launch.validate import validate
from bertjax.models import families
from bertjax.models.family import PositionCompensation
from bertjax.models.heads import BertForMaskedLM, model_flops
from bertjax.models.mpnet.config import MPNetConfig
from bertjax.objectives.registry import OBJECTIVES
from bertjax.text import tokenizer
from tests.conftest import one_device_mesh, pretraining_task, tiny_config
from tests.models.test_modernbert import random_params

pytestmark = pytest.mark.usefixtures("on_one_device")
CLS, SEP, MASK, WORDS = 2, 3, 4, 150
TINY = MPNetConfig(
    vocab_size=WORDS, hidden_size=32, num_hidden_layers=3, num_attention_heads=2, intermediate_size=64,
    max_position_embeddings=64,
)  # fmt: skip
OBJECTIVE = OBJECTIVES.get("mplm")


def masking(split=(1.0, 0.0, 0.0), share=0.3, most=8):
    return PermutedMasking(TokenMasking(share, split, most, WORDS, MASK, CLS, SEP))


def rows_of(sizes, length, seed=0):
    """Returns a batch of random texts of these sizes, with the arrays of the objective."""
    rng, transform = np.random.default_rng(seed), masking()
    segments = (np.arange(length) < np.array(sizes)[:, None]).astype(np.int32)
    ids = rng.integers(5, WORDS, segments.shape).astype(np.int32) * segments
    ids[:, 0], ids[np.arange(len(sizes)), np.array(sizes) - 1] = CLS, SEP
    batch = dict(input_ids=ids, segments=segments)
    batch |= transform(batch, transform.draw(rng, *ids.shape))
    return batch | dict(token_types=np.zeros_like(ids), positions=np.broadcast_to(np.arange(length), ids.shape))


def packed(batch, sizes):
    """Returns the texts of a batch in one row, and one column of padding."""
    starts, is_used = np.cumsum([0, *sizes[:-1]]), batch["word_weights"] > 0
    batch = batch | {
        "segments": batch["segments"] * (1 + np.arange(len(sizes), dtype=np.int32))[:, None],
        "word_positions": batch["word_positions"] + starts[:, None].astype(np.int32),
    }
    row = {}
    for name, x in batch.items():
        mask = is_used if name.startswith("word_") else np.arange(x.shape[1]) < np.array(sizes)[:, None]
        row[name] = np.pad(x[mask], (0, 1))[None]
    return row


@jax.jit
def query_states(params, batch):
    encoder = families.family_of(TINY).build(TINY, Compute())
    states = nn.apply(lambda encoder: OBJECTIVE.encode(encoder, batch, None), encoder)(params)
    return states[1]


@pytest.fixture(scope="module")
def params():
    return {"params": random_params(BertForMaskedLM(TINY), TINY)["bert"]}


def test_a_prediction_depends_on_earlier_tokens_of_the_order_and_on_all_positions(params):
    """Two texts share a row. Each token is changed in turn, then each position: three layers would pass on a token that
    a mask sees. The states of a packed row are the states of padded rows."""
    sizes, length = (12, 18), 20
    rows = rows_of(sizes, length)
    row = packed(rows, sizes)
    texts, ranks, places = row["segments"][0], row["ranks"][0], row["word_positions"][0]
    used = row["word_weights"][0] > 0
    before = np.asarray(query_states(params, row))[0]
    assert used.sum() == 4 + 5 and (ranks[places[used]] > 0).all()

    def differs(name, values):
        others = [np.asarray(query_states(params, row | {name: x[None]}))[0] for x in values]
        return (np.asarray(others) != before).any(-1)[:, used]  # [changed token, prediction]

    is_same_text = texts[:, None] == texts[places[used]]
    is_changed, ids = np.eye(len(texts), dtype=bool), row["input_ids"][0]
    tokens = differs("input_ids", np.where(is_changed, 5 + (ids + 3) % (WORDS - 5), ids))
    np.testing.assert_array_equal(tokens, is_same_text & (ranks[:, None] < ranks[places[used]]))
    positions = differs("positions", np.where(is_changed, 50, row["positions"][0]))
    np.testing.assert_array_equal(positions, is_same_text)
    # A prediction sees the masks of its token and of the tokens after it.
    masks = differs("masked_ids", np.where(is_changed, 7, row["masked_ids"][0]))
    is_mask = is_same_text & (ranks[:, None] > 0) & (ranks[:, None] >= ranks[places[used]])
    np.testing.assert_array_equal(masks | ~is_mask, np.ones_like(masks))

    expected = np.asarray(query_states(params, rows))[rows["word_weights"] > 0]
    np.testing.assert_allclose(before[used], expected, atol=2e-6)


def test_the_encoder_without_predictions_equals_the_encoder_of_all_tokens(params):
    rows = rows_of((12, 18), 20)
    encoder = families.family_of(TINY).build(TINY, Compute())
    rows |= {"ranks": np.zeros_like(rows["ranks"]), "word_weights": np.zeros_like(rows["word_weights"])}
    hidden = nn.apply(lambda encoder: OBJECTIVE.encode(encoder, rows, None), encoder)(params)[0]
    arrays = [rows[name] for name in ("input_ids", "segments", "token_types")]
    expected = encoder.apply(params, *arrays, method="encode")
    is_token = rows["segments"] > 0
    np.testing.assert_allclose(hidden[is_token], expected[is_token], atol=2e-6)


def test_shares_of_predictions_and_masks():
    """15 % of the tokens are predicted, with the masks of BERT. Each token is equally often at each place."""
    rows, length = 4000, 42
    transform = masking((0.8, 0.1, 0.1), 0.15, 10)
    ids = np.full((rows, length), 5, np.int32)
    ids[:, 0], ids[:, -1] = CLS, SEP
    batch = dict(input_ids=ids, segments=np.ones_like(ids))
    draws = transform.draw(np.random.default_rng(0), rows, length)
    added = transform(batch, draws)
    assert "input_ids" not in added and (added["word_weights"].sum(1) == 6).all()
    ranks, masked = added["ranks"], added["masked_ids"]
    assert (np.sort(ranks, axis=1)[:, -6:] == 1 + np.arange(6)).all() and ((ranks > 0).sum(1) == 6).all()
    assert (ranks[:, [0, -1]] == 0).all() and (masked[ranks == 0] == ids[ranks == 0]).all()
    places = added["word_positions"][:, :6]
    assert (np.take_along_axis(ranks, places, axis=1) > 0).all()
    count = ranks[ranks > 0].size
    shares = np.array([(masked[ranks > 0] == token).mean() for token in (MASK, 5)])
    deviation = np.sqrt([0.16 / count, 0.09 / count])
    assert (np.abs(shares - (0.8 + 0.1 / WORDS, 0.1 + 0.1 / WORDS)) < 4 * deviation).all()
    by_place = np.stack([(ranks == rank).sum(0)[1:-1] for rank in range(1, 7)])  # [rank, place], 100 on average
    chi_square = ((by_place - rows / 40) ** 2 / (rows / 40)).sum()
    assert chi_square < 310  # 234 degrees of freedom: fewer than 1 in 1,000
    part = transform({name: x[7:9] for name, x in batch.items()}, {name: x[7:9] for name, x in draws.items()})
    assert all((part[name] == x[7:9]).all() for name, x in added.items())


def config_for(records="unused", **fields):
    config = tiny_config(records=records)
    config.model = families.model_fields(**dataclasses.asdict(TINY))
    config.objective, config.stages = "mplm", named_stages(only=stage(60, 32, 5))
    config.eval.fill_masks, config.data.masking = (), "dynamic"
    config.update_from_flattened_dict(fields)
    return config


@pytest.mark.parametrize("packing", [False, True])
def test_a_batch_is_a_function_of_seed_and_step(records_folder, packing):
    pieces = tokenizer.load_tokenizer("wordpiece", records_folder / "vocab.txt")
    batches = {}
    for seed in (0, 1):
        config = config_for(records_folder, packing=packing, seed=seed)
        validate(config)
        task = pretraining_task(config, one_device_mesh(config), records_folder, tokenizer=pieces)
        batches[seed] = next(task.batches(7))
        (*_, again) = itertools.islice(task.batches(5), 3)
        assert all((batches[seed][name] == again[name]).all() for name in again)
        planned = task.data[0].abstract_batch()
        assert {name: (x.shape, x.dtype) for name, x in again.items()} == {
            name: (x.shape, x.dtype) for name, x in planned.items()
        }
    assert (batches[0]["ranks"] != batches[1]["ranks"]).any()


def test_flops_equal_the_matrix_products():
    """Compares the FLOPs of one additional row."""
    length, words = 24, 6
    abstract = jax.eval_shape(lambda: {"params": random_params(BertForMaskedLM(TINY), TINY)})

    def products(rows):
        tokens, predictions = (jax.ShapeDtypeStruct((rows, size), jnp.int32) for size in (length, words))
        of_tokens = ("input_ids", "segments", "token_types", "ranks", "masked_ids")
        batch = dict.fromkeys(of_tokens, tokens) | dict.fromkeys(("word_positions", "word_weights"), predictions)
        leaves, tree = jax.tree.flatten((abstract, batch))

        def predict(*leaves):
            params, batch = jax.tree.unflatten(tree, leaves)

            def states(model):
                query = OBJECTIVE.encode(model.bert, batch, None)[1]
                indices = jnp.broadcast_to(jnp.arange(words), batch["word_positions"].shape)
                return model.masked_lm(query, indices, model.bert.word_embeddings())

            return jax.tree.leaves(nn.apply(states, BertForMaskedLM(TINY))(params))

        total = 0
        for equation in straight(predict, *leaves).jaxpr.eqns:
            if equation.primitive.name == "dot_general":
                (contracted, _), _ = equation.params["dimension_numbers"]
                sizes = [equation.invars[0].aval.shape[axis] for axis in contracted]
                total += 2 * math.prod((*equation.outvars[0].aval.shape, *sizes))
        return total

    row = RowSize(length, 1, words)
    expected = model_flops(TINY, 1, length, 0, pooled=0) + OBJECTIVE.flops(TINY, row)
    assert products(2) - products(1) == expected


@pytest.mark.parametrize("fields, message", [
    ({"model.family": "bert"}, "config.model.family = 'bert': does not support masks with the positions of tokens"),
    ({"data.masking": "static"}, "config.data.masking = 'static': mplm masks tokens when records are read; set"),
    ({"objective": "mplm + mlm"}, "mplm and mlm both predict tokens; remove one of them"),
])  # fmt: skip
def test_mistakes_are_named(fields, message):
    config = config_for("records", **fields)
    if "model.family" in fields:
        config.model = families.model_fields("bert")
    with pytest.raises(UserError, match=message) as error:
        validate(config)
    assert "\n" not in str(error.value)


def test_families_with_position_compensation():
    able = {name for name in families.FAMILIES.names() if isinstance(families.FAMILIES.get(name), PositionCompensation)}
    assert able == {"mpnet"}
