"""Permutation language modelling: visible tokens of a prediction, records, packing, and mistakes."""

import dataclasses

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from bertjax.common.errors import UserError
from bertjax.config.defaults import named_stages, stage
from bertjax.data.loading.permutation import RandomOrder
from bertjax.data.preprocessing.preparation import prepare
from bertjax.data.records.record_sets import find_records
from bertjax.launch.validate import validate
from bertjax.models import families
from bertjax.models.heads import BertForMaskedLM
from bertjax.models.xlnet.config import XlnetConfig
from bertjax.models.xlnet.model import XlnetModel
from bertjax.nn.ops.recurrent_memory import RecurrentMemory
from bertjax.objectives.parsing import learn
from bertjax.objectives.registry import OBJECTIVES
from bertjax.text import tokenizer
from bertjax.text.tokenizer import XLNET
from tests.conftest import heldout_batches, preparing_in_process, tiny_config
from tests.models.test_modernbert import random_params

pytestmark = pytest.mark.usefixtures("on_one_device")
PIECES = 83  # equal to the vocabulary size that the corpus gives
SIZES = dict(hidden_size=32, num_hidden_layers=1, num_attention_heads=2, intermediate_size=64)
TINY = XlnetConfig(vocab_size=PIECES, max_position_embeddings=64, **SIZES)


def config_for(corpus="", records="", **settings):
    """One stage of a tiny XLNet without dropout, on pairs of segments."""
    config = tiny_config(corpus, records)
    config.model = families.model_fields(**dataclasses.asdict(TINY))
    config.model.update(hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0)
    config.tokenizer.kind = "sentencepiece"
    config.data.masking = "dynamic"
    learn(config, "plm", plm=settings)
    config.stages, config.unroll = named_stages(only=stage(6, 32, 8)), "no"
    return config


@pytest.fixture(scope="module")
def records(corpus_file, tmp_path_factory):
    folder = tmp_path_factory.mktemp("plm") / "records"
    with preparing_in_process():
        prepare(config_for(corpus_file), folder)
    return folder


@pytest.fixture(scope="module")
def pieces(records):
    return tokenizer.load_tokenizer("sentencepiece", records / "tokenizer.model")


@pytest.mark.parametrize("has_memory", [False, True])
def test_a_prediction_depends_only_on_earlier_tokens_of_the_order(pieces, has_memory):
    """Two sequences share a row. Each token is changed in turn: the changed predictions belong to the same sequence and
    come after the token in the order. All predictions see the filled positions of the memory, and no other positions.
    """
    rng, first, length = np.random.default_rng(0), 12, 30
    ids = rng.integers(5, PIECES, (2, length))
    ids[0, 10:12], ids[1, 16:18] = [pieces.sep_id, pieces.cls_id], [pieces.sep_id, pieces.cls_id]
    sizes = np.array([first, length - first])
    segments = (np.arange(length) < sizes[:, None]).astype(np.int32)
    transform = RandomOrder(3, 5, 8, pieces.cls_id, pieces.sep_id, pieces.continues_word)
    added = transform(dict(input_ids=ids, segments=segments), transform.draw(rng, 2, length))
    joined = {name: np.concatenate([x[0, :first], x[1, : length - first]])
              for name, x in dict(ids=ids, ranks=added["ranks"]).items()}  # fmt: skip
    used = added["word_weights"] > 0
    places = np.concatenate([added["word_positions"][i][used[i]] + start for i, start in enumerate((0, first))])
    segments, types = np.repeat([1, 2], sizes), np.zeros(length, np.int32)
    config = dataclasses.replace(TINY, num_hidden_layers=2)
    kept = rng.normal(size=(1, 2, 7, TINY.hidden_size)).astype(np.float32)
    params = {"params": random_params(BertForMaskedLM(config), config)["bert"]}

    @jax.jit
    def predict(ids, kept, filled):
        memory = RecurrentMemory(kept, filled[None]) if has_memory else None
        batch = dict(input_ids=ids, segments=segments, token_types=types, ranks=joined["ranks"], word_positions=places)
        batch = {name: jnp.asarray(x)[None] for name, x in batch.items()}
        encode = OBJECTIVES.get("plm").encode
        return nn.apply(lambda encoder: encode(encoder, batch, None, memory)[1][0], XlnetModel(config))(params)

    changed = np.where(np.eye(length, dtype=bool), 5 + (joined["ids"] - 4) % (PIECES - 5), joined["ids"])
    ranks = joined["ranks"]
    expected = (segments[:, None] == segments[places]) & (ranks[:, None] < ranks[places])
    assert len(places) == 10 and (ranks[places] > 0).all()
    for filled in (0, 3, 7) if has_memory else (0,):
        before = np.asarray(predict(joined["ids"], kept, filled := jnp.array(filled)))
        after = np.asarray([predict(ids, kept, filled) for ids in changed])
        differs = (after != before).any(-1)  # [changed token, prediction]
        np.testing.assert_array_equal(differs, expected)
        for place in range(7 if has_memory else 0):
            other = predict(joined["ids"], kept + np.float32(np.eye(7)[place, :, None]), filled)
            assert ((np.asarray(other) != before).any(-1) == (place >= 7 - filled)).all()


def test_records_end_with_cls_of_a_separate_token_type(records, pieces, corpus_file, tmp_path, in_process):
    def batches(folder, **options):
        files = find_records(folder, 32, 8, "train", **options)
        return list(heldout_batches(files, 32, 8, batch_size=64, max_sequences=256))

    assert pieces.special_ids == tuple(map(pieces.pieces.index, XLNET))
    google = batches(records, token_types=3)
    for batch in google:
        for ids, types, size in zip(batch["input_ids"], batch["token_types"], batch["segments"].sum(1)):
            kinds = types[:size].tolist()
            assert ids[size - 1] == pieces.cls_id and kinds == sorted(kinds) and kinds.count(2) == 1
            ends = np.flatnonzero(ids[:size] == pieces.sep_id)
            assert len(ends) == 2 and ends[1] == size - 2 and kinds.count(0) == ends[0] + 1
    config = config_for(corpus_file)
    config.tokenizer.path, config.data.layout = str(records / "tokenizer.model"), "compact"
    prepare(config, tmp_path / "compact")
    for our_batch, google_batch in zip(batches(tmp_path / "compact", token_types=3), google, strict=True):
        assert all((our_batch[name] == google_batch[name]).all() for name in google_batch)
    with pytest.raises(UserError, match="has 2 in segment_ids, which must be from 0 to 1"):
        batches(records)


@pytest.mark.parametrize("field, value, message", [
    ("objectives.plm.k", 0, "config.objectives.plm.k = 0: must be at least 1"),
    ("objectives.plm.max_span_words", -1, "config.objectives.plm.max_span_words = -1: must be at least 0"),
    ("objective", "mlm", "config.objective = 'mlm': the objective needs a masked language model, and config"),
    ("objective", "plm + lm", "plm and lm both predict tokens; remove one of them"),
    ("data.masking", "static", "config.data.masking = 'static': the objective for permuted words supports no masks"),
    ("data.do_span_mask", True, "config.data.do_span_mask = True: the objective for permuted words supports no"),
])  # fmt: skip
def test_mistakes_are_named(field, value, message):
    config = config_for("corpus")
    with config.unlocked():
        config.update_from_flattened_dict({field: value})
    with pytest.raises(UserError, match=message) as error:
        validate(config)
    assert "\n" not in str(error.value)
