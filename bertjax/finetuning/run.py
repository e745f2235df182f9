"""Runs of fine-tuning, for `training.run`: from config and checkpoint to data, task, scores and report."""

import dataclasses
import functools
import math
from collections.abc import Callable, Sequence

import jax
import numpy as np
from etils import epath
from jax.sharding import Mesh
from ml_collections import ConfigDict

from bertjax.common.errors import UserError
from bertjax.common.progress import phase
from bertjax.config.limits import require
from bertjax.config.model_config import BertConfig
from bertjax.config.stages import Stage
from bertjax.data.batch import Batch
from bertjax.data.corpus import fingerprints
from bertjax.data.loading.examples import steps_per_epoch
from bertjax.distributed.mesh import batch_sharding, make_mesh
from bertjax.finetuning import distillation
from bertjax.finetuning.task import Dataset, FineTuning, Split, count_steps
from bertjax.finetuning.validate import validate
from bertjax.inference import tasks
from bertjax.inference.output_layers import OutputLayer, predict
from bertjax.interop import initialization, pretrained, resizing
from bertjax.interop.pretrained import Pretrained
from bertjax.models import families
from bertjax.text.tokenizer import Tokenizer
from bertjax.training.checkpoints.workdir import RunInfo, changed_data, load_tokenizer, tokenizer_entry
from bertjax.training.loop import TrainingResult
from bertjax.training.planning import Planned, PlannedStage, Planning
from bertjax.training.run import Run, RunKind
from bertjax.training.scores import Scores

# Turc et al. 2019 fine-tune models narrower than 512 with rates up to 3e-4.
WIDE, NARROW_RATE = 512, 3e-4


@dataclasses.dataclass(frozen=True)
class Material:
    """What the trials of a search share: tokenizer, data and, for new runs, the function that loads initial params."""

    tokenizer: Tokenizer
    dataset: Dataset
    initialize: Callable[[dict], dict] | None
    fingerprints: dict[str, str]  # fingerprints of the files that the data was read from


def adopt(config, previous: RunInfo | None, with_data: bool = True) -> None:
    """Sets the model, except dropout, to that of the earlier run or of `init_checkpoint`, and what the task takes."""
    task = tasks.get(config.task)
    if previous is None:
        architecture, settings = pretrained.read_settings(config.init_checkpoint)
        taken = task.adopt(config, settings) if architecture == task.architecture else []
        if taken and jax.process_index() == 0:
            print(f"from {config.init_checkpoint}: {', '.join(taken)}", flush=True)
        theirs, kept = pretrained.read_config(config.init_checkpoint), config.keep_layers
        if kept > (has := theirs.num_hidden_layers):
            raise UserError(f"config.keep_layers = {kept}: {config.init_checkpoint} has {has}; choose fewer")
        theirs = dataclasses.replace(theirs, num_hidden_layers=kept or has)
        initialization.adopt_model(config, theirs, config.init_checkpoint)
    else:  # does not need `init_checkpoint`, which may be gone
        task.adopt(config, previous.config)
        initialization.adopt_model(config, families.config_of(previous.config), "the run in this workdir")
    validate(config, with_data)  # now that the model is known


def load_material(config, workdir: epath.Path, previous: RunInfo | None) -> Material:
    """Loads tokenizer and data. Raises `UserError` for missing or invalid files, or if there is no vocabulary."""
    initialize, task = None, tasks.get(config.task)
    if previous is not None:
        tokenizer = load_tokenizer(workdir, previous)
    else:
        tokenizer = initialization.require_tokenizer(config)
        given = dict(path=config.init_checkpoint, encoder_only=True, continued=task.continued)
        initialize = functools.partial(initialization.initialize, **given)
        if config.keep_layers:
            initialize = functools.partial(initialize, resize=functools.partial(_with_layers, config.keep_layers))
    if jax.process_index() == 0:
        phase("reading the examples")
    with fingerprints.collect() as read:
        dataset = task.load(config, tokenizer)
    if config.get("distill", {}).get("teacher"):
        dataset = distillation.taught(config, dataset, tokenizer, workdir)
    return Material(tokenizer, dataset, initialize, fingerprints.relative_to(config.data.path, read))


def _with_layers(layers: int, arrays: dict, theirs: BertConfig) -> dict:
    return resizing.with_layers(arrays, theirs, layers)


def open_run(
    config,
    workdir: epath.Path,
    previous: RunInfo | None,
    material: Material | None = None,
    of_data: Sequence[str] = (),
) -> Run:
    """Opens a run. `material`, and `of_data`, its notes: loaded already, as for the trials of a search."""
    mesh = make_mesh(config)
    if material is None:
        material = load_material(config, workdir, previous)
        of_data = material.dataset.notes
    notes = [*of_data]
    dataset, info = material.dataset, info_of(config, material)
    task = FineTuning(config, mesh, dataset)
    # By default, after every epoch.
    config.eval.every_steps = config.eval.every_steps or steps_per_epoch(info.train_examples, config.batch_size)

    if is_slow_for_width(config):
        notes.append(
            f"config.optimizer.learning_rate = {config.optimizer.learning_rate:g}: is a rate for BERT-base; a model of "
            f"width {config.model.hidden_size} learns faster with --config.optimizer.learning_rate={NARROW_RATE:g}"
        )
    end_report = functools.partial(_end_report, dataset=dataset)
    reopen = functools.partial(open_run, workdir=workdir, previous=previous, material=material, of_data=of_data)
    return Run(config, mesh, task, info, material.tokenizer, material.initialize, notes, end_report, reopen)


def is_slow_for_width(config) -> bool:
    """Returns whether the learning rate is that of BERT-base, and the whole of a narrow model is trained with it."""
    is_narrow = config.model.get("hidden_size", WIDE) < WIDE
    return is_narrow and config.optimizer.learning_rate <= 5e-5 and not config.lora.rank and not config.sweep


def info_of(config, material: Material) -> RunInfo:
    """Makes the info of a run."""
    dataset = material.dataset
    return RunInfo(
        config.copy_and_resolve_references(),
        architecture=dataset.output_layer.architecture,
        labels=dataset.labels,
        tokenizer=tokenizer_entry(material.tokenizer),
        train_examples=dataset.count(config.batch_size),
        fingerprints=material.fingerprints,
        problem_type=dataset.output_layer.problem_type,
    )


def _changes_of_data(config, workdir: epath.Path, previous: RunInfo) -> list[str]:
    known = previous.fingerprints or {}
    return [f"{name} has changed" for name in changed_data(known, fingerprints.of_files(config.data.path, known))]


def _total_steps(config, previous: RunInfo | None) -> int | None:
    return count_steps(config, previous.train_examples) if previous and previous.train_examples else None


class FineTuningPlanning(Planning):
    """Compiles the steps of a fine-tuning task without data."""

    def adopt(self, config: ConfigDict) -> None:
        """Reads the model of `init_checkpoint`, if there is one."""
        if config.init_checkpoint:
            adopt(config, None, with_data=False)

    def candidates(self, config: ConfigDict, platform: str, device_kind: str) -> list[ConfigDict]:
        """Returns the config: fine-tuning has nothing to choose."""
        return [config]

    def open(self, config: ConfigDict, mesh: Mesh, real_tokens_share: Sequence[float]) -> Planned:
        """Returns the programs for a batch of sample texts. Raises `UserError` for a task without sample texts."""
        sample, longest = tasks.get(config.task).sample, config.model.max_position_embeddings
        if sample is None:
            known = [name for name in tasks.FINE_TUNING if tasks.get(name).sample]
            raise UserError(
                f"config.task = {config.task!r}: what is compiled depends on its data; plan pretraining, or "
                f"{', '.join(known)}"
            )
        length = config.max_seq_length
        require(length <= longest, "max_seq_length", length, f"longer than model.max_position_embeddings = {longest}")
        (share,) = real_tokens_share or (1.0,)
        task = FineTuning(config, mesh, sample(config, np.zeros(math.ceil(share * length), np.int32)))
        rows, batch, evaluate, evaluated = task.planned()
        length, sharding = batch["input_ids"].shape[-1], batch_sharding(mesh)

        def abstract(batch: Batch) -> dict:
            return {name: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding) for name, x in batch.items()}

        stage = Stage(config.task, 0, length, 0, config.batch_size)
        return Planned(task, [PlannedStage(stage, rows, abstract(batch), evaluate, (abstract(evaluated),))])


class FineTuningKind(RunKind):
    """Fine-tuning, as `training.run` executes it."""

    planning = FineTuningPlanning()

    def identity(self, config: ConfigDict) -> tuple[str, ...]:
        return tasks.get(config.task).identity

    def adopt(self, config: ConfigDict, info: RunInfo | None) -> None:
        adopt(config, info)

    def total_steps(self, config: ConfigDict, info: RunInfo | None) -> int | None:
        return _total_steps(config, info)

    def open(self, config: ConfigDict, workdir: epath.Path, info: RunInfo | None) -> Run:
        return open_run(config, workdir, info)

    def changes_of_data(self, config: ConfigDict, workdir: epath.Path, info: RunInfo) -> list[str]:
        return _changes_of_data(config, workdir, info)


KIND = FineTuningKind()


def score(source: Pretrained, output_layer: OutputLayer, split: Split) -> Scores:
    """Scores a checkpoint on examples; scores that are no numbers, such as the correlation of a constant, are None.

    What no dev set has decided, these examples do.
    """
    outputs = split.read(predict(output_layer, source, split.examples))
    finite = {name: value if math.isfinite(value) else None for name, value in split.score(outputs).items()}
    here = {name: value for name, value in split.decide(outputs).items() if math.isfinite(value)}
    return Scores(finite, decided=source.decided or here)


def _end_report(trained: TrainingResult, dataset: Dataset) -> str:
    """Formats the scores of the best checkpoint and, if it is not the last, of the last."""
    text = report(trained.scores)
    if trained.best_scores is not None and trained.best_step != int(trained.state.step):
        text = (
            f"{report(trained.best_scores)} (best checkpoint, step {trained.best_step}; predict and convert use it)\n"
            f"{text} (last step, {int(trained.state.step)})"
        )
    if dataset.baseline:
        text += f"\nalways the same answer: {dataset.metric} {100 * dataset.baseline:.2f} at most"
    return text


def report(scores: Scores, of: str = "dev") -> str:
    """Formats the scores of examples, multiplied by 100 as in papers, and the tuned values."""

    def text(name: str, value: float | None, factor: int = 100) -> str:
        return f"{name} undefined" if value is None else f"{name} {factor * value:.2f}"

    numbers = [text(name, value) for name, value in scores.scores.items()]
    numbers += [text(name, value, factor=1) for name, value in scores.decided.items()]
    return f"{of}: {', '.join(numbers)}"
