"""Learning rate schedules.

The fields of a schedule are inputs of the compiled training step. A run with another learning rate or another number of
steps can therefore use the same compiled function.
"""

import itertools
from collections.abc import Sequence
from typing import NamedTuple, Protocol

import jax
import jax.numpy as jnp
import numpy as np
from ml_collections import ConfigDict

from bertjax.common.errors import UserError
from bertjax.common.registry import Registry
from bertjax.config.stages import Stage, config_in, stages_of

WARM_UP_FIELDS = ("warmup_steps", "warmup_tokens")

Step = int | jax.Array  # the number of earlier updates, 0 in the first step


class Schedule(Protocol):
    """A `NamedTuple` of numbers that maps a step to a learning rate.

    Register a factory: (config.optimizer, warmup_steps, total_steps) -> schedule. If the schedule counts tokens
    (`optimizer.warmup_tokens`), the step and both numbers of steps can be fractions: their unit is the tokens per step
    of the first stage. The compiled training step receives integers as int32 and other numbers as float32.
    """

    def __call__(self, step: Step) -> jax.Array:
        """Returns the learning rate of a step, a float32 scalar. `jax.jit` traces the method.

        Args:
          step: the number of earlier updates, an int or a scalar array; 0 for the first step.
        """


class Linear(NamedTuple):
    """Linear warm-up, then linear decay to 0, as in google-research/bert.

    The decay starts at step 0, not after the warm-up (optimization.create_optimizer). The highest learning rate is
    therefore `peak * (1 - warmup_steps / total_steps)`, right after the warm-up.
    """

    peak: float
    warmup_steps: int
    total_steps: int

    def __call__(self, step: Step) -> jax.Array:
        """Returns the learning rate of a step."""
        step = jnp.asarray(step, jnp.float32)
        decayed = self.peak * (1 - jnp.minimum(step, self.total_steps) / self.total_steps)
        return jnp.where(step < self.warmup_steps, self.peak * step / jnp.maximum(self.warmup_steps, 1), decayed)


class Constant(NamedTuple):
    """Linear warm-up, then a constant learning rate."""

    peak: float
    warmup_steps: int

    def __call__(self, step: Step) -> jax.Array:
        """Returns the learning rate of a step."""
        return self.peak * _warmup(step, self.warmup_steps)


class Cosine(NamedTuple):
    """Linear warm-up, then half a period of a cosine from the peak to 0 (Loshchilov & Hutter 2017, equation 5)."""

    peak: float
    warmup_steps: int
    total_steps: int

    def __call__(self, step: Step) -> jax.Array:
        """Returns the learning rate of a step."""
        done = jnp.asarray(step, jnp.float32) - self.warmup_steps
        decayed = 0.5 * (
            1 + jnp.cos(jnp.pi * jnp.clip(done / jnp.maximum(self.total_steps - self.warmup_steps, 1), 0, 1))
        )
        return self.peak * _warmup(step, self.warmup_steps) * decayed


class Plateau(NamedTuple):
    """Linear warm-up, the peak, and a decay to `end * peak` in the last `decay_steps`.

    After a share x (0 to 1) of the decay steps, the rate is `peak * (1 - (1 - end) * x ** power)`. Power 0.5 is
    "1 - sqrt" of Hägele et al. (2024, section 3.3).
    """

    peak: float
    warmup_steps: int
    decay_steps: int
    total_steps: int
    end: float
    power: float

    def __call__(self, step: Step) -> jax.Array:
        """Returns the learning rate of a step."""
        progress = _decay_progress(step, self.total_steps, self.decay_steps) ** self.power
        return self.peak * _warmup(step, self.warmup_steps) * (1 - (1 - self.end) * progress)


class CosinePlateau(NamedTuple):
    """Linear warm-up, the peak, and half a period of a cosine to `end * peak` in the last `decay_steps`."""

    peak: float
    warmup_steps: int
    decay_steps: int
    total_steps: int
    end: float

    def __call__(self, step: Step) -> jax.Array:
        """Returns the learning rate of a step."""
        progress = 0.5 * (1 - jnp.cos(jnp.pi * _decay_progress(step, self.total_steps, self.decay_steps)))
        return self.peak * _warmup(step, self.warmup_steps) * (1 - (1 - self.end) * progress)


def _decay_progress(step: Step, total_steps: int, decay_steps: int) -> jax.Array:
    """Returns the progress of the decay, which rises linearly from 0 to 1 in the last `decay_steps`."""
    begin = total_steps - decay_steps
    return jnp.clip((jnp.asarray(step, jnp.float32) - begin) / jnp.maximum(decay_steps, 1), 0, 1)


class Trapezoid(NamedTuple):
    """Linear warm-up, the peak, and linear decay to 0 in the last `decay_steps` (Zhai et al. 2022, section 3.5)."""

    peak: float
    warmup_steps: int
    decay_steps: int
    total_steps: int

    def __call__(self, step: Step) -> jax.Array:
        """Returns the learning rate of a step."""
        left = (self.total_steps - jnp.asarray(step, jnp.float32)) / jnp.maximum(self.decay_steps, 1)
        return self.peak * _warmup(step, self.warmup_steps) * jnp.clip(left, 0, 1)


class PerStage(NamedTuple):
    """One schedule per stage. Each schedule counts steps from the first step of the stage.

    Attributes:
      first_steps: the first step of each stage except the first stage.
      schedules: the schedule of each stage.
    """

    first_steps: tuple[int, ...]
    schedules: tuple[Schedule, ...]

    def __call__(self, step: Step) -> jax.Array:
        """Returns the learning rate of a step."""
        rate = self.schedules[0](step)
        for first_step, schedule in zip(self.first_steps, self.schedules[1:]):
            rate = jnp.where(jnp.asarray(step) >= first_step, schedule(jnp.asarray(step) - first_step), rate)
        return rate


class ByTokens(NamedTuple):
    """A schedule that counts tokens instead of steps, for stages with different numbers of tokens per step.

    The unit of the count is the number of tokens per step of the first stage.

    Attributes:
      first_steps: the first step of each stage except the first stage.
      units: units per step in each stage; 1.0 in the first stage.
      schedule: (number of units) -> learning rate.
    """

    first_steps: tuple[int, ...]
    units: tuple[float, ...]
    schedule: Schedule

    def __call__(self, step: Step) -> jax.Array:
        """Returns the learning rate of a step."""
        step = jnp.asarray(step, jnp.float32)
        total_units = step
        for first_step, before, after in zip(self.first_steps, self.units, self.units[1:]):
            total_units += (after - before) * jnp.maximum(step - first_step, 0)
        return self.schedule(total_units)


def _warmup(step: Step, warmup_steps: int) -> jax.Array:
    """Returns the factor of the warm-up: rises from 0 to 1 at `warmup_steps`, then stays 1."""
    step = jnp.asarray(step, jnp.float32)
    return jnp.where(step < warmup_steps, step / jnp.maximum(warmup_steps, 1), 1.0)


# Factories: (config.optimizer, warm-up steps, total steps) -> schedule.
SCHEDULES: Registry = Registry(
    "schedule",
    "optimizer.schedule",
    {name: f"bertjax.training.optim.schedules:{name}" for name in ("linear", "constant", "cosine", "trapezoid")},
)
register = SCHEDULES.register


def linear(config: ConfigDict, warmup_steps: int, total_steps: int) -> Linear:
    """Returns the schedule `linear`."""
    return Linear(config.learning_rate, warmup_steps, total_steps)


def constant(config: ConfigDict, warmup_steps: int, total_steps: int) -> Constant:
    """Returns the schedule `constant`."""
    del total_steps
    return Constant(config.learning_rate, warmup_steps)


def cosine(config: ConfigDict, warmup_steps: int, total_steps: int) -> Cosine:
    """Returns the schedule `cosine`."""
    return Cosine(config.learning_rate, warmup_steps, total_steps)


def trapezoid(config: ConfigDict, warmup_steps: int, total_steps: int) -> Trapezoid | Plateau | CosinePlateau:
    """Returns the schedule `trapezoid`, with the decay of `config.decay` and `config.decay_to`."""
    steps = (config.learning_rate, warmup_steps, round(config.decay_proportion * total_steps), total_steps)
    if config.decay == "cosine":
        return CosinePlateau(*steps, config.decay_to)
    if config.decay == "linear" and not config.decay_to:
        return Trapezoid(*steps)
    return Plateau(*steps, config.decay_to, {"linear": 1.0, "sqrt": 0.5}[config.decay])


def validate(config: ConfigDict) -> None:
    """Raises `UserError` if the schedule of a whole config, or of one of its stages, is unknown or invalid."""
    for stage in [None, *(stages_of(config) if "stages" in config else ())]:
        _validate_optimizer((config if stage is None else config_in(config, stage)).optimizer)


def _validate_optimizer(config: ConfigDict) -> None:
    schedule = SCHEDULES.get(config.schedule)(config, 1, 2)
    numbers = jax.tree.leaves(schedule)
    if not callable(schedule) or not numbers or not all(isinstance(x, (int, float, np.number)) for x in numbers):
        raise UserError(
            f"config.optimizer.schedule = {config.schedule!r}: the factory of this schedule returns {schedule!r:.60}; "
            f"return a NamedTuple of numbers that can be called with a step"
        )


def schedule_of(config: ConfigDict, total_steps: int) -> Schedule:
    """Makes the schedule of a run from the whole config.

    One schedule spans all stages, unless a stage changes a field of `optimizer`. Then each stage has a schedule, and
    warm-up occurs only in the first stage and in stages that set `optimizer.warmup_steps` or `optimizer.warmup_tokens`.
    """
    stages = stages_of(config) if "stages" in config else []
    if not any(name.startswith("optimizer.") for stage in stages for name in stage.changes):
        return _schedule_of_stages(config.optimizer, stages, total_steps, config.optimizer.get("warmup_tokens", 0) > 0)
    grouped = [list(parts) for _, parts in itertools.groupby(stages, key=lambda stage: stage.name)]
    warmup_tokens = [
        config.optimizer.warmup_tokens,
        *(stage.changes.get("optimizer.warmup_tokens", 0) for stage in stages),
    ]
    schedules = []
    for parts in grouped:
        optimizer = config_in(config, parts[0]).optimizer.copy_and_resolve_references().unlock()
        fields_set = [name for name in WARM_UP_FIELDS if f"optimizer.{name}" in parts[0].changes]
        if fields_set or parts is not grouped[0]:
            optimizer.update({name: 0 for name in WARM_UP_FIELDS if name not in fields_set})
        schedules.append(_schedule_of_stages(optimizer, parts, sum(part.steps for part in parts), any(warmup_tokens)))
    return PerStage(tuple(parts[0].first_step for parts in grouped[1:]), tuple(schedules))


def _schedule_of_stages(config: ConfigDict, stages: Sequence[Stage], total_steps: int, by_tokens: bool) -> Schedule:
    """Makes a schedule that spans some stages, from `config.optimizer`. The schedule counts tokens or steps."""
    if not stages or not by_tokens:
        return make_schedule(config, total_steps)
    first, unit = stages[0].first_step, stages[0].tokens_per_step
    units = tuple(stage.tokens_per_step / unit for stage in stages)
    total = sum(stage.steps * size for stage, size in zip(stages, units))
    warmup = config.warmup_tokens / unit or float(config.warmup_steps)
    schedule = SCHEDULES.get(config.schedule)(config, warmup, total)
    return ByTokens(tuple(stage.first_step - first for stage in stages[1:]), units, schedule)


def make_schedule(config: ConfigDict, total_steps: int) -> Schedule:
    """Makes the schedule of `config.optimizer`, with `warmup_steps` or a `warmup_proportion` of the total steps."""
    if "warmup_proportion" in config:
        warmup_steps = int(config.warmup_proportion * total_steps)
    else:
        warmup_steps = config.warmup_steps
    return SCHEDULES.get(config.schedule)(config, warmup_steps, total_steps)
