"""Pieces of the bytes of UTF-8, by the tokenizers library: the bytes alone, and BPE of the form of GPT-2."""

import functools
import json
from collections.abc import Sequence
from typing import Any

import msgspec
import numpy as np
from etils import epath

from bertjax.common.errors import UserError
from bertjax.common.files import write_whole
from bertjax.text.tokenizers import json_file, legacy_files
from bertjax.text.tokenizers.from_json import FromJson
from bertjax.text.tokenizers.interface import SPECIAL_PIECES, Encoding, Joined, Tokenizer, read_file

SPACE = "\u0120"  # how a space is written in a piece


class ByteLevel(Tokenizer):
    """Words have the space before them in their first piece. Words and sentences of a text always get one."""

    space = SPACE

    def _encode(self, text: str) -> Encoding:
        encoding = self._tokenizer.encode(text, add_special_tokens=False)
        return Encoding(encoding.ids, encoding.offsets)

    def _encode_ids(self, texts: list[str]) -> list[list[int]]:
        return [e.ids for e in self._tokenizer.encode_batch_fast(texts, add_special_tokens=False)]

    def encode_following(self, texts: Sequence[str]) -> list[list[int]]:
        return self.encode_ids([f" {text}" if text and not text[0].isspace() else text for text in texts])

    def decode(self, ids: Sequence[int]) -> str:
        text = self._decoded(ids)
        return text.removeprefix(" ") if self.begins_with_space else text

    def shown(self, piece: int) -> str:
        """Returns the text of a piece, or its bytes as GPT-2 writes them if they are no whole letters."""
        text = self._decoded([piece])
        return self.pieces[piece] if "\ufffd" in text or not text.strip() else text

    def _decoded(self, ids: Sequence[int]) -> str:
        return self._tokenizer.decode(list(ids), skip_special_tokens=False)


class Bytes(ByteLevel):
    """The 256 bytes alone. Each text begins with a space."""

    kind = "bytes"
    filename = "bytes.txt"
    extends = False
    lowercase = False

    def __init__(self):
        from tokenizers import pre_tokenizers

        super().__init__([*SPECIAL_PIECES, *sorted(pre_tokenizers.ByteLevel.alphabet())], "of bytes")
        self._tokenizer = self._new()

    @classmethod
    def load(cls, path: epath.PathLike) -> "Bytes":
        """Checks that a file, as `save` writes it, has the same pieces."""
        found = cls()
        if read_file(path) != found._definition():
            raise UserError(f"tokenizer.path: {path} is not what a tokenizer of bytes has; leave the path empty")
        return found

    def _new(self):
        return new_bpe({piece: i for i, piece in enumerate(self.pieces)})

    @functools.cached_property
    def continues_word(self) -> np.ndarray:
        space = self.encode("a").ids[0]
        return np.array([i >= len(SPECIAL_PIECES) and i != space for i in range(self.vocab_size)])

    def save(self, folder: epath.PathLike) -> None:
        write_whole(epath.Path(folder) / self.filename, self._definition())

    def to_huggingface(self) -> str:
        return json_file.with_special_pieces(self._new(), mask_takes_space=True)

    def _definition(self) -> bytes:
        return "".join(f"{piece}\n" for piece in self.pieces).encode()


class BPE(FromJson, ByteLevel):
    """Byte-level BPE: learnt here, GPT-2's, RoBERTa's, ModernBERT's, EuroBERT's.

    A text begins with a space if the file adds one (those learnt here do). GPT-2's "<|endoftext|>" is all special
    pieces in one.
    """

    kind = "bpe"
    older = ("vocab.json",)  # with merges.txt
    keeps_parts = True

    def __init__(self, content: bytes, path: str = "(given)"):
        from tokenizers import processors

        super().__init__(content, path)
        self._tokenizer.post_processor = processors.ByteLevel(trim_offsets=True)  # a space is no part of its word

    @functools.cached_property
    def continues_word(self) -> np.ndarray:
        return np.array([not piece.startswith(SPACE) and piece not in self.added for piece in self.pieces])

    @functools.cached_property
    def begins_with_space(self) -> bool:
        return json_file.adds_prefix_space(json.loads(self._content))

    def _add(self, model: dict[str, Any], new: Sequence[str], joined: Sequence[Joined]) -> None:
        # With added pieces, which the library would else number anew after the larger vocabulary.
        model["vocab"] = {piece: number for number, piece in enumerate([*self.pieces, *new])}
        as_text = bool(model["merges"]) and isinstance(model["merges"][0], str)
        pairs = [[each.left, each.right] for each in joined]
        model["merges"] += map(" ".join, pairs) if as_text else pairs

    @staticmethod
    def _of_older(path: epath.Path) -> bytes:
        return legacy_files.bpe_json(path)

    @staticmethod
    def _check(path, found: json_file.TokenizerJson) -> None:
        """Raises `UserError` unless a tokenizer.json is a byte-level BPE whose encoding is always the same."""
        if (kind := found["model"].get("type")) != "BPE":
            raise UserError(f"tokenizer.path: {path} is not a byte-level BPE as GPT-2's, but {kind}")
        model = msgspec.convert(found["model"], _Model)
        for name in ("dropout", "continuing_subword_prefix", "end_of_word_suffix", "byte_fallback"):
            if value := getattr(model, name):
                raise UserError(f"tokenizer.path: {path}: model.{name} = {value!r} is not supported; supported: null")
        last = json_file.steps_of(found.get("pre_tokenizer"), "pretokenizers")[-1:]
        if not last or last[0].get("type") != "ByteLevel":
            kind = last[0].get("type") if last else "null"
            raise UserError(f"tokenizer.path: {path}: pre_tokenizer {kind} is not supported; supported: 'ByteLevel'")


def new_bpe(vocabulary: dict[str, int]):
    """Makes a byte-level BPE without merges of the tokenizers library, which adds a space before each text."""
    from tokenizers import Tokenizer as HuggingFaceTokenizer
    from tokenizers import decoders, models, pre_tokenizers

    tokenizer = HuggingFaceTokenizer(models.BPE(vocabulary, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=True)
    tokenizer.decoder = decoders.ByteLevel()
    return tokenizer


class _Model(msgspec.Struct):
    """What a byte-level BPE may not have; the library does the rest as the file says."""

    type: str
    dropout: float | None = None
    continuing_subword_prefix: str | None = None
    end_of_word_suffix: str | None = None
    byte_fallback: bool = False
