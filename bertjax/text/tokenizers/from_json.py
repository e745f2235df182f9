"""Tokenizers that a tokenizer.json defines."""

import abc
import json
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar, Self

import tokenizers
from etils import epath

from bertjax.common.errors import UserError
from bertjax.common.files import parse_json, write_whole
from bertjax.text.tokenizers import json_file
from bertjax.text.tokenizers.interface import SPECIAL_TOKENS, XLNET, Joined, read_tokenizer_file
from bertjax.text.tokenizers.library_tokenizer import LibraryTokenizer

END_OF_TEXT = "<|endoftext|>"  # the only special token of GPT-2
FAIRSEQ = ("<pad>", "<unk>", "<s>", "</s>", "<mask>")  # RoBERTa, XLM-R and CamemBERT; XLNet has these tokens as well
EUROBERT = ("<|pad|>", "<|end_of_text|>", "<|begin_of_text|>", "<|end_of_text|>", "<|mask|>")  # no unknown bytes
ALIASES = {name: (*names, END_OF_TEXT) for name, *names in zip(SPECIAL_TOKENS, XLNET, FAIRSEQ, EUROBERT)}
ALIASES["[PAD]"] += ("<|end_of_text|>",)


class ReadsLegacyFiles(abc.ABC):
    """An ability of a `FromJson`: read the files of older versions of transformers.

    Attributes:
      legacy_names: names of files that replace a missing tokenizer.json.
    """

    legacy_names: ClassVar[tuple[str, ...]]

    @staticmethod
    @abc.abstractmethod
    def read_legacy(path: epath.Path) -> bytes:
        """Converts a file of `legacy_names` to the content of a tokenizer.json. Raises `UserError` if it is invalid."""


class FromJson(LibraryTokenizer):
    """A tokenizer.json with any normalizer, and with added tokens.

    Added tokens stay whole wherever they occur in a text. Special tokens do not: their names are text.

    Attributes:
      aliases: {special token: possible names of the token in the file, in this order}.
    """

    filename = "tokenizer.json"
    extends = False
    aliases: ClassVar[Mapping[str, Sequence[str]]] = ALIASES

    def __init__(self, content: bytes, path: str = "(given)"):
        try:
            fields = parse_json(content, json_file.TokenizerJson)
            self._check(path, fields)
            self._tokenizer = tokenizers.Tokenizer.from_str(content.decode())
        except UserError:
            raise
        except Exception as error:  # the library raises the base class
            raise UserError(f"tokenizer.path: {path} is not a tokenizer.json ({error})") from None
        vocabulary = self._tokenizer.get_vocab(with_added_tokens=True)
        super().__init__(json_file.ordered(vocabulary, path), path, aliases=self.aliases)
        special, added = {self.pieces[i] for i in self.special_ids}, fields.get("added_tokens", ())
        self.added = {token["content"] for token in added} | special
        self._tokenizer.encode_special_tokens = True  # encodes the names of special tokens as text
        special |= {token["content"] for token in added if token.get("special")}
        if any(vocabulary[token] in self._tokenizer.encode(token, add_special_tokens=False).ids for token in special):
            # A unigram model has special tokens among the tokens of words, and a file may add tokens without `special`.
            self._tokenizer = tokenizers.Tokenizer.from_str(json_file.without_tokens(content, special))
            self._tokenizer.encode_special_tokens = True
        if self.cls_id != self.sep_id:  # GPT-2 has no special tokens around a text
            names = self.pieces[self.cls_id], self.pieces[self.sep_id]
            template = json_file.read_template(path, fields.get("post_processor"), *names)
            self.begin, self.between, self.end = (tuple(map(self.pieces.index, part)) for part in template)
        steps = json_file.steps_of(fields.get("normalizer"), "normalizers")
        self.lowercase = any(step.get("type") == "Lowercase" for step in steps)
        self._tokenizer.no_padding()
        self._tokenizer.no_truncation()
        self._content = content

    @classmethod
    def load(cls, path: epath.PathLike) -> Self:
        """Reads a tokenizer.json, or an older file, see `ReadsLegacyFiles`. Raises `UserError` if it is invalid."""
        path = epath.Path(path)
        if issubclass(cls, ReadsLegacyFiles) and path.name in cls.legacy_names:
            return cls(cls.read_legacy(path), str(path))
        return cls(read_tokenizer_file(path), str(path))

    @staticmethod
    @abc.abstractmethod
    def _check(path: epath.PathLike, content: json_file.TokenizerJson) -> None:
        """Raises `UserError` unless a tokenizer.json is of this kind."""

    def _decoded(self, ids: Sequence[int]) -> str:
        tokens, decoder = [self.pieces[i] for i in ids], self._tokenizer.decoder
        return decoder.decode(tokens) if decoder else " ".join(tokens)

    def parts(self, token: str) -> list[int]:
        """Returns the ids of the parts of a token, see `Tokenizer.parts`."""
        return [part.id for part in self._tokenizer.model.tokenize(token)]

    def steps(self, part: str) -> list[dict[str, Any]]:
        """Returns the steps of the `normalizer` or of the `pre_tokenizer` of the file."""
        plural = {"normalizer": "normalizers", "pre_tokenizer": "pretokenizers"}[part]
        return json_file.steps_of(json.loads(self._content).get(part), plural)

    def save(self, folder: epath.PathLike) -> None:
        """Writes the tokenizer.json."""
        write_whole(epath.Path(folder) / self.filename, self._content)

    def to_huggingface(self) -> str:
        """Returns the tokenizer.json."""
        return self._content.decode()

    def _definition(self) -> bytes:
        return self._content


class ExtendableFromJson(FromJson):
    """A `FromJson` that can get new tokens."""

    extends = True

    def extended(self, joined: Sequence[Joined]) -> Self:
        """Returns a tokenizer with new tokens, see `Tokenizer.extended`."""
        content, known = json.loads(self._content), set(self.pieces)
        new = [token for token in dict.fromkeys(pair.token for pair in joined) if token not in known]
        self._add(content["model"], new, joined)
        return type(self)(json.dumps(content, ensure_ascii=False).encode())

    @abc.abstractmethod
    def _add(self, model: dict[str, Any], new: Sequence[str], joined: Sequence[Joined]) -> None:
        """Adds new tokens, and the pairs that form them, to the model of a tokenizer.json."""
