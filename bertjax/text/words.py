"""Splits raw text into words and punctuation marks, as BERT's tokenizer does before it looks for pieces."""

import functools


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


@functools.cache
def _steps():
    from tokenizers import normalizers, pre_tokenizers

    # Stripping accents, which would take them from the offsets, makes other words only at ≠, ≮, ≯ and a Greek accent.
    normalizer = normalizers.BertNormalizer(
        clean_text=True, handle_chinese_chars=True, strip_accents=False, lowercase=False
    )
    return normalizer, pre_tokenizers.BertPreTokenizer()
