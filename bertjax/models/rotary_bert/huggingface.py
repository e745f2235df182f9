"""The base class of the Hugging Face formats of NomicBERT, GTE and Jina Embeddings v3."""

import re
from collections.abc import Collection, Iterable, Iterator, Mapping
from typing import Any, ClassVar

import numpy as np
from etils import epath

from bertjax.common.errors import UserError
from bertjax.models import json_config, rope, tensors
from bertjax.models.rotary_bert.config import RotaryBertConfig
from bertjax.models.tensors import TensorTable

REQUIRED = ("vocab_size", "hidden_size", "num_hidden_layers", "num_attention_heads", "intermediate_size")
ROPE = ("rope_theta", "rope_scaling")  # the object rope_parameters of config.json
FIELDS = json_config.ConfigFields(
    RotaryBertConfig,
    "",
    REQUIRED,
    ("family",),
    also=("head_dim", *rope.READ),
    activations=json_config.ACTIVATIONS | {"silu": "silu"},
)


class RotaryBertFormat(tensors.TableFormat):
    """Folders with the names of the modules in transformers, or with the names of the published code.

    `save_pretrained` of transformers writes the names of the published code, unless `save_original_format` is False.

    Attributes:
      fields: the fields of config.json.
      published: {pattern in the tensor names of the published code: the names of the modules in transformers}. A tensor
        with several names is split into equal parts.
      biases: whether the attention and the output of the feed-forward network have biases.
      inner_layers: the dense layers of the inner states of the feed-forward network, which one param stacks.
      inner_bias: whether these layers have biases.
      output_layer: the dense layer of the output of the feed-forward network.
      transform: the beginning of the names of the dense layer and the norm in the head for words.
    """

    fields: ClassVar[json_config.ConfigFields]
    published: ClassVar[Mapping[str, tuple[str, ...]]]
    biases: ClassVar[tuple[bool, bool]] = (True, True)
    inner_layers: ClassVar[tuple[str, ...]] = ("gate_proj", "up_proj")
    inner_bias: ClassVar[bool] = False
    output_layer: ClassVar[str] = "down_proj"
    transform: ClassVar[str] = "lm_head."
    decoder = "lm_head.decoder.weight"
    inputs: tuple[str, ...] = ("input_ids", "attention_mask")
    special_ids: ClassVar[Mapping[str, str]] = {"pad_token_id": "pad", "bos_token_id": "cls", "eos_token_id": "sep"}

    def read_config(self, path: epath.Path, fields: Mapping[str, Any]) -> RotaryBertConfig:
        """Returns the model config of a config.json, see `HuggingFaceFormat.read_config`."""
        values = self.fields.read(path, json_config.without_code(fields, next(iter(self.classes))))
        if fields.get("head_dim") not in (None, size := json_config.head_size(fields)):
            raise UserError(f"{path}: head_dim {fields['head_dim']!r} is not supported; supported: {size!r}")
        theta, scaling = rope.read_rope(path, fields)
        theta = self.fields.config_class.rope_theta if theta is None else theta
        return self.fields.build(path, values | {"rope_theta": theta, "rope_scaling": scaling})

    def to_fields(self, config: RotaryBertConfig) -> dict[str, Any]:
        """Returns the fields of config.json, see `HuggingFaceFormat.to_fields`."""
        fields = {name: value for name, value in self.fields.to_fields(config).items() if name not in ROPE}
        return fields | {"rope_parameters": rope.rope_fields(config.rope_theta, config.rope_scaling)}

    def current_tensors(self, named: Iterable[tuple[str, np.ndarray]]) -> Iterator[tuple[str, np.ndarray]]:
        """Yields tensors under the names of the modules in transformers, see `HuggingFaceFormat.current_tensors`."""
        for name, tensor in named:
            parts = [tensors.WRAPPER_PREFIXES.sub("", name)]
            for pattern, names in self.published.items():
                if re.search(pattern, parts[0]):
                    parts = [re.sub(pattern, replacement, part) for part in parts for replacement in names]
            is_whole = len(parts) == 1 or not tensor.shape or len(tensor) % len(parts)
            yield from [(parts[0], tensor)] if is_whole else zip(parts, np.split(tensor, len(parts)), strict=True)

    def read_params(
        self, named: Iterable[tuple[str, np.ndarray]], fields: Mapping[str, Any], config: Any, source: str
    ) -> tuple[dict, list[str], str]:
        """Converts tensors to params, see `HuggingFaceFormat.read_params`."""
        state_dict = {name: x for name, x in self.current_tensors(named) if not name.endswith("inv_freq")}
        bias, copy = self.part_tensors["masked_lm"][0], self.decoder.replace(".weight", ".bias")
        if copy in state_dict and not np.array_equal(state_dict.setdefault(bias, state_dict[copy]), state_dict[copy]):
            raise UserError(f"{source}: {copy} differs from {bias}; expected equal tensors, because they are tied")
        params, ignored, problem = super().read_params(state_dict.items(), fields, config, source)
        return params, [name for name in ignored if name != copy], problem

    def untied_reason(
        self, state_dict: Mapping[str, np.ndarray], fields: Mapping[str, Any], config: Any, source: str
    ) -> str:
        """Returns the reason why the masked-LM head is not supported, see `TableFormat.untied_reason`."""
        bias, copy = self.part_tensors["masked_lm"][0], self.decoder.replace(".weight", ".bias")
        words, second_bias = state_dict[self.words], copy if copy != bias else ""
        return tensors.untied_reason(state_dict, self.decoder, words, fields, source, second_bias)

    def table(self, config: RotaryBertConfig, parts: Collection[str], labels: int) -> TensorTable:
        """Returns the tensors of a model, see `TableFormat.table`."""
        hidden, heads = config.hidden_size, (config.num_attention_heads, config.head_size)
        size, inner, table = (hidden,), (config.intermediate_size,), TensorTable()
        attention_bias, output_bias = self.biases
        table.array(("bert", "embeddings", "word", "embedding"), self.words, config.vocab_size, hidden)
        if types := config.type_vocab_size:
            name = f"{self._prefix}embeddings.token_type_embeddings.weight"
            table.array(("bert", "embeddings", "token_type", "embedding"), name, types, hidden)
        table.norm(("bert", "embeddings", "norm"), f"{self._prefix}embeddings.LayerNorm", hidden, bias=True)
        for number in range(config.num_hidden_layers):
            path, name = ("bert", "layers", number), f"{self._prefix}layers.{number}"
            projections = tuple(f"{name}.self_attn.{part}_proj" for part in "qkv")
            table.dense((*path, "attention", "query_key_value"), projections, size, heads, attention_bias)
            table.dense((*path, "attention", "output"), f"{name}.self_attn.o_proj", heads, size, attention_bias)
            table.norm((*path, "attention_norm"), f"{name}.post_attention_layernorm", hidden, bias=True)
            layers = tuple(f"{name}.mlp.{layer}" for layer in self.inner_layers)
            table.dense((*path, "input"), layers, size, inner, self.inner_bias)
            table.dense((*path, "output"), f"{name}.mlp.{self.output_layer}", inner, size, output_bias)
            table.norm((*path, "output_norm"), f"{name}.post_mlp_layernorm", hidden, bias=True)
        if "masked_lm" in parts:
            table.dense(("masked_lm", "dense"), f"{self.transform}dense", size, size, bias=True)
            table.norm(("masked_lm", "norm"), f"{self.transform}layer_norm", hidden, bias=True)
            table.array(("masked_lm", "bias"), self.part_tensors["masked_lm"][0], config.vocab_size)
        pooler, classifier = self.pooled_names(parts)
        if "pooler" in parts:
            table.dense(("bert", "pooler", "dense"), pooler, size, size, bias=True)
        if "classifier" in parts:
            table.dense(("classifier", "dense"), classifier, size, (labels,), bias=True)
        if "spans" in parts:
            table.dense(("spans", "dense"), "qa_outputs", size, (2,), bias=True)
        return table

    def pooled_names(self, parts: Collection[str]) -> tuple[str, str]:
        """Returns the names of the pooler and of the classifier in a class with some parts."""
        return f"{self._prefix}pooler.dense", "classifier"


def classes_of(prefix: str) -> dict[str, tuple[str, ...]]:
    """Returns the classes that all families have, see `HuggingFaceFormat.architectures`.

    Args:
      prefix: the beginning of the names.
    """
    return {
        f"{prefix}Model": (),
        f"{prefix}ForMaskedLM": ("masked_lm",),
        f"{prefix}ForSequenceClassification": ("pooler", "classifier"),
        f"{prefix}ForTokenClassification": ("classifier",),
    }
