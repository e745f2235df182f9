"""Overrides of the fields of a config.

A config may have more fields than it begins with: fields of a model that is adopted from a checkpoint, fields that a
stage changes, and the settings of objectives. `find_field` adds such a field with its default.
"""

from collections.abc import Iterable

from ml_collections import ConfigDict

from bertjax.config import fields
from bertjax.config.stages import OPTIONAL, predictions_for
from bertjax.models import families
from bertjax.objectives.parsing import add_settings
from bertjax.pretraining.stage_fields import changeable_fields


def find_field(config: ConfigDict, path: str) -> fields.Field:
    """Finds the field at `path`, such as "stages.long.data.masked_lm_prob". Adds the field if the config may have it.

    Raises:
      UserError: the config has no such field. The message lists the existing fields.
    """
    section, *names = map(str, fields.path_keys(path))
    if section == "model" and len(names) == 1 and families.adopts_model(config) and names[0] not in config.model:
        families.add_field(config, names[0])
    if section == "stages" and len(names) > 1 and "stages" in config:
        _add_stage_field(config, names[0], ".".join(names[1:]))
    if section == "objectives" and names and "stages" in config:
        add_settings(config, names[0])
    return fields.existing_field(config, path)


def _add_stage_field(config: ConfigDict, name: str, field: str) -> None:
    """Adds a field that a stage may have, such as "data.masked_lm_prob", with its value in the config.

    Does nothing if the stage does not exist, has the field, or may not have the field.
    """
    stage = config.stages.get(name)
    if stage is None or field in stage or field not in (*OPTIONAL, *changeable_fields(config)):
        return
    *sections, key = field.split(".")
    with config.unlocked():
        holder, defaults = stage, config
        for section in sections:
            if section not in holder:
                holder[section] = ConfigDict()
            holder, defaults = holder[section], defaults[section]
        if field in OPTIONAL:
            holder[key] = OPTIONAL[field]
        elif key not in holder:
            # A model that the run adopts from a checkpoint may have fields that `config.model` does not have.
            holder[key] = defaults[key] if key in defaults else families.field_default(key)


def note_overrides(config: ConfigDict, names: Iterable[str], width: int | None) -> None:
    """Adds names of fields that the user has set to `config.overrides`, and sets the fields that depend on them.

    With a recipe, `max_predictions_per_seq` of a stage depends on `length`. `model.intermediate_size` and
    `model.num_attention_heads` change in proportion to `model.hidden_size`.

    Args:
      config: the config with the new values.
      names: the names of the fields that the user has set.
      width: `model.hidden_size` before the user has set any field.
    """
    with config.unlocked():
        config.overrides = tuple(sorted({*config.get("overrides", ()), *names}))
    if config.get("recipe"):
        for name, stage in config.stages.items():
            if f"stages.{name}.max_predictions_per_seq" not in config.overrides:
                stage.max_predictions_per_seq = predictions_for(config.data.masked_lm_prob, stage.length)
    if width is None or config.model.hidden_size == width or families.adopts_model(config):
        return
    for name, size in _sizes_of_width(config.model, width).items():
        if f"model.{name}" not in config.overrides:
            config.model[name] = size


def _sizes_of_width(model: ConfigDict, width: int) -> dict[str, int]:
    """Scales the sizes of `model`, which are for the hidden size `width`, to `model.hidden_size`."""
    hidden, sizes = model.hidden_size, {}
    if "intermediate_size" in model:
        sizes["intermediate_size"] = max(1, round(model.intermediate_size * hidden / width))
    if "num_attention_heads" in model and "head_dim" not in model:
        most = max(1, round(model.num_attention_heads * hidden / width))
        sizes["num_attention_heads"] = next(heads for heads in range(most, 0, -1) if hidden % heads == 0)
    return sizes
