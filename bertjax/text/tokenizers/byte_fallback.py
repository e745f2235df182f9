"""BPE over characters with bytes for other characters: the tokenizer.json of Gemma, which mmBERT uses."""

from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

from etils import epath

from bertjax.common.errors import UserError
from bertjax.text.tokenizers import json_file
from bertjax.text.tokenizers.from_json import FromJson
from bertjax.text.tokenizers.interface import SPECIAL_TOKENS, Encoding, Joined
from bertjax.text.tokenizers.sentencepiece import SPACE

GEMMA = ("<pad>", "<unk>", "<bos>", "<eos>", "<mask>")  # the special tokens of Gemma, in the order of `SPECIAL_TOKENS`
# The only normalizer: a character replaces each space.
REPLACE = {"type": "Replace", "pattern": {"String": " "}, "content": SPACE}
# The normalizer leaves no spaces, so that this pre-tokenizer, which Gemma has, does not split a text.
SPLIT = {"type": "Split", "pattern": {"String": " "}}


class ByteFallback(FromJson):
    """BPE over a whole text, in which a character replaces the spaces. A text does not begin with an additional space.

    A character that the vocabulary lacks has a token for each of its UTF-8 bytes, such as `<0xF0>`. bertjax reads and
    writes this kind, and neither learns nor extends it.
    """

    kind = "byte_fallback"
    space = SPACE
    begins_with_space = False
    extends = False
    legacy_names = ()
    aliases: ClassVar[Mapping[str, Sequence[str]]] = {name: (token,) for name, token in zip(SPECIAL_TOKENS, GEMMA)}

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
        """Returns the text of ids, see `Tokenizer.decode`."""
        return self._decoded(ids)

    @staticmethod
    def read_legacy(path: epath.Path) -> bytes:
        """There are no older files."""
        raise NotImplementedError

    def _add(self, model: dict[str, Any], new: Sequence[str], joined: Sequence[Joined]) -> None:
        raise NotImplementedError

    @staticmethod
    def _check(path: epath.PathLike, content: json_file.TokenizerJson) -> None:
        """Raises `UserError` unless a tokenizer.json has the steps of Gemma."""
        json_file.check_bpe(path, content["model"], ("byte_fallback",))
        steps = json_file.steps_of(content.get("normalizer"), "normalizers")
        if steps != [REPLACE]:
            kinds = ", ".join(str(step.get("type")) for step in steps) or "null"
            raise UserError(
                f"tokenizer.path: {path}: normalizer {kinds} is not supported with byte_fallback; supported: a Replace "
                f"of ' ' by '{SPACE}'"
            )
        steps = json_file.steps_of(content.get("pre_tokenizer"), "pretokenizers")
        if any({name: step.get(name) for name in SPLIT} != SPLIT or step.get("invert") for step in steps):
            kinds = ", ".join(str(step.get("type")) for step in steps)
            raise UserError(
                f"tokenizer.path: {path}: pre_tokenizer {kinds} is not supported with byte_fallback; supported: null, "
                f"or a Split at ' '"
            )
