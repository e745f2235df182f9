"""Builds model configs from JSON files that other libraries write, and checks the fields of these files."""

import dataclasses
import re
from collections.abc import Collection, Mapping
from typing import Any, Generic, TypeVar, cast

import ml_collections
from etils import epath

from bertjax.common.errors import UserError
from bertjax.common.files import note
from bertjax.models import families, quantization
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
    # `check_tied` reads tie_word_embeddings, and the reader compares the decoder with the word embeddings.
    # `quantization` reads quantization_config.
    "quantization_config", "tie_word_embeddings",
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


@dataclasses.dataclass(frozen=True)
class ConfigFields(Generic[T]):
    """The fields of a family in transformers' config.json.

    Attributes:
      config_class: the class of the model config.
      kind: the `model_type`.
      required: fields of the class that config.json must contain.
      absent: fields of the class that config.json does not contain.
      names: {name in bertjax: name in config.json} where the two differ.
      only: {name in config.json: the only supported value}.
      also: names in config.json of other fields that the family reads, or that do not affect its predictions.
      activations: {name of an activation in transformers: name in bertjax}.
    """

    config_class: type[T]
    kind: str
    required: Collection[str]
    absent: Collection[str]
    names: Mapping[str, str] = dataclasses.field(default_factory=dict)
    only: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    also: Collection[str] = ()
    activations: Mapping[str, str] = dataclasses.field(default_factory=lambda: ACTIVATIONS)

    @property
    def _fields(self) -> dict[str, dataclasses.Field]:
        """{name in bertjax: field of the class} of the fields that config.json contains."""
        fields = dataclasses.fields(cast(Any, self.config_class))
        return {field.name: field for field in fields if field.name not in self.absent}

    def read(self, path: epath.Path, fields: Mapping[str, Any], **changes: Any) -> dict[str, Any]:
        """Returns the fields under the names of bertjax, and checks all fields of the file.

        A missing optional field gets the default of transformers.

        Args:
          path: the file, for messages.
          fields: the content of the file.
          **changes: attributes with other values for this file, such as `only`.

        Raises:
          UserError: if transformers reads a field that bertjax does not support, and the value is not the default.
        """
        if changes:
            return dataclasses.replace(self, **changes).read(path, fields)
        names = {name: self.names.get(name, name) for name in self._fields}
        quantization.check_config(path, fields)
        check_tied(path, fields)
        require_supported(path, fields, SUPPORTED_VALUES | dict(self.only))
        read = {*names.values(), *self.also, *self.only, *SUPPORTED_VALUES, *UNUSED_FIELDS}
        tables.check_fields(path, fields, "transformers", self.kind, read | FIELDS_OF_OTHER_TYPES)
        if ignored := sorted(name for name in FIELDS_OF_OTHER_TYPES - read if fields.get(name) is not None):
            kind = f"which transformers does not read in a {self.kind} either"
            note(path, f"ignored fields, {kind}: {', '.join(ignored)}")
        defaults = tables.defaults_of("transformers", self.kind)
        values = {
            ours: defaults[name] for ours, name in names.items() if name in defaults and ours not in self.required
        } | {ours: fields[name] for ours, name in names.items() if name in fields}
        if "hidden_act" in values:
            values["hidden_act"] = _activation(path, names["hidden_act"], values["hidden_act"], self.activations)
        return values

    def build(self, path: epath.Path, values: Mapping[str, Any]) -> T:
        """Builds a model config and validates it.

        Args:
          path: the file, for messages.
          values: {name in bertjax: value}, also of fields in `absent`. Names that are not fields of the class are
            ignored.

        Raises:
          UserError: if a field is missing or has an invalid value.
        """
        for name in self.required:
            if name not in values:
                raise UserError(f"{path}: {self.names.get(name, name)} is missing, but required; add the field")
        converted = {}
        for field in dataclasses.fields(cast(Any, self.config_class)):
            if (name := field.name) not in values:
                continue
            kind, value = cast(type, field.type), values[name]
            if type(value) not in ((int, float) if kind is float else (kind,)):
                raise UserError(f"{path}: {self.names.get(name, name)} is {value!r}; expected {kind.__name__}")
            converted[name] = kind(value)
        config: Any = self.config_class(**converted)
        model = dataclasses.asdict(config)
        run_config = ml_collections.ConfigDict(dict(model=model, stages={}, adapt=dict(model=False)))
        try:
            validate_model(run_config)
            families.family_of(config).validate(run_config)
        except UserError as error:
            message = re.sub(r"(?:config\.)?model\.(\w+)", lambda x: self.names.get(x[1], x[1]), str(error))
            raise UserError(f"{path}: {message}") from None
        return config

    def to_fields(self, config: Any) -> dict[str, Any]:
        """Returns the fields of config.json for a model config, `model_type` first."""
        values = {self.names.get(name, name): x for name, x in vars(config).items() if name not in self.absent}
        return {"model_type": self.kind, **values}


def require_supported(path: epath.Path, fields: Mapping, expected: Mapping) -> None:
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


def check_tied(path: epath.Path, fields: Mapping[str, Any]) -> None:
    """Raises `UserError` unless tie_word_embeddings is true, false or absent."""
    if not isinstance(value := fields.get("tie_word_embeddings", True), bool):
        raise UserError(f"{path}: tie_word_embeddings is {value!r}; expected true or false; correct the value")


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


def without_code(fields: Mapping[str, Any], prefix: str) -> dict[str, Any]:
    """Returns the fields without auto_map, if auto_map refers to the published code, which bertjax reproduces.

    Args:
      fields: the content of a config.json.
      prefix: the first letters of all classes in the published code.
    """
    code = fields.get("auto_map")
    is_published = isinstance(code, dict) and all(
        str(name).rpartition(".")[2].startswith(prefix) for name in code.values()
    )
    return {name: value for name, value in fields.items() if name != "auto_map" or not is_published}


def layer_types(path: epath.Path, fields: Mapping[str, Any]) -> list[str] | None:
    """Returns layer_types, the types of all layers: full_attention or sliding_attention; None without the field.

    Args:
      path: the file, for messages.
      fields: the content of the file.

    Raises:
      UserError: if a type is unknown, or the number of types is not the number of layers.
    """
    types, layers = fields.get("layer_types"), fields.get("num_hidden_layers")
    if types is None or not isinstance(layers, int):
        return None
    if not isinstance(types, list) or set(map(str, types)) - {"full_attention", "sliding_attention"}:
        raise UserError(f"{path}: layer_types {types!r} must be a list of full_attention and sliding_attention")
    if len(types) != layers:
        raise UserError(f"{path}: layer_types has {len(types)} entries; expected num_hidden_layers = {layers}")
    return types


def head_size(fields: Mapping[str, Any]) -> int | None:
    """Returns hidden_size / num_attention_heads; None if one of the two is missing or not an integer."""
    hidden, heads = fields.get("hidden_size"), fields.get("num_attention_heads")
    return hidden // heads if type(hidden) is int and type(heads) is int and heads > 0 else None


def _activation(path: epath.Path, name: str, value: Any, activations: Mapping[str, str]) -> str:
    """Returns the name in bertjax of an activation.

    Args:
      path: the file, for messages.
      name: the field, for messages.
      value: the value of the field.
      activations: {name in transformers: name in bertjax}.

    Raises:
      UserError: for an activation that bertjax does not have.
    """
    if not isinstance(value, str) or value not in activations:
        raise UserError(f"{path}: {name} {value!r} is not supported; supported: {', '.join(activations)}")
    return activations[value]
