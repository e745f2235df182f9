"""Checks of `config.model`."""

import dataclasses

import ml_collections

from bertjax.common.errors import UserError
from bertjax.config.limits import require, within
from bertjax.models import families


def validate_model(config: ml_collections.ConfigDict) -> None:
    """Checks the fields of `config.model` and their limits.

    Args:
      config: a run config.

    Raises:
      UserError: if a field is missing, unknown, or out of its limits.
    """
    fields = dataclasses.fields(families.FAMILIES.get(config.model.family).config_class)
    known, present = {field.name for field in fields}, set(config.model)
    if families.adopts_model(config):  # fields of the family of the checkpoint are allowed
        present -= families.all_field_names() - known
    if different := known ^ present:
        raise UserError(
            f"config.model.family = {config.model.family!r}: config.model must have the fields of this family, but "
            f"{min(different)} is {'missing' if min(different) in known else 'unknown'}; start from an experiment of "
            f"the family, or set config.model = bertjax.models.model_fields({config.model.family!r}) in the experiment"
        )
    for field in fields:
        within(f"model.{field.name}", config.model[field.name], **field.metadata)
    hidden, heads = config.model.hidden_size, config.model.get("num_attention_heads", 1)
    remedy = f"must be a multiple of model.num_attention_heads = {heads}"
    require("head_dim" in config.model or hidden % heads == 0, "model.hidden_size", hidden, remedy)
