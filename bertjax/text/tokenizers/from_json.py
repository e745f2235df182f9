"""Tokenizers that do what their tokenizer.json says, by the tokenizers library."""

import abc
import json
from collections.abc import Sequence
from typing import Any

from etils import epath

from bertjax.common.errors import UserError
from bertjax.common.files import parse_json, write_whole
from bertjax.text.tokenizers import json_file
from bertjax.text.tokenizers.interface import SPECIAL_PIECES, XLNET, Joined, Tokenizer, read_file

END_OF_TEXT = "<|endoftext|>"  # all special pieces of GPT-2
FAIRSEQ = ("<pad>", "<unk>", "<s>", "</s>", "<mask>")  # those of RoBERTa, XLM-R and CamemBERT; XLNet has them as well
EUROBERT = ("<|pad|>", "<|end_of_text|>", "<|begin_of_text|>", "<|end_of_text|>", "<|mask|>")  # knows all bytes
ALIASES = {name: (*theirs, END_OF_TEXT) for name, *theirs in zip(SPECIAL_PIECES, XLNET, FAIRSEQ, EUROBERT)}
ALIASES["[PAD]"] += ("<|end_of_text|>",)


class FromJson(Tokenizer):
    """The file may have any normalizer, and added pieces.

    Added pieces are kept whole wherever they occur in a text. Special pieces are not: their names are text.
    """

    filename = "tokenizer.json"
    older: tuple[str, ...]  # the files of which folders without a tokenizer.json have one

    def __init__(self, content: bytes, path: str = "(given)"):
        from tokenizers import Tokenizer as HuggingFaceTokenizer

        try:
            found = parse_json(content, json_file.TokenizerJson)
            self._check(path, found)
            self._tokenizer = HuggingFaceTokenizer.from_str(content.decode())
        except UserError:
            raise
        except Exception as error:  # the library's own has no other type
            raise UserError(f"tokenizer.path: {path} is not a tokenizer.json ({error})") from None
        vocabulary = self._tokenizer.get_vocab(with_added_tokens=True)
        super().__init__(json_file.ordered(vocabulary, path), path, aliases=ALIASES)
        special, added = {self.pieces[i] for i in self.special_ids}, found.get("added_tokens", ())
        self.added = {token["content"] for token in added} | special
        self._tokenizer.encode_special_tokens = True  # as text
        special |= {token["content"] for token in added if token.get("special")}
        if any(vocabulary[piece] in self._tokenizer.encode(piece, add_special_tokens=False).ids for piece in special):
            # Unigrams have them among the pieces of words. A file may also add them as pieces that are not special.
            self._tokenizer = HuggingFaceTokenizer.from_str(json_file.without_pieces(content, special))
            self._tokenizer.encode_special_tokens = True
        if self.cls_id != self.sep_id:  # GPT-2's surround nothing
            names = self.pieces[self.cls_id], self.pieces[self.sep_id]
            template = json_file.read_template(path, found.get("post_processor"), *names)
            self.begin, self.between, self.end = (tuple(map(self.pieces.index, part)) for part in template)
        self.lowercase = any(
            step.get("type") == "Lowercase" for step in json_file.steps_of(found.get("normalizer"), "normalizers")
        )
        self._tokenizer.no_padding()
        self._tokenizer.no_truncation()
        self._content = content

    @classmethod
    def load(cls, path: epath.PathLike) -> "FromJson":
        path = epath.Path(path)
        return cls(cls._of_older(path) if path.name in cls.older else read_file(path), str(path))

    @staticmethod
    @abc.abstractmethod
    def _of_older(path: epath.Path) -> bytes:
        """Returns what a file of `older` is as a tokenizer.json. Raises `UserError` if it is not of this kind."""

    @staticmethod
    @abc.abstractmethod
    def _check(path, found: json_file.TokenizerJson) -> None:
        """Raises `UserError` unless a tokenizer.json is of this kind."""

    def _decoded(self, ids: Sequence[int]) -> str:
        pieces, decoder = [self.pieces[i] for i in ids], self._tokenizer.decoder
        return decoder.decode(pieces) if decoder else " ".join(pieces)

    def units(self, word: str) -> list[list[str]]:
        return json_file.units(self._tokenizer, f" {word}", self.unk_id)

    def parts(self, piece: str) -> list[int]:
        return [token.id for token in self._tokenizer.model.tokenize(piece)]

    def extended(self, joined: Sequence[Joined]) -> "FromJson":
        content = json.loads(self._content)
        known = set(self.pieces)
        new = [piece for piece in dict.fromkeys(each.piece for each in joined) if piece not in known]
        self._add(content["model"], new, joined)
        return type(self)(json.dumps(content, ensure_ascii=False).encode())

    @abc.abstractmethod
    def _add(self, model: dict[str, Any], new: Sequence[str], joined: Sequence[Joined]) -> None:
        """Adds new pieces to the model of a tokenizer.json, and how they are joined."""

    def save(self, folder: epath.PathLike) -> None:
        write_whole(epath.Path(folder) / self.filename, self._content)

    def to_huggingface(self) -> str:
        return self._content.decode()

    def _definition(self) -> bytes:
        return self._content
