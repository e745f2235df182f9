"""Plans a run for `config.budget`, once: the sizes before its text is prepared, its steps when a step can be measured.

Host 0 decides, and stores the decision in `PLAN` in the workdir. The same command reads it there when it resumes the
run, and a run that branches off reads it in the workdir of its parent. Fields in `config.overrides` are never changed.
"""

import contextlib
import copy
import json
import math
import time
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple, TypedDict

import jax
import ml_collections
from etils import epath

from bertjax import budget, experiment, tasks
from bertjax.budget import choice, machine, recipes, survey
from bertjax.budget.choice import Choice, Text
from bertjax.config import UserError, stage
from bertjax.data.progress import describe_bytes, duration, phase
from bertjax.data.records import require_folder
from bertjax.data.records.manifest import read_manifest
from bertjax.files import read_json, write_whole
from bertjax.lists import corpus_sources
from bertjax.sharding import hosts
from bertjax.sharding.streams import on_devices
from bertjax.stages import Stage, parts_of, predictions_for, stages_of
from bertjax.text import tokenizer
from bertjax.training import checkpoint
from bertjax.training.memory import least_bytes, memory_of_device, require_room
from bertjax.training.recurrence import warmed_up
from bertjax.training.run import Run
from bertjax.training.schedules import schedule_of
from bertjax.training.step import Program, make_program, put_hyperparameters

PLAN = "plan.json"
MEASURED_SECONDS, MOST_MEASURED_STEPS = 4.0, 200
MOST_COMPILING_SECONDS = 60.0  # fine-tuning has batches of many shapes, each of which compiles the step
COMPILE_SECONDS = 25.0  # of the steps and evaluation of a small model on two cores, before they are measured
# Preparing a text: seconds until its processes work, and the factor to the time in which the survey splits the text.
START_SECONDS, PASSES = 6.0, 3.5
END_SECONDS = 8.0  # filling masks and drawing the page about the run
SPARE = 0.03  # share of the time that is left free: other programs run as well
MOST_EVALUATIONS, EVALUATION_EVERY = 10, 120.0  # seconds of steps
CHECKPOINT_SECONDS, LOG_SECONDS = 300.0, 10.0  # from one checkpoint, and from one line, to the next
STEP_FIELDS = ("steps", "tokens", "ramp_tokens")


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
        tasks.validate(config)
        if jax.process_index() == 0 and plan["is_fitted"]:
            note = f"the numbers are those of {(workdir if _fitted(workdir) else parent) / PLAN}"
            if config.budget and plan["budget"] != config.budget:
                note += (
                    f", for a budget of {plan['budget']}; config.budget = {config.budget!r} changes nothing. To train "
                )
                note += f"longer, set --config.{_longer(config)}"
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
    tasks.validate(config)
    return config


@contextlib.contextmanager
def _chosen(config, workdir: epath.Path, began: float) -> Iterator[None]:
    """Writes a plan with the sizes of a recipe, unless an earlier start has written it for the same flags."""
    before = _read(workdir)
    if before is None or before["asked"] != _asked(config):
        plan = _with_sizes(config, began)
        apply(chosen := copy.deepcopy(config), plan["fields"])
        tasks.validate(chosen)
        _write(workdir, plan)
    yield


def _asked(config) -> dict[str, Any]:
    """Returns the budget, the recipe and the fields that the user has set, with the types of JSON."""
    fields = {name: experiment.find_field(config, name).value for name in config.overrides}
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
    set_by_user = {name: experiment.find_field(config, name).value for name in config.overrides}
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
        experiment.find_field(config, name).set(value)


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
    lines = _lines_of_text(fitting, text, found, of_token)
    return Plan(budget=spent.text, asked=_asked(config), is_fitted=False, fields=fields, lines=lines)


def _require_time(config, spent: budget.Budget, left: float, preparing: float, text: Text) -> None:
    if left >= 10:
        return
    least = spent.seconds - left
    if preparing > spent.seconds / 2:
        raise UserError(
            f"config.budget = {config.budget!r}: preparing {describe_bytes(text.bytes)} of text takes about "
            f"{duration(preparing)} here; set --config.budget={_in_units(3 * least)}, or name a part of the text in "
            f"config.data.corpus"
        )
    raise UserError(
        f"config.budget = {config.budget!r}: reading the text, compiling and the report take about {duration(least)} "
        f"here, so that nothing is left for training; set --config.budget={_in_units(3 * least)} or more"
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


def _fields(config, chosen: Choice, kind: str) -> dict[str, Any]:
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
    return fields | _fields_of_steps(config, sum(chosen.steps), None)


def _fields_of_steps(config, steps: int, seconds: float | None) -> dict[str, Any]:
    """Returns the fields that depend on the number of steps, and on the seconds of one if they are known."""
    fields: dict[str, Any] = {"optimizer.warmup_steps": max(1, min(10_000, steps // 20))}
    if seconds is not None:
        fields["eval.every_steps"] = -(-steps // evaluations(config, steps, steps * seconds))
        if not config.checkpoint.keep_every:
            fields["checkpoint.every_steps"] = max(1, min(steps, round(CHECKPOINT_SECONDS / seconds)))
        fields["log_every_steps"] = max(1, min(100, steps, round(LOG_SECONDS / seconds)))
    return fields


# The steps.


class Measured(NamedTuple):
    """Seconds of all steps of a run as it is configured, of one evaluation, and of compiling the steps."""

    steps: float
    evaluation: float
    compiling: float


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
    require_room(config, program)
    if jax.process_index() == 0:
        phase("compiling and measuring the training step (usually 10-60 s)")
    measured = Measured(*map(hosts.as_on_first, measure(opened, program)))
    elapsed = hosts.as_on_first(time.monotonic() - began)
    first, fields = opened.task, fields_that_fit(opened, workdir, spent, measured, elapsed)
    is_traced_anew = fields.get("adapt.new_pieces_first", 0) > 0  # a constant of the compiled step
    apply(config, fields)
    tasks.validate(config, with_data=False)
    opened = opened.reopen(config)
    if jax.process_index() == 0:
        factor = opened.task.flops(0, opened.task.total_steps) / first.flops(0, first.total_steps)
        lines = plan["lines"] if plan else _lines_of_data(opened, workdir)
        lines = [*lines, *_lines_of_run(opened, workdir, program, measured, factor, elapsed)]
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


def measure(opened: Run, program: Program) -> Measured:
    """Runs a few steps of one stage of each length, on the first batches of this stage, from random params."""
    task, config, mesh = opened.task, opened.config, opened.mesh
    hyperparameters = put_hyperparameters(config.seed, schedule_of(config, task.total_steps), mesh)
    compiling, rates = 0.0, {}
    for part in measured_stages(config, task.total_steps):
        state = program.init(jax.random.key(config.seed))
        if task.recurrence:
            state = warmed_up(task, program, state, mesh, 0, lambda text: None)
        train_step = program.step_of(*task.at(part.first_step))
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
    total = sum(task.flops(part.first_step, part.first_step + part.steps) / rates[part.length] for part in parts)
    return Measured(total, _evaluation_seconds(opened, total), compiling)


def _parts(config, total_steps: int) -> list[Stage]:
    """Returns the stages of pre-training; fine-tuning has one."""
    if "stages" in config:
        return stages_of(config)
    return [Stage(config.task, total_steps, config.max_seq_length, 0, config.batch_size)]


def measured_stages(config, total_steps: int) -> list[Stage]:
    """Returns the largest stage of each length. Only these are measured; others of a length are as fast by FLOPs."""
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
    opened: Run, workdir: epath.Path, spent: budget.Budget, measured: Measured, elapsed: float
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
        return _fields_of_steps(config, total, measured.steps / total) if config.recipe else {}
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
        if config.recipe and (unique := _unique_tokens(config, workdir)):
            factor = min(factor, choice.MOST_EPOCHS * unique / now)
        _require_steps(config, spent, factor * total, elapsed + reserve(measured, 1))
    stages = scaled_stages(config, factor)
    scaled = copy.deepcopy(config)
    with scaled.unlocked():
        scaled.stages = ml_collections.ConfigDict(stages)
    new_total = sum(part.steps for part in stages_of(scaled))
    fields = {"stages": stages}
    if config.recipe:
        return fields | _fields_of_steps(config, new_total, measured.steps / total)
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


def factor_that_fits(config, total: int, left: float, measured: Measured) -> float:
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


def reserve(measured: Measured, count: int) -> float:
    """Returns the seconds of a run besides its steps: of `count` evaluations, which are compiled, and the report."""
    return count * measured.evaluation + 0.7 * measured.compiling + END_SECONDS


def _require_steps(config, spent: budget.Budget, steps: float, least: float) -> None:
    if steps < 1:
        raise UserError(
            f"config.budget = {config.budget!r}: reading, compiling and the report take about {duration(least)} here, "
            f"so that no step is left; set --config.budget={_in_units(3 * least)} or more"
        )


def scaled_stages(config, factor: float) -> dict[str, dict]:
    """Returns `config.stages` with `factor` times as many steps or tokens. A batch that grows does so in fewer tokens;
    if they are too few for a step of each size, the batch does not grow."""
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


# The text of the plan.


def _lines_of_text(config, text: Text, found: survey.Survey | None, bytes_per_token: float) -> list[str]:
    tokens, whole = text.bytes / bytes_per_token, found is None or found.is_whole
    about = "" if whole else "about "
    files = f"{found.files} file{'s' * (found.files != 1)}, " if found and found.files else ""
    scripts = {name: share for name, share in (found.scripts if found else {}).items() if share >= 0.05}
    letters = f", letters {', '.join(f'{share:.0%} {name.title()}' for name, share in scripts.items())}"
    return [
        f"text: {files}{about}{describe_bytes(text.bytes)}, {about}{text.documents:,.0f} documents, about "
        f"{_count(tokens)} tokens{letters if scripts else ''} (--config.data.{'corpus' if found else 'records'})",
        f"held out: {config.data.heldout_fraction:.1%} of the documents (--config.data.heldout_fraction)",
        f"vocabulary: {config.model.vocab_size:,} pieces, {config.tokenizer.kind} (--config.model.vocab_size, "
        f"--config.tokenizer.kind)",
    ]


def _lines_of_run(
    opened: Run, workdir: epath.Path, program: Program, measured: Measured, factor: float, elapsed: float
) -> list[str]:
    config, task = opened.config, opened.task
    params = sum(x.size for x in jax.tree.leaves(program.state.params))
    model = config.model
    lines = [
        f"model: {model.family}, {model.get('num_hidden_layers', 0)} layers of {model.get('hidden_size', 0)}, "
        f"{_count(params)} params (--config.model.num_hidden_layers, --config.model.hidden_size)"
    ]
    if "stages" in config:
        parts = stages_of(config)
        for part in parts if len(parts) <= 4 else parts[-1:]:
            lines.append(
                f"stage {part.name}: {part.steps:,} steps of {part.batch_size} sequences of {part.length} tokens "
                f"(--config.stages.{part.name}.steps, --config.batch_size)"
            )
        shares = _manifest(config, workdir).get("real_tokens_share", {})  # the others are padding
        tokens = sum(part.steps * part.tokens_per_step * shares.get(str(part.length), 1.0) for part in parts)
        lines.append(f"tokens: {_count(tokens)}{_epochs(config, workdir, tokens)} (--config.budget, such as 200M)")
    else:
        lines.append(
            f"epochs: {config.epochs:g}, {task.total_steps:,} steps of {config.batch_size} examples (--config.epochs)"
        )
    steps = measured.steps * factor
    rest = reserve(measured, evaluations(config, task.total_steps, steps))
    lines.append(
        f"time: about {duration(elapsed + steps + rest)} in all: {duration(elapsed)} until here, {duration(steps)} for "
        f"the steps, {duration(rest)} for evaluation and report (--config.budget)"
    )
    if "stages" not in config and elapsed + steps + rest < 0.8 * budget.parse(config.budget).seconds:
        lines.append("the budget is larger than all epochs need; more epochs (--config.epochs) take longer")
    needed, device = least_bytes(config, program), opened.mesh.devices.flat[0]
    has = memory_of_device(device) if jax.process_count() == 1 or device.platform != "cpu" else None
    of = f" of {describe_bytes(has)}" if has else ""
    lines.append(f"memory: at least {describe_bytes(needed)}{of} (--config.batch_size, --config.microbatches)")
    return lines


def _manifest(config, workdir: epath.Path) -> Mapping:
    """Returns the manifest of the records; empty if they have none."""
    return read_manifest(config.data.records or workdir / "records") or {}


def _unique_tokens(config, workdir: epath.Path) -> int | None:
    """Returns the tokens of the text that is trained on; None if the records do not have their number."""
    manifest = _manifest(config, workdir)
    return manifest.get("corpus", {}).get("train_tokens")


def _lines_of_data(opened: Run, workdir: epath.Path) -> list[str]:
    """Returns lines about the data of a run without a recipe."""
    config = opened.config
    if "stages" not in config:
        return [f"data: {opened.info.train_examples:,} training examples (--config.data.path)"]
    counts = _manifest(config, workdir).get("corpus", {})
    if not counts:
        return []
    text, heldout, tokens = (counts[name] for name in ("train_documents", "heldout_documents", "train_tokens"))
    return [
        f"text: {text:,} documents, {_count(tokens)} tokens (--config.data.corpus)",
        f"held out: {heldout:,} documents (--config.data.heldout_fraction)",
        f"vocabulary: {config.model.vocab_size:,} pieces (--config.model.vocab_size, --config.tokenizer.kind)",
    ]


def _epochs(config, workdir: epath.Path, tokens: float) -> str:
    unique = _unique_tokens(config, workdir)
    return f", {tokens / unique:,.1f} epochs over the text" if unique else ""


def _count(number: float) -> str:
    for size, name in ((1e9, "billion"), (1e6, "million")):
        if number >= size:
            return f"{number / size:,.1f} {name}"
    return f"{number:,.0f}"


def _in_units(seconds: float) -> str:
    """Formats a time as a budget: "3min"."""
    minutes = max(1, math.ceil(seconds / 60))
    return f"{minutes}min" if minutes < 120 else f"{math.ceil(minutes / 60)}h"
