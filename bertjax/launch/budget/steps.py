"""Measures the steps of a run, and computes the number of steps that a budget allows."""

import contextlib
import math
import time
from collections.abc import Mapping
from typing import Any, NamedTuple

import jax
from etils import epath
from ml_collections import ConfigDict

from bertjax.common.errors import UserError
from bertjax.common.progress import duration
from bertjax.config import budget
from bertjax.config.stages import Stage, batch_size_parts, stages_of, total_steps
from bertjax.data.records.manifest import read_manifest
from bertjax.distributed import hosts
from bertjax.distributed.transfers import copy_to_devices
from bertjax.launch.budget import choice
from bertjax.training.hooks.recurrent_memory import fill_recurrent_memory
from bertjax.training.optim.schedules import schedule_of
from bertjax.training.run import Run
from bertjax.training.step import Program, put_hyperparameters

MEASURED_SECONDS, MOST_MEASURED_STEPS = 4.0, 200
MOST_COMPILING_SECONDS = 60.0  # fine-tuning has batches of many shapes; each shape compiles the step
END_SECONDS = 8.0  # for filling masks and drawing the page about the run
SPARE = 0.03  # fraction of the time that the plan leaves free, because other programs run as well
MOST_EVALUATIONS, EVALUATION_EVERY = 10, 120.0  # evaluations of a run, and seconds of steps between evaluations
CHECKPOINT_SECONDS, LOG_SECONDS = 300.0, 10.0  # seconds between checkpoints, and between lines of the log
TOKEN_FIELDS, WARMUP_FIELDS = ("tokens", "ramp_tokens"), ("warmup_steps", "warmup_tokens")


class StepTimes(NamedTuple):
    """Seconds of a run: all steps with the present config, one evaluation, and the compilation of the steps."""

    steps: float
    evaluation: float
    compiling: float


def measure_steps(opened: Run, program: Program) -> StepTimes:
    """Runs a few steps of one stage of each length, on the first batches of this stage, from random params."""
    task, config, mesh = opened.task, opened.config, opened.mesh
    hyperparameters = put_hyperparameters(config.seed, schedule_of(config, task.total_steps), mesh)
    stages = _stages(config, task.total_steps)
    # The time of another stage of the same length follows from its FLOPs.
    largest = {stage.length: stage for stage in sorted(stages, key=lambda stage: stage.batch_size)}
    compiling, flops_per_second = 0.0, {}
    for stage in largest.values():
        state = program.init(jax.random.key(config.seed))
        if task.carry:
            state = fill_recurrent_memory(task, program, state, mesh, 0, lambda text: None)
        train_step = program.step_of(*task.loss_and_config(stage.first_step))
        compiled, first_seconds, seconds, flops = set(), 0.0, 0.0, 0
        with contextlib.closing(copy_to_devices(task.batches(stage.first_step), mesh)) as batches:
            for step in range(stage.first_step, stage.first_step + min(stage.steps, MOST_MEASURED_STEPS)):
                began = time.perf_counter()
                batch = next(batches)
                shapes = tuple(x.shape for x in jax.tree.leaves(batch))
                state, metrics = train_step(state, batch, hyperparameters)
                jax.block_until_ready(metrics)
                if shapes in compiled or stage.steps == 1:
                    seconds, flops = seconds + time.perf_counter() - began, flops + task.flops(step, step + 1)
                else:
                    first_seconds += time.perf_counter() - began
                    compiled.add(shapes)
                is_enough = seconds > MEASURED_SECONDS or (first_seconds > MOST_COMPILING_SECONDS and flops > 0)
                if hosts.as_on_first(int(is_enough)):  # all hosts run the same steps
                    break
        del state
        compiling += first_seconds
        flops = flops or task.flops(stage.first_step, stage.first_step + 1)
        flops_per_second[stage.length] = flops / (seconds or first_seconds)
    total = sum(task.flops(stage.first_step, stage.end_step) / flops_per_second[stage.length] for stage in stages)
    return StepTimes(total, _evaluation_seconds(opened, total), compiling)


def _stages(config: ConfigDict, steps: int) -> list[Stage]:
    """Returns the stages of pre-training; fine-tuning has one stage."""
    if "stages" in config:
        return stages_of(config)
    return [Stage(config.task, steps, config.max_seq_length, 0, config.batch_size)]


def _evaluation_seconds(opened: Run, steps_seconds: float) -> float:
    """Estimates the time of an evaluation: a sequence takes a third of its time in training."""
    task: Any = opened.task  # fine-tuning tasks have data
    trained = sum(stage.steps * stage.batch_size for stage in _stages(opened.config, task.total_steps))
    if "stages" in opened.config:
        sequences = opened.config.eval.max_sequences
    else:
        sequences = sum(len(split.examples) for split in task.data.dev)
    return steps_seconds / trained * sequences / 3


def fields_that_fit(
    opened: Run, workdir: epath.Path, spent: budget.Budget, measured: StepTimes, elapsed: float
) -> dict[str, Any]:
    """Returns the config fields with which a run takes its budget.

    Pre-training gets more or fewer steps; a recipe has at most `MOST_EPOCHS` epochs. Fine-tuning gets only fewer steps,
    because more epochs than the experiment has rarely help.

    Args:
      opened: the run.
      workdir: the folder of the run.
      spent: the budget.
      measured: the times of the run without changes.
      elapsed: the seconds since the start of the command.

    Raises:
      UserError: there is no time for a step.
    """
    config, total = opened.config, opened.task.total_steps
    if "stages" not in config:
        return _fine_tuning_fields(config, total, spent, measured, elapsed)
    step_seconds = measured.steps / total
    step_fields = ("steps", *TOKEN_FIELDS)
    if any(name.startswith("stages.") and name.rpartition(".")[2] in step_fields for name in config.overrides):
        return fields_of_steps(config, total, step_seconds) if config.recipe else {}
    tokens = sum(stage.steps * stage.tokens_per_step for stage in stages_of(config))
    if math.isfinite(spent.tokens):
        factor = spent.tokens / tokens
        if factor * total < 1:
            least = math.ceil(tokens / total)
            raise UserError(
                f"config.budget = {config.budget!r}: a step has {least:,} tokens; set {10 * least} tokens or more"
            )
    else:
        factor = _factor_that_fits(config, total, spent.seconds - elapsed, measured)
        if config.recipe and (unique := unique_tokens(config, workdir)):
            factor = min(factor, choice.MOST_EPOCHS * unique / tokens)
        require_steps(config, factor * total, elapsed + other_seconds(measured, 1))
    stages = scaled_stages(config, factor)
    steps = total_steps(ConfigDict({"stages": stages, "batch_size": config.batch_size}))
    if config.recipe:
        return {"stages": stages} | fields_of_steps(config, steps, step_seconds)
    fields = {
        "stages": stages,
        "optimizer.warmup_steps": math.ceil(config.optimizer.warmup_steps * factor),
        "optimizer.warmup_tokens": config.optimizer.warmup_tokens * factor,
        "adapt.new_pieces_first": math.ceil(config.adapt.new_pieces_first * factor),
        "eval.every_steps": min(config.eval.every_steps, -(-steps // 2)),
        "log_every_steps": max(1, min(config.log_every_steps, -(-steps // 10))),
    }
    if not config.checkpoint.keep_every:
        often = _steps_in(CHECKPOINT_SECONDS, step_seconds, steps)
        fields["checkpoint.every_steps"] = min(config.checkpoint.every_steps, often)
    return fields


def _fine_tuning_fields(
    config: ConfigDict, total: int, spent: budget.Budget, measured: StepTimes, elapsed: float
) -> dict[str, Any]:
    """Returns the number of epochs that fits, or no field if all epochs fit, see `fields_that_fit`."""
    count = total / config.eval.every_steps if config.eval.every_steps else config.epochs
    # One evaluation is at the end. The number of the other evaluations is proportional to the number of steps.
    left = spent.seconds - elapsed - END_SECONDS - 0.5 * measured.compiling - measured.evaluation
    factor = (1 - SPARE) * left / (measured.steps + max(0.0, count - 1) * measured.evaluation)
    if factor >= 1 or "epochs" in config.overrides:
        return {}
    require_steps(config, factor * total, elapsed + END_SECONDS)
    return {"epochs": float(f"{config.epochs * factor:.3g}")}


def _factor_that_fits(config: ConfigDict, total: int, left: float, measured: StepTimes) -> float:
    """Returns the factor for the number of steps (`total`) with which the run takes the seconds that are left."""
    factor = 1.0
    for _ in range(4):  # the number of evaluations depends on the number of steps
        count = evaluations(config, factor * total, factor * measured.steps)
        factor = max(0.0, (1 - SPARE) * (left - other_seconds(measured, count)) / measured.steps)
    return factor


def evaluations(config: ConfigDict, steps: float, seconds: float) -> int:
    """Returns the number of evaluations of a run.

    Args:
      config: the config of the run.
      steps: the number of steps.
      seconds: the time of all steps.
    """
    if config.get("recipe") and "eval.every_steps" not in config.overrides:
        return max(1, min(MOST_EVALUATIONS, round(seconds / EVALUATION_EVERY)))
    every = config.eval.every_steps
    if "stages" in config and "eval.every_steps" not in config.overrides:
        every = min(every, max(1, math.ceil(steps / 2)))
    return max(1, math.ceil(steps / every)) if every else math.ceil(config.epochs)


def other_seconds(measured: StepTimes, count: int) -> float:
    """Returns the time of a run without its steps: `count` evaluations with their compilation, and the report."""
    return count * measured.evaluation + 0.7 * measured.compiling + END_SECONDS


def require_steps(config: ConfigDict, steps: float, least: float) -> None:
    """Raises `UserError` if `steps` is less than 1. `least`: the seconds of the run without steps."""
    if steps < 1:
        raise UserError(
            f"config.budget = {config.budget!r}: reading, compiling and the report take about {duration(least)} here, "
            f"so that no step is left; set --config.budget={in_units(3 * least)} or more"
        )


def scaled_stages(config: ConfigDict, factor: float) -> dict[str, dict[str, Any]]:
    """Returns `config.stages` with the numbers of steps and tokens multiplied by a factor.

    A growing batch size (`ramp_from`) becomes constant if `ramp_tokens` is too small for a step of each batch size.
    """
    stages = {}
    for name, fields in config.stages.items():
        scaled = ConfigDict(fields.to_dict())
        batch_size = fields.get("batch_size", config.batch_size)
        if fields.get("steps"):
            scaled.steps = max(1, math.floor(fields.steps * factor))
        for field in TOKEN_FIELDS:
            if fields.get(field):
                scaled[field] = float(max(fields.length * batch_size, math.floor(fields[field] * factor)))
        if fields.get("ramp_from") and len(batch_size_parts(scaled, batch_size)) < 2:
            scaled.ramp_from, scaled.ramp_tokens = 0, 0.0
        optimizer = scaled.get("optimizer", {})
        for field in WARMUP_FIELDS:
            if optimizer.get(field):
                optimizer[field] = type(optimizer[field])(optimizer[field] * factor)
        stages[name] = scaled.to_dict()
    return stages


def fields_of_steps(config: ConfigDict, steps: int, seconds: float | None) -> dict[str, Any]:
    """Returns the fields that depend on the number of steps, and on the seconds of a step if these are known."""
    fields: dict[str, Any] = {"optimizer.warmup_steps": max(1, min(10_000, steps // 20))}
    if seconds is not None:
        fields["eval.every_steps"] = -(-steps // evaluations(config, steps, steps * seconds))
        fields["log_every_steps"] = min(100, _steps_in(LOG_SECONDS, seconds, steps))
        if not config.checkpoint.keep_every:
            fields["checkpoint.every_steps"] = _steps_in(CHECKPOINT_SECONDS, seconds, steps)
    return fields


def _steps_in(seconds: float, step_seconds: float, steps: int) -> int:
    """Returns the number of steps that take `seconds`: at least 1, at most `steps`."""
    return max(1, min(steps, round(seconds / step_seconds)))


def manifest_or_empty(config: ConfigDict, workdir: epath.Path) -> Mapping[str, Any]:
    """Returns the manifest of the records; empty if the records have no manifest."""
    return read_manifest(config.data.records or workdir / "records") or {}


def unique_tokens(config: ConfigDict, workdir: epath.Path) -> int | None:
    """Returns the number of tokens of the training text; None if the manifest does not have this number."""
    return manifest_or_empty(config, workdir).get("corpus", {}).get("train_tokens")


def in_units(seconds: float) -> str:
    """Formats a time as a budget: "3min"."""
    minutes = max(1, math.ceil(seconds / 60))
    return f"{minutes}min" if minutes < 120 else f"{math.ceil(minutes / 60)}h"
