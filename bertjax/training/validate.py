"""Validates the config fields that pre-training and fine-tuning share."""

import math
from collections.abc import Mapping

from ml_collections import ConfigDict

from bertjax.config import budget
from bertjax.config.limits import one_of, require, value_of, within
from bertjax.models import families
from bertjax.models.validate import validate_model
from bertjax.text.tokenizer import KINDS


def validate_shared_fields(config: ConfigDict, limits: Mapping[str, Mapping]) -> None:
    """Raises `UserError` if a field that pre-training and fine-tuning share is invalid.

    Args:
      config: the whole config.
      limits: {dotted field name: keyword arguments of `config.limits.within`}.
    """
    one_of(config, "tokenizer.kind", tuple(KINDS))
    for field, limit in limits.items():
        within(field, value_of(config, field), **limit)
    if config.budget:
        budget.parse_budget(config.budget)
    remedy = f"must be set for a recipe, such as {budget.EXAMPLES}"
    require(bool(config.budget or not config.get("recipe")), "budget", config.budget, remedy)
    validate_model(config)
    _validate_compilation(config)
    every_steps, keep_every = config.checkpoint.every_steps, config.checkpoint.keep_every
    remedy = f"must be a multiple of every_steps = {every_steps}, or 0"
    require(keep_every % every_steps == 0, "checkpoint.keep_every", keep_every, remedy)
    _validate_profile(config.profile)
    require(
        config.watchdog == 0 or config.watchdog > 1, "watchdog", config.watchdog, "must be above 1, or 0 to disable it"
    )

    batch_size, microbatches = config.batch_size, config.microbatches
    remedy = f"must be a multiple of microbatches = {microbatches}"
    require(batch_size % microbatches == 0, "batch_size", batch_size, remedy)

    for axis, size in config.mesh.items():
        require(size == -1 or size >= 1, f"mesh.{axis}", size, "must be at least 1, or -1 for the remaining devices")
    require(list(config.mesh.values()).count(-1) <= 1, "mesh", dict(config.mesh), "must have at most one -1")
    _validate_numbers(config)
    family = families.FAMILIES.get(config.model.family)
    remedy = f"model.family = {config.model.family!r} does not support packed rows; set packing=False"
    require(not config.packing or family.supports_packing, "packing", config.packing, remedy)
    family.validate(config)


def _validate_compilation(config: ConfigDict) -> None:
    """Raises `UserError` for contradictions between `unroll`, `remat`, `kernels` and `model.attention`."""
    remedy = (
        f"must be auto or no with remat = {config.remat!r}, because the compiler would store the activations of "
        "unrolled layers; set unroll=auto or remat=none"
    )
    require(config.unroll != "yes" or config.remat in ("none", "auto"), "unroll", config.unroll, remedy)
    needs_kernel = config.model.get("attention") == "fused"
    remedy = "must be auto with model.attention = 'fused', which is a kernel; set kernels=auto or model.attention=auto"
    require(not (config.kernels == "no" and needs_kernel), "kernels", config.kernels, remedy)


def _validate_numbers(config: ConfigDict, prefix: str = "") -> None:
    """Raises `UserError` for a number that is not finite, and for an integer that does not fit in int32 on devices."""
    for name, value in config.items():
        if isinstance(value, ConfigDict):
            _validate_numbers(value, f"{prefix}{name}.")
        for number in value if isinstance(value, tuple) else (value,):
            if isinstance(number, float):
                require(math.isfinite(number), f"{prefix}{name}", value, "must be finite")
            elif isinstance(number, int):
                require(abs(number) < 2**31, f"{prefix}{name}", value, "must be above -2 ** 31 and below 2 ** 31")


def _validate_profile(steps: str) -> None:
    """Raises `UserError` if `config.profile` is neither empty nor START:STOP."""
    start, _, stop = steps.partition(":")
    is_valid = start.isdecimal() and stop.isdecimal() and 1 <= int(start) <= int(stop)
    remedy = "write START:STOP, such as 20:24 for steps 20 to 24; the first step is 1, and STOP is not before START"
    require(not steps or is_valid, "profile", steps, remedy)


def validate_optimization(config: ConfigDict) -> None:
    """Raises `UserError` if the schedules, the trackers, the hooks or the optimizer of a config are invalid."""
    from bertjax.training.hooks import registry
    from bertjax.training.optim import optimizers, schedules
    from bertjax.training.trackers import trackers

    schedules.validate(config)
    trackers.validate(config)
    registry.validate(config)
    optimizers.validate(config.optimizer)
