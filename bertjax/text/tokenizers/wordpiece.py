"""WordPiece tokenizers."""

import functools
import itertools
from collections.abc import Collection, Sequence
from typing import Any, TypedDict

import msgspec
import numpy as np
import tokenizers
from etils import epath
from tokenizers import decoders, models, normalizers, pre_tokenizers

from bertjax.common import surrogates
from bertjax.common.errors import UserError
from bertjax.common.files import note, parse_json, write_whole
from bertjax.text.tokenizers import json_file
from bertjax.text.tokenizers.interface import SPECIAL_TOKENS, Joined, read_tokenizer_file
from bertjax.text.tokenizers.library_tokenizer import LibraryTokenizer

MAX_WORD_LETTERS = 100  # longer words become [UNK], as in transformers; the limit of Google is 200
CONTINUES = "##"  # the prefix of tokens that continue a word
MAX_KNOWN_WORDS = 300_000  # words in the cache of a tokenizer, about 50 MB
# {part of a tokenizer.json: {field: the only supported value}}.
SUPPORTED_PARTS: dict[str, dict[str, Any]] = {
    "normalizer": {"type": "BertNormalizer", "clean_text": True, "handle_chinese_chars": True},
    "pre_tokenizer": {"type": "BertPreTokenizer"},
    "model": {"continuing_subword_prefix": CONTINUES, "max_input_chars_per_word": MAX_WORD_LETTERS},
}
# The special tokens of MPNet, in the order of `SPECIAL_TOKENS`. A published vocabulary has two names of the unknown
# token, and texts are encoded to [UNK]. It also has the names of BERT's special tokens, as tokens that no text has.
MPNET = ("<pad>", "[UNK]", "<s>", "</s>", "<mask>")
UNKNOWN = "<unk>"


class WordPiece(LibraryTokenizer):
    """Greedy longest-match tokens of words, as in google-research/bert; words over `MAX_WORD_LETTERS` become [UNK].

    The special tokens have the names of BERT or of MPNet, see `special_names`.
    If a vocab.txt has a token twice, the token has the id of its last line, as in Google's code and in transformers.
    """

    kind = "wordpiece"
    filename = "vocab.txt"
    huggingface_class = "BertTokenizer"

    def __init__(self, tokens: Sequence[str], lowercase: bool, path: str = "(given)"):
        self._lines = list(tokens)  # the lines of the file, for `save` and for the fingerprint
        tokens = _without_repetitions(self._lines, path)
        self._special = special_names(tokens)
        super().__init__(tokens, path, names=self._special)
        if self._special is not SPECIAL_TOKENS:
            self.added, self.between = {*self._special, UNKNOWN}, (self.sep_id, self.sep_id)
            self.huggingface_class = "MPNetTokenizer"
        self.lowercase = lowercase
        self._tokenizer = self._new_tokenizer()
        self._clear_cache()

    @classmethod
    def load(cls, path: epath.PathLike, lowercase: bool) -> "WordPiece":
        """Reads a `vocab.txt`, or a Hugging Face tokenizer.json, whose lower-casing overrides `lowercase`.

        Raises `UserError` if the file is invalid.
        """
        if str(path).endswith(".json"):
            return cls(*_read_huggingface(path), str(path))
        try:
            lines = read_tokenizer_file(path).decode("utf-8-sig").split("\n")
        except UnicodeDecodeError as error:
            raise UserError(f"tokenizer.path: {path} is not UTF-8 ({error.reason} at byte {error.start})") from None
        return cls([line.rstrip("\r") for line in (lines[:-1] if not lines[-1] else lines)], lowercase, str(path))

    @functools.cached_property
    def continues_word(self) -> np.ndarray:
        """`[vocab_size]` booleans: True for tokens that begin with "##"."""
        return np.array([token.startswith(CONTINUES) for token in self.pieces])

    def _clear_cache(self) -> None:
        self._known: dict[str, int] = {}  # {word: its index in the order of the first occurrence}
        self._known_ids: np.ndarray = np.empty(0, np.int32)
        self._known_sizes: np.ndarray = np.empty(0, np.int64)

    def encode_flat(self, texts: Sequence[str]) -> tuple[np.ndarray, np.ndarray]:
        """Returns concatenated ids, see `Tokenizer.encode_flat`. Caches ids by word, since tokens contain no space."""
        if len(self._known) > MAX_KNOWN_WORDS:
            self._clear_cache()
        words = [surrogates.replaced(text).split(" ") for text in texts]
        number_of, cached = self._known, len(self._known)
        codes = np.array([number_of.setdefault(word, len(number_of)) for text in words for word in text], np.int64)
        ids, sizes = self._encode_words(list(itertools.islice(number_of, cached, None)))
        self._known_ids = np.concatenate([self._known_ids, ids])
        self._known_sizes = np.concatenate([self._known_sizes, sizes])

        word_sizes = self._known_sizes[codes]
        ends = np.cumsum(word_sizes)
        begins = (np.cumsum(self._known_sizes) - self._known_sizes)[codes]
        source = np.repeat(begins - (ends - word_sizes), word_sizes) + np.arange(word_sizes.sum())
        last = np.cumsum([len(text) for text in words], dtype=np.int64) - 1
        return self._known_ids[source], np.diff(ends[last], prepend=0)

    def _encode_words(self, words: list[str]) -> tuple[np.ndarray, np.ndarray]:
        """Encodes words without spaces, 256 words as one text, which takes half the time of single words."""
        ids, sizes = [np.empty(0, np.int32)], [np.empty(0, np.int64)]
        texts = [words[first : first + 256] for first in range(0, len(words), 256)]
        encodings = self._tokenizer.encode_batch([" ".join(text) for text in texts], add_special_tokens=False)
        for text, encoding in zip(texts, encodings):
            begins = np.cumsum([0, *(len(word) + 1 for word in text)])[:-1]
            places = np.array([start for start, _ in encoding.offsets], np.int64)
            ids.append(np.array(encoding.ids, np.int32))
            sizes.append(np.bincount(np.searchsorted(begins, places, "right") - 1, minlength=len(text)))
        return np.concatenate(ids), np.concatenate(sizes)

    def parts(self, token: str) -> list[int]:
        """Returns the ids of the parts of a token, see `Tokenizer.parts`."""
        prefix, rest = token[: 2 * token.startswith(CONTINUES)], token.removeprefix(CONTINUES)
        parts = []
        while rest:
            ids = ((end, self._tokenizer.token_to_id(prefix + rest[:end])) for end in range(len(rest), 0, -1))
            end, number = next(((end, i) for end, i in ids if i is not None), (len(rest), self.unk_id))
            prefix, rest = CONTINUES, rest[end:]
            parts.append(number)
        return parts

    def join(self, left: str, right: str) -> str:
        """Returns a longer token, see `Tokenizer.join`."""
        return left + right.removeprefix(CONTINUES)

    def extended(self, joined: Sequence[Joined]) -> "WordPiece":
        """Returns a tokenizer with new tokens, see `Tokenizer.extended`."""
        return WordPiece([*self.pieces, *(pair.token for pair in joined)], self.lowercase)

    def decode(self, ids: Sequence[int]) -> str:
        """Returns the text of ids, see `Tokenizer.decode`."""
        return self._tokenizer.decode(list(ids), skip_special_tokens=False)

    def save(self, folder: epath.PathLike) -> None:
        """Writes a vocab.txt with the lines of the file that was read."""
        write_whole(epath.Path(folder) / self.filename, "".join(f"{token}\n" for token in self._lines))

    def to_huggingface(self) -> str:
        """Returns a tokenizer.json, see `Tokenizer.to_huggingface`."""
        takes_space, separators = self._special is not SPECIAL_TOKENS, len(self.between)
        return json_file.with_special_tokens(
            self._new_tokenizer(), self._special, mask_takes_space=takes_space, separators=separators
        )

    def _new_tokenizer(self) -> tokenizers.Tokenizer:
        vocabulary = {token: i for i, token in enumerate(self.pieces)}
        return new_wordpiece(self.lowercase, vocabulary, self.pieces[self.unk_id])

    def _definition(self) -> bytes:
        return "\n".join([f"wordpiece lowercase={bool(self.lowercase)}", *self._lines]).encode()


def _without_repetitions(lines: list[str], path: str) -> list[str]:
    """Returns the tokens of a vocab.txt by id, without empty tokens at the end.

    If a token is in the file twice, prints a note and replaces the first token by `no_token`.
    """
    while lines and lines[-1] in ("", json_file.no_token(len(lines) - 1)):
        lines = lines[:-1]
    last = {token: number for number, token in enumerate(lines)}
    if len(last) == len(lines):
        return lines
    repeated = [(number, token) for number, token in enumerate(lines) if last[token] != number]
    shown = "; ".join(f"{token!r} is in lines {number + 1} and {last[token] + 1}" for number, token in repeated[:3])
    more = f"; and {len(repeated) - 3} more" if len(repeated) > 3 else ""
    note(path, f"{shown}{more}; the last line is used, as in transformers, and no text has the other ids")
    return [token if last[token] == number else json_file.no_token(number) for number, token in enumerate(lines)]


def special_names(tokens: Collection[str]) -> tuple[str, ...]:
    """Returns the names of the special tokens of a vocabulary, in the order of `SPECIAL_TOKENS`.

    A vocabulary with MPNet's padding, begin, end and mask is a vocabulary of MPNet: no text has these tokens, because
    the pre-tokenizer splits words at "<" and ">".
    """
    pad, unknown, *others = MPNET
    if not {pad, *others} <= {*tokens}:
        return SPECIAL_TOKENS
    return MPNET if unknown in tokens else (pad, UNKNOWN, *others)


def new_wordpiece(lowercase: bool, vocabulary: dict[str, int], unknown: str = "[UNK]") -> tokenizers.Tokenizer:
    """Returns a WordPiece tokenizer of the tokenizers library; `unknown` is the name of the unknown token."""
    tokenizer = tokenizers.Tokenizer(
        models.WordPiece(vocabulary, unk_token=unknown, max_input_chars_per_word=MAX_WORD_LETTERS)
    )
    tokenizer.normalizer = normalizers.BertNormalizer(
        clean_text=True, handle_chinese_chars=True, strip_accents=lowercase, lowercase=lowercase
    )
    tokenizer.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    tokenizer.decoder = decoders.WordPiece(prefix=CONTINUES)
    return tokenizer


class _Model(TypedDict):
    """The model of a tokenizer.json."""

    vocab: dict[str, int]


def _read_huggingface(path: epath.PathLike) -> tuple[list[str], bool]:
    """Returns the tokens of a tokenizer.json of BERT or MPNet, and whether it lower-cases text."""
    try:
        content = parse_json(read_tokenizer_file(path), json_file.TokenizerJson)
        if (kind := content["model"].get("type", "WordPiece")) != "WordPiece":
            raise UserError(f"tokenizer.path: {path} is not a BERT WordPiece tokenizer, but {kind}")
        vocabulary = msgspec.convert(content["model"], _Model)["vocab"]
    except ValueError as error:
        raise UserError(f"tokenizer.path: {path} is not a tokenizer.json ({error})") from None
    special = _, unknown, cls, sep, _ = special_names(vocabulary)
    is_bert = special is SPECIAL_TOKENS
    supported = SUPPORTED_PARTS | {"model": SUPPORTED_PARTS["model"] | {"unk_token": unknown}}
    json_file.check_json_parts(path, content, supported, special if is_bert else (*special, UNKNOWN))
    between = [sep] if is_bert else [sep, sep]
    if json_file.read_template(path, content.get("post_processor"), cls, sep) != ([cls], between, [sep]):
        raise UserError(
            f"tokenizer.path: {path}: post_processor is not supported; supported: {cls} A {' '.join(between)} B {sep}"
        )
    normalizer = content["normalizer"] or {}
    lowercase, strips = normalizer.get("lowercase"), normalizer.get("strip_accents")
    lowercase = True if lowercase is None else lowercase
    if not isinstance(lowercase, bool) or strips not in (None, lowercase):
        raise UserError(
            f"tokenizer.path: {path} has lowercase {lowercase} and strip_accents {strips}; supported: equal values"
        )
    return json_file.ordered(vocabulary, path), lowercase
