"""Checks of the config fields that runs of all kinds share."""

import math
from collections.abc import Mapping

from ml_collections import ConfigDict

from bertjax.config import budget
from bertjax.config.limits import one_of, require, value_of, within
from bertjax.models import families
from bertjax.models.validate import validate_model
from bertjax.text.tokenizer import KINDS


def validate_shared_fields(config: ConfigDict, limits: Mapping[str, Mapping]) -> None:
    """Raises `UserError` if a field that runs of all kinds have is invalid.

    Args:
      config: the whole config.
      limits: {field: arguments of `config.limits.within`}.
    """
    one_of(config, "tokenizer.kind", tuple(KINDS))
    for field, limit in limits.items():
        within(field, value_of(config, field), **limit)
    if config.budget:
        budget.parse(config.budget)
    remedy = f"a recipe needs a budget, such as {budget.EXAMPLES}"
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
    require(list(config.mesh.values()).count(-1) <= 1, "mesh", dict(config.mesh), "only one axis can be -1")
    _validate_numbers(config)
    family = families.FAMILIES.get(config.model.family)
    remedy = f"model.family = {config.model.family!r} does not support packed rows; set False"
    require(not config.packing or family.supports_packing, "packing", config.packing, remedy)
    family.validate(config)


def _validate_compilation(config: ConfigDict) -> None:
    """Checks `unroll`, `remat` and `kernels`."""
    remedy = "recomputed layers must stay in a scan, or the compiler stores their states; set unroll=auto or remat=none"
    require(config.unroll != "yes" or config.remat in ("none", "auto"), "unroll", config.unroll, remedy)
    needs_kernel = config.model.get("attention") == "fused"
    remedy = "model.attention = 'fused' needs a kernel; set attention=auto, or kernels=auto"
    require(not (config.kernels == "no" and needs_kernel), "kernels", config.kernels, remedy)


def _validate_numbers(config: ConfigDict, prefix: str = "") -> None:
    """Checks that all numbers are finite, and that integers fit in 32 bits, as on devices."""
    for name, value in config.items():
        if isinstance(value, ConfigDict):
            _validate_numbers(value, f"{prefix}{name}.")
        for number in value if isinstance(value, tuple) else (value,):
            if isinstance(number, float):
                require(math.isfinite(number), f"{prefix}{name}", value, "must be finite")
            elif isinstance(number, int):
                require(abs(number) < 2**31, f"{prefix}{name}", value, "must be below 2 ** 31")


def _validate_profile(steps: str) -> None:
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
