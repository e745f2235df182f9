"""Splits raw text into words as BERT's pre-tokenizer does: at spaces, punctuation marks and Chinese characters."""

import functools

# The ideographs that BertNormalizer puts between spaces.
CHINESE = (
    r"[\x{4E00}-\x{9FFF}\x{3400}-\x{4DBF}\x{20000}-\x{2A6DF}\x{2A700}-\x{2B73F}\x{2B740}-\x{2B81F}"
    r"\x{2B920}-\x{2CEAF}\x{F900}-\x{FAFF}\x{2F800}-\x{2FA1F}]"
)


@functools.cache
def _splitter():
    from tokenizers import Regex, pre_tokenizers

    chinese = pre_tokenizers.Split(Regex(CHINESE), "isolated")
    return pre_tokenizers.Sequence([chinese, pre_tokenizers.BertPreTokenizer()])


def split_words(text: str) -> list[tuple[int, int]]:
    """Returns the characters `[start, end)` of each word; a punctuation mark or Chinese character is one by itself."""
    return [place for _, place in _splitter().pre_tokenize_str(text)]
