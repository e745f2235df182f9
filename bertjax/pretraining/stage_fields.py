"""The fields of a config that a stage of pre-training may change."""

import ml_collections

from bertjax.config.model_config import fields_of
from bertjax.models import families

SHARED = ("batch_size", "microbatches", "objective")
OF_DATA = ("masked_lm_prob", "masked_lm_split", "mixture")
OF_OPTIMIZER = (
    "learning_rate", "schedule", "warmup_steps", "warmup_tokens", "decay_proportion", "decay", "decay_to",
)  # fmt: skip


def changeable(config: ml_collections.ConfigDict) -> list[str]:
    """Returns the fields that a stage may change: those that decide neither params nor records."""
    models = families.possible_config_classes(config)
    dropout = [name for model in models for name in fields_of(model, "") if "dropout" in name]
    behaviour = [name for model in models for name in fields_of(model, "behaviour", "choice")]
    left_out = ("max_position_embeddings", "memory_length", "classifier_dropout")
    of_model = dict.fromkeys(name for name in [*behaviour, *dropout] if name not in left_out)
    sections = {"data": OF_DATA, "optimizer": OF_OPTIMIZER, "model": of_model}
    return [*SHARED, *(f"{section}.{name}" for section, names in sections.items() for name in names)]
