"""Plans a run for `config.budget`, once.

The sizes are chosen before the text is prepared. The number of steps is set after some steps have been measured. Host 0
decides, and stores the decision in `PLAN` in the workdir. The same command reads this file when it resumes the run. A
run that branches off reads the file of the parent. Fields in `config.overrides` are never changed.
"""

import contextlib
import copy
import json
import math
import time
from collections.abc import Iterator
from typing import Any, NamedTuple, TypedDict

import jax
from etils import epath
from ml_collections import ConfigDict

from bertjax.common.errors import UserError
from bertjax.common.files import read_json, write_whole
from bertjax.common.progress import describe_bytes, duration, phase
from bertjax.config import budget
from bertjax.config.defaults import stage
from bertjax.config.stages import predictions_for, stages_of
from bertjax.data.records.manifest import Manifest, read_manifest
from bertjax.data.records.record_sets import require_folder
from bertjax.distributed import hosts
from bertjax.launch import recipes
from bertjax.launch.budget import choice, description, machine, steps, survey
from bertjax.launch.budget.choice import Sizes, Text
from bertjax.launch.overrides import find_field
from bertjax.launch.validate import validate
from bertjax.text import tokenizer
from bertjax.text.tokenizer import Tokenizer
from bertjax.training.checkpoints import checkpoint
from bertjax.training.monitoring.memory import check_memory_bound
from bertjax.training.run import Run
from bertjax.training.step import Program

PLAN = "plan.json"
COMPILE_SECONDS = 25.0  # an estimate for the steps and the evaluation of a small model on two cores
# Preparing a text: seconds until the processes work, and the time relative to the time that the survey measures.
START_SECONDS, PASSES = 6.0, 3.5


class Plan(TypedDict):
    """The content of `PLAN`.

    Attributes:
      budget: the budget as the user writes it.
      asked: the budget, the recipe and the fields that the user had set when the sizes were chosen.
      is_fitted: whether steps have been measured; from then on, the plan never changes.
      fields: {field of the config: value}.
      lines: the printed plan.
    """

    budget: str
    asked: dict[str, Any]
    is_fitted: bool
    fields: dict[str, Any]
    lines: list[str]


class _Tokens(NamedTuple):
    """The tokenizer of a text: the kind, the vocabulary size, and the mean bytes of text per token."""

    kind: str
    vocab_size: int
    bytes_per_token: float


def begin(config: ConfigDict, workdir: epath.Path, began: float) -> ConfigDict:
    """Returns the config with the numbers of the plan of this run or of its parent, or with newly chosen sizes.

    Args:
      config: the validated config.
      workdir: the folder of the run.
      began: the start of the command, by `time.monotonic`.

    Raises:
      UserError: the budget is too small for the text, or the run was started without a budget.
    """
    if config.get("recipe"):
        config = recipes.prepared(config)
    plan, folder = _fitted(config, workdir)
    if plan is None and config.budget and checkpoint.steps(workdir):
        raise UserError(
            f"config.budget = {config.budget!r}: the run in {workdir} was started without a budget; choose another "
            f"--workdir, or set its number of {'steps' if 'stages' in config else 'epochs'} without a budget"
        )
    if plan is None and config.get("recipe"):
        with hosts.on_first(_chosen(config, workdir, began)):
            pass
        plan = _read(workdir)
    if plan is not None:
        set_fields(config, plan["fields"])
        validate(config)
        if jax.process_index() == 0 and plan["is_fitted"]:
            note = f"the plan of this run is {folder / PLAN}"
            if config.budget and plan["budget"] != config.budget:
                longer = f"stages.{stages_of(config)[-1].name}.steps" if "stages" in config else "epochs"
                note += f", for a budget of {plan['budget']}; config.budget = {config.budget!r} changes nothing. "
                note += f"To train longer, set --config.{longer}"
            print(note, flush=True)
    return config


def with_sizes(config: ConfigDict) -> ConfigDict:
    """Returns the config with the sizes that a run of the recipe would choose.

    The commands that learn a vocabulary or prepare records call this function. A config without a recipe is returned
    unchanged.
    """
    if not config.recipe:
        return config
    config = recipes.prepared(config)
    set_fields(config, _with_sizes(config, time.monotonic(), prepares=False)["fields"])
    validate(config)
    return config


@contextlib.contextmanager
def _chosen(config: ConfigDict, workdir: epath.Path, began: float) -> Iterator[None]:
    """Writes a plan with the sizes of a recipe, unless an earlier start has written it for the same flags."""
    plan = _read(workdir)
    if plan is None or plan["asked"] != _asked(config):
        plan = _with_sizes(config, began)
        set_fields(chosen := copy.deepcopy(config), plan["fields"])
        validate(chosen)
        _write(workdir, plan)
    yield


def _asked(config: ConfigDict) -> dict[str, Any]:
    """Returns the budget, the recipe and the fields that the user has set, with the types of JSON."""
    fields = {name: find_field(config, name).value for name in config.overrides}
    return dict(json.loads(json.dumps({"budget": config.budget, "recipe": config.get("recipe", ""), **fields})))


def _fitted(config: ConfigDict, workdir: epath.Path) -> tuple[Plan | None, epath.Path]:
    """Returns the plan of this run or of its parent, if steps have been measured, and the workdir of the plan."""
    parent = config.get("branch_from", "").rpartition("@")[0]
    for folder in [workdir, *([epath.Path(parent)] if parent else [])]:
        plan = _read(folder)
        if plan is not None and plan["is_fitted"]:
            return plan, folder
    return None, workdir


def _read(workdir: epath.Path) -> Plan | None:
    path = workdir / PLAN
    return read_json(path, Plan) if path.exists() else None


def _write(workdir: epath.Path, plan: Plan) -> None:
    workdir.mkdir(parents=True, exist_ok=True)
    write_whole(workdir / PLAN, json.dumps(plan, indent=1, ensure_ascii=False) + "\n")


def set_fields(config: ConfigDict, fields: dict[str, Any]) -> None:
    """Sets fields of a config, except for the fields that the user has set."""
    set_by_user = {name: find_field(config, name).value for name in config.overrides}
    with config.unlocked():
        for name, value in fields.items():
            section, _, key = name.rpartition(".")
            holder = config[section] if section else config
            if isinstance(value, dict):
                value = ConfigDict(value)
            elif isinstance(holder[key], tuple):
                value = tuple(value)
            holder[key] = value
    for name, value in set_by_user.items():
        find_field(config, name).set(value)


def _with_sizes(config: ConfigDict, began: float, prepares: bool = True) -> Plan:
    """Chooses the sizes of a recipe. `prepares`: whether the budget covers the preparation of the text."""
    spent = budget.parse_budget(config.budget)
    surveyed = None if config.data.records else survey.survey(config)
    text = surveyed.text if surveyed else _text_of_records(config)
    device = machine.measure_machine()  # after the text has been read: a wrong path is an error at once
    preparing = 0.0
    if surveyed:
        preparing = START_SECONDS + PASSES * surveyed.seconds_per_byte * text.bytes / device.cores
    left = spent.seconds - (time.monotonic() - began) - preparing - COMPILE_SECONDS - steps.END_SECONDS
    if prepares:
        _require_time(config, spent, left, preparing, text)
    tokens = _tokens_of_corpus(config, surveyed) if surveyed else _tokens_of_records(config)
    left = (1 - steps.SPARE) * max(1.0, left)
    fixed = _fixed(config, tokens.vocab_size)
    chosen = choice.choose_sizes(text, device, left, spent.tokens, config.recipe, tokens.bytes_per_token, fixed)
    fields = _fields(config, chosen, tokens.kind)
    if surveyed:
        fields["data.document"] = surveyed.document
    else:
        prepared = _manifest(config)["recipe"]
        fields |= {f"data.{name}": prepared[name] for name in ("heldout_fraction", "document") if name in prepared}
    set_fields(complete := copy.deepcopy(config), fields)
    if surveyed:
        with contextlib.suppress(UserError):  # the preparation reports the error
            fields["eval.fill_masks"] = survey.masked_texts(complete, surveyed)
    lines = description.lines_of_text(complete, text, surveyed, tokens.bytes_per_token)
    return Plan(budget=spent.text, asked=_asked(config), is_fitted=False, fields=fields, lines=lines)


def _require_time(config: ConfigDict, spent: budget.Budget, left: float, preparing: float, text: Text) -> None:
    """Raises `UserError` if the budget leaves less than 10 seconds for training."""
    least = spent.seconds - left
    if left < 10 and preparing > spent.seconds / 2:
        raise UserError(
            f"config.budget = {config.budget!r}: preparing {describe_bytes(text.bytes)} of text takes about "
            f"{duration(preparing)} here; set --config.budget={steps.in_units(3 * least)}, or name a part of the text "
            f"in config.data.corpus"
        )
    steps.require_steps(config, left / 10, least)


def _tokens_of_corpus(config: ConfigDict, surveyed: survey.Survey) -> _Tokens:
    """Returns the tokenizer that the config names, or a tokenizer that is learnt from the surveyed text."""
    kind, path, lowercase = config.tokenizer.kind, config.tokenizer.path, config.tokenizer.lowercase
    if "tokenizer.kind" not in config.overrides and not path:
        kind = choice.kind_of_tokenizer(config.recipe, surveyed.text)
    measured: Tokenizer
    if path:
        measured = tokenizer.load_tokenizer(kind, path, lowercase)
    elif kind == "bytes":
        measured = tokenizer.Bytes()
    else:
        is_set = "model.vocab_size" in config.overrides
        size = config.model.vocab_size if is_set else choice.vocabulary_size(surveyed.text)
        measured = survey.learn_from_survey(kind, lowercase and config.data.language == "en", size, surveyed)
    return _Tokens(kind, measured.vocab_size, survey.bytes_per_token(measured, surveyed.sample))


def _manifest(config: ConfigDict) -> Manifest:
    """Returns the manifest of prepared records. Raises `UserError` if the manifest has no counts of the text."""
    folder = require_folder(config.data.records)
    manifest = read_manifest(folder)
    if not manifest or not manifest.get("corpus", {}).get("train_tokens"):
        raise UserError(
            f"config.data.records = {str(folder)!r}: these records have no manifest with the size of their text, which "
            f"a recipe needs; use another experiment, or prepare the records with bertjax.prepare"
        )
    return manifest


def _text_of_records(config: ConfigDict) -> Text:
    counts = _manifest(config)["corpus"]
    mean = counts["train_characters"] / max(1, counts["train_documents"])
    return Text(counts["train_characters"], counts["train_documents"], (mean, 2 * mean, 4 * mean))


def _tokens_of_records(config: ConfigDict) -> _Tokens:
    manifest = _manifest(config)
    of_token = manifest["corpus"]["train_characters"] / manifest["corpus"]["train_tokens"]
    return _Tokens(manifest["tokenizer"]["kind"], manifest["tokenizer"]["vocab_size"], of_token)


def _fixed(config: ConfigDict, vocab_size: int) -> dict[str, Any]:
    """Returns the sizes that are not chosen, see `choice.choose_sizes`."""
    names = {"layers": "model.num_hidden_layers", "hidden_size": "model.hidden_size", "batch_size": "batch_size"}
    fixed = {size: find_field(config, name).value for size, name in names.items() if name in config.overrides}
    fixed |= {"vocab_size": vocab_size, "multiple": config.microbatches}
    has_long = any(name.startswith("stages.long.") for name in config.overrides)
    if config.data.records:
        fixed["lengths"] = tuple(sorted(map(int, _manifest(config)["sets"])))[:2]
    elif has_long or "stages.short.length" in config.overrides:
        fixed["lengths"] = tuple(config.stages[name].length for name in ("short", "long")[: 1 + has_long])
    return fixed


def _fields(config: ConfigDict, chosen: Sizes, kind: str) -> dict[str, Any]:
    """Returns {field of the config: value} of the chosen sizes and of the kind of tokenizer."""
    stages = {}
    for name, length, batch_size, count in zip(("short", "long"), chosen.lengths, chosen.batch_sizes, chosen.steps):
        changes = {"batch_size": batch_size} if batch_size != chosen.batch_sizes[0] else {}
        stages[name] = stage(count, length, predictions_for(config.data.masked_lm_prob, length), **changes).to_dict()
    fields = {
        "tokenizer.kind": kind,
        "model.vocab_size": chosen.vocab_size,
        "model.num_hidden_layers": chosen.layers,
        "model.hidden_size": chosen.hidden_size,
        "model.num_attention_heads": chosen.heads,
        "model.intermediate_size": chosen.intermediate_size,
        # Narrower models need larger initial values for the same net inputs: 0.02 at the width of BERT-base.
        "model.initializer_range": round(0.02 * math.sqrt(768 / chosen.hidden_size), 3),
        "batch_size": chosen.batch_sizes[0],
        "stages": stages,
        "data.heldout_fraction": chosen.heldout_fraction,
        "optimizer.learning_rate": chosen.learning_rate,
    }
    if config.recipe == "bert":
        fields["tokenizer.lowercase"] = config.tokenizer.lowercase and config.data.language == "en"
        fields["model.max_position_embeddings"] = max(chosen.lengths)
        if chosen.hidden_size < 512:  # small models do not overfit
            fields |= {"model.hidden_dropout_prob": 0.0, "model.attention_probs_dropout_prob": 0.0}
    return fields | steps.fields_of_steps(config, sum(chosen.steps), None)


def fit(opened: Run, workdir: epath.Path, began: float) -> tuple[Run, Program | None]:
    """Returns a new run with the number of steps that the budget allows, and the compiled functions of the run.

    Stores the numbers in `PLAN` and prints the plan. Returns `opened` and None if the run has no budget, has started to
    train, or has a complete plan.

    Args:
      opened: the run.
      workdir: the folder of the run.
      began: the start of the command, by `time.monotonic`.
    """
    config, first = opened.config, opened.task
    plan, folder = _fitted(config, workdir)
    if plan is not None and folder != workdir and jax.process_index() == 0:
        _write(workdir, plan)
    if plan is not None or not config.budget or checkpoint.steps(workdir):
        return opened, None
    spent, program = budget.parse_budget(config.budget), Program(opened.task, config, opened.mesh)
    check_memory_bound(config, program)
    if jax.process_index() == 0:
        phase("compiling and measuring the training step (usually 10-60 s)")
    measured = steps.StepTimes(*map(hosts.as_on_first, steps.measure_steps(opened, program)))
    elapsed = hosts.as_on_first(time.monotonic() - began)
    fields = steps.fields_that_fit(opened, workdir, spent, measured, elapsed)
    set_fields(config, fields)
    validate(config, with_data=False)
    opened = opened.reopen(config)
    if jax.process_index() == 0:
        plan = _read(workdir) or Plan(budget="", asked=_asked(config), is_fitted=False, fields={}, lines=[])
        factor = opened.task.flops(0, opened.task.total_steps) / first.flops(0, first.total_steps)
        lines = plan["lines"] or description.lines_of_data(opened, workdir)
        lines += description.lines_of_run(opened, workdir, program, measured, factor, elapsed)
        plan |= {"budget": spent.text, "is_fitted": True, "fields": plan["fields"] | fields, "lines": lines}
        _write(workdir, plan)
        print(f"plan for a budget of {spent}, kept in {workdir / PLAN}:", flush=True)
        print("\n".join(f"  {line}" for line in lines), flush=True)
    # `adapt.new_pieces_first` is a constant of the compiled step, so that the program cannot be reused.
    return opened, None if fields.get("adapt.new_pieces_first") else program
