"""Splits raw text into words and punctuation marks, as BERT's tokenizer does before it looks for pieces."""

import functools
import unicodedata


def split_words(text: str) -> list[tuple[int, int]]:
    """Returns the start and end characters of each word of a text.

    White space separates words; each punctuation mark and each Chinese character is a word of its own. Characters that
    BERT's normalizer removes, such as control characters, are no words.
    """
    from tokenizers import PreTokenizedString

    normalizer, pre_tokenizer = _steps()
    split = PreTokenizedString(text)
    split.normalize(normalizer.normalize)
    pre_tokenizer.pre_tokenize(split)
    return [place for _, place, _ in split.get_splits("original", "char")]


def whole_characters(text: str, start: int, end: int) -> tuple[int, int]:
    """Returns a part of a text without white space around it, and with all marks of its characters.

    A tokenizer that composes or strips accents gives the place of a letter alone to the piece of the letter.
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


@functools.cache
def _steps():
    from tokenizers import normalizers, pre_tokenizers

    # Stripping accents, which would take them from the offsets, makes other words only at ≠, ≮, ≯ and a Greek accent.
    normalizer = normalizers.BertNormalizer(
        clean_text=True, handle_chinese_chars=True, strip_accents=False, lowercase=False
    )
    return normalizer, pre_tokenizers.BertPreTokenizer()
