"""The stages of pre-training in the order of training, with their lengths, batch sizes and changed fields.

A stage of `config.stages` has a length, and steps or tokens. It may also have a `batch_size`, `microbatches`, an
`objective`, and sections `data`, `model` and `optimizer` with fields that may change while a model is trained, see
`pretraining.stage_fields.changeable_fields`. All else is as the config says.
"""

import dataclasses
import math
from collections.abc import Sequence
from typing import Any

import ml_collections

REQUIRED = ("steps", "length", "max_predictions_per_seq")  # fields of a stage
OPTIONAL = {"tokens": 0.0, "ramp_from": 0, "ramp_tokens": 0.0}
MOST_BATCH_SIZES = 64  # a batch that grows has at most; each compiles the step again


@dataclasses.dataclass(frozen=True)
class Stage:
    """A stage, or the part of one that has one batch size.

    Attributes:
      name: the stage's in `config.stages`.
      batch_size: sequences of a step.
      first_step: steps of the run before it.
      sequences_before: sequences of this length that were trained on before it.
      grows: whether the batch of its stage becomes larger after it.
      changes: {field: value}, what the stage says in place of the config; its batch size in any case.
    """

    name: str
    steps: int
    length: int
    max_predictions_per_seq: int
    batch_size: int
    first_step: int = 0
    sequences_before: int = 0
    grows: bool = False
    changes: dict[str, Any] = dataclasses.field(default_factory=dict)

    @property
    def end_step(self) -> int:
        """The number of steps of the run when the stage ends."""
        return self.first_step + self.steps

    @property
    def tokens_per_step(self) -> int:
        return self.batch_size * self.length


def predictions_for(masked_lm_prob: float, length: int) -> int:
    """Returns how many masks a sequence of this length has at most: 20 of 128 tokens for a share of 0.15."""
    return min(length, int(masked_lm_prob * length) + 1)


def stages_of(config: ml_collections.ConfigDict) -> list[Stage]:
    """Returns the stages in the order of training: short sequences first (Devlin et al. 2019, A.2), then by name.

    A stage whose batch grows gives several, with equally many steps for each multiple of `ramp_from`.
    """
    found, first_step, read = [], 0, {}
    for name, given in sorted(config.stages.items(), key=lambda item: (item[1].length, item[0])):
        for steps, batch_size, grows in parts_of(given, given.get("batch_size", config.batch_size)):
            before = read.get(given.length, 0)
            found.append(
                Stage(
                    name,
                    steps,
                    given.length,
                    given.max_predictions_per_seq,
                    batch_size,
                    first_step,
                    before,
                    grows,
                    changes_of(given) | {"batch_size": batch_size},
                )
            )
            first_step, read[given.length] = first_step + steps, before + steps * batch_size
    return found


def parts_of(stage: ml_collections.ConfigDict, batch_size: int) -> list[tuple[int, int, bool]]:
    """Returns (steps, batch size, whether it grows after them) of the parts of a stage, without those of no steps."""
    growing = ramp_of(stage, batch_size)
    if stage.get("tokens"):
        left = stage.tokens - stage.length * sum(steps * size for steps, size in growing)
        last = max(0, round(left / (stage.length * batch_size)))
    else:
        last = max(0, stage.steps - sum(steps for steps, _ in growing))
    parts = [(steps, size, True) for steps, size in growing] + [(last, batch_size, False)]
    return [part for part in parts if part[0]]


def ramp_of(stage: ml_collections.ConfigDict, batch_size: int) -> list[tuple[int, int]]:
    """Returns (steps, batch size) for each size before the whole one: `ramp_tokens` in all."""
    first = stage.get("ramp_from", 0)
    sizes = range(first, batch_size, first) if first else range(0)
    steps = round(stage.get("ramp_tokens", 0.0) / (stage.length * sum(sizes))) if sizes else 0
    return [(steps, size) for size in sizes]


def changes_of(stage: ml_collections.ConfigDict) -> dict[str, Any]:
    """Returns {field of the config: value} of what a stage of `config.stages` changes."""
    found = {}
    for name, value in stage.items():
        if isinstance(value, ml_collections.ConfigDict):
            found |= {f"{name}.{field}": x for field, x in value.items()}
        elif name not in (*REQUIRED, *OPTIONAL):
            found[name] = value
    return found


def config_in(config: ml_collections.ConfigDict, stage: Stage) -> ml_collections.ConfigDict:
    """Returns the config as it is during a stage."""
    found = config.copy_and_resolve_references().unlock()
    for field, value in stage.changes.items():
        section, _, name = field.rpartition(".")
        (found[section] if section else found)[name] = value
    return found.lock()


def config_after(config: ml_collections.ConfigDict, step: int) -> ml_collections.ConfigDict:
    """Returns the config as it was in the last of `step` updates: also what a checkpoint of that step is used with."""
    stages = stages_of(config)
    return config_in(config, stages[stage_index(stages, step - 1)])


def stage_index(stages: Sequence[Stage], step: int) -> int:
    """Returns the index of the stage that contains `step`; after the run, the index of the last stage."""
    return next((index for index, stage in enumerate(stages) if step < stage.end_step), len(stages) - 1)


def total_steps(config: ml_collections.ConfigDict) -> int:
    """Returns the number of steps of all stages of pre-training."""
    return sum(stage.steps for stage in stages_of(config))


def steps_for(stages: list[Stage], tokens: float) -> int:
    """Returns in how many steps the first stages have so many tokens."""
    steps = 0
    for stage in stages:
        in_stage = math.ceil(tokens / stage.tokens_per_step)
        if in_stage <= stage.steps:
            return steps + in_stage
        steps, tokens = steps + stage.steps, tokens - stage.steps * stage.tokens_per_step
    return steps
