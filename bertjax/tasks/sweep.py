"""The search over hyperparameters (Devlin et al. 2019, appendix A.3): run after run in one process, compiled once.

Each run has a workdir of its own, `WORKDIR/runs/NAME`; `WORKDIR/best` names the one that is best on the dev set, and
only that one keeps its checkpoint.
"""

import copy
import dataclasses
import functools
import itertools
import json
import math
from collections.abc import Sequence

import jax
import numpy as np
from etils import epath

from bertjax import tasks
from bertjax.config import UserError
from bertjax.files import write_whole
from bertjax.interop.pretrained import BEST_RUN
from bertjax.sharding.mesh import make_mesh
from bertjax.tasks import finetuning
from bertjax.tasks.finetuning import Material, count_steps
from bertjax.training import checkpoint
from bertjax.training.loop import Diverged
from bertjax.training.run import Run
from bertjax.training.run import run as run_one
from bertjax.training.step import Program, make_program
from bertjax.training.workdir import CONFIG, Difference, Record, differences, read_record, refuse, require_record
from bertjax.validation import value_of

RUNS, RESULT, SUMMARY = "runs", "result.json", "sweep.md"
ORDER = ("batch_size", "learning_rate", "epochs", "seed")  # of the table's columns; the others stand before them
NOT_COMPILED = (
    "learning_rate",
    "warmup_proportion",
)  # of the optimizer's fields; the others need a program of their own
NEXT_SEED = 1000  # added to that of a run that failed
MARGIN = 1e-3  # by which a run has to be better than always giving the same answer


@dataclasses.dataclass(frozen=True)
class Result:
    """One finished run. `failed`: no better than always giving the same answer, or its loss was not a number."""

    settings: dict
    scores: dict
    failed: bool


def parse(config) -> list[dict]:
    """The settings of all runs of `config.sweep`, such as "learning_rate=5e-5,3e-5 seed=0,1" or "paper seed=0,1".

    Raises `UserError` for a name that is not a field to search over, or a value of another type than the field's.
    """
    text, paper, searchable = config.sweep, tasks.get(config.task).paper_sweep, fields_of(config)
    values: dict[str, list] = {}
    for word in text.replace("paper", paper).split():
        name, _, given = word.partition("=")
        if not given or name not in searchable:
            raise UserError(
                f"config.sweep = {text!r}: {word!r} is not understood; give fields and values such as {paper!r}, of "
                f"{', '.join(searchable)}, or 'paper'"
            )
        kind = type(value_of(config, searchable[name]))
        try:
            values[name] = list(dict.fromkeys(_parsed(kind, value) for value in given.split(",")))
        except ValueError:
            raise UserError(f"config.sweep = {text!r}: {given!r} are not values for {name} ({kind.__name__})") from None
    names = sorted(values, key=_place)
    return [dict(zip(names, chosen)) for chosen in itertools.product(*(values[name] for name in names))]


def fields_of(config) -> dict[str, str]:
    """What can be searched over: names, and where they stand in a config. All else decides the data or the encoder."""
    fields = ["batch_size", "epochs", "seed", "model.hidden_dropout_prob", "model.attention_probs_dropout_prob"]
    fields += [f"{section}.{name}" for section in ("optimizer", "head") for name in config.get(section, {})]
    return {field.rpartition(".")[2]: field for field in fields}


def _parsed(kind: type, value: str):
    if kind is bool:
        return {"True": True, "False": False}.get(value) if value in ("True", "False") else int("not a boolean")
    return kind(value)


def _place(name: str) -> tuple[int, str]:
    return (ORDER.index(name) if name in ORDER else -1, name)


def shared_batch_size(config) -> int:
    """The largest number that divides the batch sizes of all runs, so that the same devices serve for each of them."""
    return math.gcd(*(trial.batch_size for _, trial in trials(config)))


def trials(config) -> list[tuple[dict, object]]:
    """(settings, config) of all runs of a config's sweep. Raises `UserError` where one of them is not valid."""
    planned = [(settings, _with(config, settings)) for settings in parse(config)]
    for _, trial in planned:
        tasks.validate(trial)
    return planned


def name_of(settings: dict) -> str:
    """The folder of a run: "batch_size=16,learning_rate=5e-05"."""
    return ",".join(f"{name}={_cell(value)}" for name, value in settings.items())


def _cell(value) -> str:
    return f"{value:g}" if isinstance(value, float) else str(value)


def refuse_search(folder: epath.Path) -> None:
    """Raises `UserError` where a workdir holds a search, for a single run."""
    if (folder / RUNS).exists():
        raise UserError(f"{folder}: holds a search, and this is a single run; choose another --workdir")


def run(config, folder: epath.Path) -> None:
    """Does the runs that are not done yet, and prints the table, which lies in `sweep.md`.

    A run that failed is followed by up to `config.restarts` others with other seeds, and stays in the table.
    """
    if (folder / CONFIG).exists():
        raise UserError(f"{folder}: holds a single run, and this is a search; choose another --workdir")
    is_first, programs, results = jax.process_index() == 0, {}, []
    finetuning.adopt(config, None)
    planned = trials(config)  # now that the model is known
    for _, trial in planned:
        make_mesh(trial)
    material = finetuning.load_material(config, folder, None)
    dataset = material.dataset
    if is_first:
        print("\n".join(dataset.notes), flush=True)
    check_others(folder, config, material)

    queue = [(settings, config.restarts) for settings, _ in planned]
    while queue:
        settings, restarts = queue.pop(0)
        trial_folder, trial = folder / RUNS / name_of(settings), _with(config, settings)
        result = read_result(trial_folder, settings, trial)
        if result is None:
            if is_first:
                print(f"run {name_of(settings)}, {len(queue)} to come", flush=True)
            result = _run_trial(trial, trial_folder, settings, material, programs)
        results.append(result)
        if is_first:
            keep_best(folder, dataset.metric)
            write_whole(folder / SUMMARY, table(results, (dataset.metric, *dataset.more_metrics)))
        if result.failed and restarts:
            taken = {name_of(other) for other, _ in queue} | {name_of(other.settings) for other in results}
            again = {**settings, "seed": settings.get("seed", config.seed) + NEXT_SEED}
            while name_of(again) in taken:
                again["seed"] += NEXT_SEED
            queue.insert(0, (again, restarts - 1))
    if is_first:
        print(table(results, (dataset.metric, *dataset.more_metrics)), end="", flush=True)


def _run_trial(trial, folder: epath.Path, settings: dict, material: Material, programs: dict) -> Result:
    """Does one run, and writes its result. `programs` are those of the runs before it, by what was compiled in."""

    def program_of(opened: Run) -> Program:
        compiled_in = {name: value for name, value in trial.optimizer.items() if name not in NOT_COMPILED}
        key = (opened.task.model, json.dumps(compiled_in, sort_keys=True))
        if key not in programs:
            programs[key] = make_program(opened.task, opened.config, opened.mesh)
        return programs[key]

    dataset = material.dataset
    steps = count_steps(trial, len(dataset.train))
    trial.eval.every_steps = trial.eval.every_steps or steps  # once, at the end
    kind = dataclasses.replace(finetuning.KIND, open=functools.partial(finetuning.open_run, material=material))
    try:
        trained = run_one(kind, trial, folder, program_of, is_trial=True)
        # None: it had ended before, but for its result.
        scores = trained.best if trained else checkpoint.read_scores(folder, checkpoint.best_step(folder) or steps)
        is_better = _number(scores.scores[dataset.metric]) > dataset.baseline + MARGIN
        result = Result(settings, scores.scores, failed=not is_better)
    except Diverged as error:
        result = Result(settings, {dataset.metric: None}, True)
        if jax.process_index() == 0:
            print(error, flush=True)
    if jax.process_index() == 0:
        write_whole(folder / RESULT, json.dumps({"scores": result.scores, "failed": result.failed}) + "\n")
    return result


def check_others(folder: epath.Path, config, material: Material) -> None:
    """Raises `UserError` where runs lie there that cannot be compared with these: only what is searched may differ."""
    now, identity = finetuning.record_of(config, material), tasks.get(config.task).identity
    fields, searched = fields_of(config), {*ORDER, *(name for settings in parse(config) for name in settings)}
    for path in sorted((folder / RUNS).glob(f"*/{CONFIG}")):
        named = {part.partition("=")[0] for part in path.parent.name.split(",")}
        may_differ = {fields.get(name) for name in searched | named}
        found = differences(require_record(path.parent), now, identity)
        _refuse(path.parent, [difference for difference in found if difference.field not in may_differ])


def _refuse(folder: epath.Path, found: list[Difference]) -> None:
    """Raises `UserError` where there is any difference."""
    refuse(folder, [difference for difference in found if difference.field in ("labels", "tokenizer")])
    if found:
        changed = "; ".join(map(str, found))
        raise UserError(f"{folder}: made with other settings, {changed}; choose another --workdir")


def best(results: list[Result], metric: str) -> Result:
    return max(results, key=lambda result: _rank(result.scores, metric))


def _rank(scores: dict, metric: str) -> tuple[bool, float]:
    """Higher is better; a run whose loss was not a number is worse than any other."""
    return scores[metric] is not None, _number(scores[metric])


def table(results: list[Result], metrics: Sequence[str]) -> str:
    """Markdown: for each setting but the seed the mean, best and standard deviation over its runs, failed ones too.

    The first of the metrics says which run is best.
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
        cells = [*map(_cell, values)]
        for metric in metrics:
            scores = [100 * _number(r.scores.get(metric)) for r in group]
            spread = f"{np.std(scores, ddof=1):.2f}" if len(scores) > 1 else ""
            cells += [f"{np.mean(scores):.2f}", f"{max(scores):.2f}", spread]
        lines.append("| " + " | ".join([*cells, str(len(group)), str(sum(r.failed for r in group))]) + " |")
    top = best(results, metrics[0])
    best_line = f"best: {RUNS}/{name_of(top.settings)}, {metrics[0]} {100 * _number(top.scores[metrics[0]]):.2f}"
    return "\n".join([*lines, "", best_line]) + "\n"


def _number(score: float | None) -> float:
    """A score that is not a number, such as the correlation of a constant, counts as 0."""
    return 0.0 if score is None or math.isnan(score) else score


def _with(config, settings: dict):
    changed = copy.deepcopy(config)
    for name, value in settings.items():
        section, _, field = fields_of(config)[name].rpartition(".")
        (changed[section] if section else changed)[field] = value
    changed.update(sweep="", restarts=0)  # a run by itself
    return changed


def read_result(folder: epath.Path, settings: dict, trial) -> Result | None:
    """What a finished run came to; None where it has not finished. Raises `UserError` if it had other settings."""
    if (before := read_record(folder)) is not None:
        _refuse(folder, differences(before, Record(trial)))
    path = folder / RESULT
    return Result(settings, **json.loads(path.read_text())) if path.exists() else None


def keep_best(folder: epath.Path, metric: str) -> None:
    """Names the best of all runs that lie there, those of other searches too, and removes the others' checkpoints."""
    ranks = {}
    for path in sorted((folder / RUNS).glob(f"*/{RESULT}")):
        has_checkpoint = checkpoint.folder_of(path.parent).exists()
        ranks[path.parent] = (*_rank(json.loads(path.read_text())["scores"], metric), has_checkpoint)
    top = max(ranks, key=ranks.get)
    write_whole(folder / BEST_RUN, f"{RUNS}/{top.name}\n")
    for trial in ranks:
        if trial != top and (rest := checkpoint.folder_of(trial)).exists():
            rest.rmtree()
