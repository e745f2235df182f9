"""Grid search over hyperparameters (Devlin et al. 2019, appendix A.3): runs its trials in one process, compiled once.

Each trial is a run in its own workdir, `WORKDIR/runs/NAME`. `WORKDIR/best` names the best trial on the dev set; only
this trial keeps its checkpoint.
"""

import copy
import dataclasses
import itertools
import json
import math
from collections.abc import Sequence

import jax
import ml_collections
import numpy as np
from etils import epath

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
from bertjax.finetuning.run import RunInputs
from bertjax.finetuning.validate import validate
from bertjax.inference import tasks
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
from bertjax.training.run import run as run_one
from bertjax.training.step import Program, make_program

SUMMARY = "sweep.md"
ORDER = ("batch_size", "learning_rate", "epochs", "seed")  # the table's last columns, in this order
# Fields of the optimizer that do not need another program: the numbers of a schedule are inputs of a step.
NOT_COMPILED = ("learning_rate", "warmup_proportion", "decay_proportion")
NEXT_SEED = 1000  # added to the seed of a failed trial
MARGIN = 1e-3  # a trial has failed unless it is better than `TaskData.baseline` by more than this


@dataclasses.dataclass(frozen=True)
class Result:
    """The result of a finished trial. `failed`: not better than the baseline, or diverged."""

    settings: dict
    scores: dict
    failed: bool


def parse(config) -> list[dict]:
    """Returns the settings of all trials of `config.sweep`: "learning_rate=5e-5,3e-5 seed=0,1" or "paper seed=0,1".

    Raises `UserError` for a field that cannot be searched, or a value of the wrong type.
    """
    text, paper, searchable = config.sweep, tasks.get(config.task).paper_sweep, fields_of(config)
    values: dict[str, list] = {}
    words = [setting for word in text.split() for setting in (paper.split() if word == "paper" else [word])]
    for word in words:
        name, _, given = word.partition("=")
        if not given or name not in searchable:
            raise UserError(
                f"config.sweep = {text!r}: {word!r} is not understood; write 'paper' or settings such as {paper!r}; "
                f"fields: {', '.join(searchable)}"
            )
        kind = type(value_of(config, searchable[name]))
        try:
            values[name] = list(dict.fromkeys(_parsed(kind, value) for value in split_at_commas(given)))
        except ValueError:
            raise UserError(
                f"config.sweep = {text!r}: {given!r}: invalid values for {name} ({kind.__name__})"
            ) from None
    names = sorted(values, key=_place)
    return [dict(zip(names, chosen)) for chosen in itertools.product(*(values[name] for name in names))]


def fields_of(config) -> dict[str, str]:
    """Returns {name: field} of the searchable fields. All others determine the data or the encoder."""
    fields = [
        "batch_size",
        "epochs",
        "seed",
        "freeze_layers",
        *(f"model.{name}" for name in dropout_fields(config.model)),
    ]
    fields += [
        f"{section}.{name}"
        for section in ("optimizer", "head", "loss", "lora")
        for name, value in config.get(section, {}).items()
        if not isinstance(value, ml_collections.ConfigDict)
    ]
    return {field.rpartition(".")[2]: field for field in fields}


def _parsed(kind: type, value: str):
    if kind is bool:
        if value not in ("True", "False"):
            raise ValueError(value)
        return value == "True"
    return kind(value)


def _place(name: str) -> tuple[int, str]:
    return (ORDER.index(name) if name in ORDER else -1, name)


def trials(config) -> list[tuple[dict, object]]:
    """Returns (settings, config) of all trials of a search. Raises `UserError` if one is invalid."""
    planned = [(settings, _with(config, settings)) for settings in parse(config)]
    for _, trial in planned:
        validate(trial)
    return planned


def name_of(settings: dict) -> str:
    """Returns the name of a trial's workdir: "batch_size=16,learning_rate=5e-05"."""
    return ",".join(f"{name}={_cell(value)}" for name, value in settings.items()).replace("/", "+")  # it is a folder


def _cell(value) -> str:
    return f"{value:g}" if isinstance(value, float) else str(value)


def refuse_search(workdir: epath.Path) -> None:
    """Raises `UserError` if the workdir of a single run holds a search."""
    if (workdir / TRIALS).exists():
        raise UserError(f"{workdir}: holds a search, and this is a single run; choose another --workdir")


def run(config, workdir: epath.Path, hooks: Sequence[Hook] = ()) -> None:
    """Runs the trials that have not finished, prints the table and writes it to `sweep.md`. All trials call the hooks.

    Repeats a failed trial with up to `config.restarts` other seeds; failed trials stay in the table.
    """
    if (workdir / CONFIG).exists():
        raise UserError(f"{workdir}: holds a single run, and this is a search; choose another --workdir")
    is_first, programs, results = jax.process_index() == 0, {}, []
    config, decisions = finetuning_run.resolve(config, None)
    if is_first and decisions:
        print(*decisions, sep="\n", flush=True)
    planned = trials(config)  # with the adopted model
    for _, trial in planned:
        make_mesh(trial)
    inputs = finetuning_run.load_inputs(config, workdir, None)
    data = inputs.data
    if is_first and data.notes:
        print("\n".join(data.notes), flush=True)
    check_others(workdir, config, inputs)
    for _, trial in planned:
        data.head.loss_with_settings(trial, data.labels, data.train)

    queue = [(settings, config.restarts) for settings, _ in planned]
    while queue:
        settings, restarts = queue.pop(0)
        trial_workdir, trial = workdir / TRIALS / name_of(settings), _with(config, settings)
        result = read_result(trial_workdir, settings, trial)
        if result is None:
            if is_first:
                print(f"trial {name_of(settings)} ({len(queue)} remaining)", flush=True)
            result = _run_trial(trial, trial_workdir, settings, inputs, programs, hooks)
        results.append(result)
        hosts.wait_for_all("trial done")  # before its checkpoints may be deleted
        if is_first:
            best = keep_best(workdir, data.metric)
            summary = f"{table(results, (data.metric, *data.more_metrics))}\n{best}\n"
            write_whole(workdir / SUMMARY, summary)
        if result.failed and restarts:
            taken = {name_of(other) for other, _ in queue} | {name_of(other.settings) for other in results}
            again = {**settings, "seed": settings.get("seed", config.seed) + NEXT_SEED}
            while name_of(again) in taken:
                again["seed"] += NEXT_SEED
            queue.insert(0, (again, restarts - 1))
    if is_first:
        print(summary, end="", flush=True)


class _TrialKind(finetuning_run.FineTuningKind):
    """A trial of a search, which has read the data and adopted the fields of `init_checkpoint`."""

    def __init__(self, inputs: RunInputs):
        self._inputs = inputs

    def resolve(self, config: ml_collections.ConfigDict, info: RunInfo | None) -> Resolution:
        return Resolution(ResolvedConfig.copy_of(config))

    def open(self, config: ResolvedConfig, workdir: epath.Path, info: RunInfo | None) -> Run:
        return finetuning_run.open_run(config, self._inputs)


def _run_trial(
    trial, workdir: epath.Path, settings: dict, inputs: RunInputs, programs: dict, hooks: Sequence[Hook]
) -> Result:
    """Runs a trial and writes its result. `programs` holds the programs of earlier trials, by compiled-in fields."""

    def with_program(opened: Run) -> tuple[Run, Program]:
        inputs = set(NOT_COMPILED) - ({"learning_rate"} if optimizers.has_constant_peak(trial.optimizer) else set())
        compiled_in = {name: value for name, value in trial.optimizer.to_dict().items() if name not in inputs}
        content = [compiled_in, trial.head.to_dict(), dict(trial.get("loss", {})), trial.freeze_layers]
        key = (opened.task.model, json.dumps(content, sort_keys=True))
        if key not in programs:
            programs[key] = make_program(opened.task, opened.config, opened.mesh)
        return opened, programs[key]

    data = inputs.data
    steps = count_steps(trial, data.count(trial.batch_size))
    if not trial.eval.patience:
        trial.eval.every_steps = trial.eval.every_steps or steps  # once, at the end
    try:
        trained = run_one(_TrialKind(inputs), trial, workdir, with_program, is_trial=True, hooks=hooks)
        if trained is not None:
            scores = trained.best_scores or trained.scores
        else:  # training had finished, but the result was not written
            scores = checkpoint.read_scores(workdir, checkpoint.best_step(workdir) or steps)
        is_better = _number(scores.scores[data.metric]) > data.baseline + MARGIN
        result = Result(settings, scores.scores, failed=not is_better)
    except DivergenceError as error:
        result = Result(settings, {data.metric: None}, True)
        if jax.process_index() == 0:
            print(error, flush=True)
    if jax.process_index() == 0:
        baseline = {"metric": data.metric, "baseline": data.baseline}
        content = {"scores": result.scores, "failed": result.failed, **baseline}
        write_whole(workdir / TRIAL_RESULT, json.dumps(content) + "\n")
    return result


def check_others(workdir: epath.Path, config, inputs: RunInputs) -> None:
    """Raises `UserError` if existing trials differ from these in more than the searched fields."""
    now, identity = finetuning_run.info_of(config, inputs), tasks.get(config.task).identity
    fields, searched = fields_of(config), {*ORDER, *(name for settings in parse(config) for name in settings)}
    for path in sorted((workdir / TRIALS).glob(f"*/{CONFIG}")):
        named = {part.partition("=")[0] for part in path.parent.name.split(",")}
        may_differ = {fields.get(name) for name in searched | named}
        found = differences(require_info(path.parent), now, identity)
        _refuse(path.parent, [difference for difference in found if difference.field not in may_differ])


def _refuse(workdir: epath.Path, found: list[Difference]) -> None:
    """Raises `UserError` if there is any difference."""
    raise_if_fatal(
        workdir, [difference for difference in found if difference.field in ("labels", "tokenizer", "fingerprints")]
    )
    if found:
        changed = "; ".join(map(str, found))
        raise UserError(f"{workdir}: trained with other settings, {changed}; choose another --workdir")


def _rank(scores: dict, metric: str) -> tuple[bool, float]:
    """Returns a sort key, higher is better; a missing score, as of a diverged trial, ranks last."""
    return scores.get(metric) is not None, _number(scores.get(metric))


def table(results: list[Result], metrics: Sequence[str]) -> str:
    """Formats Markdown: mean, best and standard deviation over the seeds of each setting, including failed trials."""
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
        cells = [*map(_cell, values)]
        for metric in metrics:
            scores = [100 * _number(r.scores.get(metric)) for r in group]
            spread = f"{np.std(scores, ddof=1):.2f}" if len(scores) > 1 else ""
            cells += [f"{np.mean(scores):.2f}", f"{max(scores):.2f}", spread]
        lines.append("| " + " | ".join([*cells, str(len(group)), str(sum(r.failed for r in group))]) + " |")
    return "\n".join(lines) + "\n"


def _number(score: float | None) -> float:
    """Returns the score; 0 if it is undefined, such as the correlation of a constant."""
    return 0.0 if score is None or math.isnan(score) else score


def _with(config, settings: dict):
    changed = copy.deepcopy(config)
    for name, value in settings.items():
        section, _, field = fields_of(config)[name].rpartition(".")
        (changed[section] if section else changed)[field] = value
    changed.update(sweep="", restarts=0)  # a single run
    return changed


def read_result(workdir: epath.Path, settings: dict, trial) -> Result | None:
    """Reads the result of a trial; None if it has not finished. Raises `UserError` if it had other settings."""
    if (before := read_info(workdir)) is not None:
        _refuse(workdir, differences(before, RunInfo(trial)))
    path = workdir / TRIAL_RESULT
    if not path.exists():
        return None
    result = read_json(path, TrialResult)
    return Result(settings, result["scores"], result["failed"])


def keep_best(workdir: epath.Path, metric: str) -> str:
    """Writes the name of the best trial in the workdir, of any search, and deletes the checkpoints of the others.

    Returns a line that names it.
    """
    ranks = {}
    for path in sorted((workdir / TRIALS).glob(f"*/{TRIAL_RESULT}")):
        has_checkpoint = checkpoint.folder_of(path.parent).exists()
        ranks[path.parent] = (*_rank(read_json(path, TrialResult)["scores"], metric), has_checkpoint)
    top = max(ranks, key=ranks.get)
    write_whole(workdir / BEST_RUN, f"{TRIALS}/{top.name}\n")
    for trial in ranks:
        if trial != top and (rest := checkpoint.folder_of(trial)).exists():
            rest.rmtree()
    return f"best: {TRIALS}/{top.name}, {metric} {100 * ranks[top][1]:.2f}"
