"""SentencePiece."""

import functools
from collections.abc import Sequence

import numpy as np
from etils import epath

from bertjax.common.errors import UserError
from bertjax.common.files import write_whole
from bertjax.text.tokenizers import json_file
from bertjax.text.tokenizers.interface import SPECIAL_PIECES, XLNET, Encoding, Joined, Tokenizer, read_file

SPACE = "\u2581"  # how a space is written in a piece
# Types of pieces: a text has the name of a piece of the one kind as text, and of the other kind as that piece.
CONTROL, USER_DEFINED = 3, 4


class SentencePiece(Tokenizer):
    """A unigram (or BPE) model over raw text; lower-casing and normalization are part of the model.

    One with the special pieces of `XLNET` ends with <cls>.
    """

    kind = "sentencepiece"
    filename = "tokenizer.model"
    space = SPACE

    def __init__(self, model: bytes, path: str = "(given)"):
        self._model, self._processor = model, _processor(model, path)
        pieces = [self._processor.id_to_piece(i) for i in range(self._processor.get_piece_size())]
        super().__init__(pieces, path, aliases={name: (theirs,) for name, theirs in zip(SPECIAL_PIECES, XLNET)})
        if pieces[self.cls_id] == XLNET[2]:
            self.begin, self.end = (), (self.sep_id, self.cls_id)
        content = _message(model)
        if user_defined := [i for i in self.special_ids if content.pieces[i].type == USER_DEFINED]:
            for i in user_defined:
                content.pieces[i].type = CONTROL
            self._processor = _processor(content.SerializeToString(), path)
        self.lowercase = content.normalizer_spec.name.endswith("_cf")  # folds case

    @classmethod
    def load(cls, path: epath.PathLike) -> "SentencePiece":
        return cls(read_file(path), str(path))

    @functools.cached_property
    def continues_word(self) -> np.ndarray:
        is_word_part = [not p.is_control(i) and not p.is_unknown(i) for p in [self._processor] for i in range(len(p))]
        return np.array([w and not piece.startswith(SPACE) for w, piece in zip(is_word_part, self.pieces)])

    def _encode(self, text: str) -> Encoding:
        encoding = self._processor.encode(text, return_type="offset_mapping")
        offsets = encoding["offsets"]
        for i in reversed(range(len(offsets) - 1)):  # pieces of one character, whose place the last of them has
            (start, end), (next_start, next_end) = offsets[i : i + 2]
            if start == end == next_start and self.pieces[encoding["ids"][i]] != SPACE:
                offsets[i] = start, next_end
        return Encoding(encoding["ids"], offsets)

    def _encode_ids(self, texts: list[str]) -> list[list[int]]:
        return self._processor.encode(texts, return_type=int, num_threads=1)

    def units(self, word: str) -> list[list[str]]:
        unit = self._unigrams.tokenize(self._processor.normalize(word))
        return json_file.known_runs(((token.id, token.value) for token in unit), self.unk_id)

    def parts(self, piece: str) -> list[int]:
        return [token.id for token in self._unigrams.tokenize(piece)]

    def extended(self, joined: Sequence[Joined]) -> "SentencePiece":
        scores = [self._processor.get_score(i) for i in range(self.vocab_size)]
        larger = _message(b"")
        for each in joined:
            larger.pieces.add(piece=each.piece, score=score_of_new(self.parts(each.piece), scores))
        return SentencePiece(self._model + larger.SerializeToString())  # such fields of two messages are joined

    @property
    def cannot_extend(self) -> str:
        return (
            ""
            if _message(self._model).trainer_spec.model_type == 1
            else "is a SentencePiece model, but not of unigrams"
        )

    @functools.cached_property
    def _unigrams(self):
        """The same model of the tokenizers library. Raises `UserError` for BPE."""
        from tokenizers import models

        if self.cannot_extend:
            raise UserError("only a SentencePiece model of type unigram can be written as tokenizer.json")
        pieces = [(piece, self._processor.get_score(i)) for i, piece in enumerate(self.pieces)]
        return models.Unigram(pieces, unk_id=self.unk_id, byte_fallback=False)

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
        from tokenizers import Regex, decoders, normalizers, pre_tokenizers
        from tokenizers import Tokenizer as HuggingFaceTokenizer

        tokenizer = HuggingFaceTokenizer(self._unigrams)
        try:
            precompiled = normalizers.Precompiled(_message(self._model).normalizer_spec.precompiled_charsmap)
        except Exception as error:  # the library's own, of no other type
            raise UserError(f"the normalization of {self.filename} is damaged ({error}); copy it again") from None
        normalization = [
            precompiled,
            normalizers.Replace(Regex("^ +| +$"), ""),
            normalizers.Replace(Regex(" {2,}"), " "),
        ]
        tokenizer.normalizer = normalizers.Sequence(normalization)
        tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(replacement=SPACE, prepend_scheme="always")
        tokenizer.decoder = decoders.Metaspace(replacement=SPACE, prepend_scheme="always")
        special = [self.pieces[i] for i in self.special_ids]
        return json_file.with_special_pieces(tokenizer, special, ends_with_cls=self.ends_with_cls)

    def _definition(self) -> bytes:
        return self._model


def score_of_new(parts: Sequence[int], scores: Sequence[float]) -> float:
    """Returns the log-probability of a new piece: that of its rarest part, so that it is preferred to its parts."""
    return min(scores[part] for part in parts)


def read_unigrams(path: epath.PathLike) -> tuple[list[tuple[str, float]], bytes]:
    """Returns the pieces of a SentencePiece model with their scores, and its rules of normalization.

    Raises `UserError` if it is no such model, or not one of unigrams.
    """
    model = read_file(path)
    processor, content = _processor(model, str(path)), _message(model)
    if content.trainer_spec.model_type != 1:
        raise UserError(f"tokenizer.path: {path} is a SentencePiece model of another type than unigram")
    pieces = [(processor.id_to_piece(i), processor.get_score(i)) for i in range(processor.get_piece_size())]
    return pieces, content.normalizer_spec.precompiled_charsmap


def _processor(model: bytes, path: str):
    """Opens a model with the library. Raises `UserError` if it is none."""
    import sentencepiece

    try:
        return sentencepiece.SentencePieceProcessor(model_proto=model)
    except RuntimeError as error:
        reason = " ".join(str(error).split())
        raise UserError(f"tokenizer.path: {path} is not a SentencePiece model ({reason})") from None


def _message(model: bytes):
    """Reads what we need of sentencepiece_model.proto.

    The library's own module wants a newer protobuf than other packages allow, such as Apache Beam.
    """
    from google.protobuf import descriptor_pb2, descriptor_pool, message_factory

    kinds = descriptor_pb2.FieldDescriptorProto
    fields = {
        "TrainerSpec": [dict(name="model_type", number=3, type=kinds.TYPE_INT32, default_value="1")],
        "NormalizerSpec": [
            dict(name="name", number=1, type=kinds.TYPE_STRING),
            dict(name="precompiled_charsmap", number=2, type=kinds.TYPE_BYTES),
        ],
        "SentencePiece": [
            dict(name="piece", number=1, type=kinds.TYPE_STRING),
            dict(name="score", number=2, type=kinds.TYPE_FLOAT),
            dict(name="type", number=3, type=kinds.TYPE_INT32, default_value="1"),
        ],
        "ModelProto": [
            dict(
                name="pieces",
                number=1,
                type=kinds.TYPE_MESSAGE,
                type_name=".sentencepiece.SentencePiece",
                label=kinds.LABEL_REPEATED,
            ),
            dict(name="trainer_spec", number=2, type=kinds.TYPE_MESSAGE, type_name=".sentencepiece.TrainerSpec"),
            dict(name="normalizer_spec", number=3, type=kinds.TYPE_MESSAGE, type_name=".sentencepiece.NormalizerSpec"),
        ],
    }
    file = descriptor_pb2.FileDescriptorProto(name="sentencepiece.proto", package="sentencepiece", syntax="proto2")
    for name, members in fields.items():
        file.message_type.add(name=name, field=[kinds(**{"label": kinds.LABEL_OPTIONAL, **each}) for each in members])
    pool = descriptor_pool.DescriptorPool()
    pool.AddSerializedFile(file.SerializeToString())
    found = message_factory.GetMessageClass(pool.FindMessageTypeByName("sentencepiece.ModelProto"))
    return found.FromString(model)
