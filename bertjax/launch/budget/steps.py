"""Measures the steps of a run, and computes how many of them a budget allows."""

import contextlib
import copy
import math
import time
from collections.abc import Mapping
from typing import Any, NamedTuple

import jax
import ml_collections
from etils import epath

from bertjax.common.errors import UserError
from bertjax.common.progress import duration
from bertjax.config import budget
from bertjax.config.stages import Stage, parts_of, stages_of
from bertjax.data.records.manifest import read_manifest
from bertjax.distributed import hosts
from bertjax.distributed.transfers import on_devices
from bertjax.launch.budget import choice
from bertjax.training.hooks.recurrent_memory import fill_recurrent_memory
from bertjax.training.optim.schedules import schedule_of
from bertjax.training.run import Run
from bertjax.training.step import Program, put_hyperparameters

MEASURED_SECONDS, MOST_MEASURED_STEPS = 4.0, 200
MOST_COMPILING_SECONDS = 60.0  # fine-tuning has batches of many shapes, each of which compiles the step
END_SECONDS = 8.0  # filling masks and drawing the page about the run
SPARE = 0.03  # share of the time that is left free: other programs run as well
MOST_EVALUATIONS, EVALUATION_EVERY = 10, 120.0  # seconds of steps
CHECKPOINT_SECONDS, LOG_SECONDS = 300.0, 10.0  # from one checkpoint, and from one line, to the next
STEP_FIELDS = ("steps", "tokens", "ramp_tokens")


class StepTimes(NamedTuple):
    """Seconds of all steps of a run as it is configured, of one evaluation, and of compiling the steps."""

    steps: float
    evaluation: float
    compiling: float


def measure(opened: Run, program: Program) -> StepTimes:
    """Runs a few steps of one stage of each length, on the first batches of this stage, from random params."""
    task, config, mesh = opened.task, opened.config, opened.mesh
    hyperparameters = put_hyperparameters(config.seed, schedule_of(config, task.total_steps), mesh)
    compiling, rates = 0.0, {}
    for part in measured_stages(config, task.total_steps):
        state = program.init(jax.random.key(config.seed))
        if task.carry:
            state = fill_recurrent_memory(task, program, state, mesh, 0, lambda text: None)
        train_step = program.step_of(*task.loss_and_config(part.first_step))
        compiled, first, seconds, flops = set(), 0.0, 0.0, 0
        with contextlib.closing(on_devices(task.batches(part.first_step), mesh)) as batches:
            for step in range(part.first_step, part.first_step + min(part.steps, MOST_MEASURED_STEPS)):
                began = time.perf_counter()
                batch = next(batches)
                shapes = tuple(x.shape for x in jax.tree.leaves(batch))
                state, metrics = train_step(state, batch, hyperparameters)
                jax.block_until_ready(metrics)
                if shapes in compiled or part.steps == 1:
                    seconds, flops = seconds + time.perf_counter() - began, flops + task.flops(step, step + 1)
                else:
                    first += time.perf_counter() - began
                    compiled.add(shapes)
                is_enough = seconds > MEASURED_SECONDS or (first > MOST_COMPILING_SECONDS and flops > 0)
                if hosts.as_on_first(int(is_enough)):  # all hosts run the same steps
                    break
        del state
        compiling += first
        rates[part.length] = (flops or task.flops(part.first_step, part.first_step + 1)) / (seconds or first)
    parts = _parts(config, task.total_steps)
    total = sum(task.flops(part.first_step, part.end_step) / rates[part.length] for part in parts)
    return StepTimes(total, _evaluation_seconds(opened, total), compiling)


def _parts(config, total_steps: int) -> list[Stage]:
    """Returns the stages of pre-training; fine-tuning has one."""
    if "stages" in config:
        return stages_of(config)
    return [Stage(config.task, total_steps, config.max_seq_length, 0, config.batch_size)]


def measured_stages(config, total_steps: int) -> list[Stage]:
    """Returns the largest stage of each length. Only these stages are measured; the time of another stage of this
    length follows from its FLOPs."""
    found: dict[int, Stage] = {}
    for part in _parts(config, total_steps):
        if part.length not in found or part.batch_size >= found[part.length].batch_size:
            found[part.length] = part
    return list(found.values())


def _evaluation_seconds(opened: Run, steps_seconds: float) -> float:
    """Estimates an evaluation: a sequence takes a third of the time that it takes in training."""
    task, config = opened.task, opened.config
    trained = sum(part.steps * part.batch_size for part in _parts(config, task.total_steps))
    dev = () if "stages" in config else task.dataset.dev
    sequences = config.eval.max_sequences if "stages" in config else sum(len(split.examples) for split in dev)
    return steps_seconds / trained * sequences / 3


def fields_that_fit(
    opened: Run, workdir: epath.Path, spent: budget.Budget, measured: StepTimes, elapsed: float
) -> dict[str, Any]:
    """Returns the fields with which a run takes its budget.

    The steps of pre-training become more or fewer, but a recipe ends after `MOST_EPOCHS`; those of fine-tuning become
    only fewer, because more epochs than the experiment has rarely help. Raises `UserError` if there is no time for a
    step.
    """
    config, total = opened.config, opened.task.total_steps
    if "stages" not in config:
        count = total / config.eval.every_steps if config.eval.every_steps else config.epochs
        # There is one evaluation at the end, and those before it become fewer with the steps.
        left = spent.seconds - elapsed - END_SECONDS - 0.5 * measured.compiling - measured.evaluation
        factor = (1 - SPARE) * left / (measured.steps + max(0.0, count - 1) * measured.evaluation)
        if factor >= 1 or "epochs" in config.overrides:
            return {}
        _require_steps(config, spent, factor * total, elapsed + END_SECONDS)
        return {"epochs": float(f"{config.epochs * factor:.3g}")}
    if any(name.startswith("stages.") and name.rpartition(".")[2] in STEP_FIELDS for name in config.overrides):
        return fields_of_steps(config, total, measured.steps / total) if config.recipe else {}
    now = sum(part.steps * part.tokens_per_step for part in stages_of(config))
    if math.isfinite(spent.tokens):
        factor = spent.tokens / now
        if factor * total < 1:
            least = math.ceil(now / total)
            raise UserError(
                f"config.budget = {config.budget!r}: a step has {least:,} tokens; set {10 * least} tokens or more"
            )
    else:
        factor = factor_that_fits(config, total, spent.seconds - elapsed, measured)
        if config.recipe and (unique := unique_tokens(config, workdir)):
            factor = min(factor, choice.MOST_EPOCHS * unique / now)
        _require_steps(config, spent, factor * total, elapsed + reserve(measured, 1))
    stages = scaled_stages(config, factor)
    scaled = copy.deepcopy(config)
    with scaled.unlocked():
        scaled.stages = ml_collections.ConfigDict(stages)
    new_total = sum(part.steps for part in stages_of(scaled))
    fields = {"stages": stages}
    if config.recipe:
        return fields | fields_of_steps(config, new_total, measured.steps / total)
    fields["optimizer.warmup_steps"] = math.ceil(config.optimizer.warmup_steps * factor)
    fields["optimizer.warmup_tokens"] = config.optimizer.warmup_tokens * factor
    fields["adapt.new_pieces_first"] = math.ceil(config.adapt.new_pieces_first * factor)
    fields["eval.every_steps"] = min(config.eval.every_steps, -(-new_total // 2))
    if not config.checkpoint.keep_every:
        seconds = measured.steps / total
        often = max(1, min(new_total, round(CHECKPOINT_SECONDS / seconds)))
        fields["checkpoint.every_steps"] = min(config.checkpoint.every_steps, often)
    fields["log_every_steps"] = max(1, min(config.log_every_steps, -(-new_total // 10)))
    return fields


def factor_that_fits(config, total: int, left: float, measured: StepTimes) -> float:
    """Returns the factor for the number of steps (`total`) with which the run takes the seconds that are left."""
    factor = 1.0
    for _ in range(4):  # the number of evaluations depends on the number of steps
        count = evaluations(config, factor * total, factor * measured.steps)
        factor = max(0.0, (1 - SPARE) * (left - reserve(measured, count)) / measured.steps)
    return factor


def evaluations(config, steps: float, seconds: float) -> int:
    """Returns the number of evaluations of a run. `seconds`: of all its steps."""
    if config.get("recipe") and "eval.every_steps" not in config.overrides:
        return max(1, min(MOST_EVALUATIONS, round(seconds / EVALUATION_EVERY)))
    is_set = "stages" not in config or "eval.every_steps" in config.overrides
    every = config.eval.every_steps if is_set else min(config.eval.every_steps, max(1, math.ceil(steps / 2)))
    return max(1, math.ceil(steps / every)) if every else math.ceil(config.epochs)


def reserve(measured: StepTimes, count: int) -> float:
    """Returns the seconds of a run besides its steps: of `count` evaluations, which are compiled, and the report."""
    return count * measured.evaluation + 0.7 * measured.compiling + END_SECONDS


def _require_steps(config, spent: budget.Budget, steps: float, least: float) -> None:
    if steps < 1:
        raise UserError(
            f"config.budget = {config.budget!r}: reading, compiling and the report take about {duration(least)} here, "
            f"so that no step is left; set --config.budget={in_units(3 * least)} or more"
        )


def scaled_stages(config, factor: float) -> dict[str, dict]:
    """Returns `config.stages` with the numbers of steps and tokens multiplied by a factor.

    If the tokens in which a batch grows are then too few for a step of each batch size, the batch does not grow.
    """
    stages = {}
    for name, given in config.stages.items():
        changed = ml_collections.ConfigDict(given.to_dict())
        batch_size = given.get("batch_size", config.batch_size)
        for field in STEP_FIELDS:
            if given.get(field):
                value = given[field] * factor
                least = 1 if field == "steps" else given.length * batch_size * 1.0
                changed[field] = type(least)(max(least, math.floor(value)))
        if given.get("ramp_from") and (not parts_of(changed, batch_size) or len(parts_of(changed, batch_size)) < 2):
            changed.ramp_from, changed.ramp_tokens = 0, 0.0
        optimizer = changed.get("optimizer", {})
        for field in ("warmup_steps", "warmup_tokens"):
            if optimizer.get(field):
                optimizer[field] = type(optimizer[field])(optimizer[field] * factor)
        stages[name] = changed.to_dict()
    return stages


def fields_of_steps(config, steps: int, seconds: float | None) -> dict[str, Any]:
    """Returns the fields that depend on the number of steps, and on the seconds of one if they are known."""
    fields: dict[str, Any] = {"optimizer.warmup_steps": max(1, min(10_000, steps // 20))}
    if seconds is not None:
        fields["eval.every_steps"] = -(-steps // evaluations(config, steps, steps * seconds))
        if not config.checkpoint.keep_every:
            fields["checkpoint.every_steps"] = max(1, min(steps, round(CHECKPOINT_SECONDS / seconds)))
        fields["log_every_steps"] = max(1, min(100, steps, round(LOG_SECONDS / seconds)))
    return fields


def manifest_of(config, workdir: epath.Path) -> Mapping:
    """Returns the manifest of the records; empty if they have none."""
    return read_manifest(config.data.records or workdir / "records") or {}


def unique_tokens(config, workdir: epath.Path) -> int | None:
    """Returns the tokens of the text that is trained on; None if the records do not have their number."""
    manifest = manifest_of(config, workdir)
    return manifest.get("corpus", {}).get("train_tokens")


def in_units(seconds: float) -> str:
    """Formats a time as a budget: "3min"."""
    minutes = max(1, math.ceil(seconds / 60))
    return f"{minutes}min" if minutes < 120 else f"{math.ceil(minutes / 60)}h"
