"""Tokenizers that the tokenizers library computes."""

import functools
import itertools
from collections.abc import Iterable

import numpy as np
import tokenizers

from bertjax.text.tokenizers.interface import Encoding, Tokenizer


class LibraryTokenizer(Tokenizer):
    """Encodes with a tokenizer of the tokenizers library, which subclasses build."""

    _tokenizer: tokenizers.Tokenizer

    @functools.cached_property
    def continues_word(self) -> np.ndarray:
        """`[vocab_size]` booleans: True for tokens that do not begin with a space and are not special or added."""
        return np.array([not token.startswith(self.space) and token not in self.added for token in self.pieces])

    def _encode(self, text: str) -> Encoding:
        encoding = self._tokenizer.encode(text, add_special_tokens=False)
        return Encoding(encoding.ids, encoding.offsets)

    def _encode_ids(self, texts: list[str]) -> list[list[int]]:
        return [encoding.ids for encoding in self._tokenizer.encode_batch_fast(texts, add_special_tokens=False)]

    def units(self, word: str) -> list[list[str]]:
        """Returns the tokens of a word, see `Tokenizer.units`."""
        text = f" {word}" if self.space else word
        if self._tokenizer.normalizer is not None:
            text = self._tokenizer.normalizer.normalize_str(text)
        units = self._tokenizer.pre_tokenizer.pre_tokenize_str(text)
        runs = (known_runs(self._tokenizer.model.tokenize(unit), self.unk_id) for unit, _ in units)
        return list(itertools.chain.from_iterable(runs))


def known_runs(tokens: Iterable[tokenizers.Token], unknown: int) -> list[list[str]]:
    """Returns the tokens between unknown tokens, one list for each run of known tokens."""
    runs = itertools.groupby(tokens, key=lambda token: token.id != unknown)
    return [[token.value for token in run] for is_known, run in runs if is_known]
