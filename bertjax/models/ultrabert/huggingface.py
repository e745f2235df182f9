"""UltraBERT in Hugging Face's folders: fields of config.json, names of tensors, classes of transformers."""

from collections.abc import Collection, Mapping
from typing import Any, ClassVar

from etils import epath

from bertjax.common.errors import UserError
from bertjax.models import json_config, rope, tensors
from bertjax.models.eurobert import huggingface as eurobert
from bertjax.models.ultrabert.config import UltraBertConfig

REQUIRED = ("vocab_size", "hidden_size", "num_hidden_layers", "num_attention_heads", "intermediate_size")
SUPPORTED_VALUES = eurobert.SUPPORTED_VALUES | {"rope_scaling": None}
KINDS = {"full": "full_attention", "sliding": "sliding_attention"}  # of layers, as in config.json
ROPES = tuple(f"{kind}_rope_{name}" for kind in KINDS for name in ("theta", "scaling"))
# Other fields that `read_config` reads. Old folders have attention_windows, and rope_theta of each layer.
READ = ("attention_windows", "layer_types", "rope_parameters", "rope_theta")
FIELDS = json_config.ConfigFields(
    UltraBertConfig,
    "ultrabert",
    REQUIRED,
    ("family", "layer_types", *ROPES),
    {f"{name}_rope_theta": f"rope_parameters.{kind}.rope_theta" for name, kind in KINDS.items()},
    only=SUPPORTED_VALUES,
    also=READ,
)


class UltraBertFormat(eurobert.EuroBertLayersFormat):
    """Folders of UltraBERT. The names of tensors in the encoder are the names of EuroBERT."""

    classes: ClassVar = {"Ultrabert": "UltraBERT"}
    special_ids: ClassVar = {"pad_token_id": "pad", "bos_token_id": "cls", "eos_token_id": "sep"}
    architectures: ClassVar = {
        "UltrabertModel": (),
        "UltrabertForMaskedLM": ("masked_lm",),
        "UltrabertForSequenceClassification": ("classifier",),
        "UltrabertForTokenClassification": ("classifier",),
        "UltrabertForQuestionAnswering": ("spans",),
    }
    module_names: ClassVar = {"ultrabert": "model", "cls": "head.decoder"}
    word_modules: ClassVar = ("head",)
    model_name = "an UltraBERT"
    decoder = "head.decoder.weight"
    part_tensors: ClassVar = {
        "masked_lm": ("head.linear1.weight",),
        "classifier": ("classifier.weight",),
        "spans": ("qa_outputs.weight",),
    }

    def read_config(self, path: epath.Path, fields: Mapping[str, Any]) -> UltraBertConfig:
        """Returns the model config of a config.json, see `HuggingFaceFormat.read_config`."""
        values = eurobert.with_head_sizes(FIELDS.read(path, fields), fields)
        windows, types = _of_layers(path, fields, "attention_windows"), json_config.layer_types(path, fields)
        if windows is not None:
            values["sliding_window"] = _only(path, "attention_windows", windows) or values["sliding_window"]
            types = types or [KINDS["sliding" if window else "full"] for window in windows]
        if types:
            is_period = (n for n in range(1, len(types) + 1) if types == (types[:n] * len(types))[: len(types)])
            values["layer_types"] = ",".join(kind.partition("_")[0] for kind in types[: next(is_period)])
        types_of_layers = FIELDS.build(path, values).types
        return FIELDS.build(path, values | _ropes(path, fields, types_of_layers))

    def to_fields(self, config: UltraBertConfig) -> dict[str, Any]:
        """Returns the fields of config.json."""
        types, ropes = [KINDS[kind] for kind in config.types], rope.rope_fields_of_kinds(config, KINDS)
        supported = eurobert.SUPPORTED_VALUES
        return FIELDS.to_fields(config) | supported | {"layer_types": types, "rope_parameters": ropes}

    def table(self, config: UltraBertConfig, parts: Collection[str], labels: int) -> tensors.TensorTable:
        """Returns the tensors of a model, see `TableFormat.table`."""
        hidden, inner = (config.hidden_size,), (config.prediction_head_size,)
        table = self.encoder_table(config)
        if "masked_lm" in parts:
            table.dense(("masked_lm", "dense"), "head.linear1", hidden, inner)
            table.dense(("masked_lm", "second_dense"), "head.linear2", inner, hidden)
            if not config.tie_word_embeddings:
                table.array(("masked_lm", "decoder", "embedding"), self.decoder, config.vocab_size, *hidden)
        for part, name, outputs in (("classifier", "classifier", labels), ("spans", "qa_outputs", 2)):
            if part in parts:
                table.dense((part, "dense"), name, hidden, (outputs,), bias=True)
        return table


def _of_layers(path: epath.Path, fields: Mapping[str, Any], name: str) -> list[float] | None:
    """Returns a field with a number of each layer; None without the field. Raises `UserError` for another value."""
    values, layers = fields.get(name), fields.get("num_hidden_layers")
    if values is None:
        return None
    if not isinstance(values, list) or len(values) != layers or {*map(type, values)} - {int, float, type(None)}:
        raise UserError(f"{path}: {name} {values!r} must be a list of num_hidden_layers = {layers} numbers")
    return [value or 0 for value in values]


def _only(path: epath.Path, name: str, values: Collection[float]) -> Any:
    """Returns the only number above 0 in some values, or 0. Raises `UserError` if there are several numbers."""
    numbers = sorted({*values} - {0})
    if len(numbers) > 1:
        raise UserError(f"{path}: {name} has the values {numbers} in layers of one type; expected one value for a type")
    return numbers[0] if numbers else 0


def _ropes(path: epath.Path, fields: Mapping[str, Any], types: list[str]) -> dict[str, Any]:
    """Returns the bases and the scalings of the rotary frequencies of both layer types.

    Args:
      path: the file, for messages.
      fields: the content of the file.
      types: the type of each layer, "full" or "sliding".
    """
    by_kind = fields.get("rope_parameters")
    if by_kind is None:
        thetas = _of_layers(path, fields, "rope_theta")
        if thetas is None:
            return {}
        of_types = {name: [x for x, kind in zip(thetas, types, strict=True) if kind == name] for name in {*types}}
        by_kind = {KINDS[name]: {"rope_theta": _only(path, "rope_theta", of_types[name])} for name in of_types}
    by_kind = dict.fromkeys(KINDS[name] for name in types) | rope.objects_of_kinds(path, by_kind, KINDS)
    values: dict[str, Any] = {}
    for name, kind in KINDS.items():
        if kind in by_kind:
            theta, scaling = rope.read_rope(path, {**fields, "rope_parameters": by_kind, "rope_theta": None}, kind)
            values |= {f"{name}_rope_theta": theta, f"{name}_rope_scaling": scaling}
    return values


FORMAT = UltraBertFormat()
