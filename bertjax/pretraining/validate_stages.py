"""Checks of the stages of pre-training: fields, changes of the config, batch sizes, and order."""

import dataclasses
import itertools
import json
import math
from collections.abc import Mapping, Sequence
from typing import Any

from ml_collections import ConfigDict

from bertjax.config.limits import AT_LEAST_ZERO, require, value_of, within
from bertjax.config.stages import MOST_BATCH_SIZES, batch_size_parts, changes_of, ramp_of, total_steps
from bertjax.models import families
from bertjax.pretraining.stage_fields import changeable_fields

STAGE_LIMITS = {
    "steps": AT_LEAST_ZERO,
    "tokens": AT_LEAST_ZERO,
    "length": dict(least=8),
    "max_predictions_per_seq": AT_LEAST_ZERO,
    "ramp_from": AT_LEAST_ZERO,
    "ramp_tokens": AT_LEAST_ZERO,
}


def validate_stages(config: ConfigDict, field_limits: Mapping[str, Mapping]) -> None:
    """Raises `UserError` if the stages of a config are invalid.

    Args:
      config: the whole config.
      field_limits: {field: arguments of `config.limits.within`} for the fields that a stage may change.
    """
    stages = config.stages
    remedy = "must be one or more named stages: named_stages(short=stage(steps, length, max_predictions_per_seq))"
    has_stages = isinstance(stages, ConfigDict) and len(stages) > 0
    is_valid = has_stages and all(isinstance(stage, ConfigDict) for stage in stages.values())
    require(is_valid, "stages", stages.to_dict() if hasattr(stages, "to_dict") else stages, remedy)
    for name, stage in stages.items():
        _validate_numbers(name, stage)
        _validate_changes(config, name, stage, field_limits)
        _validate_batch_sizes(config, name, stage)
        _validate_lengths(config, name, stage)
    if config.data.masking == "static":
        _validate_shared_records(stages)
    _validate_order(stages)
    require(total_steps(config) < 2**31, "stages", total_steps(config), "must have fewer than 2 ** 31 steps in all")


def validate_mask_split(field: str, split: Sequence[float] | None) -> None:
    """Raises `UserError` unless the shares of masked, random and unchanged tokens add up to 1, or `split` is None."""
    is_split = split is None or (len(split) == 3 and min(split) >= 0 and math.isclose(sum(split), 1))
    remedy = "must be three shares that add up to 1: replaced by [MASK], replaced by a random token, unchanged"
    require(is_split, field, split, remedy)


def _validate_numbers(name: str, stage: ConfigDict) -> None:
    """Checks the fields in `STAGE_LIMITS`."""
    for field, limits in STAGE_LIMITS.items():
        types = (int, float) if field.endswith("tokens") else int
        is_number = isinstance(stage.get(field, 0), types)
        require(is_number, f"stages.{name}.{field}", stage.get(field), "must be a whole number")
        within(f"stages.{name}.{field}", stage.get(field, 0), **limits)
    tokens = stage.get("tokens", 0)
    remedy = f"must be 0 with steps = {stage.steps}; set tokens=0 or steps=0"
    require(not (tokens > 0 and stage.steps), f"stages.{name}.tokens", stage.get("tokens"), remedy)
    remedy = "must be at least 1, or tokens must be above 0; write stage(0, length, ..., tokens=1e9) to set the tokens"
    require(tokens > 0 or stage.steps >= 1, f"stages.{name}.steps", stage.steps, remedy)


def _validate_shared_records(stages: ConfigDict) -> None:
    """Checks that stages of the same length, which read the same records, have the same number of predictions."""
    predictions_of_length = {stage.length: stage.max_predictions_per_seq for stage in stages.values()}
    for name, stage in stages.items():
        predictions, expected = stage.max_predictions_per_seq, predictions_of_length[stage.length]
        remedy = f"must be {expected}, because stages of the same length share records; set {expected}"
        require(predictions == expected, f"stages.{name}.max_predictions_per_seq", predictions, remedy)


def _validate_order(stages: ConfigDict) -> None:
    """Checks that the config lists stages of the same length in alphabetical order, the order in which they run."""
    for length in {stage.length for stage in stages.values()}:
        written = [name for name in json.loads(stages.to_json_best_effort()) if stages[name].length == length]
        for name, next_name in itertools.pairwise(written):
            remedy = f"must follow {name!r} alphabetically, because stages of the same length run in alphabetical order"
            require(name < next_name, "stages", next_name, f"{remedy}; rename a stage")


def _validate_changes(config: ConfigDict, name: str, stage: ConfigDict, field_limits: Mapping[str, Mapping]) -> None:
    """Checks the fields of the config that a stage changes."""
    allowed, all_limits = changeable_fields(config), dict(field_limits)
    for model_config in families.possible_config_classes(config):
        all_limits |= {f"model.{field.name}": field.metadata for field in dataclasses.fields(model_config)}
    changed = config.copy_and_resolve_references().unlock()
    for field, value in changes_of(stage).items():
        stage_field = f"stages.{name}.{field}"
        remedy = f"must be removed, because a stage cannot change it; a stage can change {', '.join(allowed)}"
        require(field in allowed, stage_field, value, remedy)
        _set_field(changed, field, value, stage_field)
        within(stage_field, value, **all_limits.get(field, {}))
        is_mask = field.startswith("data.masked") and config.data.masking == "static"
        remedy = "needs data.masking=dynamic, because records store the static masks; set data.masking=dynamic"
        require(not is_mask, stage_field, value, f"{remedy}, or remove the field")
        is_mixed = field == "data.mixture" and config.data.mix_when == "prepared"
        remedy = "needs data.mix_when=read, because prepared records are already mixed; set data.mix_when=read"
        require(not is_mixed, stage_field, value, remedy)
    validate_mask_split(f"stages.{name}.data.masked_lm_split", stage.get("data", {}).get("masked_lm_split"))


def _set_field(config: ConfigDict, field: str, value: Any, stage_field: str) -> None:
    """Sets a field of a config.

    Args:
      config: the config to change.
      field: the name of the field, such as "data.mixture".
      value: the new value.
      stage_field: the name of the field in the error.

    Raises:
      UserError: if the value has another type than the value before.
    """
    section_name, _, last = field.rpartition(".")
    if section_name == "model" and last not in config.model:  # The checkpoint determines the family.
        families.add_field(config, last)
    remedy = f"must be a value such as {value_of(config, field)!r}"
    require(value is not None, stage_field, value, remedy)
    section = config[section_name] if section_name else config
    try:
        section[last] = value
    except TypeError:
        require(False, stage_field, value, remedy)


def _validate_batch_sizes(config: ConfigDict, name: str, stage: ConfigDict) -> None:
    """Checks the batch sizes of a stage, and the number of tokens that each batch size needs."""
    batch_size = stage.get("batch_size", config.batch_size)
    microbatches = stage.get("microbatches", config.microbatches)
    ramp_from, ramp_tokens = stage.get("ramp_from", 0), stage.get("ramp_tokens", 0.0)
    for size in {batch_size, ramp_from} - {0}:
        field = "batch_size" if size == batch_size else "ramp_from"
        remedy = f"must be a multiple of microbatches = {microbatches}"
        require(size % microbatches == 0, f"stages.{name}.{field}", size, remedy)
    remedy = "must be the first batch size, together with ramp_tokens above 0; set both fields, or remove both"
    require(bool(ramp_from) == bool(ramp_tokens), f"stages.{name}.ramp_from", ramp_from, remedy)
    remedy = f"must be below batch_size = {batch_size}"
    require(ramp_from < batch_size, f"stages.{name}.ramp_from", ramp_from, remedy)
    sizes = -(-batch_size // ramp_from) if ramp_from else 1
    remedy = f"must give at most {MOST_BATCH_SIZES} batch sizes, not {sizes}, because each batch size compiles the step"
    require(sizes <= MOST_BATCH_SIZES, f"stages.{name}.ramp_from", ramp_from, f"{remedy}; set a larger number")
    ramp, parts = ramp_of(stage, batch_size), batch_size_parts(stage, batch_size)
    remedy = "must give each batch size at least one step; set a larger number"
    require(all(steps for steps, _ in ramp), f"stages.{name}.ramp_tokens", ramp_tokens, remedy)
    remedy = f"must give at least one step of {batch_size} sequences of {stage.length} tokens; set a larger number"
    require(bool(parts), f"stages.{name}.tokens", stage.get("tokens", 0.0), remedy)
    remedy = "must be reached before the stage ends; set a smaller number, or a longer stage"
    reaches_batch_size = not ramp or not parts[-1][2]
    require(reaches_batch_size, f"stages.{name}.ramp_tokens", ramp_tokens, remedy)


def _validate_lengths(config: ConfigDict, name: str, stage: ConfigDict) -> None:
    """Checks the sequence length of a stage, and the number of predictions."""
    length, predictions = stage.length, stage.max_predictions_per_seq
    if not config.adapt.model:  # Otherwise, the checkpoint determines the number of positions.
        limit = config.model.max_position_embeddings
        remedy = f"must be at most model.max_position_embeddings = {limit}; set a shorter length"
        require(length <= limit, f"stages.{name}.length", length, remedy)
    masked_lm_prob = stage.get("data", {}).get("masked_lm_prob", config.data.masked_lm_prob)
    # Rounding down allows 19 predictions of 128 tokens (15 % are 19.2). The paper has 20, which are 15.6 %.
    needed = int(masked_lm_prob * length)
    field = f"stages.{name}.max_predictions_per_seq"
    remedy = f"must be at least {needed} for data.masked_lm_prob = {masked_lm_prob} of {length} tokens; set {needed}"
    require(predictions >= needed, field, predictions, remedy)
    require(predictions <= length, field, predictions, f"must be at most the length of {length} tokens; set {length}")
