"""BPE over characters with bytes for other characters: the tokenizer.json of Gemma and of mmBERT."""

import functools
import json
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

from etils import epath

from bertjax.common.errors import UserError
from bertjax.text.tokenizers import json_file
from bertjax.text.tokenizers.from_json import FromJson
from bertjax.text.tokenizers.interface import SPECIAL_TOKENS, Encoding
from bertjax.text.tokenizers.sentencepiece import SPACE

GEMMA = ("<pad>", "<unk>", "<bos>", "<eos>", "<mask>")  # the special tokens of Gemma, in the order of `SPECIAL_TOKENS`
# The only normalizer: a character replaces each space.
REPLACE = {"type": "Replace", "pattern": {"String": " "}, "content": SPACE}
# The pre-tokenizer of Gemma. The normalizer leaves no spaces, so that it does not split a text.
SPLIT = {"type": "Split", "pattern": {"String": " "}}
# The pre-tokenizer of mmBERT splits a text before each space, and adds a space before the text.
METASPACE = {"type": "Metaspace", "replacement": SPACE}
SCHEMES = ("always", "never")  # values of `prepend_scheme`


class ByteFallback(FromJson):
    """BPE over a text, in which a character replaces the spaces.

    In mmBERT, a text begins with a space; in Gemma, it does not. A character that the vocabulary lacks has a token for
    each of its UTF-8 bytes, such as `<0xF0>`. bertjax reads and writes this kind, and neither learns nor extends it.
    """

    kind = "byte_fallback"
    space = SPACE
    aliases: ClassVar[Mapping[str, Sequence[str]]] = {name: (token,) for name, token in zip(SPECIAL_TOKENS, GEMMA)}

    @functools.cached_property
    def begins_with_space(self) -> bool:  # type: ignore[override]
        """Whether the file adds a space to a text that does not begin with one."""
        return any(step.get("prepend_scheme") == "always" for step in self.steps("pre_tokenizer"))

    def encode_following(self, texts: Sequence[str]) -> list[list[int]]:
        """Encodes texts with a space before each, see `Tokenizer.encode_following`."""
        return self.encode_ids([f" {text}" if text and not text[0].isspace() else text for text in texts])

    def _encode(self, text: str) -> Encoding:
        ids, offsets = super()._encode(text)
        # The offsets of the library include the spaces before a word.
        parts = [text[start:end] for start, end in offsets]
        spaces = [len(part) - len(part.lstrip(" ")) if part.strip(" ") else 0 for part in parts]
        return Encoding(ids, [(start + count, end) for (start, end), count in zip(offsets, spaces, strict=True)])

    def decode(self, ids: Sequence[int]) -> str:
        """Returns the text of ids, without the space that encoding adds."""
        text = self._decoded(ids)
        return text.removeprefix(" ") if self.begins_with_space else text

    @staticmethod
    def _check(path: epath.PathLike, content: json_file.TokenizerJson) -> None:
        """Raises `UserError` unless a tokenizer.json has the steps of Gemma or of mmBERT."""
        json_file.check_bpe(path, content["model"], ("byte_fallback",))
        steps = json_file.steps_of(content.get("normalizer"), "normalizers")
        if steps != [REPLACE]:
            kinds = ", ".join(str(step.get("type")) for step in steps) or "null"
            raise UserError(
                f"tokenizer.path: {path}: normalizer {kinds} is not supported with byte_fallback; supported: a Replace "
                f"of ' ' by '{SPACE}'"
            )
        steps = json_file.steps_of(content.get("pre_tokenizer"), "pretokenizers")
        if len(steps) > 1 or not all(map(_is_supported, steps)):
            raise UserError(
                f"tokenizer.path: {path}: pre_tokenizer {json.dumps(steps, ensure_ascii=False)} is not supported with "
                f"byte_fallback; supported: null, a Split at ' ', or a Metaspace with prepend_scheme always or never"
            )


def _is_supported(step: Mapping[str, Any]) -> bool:
    """Returns whether a pre-tokenizer is supported."""
    if step.get("type") == "Metaspace":
        return METASPACE.items() <= step.items() and step.get("prepend_scheme") in SCHEMES
    return SPLIT.items() <= step.items() and not step.get("invert")
