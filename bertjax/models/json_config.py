"""Builds model configs from JSON files that other libraries write, and checks the fields of these files."""

import dataclasses
import re
from collections.abc import Collection, Mapping
from types import MappingProxyType
from typing import Any, TypeVar, cast

import ml_collections
from etils import epath

from bertjax.common.errors import UserError
from bertjax.common.files import note
from bertjax.models import families
from bertjax.models.library_fields import tables
from bertjax.models.validate import validate_model

T = TypeVar("T")
# {name of an activation in transformers: name in bertjax}
ACTIVATIONS = {"gelu": "gelu", "gelu_new": "gelu_new", "gelu_pytorch_tanh": "gelu_new", "relu": "relu"}

# {field of transformers' config.json: the only supported value}, for all families.
SUPPORTED_VALUES: dict[str, Any] = {
    "auto_map": None,  # Python code that replaces the architecture
    "configuration_files": None,  # names of files that replace config.json
    "is_encoder_decoder": False,
    "per_layer_config": None,
    "pruned_heads": {},
    "quantization_config": None,
    "tie_last_hidden_states": None,
    "transformers_weights": None,  # the name of a file that replaces the weights
}
# Fields of transformers' config.json that do not affect predictions in any family.
UNUSED_FIELDS = frozenset({
    # `interop.huggingface` and `interop.hf_tokenizer` read these fields. Tensors determine the number of labels.
    "architectures", "id2label", "label2id", "model_type", "num_labels", "problem_type", "tokenizer_class",
    # Names and versions.
    "_commit_hash", "_name_or_path", "model_name", "name_or_path", "transformers_version",
    # The implementation of a layer in transformers, and the dtype.
    "_attn_implementation", "_experts_implementation", "attn_implementation", "chunk_size_feed_forward",
    "distributed_config", "dtype", "experts_implementation", "fusion_config", "gradient_checkpointing", "torch_dtype",
    "use_cache",
    # The outputs that a class of transformers returns in addition to predictions.
    "function_to_apply", "output_attentions", "output_hidden_states", "return_dict",
    # Initial values, and dropout in training.
    "classifier_dropout", "hidden_dropout", "init_std", "initializer_factor", "initializer_range",
    "summary_first_dropout", "summary_last_dropout",
    # Ids of special tokens, which are read from the tokenizer. Padding is masked.
    "bos_token_id", "cls_token_id", "eos_token_id", "mask_token_id", "pad_token_id", "sep_token_id",
    # The reader compares the tensor of the decoder with the word embeddings instead.
    "tie_word_embeddings",
    # Generation. bertjax has command-line flags for generation.
    "assistant_confidence_threshold", "assistant_lookbehind", "bad_words_ids", "begin_suppress_tokens",
    "diversity_penalty", "do_sample", "early_stopping", "encoder_no_repeat_ngram_size", "encoder_repetition_penalty",
    "epsilon_cutoff", "eta_cutoff", "exponential_decay_length_penalty", "forced_bos_token_id", "forced_eos_token_id",
    "length_penalty", "max_length", "min_length", "no_repeat_ngram_size", "num_assistant_tokens",
    "num_assistant_tokens_schedule", "num_beam_groups", "num_beams", "num_return_sequences", "output_scores", "prefix",
    "remove_invalid_values", "repetition_penalty", "return_dict_in_generate", "suppress_tokens", "target_lookbehind",
    "temperature", "top_k", "top_p", "typical_p",
    # Fields of published configs that older versions of transformers wrote, and that no version reads.
    "bos_token", "cross_attention_hidden_size", "decoder_start_token_id", "directionality", "eos_token",
    "finetuning_task", "layer_norm_eps", "mask_token", "model_max_length", "n_ctx", "output_past", "pad_token",
    "pooler_fc_size", "pooler_num_attention_heads", "pooler_num_fc_layers", "pooler_size_per_head", "pooler_type",
    "position_embedding_type", "reference_compile", "repad_logits_with_grad", "task_specific_params",
    "tf_legacy_loss", "tie_encoder_decoder", "tie_weights_", "torchscript", "use_bfloat16",
    "_num_labels", "xla_device",
    # Fields that the CrossEncoder of sentence-transformers writes.
    "sbert_ce_default_activation_function", "sentence_transformers",
})  # fmt: skip
# Fields of other model types, and properties of the base class of configs. transformers ignores such a field unless the
# family lists the field in `names`, `also` or `only`. A note lists ignored fields.
FIELDS_OF_OTHER_TYPES = frozenset({
    "allow_global_per_layer_attribute_access", "attention_chunk_size", "attention_dropout", "chain_hidden_post_norm",
    "embedding_size", "is_causal", "layer_types", "logits_mup_width_multiplier", "mtp_hidden_states_first",
    "partial_rotary_factor", "rope_scaling", "rope_theta", "serialize_explicit_per_layer_config", "sliding_window",
    "token_classification_bias", "unpadded_vocab_size",
})  # fmt: skip


def build(
    path: epath.Path,
    config_class: type[T],
    fields: Mapping[str, Any],
    required: Collection[str],
    absent: Collection[str],
    names: Mapping[str, str] = MappingProxyType({}),
) -> T:
    """Builds a model config and validates it.

    Args:
      path: the file, for messages.
      config_class: the class of the config.
      fields: {name in bertjax: value}. Names that are not fields of the class are ignored.
      required: fields that the file must contain.
      absent: fields of the class that the file does not contain.
      names: {name in bertjax: name in the file} where the two differ, for messages.

    Raises:
      UserError: if a field is missing or has an invalid value.
    """
    known = {field.name: field for field in dataclasses.fields(cast(Any, config_class)) if field.name not in absent}
    for name in required:
        if name not in fields:
            raise UserError(f"{path}: {names.get(name, name)} is missing, but required; add the field")
    values = {}
    for name, field in known.items():
        kind, value = cast(type, field.type), fields.get(name, field.default)
        if type(value) not in ((int, float) if kind is float else (kind,)):
            raise UserError(f"{path}: {names.get(name, name)} is {value!r}; expected {kind.__name__}")
        if name in fields:
            values[name] = kind(value)
    config: Any = config_class(**values)
    run_config = ml_collections.ConfigDict(dict(model=dataclasses.asdict(config), stages={}, adapt=dict(model=False)))
    try:
        validate_model(run_config)
        families.family_of(config).validate(run_config)
    except UserError as error:
        message = re.sub(r"(?:config\.)?model\.(\w+)", lambda field: names.get(field[1], field[1]), str(error))
        raise UserError(f"{path}: {message}") from None
    return config


def read_fields(
    path: epath.Path,
    fields: Mapping[str, Any],
    kind: str,
    names: Mapping[str, str],
    only: Mapping[str, Any],
    *,
    required: Collection[str] = (),
    also: Collection[str] = (),
) -> dict[str, Any]:
    """Returns fields of transformers' config.json under the names of bertjax, and checks all fields of the file.

    A missing optional field gets the default of transformers.

    Args:
      path: the file, for messages.
      fields: the content of the file.
      kind: the `model_type`.
      names: {name in bertjax: name in the file} of the fields that are returned.
      only: {name in the file: the only supported value}.
      required: names in bertjax of the fields without a default.
      also: names in the file of other fields that the family reads, or that do not affect its predictions.

    Raises:
      UserError: if transformers reads a field that bertjax does not support, and the value is not the default.
    """
    require(path, fields, SUPPORTED_VALUES | dict(only))
    read = {*names.values(), *also, *only, *SUPPORTED_VALUES, *UNUSED_FIELDS}
    tables.check_fields(path, fields, "transformers", kind, read | FIELDS_OF_OTHER_TYPES)
    if ignored := sorted(name for name in FIELDS_OF_OTHER_TYPES - read if fields.get(name) is not None):
        note(path, f"ignored fields, which transformers does not read in a {kind} either: {', '.join(ignored)}")
    defaults = tables.defaults_of("transformers", kind)
    optional = {ours: defaults[name] for ours, name in names.items() if name in defaults and ours not in required}
    return optional | {ours: fields[name] for ours, name in names.items() if name in fields}


def field_names(
    config_class: type, absent: Collection[str], names: Mapping[str, str] = MappingProxyType({})
) -> dict[str, str]:
    """Returns {name in bertjax: name in config.json} of the fields of a config class.

    Args:
      config_class: the class of the config.
      absent: fields that config.json does not contain; they are omitted.
      names: {name in bertjax: name in config.json} where the two differ.
    """
    fields = (field.name for field in dataclasses.fields(config_class))
    return {name: names.get(name, name) for name in fields if name not in absent}


def require(path: epath.Path, fields: Mapping, expected: Mapping) -> None:
    """Checks fields with one supported value.

    Args:
      path: the file, for messages.
      fields: the content of the file.
      expected: {field: the only supported value}.

    Raises:
      UserError: if a field has another value.
    """
    for name, value in expected.items():
        if fields.get(name, value) != value:
            raise UserError(f"{path}: {name} {fields[name]!r} is not supported; supported: {value!r}")


def with_aliases(path: epath.Path, fields: Mapping[str, Any], aliases: Mapping[str, str]) -> dict[str, Any]:
    """Returns fields of config.json with aliases replaced by the names of the fields, such as dim for hidden_size.

    Args:
      path: the file, for messages.
      fields: the content of the file.
      aliases: {alias: the name of the field}.

    Raises:
      UserError: if a field and its alias have different values.
    """
    result = {name: value for name, value in fields.items() if name not in aliases}
    for alias, name in aliases.items():
        if alias in fields and result.setdefault(name, fields[alias]) != fields[alias]:
            raise UserError(
                f"{path}: {alias} is {fields[alias]!r}; expected {result[name]!r}, the value of {name}; delete {alias}"
            )
    return result


def head_size(fields: Mapping[str, Any]) -> int | None:
    """Returns hidden_size / num_attention_heads; None if one of the two is missing or not an integer."""
    hidden, heads = fields.get("hidden_size"), fields.get("num_attention_heads")
    return hidden // heads if type(hidden) is int and type(heads) is int and heads > 0 else None


def rope_theta(path: epath.Path, name: str, rope: Any) -> Any:
    """Returns the base of the rotary frequencies from a JSON object of config.json; None without a base.

    Args:
      path: the file, for messages.
      name: the name of the field with the object, for messages: rope_scaling, or a field of rope_parameters.
      rope: the object, or None.

    Raises:
      UserError: if the object has a type of scaling that is not supported.
    """
    if rope is None:
        return None
    if not isinstance(rope, dict):
        raise UserError(f"{path}: {name} {rope!r} must be a JSON object")
    supported = {"rope_type": "default", "type": "default", "partial_rotary_factor": 1.0, "rope_theta": ...}
    for field, value in rope.items():
        if field not in supported:
            raise UserError(f"{path}: {name}.{field} {value!r} is not supported; supported: {', '.join(supported)}")
        if field != "rope_theta" and value != supported[field]:
            raise UserError(f"{path}: {name}.{field} {value!r} is not supported; supported: {supported[field]!r}")
    return rope.get("rope_theta")


def activation(path: epath.Path, fields: Mapping, name: str) -> str:
    """Returns the name in bertjax of an activation in config.json.

    Args:
      path: the file, for messages.
      fields: the content of the file.
      name: the field.

    Raises:
      UserError: for an activation that bertjax does not have.
    """
    value = fields.get(name, "gelu")
    if not isinstance(value, str) or value not in ACTIVATIONS:
        raise UserError(f"{path}: {name} {value!r} is not supported; supported: {', '.join(ACTIVATIONS)}")
    return ACTIVATIONS[value]
