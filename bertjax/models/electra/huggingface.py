"""ELECTRA in Hugging Face's folders. Tensors of the encoder have the names of BERT with another prefix."""

from collections.abc import Iterable, Iterator, Mapping
from typing import Any, ClassVar

import numpy as np
from etils import epath

from bertjax.models import json_config, tensors
from bertjax.models.bert import huggingface as bert
from bertjax.models.electra.config import ElectraConfig

REQUIRED = (*bert.REQUIRED, "embedding_size")
SUPPORTED_VALUES = bert.SUPPORTED_VALUES | {"hidden_act": "gelu"}
# {field: the only supported value} for the pooling of multiple choice. Other classes ignore these fields.
SUMMARY = {
    "summary_type": "first", "summary_use_proj": True, "summary_activation": "gelu", "summary_proj_to_labels": False,
}  # fmt: skip
DISCRIMINATOR = "ElectraForPreTraining"
# The output layer that detects replaced tokens: its name in params, and its tensor prefix in transformers.
REPLACED_TOKENS, DISCRIMINATOR_HEAD = "replaced_tokens", "discriminator_predictions"
# {dense layer of the output layer: the prefix of its tensors}
LAYERS = {"dense": f"{DISCRIMINATOR_HEAD}.dense", "output": f"{DISCRIMINATOR_HEAD}.dense_prediction"}


class ElectraFormat(bert.BertLayersFormat):
    """Folders of generators and discriminators of ELECTRA."""

    classes: ClassVar = {"Electra": "ELECTRA"}
    inputs = ("input_ids", "token_type_ids", "attention_mask")
    class_parts: ClassVar = bert.CLASS_PARTS_WITHOUT_NSP | {"Model": (), "ForPreTraining": ()}
    replacements: ClassVar = {
        "cls.predictions.transform.": "generator_predictions.",
        "cls.predictions.decoder.weight": "generator_lm_head.weight",
        "cls.predictions.bias": "generator_lm_head.bias",
        "bert.": "electra.",
    }
    # The dense layer of a sequence classifier, or of multiple choice, is the pooler of bertjax.
    replacements_by_suffix: ClassVar = {
        "ForSequenceClassification": {"classifier.": "classifier.out_proj.", "bert.pooler.dense.": "classifier.dense."},
        "ForMultipleChoice": {"bert.pooler.dense.": "sequence_summary.summary."},
    }

    def read_config(self, path: epath.Path, fields: Mapping[str, Any]) -> ElectraConfig:
        """Returns the model config of a config.json, see `HuggingFaceFormat.read_config`."""
        is_multiple_choice = "ForMultipleChoice" in str(fields.get("architectures"))
        names = json_config.field_names(ElectraConfig, bert.BERTJAX_FIELDS)
        only = SUPPORTED_VALUES | (SUMMARY if is_multiple_choice else {})
        values = json_config.read_fields(path, fields, "electra", names, only, required=REQUIRED, also=SUMMARY)
        return json_config.build(path, ElectraConfig, values, REQUIRED, bert.BERTJAX_FIELDS)

    def to_fields(self, config: ElectraConfig) -> dict[str, Any]:
        """Returns the fields of config.json, see `HuggingFaceFormat.to_fields`."""
        fields = {name: value for name, value in vars(config).items() if name not in bert.BERTJAX_FIELDS}
        return {"model_type": "electra", **fields, "hidden_act": ElectraConfig.hidden_act}

    def read_params(
        self, tensors: Iterable[tuple[str, np.ndarray]], fields: Mapping[str, Any], config: ElectraConfig, source: str
    ) -> tuple[dict, list[str], str]:
        """Converts tensors to params, with the output layer of a discriminator, see `HuggingFaceFormat.read_params`."""
        head: dict[str, np.ndarray] = {}
        params, ignored, masked_lm_problem = super().read_params(_without_head(tensors, head), fields, config, source)
        if head:
            params = params | {REPLACED_TOKENS: _read_head(head, config, source)}
        return params, ignored, masked_lm_problem

    def choose_architecture(self, params: dict, config: ElectraConfig, saved_class: str = "") -> str:
        """Returns the class for params: `ElectraForPreTraining` for a discriminator that is not fine-tuned."""
        chosen = super().choose_architecture(params, config, saved_class)
        is_fine_tuned = bool(set(self.class_parts[bert.class_suffix(chosen)]) & bert.FINE_TUNED.keys())
        return DISCRIMINATOR if REPLACED_TOKENS in params and not is_fine_tuned else chosen

    def to_tensors(
        self, params: dict, config: ElectraConfig, architecture: str
    ) -> tuple[dict[str, np.ndarray], list[str]]:
        """Converts params to tensors, with the output layer of a discriminator, see `HuggingFaceFormat.to_tensors`."""
        state_dict, left_out = super().to_tensors(params, config, architecture)
        if architecture != DISCRIMINATOR:
            return state_dict, left_out
        present = [DISCRIMINATOR_HEAD] if REPLACED_TOKENS in params else []
        fitting = self.choose_architecture(params, config)
        tensors.check_parts(architecture, [DISCRIMINATOR_HEAD], present, fitting)
        for layer, name in LAYERS.items():
            arrays = params[REPLACED_TOKENS][layer]
            state_dict[f"{name}.weight"] = np.ascontiguousarray(np.asarray(arrays["kernel"]).T)
            state_dict[f"{name}.bias"] = np.asarray(arrays["bias"])
        return state_dict, [name for name in left_out if name != REPLACED_TOKENS]


def _without_head(
    state_dict: Iterable[tuple[str, np.ndarray]], head: dict[str, np.ndarray]
) -> Iterator[tuple[str, np.ndarray]]:
    """Yields tensors, but moves the tensors of a discriminator's output layer to `head`."""
    head_names = [f"{layer}.{part}" for layer in LAYERS.values() for part in ("weight", "bias")]
    for name, tensor in state_dict:
        bare_name = tensors.WRAPPER_PREFIXES.sub("", name)
        if bare_name in head_names:
            head[bare_name] = tensor
        else:
            yield name, tensor


def _read_head(head: Mapping[str, np.ndarray], config: ElectraConfig, source: str) -> dict:
    """Returns the params of a discriminator's output layer."""
    params, hidden = {}, config.hidden_size
    for (layer, name), size in zip(LAYERS.items(), (hidden, 1), strict=True):
        kernel = tensors.take(head, f"{name}.weight", (size, hidden), source, "an ELECTRA").T
        bias = tensors.take(head, f"{name}.bias", (size,), source, "an ELECTRA")
        params[layer] = {"kernel": kernel, "bias": bias}
    return params


FORMAT = ElectraFormat()
