"""The heads of fine-tuning: the layers on top of an encoder, and the loss that trains them.

A head is a frozen dataclass whose fields are sizes, such as the number of labels. Heads with equal fields are equal,
and share compiled programs.
"""

import abc
import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

import flax.linen as nn
import jax
import jax.numpy as jnp
from ml_collections import ConfigDict

from bertjax.config.model_config import BertConfig
from bertjax.data.loading.examples import Examples
from bertjax.inference import losses
from bertjax.inference.losses import CrossEntropy, LabelLoss, SigmoidCrossEntropy, SquaredError
from bertjax.interop.huggingface import MULTI_LABEL, REGRESSION
from bertjax.models import families
from bertjax.models.heads import (
    BertForQuestionAnswering,
    BertForSequenceClassification,
    BertForTokenClassification,
    lstm_flops,
    model_flops,
)


@dataclasses.dataclass(frozen=True)
class Head(abc.ABC):
    """The layers on top of an encoder, and their loss. `docs/extending/task.md` has a complete head.

    A subclass is a frozen dataclass, whose fields are sizes such as the number of labels.

    Attributes:
      architecture: the transformers class with the same head, as `FineTuningTask.architecture`; "" if there is none.
      problem_type: the `problem_type` in config.json of transformers, if the number of outputs of a classifier does not
        determine it; else "".
      pooled: whether the outputs belong to whole sequences, `[rows, ...]`, or to tokens, `[rows, length, ...]`.
      frozen: top-level keys of the params that are not trained.
      supports_packing: whether several sequences can share a row. The module then takes `positions` and, if `pooled`,
        `first_tokens`, see `make_model`.
    """

    architecture: ClassVar[str] = ""
    problem_type: ClassVar[str] = ""
    pooled: ClassVar[bool] = True
    frozen: ClassVar[tuple[str, ...]] = ()
    supports_packing: ClassVar[bool] = True

    @abc.abstractmethod
    def make_model(self, config: BertConfig, **settings: Any) -> nn.Module:
        """Returns the module: the encoder with the head. Modules with equal fields must be equal.

        The module has the fields `config` and `compute`, and the submodule `bert`, the encoder that `ModelFamily.build`
        returns. The names of the other params differ from "masked_lm" and "next_sentence". A call has these arguments:

        - `input_ids`, `segments`, `token_types`: int32 `[rows, length]`. `segments` numbers the sequences of a row from
          1, and is 0 for padding.
        - `dropout_keys`: `[rows]` random keys, or None for no dropout.
        - `positions` `[rows, length]`, if several sequences share a row: the position of a token in its sequence.
        - `first_tokens` `[rows, sequences]`, if several sequences share a row and `pooled` is True: the position in the
          row of the first token of each sequence.

        A call returns a float32 array: `[rows, ...]` if `pooled`, or `[rows, sequences, ...]` with `first_tokens`; else
        `[rows, length, ...]`.

        Args:
          config: the model config.
          **settings: `compute`, the settings of the computation; and the fields of `config.head` that belong to the
            model, of which there are none by default.
        """

    @abc.abstractmethod
    def loss(self, config: ConfigDict) -> LabelLoss:
        """Returns the loss, a frozen dataclass, with the settings of `config.loss`.

        Only `CrossEntropy` and `SigmoidCrossEntropy` support class weights and label smoothing. Only a
        `losses.DistillableLoss` supports `config.distill`.

        Args:
          config: the config of the run.

        Returns:
          A callable `loss(outputs, batch)`. `outputs` are the float32 outputs of the module. `batch` has the arrays of
          `Examples.batch`, such as `labels` and `weights`. The shape of `weights` is `[rows]`, or `[rows, sequences]`
          if packed, or `[rows, length]` for labels of tokens. The callable returns two arrays of this shape: the loss
          of each label, and whether each prediction is correct.

        Raises:
          UserError: for invalid settings.
        """

    def flops(self, model: nn.Module, rows: int, length: int) -> int:
        """Returns the model FLOPs of a training step, forward and backward.

        Args:
          model: the result of `make_model`.
          rows: the number of rows of the batch of all hosts.
          length: the length of the rows in tokens, with padding.
        """
        return 3 * (model_flops(model.config, rows, length, 0) + lstm_flops(model, rows, length))

    def model(self, config: BertConfig, settings: Mapping[str, Any], **more_settings: Any) -> nn.Module:
        """Returns the result of `make_model`, without the settings that belong to the loss.

        Args:
          config: the model config.
          settings: `config.head` of the run.
          **more_settings: further arguments of `make_model`, such as `compute`.
        """
        fields = {name: value for name, value in settings.items() if name not in losses.SETTINGS}
        if not fields.get("lstm_size", True):  # The fields of a BiLSTM have no effect without one.
            fields = {name: value for name, value in fields.items() if not name.startswith("lstm_")}
        return self.make_model(config, **fields, **more_settings)

    def loss_with_settings(self, config: ConfigDict, labels: Sequence[str], train: Examples) -> LabelLoss:
        """Returns the loss with the settings of `config.loss` and `config.head`.

        Args:
          config: the config of the run.
          labels: the labels of the training data.
          train: the training examples, whose labels determine balanced class weights.

        Raises:
          UserError: if a setting is invalid, or if the loss has no such setting.
        """
        return losses.with_settings(self.loss(config), config.get("head", {}), labels, train)

    def can_pack(self, model: nn.Module) -> bool:
        """Returns whether several sequences can share a row of a module, the result of `model`."""
        has_lstm = bool(getattr(model, "lstm_size", 0))
        return self.supports_packing and not has_lstm and families.family_of(model.config).supports_packing


@dataclasses.dataclass(frozen=True)
class ClassificationHead(Head):
    """Classes of texts. Labels are class indices `[batch]`, outputs are logits `[batch, labels]`."""

    architecture = "BertForSequenceClassification"
    labels: int

    def make_model(self, config: BertConfig, **settings: Any) -> nn.Module:
        """Returns the module with a row of the classifier for each label."""
        return BertForSequenceClassification(config, labels=self.labels, **settings)

    def loss(self, config: ConfigDict) -> LabelLoss:
        """Returns the cross-entropy of the classes."""
        return CrossEntropy()


@dataclasses.dataclass(frozen=True)
class MultiLabelHead(ClassificationHead):
    """Any number of labels for each text. Labels are 0 or 1, `[batch, labels]`."""

    problem_type = MULTI_LABEL

    def loss(self, config: ConfigDict) -> LabelLoss:
        """Returns the cross-entropy of each label."""
        return SigmoidCrossEntropy()


@dataclasses.dataclass(frozen=True)
class RegressionHead(ClassificationHead):
    """A number for a text. Labels are numbers `[batch]`, outputs are `[batch, 1]`."""

    problem_type = REGRESSION
    labels: int = 1

    def loss(self, config: ConfigDict) -> LabelLoss:
        """Returns the squared error."""
        return SquaredError()


@dataclasses.dataclass(frozen=True)
class TaggingHead(Head):
    """Tags of tokens. Labels are class indices `[batch, length]`; labels with weight 0 are ignored."""

    architecture = "BertForTokenClassification"
    pooled = False
    labels: int

    def make_model(self, config: BertConfig, **settings: Any) -> nn.Module:
        """Returns the module with a row of the classifier for each tag."""
        return BertForTokenClassification(config, labels=self.labels, **settings)

    def loss(self, config: ConfigDict) -> LabelLoss:
        """Returns the cross-entropy of the tags."""
        return CrossEntropy()


@dataclasses.dataclass(frozen=True)
class SpanHead(Head):
    """Spans of tokens. Labels are the first and the last token, `[batch, 2]`; outputs are `[batch, length, 2]`."""

    architecture = "BertForQuestionAnswering"
    pooled = False

    def make_model(self, config: BertConfig, **settings: Any) -> nn.Module:
        """Returns the module with two logits for each token."""
        return BertForQuestionAnswering(config, **settings)

    def loss(self, config: ConfigDict) -> LabelLoss:
        """Returns the mean cross-entropy of the first and the last token."""
        return SpanLoss()


@dataclasses.dataclass(frozen=True)
class ChoiceHead(Head):
    """One of several sequences. Labels are indices `[batch]`; each sequence has one logit, `[batch, choices, 1]`."""

    architecture = "BertForMultipleChoice"

    def make_model(self, config: BertConfig, **settings: Any) -> nn.Module:
        """Returns the module with one logit for each sequence."""
        return BertForSequenceClassification(config, labels=1, **settings)

    def loss(self, config: ConfigDict) -> LabelLoss:
        """Returns the cross-entropy over the sequences of an example."""
        return ChoiceLoss()


@dataclasses.dataclass(frozen=True)
class SpanLoss:
    """The mean cross-entropy of the first and the last token of a span (run_squad.model_fn_builder)."""

    def __call__(self, logits: jax.Array, batch: dict) -> tuple[jax.Array, jax.Array]:
        """Returns the losses, and whether both tokens of each span are correct."""
        inside, labels = batch["segments"] > 0, batch["labels"]
        if "first_tokens" in batch:  # In a packed row, the logits of a sequence are the logits of its tokens only.
            numbers = jnp.arange(1, labels.shape[1] + 1)[:, None]
            logits, inside = logits[:, None], batch["segments"][:, None] == numbers
            labels = labels + batch["first_tokens"][..., None]
        logits = jnp.where(inside[..., None], logits, jnp.finfo(jnp.float32).min)
        token_losses, correct = CrossEntropy()(jnp.swapaxes(logits, -1, -2), {"labels": labels})
        return token_losses.mean(-1), correct.all(-1)


@dataclasses.dataclass(frozen=True)
class ChoiceLoss:
    """The cross-entropy of the correct sequence among several. Choices are not classes, and have no class weights."""

    def __call__(self, logits: jax.Array, batch: dict) -> tuple[jax.Array, jax.Array]:
        """Returns the losses, and whether each choice is correct."""
        return CrossEntropy()(logits[..., 0], batch)
