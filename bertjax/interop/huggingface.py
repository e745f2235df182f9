"""Hugging Face folders: config.json, safetensors in one or several files, and the tokenizer.

Each family reads and writes its own fields and tensors, in `HuggingFaceFamily.huggingface`.
"""

import contextlib
import json
import pickle
import tempfile
import zipfile
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Literal, NamedTuple, TypedDict

import ml_dtypes  # noqa: F401  registers bfloat16 with NumPy
import numpy as np
import safetensors.numpy
from etils import epath

from bertjax.common.errors import UserError
from bertjax.common.files import inside, read_json, write_whole
from bertjax.config.model_config import BertConfig
from bertjax.interop import hf_tokenizer
from bertjax.interop.hf_tokenizer import SPECIAL_NAMES
from bertjax.models import families, quantization
from bertjax.models.huggingface_format import HuggingFaceFormat
from bertjax.text.tokenizer import Tokenizer

BERT = "Bert"  # the prefix of architectures in workdirs, for all families
MULTI_LABEL = "multi_label_classification"  # the problem_type of a classifier with several labels per text
REGRESSION = "regression"  # the problem_type of a model that predicts a number
CONFIG, WEIGHTS, PICKLE = "config.json", "model.safetensors", "pytorch_model.bin"
SHARD = "model-{number:05}-of-{count:05}.safetensors"
SAFE_TORCH = (2, 6)
CONVERT = f"load it with transformers and call save_pretrained(), which writes {WEIGHTS}"
DTYPES = ("F64", "F32", "F16", "BF16", "I64", "I32", "I16", "I8", "U64", "U32", "U16", "U8", "BOOL")  # of safetensors
SHARD_BYTES = 50 * 10**9  # the largest file of weights that `write` writes, as in transformers 5
OTHER_WEIGHTS = {"tf_model.h5": "TensorFlow 2", "flax_model.msgpack": "Flax", "model.onnx": "ONNX"}


class Metadata(NamedTuple):
    """Fields of config.json and tokenizer_config.json that are not part of the model config.

    Attributes:
      labels: names of the labels of a classifier.
      problem_type: the problem_type of a classifier; "" if the number of labels implies it.
      activation_fn: the class of PyTorch that the CrossEncoder of sentence-transformers applies to the logits; "" for
        its default.
      max_length: the largest number of tokens of a text; 0 for the number of positions of the model.
    """

    labels: Sequence[str] = ()
    problem_type: str = ""
    activation_fn: str = ""
    max_length: int = 0


NO_METADATA = Metadata()


class _Head(TypedDict, total=False):
    """Fields of config.json about the model on top of the encoder."""

    architectures: list[str] | None
    problem_type: Literal["regression", "single_label_classification", "multi_label_classification", None]
    id2label: dict[int, str | int | float | None] | None


class _Index(TypedDict):
    """The index of weights in several files: {name of a tensor: file}."""

    weight_map: dict[str, str]


def check_exportable(config: BertConfig) -> None:
    """Raises `UserError` if transformers has no class for a model."""
    families.huggingface_of(config).check_exportable(config)


def read_config(path: epath.Path) -> BertConfig:
    """Reads the model config of a config.json. Raises `UserError` for a `model_type` without a family."""
    fields: dict[str, Any] = read_json(path)
    read_json(path, _Head)  # for the types of these fields
    known = families.by_model_type()
    kind = fields.get("model_type", "bert")
    if not isinstance(kind, str) or kind not in known:
        formats = (family.huggingface for family in known.values())
        same = next((layout.other_types[str(kind)] for layout in formats if str(kind) in layout.other_types), "")
        remedy = f"; use a folder that transformers reads without code, such as hub:{same}" if same else ""
        raise UserError(f"{path}: model_type {kind!r} is not supported; supported: {', '.join(known)}{remedy}")
    architecture = next(iter(fields.get("architectures") or ()), "")
    if "model_type" not in fields and (stated := _type_of_class(architecture)) not in ("", "bert"):
        raise UserError(f"{path}: model_type is missing; set it to {stated!r}, the type of {architecture}")
    return known[kind].huggingface.read_config(path, fields)


def _type_of_class(architecture: str) -> str:
    """Returns the model type of a class of transformers; "" for a class of an unknown family."""
    name = architecture.lower()
    kinds = [kind for kind in families.by_model_type() if name.startswith(kind.replace("-", ""))]
    return max(kinds, key=len, default="")  # XLMRobertaXLModel also begins with xlm-roberta


def read_head(path: epath.Path) -> tuple[str, tuple[str, ...], str]:
    """Returns (architecture, label names, problem_type) of a config.json; each is empty if absent.

    The architecture is the class of BERT with the same head, as in workdirs; "" if the class is unknown.
    """
    head = read_json(path, _Head)
    problem_type = head.get("problem_type") or ""
    architecture = next(iter(head.get("architectures") or ()), "")
    names = head.get("id2label") or {}
    labels = tuple(str(names[key]) for key in sorted(names))
    if missing := [str(key) for key in range(len(names)) if key not in names]:
        if architecture.endswith("Classification"):  # transformers uses the number of a row as the key
            raise UserError(
                f"{path}: id2label has {len(names)} labels, but none for {', '.join(missing)}; number the labels from "
                f"0 to {len(names) - 1}"
            )
        labels = ()
    return head_of(architecture, read_json(path)), labels, problem_type


def head_of(architecture: str, fields: Mapping) -> str:
    """Returns the class of BERT with the same head as a class of transformers; "" if the class is unknown.

    Args:
      architecture: the class, of the family of `fields`.
      fields: the content of a config.json.
    """
    layout = families.by_model_type()[fields.get("model_type", "bert")].huggingface
    if architecture not in layout.architectures:
        return ""
    return BERT + split_class(architecture, layout)[1]


def split_class(architecture: str, layout: HuggingFaceFormat) -> tuple[str, str]:
    """Splits the name of a class of transformers into the model and the head.

    Returns the name of the model in prose, such as "XLM-RoBERTa", and the suffix of the class. If the suffix of the
    class of BERT with the same head differs, returns the suffix of the class of BERT.
    """
    prefix = next(prefix for prefix in layout.classes if architecture.startswith(prefix))
    kind = architecture.removeprefix(prefix)
    return layout.classes[prefix], layout.bert_suffixes.get(kind, kind)


def read_params(folder: epath.Path, config: BertConfig) -> tuple[dict, list[str], str]:
    """Reads the params of a folder, see `HuggingFaceFormat.read_params`."""
    layout = families.huggingface_of(config)
    return layout.read_params(tensors_of(folder), read_json(folder / CONFIG), config, str(folder))


def tensors_of(folder: epath.Path) -> Iterator[tuple[str, np.ndarray]]:
    """Yields the tensors of a folder by name. Raises `UserError` if a file is missing, damaged or quantized.

    Tensors that a shard contains and the index does not list are read as well, as in transformers.
    """
    file_of: dict[str, epath.Path] = {}
    for path, listed in _weight_files(folder).items():
        for name, tensor in tensors_in(path):
            if name in file_of:
                raise UserError(f"{path}: {name} is in {file_of[name].name} too; delete the file that is not needed")
            file_of[name] = path
            yield name, tensor
        if missing := [name for name in listed if file_of.get(name) != path]:
            raise UserError(f"{path}: {missing[0]} is missing, but the index lists it; copy the file again")


def tensors_in(path: epath.Path) -> Iterator[tuple[str, np.ndarray]]:
    """Yields the tensors of a file by name. Raises `UserError` if the file is damaged."""
    with _local(path) as local:
        yield from (_pickled if path.suffix == ".bin" else _safe)(local, path)


def _safe(local: epath.Path, path: epath.Path) -> Iterator[tuple[str, np.ndarray]]:
    """Yields the tensors of a safetensors file. `local` is the file or a copy, `path` is for messages."""
    try:
        with safetensors.safe_open(local, framework="np") as file:
            names = [*file.keys()]
            for name in names:
                dtype = file.get_slice(name).get_dtype()
                quantization.check_tensor(path, name, dtype, dtype in DTYPES)
            for name in names:
                yield name, file.get_tensor(name)
    except (safetensors.SafetensorError, OSError) as error:
        raise UserError(f"{path}: damaged or truncated ({error}); copy it again") from None


def _pickled(local: epath.Path, path: epath.Path) -> Iterator[tuple[str, np.ndarray]]:
    """Yields the tensors of a file of PyTorch, see `_safe`. Converts tensors of 16 bits to float32.

    The file is a pickle, which can run any code. Only the `weights_only` loader of PyTorch opens it, which runs none.
    """
    try:
        import torch
    except ImportError:
        raise UserError(f"{path}: needs PyTorch: pip install torch, or {CONVERT}") from None
    if tuple(map(int, torch.__version__.split(".")[:2])) < SAFE_TORCH:
        least = ".".join(map(str, SAFE_TORCH))
        raise UserError(
            f"{path}: torch {torch.__version__} can run code of such a file (CVE-2025-32434), expected {least} or "
            f"newer: pip install 'torch>={least}'"
        )
    try:
        state = torch.load(local.__fspath__(), "cpu", weights_only=True, mmap=zipfile.is_zipfile(local))
    except pickle.UnpicklingError:  # its message recommends an unsafe way to open the file
        raise UserError(
            f"{path}: damaged, or has other objects than tensors, which could run code; if the file is safe, {CONVERT}"
        ) from None
    except Exception as error:  # a damaged pickle may raise any exception
        reason = (str(error) or type(error).__name__).splitlines()[0]
        raise UserError(f"{path}: damaged or truncated ({reason}); copy it again") from None
    named = [*state.items()] if isinstance(state, dict) else [(type(state).__name__, state)]
    for name, tensor in named:
        if not isinstance(name, str) or not isinstance(tensor, torch.Tensor):
            raise UserError(f"{path}: {name!r} is not a tensor; save only state_dict() of the model, or {CONVERT}")
        if tensor.is_quantized or tensor.is_meta or tensor.layout != torch.strided:
            raise UserError(
                f"{path}: {name} is a quantized, sparse or meta tensor; supported: tensors with strides and values"
            )
        is_float = not tensor.is_complex() and not (tensor.is_floating_point() and tensor.element_size() < 2)
        quantization.check_tensor(path, name, str(tensor.dtype).removeprefix("torch."), is_float)
    for name, tensor in named:
        yield name, (tensor.float() if tensor.is_floating_point() else tensor).detach().numpy()


@contextlib.contextmanager
def _local(path: epath.Path) -> Iterator[epath.Path]:
    """Yields a local file, or a local copy of a remote file: safetensors cannot read object stores."""
    if "://" not in str(path):
        yield path
        return
    with tempfile.TemporaryDirectory() as folder:
        yield path.copy(epath.Path(folder) / path.name)


def _weight_files(folder: epath.Path) -> dict[epath.Path, list[str]]:
    """Returns {file with weights of a folder: the tensors that an index lists}.

    Raises `UserError` if a file is missing, or if the index is damaged.
    """
    for whole in (WEIGHTS, PICKLE):
        index = folder / f"{whole}.index.json"
        if (folder / whole).exists():
            return {folder / whole: []}
        if index.exists():
            shards: dict[epath.Path, list[str]] = {}
            for tensor, name in sorted(read_json(index, _Index)["weight_map"].items()):
                shards.setdefault(inside(folder, name, index), []).append(tensor)
            if not shards:
                raise UserError(f"{index}: weight_map lists no tensors; copy the file again")
            if missing := [path for path in shards if not path.is_file()]:
                raise UserError(f"{min(missing)}: missing, but listed in {index}; copy the file too")
            return dict(sorted(shards.items()))
    for name, library in OTHER_WEIGHTS.items():
        if (folder / name).exists():
            raise UserError(
                f"{folder / name}: weights of {library} are not supported; load them with a transformers version that "
                f"supports {library}, and call save_pretrained() of the PyTorch model, which writes {WEIGHTS}"
            )
    if files := sorted(folder.glob("*.gguf")):
        raise UserError(f"{files[0]}: weights of GGUF are not supported; {quantization.REMEDY}")
    raise UserError(f"{folder}: no {WEIGHTS} and no {PICKLE}, whole or in parts with an index; copy the weights")


def check_labels(labels: Sequence[str], rows: int, source: str = "the checkpoint") -> None:
    """Raises `UserError` unless the labels of a classifier with `rows` outputs are unique, or absent."""
    if labels and (len(labels) != rows or len(set(labels)) != rows):
        raise UserError(
            f"{source}: id2label has {len(set(labels))} different labels, but the classifier has {rows} rows; name "
            f"{rows} labels"
        )


def write(
    folder: epath.PathLike,
    config: BertConfig,
    params: dict,
    tokenizer: Tokenizer | None,
    architecture: str = "",
    metadata: Metadata = NO_METADATA,
) -> list[str]:
    """Writes a folder for `architecture.from_pretrained(folder)` of transformers.

    Args:
      folder: the folder.
      config: the model config.
      params: the params.
      tokenizer: the tokenizer; None for a checkpoint without a tokenizer.
      architecture: the class of transformers; "" for the class that keeps most params.
      metadata: other fields of the files.

    Returns:
      The names of omitted params, which the class does not have.

    Raises:
      UserError: the params lack a part of the class.
    """
    folder, layout = epath.Path(folder), families.huggingface_of(config)
    architecture = architecture or layout.choose_architecture(params, config)
    tensors, left_out = layout.to_tensors(params, config, architecture)
    files = definition(config, params, tokenizer, architecture, metadata)  # raises before anything is written
    _write_weights(folder, tensors)
    for name, content in files.items():
        write_whole(folder / name, content)
    if tokenizer is not None:
        tokenizer.save(folder)
    return left_out


def _write_weights(folder: epath.Path, tensors: Mapping[str, np.ndarray]) -> None:
    """Writes tensors to one file; tensors of more than `SHARD_BYTES` to shards with an index."""
    shards: list[dict[str, np.ndarray]] = [{}]
    size = 0
    for name, tensor in tensors.items():
        if shards[-1] and size + tensor.nbytes > SHARD_BYTES:
            shards.append({})
            size = 0
        shards[-1][name] = tensor
        size += tensor.nbytes
    if len(shards) == 1:
        write_tensors(folder / WEIGHTS, tensors)
        return
    weight_map: dict[str, str] = {}
    for number, shard in enumerate(shards, 1):
        file = SHARD.format(number=number, count=len(shards))
        write_tensors(folder / file, shard)
        weight_map |= dict.fromkeys(shard, file)
    total = sum(tensor.nbytes for tensor in tensors.values())
    index = {"metadata": {"total_size": total}, "weight_map": dict(sorted(weight_map.items()))}
    write_whole(folder / f"{WEIGHTS}.index.json", json.dumps(index, indent=2) + "\n")


def write_tensors(path: epath.Path, tensors: Mapping[str, np.ndarray]) -> None:
    """Writes tensors as a safetensors file for PyTorch."""
    arrays = {name: np.asarray(tensor, order="C") for name, tensor in tensors.items()}
    write_whole(path, safetensors.numpy.save(arrays, metadata={"format": "pt"}))


def definition(
    config: BertConfig, params: dict, tokenizer: Tokenizer | None, architecture: str, metadata: Metadata
) -> dict[str, str]:
    """Returns {name: content} of the files of a folder without the weights.

    Args:
      config: the model config.
      params: the params, which determine the number of labels.
      tokenizer: the tokenizer; None for a checkpoint without a tokenizer.
      architecture: the class of transformers.
      metadata: other fields of the files.
    """
    layout = families.huggingface_of(config)
    if rows := layout.count_labels(params, architecture):
        check_labels(metadata.labels, rows)
    fields: dict[str, Any] = {
        "architectures": [architecture],
        "tie_word_embeddings": config.tie_word_embeddings,
        **layout.to_fields(config),
        **_special_ids(layout.special_ids, tokenizer),
        "dtype": "float32",
    }
    if tokenizer is not None and fields["pad_token_id"] != tokenizer.pad_id:
        raise UserError(
            f"model.position_offset = {config.position_offset}: positions of transformers start after the id "
            f"of the padding token, {tokenizer.pad_id} in this vocabulary"
        )
    if rows:
        names = metadata.labels or [f"LABEL_{i}" for i in range(rows)]
        fields["id2label"] = {str(i): name for i, name in enumerate(names)}
        fields["label2id"] = {name: i for i, name in enumerate(names)}
    if architecture.endswith("ForSequenceClassification"):
        if metadata.problem_type:
            fields["problem_type"] = metadata.problem_type
        if metadata.activation_fn:
            fields["sentence_transformers"] = {"activation_fn": metadata.activation_fn}
    files = {CONFIG: json.dumps(fields, indent=2) + "\n"}
    return files if tokenizer is None else files | tokenizer_definition(config, tokenizer, metadata.max_length)


def tokenizer_definition(config: BertConfig, tokenizer: Tokenizer, max_length: int = 0) -> dict[str, str]:
    """Returns {name: content} of the files of a tokenizer.

    `AutoTokenizer` needs tokenizer_config.json to read tokenizer.json.

    Args:
      config: the model config.
      tokenizer: the tokenizer.
      max_length: the largest number of tokens of a text; 0 for the number of positions of the model.
    """
    is_wordpiece = tokenizer.kind == "wordpiece"
    settings = {
        "tokenizer_class": tokenizer.huggingface_class,
        "model_max_length": max_length or config.max_position_embeddings,
        "model_input_names": list(families.huggingface_of(config).inputs),
        **{f"{name}_token": tokenizer.pieces[getattr(tokenizer, f"{name}_id")] for name in SPECIAL_NAMES},
    }
    if tokenizer.ends_with_cls:  # XLNet in transformers expects [CLS] at the end of a row
        settings["padding_side"] = "left"
    if is_wordpiece:
        settings |= {"do_lower_case": tokenizer.lowercase, "strip_accents": None, "tokenize_chinese_chars": True}
    content = json.dumps(settings, indent=2) + "\n"
    return {hf_tokenizer.JSON: tokenizer.to_huggingface(), hf_tokenizer.SETTINGS: content}


def _special_ids(names: Mapping[str, str], tokenizer: Tokenizer | None) -> dict[str, int | None]:
    """Returns the fields of config.json with ids of special tokens."""
    if tokenizer is None:
        # transformers requires an id of the padding, whose embedding it does not train, and accepts no null for [MASK].
        return {name: 0 if token == "pad" else None for name, token in names.items() if token != "mask"}
    return {name: getattr(tokenizer, f"{token}_id") for name, token in names.items()}
