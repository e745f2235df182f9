"""tokenizer.json, the file of the tokenizers library: checks the supported parts, and changes and writes files."""

import json
from collections.abc import Collection, Mapping, Sequence
from typing import Any, NamedTuple, NotRequired, TypedDict

import msgspec
import tokenizers
from etils import epath
from tokenizers import AddedToken, processors

from bertjax.common.errors import UserError
from bertjax.common.files import parse_json
from bertjax.text.tokenizers.interface import SPECIAL_TOKENS


class AddedPiece(TypedDict):
    """An entry of `added_tokens`: a token that stays whole wherever a text contains it."""

    content: str
    special: NotRequired[bool]


class TokenizerJson(TypedDict):
    """The parts of tokenizer.json that bertjax reads."""

    model: dict[str, Any]
    normalizer: NotRequired[dict[str, Any] | None]
    pre_tokenizer: NotRequired[dict[str, Any] | None]
    post_processor: NotRequired[dict[str, Any] | None]
    added_tokens: NotRequired[list[AddedPiece]]


class _UnsupportedBPE(msgspec.Struct):
    """Fields of a BPE model that make tokens random, add characters to tokens, or encode characters as bytes."""

    dropout: float | None = None
    continuing_subword_prefix: str | None = None
    end_of_word_suffix: str | None = None
    byte_fallback: bool = False


def check_bpe(path: epath.PathLike, model: Mapping[str, Any], supported: Collection[str] = ()) -> None:
    """Raises `UserError` if the BPE model of a tokenizer.json has an unsupported field that is not in `supported`."""
    for name, value in msgspec.structs.asdict(msgspec.convert(model, _UnsupportedBPE)).items():
        if value and name not in supported:
            raise UserError(f"tokenizer.path: {path}: model.{name} = {value!r} is not supported; supported: null")


def check_json_parts(
    path: epath.PathLike,
    content: TokenizerJson,
    supported: Mapping[str, Mapping[str, Any]],
    known: Collection[str] = SPECIAL_TOKENS,
) -> None:
    """Raises `UserError` if a part of a tokenizer.json differs from `supported`, or an added token is not `known`."""
    for name, expected in supported.items():
        part: Mapping[str, Any] = content.get(name) or {}  # type: ignore[assignment]
        for key, value in expected.items():
            stated = part.get(key, None if key == "type" else value)
            if value != stated:
                field = f"{name} {stated or 'null'}" if key == "type" else f"{name}.{key} = {stated!r}"
                raise UserError(f"tokenizer.path: {path}: {field} is not supported; supported: {value!r}")
    check_added(path, [token["content"] for token in content.get("added_tokens", ())], known)


def check_added(path: epath.PathLike, tokens: Sequence[str], known: Collection[str] = SPECIAL_TOKENS) -> None:
    """Raises `UserError` for added tokens that are not `known`: other libraries keep these whole in text."""
    if added := [token for token in tokens if token not in known]:
        raise UserError(
            f"tokenizer.path: {path} adds tokens ({', '.join(added[:3])}), which is not supported, because bertjax "
            f"would split them in text"
        )


def without_tokens(content: bytes, hidden: Collection[str]) -> str:
    """Returns a tokenizer.json with the same ids that encodes no text to the `hidden` tokens.

    The names of hidden tokens get a space at the end, because supported pre-tokenizers replace the spaces of a text.
    """
    fields = parse_json(content, dict[str, Any])
    names = {token: f"{token} " for token in hidden}
    model = fields["model"]
    if isinstance(model["vocab"], dict):
        model["vocab"] = {names.get(token, token): i for token, i in model["vocab"].items()}
    else:
        model["vocab"] = [[names.get(token, token), score] for token, score in model["vocab"]]
    if "merges" in model:  # a pair is one text or two
        pairs = [pair.split(" ") if isinstance(pair, str) else pair for pair in model["merges"]]
        model["merges"] = [pair for pair in pairs if "".join(pair) not in hidden and not {*pair} & {*hidden}]
    if model.get("unk_token"):
        model["unk_token"] = names.get(model["unk_token"], model["unk_token"])
    for token in fields.get("added_tokens") or ():
        if token["content"] in hidden:
            token.update(content=names[token["content"]], special=True)
    return json.dumps(fields, ensure_ascii=False)


class Template(NamedTuple):
    """The names of the special tokens before a text, between the texts of a pair, and after the last text."""

    begin: list[str]
    between: list[str]
    end: list[str]


def read_template(
    path: epath.PathLike, processor: dict[str, Any] | None, cls: str = "[CLS]", sep: str = "[SEP]"
) -> Template:
    """Reads the template of the post-processor of a tokenizer.json.

    Args:
      path: the file, for messages.
      processor: the post-processor.
      cls: the name of [CLS] in the file.
      sep: the name of [SEP] in the file.

    Raises:
      UserError: the template neither begins nor ends with [CLS], or contains special tokens besides [CLS] and [SEP].
    """
    # ByteLevel changes offsets only.
    steps = [step for step in steps_of(processor, "processors") if step.get("type") != "ByteLevel"]
    step = steps[0] if steps else {}
    kind = step.get("type")
    template = Template([cls], [sep], [sep])
    if kind == "TemplateProcessing":
        single, pair = _ids(step.get("single")), _ids(step.get("pair"))
        is_supported = single in ([cls, "A"], [cls, "A", sep], ["A", sep, cls])
        if is_supported:
            text = single.index("A")
            template = template._replace(begin=single[:text], end=single[text + 1 :])
        if is_supported and "B" in pair:
            between = pair[text + 1 : pair.index("B")]
            template = template._replace(between=between)
            is_supported = pair == [*template.begin, "A", *between, "B", *template.end] and {*between} <= {cls, sep}
    elif kind == "RobertaProcessing":
        template = template._replace(between=[sep, sep])
        names: list[Any] = [step.get("cls"), step.get("sep")]  # pairs of a name and an id
        is_supported = all(isinstance(name, list) for name in names) and [names[0][:1], names[1][:1]] == [[cls], [sep]]
    else:
        is_supported = kind in (None, "BertProcessing")
    if not is_supported or len(steps) > 1:
        raise UserError(f"tokenizer.path: {path}: post_processor {kind} is not supported; supported: {cls} text {sep}")
    return template


def _ids(steps: Any) -> list[Any]:
    """Returns the elements of a template in order: the names of special tokens, and A and B for texts."""
    steps = [step for step in steps if isinstance(step, dict)] if isinstance(steps, list) else []
    return [part.get("id") for step in steps for part in step.values() if isinstance(part, dict)]


def steps_of(part: dict[str, Any] | None, name: str) -> list[dict[str, Any]]:
    """Returns the steps of a part, such as the normalizer. The field `name` of a sequence contains its steps."""
    if part is None:
        return []
    return part.get(name, []) if part.get("type") == "Sequence" else [part]


def adds_prefix_space(content: TokenizerJson) -> bool:
    """Returns whether a byte-level tokenizer.json adds a space to each text that does not begin with one."""
    return any(step.get("add_prefix_space") for step in steps_of(content.get("pre_tokenizer"), "pretokenizers"))


def ordered(vocabulary: dict[str, int], path: epath.PathLike) -> list[str]:
    """Returns the tokens by id, with `no_token` in gaps.

    transformers writes a gap if a vocab.txt contains a token twice.

    Raises:
      UserError: two tokens have the same id, an id is negative, or most ids have no token.
    """
    by_id: dict[int, str] = {}
    for token, number in vocabulary.items():
        if number in by_id:
            raise UserError(
                f"tokenizer.path: {path}: {by_id[number]!r} and {token!r} have the same id, {number}; give each token "
                f"another id"
            )
        by_id[number] = token
    size = max(by_id, default=-1) + 1
    if by_id and (min(by_id) < 0 or size > 2 * len(by_id)):
        raise UserError(
            f"tokenizer.path: {path}: {len(by_id)} tokens have ids from {min(by_id)} to {size - 1}; ids must be "
            f"consecutive from 0"
        )
    return [by_id.get(number, no_token(number)) for number in range(size)]


def no_token(number: int) -> str:
    """Returns the name of an id without a token. The name contains spaces, so that no text is encoded to it."""
    return f"[no piece {number}]"


def with_special_tokens(
    tokenizer: tokenizers.Tokenizer,
    special: Sequence[str] = SPECIAL_TOKENS,
    mask_takes_space: bool = False,
    ends_with_cls: bool = False,
    separators: int = 1,
) -> str:
    """Adds special tokens and a template to a tokenizer of the tokenizers library; returns its JSON.

    Args:
      tokenizer: the tokenizer.
      special: the names of the special tokens, in the order of `SPECIAL_TOKENS`.
      mask_takes_space: whether the space before [MASK] is part of [MASK], as the space before a word is part of the
        word in byte-level tokens.
      ends_with_cls: whether the template is the template of XLNet instead of BERT.
      separators: the number of [SEP] between the texts of a pair.
    """
    *without_mask, mask = special
    tokenizer.add_special_tokens(without_mask)
    tokenizer.add_special_tokens([AddedToken(mask, lstrip=mask_takes_space, normalized=False)])
    _, _, cls, sep = without_mask
    begin, end = ("", f" {cls}:2") if ends_with_cls else (f"{cls}:0 ", "")
    pair = f"{begin}$A:0{f' {sep}:0' * separators} $B:1 {sep}:1{end}"
    set_template(tokenizer, f"{begin}$A:0 {sep}:0{end}", pair, (cls, sep))
    return tokenizer.to_str()


def set_template(tokenizer: tokenizers.Tokenizer, single: str, pair: str, special: Sequence[str]) -> None:
    """Sets the template of a text and of a pair of texts, which contain the `special` tokens."""
    ids = [(name, tokenizer.token_to_id(name)) for name in special]
    tokenizer.post_processor = processors.TemplateProcessing(single=single, pair=pair, special_tokens=ids)
