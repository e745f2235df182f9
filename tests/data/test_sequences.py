"""Rows of all objectives, from tokens to what a record holds."""

import numpy as np
import pytest

from bertjax.config import pretraining_config
from bertjax.data.preparation.instances import as_tokens
from bertjax.data.preparation.job import Job, RecordShape
from bertjax.data.preparation.sequences import make_rows
from bertjax.text.tokenizer import SPECIAL_PIECES, WordPiece

PIECES = WordPiece([*SPECIAL_PIECES, *(f"word{i}" for i in range(300))], lowercase=True)
STAGE = RecordShape(32, 5)


def rows_of(seed=0, documents=8, used=None, **options):
    config = pretraining_config()
    config.data.update(**{"short_seq_prob": 0.1, **options})
    job = Job((STAGE,), config.data.to_dict(), (), PIECES.vocab_size, PIECES.fingerprint, (), "", "")
    rng = np.random.default_rng(0)
    sizes = rng.integers(1, 12, size=20 * documents)
    tokens = as_tokens(rng.integers(5, 305, size=sizes.sum(), dtype=np.int32), sizes, [20] * documents)
    used = np.arange(documents) if used is None else np.array(used)
    return tokens, make_rows(tokens, used, STAGE, job, PIECES, [seed])


@pytest.mark.parametrize("next_sentence", ["pairs", "order", "none"])
@pytest.mark.parametrize("masking", ["static", "dynamic"])
def test_rows_are_well_formed(next_sentence, masking):
    _, rows = rows_of(next_sentence=next_sentence, masking=masking)
    place, size = np.arange(STAGE.length), rows["size"][:, None]
    separators = rows["ids"] == PIECES.sep_id
    assert (rows["ids"][:, 0] == PIECES.cls_id).all() and ((rows["ids"] == PIECES.cls_id).sum(1) == 1).all()
    assert ((rows["ids"] == PIECES.pad_id) == (place >= size)).all()
    assert separators[place == size - 1].all()
    if next_sentence == "none":
        assert (rows["first_size"] == rows["size"]).all() and not rows["label"].any()
    else:
        assert (separators.sum(1) == 2).all() and separators[place == rows["first_size"][:, None] - 1].all()
        assert 0.3 < rows["label"].mean() < 0.8
    if masking == "static":
        assert (rows["masked"] == np.clip(np.rint(rows["size"] * 0.15), 1, 5)).all()
        assert 0.7 < (np.take_along_axis(rows["ids"], rows["positions"], 1)[:, 0] == PIECES.mask_id).mean() < 0.9
    else:
        assert not {"positions", "labels", "masked"} & set(rows.dtype.names)
        assert (rows["ids"] != PIECES.mask_id).all()


def test_full_sentences_hold_the_text_once():
    tokens, rows = rows_of(next_sentence="none", masking="dynamic")
    ids = rows["ids"][np.arange(STAGE.length) < rows["size"][:, None]]
    assert (ids[(ids != PIECES.cls_id) & (ids != PIECES.sep_id)] == tokens.ids).all()
    assert (rows["ids"] == PIECES.sep_id).sum() > len(rows)  # between documents


@pytest.mark.parametrize("next_sentence", ["order", "none"])
def test_some_of_the_documents(next_sentence):
    """As when a mixture uses some more often than others."""
    tokens, rows = rows_of(used=[1, 4, 5], next_sentence=next_sentence, masking="dynamic", short_seq_prob=0.0)
    ids = rows["ids"][np.arange(STAGE.length) < rows["size"][:, None]]
    found = np.bincount(ids[ids >= 5], minlength=305)
    given = [tokens.ids[tokens.starts[20 * i] : tokens.starts[20 * i + 20]] for i in (1, 4, 5)]
    expected = np.bincount(np.concatenate(given), minlength=305)
    assert (found <= expected).all() and found.sum() > 0.8 * expected.sum()
    assert next_sentence == "order" or (found == expected).all()


def test_masks_hide_what_rows_without_them_hold():
    """The same seed gives the same sequences, masked or not."""
    _, plain = rows_of(next_sentence="order", masking="dynamic")
    _, rows = rows_of(next_sentence="order", masking="static")
    used = np.arange(STAGE.predictions) < rows["masked"][:, None]
    places = np.nonzero(used)[0], rows["positions"][used]
    ids = rows["ids"].copy()
    assert (ids != plain["ids"]).any()
    ids[places] = rows["labels"][used]
    assert (ids == plain["ids"]).all()


def test_one_document_gives_rows_unless_a_random_one_is_needed():
    for next_sentence in ("order", "none"):
        assert len(rows_of(documents=1, next_sentence=next_sentence)[1])
        assert not len(rows_of(documents=0, next_sentence=next_sentence)[1])
