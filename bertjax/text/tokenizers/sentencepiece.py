"""SentencePiece models."""

import functools
from collections.abc import Sequence
from typing import Any

import numpy as np
import sentencepiece
import tokenizers
from etils import epath
from tokenizers import Regex, decoders, models, normalizers, pre_tokenizers

from bertjax.common.errors import UserError
from bertjax.common.files import write_whole
from bertjax.text.tokenizers import json_file
from bertjax.text.tokenizers.interface import SPECIAL_TOKENS, XLNET, Encoding, Joined, Tokenizer, read_tokenizer_file
from bertjax.text.tokenizers.library_tokenizer import known_runs

SPACE = "\u2581"  # a space in a token
UNIGRAM = (0, 1)  # types of a model; 0: not stated
# Types of tokens. The name of a control token in a text is encoded as text, the name of a user-defined token as that
# token.
CONTROL, USER_DEFINED = 3, 4
# {message of sentencepiece_model.proto: {field that bertjax uses: (number, type)}}. The module of the sentencepiece
# package requires a newer protobuf than other packages allow, such as Apache Beam.
PROTO = {
    "TrainerSpec": {"model_type": (3, "TYPE_INT32")},
    "NormalizerSpec": {"name": (1, "TYPE_STRING"), "precompiled_charsmap": (2, "TYPE_BYTES")},
    "SentencePiece": {"piece": (1, "TYPE_STRING"), "score": (2, "TYPE_FLOAT"), "type": (3, "TYPE_INT32")},
    "ModelProto": {
        "pieces": (1, "SentencePiece"),
        "trainer_spec": (2, "TrainerSpec"),
        "normalizer_spec": (3, "NormalizerSpec"),
    },
}


class SentencePiece(Tokenizer):
    """A unigram (or BPE) model over raw text. The model contains case folding and normalization.

    A model with the special tokens of `XLNET` puts <cls> at the end of a text.
    """

    kind = "sentencepiece"
    filename = "tokenizer.model"
    space = SPACE

    def __init__(self, model: bytes, path: str = "(given)"):
        self._model, self._processor = model, _processor(model, path)
        tokens = [self._processor.id_to_piece(i) for i in range(self._processor.get_piece_size())]
        super().__init__(tokens, path, aliases={name: (alias,) for name, alias in zip(SPECIAL_TOKENS, XLNET)})
        if tokens[self.cls_id] == XLNET[2]:
            self.begin, self.end = (), (self.sep_id, self.cls_id)
        content = read_proto(model)
        if user_defined := [i for i in self.special_ids if content.pieces[i].type == USER_DEFINED]:
            for i in user_defined:
                content.pieces[i].type = CONTROL
            self._processor = _processor(content.SerializeToString(), path)
        self.lowercase = content.normalizer_spec.name.endswith("_cf")  # case folding

    @classmethod
    def load(cls, path: epath.PathLike) -> "SentencePiece":
        """Reads a model. Raises `UserError` if it is invalid."""
        return cls(read_tokenizer_file(path), str(path))

    def _is_special(self, number: int) -> bool:
        return self._processor.is_control(number) or self._processor.is_unknown(number)

    @functools.cached_property
    def continues_word(self) -> np.ndarray:
        """`[vocab_size]` booleans: True for tokens that do not begin with a space and are not special."""
        return np.array(
            [not self._is_special(i) and not token.startswith(SPACE) for i, token in enumerate(self.pieces)]
        )

    def _encode(self, text: str) -> Encoding:
        encoding = self._processor.encode(text, return_type="offset_mapping")
        offsets = encoding["offsets"]
        for i in reversed(range(len(offsets) - 1)):
            # If one character has several tokens, only the last token has the range of the character.
            (start, end), (next_start, next_end) = offsets[i : i + 2]
            if start == end == next_start and self.pieces[encoding["ids"][i]] != SPACE:
                offsets[i] = start, next_end
        return Encoding(encoding["ids"], offsets)

    def _encode_ids(self, texts: list[str]) -> list[list[int]]:
        return self._processor.encode(texts, return_type=int, num_threads=1)

    def units(self, word: str) -> list[list[str]]:
        """Returns the tokens of a word, see `Tokenizer.units`."""
        return known_runs(self._unigrams.tokenize(self._processor.normalize(word)), self.unk_id)

    def parts(self, token: str) -> list[int]:
        """Returns the ids of the parts of a token, see `Tokenizer.parts`."""
        return [part.id for part in self._unigrams.tokenize(token)]

    def extended(self, joined: Sequence[Joined]) -> "SentencePiece":
        """Returns a tokenizer with new tokens, see `Tokenizer.extended`."""
        scores = [self._processor.get_score(i) for i in range(self.vocab_size)]
        new = read_proto(b"")
        for pair in joined:
            new.pieces.add(piece=pair.token, score=score_of_new(self.parts(pair.token), scores))
        return SentencePiece(self._model + new.SerializeToString())  # protobuf concatenates the repeated fields

    @property
    def cannot_extend(self) -> str:
        """The reason why `extended` raises; "" if it does not."""
        is_unigram = read_proto(self._model).trainer_spec.model_type in UNIGRAM
        return "" if is_unigram else "is a SentencePiece model, but not of unigrams"

    @functools.cached_property
    def _unigrams(self) -> models.Unigram:
        """The same model of the tokenizers library. Raises `UserError` for BPE."""
        if self.cannot_extend:
            raise UserError("only a SentencePiece model of type unigram can be written as tokenizer.json")
        tokens = [(token, self._processor.get_score(i)) for i, token in enumerate(self.pieces)]
        return models.Unigram(tokens, unk_id=self.unk_id, byte_fallback=False)

    def decode(self, ids: Sequence[int]) -> str:
        """Returns the text of ids with the names of special tokens, which the decoder of the library omits."""
        words: list[str] = []
        text: list[int] = []
        for i in map(int, ids):
            if self._is_special(i):
                words += [self._processor.decode(text), self.pieces[i]]
                text = []
            else:
                text.append(i)
        return " ".join(filter(None, [*words, self._processor.decode(text)]))

    def save(self, folder: epath.PathLike) -> None:
        """Writes the model."""
        write_whole(epath.Path(folder) / self.filename, self._model)

    def to_huggingface(self) -> str:
        """Returns a tokenizer.json, see `Tokenizer.to_huggingface`."""
        tokenizer = tokenizers.Tokenizer(self._unigrams)
        try:
            precompiled = normalizers.Precompiled(read_proto(self._model).normalizer_spec.precompiled_charsmap)
        except Exception as error:  # the library raises the base class
            raise UserError(f"the normalization of {self.filename} is damaged ({error}); copy it again") from None
        spaces = normalizers.Replace(Regex("^ +| +$"), ""), normalizers.Replace(Regex(" {2,}"), " ")
        tokenizer.normalizer = normalizers.Sequence([precompiled, *spaces])
        tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(replacement=SPACE, prepend_scheme="always")
        tokenizer.decoder = decoders.Metaspace(replacement=SPACE, prepend_scheme="always")
        special = [self.pieces[i] for i in self.special_ids]
        return json_file.with_special_tokens(tokenizer, special, ends_with_cls=self.ends_with_cls)

    def _definition(self) -> bytes:
        return self._model


def score_of_new(parts: Sequence[int], scores: Sequence[float]) -> float:
    """Returns the log-probability of a new token: the score of its rarest part, so that the model prefers the token."""
    return min(scores[part] for part in parts)


def read_unigrams(path: epath.PathLike) -> tuple[list[tuple[str, float]], bytes]:
    """Returns the tokens of a SentencePiece model with their scores, and its normalization rules.

    Raises `UserError` unless the file is a SentencePiece model of type unigram.
    """
    model = read_tokenizer_file(path)
    processor, content = _processor(model, str(path)), read_proto(model)
    if content.trainer_spec.model_type not in UNIGRAM:
        raise UserError(f"tokenizer.path: {path} is a SentencePiece model of another type than unigram")
    tokens = [(processor.id_to_piece(i), processor.get_score(i)) for i in range(processor.get_piece_size())]
    return tokens, content.normalizer_spec.precompiled_charsmap


def _processor(model: bytes, path: str) -> sentencepiece.SentencePieceProcessor:
    """Loads a model. Raises `UserError` if it is damaged."""
    try:
        return sentencepiece.SentencePieceProcessor(model_proto=model)
    except RuntimeError as error:
        reason = " ".join(str(error).split())
        raise UserError(f"tokenizer.path: {path} is not a SentencePiece model ({reason})") from None


@functools.cache
def _model_class() -> Any:
    """Returns the protobuf class of the ModelProto of `PROTO`."""
    from google.protobuf import descriptor_pb2, descriptor_pool, message_factory

    file = descriptor_pb2.FileDescriptorProto(name="sentencepiece.proto", package="sentencepiece")
    for message, fields in PROTO.items():
        descriptor = file.message_type.add(name=message)
        for name, (number, kind) in fields.items():
            label = "LABEL_REPEATED" if name == "pieces" else "LABEL_OPTIONAL"
            type_of = {"type_name": f".sentencepiece.{kind}"} if kind in PROTO else {"type": kind}
            descriptor.field.add(name=name, number=number, label=label, **type_of)
    pool = descriptor_pool.DescriptorPool()
    pool.Add(file)
    return message_factory.GetMessageClass(pool.FindMessageTypeByName("sentencepiece.ModelProto"))


def read_proto(model: bytes) -> Any:
    """Reads the fields of a model that `PROTO` lists."""
    return _model_class().FromString(model)
