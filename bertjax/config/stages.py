"""The stages of pre-training in the order of training, with their lengths, batch sizes and changed fields.

A stage of `config.stages` has a length, and steps or tokens. A stage may also have a `batch_size`, `microbatches`, an
`objective`, and sections `data`, `model` and `optimizer` with the fields that may change while a model is trained
(`pretraining.stage_fields.changeable_fields`). All other fields have the values of the config.
"""

import collections
import dataclasses
import math
from collections.abc import Sequence
from typing import Any

import ml_collections

REQUIRED = ("steps", "length", "max_predictions_per_seq")  # fields of a stage
OPTIONAL = {"tokens": 0.0, "ramp_from": 0, "ramp_tokens": 0.0}
MOST_BATCH_SIZES = 64  # largest number of sizes of a growing batch; the step is compiled for each size


@dataclasses.dataclass(frozen=True)
class Stage:
    """A stage, or a part of a stage with one batch size.

    Attributes:
      name: the name of the stage in `config.stages`.
      steps: the number of updates.
      length: the sequence length.
      max_predictions_per_seq: the largest number of predicted tokens in a sequence.
      batch_size: the number of sequences in a step.
      first_step: the number of steps of the run before the stage.
      sequences_before: the number of training sequences of this length before the stage.
      grows: whether the stage continues with a larger batch.
      changes: {field: value}: the fields whose values differ from the config, and the batch size.
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
        """The number of tokens of a step, with padding."""
        return self.batch_size * self.length


def predictions_for(masked_lm_prob: float, length: int) -> int:
    """Returns the largest number of masks in a sequence: 20 of 128 tokens for a share of 0.15."""
    return min(length, int(masked_lm_prob * length) + 1)


def stages_of(config: ml_collections.ConfigDict) -> list[Stage]:
    """Returns the stages in the order of training: short sequences first (Devlin et al. 2019, A.2), then by name.

    A stage with a growing batch becomes several stages, with equally many steps for each multiple of `ramp_from`.
    """
    stages: list[Stage] = []
    first_step, sequences = 0, collections.Counter[int]()  # sequences by length
    for name, fields in sorted(config.stages.items(), key=lambda item: (item[1].length, item[0])):
        shape = fields.length, fields.max_predictions_per_seq
        for steps, batch_size, grows in batch_size_parts(fields, fields.get("batch_size", config.batch_size)):
            changes = changes_of(fields) | {"batch_size": batch_size}
            before = sequences[fields.length]
            stages.append(Stage(name, steps, *shape, batch_size, first_step, before, grows, changes))
            first_step += steps
            sequences[fields.length] += steps * batch_size
    return stages


def batch_size_parts(stage: ml_collections.ConfigDict, batch_size: int) -> list[tuple[int, int, bool]]:
    """Returns (steps, batch size, whether the batch grows afterwards) of the parts of a stage that have steps."""
    growing = ramp_of(stage, batch_size)
    if stage.get("tokens"):
        left = stage.tokens - stage.length * sum(steps * size for steps, size in growing)
        last = max(0, round(left / (stage.length * batch_size)))
    else:
        last = max(0, stage.steps - sum(steps for steps, _ in growing))
    parts = [(steps, size, True) for steps, size in growing] + [(last, batch_size, False)]
    return [part for part in parts if part[0]]


def ramp_of(stage: ml_collections.ConfigDict, batch_size: int) -> list[tuple[int, int]]:
    """Returns (steps, batch size) for all sizes below `batch_size`, with `ramp_tokens` tokens in total."""
    first = stage.get("ramp_from", 0)
    sizes = range(first, batch_size, first) if first else range(0)
    steps = round(stage.get("ramp_tokens", 0.0) / (stage.length * sum(sizes))) if sizes else 0
    return [(steps, size) for size in sizes]


def changes_of(stage: ml_collections.ConfigDict) -> dict[str, Any]:
    """Returns {config field: value} of the fields that a stage of `config.stages` changes."""
    changes: dict[str, Any] = {}
    for name, value in stage.items():
        if isinstance(value, ml_collections.ConfigDict):
            changes |= {f"{name}.{field}": x for field, x in value.items()}
        elif name not in (*REQUIRED, *OPTIONAL):
            changes[name] = value
    return changes


def config_in(config: ml_collections.ConfigDict, stage: Stage) -> ml_collections.ConfigDict:
    """Returns the config with the values of a stage."""
    changed = config.copy_and_resolve_references().unlock()
    changed.update_from_flattened_dict(stage.changes)
    return changed.lock()


def config_after(config: ml_collections.ConfigDict, step: int) -> ml_collections.ConfigDict:
    """Returns the config of the last of `step` updates, with which a checkpoint of the step is used."""
    stages = stages_of(config)
    return config_in(config, stages[stage_index(stages, step - 1)])


def stage_index(stages: Sequence[Stage], step: int) -> int:
    """Returns the index of the stage that contains `step`; after the run, the index of the last stage."""
    return next((index for index, stage in enumerate(stages) if step < stage.end_step), len(stages) - 1)


def total_steps(config: ml_collections.ConfigDict) -> int:
    """Returns the number of steps of all stages of pre-training."""
    return sum(stage.steps for stage in stages_of(config))


def steps_for(stages: list[Stage], tokens: float) -> int:
    """Returns the number of steps in which the stages have `tokens` tokens."""
    steps = 0
    for stage in stages:
        in_stage = math.ceil(tokens / stage.tokens_per_step)
        if in_stage <= stage.steps:
            return steps + in_stage
        steps, tokens = steps + stage.steps, tokens - stage.steps * stage.tokens_per_step
    return steps
