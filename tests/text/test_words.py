"""The words of raw text are those that BERT's tokenizer looks for pieces in."""

import itertools
import pathlib

import pytest

from bertjax.text.tokenizer import SPECIAL_PIECES, WordPiece
from bertjax.text.words import split_words


@pytest.mark.parametrize("text, words", [
    ('(John) "Rome/Berlin",', ["(", "John", ")", '"', "Rome", "/", "Berlin", '"', ","]),
    ("\u201cU.S.\u201d it\u2019s", ["\u201c", "U", ".", "S", ".", "\u201d", "it", "\u2019", "s"]),
    ("我住在北京。", ["我", "住", "在", "北", "京", "。"]),
    ("iPhone用户𠀀x", ["iPhone", "用", "户", "𠀀", "x"]),
    ("cafe\u0301 Émile ÉCOLE", ["cafe\u0301", "Émile", "ÉCOLE"]),  # accents in one character and in two
    ("a\tb\u00a0c\u3000d\r\ne", ["a", "b", "c", "d", "e"]),
    ("東京 タワー 한국어 ไทย", ["東", "京", "タワー", "한국어", "ไทย"]),
    ("\U0001f600\U0001f600 x", ["\U0001f600\U0001f600", "x"]),  # characters of two UTF-16 units, no punctuation
    ("in\u200bside \u200b end\x00", ["in\u200bside", "end"]),  # what the normalizer removes is no word
    ("[SEP] x", ["[", "SEP", "]", "x"]),
    ("$5+5=10", ["$", "5", "+", "5", "=", "10"]),
    (" \u200b\n", []),
    ("", []),
])  # fmt: skip
def test_words_and_their_places(text, words):
    places = split_words(text)
    assert [text[start:end] for start, end in places] == words
    assert all(end <= start for (_, end), (start, _) in itertools.pairwise(places))


@pytest.mark.parametrize("lowercase", [True, False])
def test_pieces_of_the_words_are_those_of_the_text(lowercase):
    """Also of a document with code, tables and marks."""
    letters = [chr(i) for i in range(33, 127)]
    tokenizer = WordPiece([*SPECIAL_PIECES, *letters, *("##" + x for x in letters)], lowercase)
    texts = (pathlib.Path(__file__).parents[2] / "docs/text.md").read_text().splitlines()
    texts.append("Straße/Zoë\u0308 北京x\u200by\u0085z (don't) \u2026")
    for text in texts:
        pieces = tokenizer.encode_ids([text[start:end] for start, end in split_words(text)])
        assert [*itertools.chain(*pieces)] == tokenizer.encode(text).ids and [] not in pieces
