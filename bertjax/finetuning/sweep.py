"""Sweeps: grids of hyperparameters (Devlin et al. 2019, appendix A.3). Trials share a process and compiled functions.

Each trial is a run in its own workdir, `WORKDIR/runs/NAME`. `WORKDIR/best` names the best trial on the dev set. Only
the best trial keeps its checkpoints.
"""

import copy
import dataclasses
import itertools
import json
import math
from collections.abc import Sequence
from typing import Any

import jax
import numpy as np
from etils import epath
from ml_collections import ConfigDict

from bertjax.common.errors import UserError
from bertjax.common.files import read_json, write_whole
from bertjax.config.limits import value_of
from bertjax.config.lists import split_at_commas
from bertjax.config.model_config import dropout_fields
from bertjax.config.resolved import Resolution, ResolvedConfig
from bertjax.data.loading.examples import count_steps
from bertjax.distributed import hosts
from bertjax.distributed.mesh import make_mesh
from bertjax.finetuning import run as finetuning_run
from bertjax.finetuning.run import FineTuningRun, RunInputs
from bertjax.finetuning.validate import validate
from bertjax.inference import tasks
from bertjax.inference.losses import couples_rows
from bertjax.interop.pretrained import BEST_RUN
from bertjax.training.checkpoints import checkpoint
from bertjax.training.checkpoints.workdir import (
    CONFIG,
    TRIAL_RESULT,
    TRIALS,
    Difference,
    RunInfo,
    TrialResult,
    differences,
    raise_if_fatal,
    read_info,
    require_info,
)
from bertjax.training.hooks.divergence import DivergenceError
from bertjax.training.hooks.hook import Hook
from bertjax.training.optim import optimizers
from bertjax.training.run import Run
from bertjax.training.run import run_training as run_one
from bertjax.training.step import Program

SUMMARY = "sweep.md"
Settings = dict[str, Any]  # the values of the varied fields of a trial by name
ORDER = ("batch_size", "learning_rate", "epochs", "seed")  # the last columns of the table
FIXED = ("loss.name", "loss.guide", "loss.negatives")  # determine the training examples, which all trials share
# Fields of the optimizer that are not constants of a compiled step, because the schedule is an input of the step.
NOT_COMPILED = ("learning_rate", "warmup_proportion", "decay_proportion")
NEXT_SEED = 1000  # added to the seed of a failed trial
MARGIN = 1e-3  # a trial has failed if the score is not above `TaskData.baseline` plus this number


@dataclasses.dataclass(frozen=True)
class Result:
    """The result of a finished trial.

    Attributes:
      settings: the values of the varied fields by name.
      scores: the scores on the dev set.
      failed: whether training diverged, or the score is not better than the baseline.
    """

    settings: Settings
    scores: dict[str, float | None]
    failed: bool


def parse_sweep(config: ConfigDict) -> list[Settings]:
    """Returns the settings of all trials of `config.sweep`: "learning_rate=5e-5,3e-5 seed=0,1" or "paper seed=0,1".

    Raises:
      UserError: for a field that a sweep cannot change, or a value of the wrong type.
    """
    text, paper, fields = config.sweep, tasks.get(config.task).paper_sweep, sweep_fields(config)
    values: dict[str, list] = {}
    words = [setting for word in text.split() for setting in (paper.split() if word == "paper" else [word])]
    for word in words:
        name, _, listed = word.partition("=")
        if not listed or name not in fields:
            raise UserError(
                f"config.sweep = {text!r}: {word!r} is not a setting; write 'paper' or settings such as {paper!r}; "
                f"the fields are {', '.join(fields)}"
            )
        field_type = type(value_of(config, fields[name]))
        try:
            values[name] = list(dict.fromkeys(_parsed(field_type, value) for value in split_at_commas(listed)))
        except ValueError:
            raise UserError(
                f"config.sweep = {text!r}: {listed!r}: invalid values for {name} ({field_type.__name__})"
            ) from None
    names = sorted(values, key=_place)
    return [dict(zip(names, chosen)) for chosen in itertools.product(*(values[name] for name in names))]


def sweep_fields(config: ConfigDict) -> dict[str, str]:
    """Returns {name: field} of the fields that a sweep can change. Other fields determine the data or the encoder.

    `name` is the name of the optimizer, not the name of the loss.
    """
    fields = ["batch_size", "epochs", "seed", "freeze_layers"]
    fields += [f"model.{name}" for name in dropout_fields(config.model)]
    fields += [
        f"{section}.{name}"
        for section in ("optimizer", "head", "loss", "lora")
        for name, value in config.get(section, {}).items()
        if not isinstance(value, ConfigDict) and f"{section}.{name}" not in FIXED
    ]
    return {field.rpartition(".")[2]: field for field in fields}


def _parsed(field_type: type, value: str) -> Any:
    if field_type is bool:
        return ("False", "True").index(value) == 1
    return field_type(value)


def _place(name: str) -> tuple[int, str]:
    return (ORDER.index(name) if name in ORDER else -1, name)


def trials(config: ConfigDict) -> list[tuple[Settings, ConfigDict]]:
    """Returns (settings, config) of all trials of a sweep. Raises `UserError` if a trial is invalid."""
    planned = [(settings, _with(config, settings)) for settings in parse_sweep(config)]
    for _, trial in planned:
        validate(trial)
    return planned


def trial_name(settings: Settings) -> str:
    """Returns the name of the workdir of a trial: "batch_size=16,learning_rate=5e-05"."""
    return ",".join(f"{name}={_cell(value)}" for name, value in settings.items()).replace("/", "+")


def _cell(value: Any) -> str:
    return f"{value:g}" if isinstance(value, float) else str(value)


def refuse_sweep(workdir: epath.Path) -> None:
    """Raises `UserError` if the workdir of a single run holds a sweep."""
    if (workdir / TRIALS).exists():
        raise UserError(f"{workdir}: holds a sweep, and this is a single run; choose another --workdir")


def run_sweep(config: ConfigDict, workdir: epath.Path, hooks: Sequence[Hook] = ()) -> None:
    """Runs the trials that have not finished, prints the table of results, and writes the table to `sweep.md`.

    Repeats a failed trial with up to `config.restarts` other seeds. The table contains the failed trials.

    Args:
      config: the validated config of the sweep.
      workdir: the folder of the sweep.
      hooks: the hooks of each trial.

    Raises:
      UserError: if a trial is invalid, or if the workdir contains another sweep or a single run.
    """
    if (workdir / CONFIG).exists():
        raise UserError(f"{workdir}: holds a single run, and this is a sweep; choose another --workdir")
    programs: dict[tuple, Program] = {}
    results: list[Result] = []
    config, decisions = finetuning_run.resolve(config, None)
    _print_first(*decisions)
    planned = trials(config)
    for _, trial in planned:
        make_mesh(trial)
    inputs = finetuning_run.load_inputs(config, workdir, None)
    data, summary = inputs.data, ""
    _print_first(*data.notes)
    check_others(workdir, config, inputs)
    for _, trial in planned:
        data.head.loss_with_settings(trial, data.labels, data.train)

    queue = [(settings, config.restarts) for settings, _ in planned]
    while queue:
        settings, restarts = queue.pop(0)
        trial_workdir, trial = workdir / TRIALS / trial_name(settings), _with(config, settings)
        result = read_result(trial_workdir, settings, trial)
        if result is None:
            _print_first(f"trial {trial_name(settings)} ({len(queue)} remaining)")
            result = _run_trial(trial, trial_workdir, settings, inputs, programs, hooks)
        results.append(result)
        hosts.wait_for_all("trial done")  # `keep_best` may delete the checkpoints of the trial.
        if jax.process_index() == 0:
            best = keep_best(workdir, data.metric)
            summary = f"{format_results(results, (data.metric, *data.more_metrics))}\n{best}"
            write_whole(workdir / SUMMARY, f"{summary}\n")
        if result.failed and restarts:
            planned_settings = [*(pending for pending, _ in queue), *(finished.settings for finished in results)]
            queue.insert(0, (_with_next_seed(settings, config.seed, planned_settings), restarts - 1))
    _print_first(summary)


def _print_first(*lines: str) -> None:
    """Prints lines on the first host."""
    if lines and jax.process_index() == 0:
        print(*lines, sep="\n", flush=True)


def _with_next_seed(settings: Settings, seed: int, planned_settings: Sequence[Settings]) -> Settings:
    """Returns settings with a new seed: the earlier seed, by default `seed`, plus a multiple of `NEXT_SEED`."""
    names = set(map(trial_name, planned_settings))
    seeds = itertools.count(settings.get("seed", seed) + NEXT_SEED, NEXT_SEED)
    return next(settings | {"seed": seed} for seed in seeds if trial_name(settings | {"seed": seed}) not in names)


class _TrialKind(finetuning_run.FineTuningKind):
    """A trial of a sweep, whose config has the fields of `init_checkpoint`. All trials share the data."""

    def __init__(self, inputs: RunInputs) -> None:
        self._inputs = inputs

    def resolve(self, config: ConfigDict, info: RunInfo | None) -> Resolution:
        """Returns a copy of the config, which the sweep has resolved."""
        return Resolution(ResolvedConfig.copy_of(config))

    def open(self, config: ResolvedConfig, workdir: epath.Path, info: RunInfo | None) -> Run:
        """Opens the run without the notes about the data."""
        return finetuning_run.open_run(config, self._inputs)


def _run_trial(
    trial: ConfigDict,
    workdir: epath.Path,
    settings: Settings,
    inputs: RunInputs,
    programs: dict[tuple, Program],
    hooks: Sequence[Hook],
) -> Result:
    """Runs a trial and writes the result. `programs` has the compiled functions of earlier trials, to be shared."""

    def with_program(opened: Run) -> tuple[Run, Program]:
        step_inputs = {*NOT_COMPILED} - ({"learning_rate"} if optimizers.has_constant_peak(trial.optimizer) else set())
        compiled_in = {name: value for name, value in trial.optimizer.to_dict().items() if name not in step_inputs}
        content = [compiled_in, trial.head.to_dict(), dict(trial.get("loss", {})), trial.freeze_layers]
        assert isinstance(opened, FineTuningRun)
        label_loss = opened.task.loss.label_loss  # A loss of several examples may depend on the size of a batch.
        coupled_loss = label_loss if couples_rows(label_loss) else None
        key = (opened.task.model, json.dumps(content, sort_keys=True), coupled_loss)
        if key not in programs:
            programs[key] = Program(opened.task, opened.config, opened.mesh)
        return opened, programs[key]

    data = inputs.data
    steps = count_steps(trial, data.count(trial.batch_size))
    if not trial.eval.patience:
        trial.eval.every_steps = trial.eval.every_steps or steps  # By default, evaluates at the end only.
    try:
        trained = run_one(_TrialKind(inputs), trial, workdir, with_program, is_trial=True, hooks=hooks)
        scores = None if trained is None else trained.best_scores or trained.scores
        if scores is None:  # An earlier process finished training, but did not write the result.
            scores = checkpoint.read_scores(workdir, checkpoint.best_step(workdir) or steps)
        values = {} if scores is None else scores.scores
        is_better = _number(values.get(data.metric)) > data.baseline + MARGIN
        result = Result(settings, values, failed=not is_better)
    except DivergenceError as error:
        result = Result(settings, {data.metric: None}, True)
        _print_first(str(error))
    if jax.process_index() == 0:
        baseline = {"metric": data.metric, "baseline": data.baseline}
        content = {"scores": result.scores, "failed": result.failed, **baseline}
        write_whole(workdir / TRIAL_RESULT, json.dumps(content) + "\n")
    return result


def check_others(workdir: epath.Path, config: ConfigDict, inputs: RunInputs) -> None:
    """Raises `UserError` if an earlier trial in the workdir differs from this sweep in a field that is not varied."""
    now, identity = finetuning_run.info_of(config, inputs), tasks.get(config.task).identity
    fields, varied = sweep_fields(config), {*ORDER, *(name for settings in parse_sweep(config) for name in settings)}
    for path in sorted((workdir / TRIALS).glob(f"*/{CONFIG}")):
        varied_earlier = {part.partition("=")[0] for part in path.parent.name.split(",")}
        may_differ = {fields.get(name) for name in varied | varied_earlier}
        all_differences = differences(require_info(path.parent), now, identity)
        _refuse(path.parent, [difference for difference in all_differences if difference.field not in may_differ])


def _refuse(workdir: epath.Path, changes: list[Difference]) -> None:
    """Raises `UserError` if there is any difference."""
    raise_if_fatal(workdir, [change for change in changes if change.field in ("labels", "tokenizer", "fingerprints")])
    if changes:
        changed = "; ".join(map(str, changes))
        raise UserError(f"{workdir}: trained with other settings, {changed}; choose another --workdir")


def format_results(results: list[Result], metrics: Sequence[str]) -> str:
    """Returns a Markdown table: mean, best and standard deviation over the seeds of each setting.

    Args:
      results: the results of all trials, also of failed trials.
      metrics: the names of the metrics.
    """
    names = sorted({name for r in results for name in r.settings if name != "seed"}, key=_place)
    groups: dict[tuple, list[Result]] = {}
    for result in results:
        groups.setdefault(tuple(result.settings[name] for name in names), []).append(result)
    titles = [name.replace("_", " ") for name in names]
    for metric in metrics:
        titles += [f"{metric}, mean", "best", "standard deviation"]
    titles += ["runs", "failed"]
    lines = ["| " + " | ".join(titles) + " |", "|" + "---|" * len(titles)]
    for values, group in groups.items():
        cells = list(map(_cell, values))
        for metric in metrics:
            scores = [100 * _number(r.scores.get(metric)) for r in group]
            spread = f"{np.std(scores, ddof=1):.2f}" if len(scores) > 1 else ""
            cells += [f"{np.mean(scores):.2f}", f"{max(scores):.2f}", spread]
        lines.append("| " + " | ".join([*cells, str(len(group)), str(sum(r.failed for r in group))]) + " |")
    return "\n".join(lines) + "\n"


def _number(score: float | None) -> float:
    """Returns the score; 0 for an undefined score, such as the correlation of a constant."""
    return 0.0 if score is None or math.isnan(score) else score


def _with(config: ConfigDict, settings: Settings) -> ConfigDict:
    """Returns the config of a trial."""
    changed = copy.deepcopy(config)
    for name, value in settings.items():
        section, _, field = sweep_fields(config)[name].rpartition(".")
        (changed[section] if section else changed)[field] = value
    changed.update(sweep="", restarts=0)  # A trial is a single run.
    return changed


def read_result(workdir: epath.Path, settings: Settings, trial: ConfigDict) -> Result | None:
    """Returns the result of a trial; None if the trial has not finished.

    Args:
      workdir: the folder of the trial.
      settings: the values of the varied fields.
      trial: the config of the trial.

    Raises:
      UserError: if the trial in the folder had another config.
    """
    if (previous := read_info(workdir)) is not None:
        _refuse(workdir, differences(previous, RunInfo(trial)))
    path = workdir / TRIAL_RESULT
    if not path.exists():
        return None
    result = read_json(path, TrialResult)
    return Result(settings, result["scores"], result["failed"])


def keep_best(workdir: epath.Path, metric: str) -> str:
    """Writes the name of the best trial to the workdir, and deletes the checkpoints of the other trials.

    The trials are the trials of all sweeps in the workdir. A trial without a score ranks last.

    Returns:
      A line about the best trial.
    """
    ranks: dict[epath.Path, tuple[bool, float, bool]] = {}
    for path in sorted((workdir / TRIALS).glob(f"*/{TRIAL_RESULT}")):
        score = read_json(path, TrialResult)["scores"].get(metric)
        ranks[path.parent] = score is not None, _number(score), checkpoint.folder_of(path.parent).exists()
    top = max(ranks, key=lambda trial: ranks[trial])
    write_whole(workdir / BEST_RUN, f"{TRIALS}/{top.name}\n")
    for trial in ranks:
        if trial != top and (folder := checkpoint.folder_of(trial)).exists():
            folder.rmtree()
    return f"best: {TRIALS}/{top.name}, {metric} {100 * ranks[top][1]:.2f}"
