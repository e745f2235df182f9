"""Hugging Face folders: config.json, safetensors in one or several files, and the tokenizer.

BERT's are read and written, GPT-2's read.
"""

import contextlib
import dataclasses
import json
import re
import tempfile
from collections.abc import Iterator, Sequence
from typing import TypedDict

import ml_collections
import ml_dtypes  # noqa: F401  registers bfloat16 with NumPy
import numpy as np
from etils import epath

from bertjax.config import OWN_FIELDS, BertConfig, UserError
from bertjax.files import inside, read_json, write_whole
from bertjax.interop import gpt2
from bertjax.interop.variables import WORDS, check_variables, to_params, to_variables, variable_shapes
from bertjax.text.tokenizer import Tokenizer
from bertjax.validation import validate_model

CONFIG, WEIGHTS, INDEX = "config.json", "model.safetensors", "model.safetensors.index.json"
REQUIRED = (
    "vocab_size", "hidden_size", "num_hidden_layers", "num_attention_heads", "intermediate_size",
    "max_position_embeddings",
)  # fmt: skip
# Activations: name in transformers -> our name.
ACTIVATIONS = {"gelu": "gelu", "gelu_new": "gelu_new", "gelu_pytorch_tanh": "gelu_new", "relu": "relu"}

# Parts of each transformers class besides the encoder, as prefixes of Google's variables.
ARCHITECTURES = {
    "BertModel": ("bert/pooler/",),
    "BertForMaskedLM": ("cls/predictions/",),
    "BertForNextSentencePrediction": ("bert/pooler/", "cls/seq_relationship/"),
    "BertForPreTraining": ("bert/pooler/", "cls/predictions/", "cls/seq_relationship/"),
    "BertForQuestionAnswering": ("cls/squad/",),
    "BertForSequenceClassification": ("bert/pooler/", "output_"),
    "BertForMultipleChoice": ("bert/pooler/", "output_"),
    "BertForTokenClassification": ("output_",),
}
WRAPPERS = re.compile(r"^(module\.|_orig_mod\.)+")  # DataParallel, torch.compile: put in front of all names
FINE_TUNED_NAMES = {
    "output_weights": "classifier.weight",
    "output_bias": "classifier.bias",
    "cls/squad/output_weights": "qa_outputs.weight",
    "cls/squad/output_bias": "qa_outputs.bias",
}


class _Head(TypedDict, total=False):
    """What config.json says of the model on top of BERT."""

    architectures: list[str] | None
    problem_type: str | None
    id2label: dict[int, str | int | float | None] | None


OTHER_WEIGHTS = {"tf_model.h5": "TensorFlow 2", "flax_model.msgpack": "Flax", "model.onnx": "ONNX"}


class _Index(TypedDict):
    """model.safetensors.index.json"""

    weight_map: dict[str, str]


def read_config(path: epath.Path) -> BertConfig:
    """Reads a `BertConfig` from the config.json of a BERT encoder or a GPT-2. Raises `UserError` for any other."""
    fields = read_json(path)
    kind = fields.get("model_type", "bert")
    if kind not in ("bert", "gpt2"):
        raise UserError(f"{path}: model_type {kind!r} is another architecture; supported: bert, gpt2")
    form = gpt2.FORM if kind == "gpt2" else {}
    fields = gpt2.as_bert(path, fields) if kind == "gpt2" else fields
    for name, expected in (
        ("position_embedding_type", "absolute"),
        ("is_decoder", False),
        ("add_cross_attention", False),
    ):
        if fields.get(name, expected) != expected:
            raise UserError(f"{path}: {name} {fields[name]!r} is not supported; supported: {expected!r}")
    if "quantization_config" in fields:
        raise UserError(f"{path}: quantization_config: quantized weights are not supported")
    activation = fields.get("hidden_act", "gelu")
    if not isinstance(activation, str) or activation not in ACTIVATIONS:
        raise UserError(f"{path}: hidden_act {activation!r} is not supported; supported: {', '.join(ACTIVATIONS)}")
    found = bert_config(path, {**fields, "hidden_act": ACTIVATIONS[activation]})
    return dataclasses.replace(found, **form)


def read_head(path: epath.Path) -> tuple[str, tuple[str, ...]]:
    """Returns (architecture, label names) of a config.json; each is empty if absent, or if the class is unknown.

    Labels that do not exclude each other are of no class here.
    """
    head = read_json(path, _Head)
    if head.get("problem_type") == "multi_label_classification":
        return "", ()
    architecture = next(iter(head.get("architectures") or ()), "")
    names = head.get("id2label") or {}
    labels = tuple(str(names[key]) for key in sorted(names))
    return architecture if architecture in ARCHITECTURES else "", labels


def bert_config(path: epath.Path, fields: dict) -> BertConfig:
    """Builds a `BertConfig` from a JSON object. Raises `UserError` if a field is missing or has an invalid value."""
    names = {name: field for name, field in BertConfig.__dataclass_fields__.items() if name not in OWN_FIELDS}
    for name in REQUIRED:
        if name not in fields:
            raise UserError(f"{path}: {name} is missing; a BERT config needs it")
    for name, field in names.items():
        value, numbers = fields.get(name, field.default), (int, float) if field.type is float else (field.type,)
        if type(value) not in numbers:
            raise UserError(f"{path}: {name} is {value!r}, which is not a valid {field.type.__name__}")
    found = BertConfig(**{name: fields[name] for name in names if name in fields})
    try:
        validate_model(ml_collections.ConfigDict(dict(model=dataclasses.asdict(found))))
    except UserError as error:
        raise UserError(f"{path}: {str(error).replace('config.model.', '').replace('model.', '')}") from None
    return found


def huggingface_name(variable: str) -> str:
    """Maps Google's variable to its tensor name in transformers' classes with a head."""
    if variable in FINE_TUNED_NAMES:
        return FINE_TUNED_NAMES[variable]
    name = variable.replace("layer_", "layer.").replace("/", ".")
    for end, theirs in (
        ("_embeddings", "_embeddings.weight"),
        (".kernel", ".weight"),  # also transposed, see `is_transposed`
        (".gamma", ".weight"),
        (".beta", ".bias"),
        (".output_weights", ".weight"),
        (".output_bias", ".bias"),
    ):
        if name.endswith(end):
            return name.removesuffix(end) + theirs
    return name


def is_transposed(variable: str) -> bool:
    """True for dense kernels: Google stores `[inputs, outputs]`, PyTorch `[outputs, inputs]`."""
    return variable.endswith("/kernel")


def read_params(folder: epath.Path, config: BertConfig) -> tuple[dict, list[str], str]:
    """Returns our params from a folder's safetensors, the names of ignored tensors, and why it predicts no words.

    The ignored ones are not part of BERT. A decoder of its own, which BERT has not, is left out with all that predicts
    words; otherwise the reason is "". Accepts encoders with and without the prefix `bert.`, the prefixes of PyTorch's
    wrappers, LayerNorms with `gamma` and `beta`, weights in half precision, and redundant copies of the tied decoder.
    Raises `UserError` if tensors are missing or contradict each other.
    """
    if read_json(folder / CONFIG).get("model_type") == "gpt2":
        return *gpt2.to_params(dict(_tensors(folder)), config, str(folder)), ""
    known = {huggingface_name(variable): variable for variable in (*variable_shapes(config), *FINE_TUNED_NAMES)}
    variables, ignored, stored = {}, [], {}
    for name, tensor in _tensors(folder):
        plain = (
            WRAPPERS.sub("", name)
            .replace("LayerNorm.gamma", "LayerNorm.weight")
            .replace("LayerNorm.beta", "LayerNorm.bias")
        )
        variable = known.get(plain) or known.get(f"bert.{plain}")
        if variable in variables:
            raise UserError(f"{folder}: {name} occurs twice, under two names")
        if variable and tensor.dtype.kind in "iub":
            raise UserError(f"{folder}: {name} is of type {tensor.dtype}; quantized weights are not supported")
        if variable:
            tensor = tensor.astype(np.float32)
            variables[variable] = tensor.T if is_transposed(variable) else tensor
        elif plain.startswith("cls.predictions.decoder."):
            stored[plain.removeprefix("cls.predictions.decoder.")] = tensor.astype(np.float32)
        elif not plain.endswith("embeddings.position_ids"):  # a constant: 0, 1, 2, ...
            ignored.append(name)
    if "bias" in stored:
        variables.setdefault("cls/predictions/output_bias", stored["bias"])
        if not np.array_equal(stored["bias"], variables["cls/predictions/output_bias"]):
            raise UserError(
                f"{folder}: cls.predictions.decoder.bias differs from cls.predictions.bias; BERT has one bias"
            )
    wordless = ""
    if "weight" in stored and WORDS in variables and not np.array_equal(stored["weight"], variables[WORDS]):
        wordless = (
            f"{folder}: cls.predictions.decoder.weight is not tied to the word embeddings, which is not supported"
        )
        left_out = [name for name in variables if name.startswith("cls/predictions/")]
        ignored += ["cls.predictions.decoder.weight", *map(huggingface_name, left_out)]
        variables = {name: x for name, x in variables.items() if name not in left_out}
    check_variables(variables, config, str(folder))
    return to_params(variables, config), ignored, wordless


def _tensors(folder: epath.Path) -> Iterator[tuple[str, np.ndarray]]:
    import safetensors

    for path in _weight_files(folder):
        try:
            with _local(path) as local, safetensors.safe_open(local, framework="np") as file:
                for name in file.keys():
                    yield name, file.get_tensor(name)
        except (safetensors.SafetensorError, OSError) as error:
            raise UserError(f"{path}: damaged or truncated ({error}); copy it again") from None


@contextlib.contextmanager
def _local(path: epath.Path) -> Iterator[epath.Path]:
    """Yields a local copy of a remote file, or the file itself: safetensors cannot read object stores."""
    if "://" not in str(path):
        yield path
        return
    with tempfile.TemporaryDirectory() as folder:
        yield path.copy(epath.Path(folder) / path.name)


def _weight_files(folder: epath.Path) -> list[epath.Path]:
    index = folder / INDEX
    if (folder / WEIGHTS).exists():
        return [folder / WEIGHTS]
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
    pickles = [p.name for p in folder.iterdir() if p.name.endswith((".bin", ".pt", ".pth"))]
    if pickles:
        raise UserError(
            f"{folder / pickles[0]}: a pickle, which can run arbitrary code when opened; bertjax opens none. "
            f"If you trust it, load it with transformers and call save_pretrained(), which writes {WEIGHTS}"
        )
    raise UserError(f"{folder}: no {WEIGHTS} and no {INDEX}")


HEADS = tuple(sorted({part for parts in ARCHITECTURES.values() for part in parts}))
FINE_TUNED_HEADS = ("output_", "cls/squad/")


def choose_architecture(variables: dict, stated: str = "") -> str:
    """Chooses the transformers class for these variables: that of a fine-tuned head, or the one that keeps the most.

    `stated`: the architecture that the checkpoint states. It decides between classes with the same fine-tuned head, but
    not otherwise: bert-base-uncased states `BertForMaskedLM` although it has all weights of `BertForPreTraining`.
    """
    present = {part for part in HEADS if any(name.startswith(part) for name in variables)}
    if present & set(ARCHITECTURES.get(stated, ())) & set(FINE_TUNED_HEADS):
        return stated
    fitting = [name for name, parts in ARCHITECTURES.items() if present >= set(parts)]
    kept = {
        name: (bool(set(FINE_TUNED_HEADS) & set(ARCHITECTURES[name])), len(ARCHITECTURES[name])) for name in fitting
    }
    return max(fitting, key=kept.get, default="BertModel")  # the first one in a tie


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
) -> list[str]:
    """Writes a folder for transformers' `architecture.from_pretrained(folder)`; "" means `choose_architecture`.

    `labels`: names of a classifier's rows. Returns the names of variables that the class does not have; they are left
    out. Raises `UserError` if the class has parts that the params lack.
    """
    import safetensors.numpy

    folder = epath.Path(folder)
    variables = to_variables(params, config)
    architecture = architecture or choose_architecture(variables)
    wanted = ARCHITECTURES[architecture]
    for part in wanted if architecture != "BertModel" else ():  # transformers accepts it without a pooler
        if not any(name.startswith(part) for name in variables):
            fitting = choose_architecture(variables)
            raise UserError(
                f"--architecture={architecture}: it has {part.rstrip('/_')}, which the checkpoint lacks; use {fitting}"
            )
    rows = len(variables["output_bias"]) if "output_" in wanted else 0
    if architecture == "BertForMultipleChoice" and rows != 1:
        raise UserError(f"--architecture={architecture}: one score per choice, but this classifier has {rows} labels")
    if rows:
        check_labels(labels, rows)
    definition = tokenizer.to_huggingface() if tokenizer is not None else ""  # before anything is written
    tensors, left_out = {}, []
    for variable, array in variables.items():
        if variable.startswith(HEADS) and not variable.startswith(wanted):
            left_out.append(variable)
        else:
            name = huggingface_name(variable)
            name = name.removeprefix("bert.") if architecture == "BertModel" else name
            tensors[name] = np.ascontiguousarray(array.T if is_transposed(variable) else array)
    write_whole(folder / WEIGHTS, safetensors.numpy.save(tensors, metadata={"format": "pt"}))
    fields = _config_json(config, architecture, tokenizer)
    if "output_" in wanted:
        names = labels or [f"LABEL_{i}" for i in range(rows)]
        fields["id2label"] = {str(i): name for i, name in enumerate(names)}
        fields["label2id"] = {name: i for i, name in enumerate(names)}
    if architecture == "BertForSequenceClassification" and rows == 1:
        fields["problem_type"] = "regression"  # or a pipeline takes the number for a logit
    write_whole(folder / CONFIG, json.dumps(fields, indent=2) + "\n")
    if tokenizer is not None:
        tokenizer.save(folder)
        write_whole(folder / "tokenizer.json", definition)
        write_whole(folder / "tokenizer_config.json", _tokenizer_config(config, tokenizer))
    return left_out


def _config_json(config: BertConfig, architecture: str, tokenizer: Tokenizer | None) -> dict:
    """Returns the content of config.json: what transformers needs to use the model, and to go on training it."""
    return {
        "architectures": [architecture],
        "model_type": "bert",
        **{name: getattr(config, name) for name in config.__dataclass_fields__ if name not in OWN_FIELDS},
        # The padding piece: transformers does not train its embedding.
        "pad_token_id": tokenizer.pad_id if tokenizer is not None else 0,
        "position_embedding_type": "absolute",
        "tie_word_embeddings": True,
        "dtype": "float32",
    }


def _tokenizer_config(config: BertConfig, tokenizer: Tokenizer) -> str:
    """Returns the tokenizer_config.json with which `AutoTokenizer` reads the tokenizer.json beside it."""
    names = ("pad", "unk", "cls", "sep", "mask")
    special = {f"{name}_token": tokenizer.pieces[getattr(tokenizer, f"{name}_id")] for name in names}
    is_wordpiece = tokenizer.kind == "wordpiece"
    settings = {
        "tokenizer_class": "BertTokenizer" if is_wordpiece else "PreTrainedTokenizerFast",
        "model_max_length": config.max_position_embeddings,
        "model_input_names": ["input_ids", "token_type_ids", "attention_mask"],
        **special,
    }
    if is_wordpiece:
        settings |= {"do_lower_case": tokenizer.lowercase, "strip_accents": None, "tokenize_chinese_chars": True}
    return json.dumps(settings, indent=2) + "\n"
