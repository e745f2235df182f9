"""The interface of tokenizers."""

import abc
import hashlib
import itertools
from collections.abc import Collection, Mapping, Sequence
from typing import NamedTuple

import numpy as np
from etils import epath

from bertjax.common import surrogates
from bertjax.common.errors import UserError
from bertjax.common.files import read_whole

SPECIAL_TOKENS = ("[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]")
XLNET = ("<pad>", "<unk>", "<cls>", "<sep>", "<mask>")  # the special tokens of XLNet, in the same order


class Joined(NamedTuple):
    """A new token and its two parts, which may be new as well."""

    token: str
    left: str
    right: str


class Encoding(NamedTuple):
    """The ids of a text, and for each id the range of characters (start, end) that it covers."""

    ids: list[int]
    offsets: list[tuple[int, int]]


class Tokenizer(abc.ABC):
    """Encodes texts to ids of tokens.

    Encoding never produces special tokens from text: a literal "[SEP]" is encoded character by character.

    Attributes:
      kind: the value of `config.tokenizer.kind`.
      filename: the name of the file that `save` writes.
      lowercase: whether the tokenizer folds case. WordPiece has an argument for it; other files contain it.
      added: special tokens, and tokens that stay whole wherever a text contains them.
      extends: whether the kind supports `extended`.
      keeps_parts: whether the two parts of a token must be in the vocabulary as well.
      space: the character for a space in a token; "" if tokens contain no spaces, so that a word has the same tokens
        with and without a space before it.
      begins_with_space: whether the tokenizer adds a space to every text that does not begin with a space.
      pieces: the tokens by id.
      huggingface_class: the class of transformers that reads `to_huggingface`.
      special_ids: the ids of `SPECIAL_TOKENS`, in this order.
      begin: ids of the special tokens before a text.
      between: ids of the special tokens between the two texts of a pair.
      end: ids of the special tokens after the last text.
    """

    kind: str
    filename: str
    lowercase: bool
    added: Collection[str] = SPECIAL_TOKENS
    extends: bool = True
    keeps_parts: bool = False
    space: str = ""
    begins_with_space: bool = True
    huggingface_class: str = "PreTrainedTokenizerFast"

    def __init__(
        self,
        tokens: Sequence[str],
        path: str,
        aliases: Mapping[str, Sequence[str]] | None = None,
        names: Sequence[str] = SPECIAL_TOKENS,
    ):
        self.pieces = list(tokens)
        if not self.pieces:
            raise UserError(f"tokenizer.path: the vocabulary {path} is empty")
        ids = {token: i for i, token in enumerate(self.pieces)}
        special = {
            name: next((ids[alias] for alias in (name, *(aliases or {}).get(name, ())) if alias in ids), -1)
            for name in names
        }
        if missing := [name for name, number in special.items() if number < 0]:
            raise UserError(f"tokenizer.path: the vocabulary {path} lacks {', '.join(missing)}, which BERT needs")
        self.special_ids = tuple(special.values())
        self.pad_id, self.unk_id, self.cls_id, self.sep_id, self.mask_id = self.special_ids
        self.begin: tuple[int, ...] = (self.cls_id,)
        self.between: tuple[int, ...] = (self.sep_id,)
        self.end: tuple[int, ...] = (self.sep_id,)

    def framed(self, first: Sequence[int], second: Sequence[int] | None = None) -> list[int]:
        """Returns the ids of a text, or of a pair of texts, with the special tokens before, between and after them."""
        pair = () if second is None else (*self.between, *second)
        return [*self.begin, *first, *pair, *self.end]

    def token_types(self, size: int, second: int = 0) -> np.ndarray:
        """Returns the token types of a `framed` text or pair.

        Args:
          size: the number of tokens.
          second: the number of tokens of the second text and of the special tokens after it.

        Returns:
          int32 `[size]`: 1 for the last `second` tokens, otherwise 0. A [CLS] at the end has type 2.
        """
        types = np.repeat(np.array([0, 1], np.int32), [size - second, second])
        if self.ends_with_cls:
            types[-1:] = 2
        return types

    @property
    def ends_with_cls(self) -> bool:
        """Whether [CLS] is the last token, as in XLNet, and not the first."""
        return not self.begin

    def cls_place(self, size: int) -> int:
        """Returns the position of [CLS] among the `size` tokens of a `framed` text or pair."""
        return size - 1 if self.ends_with_cls else 0

    @property
    def vocab_size(self) -> int:
        """The number of tokens."""
        return len(self.pieces)

    @property
    def fingerprint(self) -> str:
        """A hash that changes if the same text may be encoded differently."""
        return hashlib.sha256(self._definition()).hexdigest()[:16]

    @property
    @abc.abstractmethod
    def continues_word(self) -> np.ndarray:
        """`[vocab_size]` booleans: True if the token continues the word of the previous token."""

    def encode(self, text: str) -> Encoding:
        """Encodes a text. U+FFFD replaces lone surrogates, here and in `encode_ids`."""
        return self._encode(surrogates.replaced(text))

    def encode_ids(self, texts: Sequence[str]) -> list[list[int]]:
        """Encodes many texts to ids without offsets; faster than `encode`."""
        return self._encode_ids([surrogates.replaced(text) for text in texts])

    @abc.abstractmethod
    def _encode(self, text: str) -> Encoding:
        """Encodes a text without lone surrogates."""

    @abc.abstractmethod
    def _encode_ids(self, texts: list[str]) -> list[list[int]]:
        """Encodes texts without lone surrogates."""

    def encode_following(self, texts: Sequence[str]) -> list[list[int]]:
        """Encodes words or sentences that follow other text, so that a space precedes each of them."""
        return self.encode_ids(texts)

    def encode_flat(self, texts: Sequence[str]) -> tuple[np.ndarray, np.ndarray]:
        """Returns the concatenated ids of sentences and the number of ids of each sentence: `[ids]`, `[texts]`."""
        encoded = self.encode_following(texts)
        sizes = np.fromiter(map(len, encoded), np.int64, len(encoded))
        return np.fromiter(itertools.chain.from_iterable(encoded), np.int32, sizes.sum()), sizes

    def encode_with_masks(self, text: str) -> list[int]:
        """Returns the ids of a text in which each "[MASK]", with the space before it, becomes the mask token."""
        *before, last = text.split("[MASK]")
        ids: list[int] = []
        for part in before:
            ids += [*(self.encode(part.rstrip()).ids if part.strip() else []), self.mask_id]
        return ids + (self.encode(last).ids if last else [])

    @abc.abstractmethod
    def decode(self, ids: Sequence[int]) -> str:
        """Returns the text of ids, with the names of special tokens."""

    def shown(self, token: int) -> str:
        """Returns a readable form of the token with an id."""
        return self.pieces[token]

    @property
    def cannot_extend(self) -> str:
        """The reason why `extended` raises for this vocabulary; "" if it does not."""
        return ""

    # `text.vocabulary_extension` uses these methods of the kinds whose `extends` is True.

    def units(self, word: str) -> list[list[str]]:
        """Returns the tokens of a word that follows another word, without unknown tokens.

        One list contains the tokens of one unit. New tokens do not cross the boundaries of units.
        """
        raise NotImplementedError

    def parts(self, token: str) -> list[int]:
        """Returns the ids of the tokens into which this tokenizer splits a token of another tokenizer."""
        raise NotImplementedError

    def join(self, left: str, right: str) -> str:
        """Returns the token that consists of two consecutive tokens of a unit."""
        return left + right

    def extended(self, joined: Sequence[Joined]) -> "Tokenizer":
        """Returns a tokenizer with new tokens at the end. Raises `UserError` if this one cannot have more tokens."""
        raise NotImplementedError

    @abc.abstractmethod
    def save(self, folder: epath.PathLike) -> None:
        """Writes the file `filename` to a folder."""

    @abc.abstractmethod
    def to_huggingface(self) -> str:
        """Returns the content of a tokenizer.json that gives the same ids and adds [CLS] and [SEP]."""

    @abc.abstractmethod
    def _definition(self) -> bytes:
        """Returns bytes that determine the ids of every text."""


def read_tokenizer_file(path: epath.PathLike) -> bytes:
    """Returns the content of a file. Raises `UserError` if the file is missing."""
    path = epath.Path(path)
    if not path.exists() or path.is_dir():
        raise UserError(f"tokenizer.path: no such file {str(path)!r}; correct the path")
    return read_whole(path)
