"""Adapters of PEFT (LoRA): `adapter_config.json` and `adapter_model.safetensors`, which change a base model.

`write` writes the low-rank updates of a run and its output layers, under the names of `to_tensors`. The updates are
factorized anew, since one matrix of PyTorch may contain several kernels. A and B change, but their product is the
same. `peft.PeftModel.from_pretrained(model, folder)` adds the adapter to a model of transformers.

`read_tensors` and `merged` read an adapter of any family: tensors under transformers' names are added to the tensors
of the base, before the family reads them.
"""

import json
import re
from collections.abc import Iterable, Mapping
from typing import Any, TypedDict

import msgspec
import numpy as np
from etils import epath

from bertjax.common.errors import UserError
from bertjax.common.files import parse_json, read_json
from bertjax.interop import huggingface
from bertjax.models import families
from bertjax.models.huggingface_format import HuggingFaceFormat
from bertjax.models.library_fields.tables import check_fields
from bertjax.models.tensors import WRAPPER_PREFIXES

CONFIG, WEIGHTS, PICKLE = "adapter_config.json", "adapter_model.safetensors", "adapter_model.bin"
PREFIX = "base_model.model."
MERGE = "with PEFT, merge the adapter: model.merge_and_unload().save_pretrained(FOLDER), and use FOLDER"
# The fields of `CONFIG` that are read, and fields that change no prediction: fields of training, fields that belong to
# a refused field, and fields that the names of the tensors repeat.
READ = ("peft_type", "base_model_name_or_path", "revision", "task_type", "auto_mapping", "r", "lora_alpha",
        "use_rslora", "rank_pattern", "alpha_pattern", "init_lora_weights", "ensure_weight_tying")  # fmt: skip
UNUSED_FIELDS = (
    "peft_version", "inference_mode", "lora_dropout", "target_modules", "exclude_modules", "modules_to_save", "bias",
    "lora_bias", "fan_in_fan_out", "layers_to_transform", "layers_pattern", "megatron_core", "loftq_config",
    "eva_config", "corda_config", "lora_ga_config", "qalora_group_size", "runtime_config",
)  # fmt: skip
# Values of init_lora_weights that leave the base as it is: others subtract the first A and B from its weights.
PLAIN_STARTS = (True, False, None, "gaussian", "eva", "orthogonal")
# task_type -> BERT's class with the same output layer. PEFT writes auto_mapping in place of other tasks.
TASKS = {
    "SEQ_CLS": "BertForSequenceClassification",
    "TOKEN_CLS": "BertForTokenClassification",
    "QUESTION_ANS": "BertForQuestionAnswering",
    "FEATURE_EXTRACTION": "BertModel",
}
# Our params of each class of BERT besides the encoder.
HEADS = {
    "ForSequenceClassification": "classifier",
    "ForTokenClassification": "classifier",
    "ForMultipleChoice": "classifier",
    "ForQuestionAnswering": "spans",
}
CLASSIFIERS = ("classifier", "logits_proj")
# Modules that predict words, or replaced words, in all families: a class of `HEADS` does not have them.
WORD_MODULES = ("cls", "lm_head", "lm_loss", "decoder", "vocab_transform", "vocab_layer_norm", "vocab_projector",
                "generator_predictions", "generator_lm_head", "discriminator_predictions")  # fmt: skip
DECODERS = re.compile(r"(cls\.predictions\.|lm_head\.)?decoder|lm_head|lm_loss|vocab_projector|generator_lm_head")
WORDS = re.compile(r"(.*\.)?(word_embeddings|word_embedding|tok_embeddings|embed_tokens|wte)\.weight")
TURNED = re.compile(r".*\.(c_attn|c_proj|c_fc)")  # layers of GPT-2 whose matrix has the inputs first
LORA = re.compile(r"(.*)\.lora_(embedding_)?([AB])(\.weight|\.bias)?")


class _Mapping(TypedDict, total=False):
    base_model_class: str


class Fields(msgspec.Struct):
    """The fields of `CONFIG` that are read."""

    base_model_name_or_path: str | None = None
    revision: str | None = None
    task_type: str | None = None
    auto_mapping: _Mapping | None = None
    r: int = 8
    lora_alpha: float = 8
    use_rslora: bool = False
    rank_pattern: dict[str, int] | None = None
    alpha_pattern: dict[str, float] | None = None
    ensure_weight_tying: bool = False

    def scale(self, module: str, rank: int) -> float:
        """Returns the factor of B A in a module."""
        alpha = _of_pattern(self.alpha_pattern, module, self.lora_alpha)
        return alpha / (rank**0.5 if self.use_rslora else rank)


def _of_pattern(pattern: Mapping[str, float] | None, module: str, default: float) -> float:
    """Returns the value of the first key that fits the name of a module, as PEFT's `get_pattern_key`."""
    return next((x for key, x in (pattern or {}).items() if re.match(rf"(.*\.)?({key})$", module)), default)


def is_folder(path: epath.Path) -> bool:
    return (path / CONFIG).is_file()


def read_fields(folder: epath.Path) -> Fields:
    """Reads the config of an adapter. Raises `UserError` for an adapter that is not supported."""
    path = folder / CONFIG
    content = read_json(path)
    if (kind := content.get("peft_type")) != "LORA":
        raise UserError(f"{path}: peft_type {kind!r} is not supported; supported: 'LORA'; {MERGE}")
    check_fields(path, content, "peft", "lora", (*READ, *UNUSED_FIELDS), MERGE)
    if (start := content.get("init_lora_weights", True)) not in PLAIN_STARTS:
        raise UserError(
            f"{path}: init_lora_weights {start!r} is not supported, since it changes the base; supported: "
            f"{', '.join(map(repr, PLAIN_STARTS))}; {MERGE}"
        )
    try:
        fields = parse_json(json.dumps({name: x for name, x in content.items() if x is not None}), Fields)
        for key in (*(fields.rank_pattern or ()), *(fields.alpha_pattern or ())):
            re.compile(key)
    except (ValueError, re.error) as error:
        raise UserError(f"{path}: damaged, or not what belongs there ({error}); copy it again") from None
    if not fields.base_model_name_or_path:
        raise UserError(
            f"{path}: an adapter without a base: base_model_name_or_path is {fields.base_model_name_or_path!r}; set it "
            f"to the folder of the base, or to its name on the hub"
        )
    return fields


def read_tensors(folder: epath.Path) -> dict[str, np.ndarray]:
    """Returns the tensors of an adapter under the names of transformers' modules. Raises `UserError` if there are none.

    Modules that PEFT wraps have `base_layer` or `modules_to_save` in their names, and a copy as `original_module`.
    """
    path = next((folder / name for name in (WEIGHTS, PICKLE) if (folder / name).exists()), None)
    if path is None:
        raise UserError(f"{folder}: an adapter without weights: no {WEIGHTS} and no {PICKLE}; copy the file too")
    found = {}
    for name, tensor in huggingface.tensors_in(path):
        plain = WRAPPER_PREFIXES.sub("", name).removeprefix(PREFIX)
        if ".original_module." not in plain:
            found[re.sub(r"\.(base_layer|modules_to_save(\.default)?)\.", ".", plain)] = tensor
    return found


def class_of(fields: Fields, base: Mapping[str, Any]) -> str:
    """Returns the class of transformers that an adapter is for, or a class of the same family with its output layer.

    Args:
      base: the config.json of the base.
    """
    if stated := (fields.auto_mapping or {}).get("base_model_class"):
        return stated
    if berts := TASKS.get(fields.task_type or ""):
        layout = families.by_model_type()[base.get("model_type", "bert")].huggingface
        return next((name for name in layout.architectures if huggingface.head_of(name, base) == berts), berts)
    return next(iter(base.get("architectures") or ()), "")


def config_fields(fields: Fields, base: Mapping[str, Any], tensors: Mapping[str, np.ndarray]) -> dict[str, Any]:
    """Returns the config.json of a base with an adapter: with the adapter's class, and with its vocabulary size."""
    rows = next((len(x) for name, x in tensors.items() if WORDS.fullmatch(name)), None)
    size = {} if rows is None else {"vocab_size": rows}
    return {**base, "architectures": [class_of(fields, base)], **size}


def merged(
    folder: epath.Path,
    fields: Fields,
    base: Iterable[tuple[str, np.ndarray]],
    adapter: dict[str, np.ndarray],
    config: Mapping[str, Any],
) -> tuple[dict[str, np.ndarray], set[str]]:
    """Returns the tensors of a base with an adapter, and the names of those that the adapter has as a whole.

    Args:
      base: the tensors of the base.
      config: the config.json that `config_fields` returns.

    Raises `UserError` for a tensor of the adapter that fits no tensor of the base.
    """
    kind, named = kind_of(config), {}
    for name, tensor in base:
        plain = WRAPPER_PREFIXES.sub("", name).replace("LayerNorm.gamma", "LayerNorm.weight")
        plain = plain.replace("LayerNorm.beta", "LayerNorm.bias")
        if kind not in (*HEADS, "Model") or plain.partition(".")[0] not in WORD_MODULES:
            named[plain] = tensor
    # A base that is the encoder alone has no prefix. Its tensors get the prefix that the adapter has.
    halves = ((name.partition(".")[0], LORA.sub(r"\1.weight", name.partition(".")[2])) for name in adapter)
    if prefix := next((first for first, rest in halves if rest in named and f"{first}.{rest}" not in named), ""):
        named = {f"{prefix}.{name}": tensor for name, tensor in named.items()}
    above = {name.partition(".")[0] for name in named}

    def of_base(name: str) -> str | None:
        """Returns the name of a tensor in the base; an adapter of the encoder alone has no prefix."""
        names = (name, *(f"{first}.{name}" for first in above))
        return next((each for each in names if each in named), None)

    updates, whole = {}, {}
    for name, tensor in adapter.items():
        found = LORA.fullmatch(name)
        if found and fields.ensure_weight_tying and DECODERS.fullmatch(found[1]):
            continue  # the update of the word embeddings
        if found:
            module, of_rows, which, end = found.groups()
            updates.setdefault((module, of_rows or ""), {})[which + (end or "").removeprefix(".weight")] = tensor
        else:
            whole[of_base(name) or name] = tensor
    # The adapter's classifier may have other layers than the base's. The layer classifier.dense is our pooler.
    has_own = any(name.startswith(CLASSIFIERS) and name.endswith(".weight") for name in whole)
    replaced = set(CLASSIFIERS) if has_own else set()
    replaced |= {"pooler"} if "classifier.dense.weight" in whole else set()
    biases = {name.replace(".decoder.bias", ".bias") for name in whole}  # two names of one bias
    named = {name: x for name, x in named.items() if not replaced & set(name.split(".")) and name not in biases} | whole
    if fields.ensure_weight_tying:  # copies of the word embeddings, which have no update
        named = {name: x for name, x in named.items() if not is_decoder(name) or name.endswith(".bias")}
    for (module, of_rows), parts in updates.items():
        weight = of_base(f"{module}.weight")
        if weight is None and DECODERS.fullmatch(module):
            raise UserError(
                f"{folder}: {module}.lora_{of_rows}A changes the output layer for words, which is tied to the word "
                f"embeddings here; that is not supported; train the adapter on other modules"
            )
        if weight is None:
            raise UserError(
                f"{folder}: {module}.lora_{of_rows}A fits no layer of the base; set base_model_name_or_path in "
                f"{CONFIG} to the model that the adapter was trained on"
            )
        turned = bool(of_rows) or (config.get("model_type") == "gpt2" and bool(TURNED.fullmatch(module)))
        update = _update(folder, fields, module, of_rows, parts, named[weight].shape, turned)
        named[weight] = named[weight].astype(np.float32) + update
        if "B.bias" in parts:
            bias = of_base(f"{module}.bias")
            if bias is None or named[bias].shape != parts["B.bias"].shape:
                raise UserError(f"{folder}: {module}.lora_B.bias fits no bias of the base; {MERGE}")
            update = fields.scale(module, len(parts["A"])) * parts["B.bias"].astype(np.float32)
            named[bias] = named[bias].astype(np.float32) + update
    return named, set(whole)


def _update(
    folder: epath.Path, fields: Fields, module: str, of_rows: str, parts: Mapping, shape: tuple[int, ...], turned: bool
) -> np.ndarray:
    """Returns the update of a weight. Raises `UserError` unless its A and B have the shapes of the weight."""
    given, rank = [parts.get(which) for which in "AB"], int(_of_pattern(fields.rank_pattern, module, fields.r))
    inputs_outputs = tuple(shape if turned else reversed(shape))
    expected = [(rank, inputs_outputs[0]), (inputs_outputs[-1], rank)]
    for which, tensor, size in zip("AB", given, expected):
        has = "is missing" if tensor is None else f"has shape {tensor.shape}"
        if tensor is None or tensor.shape != size:
            raise UserError(
                f"{folder}: {module}.lora_{of_rows}{which} {has}, but the base and r = {rank} make it {size}; is "
                f"it the model that the adapter was trained on?"
            )
    a, b = (tensor.astype(np.float32) for tensor in given)
    update = fields.scale(module, rank) * (b @ a)
    return update.T if turned else update


def kind_of(config: Mapping[str, Any]) -> str:
    """Returns how the class of a config.json ends, or BERT's class with the same output layer: ForMaskedLM, ..."""
    name = next(iter(config.get("architectures") or ()), "")
    return huggingface.head_of(name, config).removeprefix(huggingface.OURS)


def is_decoder(name: str) -> bool:
    """Whether a tensor is of the output layer for words."""
    return bool(DECODERS.fullmatch(name.rpartition(".")[0]))


def adapts_words_alone(fields: Fields, adapter: Mapping[str, np.ndarray]) -> bool:
    """Whether an adapter changes the word embeddings, but not the output layer for words, which is tied to them."""
    changes = (re.sub(r"\.lora_embedding_[AB]$", ".weight", name) for name in adapter)
    decodes = any(map(is_decoder, adapter))
    return not fields.ensure_weight_tying and not decodes and any(map(WORDS.fullmatch, changes))


def finished(folder: epath.Path, config: Mapping[str, Any], params: dict) -> dict:
    """Returns the params that the class of an adapter has. Raises `UserError` if its output layer is in no file."""
    kind = kind_of(config)
    if kind not in (*HEADS, "Model"):
        return params
    head = HEADS.get(kind)
    layout = families.by_model_type()[config.get("model_type", "bert")].huggingface
    parts = {*params, *(("pooler",) if "pooler" in params["bert"] else ())}
    needed = [head, *(["pooler"] if _is_pooled(layout, kind) else [])] if head else []
    if lacking := ", ".join(part for part in needed if part not in parts):
        raise UserError(
            f"{folder}: neither the adapter nor its base has the {lacking} of {config['architectures'][0]}, so that "
            f"transformers draws it at random; train the adapter with modules_to_save that name it"
        )
    return {name: x for name, x in params.items() if name in ("bert", head)}


def _is_pooled(layout: HuggingFaceFormat, kind: str) -> bool:
    """Returns whether the classes of a kind have a pooler."""
    return any("pooler" in parts for name, parts in layout.architectures.items() if kind in name)
