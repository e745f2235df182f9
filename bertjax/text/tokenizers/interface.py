"""What all kinds of tokenizer have in common."""

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

SPECIAL_PIECES = ("[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]")
XLNET = ("<pad>", "<unk>", "<cls>", "<sep>", "<mask>")  # the same in XLNet's vocabularies


class Joined(NamedTuple):
    """A piece, and the two that it is joined of, which may be new as well."""

    piece: str
    left: str
    right: str


class Encoding(NamedTuple):
    """The ids of a text, and for each id the range of characters (start, end) that it covers."""

    ids: list[int]
    offsets: list[tuple[int, int]]


class Tokenizer(abc.ABC):
    """The interface of all kinds of tokenizer.

    Encoding never produces special pieces from text: a literal "[SEP]" is encoded character by character.
    """

    kind: str
    filename: str  # name of the file that `save` writes
    lowercase: bool  # set for WordPiece; the files of the others say it
    added: Collection[str] = SPECIAL_PIECES  # pieces that are no text, or that are kept whole wherever a text has them
    extends: bool = True  # it can have more pieces
    keeps_parts: bool = False  # a piece is made of two others, which must be pieces as well
    space: str = ""  # a space in a piece; empty: spaces are no part of pieces, so that words alone have the same pieces
    begins_with_space: bool = True  # a space is added to every text that begins with none

    def __init__(self, pieces: Sequence[str], path: str, aliases: Mapping[str, Sequence[str]] | None = None):
        self.pieces = list(pieces)
        ids = {piece: i for i, piece in enumerate(self.pieces)}
        names = [(name, *(aliases or {}).get(name, ())) for name in SPECIAL_PIECES]
        special_ids = [next((ids[name] for name in alternatives if name in ids), -1) for alternatives in names]
        missing = [name for name, i in zip(SPECIAL_PIECES, special_ids) if i < 0]
        if not self.pieces:
            raise UserError(f"tokenizer.path: the vocabulary {path} is empty")
        if missing:
            raise UserError(f"tokenizer.path: the vocabulary {path} lacks {', '.join(missing)}, which BERT needs")
        self.pad_id, self.unk_id, self.cls_id, self.sep_id, self.mask_id = special_ids
        # The special pieces before a text, between the texts of a pair, and after the last text.
        self.begin: tuple[int, ...] = (self.cls_id,)
        self.between: tuple[int, ...] = (self.sep_id,)
        self.end: tuple[int, ...] = (self.sep_id,)

    @property
    def special_ids(self) -> tuple[int, ...]:
        """The ids of `SPECIAL_PIECES`."""
        return self.pad_id, self.unk_id, self.cls_id, self.sep_id, self.mask_id

    def framed(self, first: Sequence[int], second: Sequence[int] | None = None) -> list[int]:
        """Returns the ids of a text, or of a pair of texts, and the special pieces before, between and after them."""
        return [*self.begin, *first, *((*self.between, *second) if second is not None else ()), *self.end]

    def token_types(self, size: int, second: int = 0) -> np.ndarray:
        """Returns the types of the tokens of a `framed` text or pair, `size` in all: int32, 0, and 1 of the last
        `second` tokens: those of a second text, and of the special pieces after it. A [CLS] at the end has type 2."""
        types = np.repeat(np.array([0, 1], np.int32), [size - second, second])
        if self.ends_with_cls:
            types[-1:] = 2
        return types

    @property
    def ends_with_cls(self) -> bool:
        """Whether [CLS] comes last, as in XLNet, and not first."""
        return not self.begin

    def cls_place(self, size: int) -> int:
        """Returns the place of [CLS] among the `size` tokens of a `framed` text or pair."""
        return size - 1 if self.ends_with_cls else 0

    @property
    def vocab_size(self) -> int:
        return len(self.pieces)

    @property
    def fingerprint(self) -> str:
        """A hash that changes if the same text may be encoded differently."""
        return hashlib.sha256(self._definition()).hexdigest()[:16]

    @property
    @abc.abstractmethod
    def continues_word(self) -> np.ndarray:
        """`[vocab_size]` booleans: True if the piece continues the word of the previous piece."""

    def encode(self, text: str) -> Encoding:
        """Encodes a text. U+FFFD takes the place of lone surrogates, here and in `encode_ids`."""
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
        """Encodes words or sentences that follow others in a text, so that a space comes before each."""
        return self.encode_ids(texts)

    def encode_flat(self, texts: Sequence[str]) -> tuple[np.ndarray, np.ndarray]:
        """Returns the ids of sentences, one after the other, and how many each has: `[ids]`, `[texts]`."""
        encoded = self.encode_following(texts)
        sizes = np.fromiter(map(len, encoded), np.int64, len(encoded))
        return np.fromiter(itertools.chain.from_iterable(encoded), np.int32, sizes.sum()), sizes

    @abc.abstractmethod
    def decode(self, ids: Sequence[int]) -> str: ...

    @property
    def cannot_extend(self) -> str:
        """Says what keeps this tokenizer from having more pieces; empty if nothing does."""
        return ""

    # What `text.vocabulary_extension` needs of the kinds whose `extends` is True.

    def units(self, word: str) -> list[list[str]]:
        """Returns the pieces of a word that follows another one, in the units that no piece reaches across. What is
        unknown of it is left out."""
        raise NotImplementedError

    def parts(self, piece: str) -> list[int]:
        """Returns the ids of the pieces that this tokenizer has in place of a piece of another one."""
        raise NotImplementedError

    def join(self, left: str, right: str) -> str:
        """Returns the piece that two make, one after the other in a unit."""
        return left + right

    def extended(self, joined: Sequence[Joined]) -> "Tokenizer":
        """Returns a tokenizer with more pieces after its own. Raises `UserError` if this one cannot have more."""
        raise NotImplementedError

    def shown(self, piece: int) -> str:
        """Returns a piece as people read it."""
        return self.pieces[piece]

    @abc.abstractmethod
    def save(self, folder: epath.PathLike) -> None: ...

    @abc.abstractmethod
    def to_huggingface(self) -> str:
        """Returns the content of a tokenizer.json that gives the same ids and adds [CLS] and [SEP]."""

    @abc.abstractmethod
    def _definition(self) -> bytes: ...

    def encode_with_masks(self, text: str) -> list[int]:
        """Returns the ids of a text in which each "[MASK]", with the space before it, becomes the mask token."""
        *before, last = text.split("[MASK]")
        ids = []
        for part in before:
            ids += [*(self.encode(part.rstrip()).ids if part.strip() else []), self.mask_id]
        return ids + (self.encode(last).ids if last else [])


def read_file(path: epath.PathLike) -> bytes:
    """Returns the content of a file. Raises `UserError` if there is none."""
    path = epath.Path(path)
    if not path.exists() or path.is_dir():
        raise UserError(f"tokenizer.path: no file {str(path)!r}")
    return read_whole(path)
