"""Reads the tokenizer of a folder of transformers or of Google.

A folder whose settings ask for other steps than bertjax takes is refused.
"""

import re
from typing import Any, TypedDict

from etils import epath

from bertjax.common.errors import UserError
from bertjax.common.files import note, read_json
from bertjax.models.library_fields import tables
from bertjax.text import tokenizer
from bertjax.text.tokenizer import BPE, Bytes, SentencePiece, Tokenizer, Unigram, WordPiece

SETTINGS, SPECIAL, ADDED = "tokenizer_config.json", "special_tokens_map.json", "added_tokens.json"
CONFIG = "config.json"
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
# The classes that give the types of tokens, unless model_input_names states otherwise, and the ends of the names of the
# models that read pairs of texts.
WITH_TYPES = ("BertTokenizer", "ElectraTokenizer", "MobileBertTokenizer")
WITH_PAIRS = ("ForSequenceClassification", "ForMultipleChoice", "ForQuestionAnswering", "ForNextSentencePrediction")
# The classes that transformers reads a tokenizer of a model type with, unless a file states another one.
BY_MODEL_TYPE = {
    "bert": "BertTokenizer", "distilbert": "BertTokenizer", "electra": "BertTokenizer",
    "roberta": "RobertaTokenizer", "gpt2": "GPT2Tokenizer", "xlm-roberta": "XLMRobertaTokenizer",
    "camembert": "CamembertTokenizer", "xlnet": "XLNetTokenizer",
}  # fmt: skip
# Fields of both files with the only value, besides null, that is supported.
SUPPORTED_VALUES = {
    "truncation_side": "right", "init_inputs": [], "sp_model_kwargs": {}, "fix_mistral_regex": False,
    # Code beside the files, and arguments that replace the files.
    **dict.fromkeys((
        "_json_padding", "_json_truncation", "_spm_precompiled_charsmap", "args", "auto_map", "gguf_file", "merges",
        "post_processor", "tokenizer_object", "vocab",
    )),
}  # fmt: skip
# Fields of both files that change neither the ids nor the length of a text.
UNUSED_FIELDS = frozenset({
    # Padding, which is masked; transformers truncates by the arguments of a call and model_max_length alone.
    "max_length", "pad_to_multiple_of", "pad_token_type_id", "padding", "padding_side", "stride", "tokenizer_padding",
    "tokenizer_truncation", "truncation", "truncation_strategy",
    # Decoding, offsets and templates of chats.
    "chat_control_tokens", "chat_template", "clean_up_tokenization_spaces",
    "clean_up_tokenization_spaces_for_bpe_even_though_it_will_corrupt_output", "errors", "response_schema",
    "response_template", "trim_offsets",
    # Names of files, and where they were.
    "_commit_hash", "_from_auto", "_from_pipeline", "backend", "files_loaded", "full_tokenizer_file", "is_local",
    "local_files_only", "name_or_path", "processor_class", "proxies", "special_tokens_map_file", "subfolder",
    "tokenizer", "tokenizer_file", "vocab_file", "verbose",
    # bertjax always splits the names of special pieces in a text.
    "split_special_tokens",
    # Fields that no class of transformers 5 obeys that bertjax reads.
    "from_slow", "legacy", "remove_space", "return_token_type_ids", "special_tokens_pattern",
    "token_type_ids_include_special_tokens", "token_type_ids_pattern", "use_fast",
})  # fmt: skip
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
    add_bos_token: bool | None
    add_eos_token: bool | None
    keep_accents: bool | None
    unk_id: int | None
    max_len: float | None
    model_max_length: float | None
    model_input_names: list[str] | None
    model_specific_special_tokens: dict[str, _Token] | None
    bos_token: _Token
    eos_token: _Token
    pad_token: _Token
    unk_token: _Token
    cls_token: _Token
    sep_token: _Token
    mask_token: _Token
    additional_special_tokens: list[_Token] | None
    extra_special_tokens: list[_Token] | dict[str, _Token] | None
    added_tokens_decoder: dict[str, _Token] | None


class _Config(TypedDict, total=False):
    """Fields of config.json that transformers chooses a tokenizer by."""

    model_type: str | None
    tokenizer_class: str | None
    architectures: list[str] | None


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
    for path in (folder / SETTINGS, folder / SPECIAL):
        if path.exists():
            _check_fields(path, read_json(path))
    kind, settings = tokenizer.kind_of(file), _settings(folder)
    _check_class(folder, kind, settings)
    found = tokenizer.load(kind, file, lowercase=kind == WordPiece.kind and _is_uncased(folder, file, settings))
    if kind == WordPiece.kind:
        _check_case(folder, file, found, settings)
        _check_vocabulary(folder, file, found)
    if kind == BPE.kind:
        _check_prefix(folder, file, found, settings)
    if kind == Unigram.kind:
        _check_unigram(folder, file, found, settings)
    if file.name != JSON and (settings.get("add_bos_token") or settings.get("add_eos_token")):
        raise UserError(f"{folder / SETTINGS}: add_bos_token and add_eos_token true are not supported without {JSON}")
    _check_special(folder, found, settings)
    _check_inputs(folder, settings)
    return found


def max_length(folder: epath.Path) -> float | None:
    """Returns the number of tokens that transformers truncates a text to; None if no file states it."""
    settings = _settings(folder)
    stated = settings.get("model_max_length", settings.get("max_len"))
    if stated is not None and stated < 1:
        raise UserError(f"{folder / SETTINGS}: model_max_length is {stated:g}; expected at least 1")
    return stated


def _check_fields(path: epath.Path, fields: dict[str, Any]) -> None:
    """Raises `UserError` for a field that transformers obeys and bertjax does not."""
    for name, value in SUPPORTED_VALUES.items():
        if fields.get(name) not in (None, value):
            raise UserError(f"{path}: {name} {fields[name]!r} is not supported; supported: {value!r}")
    tokens = [name for name in fields if name.endswith("_token")]  # `_check_special` reads all of them
    read = {*_Settings.__annotations__, *tokens, *SUPPORTED_VALUES, *UNUSED_FIELDS}
    tables.check_fields(path, fields, "transformers", "tokenizer", read)


def _settings(folder: epath.Path) -> _Settings:
    return read_json(folder / SETTINGS, _Settings) if (folder / SETTINGS).exists() else {}


def _config(folder: epath.Path) -> _Config:
    return read_json(folder / CONFIG, _Config) if (folder / CONFIG).exists() else {}


def _class(folder: epath.Path, settings: _Settings) -> str:
    """Returns the name, without "Fast", of the class of transformers that reads the tokenizer; "" for a general one.

    A class that is not general builds the tokenizer from the vocabulary and the settings: it passes over the
    normalizer and the pre-tokenizer in tokenizer.json.
    """
    config = _config(folder)
    stated = settings.get("tokenizer_class") or config.get("tokenizer_class")
    name = stated.removesuffix("Fast") if stated else BY_MODEL_TYPE.get(config.get("model_type") or "", "")
    is_general = name in GENERAL or config.get("model_type") == "modernbert"
    return "" if is_general else name


def _check_class(folder: epath.Path, kind: str, settings: _Settings) -> None:
    stated, supported = {SETTINGS: settings.get("tokenizer_class")}, ", ".join(CLASSES[kind])
    if not stated[SETTINGS]:
        stated[CONFIG] = _config(folder).get("tokenizer_class")
    for file, name in stated.items():
        if name and name.removesuffix("Fast") not in CLASSES[kind]:
            raise UserError(f"{folder / file}: tokenizer_class {name!r} is not supported; supported: {supported}")
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
    stated, begins = settings.get("add_prefix_space"), found.begins_with_space
    is_false = stated is None and _class(folder, settings) in CLASSES[BPE.kind]  # the default of these classes
    if (False if is_false else stated) not in (None, begins):
        value = "not set, which transformers takes for False" if is_false else stated
        raise UserError(f"{folder / SETTINGS}: add_prefix_space is {value}, but {file} has {begins}; make them agree")


def _check_unigram(folder: epath.Path, file: epath.Path, found: Tokenizer, settings: _Settings) -> None:
    """Raises `UserError` if a class of transformers changes a text in another way than the file."""
    name = _class(folder, settings)
    lowercase = name == "XLNetTokenizer" and bool(settings.get("do_lower_case"))  # the other classes pass over it
    if name and lowercase != found.lowercase:
        raise UserError(
            f"{folder / SETTINGS}: {name} has lowercase {lowercase}, but {file} has {found.lowercase}; make them agree"
        )
    is_xlnet = name == "XLNetTokenizer"
    only = {"keep_accents": False, "unk_id": found.unk_id} if is_xlnet else {"add_prefix_space": True} if name else {}
    for field, value in only.items():
        if settings.get(field) not in (None, value):
            raise UserError(
                f"{folder / SETTINGS}: {field} {settings.get(field)!r} is not supported; supported: {value!r}"
            )


def _check_inputs(folder: epath.Path, settings: _Settings) -> None:
    """Prints a note if transformers gives a model of token types no types: all of them are 0 then."""
    names, config, name = settings.get("model_input_names"), _config(folder), _class(folder, settings)
    model_type, architecture = config.get("model_type"), next(iter(config.get("architectures") or ()), "")
    if names is not None:
        reason = "" if "token_type_ids" in names else "model_input_names has no token_type_ids"
    else:
        has_pairs = model_type == "xlnet" or architecture.endswith(WITH_PAIRS)  # XLNet's [CLS] has a type of its own
        reason = f"{name or GENERAL[1]} of transformers 5 gives no token_type_ids" if has_pairs else ""
        reason = "" if name in WITH_TYPES else reason
    if reason and model_type in ("bert", "electra", "xlnet"):
        text = f"{reason}, so that transformers has type 0 for all tokens; bertjax does not"
        note(folder / SETTINGS, text)


def _check_special(folder: epath.Path, found: Tokenizer, settings: _Settings) -> None:
    """Raises `UserError` if special pieces have other names, or if there are more of them."""
    own = {name: found.pieces[getattr(found, f"{name}_id")] for name in ("pad", "unk", "cls", "sep", "mask")}
    known = {*own.values(), *found.added}
    sources = {folder / SETTINGS: settings}
    if (folder / SPECIAL).exists():
        sources[folder / SPECIAL] = read_json(folder / SPECIAL, _Settings)
    for path, content in sources.items():
        content = read_json(path) | content if path.exists() else content  # with tokens of any other name
        for name, piece in own.items():
            stated = _content(content.get(f"{name}_token"))
            if stated not in (None, piece):
                raise UserError(f"{path}: {name}_token {stated!r} is not supported; supported: {piece!r}")
        names = "additional_special_tokens", "extra_special_tokens", "model_specific_special_tokens"
        listed = [content.get(name) for name in names]
        listed.append([token for name, token in content.items() if name.endswith("_token") and token])
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
