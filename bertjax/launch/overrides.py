"""Overrides of the fields of a config.

A config may have more fields than it begins with: fields of a model that is adopted from a checkpoint, fields that a
stage changes, and the settings of objectives. `find_field` adds such a field with its default.
"""

from collections.abc import Iterable, Sequence

from ml_collections import ConfigDict

from bertjax.config import fields
from bertjax.config.stages import OPTIONAL, predictions_for
from bertjax.models import families
from bertjax.objectives.parsing import add_settings
from bertjax.pretraining.stage_fields import changeable_fields


def find_field(config: ConfigDict, path: str) -> fields.Field:
    """Finds the field at `path`, such as "stages.long.data.masked_lm_prob", and adds it if the config may have it.

    Raises `UserError` with the existing fields.
    """
    keys = fields.path_keys(path)
    if keys[0] == "model" and len(keys) == 2 and families.adopts_model(config) and keys[1] not in config.model:
        families.add_field(config, keys[1])
    if keys[0] == "stages" and len(keys) > 2 and "stages" in config and not _is_there(config, keys):
        _add_stage_field(config, keys)
    if keys[0] == "objectives" and len(keys) > 1 and "stages" in config:
        add_settings(config, str(keys[1]))
    return fields.find_field(config, path)


def _is_there(config: ConfigDict, keys: Sequence[str | int]) -> bool:
    """Whether a config has a field, or a field on the path to it that is no section."""
    for key in keys:
        if not isinstance(config, ConfigDict):
            return True
        if key not in config:
            return False
        config = config[key]
    return True


def _add_stage_field(config: ConfigDict, keys: Sequence[str]) -> None:
    """Adds a field that a stage may have, such as `("stages", "long", "data", "masked_lm_prob")`, with the config's own
    value, if it is one."""
    _, name, *path = keys
    stage, field = config.stages.get(name), ".".join(map(str, path))
    with config.unlocked():
        if stage is not None and field in OPTIONAL:
            stage[field] = OPTIONAL[field]
        elif stage is not None and field in changeable_fields(config):
            *section, last = path
            theirs = config[section[0]] if section else config
            value = theirs[last] if last in theirs else families.field_default(last)  # an adopted model may have it
            if section and section[0] not in stage:
                stage[section[0]] = ConfigDict()
            (stage[section[0]] if section else stage)[last] = value


def note_overrides(config, names: Iterable[str], width: int | None) -> None:
    """Adds the names of fields that the user has set to `config.overrides`. The sizes of a layer follow a new width.

    Args:
      width: `model.hidden_size` before the user has set any.
    """
    with config.unlocked():
        config.overrides = tuple(sorted({*config.get("overrides", ()), *names}))
    if config.get("recipe"):
        for name, stage in config.stages.items():
            if f"stages.{name}.max_predictions_per_seq" not in config.overrides:
                stage.max_predictions_per_seq = predictions_for(config.data.masked_lm_prob, stage.length)
    if width is None or config.model.hidden_size == width or families.adopts_model(config):
        return
    for name, size in sizes_of_width(config.model, width).items():
        if f"model.{name}" not in config.overrides:
            config.model[name] = size


def sizes_of_width(model: ConfigDict, width: int) -> dict[str, int]:
    """Returns the sizes of `model.hidden_size` that have the same proportions as those of `model` have to `width`."""
    hidden, sizes = model.hidden_size, {}
    if "intermediate_size" in model:
        sizes["intermediate_size"] = max(1, round(model.intermediate_size * hidden / width))
    if "num_attention_heads" in model and "head_dim" not in model:
        most = max(1, round(model.num_attention_heads * hidden / width))
        sizes["num_attention_heads"] = next(heads for heads in range(most, 0, -1) if hidden % heads == 0)
    return sizes
