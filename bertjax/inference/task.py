"""The interface of a fine-tuning task, of its data, and of the abilities that only some tasks have.

The interface stands in this room, because the task of a checkpoint determines its use. A task is a class in one file.
The registry `bertjax.inference.tasks` finds it.
"""

import abc
import dataclasses
from collections.abc import Iterator, Sequence
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
# Keys of the params that belong to no head of fine-tuning.
PRETRAINED_KEYS = {"bert", "masked_lm", "next_sentence"}


@dataclasses.dataclass(frozen=True)
class InputForm:
    """The input format of `predict`: the allowed numbers of parts of a text, and a description for messages."""

    parts: range
    usage: str

    def split(self, texts: Sequence[str]) -> list[tuple[str, ...]]:
        """Splits texts into their parts. Raises `UserError` as `check` does."""
        divided = [tuple(text.split(SEPARATOR)) for text in texts]
        self.check(divided)
        return divided

    def check(self, texts: Sequence[tuple[str, ...]]) -> None:
        """Raises `UserError` unless all texts have the same, allowed number of parts and no part is empty."""
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

    Attributes:
      examples: the examples; `score` reads the labels from the subclass.
      note: lines to print about the examples; "" for none.
    """

    examples: Examples
    note: str = dataclasses.field(default="", kw_only=True)

    def decode(self, outputs: list[np.ndarray]) -> Any:
        """Converts the outputs of the head to predictions; by default, returns the outputs, one per example."""
        return outputs

    @abc.abstractmethod
    def score(self, predictions: Any) -> dict[str, float]:
        """Returns {metric: score} of the result of `decode`. The commands print the score times 100."""

    def decide(self, predictions: Any) -> dict[str, float]:
        """Returns the values that are tuned on these examples and that `predict` needs, such as a threshold."""
        return {}

    def files(self, predictions: Any) -> dict[str, str]:
        """Returns {file name: content} of the files for the workdir, such as the predictions."""
        return {}


@dataclasses.dataclass(frozen=True)
class TaskData:
    """The tokenized data of a task.

    Attributes:
      head: the head that the data trains.
      labels: the names of the rows of the head; empty if the rows have no names. They become `Pretrained.labels`.
      train: the training examples.
      dev: the examples to evaluate on. The metrics of different splits have different names.
      metric: the name of the metric that ranks checkpoints and runs; higher is better.
      notes: lines to print about the data.
      baseline: an upper bound of the score of a constant, or nearly constant, prediction.
      more_metrics: names of more metrics for the table of a sweep.
      texts: the parts of the text of each training example, which a teacher with another tokenizer can read; empty if
        the examples are not whole texts.
      more_train: more training examples. The examples of a batch come either from one of these or from `train`.
      forms: the forms of `train` and then of `more_train`, which choose the prompts of a teacher; empty without forms.
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
        """Returns the number of steps of an epoch on each of `train_sets`."""
        weights = (1.0, *(share.weight for share in self.more_train))
        return steps_per_dataset(list(map(len, self.train_sets)), weights, batch_size)

    def count(self, batch_size: int) -> int:
        """Returns the number of training examples of an epoch; with several sets, the examples of whole batches."""
        return batch_size * sum(self.steps_of_sets(batch_size)) if self.more_train else len(self.train)


class FineTuningTask(abc.ABC):
    """A fine-tuning task: its data, its head and its predictions.

    Each module in `finetuning/tasks/` defines a subclass, and an instance of it as `TASK`; the task has the name of the
    module. Register a task of your own with `bertjax.finetuning.register`, or as an entry point of the group
    "bertjax.tasks". `docs/extending/task.md` has two complete tasks.

    Attributes:
      architecture: the transformers class with the same head; "" if there is none. A checkpoint of transformers, which
        names no task, has the first task of the registry with this class.
      inputs: the input format of `predict`.
      method: the method of `bertjax.Model` and of the server that `predict` implements; "" for none. `Model.predict`
        applies to all tasks.
      identity: fields that, besides `task`, cannot change within a workdir, such as "data.name".
      reused_params: top-level keys of the head's params that start from an `init_checkpoint` with the same head.
      paper_sweep: the settings of `config.sweep = "paper"`.
    """

    architecture: ClassVar[str]
    inputs: ClassVar[InputForm]
    method: ClassVar[Literal["", "classify", "tag", "answer"]] = ""
    identity: ClassVar[tuple[str, ...]] = ()
    reused_params: ClassVar[tuple[str, ...]] = ()
    paper_sweep: ClassVar[str] = PAPER_SWEEP

    @abc.abstractmethod
    def load(self, config: ConfigDict, tokenizer: Tokenizer) -> TaskData:
        """Reads and tokenizes the data of a config. Raises `UserError` for missing or invalid files."""

    @abc.abstractmethod
    def head(self, source: Pretrained) -> Head:
        """Returns the head of a checkpoint of this task."""

    @abc.abstractmethod
    def predict(self, source: Pretrained, texts: Sequence[tuple[str, ...]]) -> Iterator[dict]:
        """Yields one JSON object per text. `predictor.predict` returns the outputs of the head for `Examples`.

        Args:
          source: the checkpoint. `source.settings` is the config of the run; it is empty for other formats.
            `source.decided` has the values of `Split.decide`.
          texts: the parts of each text; their numbers are in `inputs`.
        """

    def validate(self, config: ConfigDict) -> None:  # noqa: B027 (some tasks check nothing)
        """Raises `UserError` for invalid values of the fields that only this task has."""

    def adopt(self, config: ConfigDict, settings: ConfigDict) -> list[str]:
        """Copies fields of this task, which the config leaves at their defaults, from an earlier run.

        Args:
          config: the config to change.
          settings: the config of the run to resume, or of an `init_checkpoint` with the same architecture.

        Returns:
          The changes, such as "max_seq_length = 64".
        """
        return []

    def text_columns(self, config: ConfigDict) -> tuple[str, ...]:
        """Returns the names of the columns with the parts of a text in the tables of a run; () if it has no tables."""
        return ()

    def check_weights(self, source: Pretrained) -> None:
        """Raises `UserError` if a checkpoint of this task has no weights for its head."""
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

    @abc.abstractmethod
    def embed_search(self, source: Pretrained, search: Any) -> tuple[np.ndarray, np.ndarray]:
        """Returns the embeddings `[queries, width]` and `[documents, width]` of an `embedding.retrieval.Search`."""


class HasSubmission(abc.ABC):
    """The ability of a task that is part of a benchmark with a server."""

    @abc.abstractmethod
    def submission(self, source: Pretrained, path: str) -> tuple[str, str]:
        """Returns the content of the submission file for the test set in `path`, and a summary line."""


class ReadsLabelledFiles(abc.ABC):
    """The ability of a task whose checkpoints `bertjax evaluate` scores on a labelled file.

    Attributes:
      reading_flags: names of flags of `bertjax evaluate` that describe the file, such as "form". With such flags, the
        checkpoint can also come from another format than a run.
    """

    reading_flags: ClassVar[tuple[str, ...]] = ()

    @abc.abstractmethod
    def read_labelled(self, source: Pretrained, path: str, **flags: Any) -> Split:
        """Returns the examples of a file like the dev set of the run. Scores use the values tuned on the dev set.

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
    """The ability of data whose teacher gives other targets than logits of `TaskData.labels`."""

    @abc.abstractmethod
    def teacher_targets(self, teacher: Pretrained) -> list[np.ndarray]:
        """Returns the targets of each training example, of all `train_sets`.

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
