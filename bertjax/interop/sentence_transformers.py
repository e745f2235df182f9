"""Folders of sentence-transformers: the Hugging Face folder of an encoder and, in `modules.json`, what makes vectors of
its hidden states: pooling, a dense layer or none, and normalization."""

import json
from collections.abc import Mapping
from typing import Any, NamedTuple, TypedDict

import ml_collections
import numpy as np
from etils import epath

from bertjax.config import BertConfig, UserError
from bertjax.families.json_config import require
from bertjax.families.tensors import take
from bertjax.files import inside, read_json, write_whole
from bertjax.interop import huggingface, tokenizer_files
from bertjax.text.tokenizer import Tokenizer

ARCHITECTURE = "SentenceTransformer"  # the class, and the architecture of our runs with vectors
MODULES, SETTINGS, CONFIG = "modules.json", "config_sentence_transformers.json", "config.json"
# What a folder says of its encoder's inputs; older versions named the file by the kind of model.
ENCODERS = ("bert", "roberta", "distilbert", "camembert", "albert", "xlm-roberta", "xlnet")
ENCODER = "sentence_{}_config.json"
KINDS = ("Transformer", "Pooling", "Dense", "Normalize")  # modules, in this order
REQUIRED = KINDS[:2]
PACKAGE = "sentence_transformers"
WRITTEN = f"{PACKAGE}.models.{{}}"  # the name of a module's type that all versions know

POOLINGS = {"mean": "mean", "cls": "cls", "lasttoken": "last"}  # their name -> ours
# Until version 5, a field for each of them. Those that we have not have names as well, for messages.
FLAGS = {
    "pooling_mode_cls_token": "cls",
    "pooling_mode_mean_tokens": "mean",
    "pooling_mode_max_tokens": "max",
    "pooling_mode_mean_sqrt_len_tokens": "mean_sqrt_len_tokens",
    "pooling_mode_weightedmean_tokens": "weightedmean",
    "pooling_mode_lasttoken": "lasttoken",
}
ACTIVATIONS = {
    "torch.nn.modules.linear.Identity": "none",
    "torch.nn.modules.activation.Tanh": "tanh",
}
DOCUMENT_PROMPTS = ("document", "passage", "corpus")  # the first that there is
# Fields of `ENCODER` that change what is encoded; empty, or not there.
INPUT_FIELDS = ("processing_kwargs", "processor_kwargs", "tokenizer_args", "config_kwargs", "config_args",
                "query_length", "document_length", "query_expansion")  # fmt: skip


class _Module(TypedDict):
    """An entry of `MODULES`."""

    path: str
    type: str


class _Settings(TypedDict, total=False):
    """What we need of `SETTINGS`."""

    model_type: str
    prompts: dict[str, str | None] | None
    default_prompt_name: str | None


class Folder(NamedTuple):
    """The modules of a folder, by kind: the folder of each."""

    path: epath.Path
    modules: dict[str, epath.Path]

    @property
    def encoder(self) -> epath.Path:
        """The Hugging Face folder of the encoder."""
        return self.modules["Transformer"]


def is_folder(path: epath.Path) -> bool:
    return (path / MODULES).is_file()


def open_folder(path: epath.Path) -> Folder:
    """Finds the modules of a folder. Raises `UserError` unless they are some of `KINDS`, in this order."""
    source, found = path / MODULES, {}
    for module in read_json(source, list[_Module]):
        package, _, kind = module["type"].rpartition(".")
        if not package.startswith(f"{PACKAGE}.") or kind not in KINDS:
            raise UserError(_unsupported(source, f"a module of type {module['type']!r}", ", ".join(KINDS)))
        found.setdefault(kind, []).append(inside(path, module["path"], source) if module["path"] else path)
    names = [kind for kind, each in found.items() for _ in each]
    if names != [kind for kind in KINDS if kind in found] or not set(REQUIRED) <= found.keys():
        order = ", ".join((*REQUIRED, "perhaps Dense, perhaps Normalize"))
        raise UserError(_unsupported(source, f"modules {', '.join(names) or 'none'}", order))
    return Folder(path, {kind: folder for kind, (folder,) in found.items()})


def _unsupported(path: epath.Path, what: str, supported: str) -> str:
    remedy = f"for the encoder alone, copy the folder without {MODULES}"
    return f"{path}: {what} is not supported; supported: {supported}; {remedy}"


def read_settings(folder: Folder, config: BertConfig) -> ml_collections.ConfigDict:
    """Returns what a folder says as the config of a run with vectors does: `head`, prompts, and `max_seq_length`.

    Args:
      config: of its encoder.

    Raises `UserError` for a module that does something else than ours.
    """
    prompts = _prompts(folder)
    head = {
        "pooling": _pooling(folder, config),
        **_dense(folder, config),
        "normalize": "Normalize" in folder.modules,
    }
    if "Normalize" in folder.modules:
        _require(folder.modules["Normalize"], {"module_input_name": "sentence_embedding"})
    data = {f"{kind}_prompt": prompt for kind, prompt in prompts.items()}
    settings = dict(head=head, data=data, max_seq_length=_max_seq_length(folder, config))
    return ml_collections.ConfigDict(settings)


def _require(module: epath.Path, expected: Mapping) -> dict[str, Any]:
    """Returns the fields of a module, {} if it has none. Raises `UserError` for another value than those expected."""
    path = module / CONFIG
    fields = read_json(path) if path.is_file() else {}
    require(path, fields, expected)
    return fields


def _pooling(folder: Folder, config: BertConfig) -> str:
    module = folder.modules["Pooling"]
    fields = _require(module, {"include_prompt": True})
    given = fields.get("pooling_mode", [mode for flag, mode in FLAGS.items() if fields.get(flag)] or "mean")
    given = [given] if isinstance(given, str) else given
    if len(given) != 1 or given[0] not in POOLINGS:
        named = "+".join(map(str, given))
        raise UserError(_unsupported(module / CONFIG, f"pooling {named!r}", ", ".join(POOLINGS)))
    for name in ("embedding_dimension", "word_embedding_dimension"):
        if fields.get(name, config.hidden_size) != config.hidden_size:
            raise UserError(f"{module / CONFIG}: {name} is {fields[name]}, but the encoder has {config.hidden_size}")
    return POOLINGS[given[0]]


def _dense(folder: Folder, config: BertConfig) -> dict[str, Any]:
    """Returns `dense` and `dense_act` of `config.head`."""
    if (module := folder.modules.get("Dense")) is None:
        return {"dense": 0, "dense_act": "none"}
    only = dict(module_input_name="sentence_embedding", use_residual=False, in_features=config.hidden_size)
    fields = _require(module, {**only, "module_output_name": "sentence_embedding"})
    width, act = fields.get("out_features"), fields.get("activation_function", "torch.nn.modules.activation.Tanh")
    if not isinstance(width, int) or width < 1:
        raise UserError(f"{module / CONFIG}: out_features is {width!r}, which is not the width of a layer")
    if act not in ACTIVATIONS:
        raise UserError(_unsupported(module / CONFIG, f"activation_function {act!r}", ", ".join(ACTIVATIONS)))
    return {"dense": width, "dense_act": ACTIVATIONS[act]}


def _prompts(folder: Folder) -> dict[str, str]:
    """Returns the prompts of queries and of documents: where one has none, a default that is of neither."""
    path = folder.path / SETTINGS
    settings = read_json(path, _Settings) if path.is_file() else {}
    require(path, settings, {"model_type": ARCHITECTURE})
    prompts, default = settings.get("prompts") or {}, settings.get("default_prompt_name")
    if default is not None and default not in prompts:
        raise UserError(f"{path}: default_prompt_name is {default!r}, which is none of its prompts")
    if default in ("query", *DOCUMENT_PROMPTS):  # as encode_query and encode_document
        default = None

    def first(*names: str | None) -> str:
        return next((prompts[name] for name in names if prompts.get(name)), "")

    return {"query": first("query", default), "document": first(*DOCUMENT_PROMPTS, default)}


def _inputs(folder: Folder) -> tuple[epath.Path, dict[str, Any]]:
    """Returns the file that says what the encoder is given, and its fields; {} without one."""
    paths = (folder.encoder / ENCODER.format(kind) for kind in ENCODERS)
    path = next((path for path in paths if path.is_file()), None)
    return (path, read_json(path)) if path else (folder.encoder / ENCODER.format("bert"), {})


def _max_seq_length(folder: Folder, config: BertConfig) -> int:
    path, fields = _inputs(folder)
    require(path, fields, {"transformer_task": "feature-extraction", "module_output_name": "token_embeddings"})
    for name in INPUT_FIELDS:
        if fields.get(name):
            raise UserError(_unsupported(path, f"{name} {fields[name]!r}", "none"))
    most = fields.get("max_seq_length")
    if most is None and (settings := folder.encoder / tokenizer_files.SETTINGS).is_file():
        most = read_json(settings).get("model_max_length")
    if most is None:
        return config.max_position_embeddings
    if not isinstance(most, int | float) or most < 1:
        raise UserError(f"{path}: max_seq_length is {most!r}, which is no number of tokens")
    return int(min(most, config.max_position_embeddings))


def read_params(folder: Folder, config: BertConfig) -> dict:
    """Returns the params of the dense layer, {} without one. Raises `UserError` if they are not of its sizes."""
    if (module := folder.modules.get("Dense")) is None:
        return {}
    width, named = _dense(folder, config)["dense"], dict(huggingface.tensors_of(module))
    given = str(module), "a Dense of sentence-transformers"
    kernel = take(named, "linear.weight", (width, config.hidden_size), *given).T
    has_bias = read_json(module / CONFIG).get("bias", True)
    bias = take(named, "linear.bias", (width,), *given) if has_bias else np.zeros(width, np.float32)
    return {"projection": {"kernel": np.ascontiguousarray(kernel), "bias": bias}}


def check_tokenizer(folder: Folder, found: Tokenizer | None) -> None:
    """Raises `UserError` if the texts of a folder are made ids in another way than by its tokenizer here."""
    path, fields = _inputs(folder)
    if found is None:
        return
    if fields.get("do_lower_case") and not found.lowercase:
        raise UserError(_unsupported(path, "do_lower_case true of a tokenizer that keeps capitals", "false"))
    file = folder.encoder / tokenizer_files.JSON
    if found.cls_id == found.sep_id and file.is_file():  # GPT-2's; its class frames no text, and ours does
        from tokenizers import Tokenizer as Library

        library = Library.from_str(file.read_text())
        library.no_padding()
        library.no_truncation()
        if library.encode("a").ids != found.framed(*found.encode_ids(["a"])):
            piece = found.pieces[found.cls_id]
            raise UserError(_unsupported(file, "a post_processor that does not frame a text", f"{piece} $A {piece}"))


def write(
    folder: epath.Path,
    config: BertConfig,
    params: Mapping,
    tokenizer: Tokenizer,
    settings: ml_collections.ConfigDict,
    max_seq_length: int,
    architecture: str,
) -> list[str]:
    """Writes a folder for `SentenceTransformer(folder)`; returns the names of params that are not part of it.

    Args:
      settings: of the run, or what `read_settings` returns.
      architecture: the class of transformers that the encoder is.
    """
    import safetensors.numpy

    head, left_out = settings.head, sorted(params.keys() - {"bert", "projection"})
    left_out += huggingface.write(folder, config, {"bert": params["bert"]}, tokenizer, architecture)
    modules = ["Transformer", "Pooling", *["Dense"] * bool(head.dense), *["Normalize"] * head.normalize]
    paths = {kind: f"{number}_{kind}" if number else "" for number, kind in enumerate(modules)}

    def write_json(name: str, content) -> None:
        write_whole(folder / name, json.dumps(content, indent=2, ensure_ascii=False) + "\n")

    entries = [
        {"idx": number, "name": str(number), "path": paths[kind], "type": WRITTEN.format(kind)}
        for number, kind in enumerate(modules)
    ]
    flags = {flag: POOLINGS.get(mode) == head.pooling for flag, mode in FLAGS.items()}
    pooling = {"word_embedding_dimension": config.hidden_size, **flags, "include_prompt": True}
    write_json(MODULES, entries)
    write_json(f"{paths['Pooling']}/{CONFIG}", pooling)
    if head.dense:
        (act,) = (theirs for theirs, ours in ACTIVATIONS.items() if ours == head.dense_act)
        sizes = {"in_features": config.hidden_size, "out_features": head.dense}
        write_json(f"{paths['Dense']}/{CONFIG}", {**sizes, "bias": True, "activation_function": act})
        projection = {name: np.asarray(x) for name, x in params["projection"].items()}
        tensors = {"linear.weight": np.ascontiguousarray(projection["kernel"].T), "linear.bias": projection["bias"]}
        content = safetensors.numpy.save(tensors, metadata={"format": "pt"})
        write_whole(folder / paths["Dense"] / huggingface.WEIGHTS, content)
    if head.normalize:
        write_json(f"{paths['Normalize']}/{CONFIG}", {})  # an empty folder gets lost in git, and in object stores
    write_json(ENCODER.format("bert"), {"max_seq_length": max_seq_length, "do_lower_case": False})
    prompts = {kind: settings.data.get(f"{kind}_prompt", "") for kind in ("query", "document")}
    default = "query" if prompts["query"] else None  # as `predict` has it
    named = {"model_type": ARCHITECTURE, "prompts": prompts, "default_prompt_name": default}
    write_json(SETTINGS, {**named, "similarity_fn_name": "cosine"})
    return left_out
