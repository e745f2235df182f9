"""The search over hyperparameters (Devlin et al. 2019, appendix A.3): run after run in one process, compiled once.

Each run has a workdir of its own, `WORKDIR/runs/NAME`; `WORKDIR/best` names the one that is best on the dev set, which
alone keeps its checkpoint.
"""

import copy
import dataclasses
import itertools
import json
import math
from collections.abc import Callable, Sequence

import jax
import numpy as np
from etils import epath
from jax.sharding import Mesh

from bertjax.config import FEATURE_LAYERS, UserError, validate
from bertjax.files import write_whole
from bertjax.tasks.finetuning import Dataset, FineTuning, report
from bertjax.text.tokenizer import Tokenizer
from bertjax.training import checkpoint, run_folder
from bertjax.training.loop import Diverged, make_program, train

PAPER = "batch_size=16,32 learning_rate=5e-5,4e-5,3e-5,2e-5 epochs=2,3,4"
PAPER_FEATURES = f"layers={','.join(FEATURE_LAYERS)}"  # table 7
# In the order of the table.
FIELDS = {"layers": str, "batch_size": int, "learning_rate": float, "epochs": float, "seed": int}
SECTIONS = {"layers": "head", "learning_rate": "optimizer"}  # where they stand in a config
RESULT, TABLE = "result.json", "sweep.md"
NEXT_SEED = 1000  # added to that of a run that failed
MARGIN = 1e-3  # by which a run has to be better than always giving the same answer


@dataclasses.dataclass(frozen=True)
class Result:
    """One finished run. `failed`: no better than always giving the same answer, or its loss was no number."""

    settings: dict
    scores: dict
    failed: bool


def parse(text: str, paper: str = PAPER) -> list[dict]:
    """The settings of all runs of `config.sweep`, such as "learning_rate=5e-5,3e-5 seed=0,1" or "paper seed=0,1".

    Raises `UserError` for what is no field or no number.
    """
    values: dict[str, list] = {}
    for word in text.replace("paper", paper).split():
        name, _, numbers = word.partition("=")
        if name not in FIELDS or not numbers:
            raise UserError(
                f"config.sweep = {text!r}: {word!r} is not understood; give fields and values such as {PAPER!r}, of "
                f"{', '.join(FIELDS)}, or 'paper'"
            )
        try:
            values[name] = list(dict.fromkeys(FIELDS[name](number) for number in numbers.split(",")))
        except ValueError:
            raise UserError(f"config.sweep = {text!r}: {numbers!r} are not numbers for {name}") from None
    names = [name for name in FIELDS if name in values]
    return [dict(zip(names, chosen)) for chosen in itertools.product(*(values[name] for name in names))]


def shared_batch_size(config) -> int:
    """What the batch sizes of all runs are multiples of, so that the same devices serve for each of them."""
    return math.gcd(*(trial.batch_size for _, trial in plan(config)))


def plan(config) -> list[tuple[dict, object]]:
    """(settings, config) of all runs of a config's sweep. Raises `UserError` where one of them is not valid."""
    runs = parse(config.sweep, PAPER_FEATURES if config.task == "features" else PAPER)
    if "layers" in runs[0] and config.task != "features":
        raise UserError(f"config.sweep = {config.sweep!r}: layers are for experiments/features.py")
    planned = [(settings, _with(config, settings)) for settings in runs]
    for _, trial in planned:
        validate(trial)
    return planned


def name_of(settings: dict) -> str:
    """The folder of a run: "batch_size=16,learning_rate=5e-05"."""
    return ",".join(f"{name}={_cell(value)}" for name, value in settings.items())


def _cell(value) -> str:
    return f"{value:g}" if isinstance(value, float) else str(value)


def run(config, workdir: epath.Path, mesh: Mesh, dataset: Dataset, tokenizer: Tokenizer, initialize: Callable) -> str:
    """Does the runs that are not done yet; returns the table, which lies in `sweep.md`.

    A run that failed is followed by up to `config.restarts` others with other seeds, and stays in the table.
    """
    is_first, programs, results = jax.process_index() == 0, {}, []
    check_others(workdir, config, dataset, tokenizer)
    queue = [(settings, config.restarts) for settings, _ in plan(config)]
    while queue:
        settings, restarts = queue.pop(0)
        folder, trial = workdir / run_folder.RUNS / name_of(settings), _with(config, settings)
        result = read_result(folder, settings, trial)
        if result is None:
            task = FineTuning(trial, mesh, dataset)
            trial.eval.every_steps = trial.eval.every_steps or task.total_steps
            if task.model not in programs:
                programs[task.model] = make_program(task, trial, mesh)
            if is_first:
                run_folder.write_config(folder, trial, tokenizer, dataset.objective.architecture, dataset.labels)
                print(f"run {name_of(settings)}, {len(queue)} to come", flush=True)
            try:
                scores = train(task, trial, folder, mesh, initialize, programs[task.model])[1]
                result = Result(settings, scores, not scores[dataset.metric] > dataset.baseline + MARGIN)
            except Diverged as error:
                result = Result(settings, {dataset.metric: None}, True)
                if is_first:
                    print(error, flush=True)
            if is_first:
                for name, content in task.files.items():
                    write_whole(folder / name, content)
                write_whole(folder / RESULT, json.dumps({"scores": result.scores, "failed": result.failed}) + "\n")
                run_folder.write_report(folder, report(result.scores))
        results.append(result)
        if is_first:
            keep_best(workdir, dataset.metric)
            write_whole(workdir / TABLE, table(results, (dataset.metric, *dataset.more_metrics)))
        if result.failed and restarts:
            taken = {name_of(other) for other, _ in queue} | {name_of(other.settings) for other in results}
            again = {**settings, "seed": settings.get("seed", config.seed) + NEXT_SEED}
            while name_of(again) in taken:
                again["seed"] += NEXT_SEED
            queue.insert(0, (again, restarts - 1))
    return table(results, (dataset.metric, *dataset.more_metrics))


def check_others(workdir: epath.Path, config, dataset: Dataset, tokenizer: Tokenizer) -> None:
    """Raises `UserError` where runs lie there that cannot be compared with these: of other data, a task of its own."""
    for path in sorted((workdir / run_folder.RUNS).glob(f"*/{run_folder.CONFIG}")):
        folder, before = path.parent, run_folder.read_config(path.parent)
        # Only what a search is over may differ between them.
        fields = [name for name in FIELDS if name != "layers" or config.task == before.task == "features"]
        alike = _with(config, {name: _section(before, name)[name] for name in fields})
        run_folder.check_task(folder, alike)
        run_folder.check_tokenizer(folder, tokenizer)
        run_folder.check_labels(folder, dataset.labels)
        if changed := run_folder.changes(folder, alike):
            raise UserError(f"{folder}: made with other settings, {'; '.join(changed)}; take another --workdir")


def best(results: list[Result], metric: str) -> Result:
    return max(results, key=lambda result: _rank(result.scores, metric))


def _rank(scores: dict, metric: str) -> tuple[bool, float]:
    """Higher is better; a run whose loss was no number is worse than any other."""
    return scores[metric] is not None, _number(scores[metric])


def table(results: list[Result], metrics: Sequence[str]) -> str:
    """Markdown: for each setting but the seed the mean, best and standard deviation over its runs, failed ones too.

    The first of the metrics says which run is best.
    """
    names = [name for name in FIELDS if name != "seed" and any(name in r.settings for r in results)]
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
    said = f"best: {run_folder.RUNS}/{name_of(top.settings)}, {metrics[0]} {100 * _number(top.scores[metrics[0]]):.2f}"
    return "\n".join([*lines, "", said]) + "\n"


def _number(score: float | None) -> float:
    """A score that is no number, a correlation of a constant, is none at all."""
    return 0.0 if score is None or math.isnan(score) else score


def _with(config, settings: dict):
    changed = copy.deepcopy(config)
    for name, value in settings.items():
        _section(changed, name)[name] = value
    changed.update(sweep="", restarts=0)  # a run by itself
    return changed


def _section(config, name: str):
    """The part of a config that a field of `FIELDS` stands in."""
    return config[SECTIONS[name]] if name in SECTIONS else config


def read_result(folder: epath.Path, settings: dict, config) -> Result | None:
    """What a finished run came to. Raises `UserError` where it was done with other settings than these."""
    if (folder / run_folder.CONFIG).exists() and (changed := run_folder.changes(folder, config)):
        raise UserError(f"{folder}: made with other settings, {'; '.join(changed)}; take another --workdir")
    path = folder / RESULT
    return Result(settings, **json.loads(path.read_text())) if path.exists() else None


def keep_best(workdir: epath.Path, metric: str) -> None:
    """Names the best of all runs that lie there, those of other searches too, and removes the others' checkpoints."""
    ranks = {}
    for path in sorted((workdir / run_folder.RUNS).glob(f"*/{RESULT}")):
        has_checkpoint = checkpoint.folder_of(path.parent).exists()
        ranks[path.parent] = (*_rank(json.loads(path.read_text())["scores"], metric), has_checkpoint)
    top = max(ranks, key=ranks.get)
    write_whole(workdir / run_folder.BEST, f"{run_folder.RUNS}/{top.name}\n")
    for folder in ranks:
        if folder != top and (rest := checkpoint.folder_of(folder)).exists():
            rest.rmtree()
