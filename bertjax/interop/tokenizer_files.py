"""The tokenizer beside a checkpoint of others: read if all that the folder says of it is what we do, else refused."""

import re
from typing import Any, TypedDict

from etils import epath

from bertjax.config import UserError
from bertjax.files import read_json
from bertjax.text import tokenizer
from bertjax.text.tokenizer import BPE, Bytes, SentencePiece, Tokenizer, Unigram, WordPiece

SETTINGS, SPECIAL, ADDED = "tokenizer_config.json", "special_tokens_map.json", "added_tokens.json"
JSON = "tokenizer.json"

# Classes of transformers, without "Fast", that do what our kinds do. The general ones do what tokenizer.json says.
GENERAL = ("PreTrainedTokenizer", "TokenizersBackend")
CLASSES = {
    WordPiece.kind: ("BertTokenizer", "DistilBertTokenizer", "ElectraTokenizer", "MobileBertTokenizer", *GENERAL),
    BPE.kind: ("GPT2Tokenizer", "RobertaTokenizer", *GENERAL),
    SentencePiece.kind: GENERAL,
    Unigram.kind: ("XLMRobertaTokenizer", "CamembertTokenizer", "XLNetTokenizer", *GENERAL),
    Bytes.kind: GENERAL,
}
# Settings of BERT's tokenizer in transformers that change its pieces, as we have them.
FIXED = {"tokenize_chinese_chars": True, "do_basic_tokenize": True, "clean_text": True, "wordpieces_prefix": "##"}


class _Named(TypedDict):
    content: str


_Token = str | _Named | None


class _Settings(TypedDict, total=False):
    """What we need of `SETTINGS` and `SPECIAL`."""

    tokenizer_class: str | None
    do_lower_case: bool | None
    strip_accents: bool | None
    tokenize_chinese_chars: Any
    do_basic_tokenize: Any
    clean_text: Any
    wordpieces_prefix: Any
    never_split: list[str] | None
    add_prefix_space: bool | None
    pad_token: _Token
    unk_token: _Token
    cls_token: _Token
    sep_token: _Token
    mask_token: _Token
    additional_special_tokens: list[_Token] | None
    extra_special_tokens: list[_Token] | dict[str, _Token] | None
    added_tokens_decoder: dict[str, _Token] | None


def file_in(folder: epath.Path) -> epath.Path | None:
    """Returns the file that the pieces of a checkpoint are read from."""
    names = (SentencePiece.filename, Bytes.filename, JSON, WordPiece.filename, *BPE.older, *Unigram.older)
    return next((folder / name for name in names if (folder / name).exists()), None)


def read(folder: epath.Path) -> Tokenizer | None:
    """Reads the tokenizer of a folder of transformers or of Google; None if there is none.

    Raises `UserError` with file, field and value where the folder asks for something else than we do, or where two of
    its files contradict each other.
    """
    if (file := file_in(folder)) is None:
        return None
    kind, settings = tokenizer.kind_of(file), _settings(folder)
    _check_class(folder, kind, settings)
    found = tokenizer.load(kind, file, lowercase=kind == WordPiece.kind and _is_uncased(folder, file, settings))
    if kind == WordPiece.kind:
        _check_case(folder, file, found, settings)
        _check_vocabulary(folder, file, found)
    if kind == BPE.kind:
        _check_prefix(folder, file, found, settings)
    _check_special(folder, found, settings)
    return found


def _settings(folder: epath.Path) -> _Settings:
    return read_json(folder / SETTINGS, _Settings) if (folder / SETTINGS).exists() else {}


def _check_class(folder: epath.Path, kind: str, settings: _Settings) -> None:
    stated = settings.get("tokenizer_class")
    if stated and stated.removesuffix("Fast") not in CLASSES[kind]:
        supported = ", ".join(CLASSES[kind])
        raise UserError(f"{folder / SETTINGS}: tokenizer_class {stated!r} is not supported; supported: {supported}")
    if kind == WordPiece.kind:
        for name, value in FIXED.items():
            if settings.get(name, value) != value:
                raise UserError(
                    f"{folder / SETTINGS}: {name} = {settings[name]!r} is not supported; supported: {value!r}"
                )
        if kept := settings.get("never_split"):
            raise UserError(f"{folder / SETTINGS}: never_split = {kept!r} is not supported")


def _is_uncased(folder: epath.Path, vocabulary: epath.Path, settings: _Settings) -> bool:
    """Whether a vocab.txt is of lower-case text: as the settings say; or if it has no capital letters."""
    if (lowercase := settings.get("do_lower_case")) is not None or vocabulary.name == JSON:
        return bool(lowercase)
    pieces = tokenizer.load(WordPiece.kind, vocabulary).pieces
    capitals = [piece for piece in pieces if re.search("[A-Z]", piece) and not re.fullmatch(r"\[.*\]", piece)]
    if capitals and (folder / "config.json").exists():  # Google has bert_config.json, and says it by the folder's name
        raise UserError(
            f"{folder / SETTINGS}: no do_lower_case, which transformers takes for true, but {vocabulary.name} has "
            f"{capitals[0]!r}: add it"
        )
    return not capitals


def _check_case(folder: epath.Path, file: epath.Path, found: Tokenizer, settings: _Settings) -> None:
    """Raises `UserError` if settings and tokenizer.json contradict each other; a class of BERT's follows the former."""
    is_general = (settings.get("tokenizer_class") or "").removesuffix("Fast") in GENERAL
    lowercase = settings.get("do_lower_case")
    if lowercase is None and file.name == JSON and not is_general:
        lowercase = True  # their default
    if lowercase is not None and lowercase != found.lowercase:
        stated = settings.get("do_lower_case")
        said = "not set, which transformers takes for True" if stated is None else stated
        raise UserError(
            f"{folder / SETTINGS}: do_lower_case is {said}, but {file} has lowercase {found.lowercase}; make them agree"
        )
    if (strips := settings.get("strip_accents")) not in (None, found.lowercase):
        raise UserError(
            f"{folder / SETTINGS}: strip_accents {strips} with do_lower_case {found.lowercase} is not supported"
        )


def _check_vocabulary(folder: epath.Path, file: epath.Path, found: Tokenizer) -> None:
    other = folder / WordPiece.filename
    if file.name == JSON and other.exists():
        theirs = tokenizer.load(WordPiece.kind, other).pieces
        if theirs != found.pieces:
            pairs = enumerate(zip(theirs, found.pieces))
            place = next((i for i, (a, b) in pairs if a != b), min(len(theirs), len(found.pieces)))
            raise UserError(f"{other} and {file} have other pieces from id {place} on; delete the one that is wrong")


def _check_prefix(folder: epath.Path, file: epath.Path, found: BPE, settings: _Settings) -> None:
    """Raises `UserError` if settings and file contradict each other; transformers follows the former."""
    stated = settings.get("add_prefix_space")
    if stated not in (None, found.begins_with_space):
        raise UserError(
            f"{folder / SETTINGS}: add_prefix_space is {stated}, but {file} has {found.begins_with_space}; "
            f"make them agree"
        )


def _check_special(folder: epath.Path, found: Tokenizer, settings: _Settings) -> None:
    """Raises `UserError` if special pieces have other names, or if there are more of them."""
    own = {name: found.pieces[getattr(found, f"{name}_id")] for name in ("pad", "unk", "cls", "sep", "mask")}
    known = {*own.values(), *found.added}
    sources = {folder / SETTINGS: settings}
    if (folder / SPECIAL).exists():
        sources[folder / SPECIAL] = read_json(folder / SPECIAL, _Settings)
    for path, content in sources.items():
        for name, piece in own.items():
            stated = _content(content.get(f"{name}_token"))
            if stated not in (None, piece):
                raise UserError(f"{path}: {name}_token {stated!r} is not supported; supported: {piece!r}")
        listed = [content.get(name) for name in ("additional_special_tokens", "extra_special_tokens")]
        listed.append(content.get("added_tokens_decoder") or {})
        for more in listed:
            tokens = more.values() if isinstance(more, dict) else more or ()
            tokenizer.check_added(path, [str(_content(token)) for token in tokens], known)
        for number, token in (content.get("added_tokens_decoder") or {}).items():
            if str(number).isdigit() and found.pieces[int(number) : int(number) + 1] != [_content(token)]:
                raise UserError(f"{path}: added_tokens_decoder has {_content(token)!r} as {number}, the vocabulary not")
    if (folder / ADDED).exists():
        tokenizer.check_added(folder / ADDED, list(read_json(folder / ADDED, dict[str, int])), known)


def _content(token: _Token) -> str | None:
    return token.get("content") if isinstance(token, dict) else token
