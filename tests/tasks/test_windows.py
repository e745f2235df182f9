"""Texts that are longer than a sequence, read in windows: nothing is lost, and what stands at their ends is learnt."""

import random

import numpy as np
import pytest

from bertjax.config import UserError
from bertjax.interop import pretrained
from bertjax.tasks import classification, pairs, validate
from bertjax.tasks.classification import Windows
from bertjax.tasks.launch import launch
from bertjax.text.tokenizer import SPECIAL_PIECES, WordPiece
from tests.conftest import TOPICS
from tests.tasks.test_classify import config_for, write_table

pytestmark = pytest.mark.usefixtures("on_one_device")
PIECES = WordPiece([*SPECIAL_PIECES, *"abcdefghijklmnopqrstuvwxyz"], lowercase=True)


@pytest.mark.parametrize("stride", [1, 3, 5, 100])
def test_windows_have_all_of_a_text(stride):
    texts = [" ".join("abcdefghijklmnopqrstuvwxyz"[:length]) for length in (1, 6, 7, 20, 26)]
    ids, types, owners, cut = pairs.encode_windows(PIECES, texts, None, 8, stride)
    short, short_types, _ = pairs.encode_pairs(PIECES, texts[:2], None, 8)
    assert not any(cut) and owners.tolist()[:3] == [0, 1, 2] and sorted(owners) == owners.tolist()
    for which in (0, 1):
        np.testing.assert_array_equal(ids[which], short[which])
        np.testing.assert_array_equal(types[which], short_types[which])
    for number, text in enumerate(texts):
        own = [each[1:-1].tolist() for each, owner in zip(ids, owners) if owner == number]
        assert {i for window in own for i in window} == set(PIECES.encode(text).ids)
        steps = np.diff([window[0] for window in own])
        assert (steps == min(stride, 6)).all() and all(len(window) <= 6 for window in own)
        assert all(each[0] == PIECES.cls_id and each[-1] == PIECES.sep_id for each in ids)


def test_all_windows_of_a_pair_have_its_first_text():
    ids, types, owners, cut = pairs.encode_windows(PIECES, ["a b", "a b c d e f"], ["c d e f g h i j", "x y z"], 9, 2)
    decoded = [PIECES.decode(each) for each in ids]
    expected = [*(f"[CLS] a b [SEP] {window} [SEP]" for window in ("c d e f", "e f g h", "g h i j"))]
    assert decoded == [*expected, "[CLS] a b c [SEP] x y z [SEP]"]
    assert cut == [False, True] and owners.tolist() == [0, 0, 0, 1]
    assert types[0].tolist() == [0, 0, 0, 0, 1, 1, 1, 1, 1] and types[3].tolist() == [0, 0, 0, 0, 0, 1, 1, 1, 1]


def test_logits_are_combined_by_text():
    logits, owners = [np.array(each, np.float32) for each in ([1, 4], [3, 2], [7, 7])], np.array([0, 0, 1])
    assert np.array_equal(Windows("mean", 1).combined(logits, owners), [[2, 3], [7, 7]])
    assert np.array_equal(Windows("max", 1).combined(logits, owners), [[3, 4], [7, 7]])


@pytest.fixture(scope="module")
def late(tmp_path_factory):
    """Texts whose last words alone say what they are about."""
    folder, rng = tmp_path_factory.mktemp("late"), random.Random(0)
    for name, count in (("train", 240), ("dev", 60)):
        topics = rng.choices(sorted(TOPICS), k=count)
        texts = [" ".join([*"abcdefgh"] * 3 + rng.choices(TOPICS[topic], k=4)) for topic in topics]
        rows = [{"text": text, "topics": topic} for text, topic in zip(texts, topics)]
        write_table(folder / f"{name}.jsonl", rows)
    return folder, rows


@pytest.mark.slow
def test_what_truncation_loses_is_learnt_in_windows(late, checkpoint, tmp_path):
    folder, dev = late
    config = config_for(folder, checkpoint, multi_label="", windows="mean", doc_stride=12)
    config.update(dict(max_seq_length=16, epochs=4.0, packing=True))
    validate(config)
    launch(config, tmp_path)
    source = pretrained.read(tmp_path)
    accuracy = source.scores["accuracy"]
    cut, _, _ = pairs.encode_pairs(source.tokenizer, [row["text"] for row in dev], None, 16)
    assert accuracy > 0.9 and len({tuple(ids) for ids in cut}) == 1  # truncated, all texts are the same
    found = list(classification.predict(source, [(row["text"],) for row in dev]))
    right = [each["label"] == row["topics"] for each, row in zip(found, dev)]
    assert len(found) == len(dev) and np.mean(right) == pytest.approx(accuracy) and "cut" not in found[0]


@pytest.mark.parametrize("data, message", [
    ({"windows": "sum"}, r"config.data.windows = 'sum': choose mean or max of the windows' logits"),
    ({"windows": "max", "doc_stride": 0}, r"config.data.doc_stride = 0: must be at least 1"),
])  # fmt: skip
def test_a_mistake_is_one_line(data, message):
    config = config_for("data", **({"doc_stride": 4} | data))
    with pytest.raises(UserError, match=message):
        validate(config)
