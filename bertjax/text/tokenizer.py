"""Tokenizers behind one interface: WordPiece, SentencePiece, bytes, byte-level BPE, BPE of characters, unigrams."""

from typing import Any, Literal

from etils import epath

from bertjax.common.errors import UserError
from bertjax.common.files import parse_json
from bertjax.text.tokenizers.byte_fallback import ByteFallback
from bertjax.text.tokenizers.byte_level import BPE, Bytes
from bertjax.text.tokenizers.from_json import ReadsLegacyFiles
from bertjax.text.tokenizers.interface import SPECIAL_TOKENS, XLNET, Encoding, Tokenizer, read_tokenizer_file
from bertjax.text.tokenizers.json_file import TokenizerJson
from bertjax.text.tokenizers.sentencepiece import SentencePiece
from bertjax.text.tokenizers.unigram import Unigram
from bertjax.text.tokenizers.wordpiece import WordPiece

__all__ = [
    "BPE", "SPECIAL_TOKENS", "XLNET", "ByteFallback", "Bytes", "Encoding", "SentencePiece", "Tokenizer", "Unigram",
    "WordPiece",
]  # fmt: skip

KINDS: dict[str, Any] = {cls.kind: cls for cls in (WordPiece, SentencePiece, Bytes, BPE, ByteFallback, Unigram)}
Kind = Literal[*KINDS]  # type: ignore[valid-type]  # the values of `kind` in files of bertjax


def tokenizer_kind_of(path: epath.PathLike) -> str:
    """Returns the kind of tokenizer of a file, by the name of the file or by the content of a tokenizer.json.

    Raises `UserError` for a damaged tokenizer.json.
    """
    path = epath.Path(path)
    if path.name == BPE.filename:
        try:
            model = parse_json(read_tokenizer_file(path), TokenizerJson)["model"]
        except ValueError as error:
            raise UserError(f"tokenizer.path: {path} is not a tokenizer.json ({error})") from None
        bpe = ByteFallback if model.get("byte_fallback") else BPE
        return {"BPE": bpe.kind, "Unigram": Unigram.kind}.get(str(model.get("type")), WordPiece.kind)
    names = {SentencePiece.filename: SentencePiece.kind, Bytes.filename: Bytes.kind}
    readers = [cls for cls in KINDS.values() if issubclass(cls, ReadsLegacyFiles)]
    names |= {name: cls.kind for cls in readers for name in cls.legacy_names}
    return names.get(path.name, WordPiece.kind)


def load_tokenizer(kind: str, path: epath.PathLike, lowercase: bool = True) -> Tokenizer:
    """Loads a tokenizer from a `vocab.txt`, a `tokenizer.json` or older files, a `.model`, or a `bytes.txt`.

    Args:
      kind: a key of `KINDS`.
      path: the file.
      lowercase: whether WordPiece lower-cases text, if the file does not state it.

    Raises:
      UserError: the file is missing or invalid.
    """
    return WordPiece.load(path, lowercase) if kind == WordPiece.kind else KINDS[kind].load(path)
