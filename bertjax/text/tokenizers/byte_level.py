"""Byte-level tokenizers of the tokenizers library: the 256 bytes alone, and BPE as in GPT-2."""

import functools
import json
from collections.abc import Sequence
from typing import Any

import tokenizers
from etils import epath
from tokenizers import decoders, models, pre_tokenizers, processors

from bertjax.common.errors import UserError
from bertjax.common.files import write_whole
from bertjax.text.tokenizers import json_file, legacy_files
from bertjax.text.tokenizers.from_json import ExtendableFromJson, ReadsLegacyFiles
from bertjax.text.tokenizers.interface import SPECIAL_TOKENS, Joined, read_tokenizer_file
from bertjax.text.tokenizers.library_tokenizer import LibraryTokenizer

SPACE = "\u0120"  # a space in a token


class ByteLevel(LibraryTokenizer):
    """The first token of a word contains the space before it. Words and sentences of a text always get a space."""

    space = SPACE

    def encode_following(self, texts: Sequence[str]) -> list[list[int]]:
        """Encodes texts with a space before each, see `Tokenizer.encode_following`."""
        return self.encode_ids([f" {text}" if text and not text[0].isspace() else text for text in texts])

    def decode(self, ids: Sequence[int]) -> str:
        """Returns the text of ids, without the space that encoding adds."""
        text = self._decoded(ids)
        return text.removeprefix(" ") if self.begins_with_space else text

    def shown(self, token: int) -> str:
        """Returns the text of a token, or its bytes as GPT-2 writes them if they are not whole characters."""
        text = self._decoded([token])
        return self.pieces[token] if "\ufffd" in text or not text.strip() else text

    def _decoded(self, ids: Sequence[int]) -> str:
        return self._tokenizer.decode(list(ids), skip_special_tokens=False)


class Bytes(ByteLevel):
    """The 256 bytes alone. Each text begins with a space."""

    kind = "bytes"
    filename = "bytes.txt"
    extends = False
    lowercase = False

    def __init__(self) -> None:
        super().__init__([*SPECIAL_TOKENS, *sorted(pre_tokenizers.ByteLevel.alphabet())], "of bytes")
        self._tokenizer = self._new()

    @classmethod
    def load(cls, path: epath.PathLike) -> "Bytes":
        """Returns the tokenizer. Raises `UserError` if the file is not the file that `save` writes."""
        tokenizer = cls()
        if read_tokenizer_file(path) != tokenizer._definition():
            raise UserError(f"tokenizer.path: {path} is not the file of a tokenizer of bytes; leave the path empty")
        return tokenizer

    def _new(self) -> tokenizers.Tokenizer:
        return new_bpe({token: i for i, token in enumerate(self.pieces)})

    def save(self, folder: epath.PathLike) -> None:
        """Writes the tokens, one per line."""
        write_whole(epath.Path(folder) / self.filename, self._definition())

    def to_huggingface(self) -> str:
        """Returns a tokenizer.json, see `Tokenizer.to_huggingface`."""
        return json_file.with_special_tokens(self._new(), mask_takes_space=True)

    def _definition(self) -> bytes:
        return "".join(f"{token}\n" for token in self.pieces).encode()


class BPE(ExtendableFromJson, ReadsLegacyFiles, ByteLevel):
    """Byte-level BPE: learned by bertjax, or of GPT-2, RoBERTa, ModernBERT or EuroBERT.

    A text begins with a space if the file adds one, as the files that bertjax learns do. In GPT-2, "<|endoftext|>" is
    the only special token.
    """

    kind = "bpe"
    legacy_names = ("vocab.json",)  # with merges.txt
    keeps_parts = True

    def __init__(self, content: bytes, path: str = "(given)"):
        super().__init__(content, path)
        # The offsets of a word do not include the space before the word.
        self._tokenizer.post_processor = processors.ByteLevel(trim_offsets=True)

    @functools.cached_property
    def begins_with_space(self) -> bool:  # type: ignore[override]
        """Whether the file adds a space to a text that does not begin with one."""
        return json_file.adds_prefix_space(json.loads(self._content))

    @staticmethod
    def read_legacy(path: epath.Path) -> bytes:
        """Converts a vocab.json, see `legacy_files.bpe_json`."""
        return legacy_files.bpe_json(path)

    def _add(self, model: dict[str, Any], new: Sequence[str], joined: Sequence[Joined]) -> None:
        # Added tokens are listed too: otherwise the library gives them new ids after the larger vocabulary.
        model["vocab"] = {token: number for number, token in enumerate([*self.pieces, *new])}
        as_text = bool(model["merges"]) and isinstance(model["merges"][0], str)
        pairs = [[pair.left, pair.right] for pair in joined]
        model["merges"] += map(" ".join, pairs) if as_text else pairs

    @staticmethod
    def _check(path: epath.PathLike, content: json_file.TokenizerJson) -> None:
        """Raises `UserError` unless a tokenizer.json is a deterministic byte-level BPE."""
        if (kind := content["model"].get("type")) != "BPE":
            raise UserError(f"tokenizer.path: {path} is not a byte-level BPE as in GPT-2, but {kind}")
        json_file.check_bpe(path, content["model"])
        last = json_file.steps_of(content.get("pre_tokenizer"), "pretokenizers")[-1:]
        if (kind := last[0].get("type") if last else "null") != "ByteLevel":
            raise UserError(f"tokenizer.path: {path}: pre_tokenizer {kind} is not supported; supported: 'ByteLevel'")


def new_bpe(vocabulary: dict[str, int]) -> tokenizers.Tokenizer:
    """Returns a byte-level BPE of the tokenizers library without merges, which adds a space before each text."""
    tokenizer = tokenizers.Tokenizer(models.BPE(vocabulary, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=True)
    tokenizer.decoder = decoders.ByteLevel()
    return tokenizer
