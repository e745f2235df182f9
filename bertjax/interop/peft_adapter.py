"""Reads adapters of PEFT (LoRA): `adapter_config.json` and `adapter_model.safetensors`, which change a base model.

The tensors of the adapter have the names of transformers. They are added to the tensors of the base before the family
of the base reads them.
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
# The fields of `CONFIG` that are read, and fields without effect on predictions: fields of training, parts of an
# unsupported field, and fields that repeat the names of the tensors.
READ = ("peft_type", "base_model_name_or_path", "revision", "task_type", "auto_mapping", "r", "lora_alpha",
        "use_rslora", "rank_pattern", "alpha_pattern", "init_lora_weights", "ensure_weight_tying")  # fmt: skip
UNUSED_FIELDS = (
    "peft_version", "inference_mode", "lora_dropout", "target_modules", "exclude_modules", "modules_to_save", "bias",
    "lora_bias", "fan_in_fan_out", "layers_to_transform", "layers_pattern", "megatron_core", "loftq_config",
    "eva_config", "corda_config", "lora_ga_config", "qalora_group_size", "runtime_config",
)  # fmt: skip
# Values of init_lora_weights that do not change the base. Other values subtract the initial A and B from its weights.
PLAIN_STARTS = (True, False, None, "gaussian", "eva", "orthogonal")
# {task_type: the class of BERT with the same head}. PEFT writes auto_mapping instead of other tasks.
TASKS = {
    "SEQ_CLS": "BertForSequenceClassification",
    "TOKEN_CLS": "BertForTokenClassification",
    "QUESTION_ANS": "BertForQuestionAnswering",
    "FEATURE_EXTRACTION": "BertModel",
}
# {suffix of a class of BERT: its params without the encoder}.
HEADS = {
    "ForSequenceClassification": "classifier",
    "ForTokenClassification": "classifier",
    "ForMultipleChoice": "classifier",
    "ForQuestionAnswering": "spans",
}
CLASSIFIERS = ("classifier", "logits_proj")
# Modules that predict words, or replaced words, in all families. The classes of `HEADS` do not have these modules.
WORD_MODULES = ("cls", "lm_head", "lm_loss", "lm_predictions", "decoder", "vocab_transform", "vocab_layer_norm",
                "vocab_projector", "generator_predictions", "generator_lm_head",
                "discriminator_predictions")  # fmt: skip
DECODERS = re.compile(
    r"(cls\.predictions\.|lm_head\.|head\.)?decoder|lm_head|lm_loss|vocab_projector|generator_lm_head"
)
WORDS = re.compile(r"(.*\.)?(word_embeddings|word_embedding|tok_embeddings|embed_tokens|wte)\.weight")
INPUTS_FIRST = re.compile(r".*\.(c_attn|c_proj|c_fc)")  # layers of GPT-2 whose weight is `[inputs, outputs]`
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
    """Returns the value of the first key that matches the name of a module, as `get_pattern_key` of PEFT."""
    return next((x for key, x in (pattern or {}).items() if re.match(rf"(.*\.)?({key})$", module)), default)


def is_adapter_folder(path: epath.Path) -> bool:
    """Returns whether a folder contains an adapter."""
    return (path / CONFIG).is_file()


def adapters_in(folder: epath.Path) -> list[str]:
    """Returns the names of the adapters in the subfolders of a folder, such as the adapters of Jina Embeddings v3."""
    try:
        return sorted(path.name for path in folder.iterdir() if is_adapter_folder(path)) if folder.is_dir() else []
    except OSError:  # a folder that the user may not list
        return []


def read_adapter_fields(folder: epath.Path) -> Fields:
    """Reads the config of an adapter. Raises `UserError` for an adapter that is not supported."""
    path = folder / CONFIG
    content: dict[str, Any] = read_json(path)
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
        raise UserError(f"{path}: damaged, or not in the expected format ({error}); copy it again") from None
    return fields


def read_tensors(folder: epath.Path) -> dict[str, np.ndarray]:
    """Returns {name of a tensor in transformers: tensor} of an adapter. Raises `UserError` if the file is missing.

    The names of modules that PEFT wraps contain `base_layer` or `modules_to_save`. `original_module` is a copy.
    """
    path = next((folder / name for name in (WEIGHTS, PICKLE) if (folder / name).exists()), None)
    if path is None:
        raise UserError(f"{folder}: an adapter without weights: no {WEIGHTS} and no {PICKLE}; copy the file too")
    tensors = {}
    for name, tensor in huggingface.tensors_in(path):
        plain = WRAPPER_PREFIXES.sub("", name).removeprefix(PREFIX)
        if ".original_module." not in plain:
            tensors[re.sub(r"\.(base_layer|modules_to_save(\.default)?)\.", ".", plain)] = tensor
    return tensors


def class_of(fields: Fields, base: Mapping[str, Any]) -> str:
    """Returns the class of transformers of an adapter, or a class of the same family with the same head.

    Args:
      fields: the config of the adapter.
      base: the config.json of the base.
    """
    if stated := (fields.auto_mapping or {}).get("base_model_class"):
        return stated
    if bert_class := TASKS.get(fields.task_type or ""):
        architectures = _layout_of(base).architectures
        return next((name for name in architectures if huggingface.head_of(name, base) == bert_class), bert_class)
    return next(iter(base.get("architectures") or ()), "")


def _layout_of(config: Mapping[str, Any]) -> HuggingFaceFormat:
    return families.by_model_type()[config.get("model_type", "bert")].huggingface


def config_fields(fields: Fields, base: Mapping[str, Any], tensors: Mapping[str, np.ndarray]) -> dict[str, Any]:
    """Returns the config.json of a base with the class and the vocabulary size of an adapter."""
    rows = next((len(x) for name, x in tensors.items() if WORDS.fullmatch(name)), None)
    size = {} if rows is None else {"vocab_size": rows}
    return {**base, "architectures": [class_of(fields, base)], **size}


def merge_adapter(
    folder: epath.Path,
    fields: Fields,
    base: Mapping[str, np.ndarray],
    adapter: Mapping[str, np.ndarray],
    config: Mapping[str, Any],
) -> tuple[dict[str, np.ndarray], set[str]]:
    """Adds the updates of an adapter to its base.

    Args:
      folder: the folder of the adapter, for messages.
      fields: the config of the adapter.
      base: the tensors of the base.
      adapter: the tensors of the adapter.
      config: the config.json that `config_fields` returns.

    Returns:
      The tensors of the base with the adapter, and the names of the tensors that the adapter replaces.

    Raises:
      UserError: a tensor of the adapter fits no tensor of the base.
    """
    tensors = _with_prefix(_without_word_modules(base, config), adapter)
    prefixes = {name.partition(".")[0] for name in tensors}

    def of_base(name: str) -> str | None:
        """Returns the name of a tensor in the base; an adapter of the encoder alone has no prefix."""
        return next((full for full in (name, *(f"{prefix}.{name}" for prefix in prefixes)) if full in tensors), None)

    factors: dict[tuple[str, str], dict[str, np.ndarray]] = {}
    replacements: dict[str, np.ndarray] = {}
    for name, tensor in adapter.items():
        if not (lora := LORA.fullmatch(name)):
            replacements[of_base(name) or name] = tensor
        elif not (fields.ensure_weight_tying and DECODERS.fullmatch(lora[1])):  # a copy of the word embeddings' update
            module, embedding, factor, suffix = lora.groups()
            factors.setdefault((module, embedding or ""), {})[factor + (suffix or "").removeprefix(".weight")] = tensor
    tensors = _replaced(tensors, replacements)
    if fields.ensure_weight_tying:  # copies of the word embeddings without the update
        tensors = {name: x for name, x in tensors.items() if not is_decoder(name) or name.endswith(".bias")}
    for (module, embedding), parts in factors.items():
        if (weight := of_base(f"{module}.weight")) is None:
            raise UserError(f"{folder}: {module}.lora_{embedding}A {_misfit(module)}")
        inputs_first = bool(embedding) or (config.get("model_type") == "gpt2" and bool(INPUTS_FIRST.fullmatch(module)))
        update = _update(folder, fields, module, embedding, parts, tensors[weight].shape, inputs_first)
        tensors[weight] = tensors[weight].astype(np.float32) + update
        if "B.bias" in parts:
            bias = of_base(f"{module}.bias")
            if bias is None or tensors[bias].shape != parts["B.bias"].shape:
                raise UserError(f"{folder}: {module}.lora_B.bias does not fit the base; {MERGE}")
            update = fields.scale(module, len(parts["A"])) * parts["B.bias"].astype(np.float32)
            tensors[bias] = tensors[bias].astype(np.float32) + update
    return tensors, set(replacements)


def _without_word_modules(base: Mapping[str, np.ndarray], config: Mapping[str, Any]) -> dict[str, np.ndarray]:
    """Returns the tensors of a base under current names, without word modules if the class does not have them."""
    tensors, keeps_all, layout = {}, class_suffix_of(config) not in (*HEADS, "Model"), _layout_of(config)
    for name, tensor in base.items():
        plain = WRAPPER_PREFIXES.sub("", name).replace("LayerNorm.gamma", "LayerNorm.weight")
        plain = plain.replace("LayerNorm.beta", "LayerNorm.bias")
        if keeps_all or plain.partition(".")[0] not in (*WORD_MODULES, *layout.word_modules):
            tensors[layout.name_in_class(plain)] = tensor
    return tensors


def _with_prefix(tensors: dict[str, np.ndarray], adapter: Iterable[str]) -> dict[str, np.ndarray]:
    """Adds the prefix of the tensors of an adapter to the tensors of a base without a head."""
    for name in adapter:
        prefix, _, rest = name.partition(".")
        plain = LORA.sub(r"\1.weight", rest)
        if plain in tensors and f"{prefix}.{plain}" not in tensors:
            return {f"{prefix}.{name}": tensor for name, tensor in tensors.items()}
    return tensors


def _replaced(tensors: dict[str, np.ndarray], replacements: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    """Replaces tensors of a base. A classifier of the adapter replaces all layers of the classifier of the base."""
    is_classifier = any(name.startswith(CLASSIFIERS) and name.endswith(".weight") for name in replacements)
    modules = set(CLASSIFIERS) if is_classifier else set()
    if "classifier.dense.weight" in replacements:  # the pooler of bertjax
        modules.add("pooler")
    biases = {name.replace(".decoder.bias", ".bias") for name in replacements}  # the same bias under two names
    kept = {name: x for name, x in tensors.items() if not modules & set(name.split(".")) and name not in biases}
    return kept | replacements


def _misfit(module: str) -> str:
    """Returns the end of the message about a module that the base does not have."""
    if DECODERS.fullmatch(module):
        return (
            "is not supported, because it changes the language-model head, which is tied to the word embeddings; "
            "train the adapter on other modules"
        )
    remedy = f"set base_model_name_or_path in {CONFIG} to the model that the adapter was trained on"
    return f"fits no layer of the base; {remedy}"


def _update(
    folder: epath.Path,
    fields: Fields,
    module: str,
    embedding: str,
    parts: Mapping[str, np.ndarray],
    shape: tuple[int, ...],
    inputs_first: bool,
) -> np.ndarray:
    """Returns the update of a weight. Raises `UserError` unless A and B have the shapes of the weight."""
    rank = int(_of_pattern(fields.rank_pattern, module, fields.r))
    inputs_outputs = tuple(shape if inputs_first else reversed(shape))
    expected = {"A": (rank, inputs_outputs[0]), "B": (inputs_outputs[-1], rank)}
    for factor, size in expected.items():
        if factor not in parts or parts[factor].shape != size:
            has = f"has shape {parts[factor].shape}" if factor in parts else "is missing"
            raise UserError(
                f"{folder}: {module}.lora_{embedding}{factor} {has}, expected {size} for the base and r = {rank}; set "
                f"base_model_name_or_path to the model that the adapter was trained on"
            )
    a, b = (parts[factor].astype(np.float32) for factor in "AB")
    update = fields.scale(module, rank) * (b @ a)
    return update.T if inputs_first else update


def class_suffix_of(config: Mapping[str, Any]) -> str:
    """Returns the suffix of the class of a config.json, such as ForMaskedLM, or of BERT's class with the same head."""
    name = next(iter(config.get("architectures") or ()), "")
    return huggingface.head_of(name, config).removeprefix(huggingface.BERT)


def is_decoder(name: str) -> bool:
    """Returns whether a tensor belongs to the head for words."""
    return bool(DECODERS.fullmatch(name.rpartition(".")[0]))


def adapts_words_alone(fields: Fields, adapter: Iterable[str]) -> bool:
    """Returns whether an adapter changes the word embeddings, but not the head that is tied to them."""
    names = [re.sub(r"\.lora_embedding_[AB]$", ".weight", name) for name in adapter]
    decodes = any(map(is_decoder, adapter))
    return not fields.ensure_weight_tying and not decodes and any(map(WORDS.fullmatch, names))


def finished(folder: epath.Path, config: Mapping[str, Any], params: dict) -> dict:
    """Returns the params of the class of an adapter. Raises `UserError` if neither file contains its head."""
    kind = class_suffix_of(config)
    if kind not in (*HEADS, "Model"):
        return params
    parts = {*params, *(("pooler",) if "pooler" in params["bert"] else ())}
    head = HEADS.get(kind)
    has_pooler = any("pooler" in names for name, names in _layout_of(config).architectures.items() if kind in name)
    needed = [head, *(["pooler"] if has_pooler else [])] if head else []
    if missing := ", ".join(part for part in needed if part not in parts):
        raise UserError(
            f"{folder}: neither the adapter nor its base has the {missing} of {config['architectures'][0]}, which "
            f"transformers initializes at random; train the adapter with modules_to_save for this module"
        )
    return {name: x for name, x in params.items() if name in ("bert", head)}
