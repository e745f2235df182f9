"""Tokenizes text: WordPiece, SentencePiece, bytes, byte-level BPE, unigrams; behind one interface."""

from typing import Literal

from etils import epath

from bertjax.common.errors import UserError
from bertjax.common.files import parse_json
from bertjax.text.tokenizers.byte_level import BPE, Bytes
from bertjax.text.tokenizers.interface import SPECIAL_PIECES, XLNET, Encoding, Tokenizer, read_file
from bertjax.text.tokenizers.json_file import TokenizerJson, check_added
from bertjax.text.tokenizers.sentencepiece import SentencePiece
from bertjax.text.tokenizers.unigram import Unigram
from bertjax.text.tokenizers.wordpiece import WordPiece

KINDS = {cls.kind: cls for cls in (WordPiece, SentencePiece, Bytes, BPE, Unigram)}
Kind = Literal[*KINDS]  # as our files name it


def kind_of(path: epath.PathLike) -> str:
    """Returns the kind of tokenizer that a file of a checkpoint is of, by its name, or a tokenizer.json's content."""
    path = epath.Path(path)
    if path.name == BPE.filename:
        try:
            kind = parse_json(read_file(path), TokenizerJson)["model"].get("type")
        except ValueError as error:
            raise UserError(f"tokenizer.path: {path} is not a tokenizer.json ({error})") from None
        return {"BPE": BPE.kind, "Unigram": Unigram.kind}.get(kind, WordPiece.kind)
    names = {SentencePiece.filename: SentencePiece, Bytes.filename: Bytes}
    names |= {name: cls for cls in (BPE, Unigram) for name in cls.older}
    return names.get(path.name, WordPiece).kind


def load(kind: str, path: epath.PathLike, lowercase: bool = True) -> Tokenizer:
    """Loads a tokenizer from a `vocab.txt`, a `tokenizer.json` or its older files, or a `.model`; checks a `bytes.txt`.

    Raises `UserError` if it is invalid.
    """
    return WordPiece.load(path, lowercase) if kind == WordPiece.kind else KINDS[kind].load(path)


__all__ = [
    "BPE",
    "KINDS",
    "SPECIAL_PIECES",
    "XLNET",
    "Bytes",
    "Encoding",
    "Kind",
    "SentencePiece",
    "Tokenizer",
    "Unigram",
    "WordPiece",
    "check_added",
    "kind_of",
    "load",
]
