"""Tokenizes text: WordPiece, bytes, GPT-2's BPE (with the tokenizers library), SentencePiece; behind one interface."""

import abc
import functools
import hashlib
import itertools
import re
from collections.abc import Sequence
from typing import Any, NamedTuple, NotRequired, TypedDict

import msgspec
import numpy as np
from etils import epath

from bertjax.config import UserError
from bertjax.files import parse_json, read_whole, write_whole

MAX_WORD_LETTERS = 100  # longer ones become [UNK], as in Hugging Face's BERT tokenizers (Google's: 200)
MAX_KNOWN_WORDS = 300_000  # words that a tokenizer remembers, some 50 MB
SPECIAL_PIECES = ("[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]")
END_OF_TEXT = "<|endoftext|>"  # all special pieces of GPT-2


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
    lowercase: bool = True  # for WordPiece only; a SentencePiece model includes its normalization

    def __init__(self, pieces: Sequence[str], path: str, aliases: dict[str, str] | None = None):
        self.pieces = list(pieces)
        ids = {piece: i for i, piece in enumerate(self.pieces)}
        found = [ids.get(name, ids.get((aliases or {}).get(name))) for name in SPECIAL_PIECES]
        missing = [name for name, i in zip(SPECIAL_PIECES, found) if i is None]
        if not self.pieces:
            raise UserError(f"tokenizer.path: the vocabulary {path} is empty")
        if missing:
            raise UserError(f"tokenizer.path: the vocabulary {path} lacks {', '.join(missing)}, which BERT needs")
        self.pad_id, self.unk_id, self.cls_id, self.sep_id, self.mask_id = found

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

    @abc.abstractmethod
    def encode(self, text: str) -> Encoding: ...

    @abc.abstractmethod
    def encode_ids(self, texts: Sequence[str]) -> list[list[int]]:
        """Encodes many texts to ids without offsets; faster than `encode`."""

    def encode_flat(self, texts: Sequence[str]) -> tuple[np.ndarray, np.ndarray]:
        """Returns the ids of all texts, one after the other, and how many each text has: `[ids]`, `[texts]`."""
        encoded = self.encode_ids(texts)
        sizes = np.fromiter(map(len, encoded), np.int64, len(encoded))
        return np.fromiter(itertools.chain.from_iterable(encoded), np.int32, sizes.sum()), sizes

    @abc.abstractmethod
    def decode(self, ids: Sequence[int]) -> str: ...

    @abc.abstractmethod
    def save(self, folder: epath.PathLike) -> None: ...

    @abc.abstractmethod
    def to_huggingface(self) -> str:
        """Returns the content of a tokenizer.json that gives the same ids and adds [CLS] and [SEP]."""

    @abc.abstractmethod
    def _definition(self) -> bytes: ...

    def encode_with_masks(self, text: str) -> list[int]:
        """Returns the ids of a text in which each "[MASK]" becomes the mask token."""
        ids = []
        for part in re.split(r"(\[MASK\])", text):
            ids.extend([self.mask_id] if part == "[MASK]" else self.encode(part).ids if part.strip() else [])
        return ids


class WordPiece(Tokenizer):
    """Greedy longest-match pieces of words, as in google-research/bert; words over `MAX_WORD_LETTERS` become [UNK]."""

    kind = "wordpiece"
    filename = "vocab.txt"

    def __init__(self, pieces: Sequence[str], lowercase: bool, path: str = "(given)"):
        super().__init__(pieces, path)
        self.lowercase = lowercase
        self._tokenizer = new_wordpiece(lowercase, {piece: i for i, piece in enumerate(self.pieces)})
        self._forget()

    @classmethod
    def load(cls, path: epath.PathLike, lowercase: bool) -> "WordPiece":
        """Reads a `vocab.txt`, or a Hugging Face tokenizer.json, whose own lower-casing overrides `lowercase`."""
        if str(path).endswith(".json"):
            return cls(*_read_huggingface(path), str(path))
        try:
            lines = _read(path).decode().split("\n")
        except UnicodeDecodeError as error:
            raise UserError(f"tokenizer.path: {path} is not UTF-8 ({error.reason} at byte {error.start})") from None
        return cls([line.rstrip("\r") for line in (lines[:-1] if not lines[-1] else lines)], lowercase, str(path))

    @functools.cached_property
    def continues_word(self) -> np.ndarray:
        return np.array([piece.startswith("##") for piece in self.pieces])

    def encode(self, text: str) -> Encoding:
        encoding = self._tokenizer.encode(text, add_special_tokens=False)
        return Encoding(encoding.ids, encoding.offsets)

    def encode_ids(self, texts: Sequence[str]) -> list[list[int]]:
        return [e.ids for e in self._tokenizer.encode_batch_fast(list(texts), add_special_tokens=False)]

    def encode_flat(self, texts: Sequence[str]) -> tuple[np.ndarray, np.ndarray]:
        """Encodes each word once, and remembers it: no piece reaches across a space."""
        if len(self._known) > MAX_KNOWN_WORDS:
            self._forget()
        words = [text.split(" ") for text in texts]
        known, number = len(self._known), self._known  # `number` maps each word to its number
        codes = np.array([number.setdefault(word, len(number)) for text in words for word in text], np.int64)
        ids, sizes = self._encode_words(list(itertools.islice(number, known, None)))
        self._known_ids = np.concatenate([self._known_ids, ids])
        self._known_sizes = np.concatenate([self._known_sizes, sizes])

        of_words = self._known_sizes[codes]
        ends = np.cumsum(of_words)
        begins = (np.cumsum(self._known_sizes) - self._known_sizes)[codes]
        source = np.repeat(begins - (ends - of_words), of_words) + np.arange(of_words.sum())
        last = np.cumsum([len(text) for text in words], dtype=np.int64) - 1
        return self._known_ids[source], np.diff(ends[last], prepend=0)

    def _encode_words(self, words: list[str]) -> tuple[np.ndarray, np.ndarray]:
        """Encodes words that have no spaces, some hundreds as one text: half the time of one by one."""
        ids, sizes = [np.empty(0, np.int32)], [np.empty(0, np.int64)]
        texts = [words[first : first + 256] for first in range(0, len(words), 256)]
        encodings = self._tokenizer.encode_batch([" ".join(text) for text in texts], add_special_tokens=False)
        for text, encoding in zip(texts, encodings):
            begins = np.cumsum([0, *(len(word) + 1 for word in text)])[:-1]
            places = np.array([start for start, _ in encoding.offsets], np.int64)
            ids.append(np.array(encoding.ids, np.int32))
            sizes.append(np.bincount(np.searchsorted(begins, places, "right") - 1, minlength=len(text)))
        return np.concatenate(ids), np.concatenate(sizes)

    def _forget(self) -> None:
        self._known: dict[str, int] = {}
        self._known_ids, self._known_sizes = np.empty(0, np.int32), np.empty(0, np.int64)

    def decode(self, ids: Sequence[int]) -> str:
        return self._tokenizer.decode(list(ids), skip_special_tokens=False)

    def save(self, folder: epath.PathLike) -> None:
        write_whole(epath.Path(folder) / self.filename, "".join(f"{piece}\n" for piece in self.pieces))

    def to_huggingface(self) -> str:
        vocabulary = {piece: i for i, piece in enumerate(self.pieces)}
        return _with_special_pieces(new_wordpiece(self.lowercase, vocabulary), self)

    def _definition(self) -> bytes:
        return "\n".join([f"wordpiece lowercase={bool(self.lowercase)}", *self.pieces]).encode()


def new_wordpiece(lowercase: bool, vocabulary: dict[str, int]):
    """Makes a WordPiece tokenizer of the tokenizers library."""
    from tokenizers import Tokenizer as HuggingFaceTokenizer
    from tokenizers import decoders, models, normalizers, pre_tokenizers

    model = models.WordPiece(vocabulary, unk_token="[UNK]", max_input_chars_per_word=MAX_WORD_LETTERS)
    tokenizer = HuggingFaceTokenizer(model)
    tokenizer.normalizer = normalizers.BertNormalizer(
        clean_text=True, handle_chinese_chars=True, strip_accents=lowercase, lowercase=lowercase
    )
    tokenizer.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    tokenizer.decoder = decoders.WordPiece(prefix="##")
    return tokenizer


def _with_special_pieces(tokenizer, ours: Tokenizer) -> str:
    """Returns the JSON of a tokenizers-library tokenizer with BERT's special pieces and template added."""
    from tokenizers import processors

    cls, sep = ours.pieces[ours.cls_id], ours.pieces[ours.sep_id]
    special = (ours.pad_id, ours.unk_id, ours.cls_id, ours.sep_id, ours.mask_id)
    tokenizer.add_special_tokens([ours.pieces[i] for i in special])
    tokenizer.post_processor = processors.TemplateProcessing(
        single=f"{cls}:0 $A:0 {sep}:0",
        pair=f"{cls}:0 $A:0 {sep}:0 $B:1 {sep}:1",
        special_tokens=[(cls, ours.cls_id), (sep, ours.sep_id)],
    )
    return tokenizer.to_str()


class _AddedToken(TypedDict):
    content: str


class _TokenizerJson(TypedDict):
    """What we need of tokenizer.json. The other parts say how texts are cut, padded and decoded."""

    model: dict[str, Any]
    normalizer: NotRequired[dict[str, Any] | None]
    pre_tokenizer: NotRequired[dict[str, Any] | None]
    post_processor: NotRequired[dict[str, Any] | None]
    added_tokens: NotRequired[list[_AddedToken]]


class _Model(TypedDict):
    vocab: dict[str, int]


class _Merges(TypedDict):
    vocab: dict[str, int]
    merges: list[str | tuple[str, str]]


# The parts of a tokenizer.json as we have them: a part that is set otherwise is refused.
_WORDPIECE = {
    "normalizer": {"type": "BertNormalizer", "clean_text": True, "handle_chinese_chars": True},
    "pre_tokenizer": {"type": "BertPreTokenizer"},
    "model": {"unk_token": "[UNK]", "continuing_subword_prefix": "##", "max_input_chars_per_word": MAX_WORD_LETTERS},
}
_GPT2 = {
    "pre_tokenizer": {"type": "ByteLevel", "use_regex": True},
    "model": {
        "dropout": None,
        "unk_token": None,
        "continuing_subword_prefix": None,
        "end_of_word_suffix": None,
        "byte_fallback": False,
        "ignore_merges": False,
    },
}


def _check_parts(path, content: _TokenizerJson, ours: dict[str, dict], specials: Sequence[str]) -> None:
    """Raises `UserError` where a tokenizer.json does something else than we do."""
    for name, expected in ours.items():
        part = content.get(name) or {}
        for key, value in expected.items():
            given = part.get(key, None if key == "type" else value)
            if value != (None if given == "" else given):
                what = f"{name} {given or 'null'}" if key == "type" else f"{name}.{key} = {given!r}"
                raise UserError(f"tokenizer.path: {path}: {what} is not supported; supported: {value!r}")
    if "normalizer" not in ours and (normalizer := content.get("normalizer")):
        raise UserError(
            f"tokenizer.path: {path}: normalizer {normalizer.get('type')} is not supported; supported: null"
        )
    check_added(path, [token["content"] for token in content.get("added_tokens", ())], specials)


def check_added(path, tokens: Sequence[str], specials: Sequence[str] = SPECIAL_PIECES) -> None:
    """Raises `UserError` for tokens besides the special pieces that other libraries keep whole wherever they occur."""
    if added := [token for token in tokens if token not in specials]:
        raise UserError(
            f"tokenizer.path: {path} adds tokens ({', '.join(added[:3])}), which are to be kept whole in text; that is "
            f"not supported, here they would be split"
        )


def _read_huggingface(path: epath.PathLike) -> tuple[list[str], bool]:
    """Returns the pieces of a BERT's tokenizer.json, and whether it lower-cases."""
    try:
        content = parse_json(_read(path), _TokenizerJson)
        if (kind := content["model"].get("type", "WordPiece")) != "WordPiece":
            raise UserError(f"tokenizer.path: {path} is not a BERT WordPiece tokenizer, but {kind}")
        vocabulary = msgspec.convert(content["model"], _Model)["vocab"]
    except ValueError as error:
        raise UserError(f"tokenizer.path: {path} is not a tokenizer.json ({error})") from None
    _check_parts(path, content, _WORDPIECE, SPECIAL_PIECES)
    _check_template(path, content.get("post_processor"))
    lowercase, strips = (content["normalizer"].get(name) for name in ("lowercase", "strip_accents"))
    lowercase = True if lowercase is None else lowercase
    if not isinstance(lowercase, bool) or strips not in (None, lowercase):
        raise UserError(f"tokenizer.path: {path} has lowercase {lowercase} but strip_accents {strips}: not supported")
    return _ordered(vocabulary, path), lowercase


def _check_template(path, processor: dict[str, Any] | None) -> None:
    """Raises `UserError` if a tokenizer.json surrounds a text by others than [CLS] and [SEP]."""
    kind = processor and processor.get("type")
    if kind == "TemplateProcessing":
        single = processor.get("single")
        steps = [step for step in single if isinstance(step, dict)] if isinstance(single, list) else []
        parts = [part for step in steps for part in step.values()]
        is_ours = [part.get("id") for part in parts if isinstance(part, dict)] == ["[CLS]", "A", "[SEP]"]
    else:
        is_ours = kind in (None, "BertProcessing")
    if not is_ours:
        raise UserError(f"tokenizer.path: {path}: post_processor {kind} is not supported; supported: [CLS] text [SEP]")


def _ordered(vocabulary: dict[str, int], path) -> list[str]:
    """Returns the pieces by their ids. Raises `UserError` for gaps between ids."""
    pieces = sorted(vocabulary, key=vocabulary.get)
    if [vocabulary[piece] for piece in pieces] != list(range(len(pieces))):
        raise UserError(f"tokenizer.path: the ids in {path} have gaps")
    return pieces


class SentencePiece(Tokenizer):
    """A unigram (or BPE) model over raw text; lower-casing and normalization are part of the model."""

    kind = "sentencepiece"
    filename = "tokenizer.model"

    def __init__(self, model: bytes, path: str = "(given)"):
        import sentencepiece

        self._model = model
        try:
            self._processor = sentencepiece.SentencePieceProcessor(model_proto=model)
        except RuntimeError:
            raise UserError(f"tokenizer.path: {path} is not a SentencePiece model") from None
        pieces = [self._processor.id_to_piece(i) for i in range(self._processor.get_piece_size())]
        super().__init__(pieces, path, aliases={"[PAD]": "<pad>", "[UNK]": "<unk>"})

    @classmethod
    def load(cls, path: epath.PathLike) -> "SentencePiece":
        return cls(_read(path), str(path))

    @functools.cached_property
    def continues_word(self) -> np.ndarray:
        is_word_part = [not p.is_control(i) and not p.is_unknown(i) for p in [self._processor] for i in range(len(p))]
        return np.array([w and not piece.startswith("\u2581") for w, piece in zip(is_word_part, self.pieces)])

    def encode(self, text: str) -> Encoding:
        encoding = self._processor.encode(text, return_type="offset_mapping")
        return Encoding(encoding["ids"], encoding["offsets"])

    def encode_ids(self, texts: Sequence[str]) -> list[list[int]]:
        return self._processor.encode(list(texts), return_type=int, num_threads=1)

    def decode(self, ids: Sequence[int]) -> str:
        words, text = [], []
        for i in ids:  # the library's decoder drops special pieces
            if self._processor.is_control(int(i)) or self._processor.is_unknown(int(i)):
                words += [self._processor.decode(text), self.pieces[i]]
                text = []
            else:
                text.append(int(i))
        return " ".join(w for w in [*words, self._processor.decode(text)] if w)

    def save(self, folder: epath.PathLike) -> None:
        write_whole(epath.Path(folder) / self.filename, self._model)

    def to_huggingface(self) -> str:
        from tokenizers import Regex, decoders, models, normalizers, pre_tokenizers
        from tokenizers import Tokenizer as HuggingFaceTokenizer

        model = _read_sentencepiece(self._model)
        if model.trainer_spec.model_type != 1:  # unigram
            raise UserError("only a SentencePiece model of type unigram can be written as tokenizer.json")
        pieces = [(piece, self._processor.get_score(i)) for i, piece in enumerate(self.pieces)]
        tokenizer = HuggingFaceTokenizer(models.Unigram(pieces, unk_id=self.unk_id, byte_fallback=False))
        try:
            precompiled = normalizers.Precompiled(model.normalizer_spec.precompiled_charsmap)
        except Exception as error:  # the library's own, of no other type
            raise UserError(f"the normalization of {self.filename} is damaged ({error}); copy it again") from None
        normalization = [precompiled, normalizers.Strip(), normalizers.Replace(Regex(" {2,}"), " ")]
        tokenizer.normalizer = normalizers.Sequence(normalization)
        tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(replacement="\u2581", prepend_scheme="always")
        tokenizer.decoder = decoders.Metaspace(replacement="\u2581", prepend_scheme="always")
        return _with_special_pieces(tokenizer, self)

    def _definition(self) -> bytes:
        return self._model


def _read_sentencepiece(model: bytes):
    """Reads what we need of sentencepiece_model.proto.

    The library's own module wants a newer protobuf than other packages allow, such as Apache Beam.
    """
    from google.protobuf import descriptor_pb2, descriptor_pool, message_factory

    kinds = descriptor_pb2.FieldDescriptorProto
    fields = {
        "TrainerSpec": [dict(name="model_type", number=3, type=kinds.TYPE_INT32, default_value="1")],
        "NormalizerSpec": [dict(name="precompiled_charsmap", number=2, type=kinds.TYPE_BYTES)],
        "ModelProto": [
            dict(name="trainer_spec", number=2, type=kinds.TYPE_MESSAGE, type_name=".sentencepiece.TrainerSpec"),
            dict(name="normalizer_spec", number=3, type=kinds.TYPE_MESSAGE, type_name=".sentencepiece.NormalizerSpec"),
        ],
    }
    file = descriptor_pb2.FileDescriptorProto(name="sentencepiece.proto", package="sentencepiece", syntax="proto2")
    for name, members in fields.items():
        file.message_type.add(name=name, field=[kinds(label=kinds.LABEL_OPTIONAL, **each) for each in members])
    pool = descriptor_pool.DescriptorPool()
    pool.AddSerializedFile(file.SerializeToString())
    found = message_factory.GetMessageClass(pool.FindMessageTypeByName("sentencepiece.ModelProto"))
    return found.FromString(model)


class ByteLevel(Tokenizer):
    """Pieces of UTF-8's bytes, written as GPT-2's. Each text begins with a space, so that words keep apart."""

    def encode(self, text: str) -> Encoding:
        encoding = self._tokenizer.encode(text, add_special_tokens=False)
        return Encoding(encoding.ids, encoding.offsets)

    def encode_ids(self, texts: Sequence[str]) -> list[list[int]]:
        return [e.ids for e in self._tokenizer.encode_batch_fast(list(texts), add_special_tokens=False)]

    def decode(self, ids: Sequence[int]) -> str:
        return self._tokenizer.decode(list(ids), skip_special_tokens=False).removeprefix(" ")


class Bytes(ByteLevel):
    """The 256 bytes alone."""

    kind = "bytes"
    filename = "bytes.txt"

    def __init__(self):
        from tokenizers import pre_tokenizers

        super().__init__([*SPECIAL_PIECES, *sorted(pre_tokenizers.ByteLevel.alphabet())], "of bytes")
        self._tokenizer = self._new()

    @classmethod
    def load(cls, path: epath.PathLike) -> "Bytes":
        """Checks that a file, as `save` writes it, has the same pieces."""
        found = cls()
        if _read(path) != found._definition():
            raise UserError(f"tokenizer.path: {path} is not what a tokenizer of bytes has; leave the path empty")
        return found

    def _new(self):
        from tokenizers import Tokenizer as HuggingFaceTokenizer
        from tokenizers import decoders, models, pre_tokenizers

        tokenizer = HuggingFaceTokenizer(models.BPE({piece: i for i, piece in enumerate(self.pieces)}, []))
        tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=True)
        tokenizer.decoder = decoders.ByteLevel()
        return tokenizer

    @functools.cached_property
    def continues_word(self) -> np.ndarray:
        space = self.encode("a").ids[0]
        return np.array([i >= len(SPECIAL_PIECES) and i != space for i in range(self.vocab_size)])

    def save(self, folder: epath.PathLike) -> None:
        write_whole(epath.Path(folder) / self.filename, self._definition())

    def to_huggingface(self) -> str:
        return _with_special_pieces(self._new(), self)

    def _definition(self) -> bytes:
        return "".join(f"{piece}\n" for piece in self.pieces).encode()


class BPE(ByteLevel):
    """GPT-2's pieces, read from its tokenizer.json. "<|endoftext|>" is all special pieces in one."""

    kind = "bpe"
    filename = "tokenizer.json"

    def __init__(self, content: bytes, path: str = "(given)"):
        from tokenizers import Tokenizer as HuggingFaceTokenizer
        from tokenizers import decoders, models, pre_tokenizers, processors

        try:
            found = parse_json(content, _TokenizerJson)
            if (kind := found["model"].get("type")) != "BPE":
                raise UserError(f"tokenizer.path: {path} is not a byte-level BPE as GPT-2's, but {kind}")
            _check_parts(path, found, _GPT2, (END_OF_TEXT,))
            model = msgspec.convert(found["model"], _Merges)
            merges = [tuple(pair.split(" ")) if isinstance(pair, str) else tuple(pair) for pair in model["merges"]]
            super().__init__(_ordered(model["vocab"], path), path, aliases=dict.fromkeys(SPECIAL_PIECES, END_OF_TEXT))
            self._tokenizer = HuggingFaceTokenizer(models.BPE(model["vocab"], merges))
        except UserError:
            raise
        except Exception as error:  # the library's own has no other type
            raise UserError(f"tokenizer.path: {path} is not a tokenizer.json ({error})") from None
        self._tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=True)
        self._tokenizer.post_processor = processors.ByteLevel(trim_offsets=True)  # a space is no part of its word
        self._tokenizer.decoder = decoders.ByteLevel()
        self._content = content

    @classmethod
    def load(cls, path: epath.PathLike) -> "BPE":
        return cls(_read(path), str(path))

    @functools.cached_property
    def continues_word(self) -> np.ndarray:
        return np.array([not piece.startswith("\u0120") and i != self.sep_id for i, piece in enumerate(self.pieces)])

    def save(self, folder: epath.PathLike) -> None:
        write_whole(epath.Path(folder) / self.filename, self._content)

    def to_huggingface(self) -> str:
        return self._content.decode()

    def _definition(self) -> bytes:
        return self._content


KINDS = {cls.kind: cls for cls in (WordPiece, SentencePiece, Bytes, BPE)}


def kind_of(path: epath.PathLike) -> str:
    """Returns the kind of tokenizer that a file of a checkpoint is of, by its name, or a tokenizer.json's content."""
    path = epath.Path(path)
    if path.name == BPE.filename:
        try:
            return BPE.kind if parse_json(_read(path), _TokenizerJson)["model"].get("type") == "BPE" else WordPiece.kind
        except ValueError as error:
            raise UserError(f"tokenizer.path: {path} is not a tokenizer.json ({error})") from None
    return next((cls.kind for cls in (SentencePiece, Bytes) if cls.filename == path.name), WordPiece.kind)


def load(kind: str, path: epath.PathLike, lowercase: bool = True) -> Tokenizer:
    """Loads a tokenizer from a `vocab.txt`, a `tokenizer.json` or a `.model` file, or checks a `bytes.txt`.

    Raises `UserError` if it is invalid.
    """
    return WordPiece.load(path, lowercase) if kind == WordPiece.kind else KINDS[kind].load(path)


def _read(path: epath.PathLike) -> bytes:
    path = epath.Path(path)
    if not path.exists() or path.is_dir():
        raise UserError(f"tokenizer.path: no file {str(path)!r}")
    return read_whole(path)
