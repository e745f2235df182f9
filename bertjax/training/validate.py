"""Checks of the fields that runs of all kinds share."""

import math
from collections.abc import Mapping

import ml_collections

from bertjax.config import budget
from bertjax.config.limits import one_of, require, value_of, within
from bertjax.models import families
from bertjax.models.validate import validate_model
from bertjax.text.tokenizer import KINDS


def validate_shared_fields(config, limits: Mapping[str, Mapping]) -> None:
    """Raises `UserError` if a field that runs of all kinds have is invalid.

    Args:
      limits: {field: arguments of `config.limits.within`}.
    """
    one_of(config, "tokenizer.kind", tuple(KINDS))
    for field, limit in limits.items():
        within(field, value_of(config, field), **limit)
    if config.budget:
        budget.parse(config.budget)
    needs = f"a recipe needs one, such as {budget.EXAMPLES}"
    require(bool(config.budget or not config.get("recipe")), "budget", config.budget, needs)
    validate_model(config)
    one = "layers that are recomputed must stay in a scan, or the compiler undoes it: set unroll=auto, or remat=none"
    require(config.unroll != "yes" or config.remat in ("none", "auto"), "unroll", config.unroll, one)
    fused = config.model.get("attention") == "fused"
    none = "model.attention = 'fused' asks for one; set attention=auto, or kernels=auto"
    require(not (config.kernels == "no" and fused), "kernels", config.kernels, none)
    every, kept = config.checkpoint.every_steps, config.checkpoint.keep_every
    require(kept % every == 0, "checkpoint.keep_every", kept, f"must be a multiple of every_steps = {every}, or 0")
    _profile(config.profile)
    factor = config.watchdog
    require(factor == 0 or factor > 1, "watchdog", factor, "must be above 1, or 0 for none")

    batch, microbatches = config.batch_size, config.microbatches
    require(batch % microbatches == 0, "batch_size", batch, f"must be a multiple of microbatches = {microbatches}")

    for axis, size in config.mesh.items():
        require(size == -1 or size >= 1, f"mesh.{axis}", size, "must be at least 1, or -1 for the remaining devices")
    require(list(config.mesh.values()).count(-1) <= 1, "mesh", dict(config.mesh), "only one axis can be -1")
    _validate_numbers(config)
    family = families.FAMILIES.get(config.model.family)
    whole = f"model.family = {config.model.family!r} reads whole rows, which sequences cannot share; set False"
    require(not config.packing or family.packs, "packing", config.packing, whole)
    family.validate(config)


def _validate_numbers(config, prefix: str = "") -> None:
    """Checks that all numbers are finite, and that whole numbers fit the 32 bits that devices have for them."""
    for name, value in config.items():
        if isinstance(value, ml_collections.ConfigDict):
            _validate_numbers(value, f"{prefix}{name}.")
        for number in value if isinstance(value, tuple) else (value,):
            if isinstance(number, float):
                require(math.isfinite(number), f"{prefix}{name}", value, "must be finite")
            elif isinstance(number, int):
                require(abs(number) < 2**31, f"{prefix}{name}", value, "must be below 2 ** 31")


def _profile(steps: str) -> None:
    start, _, stop = steps.partition(":")
    is_valid = start.isdecimal() and stop.isdecimal() and 1 <= int(start) <= int(stop)
    remedy = "write START:STOP, such as 20:24 for steps 20 to 24; the first step is 1, and STOP is not before START"
    require(not steps or is_valid, "profile", steps, remedy)


def validate_optimization(config) -> None:
    """Raises `UserError` if the schedules, the trackers, the hooks or the optimizer of a config are invalid."""
    from bertjax.training.hooks import registry
    from bertjax.training.optim import optimizers, schedules
    from bertjax.training.trackers import trackers

    schedules.validate(config)
    trackers.validate(config)
    registry.validate(config)
    optimizers.validate(config.optimizer)
