"""Checks the stages of pre-training: what each has, what it changes, and what they make together."""

import dataclasses
import itertools
import json
import math
from collections.abc import Mapping

import ml_collections

from bertjax.config.limits import AT_LEAST_ZERO, require, value_of, within
from bertjax.config.stages import MOST_BATCH_SIZES, changes_of, parts_of, ramp_of, total_steps
from bertjax.models import families
from bertjax.pretraining.stage_fields import changeable

STAGE_LIMITS = {
    "steps": AT_LEAST_ZERO,
    "tokens": AT_LEAST_ZERO,
    "length": dict(least=8),
    "max_predictions_per_seq": AT_LEAST_ZERO,
    "ramp_from": AT_LEAST_ZERO,
    "ramp_tokens": AT_LEAST_ZERO,
}


def validate_stages(config, field_limits: Mapping[str, Mapping]) -> None:
    """Raises `UserError` if the stages of a config are invalid; `field_limits`: of fields that a stage may change."""
    # With adapt.model, the number of positions becomes known with the checkpoint.
    stages, limit = config.stages, math.inf if config.adapt.model else config.model.max_position_embeddings
    remedy = "must be one or more named stages: named_stages(short=stage(steps, length, max_predictions_per_seq))"
    is_named = isinstance(stages, ml_collections.ConfigDict) and len(stages) > 0
    is_valid = is_named and all(isinstance(stage, ml_collections.ConfigDict) for stage in stages.values())
    require(is_valid, "stages", stages.to_dict() if hasattr(stages, "to_dict") else stages, remedy)
    for name, given in stages.items():
        for field, limits in STAGE_LIMITS.items():
            kinds = (int, float) if field.endswith("tokens") else int
            is_number = isinstance(given.get(field, 0), kinds)
            require(is_number, f"stages.{name}.{field}", given.get(field), "must be a whole number")
            within(f"stages.{name}.{field}", given.get(field, 0), **limits)
        has_tokens = given.get("tokens", 0) > 0
        both = "a stage has steps or tokens, not both: set one of them to 0"
        require(not (has_tokens and given.steps), f"stages.{name}.tokens", given.get("tokens"), both)
        neither = "must be at least 1, or tokens above 0 in its place: stage(0, length, ..., tokens=1e9)"
        require(has_tokens or given.steps >= 1, f"stages.{name}.steps", given.steps, neither)
        _validate_changes(config, name, given, field_limits)
        _validate_ramp(config, name, given)
        _validate_predictions(config, name, given, limit)
    if config.data.masking == "static":
        most = {given.length: given.max_predictions_per_seq for given in stages.values()}
        for name, given in stages.items():
            one = f"stages of one length share records, whose max_predictions_per_seq is {most[given.length]}"
            field = f"stages.{name}.max_predictions_per_seq"
            require(given.max_predictions_per_seq == most[given.length], field, given.max_predictions_per_seq, one)
    _validate_order(stages)
    require(total_steps(config) < 2**31, "stages", total_steps(config), "must have fewer than 2 ** 31 steps in all")


def _validate_order(stages) -> None:
    """Checks that stages of one length are written in the order of training: that of their names."""
    for length in {given.length for given in stages.values()}:
        written = [name for name in json.loads(stages.to_json_best_effort()) if stages[name].length == length]
        for one, other in itertools.pairwise(written):
            order = "stages of one length are trained in the order of their names; rename one of them"
            remedy = f"would be trained before {one!r}, though it is written after it: {order}"
            require(one < other, "stages", other, remedy)


def _validate_changes(config, name: str, given, field_limits: Mapping[str, Mapping]) -> None:
    """Checks what a stage changes, as if the whole config had it."""
    known, limits = changeable(config), dict(field_limits)
    for model in families.possible_config_classes(config):
        limits |= {f"model.{field.name}": field.metadata for field in dataclasses.fields(model)}
    copy = config.copy_and_resolve_references().unlock()
    for field, value in changes_of(given).items():
        what = f"is nothing that a stage may change; choose among {', '.join(known)}"
        require(field in known, f"stages.{name}.{field}", value, what)
        section, _, last = field.rpartition(".")
        if section == "model" and last not in copy.model:  # the family becomes known with the checkpoint
            families.add_field(copy, last)
        try:
            if value is None:
                raise TypeError
            (copy[section] if section else copy)[last] = value
        except TypeError:
            example = f"must be such as {value_of(copy, field)!r}"
            require(False, f"stages.{name}.{field}", value, example)
        within(f"stages.{name}.{field}", value, **limits.get(field, {}))
        dynamic = "masks of records stay what they are; set data.masking=dynamic, or leave it out"
        is_mask = field.startswith("data.masked") and config.data.masking == "static"
        require(not is_mask, f"stages.{name}.{field}", value, dynamic)
        apart = "records that are mixed when they are prepared stay what they are; set data.mix_when=read"
        is_mixed = field == "data.mixture" and config.data.mix_when == "prepared"
        require(not is_mixed, f"stages.{name}.{field}", value, apart)
    split_of_masks(f"stages.{name}.data.masked_lm_split", given.get("data", {}).get("masked_lm_split"))


def _validate_ramp(config, name: str, given) -> None:
    """Checks the batch sizes of a stage."""
    batch_size = given.get("batch_size", config.batch_size)
    microbatches = given.get("microbatches", config.microbatches)
    first, tokens = given.get("ramp_from", 0), given.get("ramp_tokens", 0.0)
    for size in {batch_size, first} - {0}:
        field = "batch_size" if size == batch_size else "ramp_from"
        remedy = f"must be a multiple of microbatches = {microbatches}"
        require(size % microbatches == 0, f"stages.{name}.{field}", size, remedy)
    both = "a batch that grows needs both: ramp_from, its first size, and ramp_tokens above 0"
    require(bool(first) == bool(tokens), f"stages.{name}.ramp_from", first, both)
    require(first < batch_size, f"stages.{name}.ramp_from", first, f"must be below batch_size = {batch_size}")
    sizes = -(-batch_size // first) if first else 1
    many = f"makes {sizes} batch sizes, each of which compiles the step again; choose one that makes {MOST_BATCH_SIZES}"
    require(sizes <= MOST_BATCH_SIZES, f"stages.{name}.ramp_from", first, f"{many} at most")
    growing = ramp_of(given, batch_size)
    none = "too few: no batch size gets a whole step"
    require(all(steps for steps, _ in growing), f"stages.{name}.ramp_tokens", tokens, none)
    parts = parts_of(given, batch_size)
    few = f"too few for one step of {batch_size} sequences of {given.length}"
    require(bool(parts), f"stages.{name}.tokens", given.get("tokens", 0.0), few)
    longer = "the stage ends before its batch is whole: choose fewer, or make it longer"
    require(not growing or not parts[-1][2], f"stages.{name}.ramp_tokens", tokens, longer)


def _validate_predictions(config, name: str, given, limit: int) -> None:
    length, predictions = (f"stages.{name}.{x}" for x in ("length", "max_predictions_per_seq"))
    longer = f"longer than sequences may be, model.max_position_embeddings = {limit}"
    require(given.length <= limit, length, given.length, longer)
    share = given.get("data", {}).get("masked_lm_prob", config.data.masked_lm_prob)
    # Rounded down: 19 predictions of 128 tokens (19.2) are enough; the paper has 20, which are 15.6 %.
    needed = int(share * given.length)
    few = f"too small for data.masked_lm_prob = {share} of {given.length} tokens: use at least {needed}"
    require(given.max_predictions_per_seq >= needed, predictions, given.max_predictions_per_seq, few)
    more = f"more than the sequence's {given.length} tokens"
    require(given.max_predictions_per_seq <= given.length, predictions, given.max_predictions_per_seq, more)


def split_of_masks(field: str, split) -> None:
    """Checks shares of masked tokens; None: there are none."""
    is_split = split is None or (len(split) == 3 and min(split) >= 0 and math.isclose(sum(split), 1))
    remedy = "must be three shares that add up to 1: replaced by [MASK], by a random piece, left as they are"
    require(is_split, field, split, remedy)
