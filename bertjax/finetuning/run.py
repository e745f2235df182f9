"""A run of fine-tuning, for `training.run`: resolves the config, loads the data, and reports the scores."""

import dataclasses
import math
from collections.abc import Sequence

import jax
import numpy as np
from etils import epath
from jax.sharding import Mesh
from ml_collections import ConfigDict

from bertjax.common.errors import UserError
from bertjax.common.progress import Bar, phase
from bertjax.config.limits import require
from bertjax.config.model_config import BertConfig
from bertjax.config.resolved import Resolution, ResolvedConfig
from bertjax.config.stages import Stage
from bertjax.data.batch import Batch
from bertjax.data.corpus import fingerprints
from bertjax.data.loading.examples import count_steps, steps_per_epoch
from bertjax.distributed.mesh import batch_sharding, make_mesh
from bertjax.finetuning.distillation import with_teacher_targets
from bertjax.finetuning.task import FineTuning
from bertjax.finetuning.validate import validate
from bertjax.inference import abilities, tasks
from bertjax.inference.predictor import predict
from bertjax.inference.task import HasGuide, HasSampleData, Split, TaskData
from bertjax.interop import initialization, pretrained, resizing
from bertjax.interop.pretrained import Pretrained
from bertjax.models import families
from bertjax.text.tokenizer import Tokenizer
from bertjax.training.checkpoints.workdir import RunInfo, changed_data, tokenizer_entry, tokenizer_of_run
from bertjax.training.loop import TrainingResult
from bertjax.training.planning import Planned, PlannedStage, Planning
from bertjax.training.run import Run, RunKind
from bertjax.training.scores import Scores

WIDE = 512  # a model with a smaller hidden size is narrow


@dataclasses.dataclass(frozen=True)
class RunInputs:
    """The inputs of a run, which the trials of a sweep share.

    Attributes:
      tokenizer: the tokenizer.
      data: the data.
      fingerprints: the fingerprints of the files that the data was read from.
      is_new: whether the run starts from `config.init_checkpoint`, not from a checkpoint of its own.
    """

    tokenizer: Tokenizer
    data: TaskData
    fingerprints: dict[str, str]
    is_new: bool


@dataclasses.dataclass(frozen=True)
class FineTuningRun(Run):
    """A run of fine-tuning that is ready to train."""

    task: FineTuning
    inputs: RunInputs

    def initial_params(self, params: dict) -> dict:
        """Returns params with the encoder of `init_checkpoint`; a resumed run keeps its params.

        The head stays random, except for the params that the task reuses (`FineTuningTask.reused_params`).
        """
        if not self.inputs.is_new:
            return params
        layers = self.config.keep_layers

        def with_kept_layers(arrays: dict, model: BertConfig) -> dict:
            return resizing.with_layers(arrays, model, layers) if layers else arrays

        return initialization.initialize(
            params,
            self.config.init_checkpoint,
            encoder_only=True,
            continued=tasks.get(self.config.task).reused_params,
            resize=with_kept_layers,
        )

    def report(self, trained: TrainingResult) -> str:
        """Formats the scores of the best checkpoint and of the last checkpoint, once if both are the same."""
        text, data = report(trained.scores) if trained.scores is not None else "", self.inputs.data
        if trained.best_scores is not None and trained.best_step != int(trained.state.step):
            text = (
                f"{report(trained.best_scores)} (best checkpoint, step {trained.best_step}; predict and convert use "
                f"it)\n{text} (last step, {int(trained.state.step)})"
            )
        if data.baseline:
            text += f"\nbaseline (the same prediction for all examples): {data.metric} {100 * data.baseline:.2f}"
        scores = trained.best_scores or trained.scores
        remarks = [split.remark(scores.scores) for split in data.dev] if scores is not None else []
        return "\n".join([text, *filter(None, remarks)])

    def reopen(self, config: ResolvedConfig) -> "FineTuningRun":
        """Opens this run with a config that has another number of steps, without reading the data again."""
        return open_run(config, self.inputs, self.inputs.data.notes)


def resolve(config: ConfigDict, previous: RunInfo | None, with_data: bool = True) -> Resolution:
    """Resolves a config: takes the model fields (except dropout) and the task fields from a checkpoint.

    Args:
      config: the config of the user, after the checks that need no model.
      previous: the info of the run to resume; None for a new run.
      with_data: whether to require the location of the data.

    Raises:
      UserError: if the checkpoint does not exist, or does not fit the config.
    """
    config, task = ResolvedConfig.copy_of(config), tasks.get(config.task)
    decisions: tuple[str, ...] = ()
    if previous is None:
        architecture, settings = pretrained.read_settings(config.init_checkpoint)
        # A task without a class in transformers adopts settings only from runs of the same task.
        is_same_head = architecture == task.architecture if task.architecture else settings.get("task") == config.task
        if is_same_head and (taken := task.adopt(config, settings)):
            decisions = (f"from {config.init_checkpoint}: {', '.join(taken)}",)
        model, layers = pretrained.read_config(config.init_checkpoint), config.keep_layers
        if layers > (count := model.num_hidden_layers):
            raise UserError(
                f"config.keep_layers = {layers}: {config.init_checkpoint} has {count} layers; set at most {count}"
            )
        model = dataclasses.replace(model, num_hidden_layers=layers or count)
        initialization.adopt_model(config, model, config.init_checkpoint)
    else:  # `init_checkpoint` may have been deleted since the run began.
        task.adopt(config, previous.config)
        initialization.adopt_model(config, families.config_of(previous.config), "the run in this workdir")
    validate(config, with_data)  # again, because the fields of the model have changed
    return Resolution(config, decisions)


def load_inputs(config: ResolvedConfig, workdir: epath.Path, previous: RunInfo | None) -> RunInputs:
    """Loads tokenizer and data. Raises `UserError` for missing or invalid files, or if there is no vocabulary."""
    tokenizer = None if previous is None else tokenizer_of_run(workdir, previous)
    if tokenizer is None:
        tokenizer = initialization.require_tokenizer(config)
    if jax.process_index() == 0:
        phase("reading the examples")
    with fingerprints.collect() as read:
        data = tasks.get(config.task).load(config, tokenizer)
    if config.get("distill", {}).get("teacher"):
        data = with_teacher_targets(config, data, tokenizer, workdir)
    if isinstance(data, HasGuide):
        data = data.with_guide(tokenizer, workdir)
    return RunInputs(tokenizer, data, fingerprints.relative_to(config.data.path, read), previous is None)


def open_run(config: ResolvedConfig, inputs: RunInputs, data_notes: Sequence[str] = ()) -> FineTuningRun:
    """Opens a run.

    Args:
      config: the resolved config.
      inputs: the inputs of the run.
      data_notes: lines to print about the data; none for the trials of a sweep.
    """
    mesh, info, notes = make_mesh(config), info_of(config, inputs), [*data_notes]
    task = FineTuning(config, mesh, inputs.data)
    # By default, the run evaluates after every epoch.
    config.eval.every_steps = config.eval.every_steps or steps_per_epoch(info.train_examples, config.batch_size)
    if is_slow_for_width(config):
        notes.append(
            f"config.optimizer.learning_rate = {config.optimizer.learning_rate:g}: low for a model with "
            f"hidden_size = {config.model.hidden_size}, which learns faster with "
            f"--config.optimizer.learning_rate={tasks.get(config.task).narrow_rate:g}"
        )
    return FineTuningRun(config, mesh, task, info, inputs.tokenizer, notes, inputs)


def is_slow_for_width(config: ConfigDict) -> bool:
    """Returns whether the learning rate is low for a narrow model. False for LoRA and sweeps."""
    is_narrow = config.model.get("hidden_size", WIDE) < WIDE
    return is_narrow and config.optimizer.learning_rate <= 5e-5 and not config.lora.rank and not config.sweep


def info_of(config: ConfigDict, inputs: RunInputs) -> RunInfo:
    """Returns the info of a run."""
    head = inputs.data.head
    return RunInfo(
        config.copy_and_resolve_references(),
        architecture=head.architecture,
        labels=inputs.data.labels,
        tokenizer=tokenizer_entry(inputs.tokenizer),
        train_examples=inputs.data.count(config.batch_size),
        fingerprints=inputs.fingerprints,
        problem_type=head.problem_type,
    )


class FineTuningPlanning(Planning):
    """Compiles the steps of a fine-tuning task without data."""

    def resolve(self, config: ConfigDict) -> Resolution:
        """Reads the model of `init_checkpoint`, if there is one."""
        if config.init_checkpoint:
            return resolve(config, None, with_data=False)
        return Resolution(ResolvedConfig.copy_of(config))

    def candidates(self, config: ConfigDict, platform: str, device_kind: str) -> list[ConfigDict]:
        """Returns only the config, because the planner has no alternatives for fine-tuning."""
        return [config]

    def open(self, config: ResolvedConfig, mesh: Mesh, real_tokens_share: Sequence[float]) -> Planned:
        """Returns the task and its stage for sample texts. Raises `UserError` for a task without sample texts."""
        task, longest = tasks.get(config.task), config.model.max_position_embeddings
        if not isinstance(task, HasSampleData):
            supported = [name for name, other_task in tasks.loadable() if isinstance(other_task, HasSampleData)]
            raise UserError(
                f"config.task = {config.task!r}: `compile` supports only pretraining, {', '.join(supported)}"
            )
        length = config.max_seq_length
        require(length <= longest, "max_seq_length", length, f"longer than model.max_position_embeddings = {longest}")
        (share,) = real_tokens_share or (1.0,)
        data = task.sample_data(config, np.zeros(math.ceil(share * length), np.int32))
        training = FineTuning(config, mesh, data)
        rows, batch, evaluate, evaluated = training.planned()
        length, sharding = batch["input_ids"].shape[-1], batch_sharding(mesh)

        def abstract(batch: Batch) -> dict:
            return {name: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding) for name, x in batch.items()}

        stage = Stage(config.task, 0, length, 0, config.batch_size)
        return Planned(training, [PlannedStage(stage, rows, abstract(batch), evaluate, (abstract(evaluated),))])


class FineTuningKind(RunKind):
    """Fine-tuning, as `training.run` executes it."""

    planning = FineTuningPlanning()

    def identity(self, config: ConfigDict) -> tuple[str, ...]:
        """Returns the names of the fields that must not change when a run resumes."""
        return tasks.get(config.task).identity

    def resolve(self, config: ConfigDict, info: RunInfo | None) -> Resolution:
        """Sets the fields that an earlier run or `init_checkpoint` determines."""
        return resolve(config, info)

    def total_steps(self, config: ConfigDict, info: RunInfo | None) -> int | None:
        """Returns the steps of all epochs; None before the data is read."""
        return count_steps(config, info.train_examples) if info and info.train_examples else None

    def open(self, config: ResolvedConfig, workdir: epath.Path, info: RunInfo | None) -> Run:
        """Reads the data and opens the run."""
        inputs = load_inputs(config, workdir, info)
        return open_run(config, inputs, inputs.data.notes)

    def changes_of_data(self, config: ConfigDict, workdir: epath.Path, info: RunInfo) -> list[str]:
        """Returns a clause for each file that has changed since the run."""
        before = info.fingerprints or {}
        now = fingerprints.of_files(config.data.path, before)
        return [f"{name} has changed" for name in changed_data(before, now)]


KIND = FineTuningKind()


def score(source: Pretrained, split: Split) -> Scores:
    """Scores a checkpoint on labelled examples. Undefined scores, such as the correlation of a constant, are None.

    The scores use the thresholds of the checkpoint. Without them, multi-label classification uses 0.5, SQuAD
    returns an answer for each question, and pairs of embeddings tune the thresholds on these examples.
    """
    head = abilities.require_task(source).head(source)
    with Bar("evaluating", [len(split.examples)], " examples") as bar:
        predictions = split.decode(predict(head, source, split.examples, bar.update))
    scores = {name: value if math.isfinite(value) else None for name, value in split.score(predictions).items()}
    decided = {name: value for name, value in split.decide(predictions).items() if math.isfinite(value)}
    return Scores(scores, decided=source.decided or decided)


def report(scores: Scores, name: str = "dev") -> str:
    """Formats the scores, multiplied by 100 as in papers, and the tuned thresholds, which are not multiplied.

    Args:
      scores: the scores.
      name: the name of the examples.
    """

    def text(metric: str, value: float | None, factor: int = 100) -> str:
        return f"{metric} undefined" if value is None else f"{metric} {factor * value:.2f}"

    numbers = [text(metric, value) for metric, value in scores.scores.items()]
    numbers += [text(metric, value, factor=1) for metric, value in scores.decided.items()]
    return f"{name}: {', '.join(numbers)}"
