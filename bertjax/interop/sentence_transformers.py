"""Folders of sentence-transformers: a Hugging Face folder, and `modules.json` with the modules of a model.

The modules of a SentenceTransformer compute embeddings from the hidden states of an encoder: pooling, optionally a
dense layer, and normalization. `interop.cross_encoder` reads the folders of a CrossEncoder.
"""

import json
from collections.abc import Iterable, Mapping
from types import MappingProxyType
from typing import Any, NamedTuple, TypedDict

import numpy as np
import tokenizers
from etils import epath
from ml_collections import ConfigDict

from bertjax.common.errors import UserError
from bertjax.common.files import inside, read_json, write_whole
from bertjax.config.model_config import BertConfig
from bertjax.interop import hf_tokenizer, huggingface
from bertjax.models import families
from bertjax.models.json_config import require_supported
from bertjax.models.library_fields.tables import check_fields, defaults_of
from bertjax.models.tensors import take
from bertjax.text.tokenizer import Tokenizer

ARCHITECTURE = "SentenceTransformer"  # the class, and the architecture of runs that train embeddings
CROSS_ENCODER = "CrossEncoder"
MODULES, SETTINGS, CONFIG = "modules.json", "config_sentence_transformers.json", "config.json"
# The file with the settings of the encoder. Older versions put the model type in the name.
ENCODER = "sentence_{}_config.json"
ENCODERS = ("bert", "roberta", "distilbert", "camembert", "albert", "xlm-roberta", "xlnet")
KINDS = ("Transformer", "Pooling", "Dense", "Normalize")  # modules, in this order
REQUIRED = KINDS[:2]
DROPOUT = "Dropout"  # a module without effect on predictions
PACKAGE = "sentence_transformers"  # also the section of `settings` with fields that a run does not have
TASKS = {ARCHITECTURE: "feature-extraction", CROSS_ENCODER: "sequence-classification"}

# {field of a version before 5: pooling_mode}. Unsupported poolings are listed for messages.
FLAGS = {
    "pooling_mode_cls_token": "cls",
    "pooling_mode_mean_tokens": "mean",
    "pooling_mode_max_tokens": "max",
    "pooling_mode_mean_sqrt_len_tokens": "mean_sqrt_len_tokens",
    "pooling_mode_weightedmean_tokens": "weightedmean",
    "pooling_mode_lasttoken": "lasttoken",
}
# Fields of `ENCODER` with arguments of transformers.
ARGUMENTS = ("model_args", "model_kwargs", "tokenizer_args", "processor_kwargs", "config_args", "config_kwargs")
# {kind of `library_fields`: the fields that are read, and the fields that do not affect predictions}.
READ: dict[str, tuple[str, ...]] = {
    ARCHITECTURE: ("model_type", "prompts", "default_prompt_name", "similarity_fn_name", "truncate_dim", "__version__",
                   "requirements"),
    CROSS_ENCODER: ("model_type", "activation_fn", "prompts", "default_prompt_name", "keep_in_fp32_modules",
                    "__version__", "requirements"),
    "modules": ("idx", "name", "path", "type"),
    **dict.fromkeys(TASKS.values(), ("max_seq_length", "do_lower_case", "unpad_inputs", *ARGUMENTS)),
    "Pooling": ("embedding_dimension", "word_embedding_dimension", "pooling_mode", *FLAGS),
    "Dense": ("in_features", "out_features", "bias", "activation_function", "module_output_name"),
    "Normalize": ("module_output_name",),
    DROPOUT: ("dropout",),
}  # fmt: skip
# Arguments of transformers that do not affect predictions.
UNUSED_FIELDS = ("trust_remote_code", "attn_implementation", "torch_dtype", "dtype", "device_map", "low_cpu_mem_usage",
            "use_safetensors", "use_fast")  # fmt: skip

SIMILARITIES = ("cosine", "dot")
POOLINGS = {"mean": "mean", "cls": "cls", "lasttoken": "last"}  # {pooling_mode: `config.head.pooling`}
IDENTITY = "torch.nn.modules.linear.Identity"
ACTIVATIONS = {IDENTITY: "none", "torch.nn.modules.activation.Tanh": "tanh"}  # activations of a dense layer
DOCUMENT_PROMPTS = ("document", "passage", "corpus")  # the first of these prompts is the prompt of documents


class _Settings(TypedDict, total=False):
    """The types of the fields of `SETTINGS` that are read."""

    model_type: str
    prompts: dict[str, str | None] | None
    default_prompt_name: str | None
    similarity_fn_name: str | None
    truncate_dim: int | None
    activation_fn: str | None


class _Module(TypedDict):
    """The fields of a module in `MODULES` that are read."""

    type: str
    path: str


class Folder(NamedTuple):
    """The modules of a folder.

    Attributes:
      path: the folder.
      modules: {kind of a module: its folder}.
      kind: the class of the model: `ARCHITECTURE` or `CROSS_ENCODER`.
      without: modules that do not affect predictions, which conversion omits.
    """

    path: epath.Path
    modules: dict[str, epath.Path]
    kind: str
    without: tuple[str, ...] = ()

    @property
    def encoder(self) -> epath.Path:
        """The Hugging Face folder of the encoder, or of the classifier."""
        return self.modules["Transformer"]


def has_modules_file(path: epath.Path) -> bool:
    """Returns whether a folder contains `modules.json`."""
    return (path / MODULES).is_file()


def open_folder(path: epath.Path) -> Folder:
    """Locates the modules of a folder. Raises `UserError` if bertjax does not support the modules."""
    kind, source = read_settings_file(path).get("model_type", ARCHITECTURE), path / MODULES
    if kind not in TASKS:
        raise _unsupported(path, path / SETTINGS, f"model_type {kind!r}", TASKS)
    for fields in read_json(source, list[dict[str, Any]]):
        check_fields(source, fields, PACKAGE, "modules", READ["modules"])
    modules: list[tuple[str, epath.Path]] = []
    for module in read_json(source, list[_Module]):
        package, _, name = module["type"].rpartition(".")
        if kind == ARCHITECTURE and (not package.startswith(f"{PACKAGE}.") or name not in (*KINDS, DROPOUT)):
            raise _unsupported(path, source, f"a module of type {module['type']!r}", (*KINDS, DROPOUT))
        modules.append((name, inside(path, module["path"], source) if module["path"] else path))
    names = [name for name, _ in modules]
    shown, kept = ", ".join(names) or "none", [name for name in names if name != DROPOUT]
    if kind == CROSS_ENCODER and names != ["Transformer"]:
        stated = f"a {CROSS_ENCODER} of the modules {shown}"
        raise _unsupported(path, source, stated, ["one Transformer, which is a classifier"])
    if kind == ARCHITECTURE and (kept != [name for name in KINDS if name in kept] or not set(REQUIRED) <= set(kept)):
        raise _unsupported(path, source, f"modules {shown}", (*REQUIRED, "optional Dense, optional Normalize"))
    for name, folder in modules:
        if name == DROPOUT:
            _fields(folder, DROPOUT)
    return Folder(path, dict(modules), kind, tuple(name for name in names if name == DROPOUT))


def read_settings_file(path: epath.Path) -> dict[str, Any]:
    """Returns the fields of `SETTINGS`, {} without the file. Raises `UserError` for a value of another type."""
    if not (path / SETTINGS).is_file():
        return {}
    read_json(path / SETTINGS, _Settings)  # for the types
    return read_json(path / SETTINGS)


def _unsupported(folder: epath.Path, file: epath.Path, stated: str, supported: Iterable[str]) -> UserError:
    """Returns an error about a value in a file of a folder, with a way to get a supported checkpoint."""
    return UserError(f"{file}: {stated} is not supported; supported: {', '.join(supported)}; {_remedy(folder)}")


def _remedy(folder: epath.Path) -> str:
    if _has_encoder(folder / CONFIG, {"model_type": "bert"}):
        return f"for the encoder alone, copy the folder without {MODULES}"
    if encoders := [path.parent for path in sorted(folder.glob(f"*/{CONFIG}")) if _has_encoder(path, {})]:
        return f"for an encoder alone, name its folder, such as {encoders[0]}"
    return "open the folder with sentence-transformers"


def _has_encoder(config: epath.Path, defaults: Mapping[str, str]) -> bool:
    """Returns whether a config.json exists and has a model type that bertjax reads."""
    return config.is_file() and {**defaults, **read_json(config)}.get("model_type") in families.by_model_type()


def read_embedding_settings(folder: Folder, config: BertConfig) -> ConfigDict:
    """Returns the settings of a folder with embeddings in the form of the config of a run.

    The settings are `head`, `data` with the prompts, and `max_seq_length`. The section `PACKAGE` contains the fields
    that a run does not have.

    Args:
      folder: the folder.
      config: the config of the encoder.

    Raises:
      UserError: a module has a field or a value that is not supported.
    """
    path, fields = folder.path / SETTINGS, read_settings_file(folder.path)
    check_fields(path, fields, PACKAGE, ARCHITECTURE, READ[ARCHITECTURE])
    prompts = {name: text or "" for name, text in (fields.get("prompts") or {}).items()}
    default = fields.get("default_prompt_name") or ""
    if default and default not in {*prompts, "query", "document"}:  # the library always has the last two
        raise UserError(f"{path}: default_prompt_name is {default!r}, expected one of {', '.join(prompts)}")
    head = {"pooling": _pooling(folder, config), **_dense(folder, config), "normalize": "Normalize" in folder.modules}
    if (width := fields.get("truncate_dim")) is not None:
        if width < 1:
            raise UserError(f"{path}: truncate_dim is {width!r}, expected a number of at least 1, or null")
        head["truncate_dim"] = width
    if "Normalize" in folder.modules:
        _fields(folder.modules["Normalize"], "Normalize", {"module_output_name": "sentence_embedding"})
    if (similarity := fields.get("similarity_fn_name") or "cosine") not in SIMILARITIES:
        raise UserError(
            f"{path}: similarity_fn_name {similarity!r} is not supported; supported: {', '.join(SIMILARITIES)}; if you "
            f"only need embeddings, set it to one of these in a copy of the folder"
        )
    shared = default if default not in ("query", *DOCUMENT_PROMPTS) else ""  # as in encode_query and encode_document
    names = {"query_prompt": ("query", shared), "document_prompt": (*DOCUMENT_PROMPTS, shared)}
    data = {field: next((prompts[name] for name in order if prompts.get(name)), "") for field, order in names.items()}
    section = {
        "similarity_fn_name": similarity,
        "prompts": [[name, text] for name, text in prompts.items()],  # names of a section contain no dots
        "default_prompt_name": default,
        "do_lower_case": bool(_encoder_settings(folder)[1].get("do_lower_case")),
        "without": list(folder.without),
    }
    length = max_seq_length_of(folder, config)
    return ConfigDict({"head": head, "data": data, "max_seq_length": length, PACKAGE: section})


def _fields(module: epath.Path, kind: str, expected: Mapping[str, Any] = MappingProxyType({})) -> dict[str, Any]:
    """Returns the fields of a module, {} without a file. Raises `UserError` for unsupported values.

    `expected` are fields with one supported value, which is not the default of the library.
    """
    path = module / CONFIG
    fields: dict[str, Any] = read_json(path) if path.is_file() else {}
    check_fields(path, fields, PACKAGE, kind, READ[kind])
    require_supported(path, {name: value for name, value in fields.items() if value is not None}, expected)
    return fields


def _pooling(folder: Folder, config: BertConfig) -> str:
    """Returns the `pooling` of `config.head`."""
    module = folder.modules["Pooling"]
    fields = _fields(module, "Pooling")
    modes = fields.get("pooling_mode", [mode for flag, mode in FLAGS.items() if fields.get(flag)] or "mean")
    modes = modes if isinstance(modes, list) else [modes]
    if len(modes) != 1 or modes[0] not in tuple(POOLINGS):
        shown = "+".join(map(str, modes))
        raise _unsupported(folder.path, module / CONFIG, f"pooling {shown!r}", POOLINGS)
    for name in ("embedding_dimension", "word_embedding_dimension"):
        if fields.get(name, config.hidden_size) != config.hidden_size:
            raise UserError(
                f"{module / CONFIG}: {name} is {fields[name]}, expected {config.hidden_size}, the hidden size of the "
                f"encoder"
            )
    return POOLINGS[modes[0]]


def _dense(folder: Folder, config: BertConfig) -> dict[str, Any]:
    """Returns `dense` and `dense_act` of `config.head`."""
    if (module := folder.modules.get("Dense")) is None:
        return {"dense": 0, "dense_act": "none"}
    expected = {"module_output_name": "sentence_embedding", "in_features": config.hidden_size}
    fields = _fields(module, "Dense", expected)
    width = fields.get("out_features")
    activation = fields.get("activation_function", defaults_of(PACKAGE, "Dense")["activation_function"])
    if not isinstance(width, int) or width < 1:
        raise UserError(f"{module / CONFIG}: out_features is {width!r}, expected an integer of at least 1")
    if activation not in tuple(ACTIVATIONS):
        raise _unsupported(folder.path, module / CONFIG, f"activation_function {activation!r}", ACTIVATIONS)
    return {"dense": width, "dense_act": ACTIVATIONS[activation]}


def _encoder_settings(folder: Folder) -> tuple[epath.Path, dict[str, Any]]:
    """Returns the file with the settings of the encoder, and its fields; {} if the file does not exist."""
    paths = [folder.encoder / ENCODER.format(kind) for kind in ENCODERS]
    path = next((path for path in paths if path.is_file()), None)
    return (path, read_json(path)) if path else (paths[0], {})


def max_seq_length_of(folder: Folder, config: BertConfig) -> int:
    """Returns the sequence length of a folder. Raises `UserError` for unsupported settings of the encoder."""
    path, fields = _encoder_settings(folder)
    task, remedy = TASKS[folder.kind], _remedy(folder.path)
    stated = {name: value for name, value in fields.items() if value not in (None, {}, [])}
    check_fields(path, stated, PACKAGE, task, READ[task], remedy)
    for name in ARGUMENTS:
        arguments = stated.get(name, {})
        if isinstance(arguments, dict):
            arguments = {key: value for key, value in arguments.items() if key not in UNUSED_FIELDS}
        if arguments:
            raise UserError(f"{path}: {name} {arguments!r} is not supported; supported: none; {remedy}")
    length = fields.get("max_seq_length")
    length = model_max_length_of(folder.encoder) if length is None else length
    return limited_length(path, "max_seq_length", length, config)


def model_max_length_of(folder: epath.Path) -> Any:
    """Returns the model_max_length of tokenizer_config.json; None without the file or the field."""
    file = folder / hf_tokenizer.SETTINGS
    return read_json(file).get("model_max_length") if file.is_file() else None


def limited_length(path: epath.Path, name: str, length: Any, config: BertConfig) -> int:
    """Returns a sequence length, at most the number of positions. Raises `UserError` if it is not a number."""
    if length is None:
        return config.max_position_embeddings
    if not isinstance(length, int | float) or length < 1:
        raise UserError(f"{path}: {name} is {length!r}, expected a number of tokens")
    return int(min(length, config.max_position_embeddings))


def read_dense_params(folder: Folder, config: BertConfig) -> dict[str, dict[str, np.ndarray]]:
    """Returns the params of the dense layer, {} without one. Raises `UserError` if a shape contradicts the config."""
    if (module := folder.modules.get("Dense")) is None:
        return {}
    width, tensors = _dense(folder, config)["dense"], dict(huggingface.tensors_of(module))
    source = str(module), "a Dense of sentence-transformers"
    kernel = take(tensors, "linear.weight", (width, config.hidden_size), *source).T
    has_bias: bool = read_json(module / CONFIG).get("bias", True)
    bias = take(tensors, "linear.bias", (width,), *source) if has_bias else np.zeros(width, np.float32)
    return {"projection": {"kernel": np.ascontiguousarray(kernel), "bias": bias}}


def check_tokenizer(folder: Folder, tokenizer: Tokenizer) -> None:
    """Raises `UserError` if sentence-transformers encodes texts in another way than the tokenizer."""
    path, fields = _encoder_settings(folder)
    if fields.get("do_lower_case") and not tokenizer.lowercase:
        stated = "do_lower_case true of a tokenizer that keeps capitals"
        raise _unsupported(folder.path, path, stated, ["false"])
    file = folder.encoder / hf_tokenizer.JSON
    if tokenizer.cls_id == tokenizer.sep_id and file.is_file():  # the class of GPT-2 adds no special tokens
        library = tokenizers.Tokenizer.from_str(file.read_text())
        library.no_padding()
        library.no_truncation()
        if library.encode("a").ids != tokenizer.framed(*tokenizer.encode_ids(["a"])):
            token = tokenizer.pieces[tokenizer.cls_id]
            stated = "a post_processor without a special token at both ends of a text"
            raise _unsupported(folder.path, file, stated, [f"{token} $A {token}"])


def write(
    folder: epath.Path,
    config: BertConfig,
    params: Mapping[str, Any],
    tokenizer: Tokenizer,
    settings: ConfigDict,
    max_seq_length: int,
    architecture: str,
) -> list[str]:
    """Writes a folder for `SentenceTransformer(folder)`.

    Args:
      folder: the folder.
      config: the config of the encoder.
      params: the params.
      tokenizer: the tokenizer.
      settings: the settings of a run, or the result of `read_embedding_settings`.
      max_seq_length: the largest number of tokens of a text.
      architecture: the class of transformers of the encoder.

    Returns:
      The names of omitted params and modules.
    """
    head, left_out = settings.head, sorted(params.keys() - {"bert", "projection"})
    left_out += huggingface.write(folder, config, {"bert": params["bert"]}, tokenizer, architecture)
    modules = [*REQUIRED, *(["Dense"] if head.dense else []), *(["Normalize"] if head.normalize else [])]
    paths = {kind: f"{number}_{kind}" if number else "" for number, kind in enumerate(modules)}
    flags = {flag: POOLINGS.get(mode) == head.pooling for flag, mode in FLAGS.items()}
    files: dict[str, Any] = {
        MODULES: [
            {"idx": number, "name": str(number), "path": paths[kind], "type": f"{PACKAGE}.models.{kind}"}
            for number, kind in enumerate(modules)
        ],
        f"{paths['Pooling']}/{CONFIG}": {
            "word_embedding_dimension": config.hidden_size, **flags, "include_prompt": True,
        },
    }  # fmt: skip
    if head.dense:
        (activation,) = (name for name, value in ACTIVATIONS.items() if value == head.dense_act)
        sizes = {"in_features": config.hidden_size, "out_features": head.dense}
        files[f"{paths['Dense']}/{CONFIG}"] = {**sizes, "bias": True, "activation_function": activation}
        kernel, bias = (np.asarray(params["projection"][name]) for name in ("kernel", "bias"))
        tensors = {"linear.weight": kernel.T, "linear.bias": bias}
        huggingface.write_tensors(folder / paths["Dense"] / huggingface.WEIGHTS, tensors)
    if head.normalize:
        files[f"{paths['Normalize']}/{CONFIG}"] = {}  # git and object stores drop empty folders
    section = settings.get(PACKAGE, {})
    if section:
        prompts, default = dict(section.prompts), section.default_prompt_name
    else:
        prompts = {kind: settings.data.get(f"{kind}_prompt", "") for kind in ("query", "document")}
        default = "query" if prompts["query"] else ""  # as in `predict`
    lower = section.get("do_lower_case", False)
    files[ENCODER.format("bert")] = {"max_seq_length": max_seq_length, "do_lower_case": lower}
    files[SETTINGS] = {
        "model_type": ARCHITECTURE,
        "prompts": prompts,
        "default_prompt_name": default or None,
        "similarity_fn_name": section.get("similarity_fn_name", "cosine"),
        **({"truncate_dim": head.truncate_dim} if head.get("truncate_dim") else {}),
    }
    for name, content in files.items():
        write_whole(folder / name, json.dumps(content, indent=2, ensure_ascii=False) + "\n")
    return left_out + [f"{name}, which changes no embedding" for name in section.get("without", ())]
