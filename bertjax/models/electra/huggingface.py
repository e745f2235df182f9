"""ELECTRA in Hugging Face's folders. Tensors of the encoder have the names of BERT with another prefix."""

from collections.abc import Iterable, Iterator, Mapping
from typing import Any, ClassVar

import numpy as np
from etils import epath

from bertjax.models import json_config
from bertjax.models.bert import huggingface as bert
from bertjax.models.bert import tf1_names
from bertjax.models.electra.config import ElectraConfig
from bertjax.models.tensors import WRAPPER_PREFIXES, TensorTable, check_class_parts, to_params, to_state_dict

REQUIRED = (*bert.REQUIRED, "embedding_size")
SUPPORTED_VALUES = bert.SUPPORTED_VALUES | {"hidden_act": "gelu"}
# {field: the only supported value} for the pooling of multiple choice. Other classes ignore these fields.
SUMMARY = {
    "summary_type": "first", "summary_use_proj": True, "summary_activation": "gelu", "summary_proj_to_labels": False,
}  # fmt: skip
FIELDS = json_config.ConfigFields(ElectraConfig, "electra", REQUIRED, bert.BERTJAX_FIELDS, also=SUMMARY)
DISCRIMINATOR = "ElectraForPreTraining"
# The head that detects replaced tokens: its name in params, and its tensor prefix in transformers.
REPLACED_TOKENS, DISCRIMINATOR_HEAD = "replaced_tokens", "discriminator_predictions"


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
        only = SUPPORTED_VALUES | (SUMMARY if is_multiple_choice else {})
        return FIELDS.build(path, FIELDS.read(path, fields, only=only))

    def to_fields(self, config: ElectraConfig) -> dict[str, Any]:
        """Returns the fields of config.json, see `HuggingFaceFormat.to_fields`."""
        return FIELDS.to_fields(config) | {"hidden_act": ElectraConfig.hidden_act}

    def read_params(
        self, tensors: Iterable[tuple[str, np.ndarray]], fields: Mapping[str, Any], config: ElectraConfig, source: str
    ) -> tuple[dict, list[str], str]:
        """Converts tensors to params, with the head of a discriminator, see `HuggingFaceFormat.read_params`."""
        head: dict[str, np.ndarray] = {}
        table = _head_table(config.hidden_size)
        other_tensors = _without_head(tensors, table.names(), head)
        params, ignored, masked_lm_problem = super().read_params(other_tensors, fields, config, source)
        if head:
            params = params | to_params(table, head, 0, source, "an ELECTRA")
        return params, ignored, masked_lm_problem

    def choose_architecture(self, params: dict, config: ElectraConfig, saved_class: str = "") -> str:
        """Returns the class for params: `ElectraForPreTraining` for a discriminator that is not fine-tuned."""
        chosen = super().choose_architecture(params, config, saved_class)
        is_fine_tuned = bool(set(self.class_parts[bert.class_suffix(chosen)]) & tf1_names.FINE_TUNED.keys())
        return DISCRIMINATOR if REPLACED_TOKENS in params and not is_fine_tuned else chosen

    def to_tensors(
        self, params: dict, config: ElectraConfig, architecture: str
    ) -> tuple[dict[str, np.ndarray], list[str]]:
        """Converts params to tensors, with the head of a discriminator, see `HuggingFaceFormat.to_tensors`."""
        state_dict, left_out = super().to_tensors(params, config, architecture)
        if architecture != DISCRIMINATOR:
            return state_dict, left_out
        present = [DISCRIMINATOR_HEAD] if REPLACED_TOKENS in params else []
        check_class_parts(architecture, [DISCRIMINATOR_HEAD], present, self.choose_architecture(params, config))
        state_dict |= to_state_dict(_head_table(config.hidden_size), params)
        return state_dict, [name for name in left_out if name != REPLACED_TOKENS]


def _head_table(hidden: int) -> TensorTable:
    """Returns the tensors of a discriminator's head."""
    table = TensorTable()
    table.dense((REPLACED_TOKENS, "dense"), f"{DISCRIMINATOR_HEAD}.dense", (hidden,), (hidden,), bias=True)
    table.dense((REPLACED_TOKENS, "output"), f"{DISCRIMINATOR_HEAD}.dense_prediction", (hidden,), (1,), bias=True)
    return table


def _without_head(
    tensors: Iterable[tuple[str, np.ndarray]], head_names: set[str], head: dict[str, np.ndarray]
) -> Iterator[tuple[str, np.ndarray]]:
    """Yields tensors, but moves the tensors with `head_names` to `head`."""
    for name, tensor in tensors:
        bare_name = WRAPPER_PREFIXES.sub("", name)
        if bare_name in head_names:
            head[bare_name] = tensor
        else:
            yield name, tensor


FORMAT = ElectraFormat()
