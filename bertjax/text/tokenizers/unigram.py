"""Unigram pieces of the words between spaces: the tokenizer.json of XLM-R, CamemBERT and XLNet."""

import functools
import json
from collections.abc import Sequence
from typing import Any

import numpy as np
from etils import epath

from bertjax.common.errors import UserError
from bertjax.text.tokenizers import json_file, legacy_files
from bertjax.text.tokenizers.from_json import FromJson
from bertjax.text.tokenizers.interface import Encoding, Joined
from bertjax.text.tokenizers.sentencepiece import SPACE, score_of_new


class Unigram(FromJson):
    """A SentencePiece model whose pieces have other ids, or whose text is changed before it sees it. It is read only:
    those that are learnt are `SentencePiece`."""

    kind = "unigram"
    space = SPACE
    older = ("sentencepiece.bpe.model", legacy_files.XLNET_MODEL)

    @functools.cached_property
    def continues_word(self) -> np.ndarray:
        return np.array([not piece.startswith(SPACE) and piece not in self.added for piece in self.pieces])

    def _encode(self, text: str) -> Encoding:
        encoding = self._tokenizer.encode(text, add_special_tokens=False)
        # A piece covers the space before it, which is no part of its word.
        offsets = [(start + (end - start > 1 and text[start].isspace()), end) for start, end in encoding.offsets]
        return Encoding(encoding.ids, offsets)

    def _encode_ids(self, texts: list[str]) -> list[list[int]]:
        return [e.ids for e in self._tokenizer.encode_batch_fast(texts, add_special_tokens=False)]

    def decode(self, ids: Sequence[int]) -> str:
        return self._decoded(ids)

    @property
    def cannot_extend(self) -> str:
        is_whole = len(json.loads(self._content)["model"]["vocab"]) == self.vocab_size
        return "" if is_whole else "has added pieces after its vocabulary, where new ones would come"

    def _add(self, model: dict[str, Any], new: Sequence[str], joined: Sequence[Joined]) -> None:
        scores = [score for _, score in model["vocab"]]
        model["vocab"] += [[piece, score_of_new(self.parts(piece), scores)] for piece in new]

    @staticmethod
    def _of_older(path: epath.Path) -> bytes:
        return legacy_files.unigram_json(path)

    @staticmethod
    def _check(path, found: json_file.TokenizerJson) -> None:
        if (kind := found["model"].get("type")) != "Unigram":
            raise UserError(f"tokenizer.path: {path} is not a unigram model, but {kind}")
        steps = json_file.steps_of(found.get("pre_tokenizer"), "pretokenizers")
        kinds = [step.get("type") for step in steps]
        if kinds not in (["Metaspace"], ["WhitespaceSplit", "Metaspace"]):
            named = ", ".join(map(str, kinds)) or "null"
            raise UserError(f"tokenizer.path: {path}: pre_tokenizer {named} is not supported; supported: 'Metaspace'")
        always = steps[-1].get("prepend_scheme", "always"), steps[-1].get("add_prefix_space", True)
        if always != ("always", True):
            raise UserError(f"tokenizer.path: {path}: a text must begin with a space, as in XLM-R")
