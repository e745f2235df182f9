"""The config fields that a stage of pre-training may change."""

from ml_collections import ConfigDict

from bertjax.config.model_config import fields_with_roles
from bertjax.models import families

TOP_LEVEL_FIELDS = ("batch_size", "microbatches", "objective")
DATA_FIELDS = ("masked_lm_prob", "masked_lm_split", "mixture")
OPTIMIZER_FIELDS = (
    "learning_rate", "schedule", "warmup_steps", "warmup_tokens", "decay_proportion", "decay", "decay_to",
)  # fmt: skip
FIXED_MODEL_FIELDS = ("max_position_embeddings", "memory_length", "classifier_dropout")


def changeable_fields(config: ConfigDict) -> list[str]:
    """Returns the fields that a stage may change. These fields affect neither the shapes of params nor the records."""
    model_configs = families.possible_config_classes(config)
    dropout = [
        name for model_config in model_configs for name in fields_with_roles(model_config, "") if "dropout" in name
    ]
    behaviour = [
        name for model_config in model_configs for name in fields_with_roles(model_config, "behaviour", "choice")
    ]
    model_fields = dict.fromkeys(name for name in [*behaviour, *dropout] if name not in FIXED_MODEL_FIELDS)
    sections = {"data": DATA_FIELDS, "optimizer": OPTIMIZER_FIELDS, "model": model_fields}
    return [*TOP_LEVEL_FIELDS, *(f"{section}.{name}" for section, names in sections.items() for name in names)]
