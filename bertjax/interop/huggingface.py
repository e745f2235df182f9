"""Hugging Face folders: config.json, safetensors in one or several files, and the tokenizer.

Each family reads and writes its own fields and tensors, in `HuggingFaceFamily.huggingface`.
"""

import contextlib
import json
import pickle
import tempfile
import zipfile
from collections.abc import Iterator, Mapping, Sequence
from typing import Literal, TypedDict

import ml_dtypes  # noqa: F401  registers bfloat16 with NumPy
import numpy as np
from etils import epath

from bertjax.common.errors import UserError
from bertjax.common.files import inside, read_json, write_whole
from bertjax.config.model_config import BertConfig
from bertjax.models import families
from bertjax.models.huggingface_format import HuggingFaceFormat
from bertjax.text.tokenizer import Tokenizer

OURS = "Bert"  # how the names of architectures begin in workdirs, whatever the family
MULTI_LABEL = "multi_label_classification"  # the problem_type of labels that do not exclude each other
REGRESSION = "regression"  # the problem_type of a number
CONFIG, WEIGHTS, PICKLE = "config.json", "model.safetensors", "pytorch_model.bin"
SAFE_TORCH = (2, 6)
CONVERT = f"load it with transformers and call save_pretrained(), which writes {WEIGHTS}"


class _Head(TypedDict, total=False):
    """What config.json says of the model on top of BERT."""

    architectures: list[str] | None
    problem_type: Literal["regression", "single_label_classification", MULTI_LABEL, None]
    id2label: dict[int, str | int | float | None] | None


OTHER_WEIGHTS = {"tf_model.h5": "TensorFlow 2", "flax_model.msgpack": "Flax", "model.onnx": "ONNX"}


class _Index(TypedDict):
    """What says which file a tensor is in."""

    weight_map: dict[str, str]


def check_exportable(config: BertConfig) -> None:
    """Raises `UserError` if transformers has no class for a model."""
    families.huggingface_of(config).check_exportable(config)


def read_config(path: epath.Path) -> BertConfig:
    """Reads the config of a model from a config.json. Raises `UserError` if no family knows its `model_type`."""
    fields, known = read_json(path), families.by_model_type()
    read_json(path, _Head)  # for the types of fields that families read as well
    kind = fields.get("model_type", "bert")
    if not isinstance(kind, str) or kind not in known:
        raise UserError(f"{path}: model_type {kind!r} is another architecture; supported: {', '.join(known)}")
    architecture = next(iter(fields.get("architectures") or ()), "")
    if "model_type" not in fields and (stated := _type_of_class(architecture)) not in ("", "bert"):
        raise UserError(f"{path}: model_type is missing; set it to {stated!r}, the type of {architecture}")
    return known[kind].huggingface.read_config(path, fields)


def _type_of_class(architecture: str) -> str:
    """Returns the model type of a class of transformers; "" for a class of a family that is not read."""
    name = architecture.lower()
    return next((kind for kind in families.by_model_type() if name.startswith(kind.replace("-", ""))), "")


def read_head(path: epath.Path) -> tuple[str, tuple[str, ...], str]:
    """Returns (architecture, label names, problem_type) of a config.json; each is empty if absent.

    The architecture is BERT's class with the same output layer, as in workdirs; empty if the class is unknown.
    """
    head = read_json(path, _Head)
    problem_type = head.get("problem_type") or ""
    architecture = next(iter(head.get("architectures") or ()), "")
    names = head.get("id2label") or {}
    labels = tuple(str(names[key]) for key in sorted(names))
    if missing := [str(key) for key in range(len(names)) if key not in names]:
        if architecture.endswith("Classification"):  # transformers finds the name of a row by the number of the row
            raise UserError(
                f"{path}: id2label has {len(names)} labels, but none for {', '.join(missing)}; number the labels from "
                f"0 to {len(names) - 1}"
            )
        labels = ()
    return head_of(architecture, read_json(path)), labels, problem_type


def head_of(architecture: str, fields: Mapping) -> str:
    """Returns BERT's class with the output layer of a class of the family of a config.json; "" if it is unknown."""
    layout = families.by_model_type()[fields.get("model_type", "bert")].huggingface
    if architecture not in layout.architectures:
        return ""
    return OURS + split_class(architecture, layout)[1]


def split_class(architecture: str, layout: HuggingFaceFormat) -> tuple[str, str]:
    """Splits the name of a class of transformers into the model and the output layer.

    Returns the name of the model as people write it, such as "XLM-RoBERTa", and the rest of the name of the class. If
    the class of BERT with the same output layer has another rest, returns the rest of BERT's class.
    """
    prefix = next(prefix for prefix in layout.classes if architecture.startswith(prefix))
    kind = architecture.removeprefix(prefix)
    return layout.classes[prefix], layout.bert_suffixes.get(kind, kind)


def read_params(folder: epath.Path, config: BertConfig) -> tuple[dict, list[str], str]:
    """Returns our params from a folder's safetensors, the names of ignored tensors, and why it predicts no words."""
    layout = families.huggingface_of(config)
    return layout.read_params(tensors_of(folder), read_json(folder / CONFIG), config, str(folder))


def tensors_of(folder: epath.Path) -> Iterator[tuple[str, np.ndarray]]:
    """Yields the tensors of a folder by name. Raises `UserError` if a file is missing or damaged."""
    for path in _weight_files(folder):
        yield from tensors_in(path)


def tensors_in(path: epath.Path) -> Iterator[tuple[str, np.ndarray]]:
    """Yields the tensors of a file by name. Raises `UserError` if it is damaged."""
    with _local(path) as local:
        yield from (_pickled if path.suffix == ".bin" else _safe)(local, path)


def _safe(local: epath.Path, path: epath.Path) -> Iterator[tuple[str, np.ndarray]]:
    """Yields the tensors of a file of safetensors, of which `local` is a copy."""
    import safetensors

    try:
        with safetensors.safe_open(local, framework="np") as file:
            for name in file.keys():
                yield name, file.get_tensor(name)
    except (safetensors.SafetensorError, OSError) as error:
        raise UserError(f"{path}: damaged or truncated ({error}); copy it again") from None


def _pickled(local: epath.Path, path: epath.Path) -> Iterator[tuple[str, np.ndarray]]:
    """As `_safe`, of a file of PyTorch: those of 16 bits as float32.

    It is a pickle, which can run any code. PyTorch's loader for weights alone runs none; nothing else opens it.
    """
    try:
        import torch
    except ImportError:
        raise UserError(f"{path}: is read with PyTorch: pip install torch, or else {CONVERT}") from None
    if tuple(map(int, torch.__version__.split(".")[:2])) < SAFE_TORCH:
        least = ".".join(map(str, SAFE_TORCH))
        raise UserError(
            f"{path}: before {least}, PyTorch's loader could be made to run code in such a file (CVE-2025-32434), and "
            f"this is {torch.__version__}: pip install 'torch>={least}'"
        )
    try:
        state = torch.load(local.__fspath__(), "cpu", weights_only=True, mmap=zipfile.is_zipfile(local))
    except pickle.UnpicklingError:  # The message of the exception recommends an unsafe way to open the file.
        raise UserError(
            f"{path}: damaged, or more than tensors, which could run code; if you trust it, {CONVERT}"
        ) from None
    except Exception as error:  # a damaged pickle causes any
        reason = (str(error) or type(error).__name__).splitlines()[0]
        raise UserError(f"{path}: damaged or truncated ({reason}); copy it again") from None
    for name, tensor in state.items() if isinstance(state, dict) else [(type(state).__name__, state)]:
        if not isinstance(name, str) or not isinstance(tensor, torch.Tensor):
            raise UserError(f"{path}: {name!r} is no tensor; save state_dict() of the model alone, or {CONVERT}")
        if tensor.is_quantized or tensor.is_meta or tensor.layout != torch.strided:
            raise UserError(
                f"{path}: {name} is a quantized or sparse tensor, or one without values, which is not supported"
            )
        yield name, (tensor.float() if tensor.is_floating_point() else tensor).detach().numpy()


@contextlib.contextmanager
def _local(path: epath.Path) -> Iterator[epath.Path]:
    """Yields a local copy of a remote file, or the file itself: safetensors cannot read object stores."""
    if "://" not in str(path):
        yield path
        return
    with tempfile.TemporaryDirectory() as folder:
        yield path.copy(epath.Path(folder) / path.name)


def _weight_files(folder: epath.Path) -> list[epath.Path]:
    for whole in (WEIGHTS, PICKLE):
        index = folder / f"{whole}.index.json"
        if (folder / whole).exists():
            return [folder / whole]
        if index.exists():
            names = sorted(set(read_json(index, _Index)["weight_map"].values()))
            files = [inside(folder, name, index) for name in names]
            for path in files:
                if not path.is_file():
                    raise UserError(f"{path}: missing, but listed in {index}; copy it too")
            return files
    if others := [name for name in OTHER_WEIGHTS if (folder / name).exists()]:
        raise UserError(
            f"{folder / others[0]}: weights of {OTHER_WEIGHTS[others[0]]}, which are not read; load them with a "
            f"transformers that has it, and call save_pretrained() of the PyTorch model, which writes {WEIGHTS}"
        )
    raise UserError(f"{folder}: no {WEIGHTS} and no {PICKLE}, whole or in parts with an index")


def check_labels(labels: Sequence[str], rows: int, source: str = "the checkpoint") -> None:
    """Raises `UserError` unless each row of a classifier has a name of its own, or none has."""
    if labels and (len(labels) != rows or len(set(labels)) != rows):
        raise UserError(f"{source}: names {len(set(labels))} labels, but its classifier has {rows} rows")


def write(
    folder: epath.PathLike,
    config: BertConfig,
    params: dict,
    tokenizer: Tokenizer | None,
    architecture: str = "",
    labels: Sequence[str] = (),
    problem_type: str = "",
    activation_fn: str = "",
    max_length: int = 0,
) -> list[str]:
    """Writes a folder for transformers' `architecture.from_pretrained(folder)`; "" means the class that keeps the most.

    Args:
      labels: names of a classifier's rows.
      problem_type: what transformers calls the problem of a classifier; "" lets it conclude this from the rows.
      activation_fn: the class of PyTorch that CrossEncoder of sentence-transformers applies to the logits; "" is its
        default.
      max_length: the most tokens of a text, for the tokenizer; 0: the positions of the model.

    Returns the names of variables that the class does not have; they are left out. Raises `UserError` if the class has
    parts that the params lack.
    """
    import safetensors.numpy

    folder, layout = epath.Path(folder), families.huggingface_of(config)
    architecture = architecture or layout.choose_architecture(params, config)
    tensors, left_out = layout.to_tensors(params, config, architecture)
    given = labels, problem_type, activation_fn, max_length
    files = definition(config, params, tokenizer, architecture, *given)  # before anything is written
    write_whole(folder / WEIGHTS, safetensors.numpy.save(tensors, metadata={"format": "pt"}))
    for name, content in files.items():
        write_whole(folder / name, content)
    if tokenizer is not None:
        tokenizer.save(folder)
    return left_out


def definition(
    config: BertConfig,
    params: dict,
    tokenizer: Tokenizer | None,
    architecture: str,
    labels: Sequence[str] = (),
    problem_type: str = "",
    activation_fn: str = "",
    max_length: int = 0,
) -> dict[str, str]:
    """Returns the files with which transformers knows a class of a model and its tokenizer, by their names.

    The arguments are those of `write`; `params` say how many rows a classifier has.
    """
    layout = families.huggingface_of(config)
    if rows := layout.count_labels(params, architecture):
        check_labels(labels, rows)
    fields = {
        "architectures": [architecture],
        "tie_word_embeddings": config.tie_word_embeddings,
        **layout.to_fields(config),
        **_special_ids(layout.special_ids, tokenizer),
        "dtype": "float32",
    }
    if tokenizer is not None and fields["pad_token_id"] != tokenizer.pad_id:
        raise UserError(
            f"model.position_offset = {config.position_offset}: transformers counts positions from the id of padding "
            f"on, which is {tokenizer.pad_id} in this vocabulary"
        )
    if rows:
        names = labels or [f"LABEL_{i}" for i in range(rows)]
        fields["id2label"] = {str(i): name for i, name in enumerate(names)}
        fields["label2id"] = {name: i for i, name in enumerate(names)}
    if architecture.endswith("ForSequenceClassification"):
        fields |= {"problem_type": problem_type} if problem_type else {}
        fields |= {"sentence_transformers": {"activation_fn": activation_fn}} if activation_fn else {}
    files = {CONFIG: json.dumps(fields, indent=2) + "\n"}
    return files | (tokenizer_definition(config, tokenizer, max_length) if tokenizer is not None else {})


def tokenizer_definition(config: BertConfig, tokenizer: Tokenizer, max_length: int = 0) -> dict[str, str]:
    """Returns the files with which transformers reads a tokenizer, by their names.

    `max_length`: the most tokens of a text; 0: the positions of the model.
    """
    layout = families.huggingface_of(config)
    settings = _tokenizer_config(config, layout.inputs, tokenizer, max_length)
    return {"tokenizer.json": tokenizer.to_huggingface(), "tokenizer_config.json": settings}


def _special_ids(names: Mapping[str, str], tokenizer: Tokenizer | None) -> dict[str, int | None]:
    """Returns the fields of config.json that are ids of special pieces."""
    if tokenizer is None:
        # transformers does not train the padding's embedding, and takes no None for the mask.
        return {name: 0 if piece == "pad" else None for name, piece in names.items() if piece != "mask"}
    return {name: getattr(tokenizer, f"{piece}_id") for name, piece in names.items()}


def _tokenizer_config(config: BertConfig, inputs: Sequence[str], tokenizer: Tokenizer, max_length: int) -> str:
    """Returns a tokenizer_config.json, which `AutoTokenizer` needs to read the tokenizer.json beside it."""
    names = ("pad", "unk", "cls", "sep", "mask")
    special = {f"{name}_token": tokenizer.pieces[getattr(tokenizer, f"{name}_id")] for name in names}
    is_wordpiece = tokenizer.kind == "wordpiece"
    settings = {
        "tokenizer_class": "BertTokenizer" if is_wordpiece else "PreTrainedTokenizerFast",
        "model_max_length": max_length or config.max_position_embeddings,
        "model_input_names": list(inputs),
        **special,
    }
    if tokenizer.ends_with_cls:  # theirs looks for [CLS] at the end of a row
        settings["padding_side"] = "left"
    if is_wordpiece:
        settings |= {"do_lower_case": tokenizer.lowercase, "strip_accents": None, "tokenize_chinese_chars": True}
    return json.dumps(settings, indent=2) + "\n"
