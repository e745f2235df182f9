"""Unigram tokens of the words between spaces: the tokenizer.json of XLM-R, CamemBERT, XLNet, ALBERT and DeBERTa-v2."""

import json
from collections.abc import Sequence
from typing import Any

from etils import epath

from bertjax.common.errors import UserError
from bertjax.text.tokenizers import json_file, legacy_files
from bertjax.text.tokenizers.from_json import ExtendableFromJson, ReadsLegacyFiles
from bertjax.text.tokenizers.interface import Encoding, Joined
from bertjax.text.tokenizers.sentencepiece import SPACE, score_of_new


class Unigram(ExtendableFromJson, ReadsLegacyFiles):
    """A SentencePiece model with other ids, or with changes to the text before the model.

    bertjax reads and extends this kind. It learns `SentencePiece` instead.
    """

    kind = "unigram"
    space = SPACE
    legacy_names = ("sentencepiece.bpe.model", legacy_files.SPIECE_MODEL, legacy_files.DEBERTA_MODEL)

    def _encode(self, text: str) -> Encoding:
        ids, offsets = super()._encode(text)
        # The offsets of the library include the space before a word.
        return Encoding(ids, [(start + (end - start > 1 and text[start].isspace()), end) for start, end in offsets])

    def decode(self, ids: Sequence[int]) -> str:
        """Returns the text of ids, see `Tokenizer.decode`."""
        return self._decoded(ids)

    @property
    def cannot_extend(self) -> str:
        """The reason why `extended` raises; "" if it does not."""
        is_whole = len(json.loads(self._content)["model"]["vocab"]) == self.vocab_size
        return "" if is_whole else "has added tokens after its vocabulary, at the ids of new tokens"

    @staticmethod
    def read_legacy(path: epath.Path) -> bytes:
        """Converts a SentencePiece model, see `legacy_files.unigram_json`."""
        return legacy_files.unigram_json(path)

    def _add(self, model: dict[str, Any], new: Sequence[str], joined: Sequence[Joined]) -> None:
        scores = [score for _, score in model["vocab"]]
        model["vocab"] += [[token, score_of_new(self.parts(token), scores)] for token in new]

    @staticmethod
    def _check(path: epath.PathLike, content: json_file.TokenizerJson) -> None:
        if (kind := content["model"].get("type")) != "Unigram":
            raise UserError(f"tokenizer.path: {path} is not a unigram model, but {kind}")
        steps = json_file.steps_of(content.get("pre_tokenizer"), "pretokenizers")
        kinds = [step.get("type") for step in steps]
        if kinds not in (["Metaspace"], ["WhitespaceSplit", "Metaspace"]):
            shown = ", ".join(map(str, kinds)) or "null"
            raise UserError(f"tokenizer.path: {path}: pre_tokenizer {shown} is not supported; supported: 'Metaspace'")
        if steps[-1].get("prepend_scheme", "always") != "always" or not steps[-1].get("add_prefix_space", True):
            raise UserError(f"tokenizer.path: {path}: a text must begin with a space, as in XLM-R")
