"""Plans a run for `config.budget`, once: the sizes before its text is prepared, its steps when a step can be measured.

Host 0 decides, and stores the decision in `PLAN` in the workdir. The same command reads it there when it resumes the
run, and a run that branches off reads it in the workdir of its parent. Fields in `config.overrides` are never changed.
"""

import contextlib
import copy
import json
import math
import time
from collections.abc import Iterator
from typing import Any, TypedDict

import jax
import ml_collections
from etils import epath

from bertjax.common.errors import UserError
from bertjax.common.files import read_json, write_whole
from bertjax.common.progress import describe_bytes, duration, phase
from bertjax.config import budget
from bertjax.config.defaults import stage
from bertjax.config.lists import corpus_sources
from bertjax.config.stages import predictions_for, stages_of
from bertjax.data.records.manifest import read_manifest
from bertjax.data.records.record_sets import require_folder
from bertjax.distributed import hosts
from bertjax.launch import recipes
from bertjax.launch.budget import choice, machine, survey
from bertjax.launch.budget.choice import Sizes, Text
from bertjax.launch.budget.description import lines_of_data, lines_of_run, lines_of_text
from bertjax.launch.budget.steps import (
    END_SECONDS,
    SPARE,
    StepTimes,
    fields_of_steps,
    fields_that_fit,
    in_units,
    measure,
)
from bertjax.launch.overrides import find_field
from bertjax.launch.validate import validate
from bertjax.text import tokenizer
from bertjax.training.checkpoints import checkpoint
from bertjax.training.monitoring.memory import check_memory_bound
from bertjax.training.run import Run
from bertjax.training.step import Program, make_program

PLAN = "plan.json"
COMPILE_SECONDS = 25.0  # of the steps and evaluation of a small model on two cores, before they are measured
# Preparing a text: seconds until its processes work, and the factor to the time in which the survey splits the text.
START_SECONDS, PASSES = 6.0, 3.5


class Plan(TypedDict):
    """The content of `PLAN`.

    Attributes:
      asked: the budget, the recipe and the fields that the user has set, as they were when the sizes were chosen.
      is_fitted: whether steps have been measured; from then on, the plan never changes.
      fields: {field of the config: value}.
      lines: the plan as it was printed.
    """

    budget: str
    asked: dict[str, Any]
    is_fitted: bool
    fields: dict[str, Any]
    lines: list[str]


def begin(config, workdir: epath.Path, began: float) -> ml_collections.ConfigDict:
    """Returns the config with the numbers of the plan of this run or of its parent, or with newly chosen sizes.

    Args:
      began: when the command began, by `time.monotonic`.

    Raises `UserError` if the budget is too small for the text, or if the run was started without a budget.
    """
    if config.get("recipe"):
        config = recipes.prepared(config)
    parent = _parent(config)
    plan = _fitted(workdir) or (_fitted(parent) if parent is not None else None)
    if plan is None and config.budget and _is_trained(workdir):
        raise UserError(
            f"config.budget = {config.budget!r}: the run in {workdir} was started without a budget; choose another "
            f"--workdir, or set its number of {'steps' if 'stages' in config else 'epochs'} without a budget"
        )
    if plan is None and config.get("recipe"):
        with hosts.on_first(_chosen(config, workdir, began)):
            pass
        plan = _read(workdir)
    if plan is not None:
        apply(config, plan["fields"])
        validate(config)
        if jax.process_index() == 0 and plan["is_fitted"]:
            note = f"the numbers are those of {(workdir if _fitted(workdir) else parent) / PLAN}"
            if config.budget and plan["budget"] != config.budget:
                note += f", for a budget of {plan['budget']}; config.budget = {config.budget!r} changes nothing. "
                note += f"To train longer, set --config.{_longer(config)}"
            print(note, flush=True)
    return config


def _longer(config) -> str:
    """Returns the name of the field that extends a run."""
    return f"stages.{stages_of(config)[-1].name}.steps" if "stages" in config else "epochs"


def with_sizes(config) -> ml_collections.ConfigDict:
    """Returns the config with the sizes of its recipe, as a run of it would have them: for its vocabulary and records.

    Returns the config itself if it has no recipe.
    """
    if not config.recipe:
        return config
    config = recipes.prepared(config)
    apply(config, _with_sizes(config, time.monotonic(), prepares=False)["fields"])
    validate(config)
    return config


@contextlib.contextmanager
def _chosen(config, workdir: epath.Path, began: float) -> Iterator[None]:
    """Writes a plan with the sizes of a recipe, unless an earlier start has written it for the same flags."""
    before = _read(workdir)
    if before is None or before["asked"] != _asked(config):
        plan = _with_sizes(config, began)
        apply(chosen := copy.deepcopy(config), plan["fields"])
        validate(chosen)
        _write(workdir, plan)
    yield


def _asked(config) -> dict[str, Any]:
    """Returns the budget, the recipe and the fields that the user has set, with the types of JSON."""
    fields = {name: find_field(config, name).value for name in config.overrides}
    return json.loads(json.dumps({"budget": config.budget, "recipe": config.get("recipe", ""), **fields}))


def _is_trained(workdir: epath.Path) -> bool:
    return bool(checkpoint.steps(workdir))


def _fitted(workdir: epath.Path) -> Plan | None:
    """Returns the plan of a run whose steps have been measured."""
    plan = _read(workdir)
    return plan if plan is not None and plan["is_fitted"] else None


def _read(workdir: epath.Path) -> Plan | None:
    path = workdir / PLAN
    return read_json(path, Plan) if path.exists() else None


def _write(workdir: epath.Path, plan: Plan) -> None:
    workdir.mkdir(parents=True, exist_ok=True)
    write_whole(workdir / PLAN, json.dumps(plan, indent=1, ensure_ascii=False) + "\n")


def apply(config, fields: dict[str, Any]) -> None:
    """Sets fields of a config, but for those that the user has set."""
    set_by_user = {name: find_field(config, name).value for name in config.overrides}
    with config.unlocked():
        for name, value in fields.items():
            section, _, last = name.rpartition(".")
            holder = config[section] if section else config
            if isinstance(value, dict):
                value = ml_collections.ConfigDict(value)
            elif isinstance(holder[last], tuple):
                value = tuple(value)
            holder[last] = value
    for name, value in set_by_user.items():
        find_field(config, name).set(value)


# The sizes.


def _with_sizes(config, began: float, prepares: bool = True) -> Plan:
    """Chooses the sizes of a recipe. `prepares`: whether the budget covers the preparation of the text."""
    spent = budget.parse(config.budget)
    found = None
    if config.data.records:
        text, kind, vocab_size, of_token = _text_of_records(config)
        device = machine.measure()
        left = spent.seconds - (time.monotonic() - began) - COMPILE_SECONDS - END_SECONDS
        _require_time(config, spent, left, 0.0, text)
    else:
        count = len(corpus_sources(config))
        phase(f"reading the beginning of {count} source{'s' * (count > 1)} for the plan")
        found = survey.survey(config)
        device = machine.measure()  # after the text has been read: a wrong path is an error at once
        text, kind = found.text, config.tokenizer.kind
        if "tokenizer.kind" not in config.overrides and not config.tokenizer.path:
            kind = choice.kind_of_tokenizer(config.recipe, text)
        preparing = START_SECONDS + PASSES * found.seconds_per_byte * text.bytes / device.cores
        left = spent.seconds - (time.monotonic() - began) - preparing - COMPILE_SECONDS - END_SECONDS
        if prepares:
            _require_time(config, spent, left, preparing, text)
        lowercase = config.tokenizer.lowercase and config.data.language == "en"
        if config.tokenizer.path or kind == "bytes":
            path = config.tokenizer.path
            pieces = tokenizer.load(kind, path, config.tokenizer.lowercase) if path else tokenizer.Bytes()
        else:
            wanted = config.model.vocab_size if "model.vocab_size" in config.overrides else None
            pieces = survey.learn(kind, lowercase, wanted or choice.vocabulary_size(text), found)
        vocab_size, of_token = pieces.vocab_size, survey.bytes_per_token(pieces, found.sample)
    chosen = choice.choose(
        text, device, (1 - SPARE) * max(1.0, left), spent.tokens, config.recipe, of_token, _fixed(config, vocab_size)
    )
    fields = _fields(config, chosen, kind)
    if config.data.records:
        prepared = read_manifest(config.data.records)["recipe"]
        fields |= {f"data.{name}": prepared[name] for name in ("heldout_fraction", "document") if name in prepared}
    if found is not None:
        fields["data.document"] = found.document
    apply(fitting := copy.deepcopy(config), fields)
    if found is not None:
        with contextlib.suppress(UserError):  # the preparation reports it
            fields["eval.fill_masks"] = survey.masked_texts(fitting, found)
    lines = lines_of_text(fitting, text, found, of_token)
    return Plan(budget=spent.text, asked=_asked(config), is_fitted=False, fields=fields, lines=lines)


def _require_time(config, spent: budget.Budget, left: float, preparing: float, text: Text) -> None:
    if left >= 10:
        return
    least = spent.seconds - left
    if preparing > spent.seconds / 2:
        raise UserError(
            f"config.budget = {config.budget!r}: preparing {describe_bytes(text.bytes)} of text takes about "
            f"{duration(preparing)} here; set --config.budget={in_units(3 * least)}, or name a part of the text in "
            f"config.data.corpus"
        )
    raise UserError(
        f"config.budget = {config.budget!r}: reading the text, compiling and the report take about {duration(least)} "
        f"here, so that nothing is left for training; set --config.budget={in_units(3 * least)} or more"
    )


def _text_of_records(config) -> tuple[Text, str, int, float]:
    """Returns the text of prepared records, their kind of tokenizer, its size, and the bytes of a token."""
    folder = require_folder(config.data.records)
    manifest = read_manifest(folder)
    counts = (manifest or {}).get("corpus", {})
    if not counts.get("train_tokens"):
        raise UserError(
            f"config.data.records = {str(folder)!r}: these records have no manifest with the size of their text, from "
            f"which a recipe chooses; use another experiment, or prepare the records with bertjax.prepare"
        )
    characters, documents, tokens = (counts[f"train_{name}"] for name in ("characters", "documents", "tokens"))
    mean = characters / max(1, documents)
    text = Text(characters, documents, (mean, 2 * mean, 4 * mean))
    of_tokenizer = manifest["tokenizer"]
    return text, of_tokenizer["kind"], of_tokenizer["vocab_size"], characters / tokens


def _fixed(config, vocab_size: int) -> dict:
    """Returns the sizes that are not chosen."""
    fixed = {"vocab_size": vocab_size}
    for name, field in (("layers", "num_hidden_layers"), ("hidden_size", "hidden_size")):
        if f"model.{field}" in config.overrides:
            fixed[name] = config.model[field]
    if "batch_size" in config.overrides:
        fixed["batch_size"] = config.batch_size
    fixed["multiple"] = config.microbatches
    names = {name for name in ("short", "long") if any(x.startswith(f"stages.{name}.") for x in config.overrides)}
    if "long" in names or "stages.short.length" in config.overrides:
        fixed["lengths"] = tuple(config.stages[name].length for name in ("short", "long") if name in {"short", *names})
    if config.data.records and (manifest := read_manifest(config.data.records)):
        fixed["lengths"] = tuple(sorted(map(int, manifest["sets"])))[:2]
    return fixed


def _fields(config, chosen: Sizes, kind: str) -> dict[str, Any]:
    """Returns the fields of a choice."""
    stages = {}
    for name, length, batch_size, steps in zip(("short", "long"), chosen.lengths, chosen.batch_sizes, chosen.steps):
        of_stage = stage(steps, length, predictions_for(config.data.masked_lm_prob, length))
        if batch_size != chosen.batch_sizes[0]:
            of_stage.batch_size = batch_size
        stages[name] = of_stage.to_dict()
    fields = {
        "tokenizer.kind": kind,
        "model.vocab_size": chosen.vocab_size,
        "model.num_hidden_layers": chosen.layers,
        "model.hidden_size": chosen.hidden_size,
        "model.num_attention_heads": chosen.heads,
        "model.intermediate_size": chosen.intermediate_size,
        "batch_size": chosen.batch_sizes[0],
        "stages": stages,
        "data.heldout_fraction": chosen.heldout_fraction,
        "optimizer.learning_rate": chosen.learning_rate,
    }
    if config.recipe == "bert":
        fields["tokenizer.lowercase"] = config.tokenizer.lowercase and config.data.language == "en"
        fields["model.max_position_embeddings"] = max(chosen.lengths)
        if chosen.hidden_size < 512:  # there is nothing to overfit
            fields |= {"model.hidden_dropout_prob": 0.0, "model.attention_probs_dropout_prob": 0.0}
    # Narrower models need wider initial values for the same net inputs: 0.02 at the width of BERT-base.
    fields["model.initializer_range"] = round(0.02 * math.sqrt(768 / chosen.hidden_size), 3)
    return fields | fields_of_steps(config, sum(chosen.steps), None)


# The steps.


def fit(opened: Run, workdir: epath.Path, began: float) -> tuple[Run, Program | None]:
    """Returns a new run with as many steps as the budget allows, and its compiled program.

    Stores the numbers in `PLAN` and prints the plan. Returns the run as it is, and None, if its plan is complete.
    """
    config, plan, parent = opened.config, _read(workdir), _parent(opened.config)
    if plan is None and parent is not None and (of_parent := _fitted(parent)) is not None:
        if jax.process_index() == 0:
            _write(workdir, of_parent)
        return opened, None
    if not config.budget or (plan is not None and plan["is_fitted"]) or _is_trained(workdir):
        return opened, None
    spent, program = budget.parse(config.budget), make_program(opened.task, config, opened.mesh)
    check_memory_bound(config, program)
    if jax.process_index() == 0:
        phase("compiling and measuring the training step (usually 10-60 s)")
    measured = StepTimes(*map(hosts.as_on_first, measure(opened, program)))
    elapsed = hosts.as_on_first(time.monotonic() - began)
    first, fields = opened.task, fields_that_fit(opened, workdir, spent, measured, elapsed)
    is_traced_anew = fields.get("adapt.new_pieces_first", 0) > 0  # a constant of the compiled step
    apply(config, fields)
    validate(config, with_data=False)
    opened = opened.reopen(config)
    if jax.process_index() == 0:
        factor = opened.task.flops(0, opened.task.total_steps) / first.flops(0, first.total_steps)
        lines = plan["lines"] if plan else lines_of_data(opened, workdir)
        lines = [*lines, *lines_of_run(opened, workdir, program, measured, factor, elapsed)]
        fields = (plan["fields"] if plan else {}) | fields
        asked = plan["asked"] if plan else _asked(config)
        _write(workdir, Plan(budget=spent.text, asked=asked, is_fitted=True, fields=fields, lines=lines))
        print(f"plan for a budget of {spent}, kept in {workdir / PLAN}:", flush=True)
        print("\n".join(f"  {line}" for line in lines), flush=True)
    return opened, None if is_traced_anew else program


def _parent(config) -> epath.Path | None:
    """Returns the workdir of the run that this run branches off from."""
    parent = config.get("branch_from", "").rpartition("@")[0]
    return epath.Path(parent) if parent else None
