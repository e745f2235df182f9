"""tokenizer.json, the file of the tokenizers library: what is supported of it."""

import itertools
import json
from collections.abc import Collection, Iterable, Sequence
from typing import Any, NamedTuple, NotRequired, TypedDict

from bertjax.common.errors import UserError
from bertjax.common.files import parse_json
from bertjax.text.tokenizers.interface import SPECIAL_PIECES


class AddedToken(TypedDict):
    content: str
    special: NotRequired[bool]


class TokenizerJson(TypedDict):
    """What we need of tokenizer.json. The other parts say how texts are cut, padded and decoded."""

    model: dict[str, Any]
    normalizer: NotRequired[dict[str, Any] | None]
    pre_tokenizer: NotRequired[dict[str, Any] | None]
    post_processor: NotRequired[dict[str, Any] | None]
    added_tokens: NotRequired[list[AddedToken]]


def check_parts(path, content: TokenizerJson, ours: dict[str, dict]) -> None:
    """Raises `UserError` where a tokenizer.json does something else than we do."""
    for name, expected in ours.items():
        part = content.get(name) or {}
        for key, value in expected.items():
            given = part.get(key, None if key == "type" else value)
            if value != given:
                what = f"{name} {given or 'null'}" if key == "type" else f"{name}.{key} = {given!r}"
                raise UserError(f"tokenizer.path: {path}: {what} is not supported; supported: {value!r}")
    check_added(path, [token["content"] for token in content.get("added_tokens", ())])


def check_added(path, tokens: Sequence[str], known: Collection[str] = SPECIAL_PIECES) -> None:
    """Raises `UserError` for tokens besides the known ones that other libraries keep whole wherever they occur."""
    if added := [token for token in tokens if token not in known]:
        raise UserError(
            f"tokenizer.path: {path} adds tokens ({', '.join(added[:3])}), which are to be kept whole in text; that is "
            f"not supported, here they would be split"
        )


def without_pieces(content: bytes, hidden: Collection[str]) -> str:
    """Returns a tokenizer.json whose ids are the same, but which makes no text into the `hidden` pieces.

    Their names get a space at the end: the pre-tokenizers that are supported replace the spaces of a text.
    """
    changed = parse_json(content, dict[str, Any])
    names = {piece: f"{piece} " for piece in hidden}
    model = changed["model"]
    if isinstance(model["vocab"], dict):
        model["vocab"] = {names.get(piece, piece): i for piece, i in model["vocab"].items()}
    else:
        model["vocab"] = [[names.get(piece, piece), score] for piece, score in model["vocab"]]
    if "merges" in model:  # pairs as one text or as two
        pairs = [pair.split(" ") if isinstance(pair, str) else pair for pair in model["merges"]]
        model["merges"] = [pair for pair in pairs if "".join(pair) not in hidden and not {*pair} & {*hidden}]
    if model.get("unk_token"):
        model["unk_token"] = names.get(model["unk_token"], model["unk_token"])
    for token in changed.get("added_tokens") or ():
        if token["content"] in hidden:
            token.update(content=names[token["content"]], special=True)
    return json.dumps(changed, ensure_ascii=False)


class Template(NamedTuple):
    """The names of the special pieces before a text, between the texts of a pair, and after the last text."""

    begin: list[str]
    between: list[str]
    end: list[str]


def read_template(path, processor: dict[str, Any] | None, cls: str = "[CLS]", sep: str = "[SEP]") -> Template:
    """Returns what a tokenizer.json puts before a text, between two, and after the last one.

    Raises `UserError` if it neither begins nor ends with [CLS], or surrounds a text by others than [CLS] and [SEP],
    whose names in it are given.
    """
    steps = [step for step in steps_of(processor, "processors") if step.get("type") != "ByteLevel"]  # moves offsets
    kind, step = (steps[0].get("type"), steps[0]) if steps else (None, {})
    found = Template([cls], [sep], [sep])
    if kind == "TemplateProcessing":
        single, pair = _ids(step.get("single")), _ids(step.get("pair"))
        is_ours = single in ([cls, "A"], [cls, "A", sep], ["A", sep, cls])
        if is_ours:
            text = single.index("A")
            found = found._replace(begin=single[:text], end=single[text + 1 :])
        if is_ours and "B" in pair:
            found = found._replace(between=pair[text + 1 : pair.index("B")])
            is_ours = pair == [*found.begin, "A", *found.between, "B", *found.end] and {*found.between} <= {cls, sep}
    elif kind == "RobertaProcessing":
        found = found._replace(between=[sep, sep])
        given = [step.get(name) for name in ("cls", "sep")]  # pairs of a name and an id
        is_ours = all(isinstance(each, list) for each in given) and [each[:1] for each in given] == [[cls], [sep]]
    else:
        is_ours = kind in (None, "BertProcessing")
    if not is_ours or len(steps) > 1:
        raise UserError(f"tokenizer.path: {path}: post_processor {kind} is not supported; supported: {cls} text {sep}")
    return found


def _ids(steps: Any) -> list:
    """Returns what a template has, one after the other: the names of special pieces, and A and B for texts."""
    parts = (
        [part for step in steps if isinstance(step, dict) for part in step.values()] if isinstance(steps, list) else []
    )
    return [part.get("id") for part in parts if isinstance(part, dict)]


def steps_of(part: dict[str, Any] | None, name: str) -> list[dict[str, Any]]:
    """Returns the steps of a part that may be a sequence of them, which is listed as `name`."""
    if part is None:
        return []
    return part.get(name, []) if part.get("type") == "Sequence" else [part]


def adds_prefix_space(content: TokenizerJson) -> bool:
    """Whether a byte-level tokenizer.json has a space before each text that begins with none."""
    return any(step.get("add_prefix_space") for step in steps_of(content.get("pre_tokenizer"), "pretokenizers"))


def ordered(vocabulary: dict[str, int], path) -> list[str]:
    """Returns the pieces by their ids, with `no_piece` in gaps.

    transformers writes a gap where a vocab.txt has a piece twice. Raises `UserError` for two pieces of one id, for
    negative ids, and if most ids have no piece.
    """
    by_id: dict[int, str] = {}
    for piece, number in vocabulary.items():
        if number in by_id:
            raise UserError(
                f"tokenizer.path: {path}: {by_id[number]!r} and {piece!r} have the same id, {number}; give each piece "
                f"an id of its own"
            )
        by_id[number] = piece
    size = max(by_id, default=-1) + 1
    if by_id and (min(by_id) < 0 or size > 2 * len(by_id)):
        raise UserError(
            f"tokenizer.path: {path}: {len(by_id)} pieces have ids from {min(by_id)} to {size - 1}; ids must count "
            f"from 0 on"
        )
    return [by_id.get(number, no_piece(number)) for number in range(size)]


def no_piece(number: int) -> str:
    """Returns the name of an id that has no piece. No tokenizer cuts text into it, since it has spaces."""
    return f"[no piece {number}]"


def units(tokenizer, text: str, unknown: int) -> list[list[str]]:
    """Returns the pieces of a text by a tokenizer of the tokenizers library, in the units that it cuts it into first,
    and without those that are unknown."""
    if tokenizer.normalizer is not None:
        text = tokenizer.normalizer.normalize_str(text)
    cut = [tokenizer.model.tokenize(unit) for unit, _ in tokenizer.pre_tokenizer.pre_tokenize_str(text)]
    return list(itertools.chain.from_iterable(known_runs(((t.id, t.value) for t in unit), unknown) for unit in cut))


def known_runs(pieces: Iterable[tuple[int, str]], unknown: int) -> list[list[str]]:
    """Returns the pieces between those that are unknown."""
    runs = itertools.groupby(pieces, key=lambda each: each[0] != unknown)
    return [[piece for _, piece in run] for is_known, run in runs if is_known]


def with_special_pieces(
    tokenizer, special: Sequence[str] = SPECIAL_PIECES, mask_takes_space: bool = False, ends_with_cls: bool = False
) -> str:
    """Returns the JSON of a tokenizers-library tokenizer with BERT's template; `special` names its special pieces.

    Args:
      mask_takes_space: the space before [MASK] is a part of it, since the words of byte-level pieces begin with theirs.
      ends_with_cls: the template is XLNet's.
    """
    from tokenizers import AddedToken as HuggingFaceToken
    from tokenizers import processors

    *others, mask = special
    tokenizer.add_special_tokens(others)
    tokenizer.add_special_tokens([HuggingFaceToken(mask, lstrip=mask_takes_space, normalized=False)])
    _, _, cls, sep = others
    begin, end = ("", f" {cls}:2") if ends_with_cls else (f"{cls}:0 ", "")
    tokenizer.post_processor = processors.TemplateProcessing(
        single=f"{begin}$A:0 {sep}:0{end}",
        pair=f"{begin}$A:0 {sep}:0 $B:1 {sep}:1{end}",
        special_tokens=[(name, tokenizer.token_to_id(name)) for name in (cls, sep)],
    )
    return tokenizer.to_str()
