"""Checks of `config.model`."""

import dataclasses

from bertjax.common.errors import UserError
from bertjax.config.limits import require, within
from bertjax.models import families


def validate_model(config) -> None:
    """Raises `UserError` if `config.model` describes no model."""
    known_fields = dataclasses.fields(families.FAMILIES.get(config.model.family).config_class)
    known, given = {field.name for field in known_fields}, set(config.model)
    if families.adopts_model(config):  # also fields of the checkpoint's family
        given -= families.all_field_names() - known
    if different := known ^ given:
        raise UserError(
            f"config.model.family = {config.model.family!r}: its models do not have the fields of this config, such as "
            f"{min(different)}; begin with an experiment of the family, or set config.model = "
            f"bertjax.models.model_fields({config.model.family!r}) in one"
        )
    for known in known_fields:
        within(f"model.{known.name}", config.model[known.name], **known.metadata)
    hidden, heads = config.model.hidden_size, config.model.get("num_attention_heads", 1)
    remedy = f"must be a multiple of model.num_attention_heads = {heads}"
    require("head_dim" in config.model or hidden % heads == 0, "model.hidden_size", hidden, remedy)
