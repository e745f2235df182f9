"""Reads the tokenizer of a folder of transformers or of Google, and rejects unsupported settings."""

import re
from typing import Any, TypedDict

import msgspec
from etils import epath

from bertjax.common.errors import UserError
from bertjax.common.files import note, read_json
from bertjax.models.json_config import require_supported
from bertjax.models.library_fields import tables
from bertjax.text import tokenizer
from bertjax.text.tokenizer import (
    BPE,
    SPECIAL_TOKENS,
    XLNET,
    ByteFallback,
    Bytes,
    SentencePiece,
    Tokenizer,
    Unigram,
    WordPiece,
)
from bertjax.text.tokenizers.from_json import END_OF_TEXT, FAIRSEQ, FromJson
from bertjax.text.tokenizers.json_file import check_added

SETTINGS, SPECIAL, ADDED = "tokenizer_config.json", "special_tokens_map.json", "added_tokens.json"
CONFIG = "config.json"
JSON = "tokenizer.json"

# {kind: classes of transformers, without "Fast", that compute the same}. The general classes follow tokenizer.json.
GENERAL = ("PreTrainedTokenizer", "TokenizersBackend")
MPNET = "MPNetTokenizer"  # the class of WordPiece tokenizers with other special tokens than BERT
CLASSES = {
    WordPiece.kind: (
        "BertTokenizer", "DistilBertTokenizer", "ElectraTokenizer", "MobileBertTokenizer", MPNET, *GENERAL,
    ),
    BPE.kind: ("GPT2Tokenizer", "RobertaTokenizer", *GENERAL),
    ByteFallback.kind: ("GemmaTokenizer", *GENERAL),
    SentencePiece.kind: GENERAL,
    Unigram.kind: (
        "XLMRobertaTokenizer", "CamembertTokenizer", "XLNetTokenizer", "AlbertTokenizer", "DebertaV2Tokenizer",
        *GENERAL,
    ),
    Bytes.kind: GENERAL,
}  # fmt: skip
# The special tokens of a class, in the order of `SPECIAL_NAMES`, and its template of a pair: the special tokens before
# the first text, between the texts, and after the second text. GPT-2 has no template.
_BERT, _ROBERTA, _XLNET = (
    (("cls",), ("sep",), ("sep",)), (("cls",), ("sep", "sep"), ("sep",)), ((), ("sep",), ("sep", "cls")),
)  # fmt: skip
FRAMES: dict[str, tuple[tuple[str, ...], tuple[tuple[str, ...], ...] | None]] = {
    "GPT2Tokenizer": ((END_OF_TEXT,) * 5, None),
    "RobertaTokenizer": (FAIRSEQ, _ROBERTA),
    "XLMRobertaTokenizer": (FAIRSEQ, _ROBERTA),
    "CamembertTokenizer": (FAIRSEQ, _ROBERTA),
    "XLNetTokenizer": (XLNET, _XLNET),
    "AlbertTokenizer": (("<pad>", "<unk>", *SPECIAL_TOKENS[2:]), _BERT),
    "DebertaV2Tokenizer": (SPECIAL_TOKENS, _BERT),
}
# {class: the types of the steps of its normalizer}. The class ignores the normalizer of tokenizer.json, except for a
# Precompiled. A Lowercase and a Replace of spaces at the end may be missing.
NORMALIZERS: dict[str, tuple[tuple[str, ...], ...]] = {
    **dict.fromkeys(("GPT2Tokenizer", "RobertaTokenizer"), ((),)),
    **dict.fromkeys(("XLMRobertaTokenizer", "CamembertTokenizer"), ((), ("Precompiled",))),
    **dict.fromkeys(
        ("XLNetTokenizer", "AlbertTokenizer"),
        (("Replace", "Replace", "NFKD", "StripAccents"), ("Replace", "Replace", "NFKD", "StripAccents", "Precompiled")),
    ),
    "DebertaV2Tokenizer": (("Replace", "NFC", "Strip"),),
}
# The classes that return token types unless model_input_names states otherwise.
WITH_TYPES = ("BertTokenizer", "ElectraTokenizer", "MobileBertTokenizer", "DebertaV2Tokenizer")
# {class with a unigram model that lower-cases text: the default of do_lower_case}. The other classes of such tokenizers
# ignore do_lower_case.
LOWERCASING = {"XLNetTokenizer": False, "AlbertTokenizer": True, "DebertaV2Tokenizer": False}
FOLDING = ("XLNetTokenizer", "AlbertTokenizer")  # the classes of these that also strip accents
# The ends of the names of models that read pairs of texts.
WITH_PAIRS = ("ForSequenceClassification", "ForMultipleChoice", "ForQuestionAnswering", "ForNextSentencePrediction")
# {model type: the class that transformers uses unless a file states another class}.
BY_MODEL_TYPE = {
    "bert": "BertTokenizer", "distilbert": "BertTokenizer", "electra": "BertTokenizer",
    "roberta": "RobertaTokenizer", "gpt2": "GPT2Tokenizer", "xlm-roberta": "XLMRobertaTokenizer",
    "camembert": "CamembertTokenizer", "xlnet": "XLNetTokenizer", "deberta-v2": "DebertaV2Tokenizer",
    "mpnet": MPNET, "albert": "AlbertTokenizer", "nomic_bert": "BertTokenizer", "gte": "XLMRobertaTokenizer",
    "jina_embeddings_v3": "XLMRobertaTokenizer", "megatron-bert": "BertTokenizer",
}  # fmt: skip
# {field of both files: the only supported value, in addition to null}.
SUPPORTED_VALUES: dict[str, Any] = {
    "truncation_side": "right", "init_inputs": [], "sp_model_kwargs": {}, "fix_mistral_regex": False,
    "split_by_punct": False,
    # Code in the folder, and arguments that replace the files.
    **dict.fromkeys((
        "_json_padding", "_json_truncation", "_spm_precompiled_charsmap", "args", "auto_map", "gguf_file", "merges",
        "post_processor", "tokenizer_object", "vocab",
    )),
}  # fmt: skip
# Fields of both files that change neither the ids nor the length of a text.
UNUSED_FIELDS = frozenset({
    # Padding is masked. transformers truncates by the arguments of a call and by model_max_length only.
    "max_length", "pad_to_multiple_of", "pad_token_type_id", "padding", "padding_side", "stride", "tokenizer_padding",
    "tokenizer_truncation", "truncation", "truncation_strategy",
    # Decoding, offsets and templates of chats.
    "chat_control_tokens", "chat_template", "clean_up_tokenization_spaces",
    "clean_up_tokenization_spaces_for_bpe_even_though_it_will_corrupt_output", "errors", "response_schema",
    "response_template", "trim_offsets",
    # Names of files and folders.
    "_commit_hash", "_from_auto", "_from_pipeline", "backend", "files_loaded", "full_tokenizer_file", "is_local",
    "local_files_only", "name_or_path", "processor_class", "proxies", "special_tokens_map_file", "subfolder",
    "tokenizer", "tokenizer_file", "vocab_file", "verbose",
    # bertjax always encodes the names of special tokens as text.
    "split_special_tokens",
    # Fields that the supported classes of transformers 5 do not read.
    "from_slow", "legacy", "remove_space", "return_token_type_ids", "special_tokens_pattern",
    "token_type_ids_include_special_tokens", "token_type_ids_pattern", "use_fast",
})  # fmt: skip
# {field of the tokenizer of BERT: the only supported value}.
FIXED: dict[str, Any] = {
    "tokenize_chinese_chars": True,
    "do_basic_tokenize": True,
    "clean_text": True,
    "wordpieces_prefix": "##",
}
# The fields that list added tokens.
ADDING_FIELDS = (
    "additional_special_tokens", "extra_special_tokens", "model_specific_special_tokens", "added_tokens_decoder",
)  # fmt: skip
TEMPLATE = ("add_bos_token", "add_eos_token")  # whether special tokens begin and end a text
SPECIAL_NAMES = ("pad", "unk", "cls", "sep", "mask")  # as in the fields `pad_token` and the attributes `pad_id`


class _AddedToken(TypedDict):
    content: str


_Token = str | _AddedToken | None
# {field of both files that is read: its type}. `FIXED` fields have any type.
FIELD_TYPES: dict[str, Any] = {
    **dict.fromkeys(FIXED, Any),
    **dict.fromkeys(("do_lower_case", "strip_accents", "keep_accents", "add_prefix_space"), bool | None),
    **dict.fromkeys(TEMPLATE, bool | None),
    **dict.fromkeys(("max_len", "model_max_length"), float | None),
    **dict.fromkeys(("never_split", "model_input_names"), list[str] | None),
    **{f"{name}_token": _Token for name in ("bos", "eos", "pad", "unk", "cls", "sep", "mask")},
    **dict.fromkeys(("model_specific_special_tokens", "added_tokens_decoder"), dict[str, _Token] | None),
    "tokenizer_class": str | None,
    "unk_id": int | None,
    "additional_special_tokens": list[_Token] | None,
    "extra_special_tokens": list[_Token] | dict[str, _Token] | None,
}
_Settings = msgspec.defstruct("_Settings", [(name, kind, None) for name, kind in FIELD_TYPES.items()])


class _Config(TypedDict, total=False):
    """Fields of config.json that determine the tokenizer in transformers."""

    model_type: str | None
    tokenizer_class: str | None
    architectures: list[str] | None


def file_in(folder: epath.Path) -> epath.Path | None:
    """Returns the file with the tokens of the tokenizer of a folder; None for a folder without a tokenizer."""
    names = SentencePiece.filename, Bytes.filename, JSON, WordPiece.filename, *BPE.legacy_names, *Unigram.legacy_names
    return next((folder / name for name in names if (folder / name).exists()), None)


def read_folder_tokenizer(folder: epath.Path) -> Tokenizer | None:
    """Reads the tokenizer of a folder of transformers or of Google; None for a folder without a tokenizer.

    Raises `UserError` with file, field and value if a setting is not supported, or if two files contradict each other.
    """
    if (file := file_in(folder)) is None:
        return None
    for path in (folder / SETTINGS, folder / SPECIAL):
        if path.exists():
            _check_fields(path, read_json(path))
    kind, settings = tokenizer.tokenizer_kind_of(file), _settings(folder / SETTINGS)
    _check_class(folder, kind, settings)
    loaded = tokenizer.load_tokenizer(
        kind, file, lowercase=kind == WordPiece.kind and _is_uncased(folder, file, settings)
    )
    if kind == WordPiece.kind:
        _check_case(folder, file, loaded, settings)
        _check_vocabulary(folder, file, loaded)
    if kind == BPE.kind:
        default = False if _class(folder, settings) in CLASSES[BPE.kind] else None
        _check_agreement(folder, "add_prefix_space", settings, default, file, loaded.begins_with_space)
    _check_frame(folder, file, loaded, settings)
    if file.name != JSON and any(map(settings.get, TEMPLATE)):
        raise UserError(f"{folder / SETTINGS}: {' and '.join(TEMPLATE)} true are not supported without {JSON}")
    if kind == ByteFallback.kind or any(map(settings.get, TEMPLATE)):
        _check_template(folder, file, loaded, settings)
    if isinstance(loaded, Unigram):
        _check_unigram(folder, file, loaded, settings)
    _check_special(folder, loaded, settings)
    _note_token_types(folder, settings)
    return loaded


def max_length(folder: epath.Path) -> float | None:
    """Returns the sequence length of transformers; None if no file states it."""
    settings = _settings(folder / SETTINGS)
    stated = settings.get("model_max_length", settings.get("max_len"))
    if stated is not None and stated < 1:
        raise UserError(f"{folder / SETTINGS}: model_max_length is {stated:g}; expected at least 1")
    return stated


def _check_fields(path: epath.Path, fields: dict[str, Any]) -> None:
    """Raises `UserError` for a field that transformers reads and bertjax does not."""
    require_supported(path, {name: value for name, value in fields.items() if value is not None}, SUPPORTED_VALUES)
    tokens = [name for name in fields if name.endswith("_token")]  # `_check_special` reads all of them
    tables.check_fields(
        path, fields, "transformers", "tokenizer", {*FIELD_TYPES, *tokens, *SUPPORTED_VALUES, *UNUSED_FIELDS}
    )


def _settings(path: epath.Path) -> dict[str, Any]:
    """Returns the content of a file with `FIELD_TYPES`; {} without the file."""
    if not path.exists():
        return {}
    read_json(path, _Settings)  # for the types
    return read_json(path)


def _config(folder: epath.Path) -> _Config:
    return read_json(folder / CONFIG, _Config) if (folder / CONFIG).exists() else _Config()


def _class(folder: epath.Path, settings: dict[str, Any]) -> str:
    """Returns the class of transformers that reads the tokenizer, without "Fast"; "" for a general class.

    Other classes build the tokenizer from the vocabulary and the settings, and ignore the normalizer and the
    pre-tokenizer of tokenizer.json.
    """
    config = _config(folder)
    stated = settings.get("tokenizer_class") or config.get("tokenizer_class")
    name = stated.removesuffix("Fast") if stated else BY_MODEL_TYPE.get(config.get("model_type") or "", "")
    return "" if name in GENERAL or config.get("model_type") == "modernbert" else name


def _check_class(folder: epath.Path, kind: str, settings: dict[str, Any]) -> None:
    """Raises `UserError` if the class of transformers, or a setting of the class, is not supported."""
    source, name = SETTINGS, settings.get("tokenizer_class")
    if not name:
        source, name = CONFIG, _config(folder).get("tokenizer_class")
    if name and name.removesuffix("Fast") not in CLASSES[kind]:
        supported = ", ".join(CLASSES[kind])
        raise UserError(f"{folder / source}: tokenizer_class {name!r} is not supported; supported: {supported}")
    if kind == WordPiece.kind:
        require_supported(folder / SETTINGS, settings, FIXED)
        if words := settings.get("never_split"):
            raise UserError(f"{folder / SETTINGS}: never_split = {words!r} is not supported")


def _is_uncased(folder: epath.Path, vocabulary: epath.Path, settings: dict[str, Any]) -> bool:
    """Returns do_lower_case, or else whether a vocab.txt contains no capital letters."""
    if (lowercase := settings.get("do_lower_case")) is not None or vocabulary.name == JSON:
        return bool(lowercase)
    tokens = tokenizer.load_tokenizer(WordPiece.kind, vocabulary).pieces
    capitals = [token for token in tokens if re.search("[A-Z]", token) and not re.fullmatch(r"\[.*\]", token)]
    if capitals and (folder / CONFIG).exists():  # Google's folders contain bert_config.json instead
        raise UserError(
            f"{folder / SETTINGS}: do_lower_case is missing, and its default is true, but {vocabulary.name} has "
            f"{capitals[0]!r}; set do_lower_case"
        )
    return not capitals


def _check_agreement(
    folder: epath.Path, field: str, settings: dict[str, Any], default: bool | None, file: epath.Path, value: bool
) -> None:
    """Raises `UserError` if a setting contradicts the value in a file. Some classes of transformers use the setting.

    Args:
      folder: the folder, for messages.
      field: the name of the setting.
      settings: the settings.
      default: the value that transformers uses without the setting; None for the value in the file.
      file: the file, for messages.
      value: the value in the file.
    """
    stated = settings.get(field)
    if (default if stated is None else stated) not in (None, value):
        shown = f"{default} by default" if stated is None else stated
        raise UserError(f"{folder / SETTINGS}: {field} is {shown}, but {file} has {value}; use equal values")


def _check_frame(folder: epath.Path, file: epath.Path, loaded: Tokenizer, settings: dict[str, Any]) -> None:
    """Checks that a class of transformers frames and splits texts as the file does.

    Prints a note if the class ignores the normalizer of a tokenizer.json, which older versions of transformers use.

    Raises `UserError` if the class has other special tokens, another template or another pre-tokenizer.
    """
    if not (name := _class(folder, settings)):
        return
    if name not in CLASSES[loaded.kind]:
        raise UserError(
            f"{folder / SETTINGS}: tokenizer_class is missing, and transformers then uses {name}, the class of the "
            f"model_type, which does not read the {loaded.kind} tokenizer in {file.name}; set tokenizer_class to "
            f"{loaded.huggingface_class!r}"
        )
    remedy = f"set tokenizer_class to {loaded.huggingface_class!r}" if file.name == JSON else "correct tokenizer_class"
    if (name == MPNET) != (loaded.huggingface_class == MPNET) or not _has_frame(name, file, loaded):
        raise UserError(f"{folder / SETTINGS}: {name} has other special tokens than {file.name}; {remedy}")
    if file.name != JSON or not isinstance(loaded, FromJson):
        return
    splits = [step.get("type") for step in loaded.steps("pre_tokenizer")] != ["ByteLevel"]
    if (loaded.kind == BPE.kind and splits) or (name == "GemmaTokenizer" and loaded.begins_with_space):
        raise UserError(f"{folder / SETTINGS}: {name} has another pre_tokenizer than {file.name}; {remedy}")
    steps = [step.get("type") for step in loaded.steps("normalizer")]
    shown = ", ".join(map(str, steps)) or "null"
    steps = [step for step in steps if step != "Lowercase"]  # `_check_unigram` checks this step
    possible = NORMALIZERS.get(name, ())
    if possible and tuple(steps) not in {*possible, *((*steps_of_class, "Replace") for steps_of_class in possible)}:
        note(
            folder / SETTINGS,
            f"{name} of transformers 5 ignores the normalizer of {file.name}, {shown}, which bertjax and transformers "
            f"4 use; for equal ids, set tokenizer_class to {loaded.huggingface_class!r}",
        )


def _has_frame(name: str, file: epath.Path, loaded: Tokenizer) -> bool:
    """Returns whether a tokenizer has the special tokens and the template of a class of transformers."""
    names, template = FRAMES.get(name, ((), None))
    ids = {part: getattr(loaded, f"{part}_id") for part in SPECIAL_NAMES}
    if names and tuple(loaded.pieces[number] for number in ids.values()) != tuple(names):
        return False
    if file.name == Unigram.legacy_names[0] and name == "XLMRobertaTokenizer" and loaded.cls_id:
        return False  # the ids of CamemBERT, which config.json names
    frame = tuple(tuple(ids[part] for part in parts) for parts in template or ())
    return not frame or frame == (loaded.begin, loaded.between, loaded.end)


def _check_case(folder: epath.Path, file: epath.Path, loaded: Tokenizer, settings: dict[str, Any]) -> None:
    """Raises `UserError` if the settings contradict tokenizer.json, or if only accents or only case are kept."""
    is_general = (settings.get("tokenizer_class") or "").removesuffix("Fast") in GENERAL
    default = True if file.name == JSON and not is_general else None
    _check_agreement(folder, "do_lower_case", settings, default, file, loaded.lowercase)
    if (strips := settings.get("strip_accents")) not in (None, loaded.lowercase):
        raise UserError(
            f"{folder / SETTINGS}: strip_accents {strips} with do_lower_case {loaded.lowercase} is not supported"
        )


def _check_vocabulary(folder: epath.Path, file: epath.Path, loaded: Tokenizer) -> None:
    """Raises `UserError` if a vocab.txt beside tokenizer.json has other tokens."""
    vocabulary = folder / WordPiece.filename
    if file.name == JSON and vocabulary.exists():
        tokens = tokenizer.load_tokenizer(WordPiece.kind, vocabulary).pieces
        if tokens != loaded.pieces:
            pairs = enumerate(zip(tokens, loaded.pieces))
            first = next((i for i, (a, b) in pairs if a != b), min(len(tokens), len(loaded.pieces)))
            raise UserError(f"{vocabulary} and {file} have different tokens from id {first} on; delete the wrong file")


def _check_unigram(folder: epath.Path, file: epath.Path, loaded: Unigram, settings: dict[str, Any]) -> None:
    """Raises `UserError` if a class of transformers normalizes text in another way than the file."""
    if not (name := _class(folder, settings)):
        return
    lowercase = name in LOWERCASING and bool(settings.get("do_lower_case", LOWERCASING[name]))
    if lowercase != loaded.lowercase:
        raise UserError(
            f"{folder / SETTINGS}: {name} has lowercase {lowercase}, but {file} has {loaded.lowercase}; use equal "
            f"values"
        )
    supported = {"keep_accents": False, "unk_id": loaded.unk_id} if name in FOLDING else {}
    supported |= {} if name == "XLNetTokenizer" else {"add_prefix_space": True}
    require_supported(
        folder / SETTINGS, {field: value for field, value in settings.items() if value is not None}, supported
    )


def _check_template(folder: epath.Path, file: epath.Path, loaded: Tokenizer, settings: dict[str, Any]) -> None:
    """Raises `UserError` if add_bos_token and add_eos_token state another template than a file.

    transformers builds the template from these two settings if one of them is stated.
    """
    default = False if any(settings.get(name) is not None for name in TEMPLATE) else None
    for name, tokens in zip(TEMPLATE, (loaded.begin, loaded.end)):
        _check_agreement(folder, name, settings, default, file, bool(tokens))
    if default is not None and loaded.between != (*loaded.end, *loaded.begin):
        raise UserError(
            f"{folder / SETTINGS}: {' and '.join(TEMPLATE)} give another template of pairs than {file}; delete the two "
            f"fields"
        )


def _note_token_types(folder: epath.Path, settings: dict[str, Any]) -> None:
    """Prints a note if transformers passes no token types to a model with token types: all types are 0 then."""
    names, config, name = settings.get("model_input_names"), _config(folder), _class(folder, settings)
    model_type, architecture = config.get("model_type"), next(iter(config.get("architectures") or ()), "")
    reason = ""
    if names is not None and "token_type_ids" not in names:
        reason = "model_input_names has no token_type_ids"
    elif names is None and name not in WITH_TYPES and (model_type == "xlnet" or architecture.endswith(WITH_PAIRS)):
        reason = f"{name or GENERAL[1]} of transformers 5 gives no token_type_ids"  # [CLS] of XLNet has type 2
    if reason and model_type in ("bert", "electra", "albert", "megatron-bert", "xlnet", "nomic_bert"):
        note(
            folder / SETTINGS,
            f"{reason}: transformers uses token type 0 for all tokens, bertjax uses type 1 for second texts",
        )


def _check_special(folder: epath.Path, loaded: Tokenizer, settings: dict[str, Any]) -> None:
    """Raises `UserError` if special tokens have other names, or if a file adds tokens."""
    special = {f"{name}_token": loaded.pieces[getattr(loaded, f"{name}_id")] for name in SPECIAL_NAMES}
    known = {*special.values(), *loaded.added}
    for path, fields in ((folder / SETTINGS, settings), (folder / SPECIAL, _settings(folder / SPECIAL))):
        names = {name: _content(fields.get(name)) for name in special}
        require_supported(path, {name: token for name, token in names.items() if token is not None}, special)
        listed = [fields.get(name) for name in ADDING_FIELDS]
        named = [token for name, token in fields.items() if name.endswith("_token") and name not in TEMPLATE]
        listed.append(list(filter(None, named)))
        for more in listed:
            tokens = more.values() if isinstance(more, dict) else more or ()
            check_added(path, [str(_content(token)) for token in tokens], known)
        for number, token in (fields.get("added_tokens_decoder") or {}).items():
            if str(number).isdigit() and loaded.pieces[int(number) : int(number) + 1] != [_content(token)]:
                raise UserError(
                    f"{path}: added_tokens_decoder has {_content(token)!r} as {number}, but the vocabulary has not; "
                    f"correct one of the two files"
                )
    if (folder / ADDED).exists():
        check_added(folder / ADDED, list(read_json(folder / ADDED, dict[str, int])), known)


def _content(token: Any) -> Any:
    """Returns the text of a token, which is a text or an object with the text as `content`."""
    return token.get("content") if isinstance(token, dict) else token
