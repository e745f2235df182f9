"""Folders of sentence-transformers: a Hugging Face folder and, in `modules.json`, the modules of a model.

The modules of a SentenceTransformer make vectors of the encoder's hidden states: pooling, perhaps a dense layer, and
normalization. A CrossEncoder is a classifier; up to version 5, `config.json` alone names its activation.
"""

import json
from collections.abc import Mapping
from typing import Any, NamedTuple, TypedDict

import ml_collections
import numpy as np
from etils import epath

from bertjax.common.errors import UserError
from bertjax.common.files import inside, read_json, write_whole
from bertjax.config.model_config import BertConfig
from bertjax.interop import hf_tokenizer, huggingface
from bertjax.models import families
from bertjax.models.json_config import require
from bertjax.models.library_fields.tables import check_fields, defaults_of
from bertjax.models.tensors import take
from bertjax.text.tokenizer import Tokenizer

ARCHITECTURE = "SentenceTransformer"  # the class, and the architecture of our runs with vectors
CROSS_ENCODER = "CrossEncoder"
MODULES, SETTINGS, CONFIG = "modules.json", "config_sentence_transformers.json", "config.json"
# What a folder says of its encoder's inputs; older versions named the file by the kind of model.
ENCODERS = ("bert", "roberta", "distilbert", "camembert", "albert", "xlm-roberta", "xlnet")
ENCODER = "sentence_{}_config.json"
KINDS = ("Transformer", "Pooling", "Dense", "Normalize")  # modules, in this order
REQUIRED = KINDS[:2]
DROPOUT = "Dropout"  # a module that does nothing when a model predicts
PACKAGE = "sentence_transformers"  # also the section of `settings` with what only conversion and comparisons need
WRITTEN = f"{PACKAGE}.models.{{}}"  # the name of a module's type that all versions know
TASKS = {ARCHITECTURE: "feature-extraction", CROSS_ENCODER: "sequence-classification"}
OTHERS = {  # other values of `model_type`
    "SparseEncoder": "a sparse encoder, whose vectors have a number for each word",
    "MultiVectorEncoder": "a model of several vectors for each text",
}

# The fields that are read here, and those that change no prediction, by the kinds of `library_fields`.
READ = {
    ARCHITECTURE: ("model_type", "prompts", "default_prompt_name", "similarity_fn_name", "truncate_dim", "__version__",
                   "requirements"),
    CROSS_ENCODER: ("model_type", "activation_fn", "keep_in_fp32_modules", "__version__", "requirements"),
    "modules": ("idx", "name", "path", "type"),
    **dict.fromkeys(TASKS.values(), ("max_seq_length", "do_lower_case", "unpad_inputs", "model_args", "model_kwargs",
                                     "tokenizer_args", "processor_kwargs", "config_args", "config_kwargs")),
    "Pooling": ("embedding_dimension", "word_embedding_dimension", "pooling_mode", "pooling_mode_cls_token",
                "pooling_mode_mean_tokens", "pooling_mode_max_tokens", "pooling_mode_mean_sqrt_len_tokens",
                "pooling_mode_weightedmean_tokens", "pooling_mode_lasttoken"),
    "Dense": ("in_features", "out_features", "bias", "activation_function", "module_output_name"),
    "Normalize": ("module_output_name",),
    DROPOUT: ("dropout",),
}  # fmt: skip
# Fields of `ENCODER` that are arguments of transformers, and those arguments that choose no other model or text.
ARGUMENTS = ("model_args", "model_kwargs", "tokenizer_args", "processor_kwargs", "config_args", "config_kwargs")
UNUSED_FIELDS = ("trust_remote_code", "attn_implementation", "torch_dtype", "dtype", "device_map", "low_cpu_mem_usage",
            "use_safetensors", "use_fast")  # fmt: skip

SIMILARITIES = ("cosine", "dot")
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
IDENTITY, SIGMOID = "torch.nn.modules.linear.Identity", "torch.nn.modules.activation.Sigmoid"
ACTIVATIONS = {  # of a Dense
    IDENTITY: "none",
    "torch.nn.modules.activation.Tanh": "tanh",
}
DOCUMENT_PROMPTS = ("document", "passage", "corpus")  # the first that there is


class _Settings(TypedDict, total=False):
    """The types of the fields of `SETTINGS` that are read."""

    model_type: str
    prompts: dict[str, str | None] | None
    default_prompt_name: str | None
    similarity_fn_name: str | None
    truncate_dim: int | None
    activation_fn: str | None


class _OfClassifier(TypedDict, total=False):
    """The activation of a CrossEncoder in the `CONFIG` of its classifier: since version 4, and before."""

    sentence_transformers: dict[str, Any] | None
    sbert_ce_default_activation_function: str | None


class Folder(NamedTuple):
    """The modules of a folder, by kind: the folder of each.

    Attributes:
      kind: the class of the model: `ARCHITECTURE` or `CROSS_ENCODER`.
      without: modules that do nothing when a model predicts, and that conversion leaves out.
    """

    path: epath.Path
    modules: dict[str, epath.Path]
    kind: str
    without: tuple[str, ...] = ()

    @property
    def encoder(self) -> epath.Path:
        """The Hugging Face folder of the encoder, or of the classifier."""
        return self.modules["Transformer"]


def is_folder(path: epath.Path) -> bool:
    return (path / MODULES).is_file()


def open_folder(path: epath.Path) -> Folder:
    """Finds the modules of a folder. Raises `UserError` unless they are those of a model that is read."""
    kind = _settings(path).get("model_type", ARCHITECTURE)
    if kind not in TASKS:
        note = f" ({OTHERS[kind]})" if kind in OTHERS else ""
        raise UserError(_unsupported(path, path / SETTINGS, f"model_type {kind!r}", ", ".join(TASKS), note))
    source, found = path / MODULES, []
    for number, module in enumerate(read_json(source, list[dict[str, Any]])):
        check_fields(source, module, PACKAGE, "modules", READ["modules"])
        for name in ("type", "path"):
            if not isinstance(module.get(name), str):
                raise UserError(f"{source}: {name} of module {number} is {module.get(name)!r}, expected a text")
        package, _, name = module["type"].rpartition(".")
        if kind == ARCHITECTURE and (not package.startswith(f"{PACKAGE}.") or name not in (*KINDS, DROPOUT)):
            what = f"a module of type {module['type']!r}"
            raise UserError(_unsupported(path, source, what, ", ".join((*KINDS, DROPOUT))))
        found.append((name, inside(path, module["path"], source) if module["path"] else path))
    names = [name for name, _ in found]
    kept = [name for name in names if name != DROPOUT or kind == CROSS_ENCODER]
    if kind == CROSS_ENCODER and names != ["Transformer"]:
        what = f"a {CROSS_ENCODER} of the modules {', '.join(names) or 'none'}"
        raise UserError(_unsupported(path, source, what, "one Transformer, which is a classifier"))
    if kind == ARCHITECTURE and (kept != [name for name in KINDS if name in kept] or not set(REQUIRED) <= set(kept)):
        order = ", ".join((*REQUIRED, "perhaps Dense, perhaps Normalize"))
        raise UserError(_unsupported(path, source, f"modules {', '.join(names) or 'none'}", order))
    without = tuple(name for name in names if name not in kept)
    for name, folder in found:
        if name == DROPOUT:
            _fields(folder, DROPOUT)
    return Folder(path, dict(found), kind, without)


def _settings(path: epath.Path) -> dict[str, Any]:
    """Returns the fields of `SETTINGS`, {} without the file. Raises `UserError` for a value of another type."""
    if not (path / SETTINGS).is_file():
        return {}
    return {**read_json(path / SETTINGS), **read_json(path / SETTINGS, _Settings)}


def _unsupported(folder: epath.Path, file: epath.Path, what: str, supported: str, note: str = "") -> str:
    """Returns the message about a value in a file of a folder, with how the user gets a checkpoint that is read."""
    return f"{file}: {what} is not supported{note}; supported: {supported}; {_remedy(folder)}"


def _remedy(folder: epath.Path) -> str:
    if (folder / CONFIG).is_file() and _is_readable(read_json(folder / CONFIG)):
        return f"for the encoder alone, copy the folder without {MODULES}"
    inner = sorted(file.parent for file in folder.glob(f"*/{CONFIG}"))
    if inner := [each for each in inner if "model_type" in (has := read_json(each / CONFIG)) and _is_readable(has)]:
        return f"for an encoder alone, name its folder, such as {inner[0]}"
    return "it has no encoder that bertjax reads; open it with sentence-transformers"


def _is_readable(fields: Mapping) -> bool:
    return fields.get("model_type", "bert") in families.by_model_type()


def read_settings(folder: Folder, config: BertConfig) -> ml_collections.ConfigDict:
    """Returns the settings of a folder with vectors as a run's config has them: `head`, prompts, `max_seq_length`.

    The section `PACKAGE` has the fields that a run has no place for.

    Args:
      config: of its encoder.

    Raises `UserError` for a module that does something else than ours.
    """
    path, fields = folder.path / SETTINGS, _settings(folder.path)
    check_fields(path, fields, PACKAGE, ARCHITECTURE, READ[ARCHITECTURE])
    prompts, default = _prompts(path, fields)
    head = {
        "pooling": _pooling(folder, config),
        **_dense(folder, config),
        "normalize": "Normalize" in folder.modules,
    }
    if (width := fields.get("truncate_dim")) is not None:
        if width < 1:
            raise UserError(f"{path}: truncate_dim is {width!r}, expected a number of at least 1, or null")
        head["truncate_dim"] = width
    if "Normalize" in folder.modules:
        _fields(folder.modules["Normalize"], "Normalize", {"module_output_name": "sentence_embedding"})
    if (similarity := fields.get("similarity_fn_name") or "cosine") not in SIMILARITIES:
        raise UserError(
            f"{path}: similarity_fn_name {similarity!r} is not supported; supported: {', '.join(SIMILARITIES)}; if you "
            f"only need vectors, set it to one of these in a copy of the folder"
        )
    data = {f"{kind}_prompt": prompt for kind, prompt in _of_kinds(prompts, default).items()}
    own = {
        "similarity_fn_name": similarity,
        "prompts": [[name, text] for name, text in prompts.items()],  # a section has no names with dots
        "default_prompt_name": default,
        "do_lower_case": bool(_inputs(folder)[1].get("do_lower_case")),
        "without": list(folder.without),
    }
    settings = {"head": head, "data": data, "max_seq_length": _max_seq_length(folder, config), PACKAGE: own}
    return ml_collections.ConfigDict(settings)


def read_classifier(
    folder: epath.Path, config: BertConfig, architecture: str, modules: Folder | None
) -> ml_collections.ConfigDict:
    """Returns the settings of a classifier that is a CrossEncoder, {} for another classifier.

    `activation_fn` is the class of PyTorch that CrossEncoder applies to the logits; "" is the default of CrossEncoder,
    which depends on the number of logits.

    Args:
      modules: the modules of a folder of version 6; None: the folder has no `modules.json`.
    """
    path, source = folder / CONFIG, folder / CONFIG
    fields = read_json(path, _OfClassifier)
    theirs, old = fields.get("sentence_transformers"), fields.get("sbert_ce_default_activation_function")
    is_classifier = architecture == "BertForSequenceClassification"
    if modules is None and (not is_classifier or (theirs is None and old is None)):
        return ml_collections.ConfigDict()
    if not is_classifier:
        stated = ", ".join(map(str, read_json(path).get("architectures") or ["none"]))
        raise UserError(f"{path}: architectures {stated} is no classifier, which a {CROSS_ENCODER} is")
    activation = (theirs or {}).get("activation_fn") or old or ""
    if modules is not None:
        source, settings = modules.path / SETTINGS, _settings(modules.path)
        remedy = f"for the classifier without it, copy the folder without {MODULES}"
        check_fields(source, settings, PACKAGE, CROSS_ENCODER, READ[CROSS_ENCODER], remedy)
        activation = settings.get("activation_fn") or activation
    supported = {name.rpartition(".")[2]: name for name in (IDENTITY, SIGMOID)}
    name = str(activation).rpartition(".")[2]
    if activation and not (str(activation).startswith("torch.") and name in supported):
        raise UserError(
            f"{source}: activation_fn {activation!r} is not supported; supported: {IDENTITY}, {SIGMOID}; write one of "
            f"these to a copy of the folder"
        )
    settings = {"activation_fn": supported.get(name, "")}
    if modules is None:
        file = folder / hf_tokenizer.SETTINGS
        most = read_json(file).get("model_max_length") if file.is_file() else None
        settings["max_seq_length"] = _limited(file, "model_max_length", most, config)
    else:
        settings["max_seq_length"] = _max_seq_length(modules, config)
    return ml_collections.ConfigDict(settings)


def of_classifier(settings: ml_collections.ConfigDict, problem_type: str) -> str:
    """Returns the activation of a classifier for CrossEncoder, "" for its default.

    `settings`: the settings of a run, or the settings that `read_classifier` returns.
    """
    is_number = bool(settings.get("task")) and problem_type == huggingface.REGRESSION
    return settings.get("activation_fn", IDENTITY if is_number else "")


def _fields(module: epath.Path, kind: str, expected: Mapping = {}) -> dict[str, Any]:
    """Returns the fields of a module, {} if it has none. Raises `UserError` for values that are not supported.

    `expected`: fields with the only value that is supported, which is not the default of the library.
    """
    path = module / CONFIG
    fields = read_json(path) if path.is_file() else {}
    check_fields(path, fields, PACKAGE, kind, READ[kind])
    require(path, {name: x for name, x in fields.items() if x is not None}, expected)
    return fields


def _pooling(folder: Folder, config: BertConfig) -> str:
    module = folder.modules["Pooling"]
    fields = _fields(module, "Pooling")
    given = fields.get("pooling_mode", [mode for flag, mode in FLAGS.items() if fields.get(flag)] or "mean")
    given = given if isinstance(given, list) else [given]
    if len(given) != 1 or given[0] not in tuple(POOLINGS):
        named = "+".join(map(str, given))
        raise UserError(_unsupported(folder.path, module / CONFIG, f"pooling {named!r}", ", ".join(POOLINGS)))
    for name in ("embedding_dimension", "word_embedding_dimension"):
        if fields.get(name, config.hidden_size) != config.hidden_size:
            raise UserError(f"{module / CONFIG}: {name} is {fields[name]}, but the encoder has {config.hidden_size}")
    return POOLINGS[given[0]]


def _dense(folder: Folder, config: BertConfig) -> dict[str, Any]:
    """Returns `dense` and `dense_act` of `config.head`."""
    if (module := folder.modules.get("Dense")) is None:
        return {"dense": 0, "dense_act": "none"}
    only = {"module_output_name": "sentence_embedding", "in_features": config.hidden_size}
    fields = _fields(module, "Dense", only)
    width = fields.get("out_features")
    act = fields.get("activation_function", defaults_of(PACKAGE, "Dense")["activation_function"])
    if not isinstance(width, int) or width < 1:
        raise UserError(f"{module / CONFIG}: out_features is {width!r}, which is not the width of a layer")
    if act not in tuple(ACTIVATIONS):
        what = f"activation_function {act!r}"
        raise UserError(_unsupported(folder.path, module / CONFIG, what, ", ".join(ACTIVATIONS)))
    return {"dense": width, "dense_act": ACTIVATIONS[act]}


def _prompts(path: epath.Path, fields: Mapping) -> tuple[dict[str, str], str]:
    """Returns the prompts by name, and the name of the one that texts have by default, "" if they have none."""
    prompts = {name: text or "" for name, text in (fields.get("prompts") or {}).items()}
    default = fields.get("default_prompt_name") or ""
    if default and default not in {*prompts, "query", "document"}:  # these two always exist
        raise UserError(f"{path}: default_prompt_name is {default!r}, which is none of its prompts")
    return prompts, default


def _of_kinds(prompts: Mapping[str, str], default: str) -> dict[str, str]:
    """Returns the prompts of queries and of documents: where one has none, a default that is of neither."""
    if default in ("query", *DOCUMENT_PROMPTS):  # as encode_query and encode_document
        default = ""

    def first(*names: str) -> str:
        return next((prompts[name] for name in names if prompts.get(name)), "")

    return {"query": first("query", default), "document": first(*DOCUMENT_PROMPTS, default)}


def _inputs(folder: Folder) -> tuple[epath.Path, dict[str, Any]]:
    """Returns the file that says what the encoder is given, and its fields; {} without one."""
    paths = (folder.encoder / ENCODER.format(kind) for kind in ENCODERS)
    path = next((path for path in paths if path.is_file()), None)
    return (path, read_json(path)) if path else (folder.encoder / ENCODER.format("bert"), {})


def _max_seq_length(folder: Folder, config: BertConfig) -> int:
    path, fields = _inputs(folder)
    task = TASKS[folder.kind]
    stated = {name: value for name, value in fields.items() if value not in (None, {}, [])}
    remedy = _remedy(folder.path)
    check_fields(path, stated, PACKAGE, task, READ[task], remedy)
    for name in ARGUMENTS:
        given = stated.get(name, {})
        is_dict = isinstance(given, dict)
        if other := {key: x for key, x in given.items() if key not in UNUSED_FIELDS} if is_dict else given:
            raise UserError(f"{path}: {name} {other!r} is not supported; supported: none; {remedy}")
    most = fields.get("max_seq_length")
    if most is None and (settings := folder.encoder / hf_tokenizer.SETTINGS).is_file():
        most = read_json(settings).get("model_max_length")
    return _limited(path, "max_seq_length", most, config)


def _limited(path: epath.Path, name: str, most, config: BertConfig) -> int:
    """Returns the most tokens of a text. Raises `UserError` if a file has no number of tokens."""
    if most is None:
        return config.max_position_embeddings
    if not isinstance(most, int | float) or most < 1:
        raise UserError(f"{path}: {name} is {most!r}, which is no number of tokens")
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
        raise UserError(
            _unsupported(folder.path, path, "do_lower_case true of a tokenizer that keeps capitals", "false")
        )
    file = folder.encoder / hf_tokenizer.JSON
    if found.cls_id == found.sep_id and file.is_file():  # GPT-2's; its class frames no text, and ours does
        from tokenizers import Tokenizer as Library

        library = Library.from_str(file.read_text())
        library.no_padding()
        library.no_truncation()
        if library.encode("a").ids != found.framed(*found.encode_ids(["a"])):
            piece = found.pieces[found.cls_id]
            raise UserError(
                _unsupported(folder.path, file, "a post_processor that does not frame a text", f"{piece} $A {piece}")
            )


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
    own = settings.get(PACKAGE, {})
    lower = own.get("do_lower_case", False)
    write_json(ENCODER.format("bert"), {"max_seq_length": max_seq_length, "do_lower_case": lower})
    if own:
        prompts, default = dict(own.prompts), own.default_prompt_name
    else:
        prompts = {kind: settings.data.get(f"{kind}_prompt", "") for kind in ("query", "document")}
        default = "query" if prompts["query"] else ""  # as `predict` has it
    named = {"model_type": ARCHITECTURE, "prompts": prompts, "default_prompt_name": default or None}
    named |= {"similarity_fn_name": own.get("similarity_fn_name", "cosine")}
    named |= {"truncate_dim": head.truncate_dim} if head.get("truncate_dim") else {}
    write_json(SETTINGS, named)
    return left_out + [f"{name}, which changes no vector" for name in own.get("without", ())]
