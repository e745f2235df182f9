"""Configs: default configs, model configs, stages, lists in fields, limits of fields, and experiment files."""

from bertjax.common.errors import UserError
from bertjax.config.defaults import (
    fine_tuning_config,
    named_stages,
    param_group,
    param_groups,
    pretraining_config,
    stage,
)
from bertjax.config.model_config import BertConfig, Compute, ModelConfig, field, model_size, size

__all__ = [
    "BertConfig", "Compute", "ModelConfig", "UserError", "field", "fine_tuning_config", "model_size", "named_stages",
    "param_group", "param_groups", "pretraining_config", "size", "stage",
]  # fmt: skip
