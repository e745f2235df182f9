"""XLNet: texts that end with <cls>, and tokens that are predicted from all other tokens."""

import dataclasses
import json

import numpy as np
import pytest

from bertjax.finetuning import conll, question_windows, word_encoding
from bertjax.inference import bits_per_byte, likelihood
from bertjax.inference.fill_mask import fill_masks
from bertjax.interop import hf_tokenizer, huggingface
from bertjax.models.heads import BertForMaskedLM
from bertjax.text import vocabulary_learning
from bertjax.text.tokenizer import XLNET
from tests.conftest import make_corpus
from tests.finetuning.test_squad import random_questions
from tests.models.test_modernbert import random_params
from tests.objectives.test_plm import PIECES, TINY

pytestmark = pytest.mark.usefixtures("on_one_device")


@pytest.fixture(scope="module")
def pieces():
    words = vocabulary_learning.count_words("sentencepiece", make_corpus(80).split("\n"))
    return vocabulary_learning.learn_new_vocabulary("sentencepiece", words, PIECES, special=XLNET)


# Texts that end with <cls>.


def test_labels_of_answers_and_tags_point_at_the_words(pieces):
    questions = random_questions(60)
    sizes = question_windows.WindowSizes(max_seq_length=60, doc_stride=20, max_query_length=12)
    examples, windows, *_ = question_windows.encode_question_windows(questions, pieces, sizes, with_labels=True)
    window_number = 0
    for ids, types, (first, last), window in zip(examples.input_ids, examples.token_types, examples.labels, windows):
        assert ids[-1] == pieces.cls_id and window.none == len(ids) - 1 and types[-1] == 2
        assert types[window.first - 1 :].tolist() == [0, *[1] * (len(ids) - window.first - 1), 2]
        if first != window.none:
            offsets = window.offsets[[first - window.first, last - window.first]]
            question, window_number = questions[window.question], window_number + 1
            assert question.answers[0] in question.context[offsets[0, 0] : offsets[1, 1]]
    assert window_number > 30
    null = np.zeros((len(windows[0].offsets) + windows[0].first + 2, 2))
    null[windows[0].none] = 3.0
    ((_, odds),) = question_windows.answers(questions[:1], windows[:1], [null]).values()
    assert odds == 6.0  # the labels of "no answer", at <cls>

    sentences = [conll.Sentence(("ship", "saw"), ("B-SHIP", "O"), 0)]
    tagged = word_encoding.encode_word_sequences(sentences, ["O", "B-SHIP"], pieces, 32, with_context=False)
    assert tagged.labels[0][0] == 1 and tagged.labels[0][-2:].tolist() == [-1, -1]
    assert tagged.token_types[0].tolist() == [0] * (len(tagged.input_ids[0]) - 1) + [2]


@pytest.mark.slow
def test_tokens_are_predicted_from_all_other_tokens(pieces):
    model = BertForMaskedLM(dataclasses.replace(TINY, max_position_embeddings=32))
    params = random_params(model, TINY)
    ids, _ = pieces.encode("the ship found the anchor")
    framed = pieces.framed(ids)

    def scores(ids):
        rows = [likelihood.PredictedRow(0, ids, [place], [framed[place]]) for place in range(len(framed) - 2)]
        return [likelihood.log_likelihoods_of_rows(model, params, pieces, [row], 1)[0] for row in rows]

    alone = scores(framed)
    changed = scores([*framed[:3], 7 + framed[3] % 70, *framed[4:]])
    differs = [not np.isclose(a, b, atol=1e-6) for a, b in zip(alone, changed)]
    assert differs == [place != 3 for place in range(len(framed) - 2)]
    whole = next(likelihood.log_likelihoods(model, params, pieces, ["the ship found the anchor"]))
    np.testing.assert_allclose(whole, sum(alone), rtol=1e-5)

    text = "the [MASK] found [MASK] anchor"
    (filled,) = fill_masks(model, params, pieces, [text], top_k=PIECES)
    assert len(filled.masks) == 2
    np.testing.assert_allclose([sum(p for _, p in mask) for mask in filled.masks], 1, rtol=1e-4)
    measured = bits_per_byte.bits_per_byte(model, params, pieces, ["the ship found"], [[False, True, False]], 32)
    assert measured["words"] == 1 and measured["bits_per_byte"] > 0


# Checkpoints.


@pytest.fixture(scope="module")
def folder(pieces, tmp_path_factory):
    """A folder of transformers with random params."""
    made = tmp_path_factory.mktemp("xlnet") / "folder"
    huggingface.write(made, TINY, random_params(BertForMaskedLM(TINY), TINY), pieces)
    return made


def test_the_tokenizer_is_read_without_the_sentencepiece_model(folder, pieces, tmp_path):
    for name in ("tokenizer.json", "tokenizer_config.json"):
        (tmp_path / name).write_bytes((folder / name).read_bytes())
    settings = json.loads((tmp_path / "tokenizer_config.json").read_text())
    assert settings["padding_side"] == "left"  # otherwise transformers would pool padding
    again = hf_tokenizer.read_folder_tokenizer(tmp_path)
    assert again.kind == "unigram" and again.special_ids == pieces.special_ids
    for text in ("the ship", "An anchor near the harbour."):
        (ids,), (expected_ids,) = again.encode_ids([text]), pieces.encode_ids([text])
        assert again.framed(ids, ids) == pieces.framed(expected_ids, expected_ids)
