"""Configs: defaults, stages, lists in fields, limits of fields, and experiment files."""

from bertjax.config.defaults import (
    BertConfig,
    Compute,
    Lora,
    ModelConfig,
    UserError,
    common_config,
    field,
    fine_tuning_config,
    model_size,
    named_stages,
    param_group,
    param_groups,
    pretraining_config,
    size,
    stage,
)

__all__ = [
    "BertConfig",
    "Compute",
    "Lora",
    "ModelConfig",
    "UserError",
    "common_config",
    "field",
    "fine_tuning_config",
    "model_size",
    "named_stages",
    "param_group",
    "param_groups",
    "pretraining_config",
    "size",
    "stage",
]
