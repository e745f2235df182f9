"""The interface of a fine-tuning task, of its data, and of the abilities that only some tasks have.

The room `inference` contains the interface, because the task of a checkpoint determines the use of the checkpoint. A
task is a class in one file, which the registry `bertjax.inference.tasks` finds.
"""

import abc
import dataclasses
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, ClassVar, Literal

import numpy as np
from etils import epath
from ml_collections import ConfigDict

from bertjax.common.errors import UserError
from bertjax.data.loading.examples import Examples
from bertjax.data.loading.mixture import WeightedExamples, steps_per_dataset
from bertjax.inference.heads import Head
from bertjax.interop.pretrained import Pretrained
from bertjax.text.tokenizer import Tokenizer

if TYPE_CHECKING:
    from bertjax.inference.text_embedding import TextEmbedder

SEPARATOR = " ||| "  # between the parts of an input text
PAPER_SWEEP = "batch_size=16,32 learning_rate=5e-5,4e-5,3e-5,2e-5 epochs=2,3,4"  # appendix A.3
# Turc et al. 2019 fine-tune models narrower than 512 with rates up to 3e-4.
NARROW_RATE = 3e-4
# Keys of the params that belong to no head of fine-tuning.
PRETRAINED_KEYS = {"bert", "masked_lm", "next_sentence"}


@dataclasses.dataclass(frozen=True)
class InputForm:
    """The input format of `predict`. An input is a tuple of parts, such as the two texts of a pair.

    Attributes:
      parts: the allowed numbers of parts, such as `range(1, 3)` for single texts and pairs.
      usage: a description of an input, for messages, such as 'pairs as "question ||| context"'.

    Examples:
      >>> InputForm(range(2, 3), 'pairs as "A ||| B"').split(["a cat ||| a dog"])
      [('a cat', 'a dog')]
    """

    parts: range
    usage: str

    def split(self, texts: Sequence[str]) -> list[tuple[str, ...]]:
        """Splits texts at " ||| " into their parts, and checks the parts as `check` does.

        Args:
          texts: the texts, such as lines of a file.

        Returns:
          The parts of each text.

        Raises:
          UserError: if `check` raises an error.
        """
        divided = [tuple(text.split(SEPARATOR)) for text in texts]
        self.check(divided)
        return divided

    def check(self, texts: Sequence[tuple[str, ...]]) -> None:
        """Checks the parts of texts.

        Args:
          texts: the parts of each text.

        Raises:
          UserError: if a part is empty, if a text has a number of parts that `parts` does not contain, or if two texts
            have different numbers of parts.
        """
        for parts in texts:
            text = SEPARATOR.join(parts)[:60]
            if len(parts) not in self.parts or not all(map(str.strip, parts)):
                raise UserError(f"{text!r}: this checkpoint expects {self.usage}; no part may be empty")
            if len(parts) != len(texts[0]):
                raise UserError(
                    f"{text!r}: has {len(parts)} parts, but the first text has {len(texts[0])}; pass texts with "
                    f"different numbers of parts to separate calls"
                )


@dataclasses.dataclass(frozen=True)
class Split(abc.ABC):
    """Labelled examples that a model is evaluated on, such as a dev set.

    A subclass is a frozen dataclass. It implements `score`, and can have fields of its own, such as labels in another
    form. An evaluation computes the outputs of the head, calls `decode` once, and passes the result to the other
    methods.

    Attributes:
      examples: the examples. Evaluation does not read `examples.labels`, but a subclass can.
      note: lines to print about the examples; "" for none.
    """

    examples: Examples
    note: str = dataclasses.field(default="", kw_only=True)

    def decode(self, outputs: list[np.ndarray]) -> Any:
        """Converts the outputs of the head to predictions. By default returns the outputs.

        Args:
          outputs: one float32 array per example, in the order of `examples`: `[...]`, such as logits `[labels]`. For a
            head of tokens (`Head.pooled` is False) `[length, ...]`, without padding. For examples with choices, the
            first axis is the choices.

        Returns:
          The predictions, in any form that `score`, `decide` and `files` accept.
        """
        return outputs

    @abc.abstractmethod
    def score(self, predictions: Any) -> dict[str, float]:
        """Returns the scores of predictions.

        Args:
          predictions: the result of `decode`.

        Returns:
          {metric: score}. Scores are from 0 to 1 (correlations from -1 to 1), and the commands print scores times 100.
          An undefined score is NaN. The metric `TaskData.metric` is in the result of one of the dev splits.
        """

    def decide(self, predictions: Any) -> dict[str, float]:
        """Returns values that are tuned on these examples and that `FineTuningTask.predict` needs.

        Args:
          predictions: the result of `decode`.

        Returns:
          {name: value}, such as a threshold; {} by default. The checkpoint stores the values as `Pretrained.decided`.
        """
        return {}

    def remark(self, scores: Mapping[str, float | None]) -> str:
        """Returns a line to print below the scores, such as a warning; "" by default.

        Args:
          scores: the scores of the checkpoint, also of other splits.
        """
        return ""

    def files(self, predictions: Any) -> dict[str, str]:
        """Returns the files to write to the workdir if this evaluation is the best of the run.

        Args:
          predictions: the result of `decode`.

        Returns:
          {file name: text}, such as a file with the predictions; {} by default.
        """
        return {}


@dataclasses.dataclass(frozen=True)
class TaskData:
    """The tokenized data of a task.

    Attributes:
      head: the head that the data trains.
      labels: the names of the outputs of the head; empty if the outputs have no names. Checkpoints store the names as
        `Pretrained.labels`.
      train: the training examples, with labels.
      dev: the examples to evaluate on. The metrics of different splits have different names.
      metric: the name of the metric that ranks checkpoints and runs; higher is better.
      notes: lines to print about the data.
      baseline: the score `metric` of a constant prediction, or an upper bound of this score; 0 prints no baseline.
      more_metrics: names of further metrics for the table of a sweep.
      texts: the parts of the text of each training example, which a teacher with another tokenizer can read; empty if
        the examples are not whole texts.
      more_train: further sets of training examples, with their weights. All examples of a batch come from the same set:
        `train` or one of these sets.
      forms: the `config.data.form` of each of `train_sets`, which chooses the prompts of a teacher; empty for tasks
        without forms.
    """

    head: Head
    labels: tuple[str, ...]
    train: Examples
    dev: tuple[Split, ...]
    metric: str
    notes: tuple[str, ...] = ()
    baseline: float = 0.0
    more_metrics: tuple[str, ...] = ()
    texts: Sequence[tuple[str, ...]] = ()
    more_train: tuple[WeightedExamples, ...] = ()
    forms: tuple[str, ...] = ()

    @property
    def train_sets(self) -> tuple[Examples, ...]:
        """All training examples: `train`, then `more_train`."""
        return (self.train, *(share.examples for share in self.more_train))

    def steps_of_sets(self, batch_size: int) -> list[int]:
        """Returns the number of steps per epoch on each of `train_sets`, at least 1.

        Args:
          batch_size: the number of examples in a batch.
        """
        weights = (1.0, *(share.weight for share in self.more_train))
        return steps_per_dataset(list(map(len, self.train_sets)), weights, batch_size)

    def count(self, batch_size: int) -> int:
        """Returns the number of training examples per epoch; with several sets, the batch size times the steps.

        Args:
          batch_size: the number of examples in a batch.
        """
        return batch_size * sum(self.steps_of_sets(batch_size)) if self.more_train else len(self.train)


class FineTuningTask(abc.ABC):
    """A fine-tuning task: its data, its head and its predictions.

    Each module in `finetuning/tasks/` defines a subclass, and an instance of the subclass as `TASK`; the task has the
    name of the module. Register a task of your own with `bertjax.finetuning.register`, or as an entry point of the
    group "bertjax.tasks". `docs/extending/task.md` has two complete tasks.

    Attributes:
      architecture: the transformers class with the same head; "" if there is none. A checkpoint of transformers names
        no task. Its task is the first task of the registry with this class.
      inputs: the input format of `predict`.
      method: the method of `bertjax.Model` and of the server that calls `predict`: "classify", "tag" or "answer"; ""
        for none. `Model.predict` applies to all tasks.
      identity: config fields that, besides `task`, cannot change within a workdir, such as "data.name".
      reused_params: top-level keys of the params of the head. A run starts with these params of its `init_checkpoint`
        if their shapes are equal. The other params of the head start at random.
      paper_sweep: the settings of `config.sweep = "paper"`: "FIELD=VALUE,VALUE ..." for each field.
      narrow_rate: the learning rate that a run proposes for a model with a hidden size below 512.
    """

    architecture: ClassVar[str]
    inputs: ClassVar[InputForm]
    method: ClassVar[Literal["", "classify", "tag", "answer"]] = ""
    identity: ClassVar[tuple[str, ...]] = ()
    reused_params: ClassVar[tuple[str, ...]] = ()
    paper_sweep: ClassVar[str] = PAPER_SWEEP
    narrow_rate: ClassVar[float] = NARROW_RATE

    @abc.abstractmethod
    def load(self, config: ConfigDict, tokenizer: Tokenizer) -> TaskData:
        """Reads and tokenizes the data of a run. All hosts call the method, and must get the same result.

        Args:
          config: the config of the run. The fields of the task are in `config.data`, and `config.max_seq_length` is the
            maximum number of tokens in a sequence, with special tokens.
          tokenizer: the tokenizer of the model. `bertjax.finetuning.encoding.encode_pairs` tokenizes texts and pairs.

        Raises:
          UserError: for missing or invalid files.
        """

    @abc.abstractmethod
    def head(self, source: Pretrained) -> Head:
        """Returns the head of a checkpoint of this task: the head with which `load` trained the checkpoint.

        Args:
          source: the checkpoint. `source.labels` are the names of the outputs.

        Raises:
          UserError: if the task cannot use the checkpoint, for example if labels are missing.
        """

    @abc.abstractmethod
    def predict(self, source: Pretrained, texts: Sequence[tuple[str, ...]]) -> Iterator[dict]:
        """Yields the prediction for each text. `inference.predictor.predict` computes the outputs of a head.

        Args:
          source: the checkpoint, with its tokenizer. `source.settings` is the config of the run, which is empty for
            other formats. `source.max_seq_length` is the maximum number of tokens. `source.decided` has the values of
            `Split.decide`.
          texts: the parts of each text, at least one text. `inputs.check` has checked the parts.

        Yields:
          One dict per text, in order. `json.dumps` must accept the dict. By convention, `"cut": True` marks a text that
          was truncated.

        Raises:
          UserError: if the task cannot use the checkpoint or a text.
        """

    def validate(self, config: ConfigDict) -> None:  # noqa: B027 (some tasks check nothing)
        """Checks the fields that only this task has. The types of all fields are already checked.

        Args:
          config: the config of a run.

        Raises:
          UserError: for an invalid value. `bertjax.config.limits.require` raises such an error.
        """

    def adopt(self, config: ConfigDict, settings: ConfigDict) -> list[str]:
        """Copies fields of this task from an earlier run to a config that has the defaults of these fields.

        By default, copies no fields.

        Args:
          config: the config to change.
          settings: the config of the run to resume, or of an `init_checkpoint` with the same `architecture`.

        Returns:
          The changes, such as "max_seq_length = 64", which the run prints.

        Raises:
          UserError: if the earlier run cannot be continued with this config.
        """
        return []

    def text_columns(self, config: ConfigDict) -> tuple[str, ...]:
        """Returns the names of the columns that contain the parts of a text, for tables such as the data of a run.

        `bertjax predict --input=table.csv` reads these columns.

        Args:
          config: the config of the run.

        Returns:
          One name for each part; () if the data of the task are not tables.
        """
        return ()

    def check_weights(self, source: Pretrained) -> None:
        """Checks that a checkpoint of this task contains the params of a head. Override it if a head has no params.

        Args:
          source: the checkpoint.

        Raises:
          UserError: if the checkpoint contains no params of a head.
        """
        if not source.params.keys() - PRETRAINED_KEYS:
            raise UserError(
                f"{source.path}: the weights of the head of {source.architecture} are missing; copy the checkpoint "
                f"again"
            )


class HasEmbeddings(abc.ABC):
    """The ability of a task whose checkpoints compute embeddings of texts."""

    @abc.abstractmethod
    def embedder(self, source: Pretrained, prompt: str | None = None, width: int = 0) -> "TextEmbedder":
        """Returns the embedder of texts.

        Args:
          source: the checkpoint.
          prompt: the name of a prompt, such as "query" or "document", or the text of a prompt; None for the default.
          width: keeps the first `width` numbers of an embedding; 0 keeps all.

        Raises:
          UserError: if an embedding has fewer numbers than `width`.
        """


class HasSubmission(abc.ABC):
    """The ability of a task that is part of a benchmark with a server."""

    @abc.abstractmethod
    def submission(self, source: Pretrained, path: str) -> tuple[str, str]:
        """Returns the content of the submission file for the test set in `path`, and a summary line."""


class ReadsLabelledFiles(abc.ABC):
    """The ability of a task whose checkpoints `bertjax evaluate` scores on a labelled file.

    Attributes:
      reading_flags: names of flags of `bertjax evaluate` that describe the file, such as "form". A task with such flags
        can also score checkpoints that are not runs of bertjax.
    """

    reading_flags: ClassVar[tuple[str, ...]] = ()

    @abc.abstractmethod
    def read_labelled(self, source: Pretrained, path: str, **flags: Any) -> Split:
        """Reads a file of the same kind as the dev set of the run. `score` uses the values tuned on the dev set.

        Args:
          source: the checkpoint.
          path: the path of the file.
          **flags: values of `reading_flags` that the user has set.
        """


class HasSampleData(abc.ABC):
    """The ability of a task that the planner compiles without the user's data."""

    @abc.abstractmethod
    def sample_data(self, config: ConfigDict, input_ids: np.ndarray) -> TaskData:
        """Returns a batch of examples, all with the sequence `input_ids` `[length]`, as training and dev data."""


class HasTeacherTargets(abc.ABC):
    """The ability of a `TaskData` whose teacher computes other targets than logits of `TaskData.labels`."""

    @abc.abstractmethod
    def teacher_targets(self, teacher: Pretrained) -> list[np.ndarray]:
        """Returns the targets of each training example, in the order of `train_sets`.

        Raises:
          UserError: if the teacher has no such targets.
        """


class HasGuide(abc.ABC):
    """The ability of data whose loss compares texts with the embeddings of a second checkpoint, the guide."""

    @abc.abstractmethod
    def with_guide(self, tokenizer: Tokenizer, workdir: epath.Path) -> TaskData:
        """Returns the data with `Examples.guide_embeddings`, which the workdir stores; without a guide, this data.

        Raises:
          UserError: if the guide computes no embeddings.
        """
