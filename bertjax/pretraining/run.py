"""Pre-training as a `RunKind`: finds or prepares its records, chooses how to compute, and reports at the end."""

import copy
import functools
import math
from collections.abc import Iterator, Sequence

import jax
from etils import epath
from jax.sharding import Mesh
from ml_collections import ConfigDict

from bertjax.common.errors import UserError
from bertjax.common.progress import phase
from bertjax.config.limits import REMAT_POLICIES
from bertjax.config.lists import corpus_sources
from bertjax.config.model_config import BertConfig, fields_of
from bertjax.config.stages import config_after, stages_of, steps_for, total_steps
from bertjax.data.preprocessing import preparation, summary, vocabulary
from bertjax.data.records.manifest import fingerprint, read_manifest
from bertjax.data.records.record_sets import require_folder
from bertjax.distributed import hosts
from bertjax.distributed.mesh import local_copy, make_mesh
from bertjax.distributed.topology import available_cores
from bertjax.inference import fill_mask
from bertjax.interop import pretrained, resizing
from bertjax.models import families
from bertjax.models.heads import BertForMaskedLM
from bertjax.nn.kernels import triton
from bertjax.nn.kernels.pallas import has_kernels
from bertjax.objectives.objective import joint_models
from bertjax.objectives.parsing import add_all_settings, parse_objective, terms_of_stages
from bertjax.objectives.parts.words import WordObjective
from bertjax.objectives.validate import validate_mesh
from bertjax.pretraining import adaptation
from bertjax.pretraining.data import StageData, load_stages, packed_rows, planned_stages
from bertjax.pretraining.task import Pretraining
from bertjax.pretraining.validate import require_recurrent_memory, validate
from bertjax.text import tokenizer
from bertjax.text.tokenizer import Tokenizer
from bertjax.training.checkpoints.workdir import RunInfo, tokenizer_entry
from bertjax.training.loop import Trained
from bertjax.training.monitoring.memory import memory_of
from bertjax.training.planning import Planned, PlannedStage, Planning
from bertjax.training.run import Run, RunKind
from bertjax.training.scores import Scores
from bertjax.training.state import abstract_axes
from bertjax.training.step import abstract_hyperparameters, fits_in_memory, make_program

# From how many steps unrolled layers pay. BERT-base on a v5e gains 12 ms a step, and compiles 100 s longer a stage; on
# an H200 it gains 7 ms, BERT-large 17, and compiling that takes less than 40 s.
UNROLLED_STEPS = {"tpu": 20_000, "gpu": 5_000}


def _adopt(config, before: RunInfo | None) -> None:
    """Sets the fields that `init_checkpoint` determines.

    A resumed run also keeps the way in which its objective was written, and a branch the records of its parent.
    """
    if config.branch_from and not config.data.records:
        config.data.records = _records_of_parent(config.branch_from, before)
    if before is not None and parse_objective(before.config) == parse_objective(config):
        config.objective = before.config.objective
    add_all_settings(config)
    adopt_checkpoint(config, before)


def adopt_checkpoint(config, before: RunInfo | None = None) -> None:
    """Sets the fields that `init_checkpoint` determines, if there is one, or an earlier run: the model's behaviour,
    or with `adapt.model` the whole model, and, if unset, the tokenizer."""
    if not config.init_checkpoint:
        return
    if config.adapt.model:
        theirs = pretrained.read_config(config.init_checkpoint) if before is None else families.config_of(before.config)
        pretrained.adopt_model(config, theirs, config.init_checkpoint)
        if before is None:
            pretrained.adopt_tokenizer(config)
            _extend_model(config)
        _check_stages(config)
        require_recurrent_memory(config)
        validate(config, with_data=False, is_adopted=True)  # now that the model is known
    elif before is None:
        pretrained.adopt(config)
    else:  # does not need `init_checkpoint`, which may be gone
        names = fields_of(families.config_of(before.config), "behaviour")
        config.model.update({name: before.config.model[name] for name in names})


def _extend_model(config) -> None:
    """Makes room for new pieces and positions. Raises `UserError` for fewer positions than there are."""
    if config.tokenizer.extend:
        pieces = _extended_tokenizer(config).vocab_size + config.tokenizer.extend
        config.model.vocab_size = max(config.model.vocab_size, pieces)  # published models may have unused rows
    if (wanted := config.adapt.positions) and wanted < (has := config.model.max_position_embeddings):
        raise UserError(f"config.adapt.positions = {wanted}: {config.init_checkpoint} has {has}; choose more, or 0")
    config.model.max_position_embeddings = wanted or config.model.max_position_embeddings


def _check_stages(config) -> None:
    """Raises `UserError` for a stage that the adopted model cannot have."""
    most = config.model.max_position_embeddings
    for name, stage in config.stages.items():
        for field in stage.get("model", {}):
            if field not in config.model:
                has = f"{config.init_checkpoint} has model.family = {config.model.family!r}"
                raise UserError(f"config.stages.{name}.model.{field}: {has}, whose models have no such field")
        if stage.length > most:
            raise UserError(
                f"config.stages.{name}.length = {stage.length}: {config.init_checkpoint} has {most} positions; set "
                f"--config.adapt.positions={stage.length}, or shorten the stage"
            )


def _extended_tokenizer(config) -> Tokenizer:
    """Returns the tokenizer that `tokenizer.extend` extends. Raises `UserError` if there is none."""
    kind, path, lowercase = (config.tokenizer[name] for name in ("kind", "path", "lowercase"))
    found = tokenizer.load(kind, path, lowercase) if path else pretrained.read_tokenizer(config.init_checkpoint)
    if found is None:
        raise UserError(f"config.tokenizer.path = '': {config.init_checkpoint} has no vocabulary to extend; name it")
    if fault := found.cannot_extend:
        raise UserError(f"config.tokenizer.extend = {config.tokenizer.extend}: the tokenizer {fault}; set 0")
    return found


def _records_of_parent(branch_from: str, before: RunInfo) -> str:
    """Returns the folder of the records. `before` is the run to resume, or the parent."""
    workdir = branch_from.rpartition("@")[0]
    return before.config.data.records or str(epath.Path(workdir) / "records")


def ways_to_compute(config, platform: str, chip: str) -> Iterator:
    """Yields `config` with what "auto" may stand for in `remat` and `unroll`, the fastest first."""
    policies = REMAT_POLICIES if config.remat == "auto" else (config.remat,)
    # On TPUs without kernels, what "none" stores takes longer to write and read than to recompute (bertjax.compile).
    if config.remat == "auto" and platform == "tpu" and not has_kernels(chip):
        policies = ("full",)
    ways = [(remat, config.unroll) for remat in policies]
    is_long = total_steps(config) >= UNROLLED_STEPS.get(platform, math.inf)
    # Where attention is no kernel, each layer adds a minute of compiling on TPUs, for no faster step.
    has_any = families.FAMILIES.get(config.model.family).has_kernels
    can_use = has_any and config.kernels == "auto" and (has_kernels(chip) or triton.is_supported(chip))
    if config.unroll == "auto" and policies[0] == "none" and can_use and is_long:
        ways.insert(0, ("none", "yes"))
    for remat, unroll in ways:
        candidate = copy.deepcopy(config)
        candidate.remat, candidate.unroll = remat, unroll
        yield candidate


def fastest_that_fits(config: ConfigDict, mesh: Mesh, data: Sequence[StageData]) -> ConfigDict:
    """Returns the first of `ways_to_compute` with which the largest stage fits in memory, or the last."""
    device = mesh.devices.flat[0]
    *ways, last = ways_to_compute(config, device.platform, device.device_kind)
    for way in ways:
        if device.platform == "cpu":
            return way
        if jax.process_index() == 0:  # it can take minutes
            print(f"compiling with remat={way.remat} unroll={way.unroll}", flush=True)
        task = Pretraining(way, mesh, data)
        program, index = make_program(task, way, mesh), task.largest_stage()
        batch, train_step = data[index].abstract_batch(), program.step_of(*task.at_stage(index))
        lowered = train_step.lower(program.state, batch, abstract_hyperparameters(way, mesh))
        # One decision for all hosts, or hosts would run different programs.
        if hosts.as_on_first(fits_in_memory(lowered, memory_of(mesh))):
            return way
    return last


def _open(config: ConfigDict, workdir: epath.Path, before: RunInfo | None) -> Run:
    """Opens a run: prepares its records if there are none, and chooses how to compute."""
    mesh = make_mesh(config)
    validate_mesh(config, mesh)
    return _open_with(config, workdir, before, mesh, *find_or_prepare(config, workdir, is_new=before is None))


def _open_with(
    config: ConfigDict,
    workdir: epath.Path,
    before: RunInfo | None,
    mesh: Mesh,
    records: epath.Path,
    tokenizer: Tokenizer,
    way: dict[str, str] | None = None,
) -> Run:
    """Opens a run on records.

    Args:
      config: the whole config.
      workdir: the folder of the run.
      before: the earlier run that is resumed, if there is one.
      mesh: the devices.
      records: the folder of the records.
      tokenizer: the tokenizer of the records.
      way: `remat` and `unroll`, if the run was opened before with another number of steps; None: choose them.
    """
    is_new = before is None and not config.branch_from
    starts_from_checkpoint = bool(config.init_checkpoint) and is_new
    if starts_from_checkpoint:
        pretrained.check_tokenizer(config.init_checkpoint, tokenizer)
    fill_mask.check(config.eval.fill_masks, tokenizer, config.model.max_position_embeddings)
    with hosts.first_before_others("records counted"):
        text = _heldout_text(config, workdir, tokenizer, is_new=is_new and way is None)
        if config.packing and jax.process_index() == 0:
            phase("reading the lengths of the sequences")
        data = load_stages(config, mesh, records, workdir, tokenizer)
    if way is None:
        computed = fastest_that_fits(config, mesh, data)  # all hosts compile together
    else:
        computed = copy.deepcopy(config)
        computed.update(way)
    task = Pretraining(computed, mesh, data, tokenizer, text)
    initialize = None
    if starts_from_checkpoint:
        initialize = functools.partial(
            pretrained.initialize,
            path=config.init_checkpoint,
            start=functools.partial(import_params, config),
            resize=functools.partial(_enlarged, config, abstract_axes(task.init_params), tokenizer),
        )
    info = RunInfo(
        config.copy_and_resolve_references(),
        tokenizer=tokenizer_entry(tokenizer),
        fingerprints={"records": fingerprint(records)},
    )
    end_report = functools.partial(_end_report, config, task, tokenizer, text)
    reopen = functools.partial(
        _open_with, workdir=workdir, before=before, mesh=mesh, records=records, tokenizer=tokenizer,
        way={name: computed[name] for name in ("remat", "unroll")},
    )  # fmt: skip
    return Run(config, mesh, task, info, tokenizer, initialize, _notes(config, task), end_report, reopen)


def _heldout_text(
    config: ConfigDict, workdir: epath.Path, tokenizer: Tokenizer, is_new: bool
) -> adaptation.HeldOutText | None:
    """Returns the text for bits per byte; None if they are not measured. A new run chooses the text."""
    if not config.eval.bits_windows:
        return None
    if is_new and jax.process_index() == 0:
        phase("measuring bits per byte of the checkpoint" if config.init_checkpoint else "choosing held-out text")
        adaptation.write_heldout_text(config, workdir, tokenizer)
    return adaptation.read_heldout_text(workdir)


def _notes(config: ConfigDict, task: Pretraining) -> list[str]:
    """Returns lines about the choices for "auto", and about a warm-up that is longer than the run."""
    fields = [field for field in ("remat", "unroll") if task.config[field] != config[field]]
    notes = [f"config.{field} = 'auto': {task.config[field]}" for field in fields]
    steps, tokens = config.optimizer.warmup_steps, config.optimizer.warmup_tokens
    if tokens:
        steps = steps_for(stages_of(config), tokens)
    if steps >= task.total_steps:
        field = "warmup_tokens" if tokens else "warmup_steps"
        notes.append(
            f"config.optimizer.{field} = {tokens or steps}: the {task.total_steps} steps end before the warm-up does"
        )
    return notes


def _end_report(
    config: ConfigDict, task: Pretraining, tokenizer: Tokenizer, text: adaptation.HeldOutText | None, trained: Trained
) -> str:
    """Returns the report at the end of a run: held-out scores, bits per byte, and filled masks."""
    params = local_copy(trained.state.eval_params, task.mesh)  # all hosts must call this
    if jax.process_index():
        return ""
    step = int(trained.state.step)  # before the last step, if training ended early
    loss, _ = task.at(max(0, step - 1))
    model = BertForMaskedLM(loss.model.config, loss.model.compute)
    can_fill = any(isinstance(term.objective, WordObjective) and term.objective.fills_masks for term in loss.terms)
    filled = fill_mask.fill_masks(model, params, tokenizer, config.eval.fill_masks if can_fill else ())
    bits = text.report(text.score(model, params, tokenizer)) if text is not None else []
    return "\n".join([report(config_after(config, step), trained.scores), *bits, *map(fill_mask.describe, filled)])


def import_params(config: ConfigDict, params: dict) -> dict:
    """Returns the params from which training starts, from the params of `init_checkpoint`."""
    for objective in joint_models(terms_of_stages(config)):
        params = objective.import_params(params)
    return params


def _enlarged(config, axes: dict, used: Tokenizer, arrays: dict, theirs: BertConfig) -> dict:
    """Returns the arrays of `init_checkpoint` with the new pieces of the tokenizer that is used, and new positions."""
    del theirs
    axes = pretrained.flattened(axes)
    if config.tokenizer.extend:
        rows, old = families.config_of(config).padded_vocab_size, _extended_tokenizer(config)
        arrays = resizing.with_pieces(arrays, axes, rows, old, used)
    if config.adapt.positions:
        arrays = resizing.with_positions(arrays, axes, families.config_of(config), config.adapt.positions_from)
    return arrays


def _changes_of_data(config, workdir: epath.Path, before: RunInfo) -> list[str]:
    folder, known = epath.Path(config.data.records or workdir / "records"), (before.fingerprints or {}).get("records")
    changes = []
    if known and folder.is_dir() and fingerprint(folder) != known:
        changes.append(f"the records in {folder} are others")
    if not config.data.records and (manifest := read_manifest(folder)):
        changes += preparation.changes_of_corpus(config, manifest)
    return changes


def _adopt_for_plan(config) -> None:
    if config.adapt.model:
        adopt_checkpoint(config)


def _planned(config: ConfigDict, mesh: Mesh, real_tokens_share: Sequence[float]) -> Planned:
    """Returns the programs of all stages for the planner."""
    validate_mesh(config, mesh)
    rows = packed_rows(config, mesh, real_tokens_share) if config.packing else None
    data = planned_stages(config, mesh, rows)
    task = Pretraining(config, mesh, data)
    stages = [
        PlannedStage(
            stage.stage,
            stage.rows,
            stage.abstract_batch(),
            task.evaluator.eval_step(loss),
            task.evaluator.arguments(stage, loss),
        )
        for stage, loss in zip(data, task.losses)
    ]
    return Planned(task, stages)


class _PretrainingKind(RunKind):
    planning = Planning(_adopt_for_plan, ways_to_compute, _planned)

    def identity(self, config: ConfigDict) -> tuple[str, ...]:
        return ("objective", "data.next_sentence")

    def adopt(self, config: ConfigDict, info: RunInfo | None) -> None:
        _adopt(config, info)

    def total_steps(self, config: ConfigDict, info: RunInfo | None) -> int:
        return total_steps(config)

    def open(self, config: ConfigDict, workdir: epath.Path, info: RunInfo | None) -> Run:
        return _open(config, workdir, info)

    def changes_of_data(self, config: ConfigDict, workdir: epath.Path, info: RunInfo) -> list[str]:
        return _changes_of_data(config, workdir, info)


KIND = _PretrainingKind()


def find_or_prepare(config, workdir: epath.Path, is_new: bool = True) -> tuple[epath.Path, Tokenizer]:
    """Returns the folder of the records and their tokenizer; prepares them in the workdir if the config names none.

    Raises `UserError` if they are missing or do not match the config; for a new run also if they have been prepared in
    the workdir from a corpus that has changed since.
    """
    folder = require_folder(config.data.records) if config.data.records else workdir / "records"
    manifest = read_manifest(folder)
    if manifest is None and not config.data.records:
        if jax.process_count() > 1:
            raise UserError(
                "config.data.records = '': runs on several hosts need records; run bertjax.prepare on one host first"
            )
        print(f"preparing {', '.join(corpus_sources(config))} in {folder}", flush=True)
        manifest = preparation.prepare(config, folder, workers=available_cores())
    elif manifest is not None:
        if not config.data.records and jax.process_index() == 0:
            print(f"found prepared records in {folder}", flush=True)
        preparation.check_recipe(config, manifest, folder)
        changes = preparation.changes_of_corpus(config, manifest) if not config.data.records else []
        if changes and is_new:
            raise UserError(
                f"data.corpus: since the records in {folder} were prepared, {'; '.join(changes)}; delete the folder to "
                f"prepare it anew, or set --config.data.records={folder} to train on it as it is"
            )
        if changes and jax.process_index() == 0:
            print(f"data.corpus: {'; '.join(changes)}; going on with the records of before", flush=True)
        for line in summary.warnings_of(manifest) if is_new and jax.process_index() == 0 else ():
            print(line, flush=True)
    if manifest is None and config.data.next_sentence != "pairs":
        raise UserError(
            f"config.data.next_sentence = {config.data.next_sentence!r}: the records in {folder} have no manifest, and "
            f"are taken for Google's, which are pairs; set --config.data.next_sentence=pairs, or use bertjax.prepare"
        )
    if manifest is None and config.data.masking != "static":
        raise UserError(
            f"config.data.masking = {config.data.masking!r}: the records in {folder} have no manifest, and are taken "
            f"for Google's, which are masked; set --config.data.masking=static, or use bertjax.prepare"
        )
    if manifest is None and not config.tokenizer.path:
        raise UserError(
            f"config.tokenizer.path = '': the records in {folder} have no manifest; set the vocabulary that they "
            f"were made with"
        )
    return folder, _tokenizer_of_records(config, folder, manifest)


def _tokenizer_of_records(config, folder: epath.Path, manifest: dict | None) -> Tokenizer:
    made_with = manifest["tokenizer"] if manifest else dict(config.tokenizer)
    is_theirs = config.tokenizer.extend or not config.tokenizer.path
    path = folder / tokenizer.KINDS[made_with["kind"]].filename if is_theirs else config.tokenizer.path
    kind, lowercase = config.tokenizer.kind, config.tokenizer.lowercase
    if is_theirs:
        kind, lowercase = made_with["kind"], made_with["lowercase"]
    loaded = tokenizer.load(kind, path, lowercase)
    if manifest and loaded.fingerprint != made_with["fingerprint"]:
        raise UserError(
            f"config.tokenizer: the records in {folder} were made with another tokenizer ({made_with['kind']}, "
            f"lowercase = {made_with['lowercase']}, {made_with['vocab_size']} pieces); leave tokenizer.path empty to "
            f"use theirs"
        )
    if not config.tokenizer.path:
        pretrained.check_flags(config, loaded, f"the records in {folder}")
    vocabulary.check_vocab_size(config, loaded, path)
    return loaded


def report(config: ConfigDict, scores: Scores | None) -> str:
    """Returns the held-out scores of the objectives of a config, with their baselines."""
    if scores is None:
        return "no held-out data, so no scores"
    terms = [term for term in parse_objective(config) if f"{term.name}_loss" in scores.scores]
    return "\n".join(line for term in terms for line in term.objective.metrics.report(term.name, scores.scores))
