"""Splits raw text into words and punctuation marks, as the tokenizer of BERT does first, and joins words to a text."""

import re
import unicodedata
from collections.abc import Mapping, Sequence
from typing import Any

from tokenizers import PreTokenizedString, normalizers, pre_tokenizers

JOINS = TEXT, SPACES = "text", "spaces"  # the values of `config.data.join`
# Letters of scripts without spaces between words: Thai, Lao, Tibetan, Burmese, Khmer, kana and bopomofo, Chinese
# characters. A letter with its marks counts as a word.
UNSPACED = (
    "\u0e01-\u0e2e\u0e2f-\u0e33\u0e40-\u0e46\u0e81-\u0eb0\u0eb2\u0eb3\u0ebd-\u0ec6\u0edc-\u0edf\u0f40-\u0f6c"
    "\u1000-\u102a\u103f\u1780-\u17b3\u3005-\u3007\u3041-\u3096\u309d-\u309f\u30a1-\u30fa\u30fc-\u30ff\u3105-\u312f"
    "\u3400-\u4dbf\u4e00-\u9fff\uf900-\ufaff\uff66-\uff9d\U00020000-\U0003ffff"
)
MARKS = (
    "\u0e31\u0e34-\u0e3a\u0e47-\u0e4e\u0eb1\u0eb4-\u0ebc\u0ec8-\u0ece\u0f71-\u0fbc\u102b-\u103e\u17b4-\u17d3"
    "\u3099\u309a"  # marks of kana
)
UNSPACED_PUNCTUATION = "\u3001-\u3003\u3008-\u3011\u3014-\u301f\uff01-\uff0f\uff1a-\uff20\uff3b-\uff40\uff5b-\uff65"
# Characters of words that `join_words` joins to the previous word, or to the next word.
CLOSING = frozenset(",.;:!?)]}%\u2026\u2019\u201d\u00bb\u203a\u3001\u3002\uff0c\uff0e\uff1a\uff1b\uff01\uff1f\uff09")
OPENING = frozenset("([{$\u00a3\u201c\u2018\u00ab\u2039\u201e\u201a\u00bf\u00a1\uff08")
QUOTES = ("'", '"')
ENDINGS = ("s", "t", "d", "m", "ll", "re", "ve")  # English endings after an apostrophe


# Accents are not stripped, because stripping changes offsets. Words differ only at ≠, ≮, ≯ and a Greek accent.
_NORMALIZER = normalizers.BertNormalizer(
    clean_text=True, handle_chinese_chars=True, strip_accents=False, lowercase=False
)


def split_words(text: str) -> list[tuple[int, int]]:
    """Returns the start and end characters of each word of a text.

    White space separates words. Each punctuation mark and each Chinese character is one word. Characters that the
    normalizer of BERT removes, such as control characters, do not belong to words.
    """
    split = PreTokenizedString(text)
    split.normalize(_NORMALIZER.normalize)
    pre_tokenizers.BertPreTokenizer().pre_tokenize(split)
    return [place for _, place, _ in split.get_splits("original", "char")]


def whole_characters(text: str, start: int, end: int) -> tuple[int, int]:
    """Returns the range of a part of a text without surrounding white space, and with all marks of its characters.

    If a tokenizer composes or strips accents, the range of a token contains a letter without the marks of the letter.
    """
    while start < end and text[start].isspace():
        start += 1
    while start < end and text[end - 1].isspace():
        end -= 1
    while 0 < start < end and _is_mark(text[start]):
        start -= 1
    while start < end < len(text) and _is_mark(text[end]):
        end += 1
    return start, end


def _is_mark(character: str) -> bool:
    """Returns whether a character is an accent, or a vowel or a final consonant of a Korean syllable."""
    return not character.isascii() and (
        unicodedata.category(character).startswith("M") or "\u1160" <= character <= "\u11ff"
    )


def join_of(settings: Mapping[str, Any]) -> str:
    """Returns the `data.join` of the settings of a run.

    The default is `SPACES` for a run of an older version, and `TEXT` for the folder of another library, whose settings
    are empty.
    """
    return settings["data"].get("join", SPACES) if "data" in settings else TEXT


def join_words(words: Sequence[str]) -> tuple[str, list[tuple[int, int]]]:
    """Joins words to a text. Returns the text, and the start and end characters of each word.

    A space comes between two words, except:
    - before words of `CLOSING` characters only, "''", and English endings ("'s", "n't");
    - after words of `OPENING` characters only, and "``";
    - inside straight quotes: every second quote of the same kind closes, and a quote that is the last word closes;
    - around an apostrophe between a word and one of `ENDINGS`;
    - between two letters or marks of scripts without spaces.
    """
    text, is_glued = "", False
    places: list[tuple[int, int]] = []
    open_quotes: set[str] = set()
    for before, word, after in zip(["", *words], words, [*words[1:], ""]):
        is_apostrophe = bool(before) and word in ("'", "\u2019") and after.lower() in ENDINGS
        is_quote = word in QUOTES and not is_apostrophe
        closes = is_apostrophe or word == "''" or CLOSING.issuperset(word) or bool(_ENDING.fullmatch(word))
        opens = word == "``" or OPENING.issuperset(word)
        if is_quote:
            closes = word in open_quotes or not after
            opens = not closes
            open_quotes ^= {word}
        if before and not (is_glued or closes or _UNSPACED_PAIR.fullmatch(before[-1:] + word[:1])):
            text += " "
        places.append((len(text), len(text) + len(word)))
        text += word
        is_glued = opens or is_apostrophe
    return text, places


_ENDING = re.compile(rf"['\u2019]({'|'.join(ENDINGS)})|n['\u2019]t", re.IGNORECASE)
_UNSPACED_PAIR = re.compile(rf"[{UNSPACED}{MARKS}{UNSPACED_PUNCTUATION}]{{2}}")
