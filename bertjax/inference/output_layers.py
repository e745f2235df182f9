"""The output layers of fine-tuning: model, loss, and prediction of logits."""

import dataclasses
import functools
import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh

from bertjax.common.errors import UserError
from bertjax.config.model_config import BertConfig, Compute
from bertjax.data.batch import Batch
from bertjax.data.loading.examples import Examples, evaluation_batches, packed_evaluation
from bertjax.data.loading.packing import index_in_row
from bertjax.distributed.mesh import Rows, compute_for, local_rows, replicated
from bertjax.distributed.rules import RULES
from bertjax.distributed.transfers import fetched, on_devices
from bertjax.inference import losses
from bertjax.inference.losses import CrossEntropy, SigmoidCrossEntropy, SquaredError
from bertjax.interop.huggingface import MULTI_LABEL, REGRESSION
from bertjax.models import families
from bertjax.models.heads import (
    BertForMaskedLM,
    BertForQuestionAnswering,
    BertForSequenceClassification,
    BertForTokenClassification,
    lstm_flops,
    model_flops,
)
from bertjax.nn.ops.dropout import fold_in

PREDICTION_BATCH = 32


@dataclasses.dataclass(frozen=True)
class OutputLayer:
    """The model and the loss of a kind of output layer.

    Args:
      architecture: the transformers class with the same output layer; `problem_type`: what its config calls the problem
        of a classifier whose rows do not say it.
      make_model: (config, compute=, **the settings of `config.head` that are the model's) -> module.
      pooled: whether logits are those of whole sequences, `[batch, ...]`; else of their tokens, `[batch, length, ...]`.
      loss: (logits, batch) -> (losses, whether each prediction is correct), both of the shape of the batch's weights.
      loss_of: (config) -> the loss, where it has settings in `config.loss`; then `loss` is None.
      frozen: top-level keys of the params that are not trained.
      flops: (module, rows, length) -> model FLOPs of a training step.
      couples: whether the loss of an example depends on others of its batch. It is computed of the rows of a group of
        devices, and gets those of the other groups with `jax.lax.all_gather(..., mesh.GROUPS)`.
      supports_packing: whether sequences can share a row, unless LSTMs read whole rows; then the module takes
        `positions`, see `apply`.
    """

    architecture: str
    make_model: Callable[..., nn.Module]
    loss: Callable[[jax.Array, dict], tuple[jax.Array, jax.Array]] | None
    frozen: tuple[str, ...] = ()
    flops: Callable[[nn.Module, int, int], int] = lambda model, sequences, length: (
        3 * (model_flops(model.config, sequences, length, 0) + lstm_flops(model, sequences, length))
    )
    supports_packing: bool = False
    couples: bool = False
    loss_of: Callable[..., Callable] | None = None
    problem_type: str = ""
    pooled: bool = dataclasses.field(kw_only=True)

    def model(self, config: BertConfig, head: Mapping, **how) -> nn.Module:
        """Makes the model of `config.head`; where that has no BiLSTM, `make_model` is told nothing of one."""
        head = {name: value for name, value in head.items() if name not in losses.SETTINGS}
        if not head.get("lstm_size", True):
            head = {name: value for name, value in head.items() if not name.startswith("lstm_")}
        return self.make_model(config, **head, **how)

    def loss_with_settings(self, config, labels: Sequence[str], train: Examples) -> Callable:
        """Returns the loss with the settings of a config. Raises `UserError` if they are invalid."""
        loss = self.loss_of(config) if self.loss_of else self.loss
        return losses.with_settings(loss, config.get("head", {}), labels, train)

    def can_pack(self, model: nn.Module) -> bool:
        return (
            self.supports_packing
            and not getattr(model, "lstm_size", 0)
            and families.family_of(model.config).supports_packing
        )


def classification(labels: int) -> OutputLayer:
    """Labels are `[batch]` class indices."""
    make_model = functools.partial(BertForSequenceClassification, labels=labels)
    return OutputLayer("BertForSequenceClassification", make_model, CrossEntropy(), supports_packing=True, pooled=True)


def multi_label(labels: int) -> OutputLayer:
    """Labels are `[batch, labels]`, 1 or 0 each."""
    return dataclasses.replace(classification(labels), loss=SigmoidCrossEntropy(), problem_type=MULTI_LABEL)


def regression() -> OutputLayer:
    """Labels are `[batch]` numbers."""
    make_model = functools.partial(BertForSequenceClassification, labels=1)
    layer = OutputLayer("BertForSequenceClassification", make_model, SquaredError(), supports_packing=True, pooled=True)
    return dataclasses.replace(layer, problem_type=REGRESSION)


def tagging(labels: int) -> OutputLayer:
    """Labels are `[batch, length]` class indices; those with weight 0 are ignored."""
    make_model = functools.partial(BertForTokenClassification, labels=labels)
    return OutputLayer("BertForTokenClassification", make_model, CrossEntropy(), supports_packing=True, pooled=False)


def spans() -> OutputLayer:
    """Labels are `[batch, 2]`, first and last token. The loss is the mean of both (run_squad.model_fn_builder)."""

    def loss(logits, batch):
        inside, labels = batch["segments"] > 0, batch["labels"]
        if "first_tokens" in batch:  # the tokens of each sequence of a row
            numbers = jnp.arange(1, labels.shape[1] + 1)[:, None]
            logits, inside = logits[:, None], batch["segments"][:, None] == numbers
            labels = labels + batch["first_tokens"][..., None]
        logits = jnp.where(inside[..., None], logits, jnp.finfo(jnp.float32).min)
        of_ends, correct = CrossEntropy()(jnp.swapaxes(logits, -1, -2), {"labels": labels})
        return of_ends.mean(-1), correct.all(-1)

    return OutputLayer("BertForQuestionAnswering", BertForQuestionAnswering, loss, supports_packing=True, pooled=False)


def choice() -> OutputLayer:
    """Labels are the `[batch]` indices of the correct sequence among several, each of which has one logit:
    `[batch, choices, 1]`."""

    def loss(logits, batch):  # choices are no classes
        return CrossEntropy()(logits[..., 0], batch)

    make_model = functools.partial(BertForSequenceClassification, labels=1)
    return OutputLayer("BertForMultipleChoice", make_model, loss, supports_packing=True, pooled=True)


def apply(model: nn.Module, pooled: bool, params, batch: dict, dropout_keys: jax.Array | None = None) -> jax.Array:
    """Computes the logits of a batch of `Examples`: `[rows, ...]`, or `[rows, choices, ...]`.

    Those of whole sequences are `[rows, sequences, ...]` if the batch is packed, or `[rows, sequences, choices, ...]`.
    """
    inputs = [batch[name] for name in ("input_ids", "segments", "token_types")]
    if "positions" in batch:
        packed, first_tokens = {"positions": batch["positions"]}, batch["first_tokens"]
        if pooled:
            packed["first_tokens"] = first_tokens.reshape(len(first_tokens), -1)
        logits = model.apply({"params": params}, *inputs, dropout_keys=dropout_keys, **packed)
        return logits.reshape(*first_tokens.shape, *logits.shape[2:]) if pooled else logits
    rows, *choices, length = inputs[0].shape
    if choices:
        inputs = [x.reshape(-1, length) for x in inputs]
        if dropout_keys is not None:
            dropout_keys = jnp.stack([fold_in(dropout_keys, i) for i in range(choices[0])], axis=1).reshape(-1)
    logits = model.apply({"params": params}, *inputs, dropout_keys=dropout_keys)
    return logits.reshape(rows, *choices, *logits.shape[1:])


class Predictor:
    """Computes the logits of examples, in batches of about as many; `packs`: they share rows."""

    def __init__(self, model: nn.Module, pooled: bool, mesh: Mesh, batch_size: int, packs: bool):
        self._mesh, self._batch_size, self._longest = mesh, batch_size, model.config.max_position_embeddings
        self._pooled, self._packs = pooled, packs
        self._apply = jax.jit(functools.partial(apply, model, pooled), out_shardings=replicated(mesh))

    def __call__(self, params, examples: Examples, after_batch: Callable[[], None] = lambda: None) -> list[np.ndarray]:
        """Returns the logits of each example, on every host; logits per token without those of padding."""
        outputs: list = [None] * len(examples)
        places, batches = itertools.tee(self._batches(examples, functools.partial(local_rows, self._mesh)))
        with jax.set_mesh(self._mesh), nn.logical_axis_rules(RULES):
            on_mesh = on_devices((batch for _, batch in batches), self._mesh)
            for (found, _), logits in zip(places, fetched(self._apply(params, batch) for batch in on_mesh)):
                for example, *place in found:
                    outputs[example] = logits[tuple(place)]
                after_batch()
        return outputs

    def first(self, examples: Examples) -> tuple[Callable, Batch]:
        """Returns the compiled function (params, batch) -> logits, and the first batch, with the rows of all hosts."""
        return self._apply, next(self._batches(examples, np.arange))[1]

    def _batches(self, examples: Examples, rows_of: Rows) -> Iterator[tuple[list, Batch]]:
        """Yields batches, each with (example, where its logits are) of its examples."""
        examples = dataclasses.replace(examples, labels=None)
        return self._packed(examples, rows_of) if self._packs else self._padded(examples, rows_of)

    def _padded(self, examples: Examples, rows_of: Rows) -> Iterator[tuple[list, Batch]]:
        own = rows_of(self._batch_size)
        for rows, length in evaluation_batches(examples, self._batch_size, self._longest):
            places = [
                (example, row, slice(examples.lengths[example])) for row, example in enumerate(rows) if example >= 0
            ]
            if self._pooled:
                places = [place[:2] for place in places]
            yield places, examples.batch(rows[own], length)

    def _packed(self, examples: Examples, rows_of: Rows) -> Iterator[tuple[list, Batch]]:
        ways = self._mesh.shape["data"] * self._mesh.shape["fsdp"]
        for found, rows, starts, *shape in packed_evaluation(examples, self._batch_size, self._longest, ways):
            if self._pooled:
                places = list(zip(found, rows, index_in_row(rows)))
            else:
                ends = starts + examples.lengths[found]
                places = list(zip(found, rows, map(slice, starts, ends)))
            batch, own = examples.packed(found, rows, starts, *shape), rows_of(shape[0])
            yield places, {name: x[own] for name, x in batch.items()}


make_predictor = functools.lru_cache(maxsize=4)(
    Predictor
)  # compiled once for all trials of a search, or parts of a table


def predict(output_layer: OutputLayer, source, examples: Examples) -> list[np.ndarray]:
    """Returns the logits of each example by a checkpoint (`interop.pretrained.Pretrained`), using one device.

    Raises `UserError` if they are no numbers.
    """
    return on_one_device(output_layer, source)(examples)


def on_one_device(output_layer: OutputLayer, source) -> Callable[[Examples], list[np.ndarray]]:
    """Returns what `predict` computes with, for several portions of examples."""
    mesh = Mesh(np.array(jax.devices()[:1]).reshape(1, 1, 1), ("data", "fsdp", "tensor"))
    model = output_layer.model(source.config, source.head, compute=compute_for(source.dtype))
    params = jax.device_put(source.params, replicated(mesh))  # once, not per batch
    packs = output_layer.can_pack(model)
    predictor = make_predictor(model, output_layer.pooled, mesh, PREDICTION_BATCH, packs)

    def logits(examples: Examples) -> list[np.ndarray]:
        found = predictor(params, examples)
        check_numbers(*found)
        return found

    return logits


def words_model(source, compute: Compute | None = None) -> tuple[BertForMaskedLM, dict]:
    """Returns the model that predicts the words of a checkpoint, and its params on one device.

    `compute`: how it computes, if not in the checkpoint's `dtype`. Raises `UserError` if it predicts none.
    """
    if not source.predicts_words:
        raise UserError(source.no_words_reason)
    model = BertForMaskedLM(source.config, compute or compute_for(source.dtype))
    return model, jax.device_put(source.params)  # once, not per text


def check_numbers(*outputs: np.ndarray) -> None:
    """Raises `UserError` if a model's outputs are not numbers, before anything is said that would be read from them."""
    if any(np.isnan(each).any() for each in outputs):
        raise UserError("the checkpoint's outputs are NaN: its weights are damaged, or its training diverged")
