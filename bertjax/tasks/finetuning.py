"""Fine-tuning (Devlin et al. 2019, section 4 and appendix A.3): one output layer more, and all params are trained."""

import dataclasses
import functools
import importlib
import math
from collections.abc import Callable, Iterator
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import Mesh

from bertjax.config import bert_config
from bertjax.data.examples import Batch, Examples, TrainingOrder, evaluation_batches
from bertjax.model.bert import (
    BertForQuestionAnswering,
    BertForSequenceClassification,
    BertForTokenClassification,
    cast_encoder,
    forward_flops,
)
from bertjax.model.dropout import fold_in
from bertjax.sharding.mesh import compute_dtype, local_rows, put_batch, replicated
from bertjax.sharding.rules import RULES

PREDICTION_BATCH = 32


@dataclasses.dataclass(frozen=True)
class Objective:
    """What an output layer is for.

    Args:
      architecture: the class of transformers with the same layer.
      make_model: (BertConfig, dtype=, remat=, **config.head where there is one) -> module.
      loss: (logits, batch) -> (losses, right guesses), both of the shape of the batch's weights.
      frozen: parts of the model that are not trained.
      flops: (module, sequences, length) -> model FLOPs of a training step.
    """

    architecture: str
    make_model: Callable[..., nn.Module]
    loss: Callable[[jax.Array, dict], tuple[jax.Array, jax.Array]]
    frozen: tuple[str, ...] = ()
    flops: Callable[[nn.Module, int, int], int] = lambda model, sequences, length: (
        3 * forward_flops(model.config, sequences, length, 0)
    )


def classification(labels: int) -> Objective:
    """`[batch]` labels."""
    make_model = functools.partial(BertForSequenceClassification, labels=labels)
    return Objective("BertForSequenceClassification", make_model, _cross_entropy)


def regression() -> Objective:
    """`[batch]` numbers; the squared error, as in transformers. "Right" is what is off by less than a half."""

    def loss(logits, batch):
        error = logits[:, 0] - batch["labels"]
        return jnp.square(error), jnp.abs(error) < 0.5

    make_model = functools.partial(BertForSequenceClassification, labels=1)
    return Objective("BertForSequenceClassification", make_model, loss)


def tagging(labels: int) -> Objective:
    """`[batch, length]` labels; those of weight 0 are nobody's."""
    make_model = functools.partial(BertForTokenClassification, labels=labels)
    return Objective("BertForTokenClassification", make_model, _cross_entropy)


def spans() -> Objective:
    """`[batch, 2]` first and last token of an answer; the mean of both losses (run_squad.model_fn_builder)."""

    def loss(logits, batch):
        logits = mask_padding(logits, batch["input_mask"])
        losses, right = _cross_entropy(jnp.swapaxes(logits, 1, 2), batch)
        return losses.mean(-1), right.all(-1)

    return Objective("BertForQuestionAnswering", BertForQuestionAnswering, loss)


def choice() -> Objective:
    """`[batch]` numbers of the right one among several sequences, each of which gets a score."""
    make_model = functools.partial(BertForSequenceClassification, labels=1)
    return Objective("BertForMultipleChoice", make_model, _cross_entropy)


def _cross_entropy(logits, batch):
    labels = batch["labels"]
    return optax.softmax_cross_entropy_with_integer_labels(logits, labels), logits.argmax(-1) == labels


def mask_padding(logits: jax.Array, input_mask: jax.Array) -> jax.Array:
    """`[batch, length, 2]`, `[batch, length]` -> logits by which no answer begins or ends in padding."""
    return jnp.where(input_mask[..., None] > 0, logits, jnp.finfo(jnp.float32).min)


def apply(model: nn.Module, params, batch: dict, dropout_keys: jax.Array | None = None) -> jax.Array:
    """The model's logits for a batch; `[batch, choices]` where a row has several sequences."""
    inputs = [batch[name] for name in ("input_ids", "input_mask", "token_types")]
    rows, *choices, length = inputs[0].shape
    if choices:
        inputs = [x.reshape(-1, length) for x in inputs]
        if dropout_keys is not None:
            dropout_keys = jnp.stack([fold_in(dropout_keys, i) for i in range(choices[0])], axis=1).reshape(-1)
    logits = model.apply({"params": params}, *inputs, dropout_keys=dropout_keys)
    return logits.reshape(rows, *choices) if choices else logits


class Predictor:
    """Logits of examples, whatever their number and lengths."""

    def __init__(self, model: nn.Module, mesh: Mesh, batch_size: int):
        self._mesh, self._batch_size, self._longest = mesh, batch_size, model.config.max_position_embeddings
        self._apply = jax.jit(functools.partial(apply, model), out_shardings=replicated(mesh))

    def __call__(self, params, examples: Examples) -> list[np.ndarray]:
        """For each example its logits, on every host; those of tokens as many as it has tokens."""
        outputs: list = [None] * len(examples)
        own = local_rows(self._mesh, self._batch_size)
        examples = dataclasses.replace(examples, labels=None)
        with jax.set_mesh(self._mesh), nn.logical_axis_rules(RULES):
            for rows, length in evaluation_batches(examples, self._batch_size, self._longest):
                batch = examples.batch(rows[own], length)
                logits = jax.device_get(self._apply(params, put_batch(batch, self._mesh, self._batch_size)))
                for row, output in zip(rows, logits):
                    if row >= 0:
                        is_per_token = output.ndim == 2
                        outputs[row] = output[: examples.lengths[row]] if is_per_token else output
        return outputs


make_predictor = functools.lru_cache(maxsize=4)(Predictor)  # so that the runs of a sweep compile it once


def predict(objective: Objective, source, examples: Examples) -> list[np.ndarray]:
    """Logits by a checkpoint (`interop.pretrained.Pretrained`) of this objective, computed on one device."""
    mesh = Mesh(np.array(jax.devices()[:1]).reshape(1, 1, 1), ("data", "fsdp", "tensor"))
    model = objective.make_model(source.config, **source.head)
    params = jax.device_put(source.params, replicated(mesh))  # once, not with every batch
    return Predictor(model, mesh, PREDICTION_BATCH)(params, examples)


@dataclasses.dataclass(frozen=True)
class Split:
    """Examples to be scored.

    Args:
      score: what was read from the logits of the examples -> {name: number}.
      files: the same -> {name: content} of files for the workdir, where there are any.
      read: logits -> answers, where these are not the logits themselves.
    """

    examples: Examples
    score: Callable[[Any], dict[str, float]]
    files: Callable[[Any], dict[str, str]] = lambda _: {}
    read: Callable[[list[np.ndarray]], Any] = lambda logits: logits


@dataclasses.dataclass(frozen=True)
class Dataset:
    """A task's data, tokenized.

    Args:
      labels: names of the rows of the output layer; none where they have no names.
      metric: the score by which runs are compared; higher is better. `more_metrics`: others for a search's table.
      baseline: what always giving the same answer, or nearly so, would score by it at most.
      said: what was read, for the user.
    """

    objective: Objective
    labels: tuple[str, ...]
    train: Examples
    dev: tuple[Split, ...]
    metric: str
    said: tuple[str, ...] = ()
    baseline: float = 0.0
    more_metrics: tuple[str, ...] = ()


def load(config, tokenizer) -> Dataset:
    """The data of `config.task`, a module of its own. Raises `UserError` for what is missing or wrong in its files."""
    return importlib.import_module(f"bertjax.tasks.{config.task}").load(config, tokenizer)


def count_steps(config, dataset: Dataset) -> int:
    """The steps of a run: `epochs` times the batches of an epoch, of which the last may be filled up with padding."""
    return max(1, round(config.epochs * math.ceil(len(dataset.train) / config.batch_size)))


class FineTuning:
    """The `Task` of a data set. `config` is validated, and its model that of the checkpoint."""

    def __init__(self, config, mesh: Mesh, dataset: Dataset):
        self.config, self.mesh, self.dataset = config, mesh, dataset
        self.model = dataset.objective.make_model(
            bert_config(config), dtype=compute_dtype(config, mesh), remat=config.remat, **config.get("head", {})
        )
        self.frozen = dataset.objective.frozen
        longest = config.model.max_position_embeddings
        self.total_steps = count_steps(config, dataset)
        self._order = TrainingOrder(dataset.train, config.batch_size, config.seed, longest)
        self.files: dict[str, str] = {}  # for the workdir, after the last evaluation
        self._predict = make_predictor(self.model, mesh, config.batch_size // config.microbatches)

    @property
    def steps_per_epoch(self) -> int:
        return self._order.steps_per_epoch

    def init_params(self, key):
        ids = jnp.zeros((1, 8), jnp.int32)
        return self.model.init(key, ids, ids, ids)["params"]

    def batches(self, start_step: int) -> Iterator[Batch]:
        steps = range(start_step, self.total_steps)
        yield from self._order.batches(steps, local_rows(self.mesh, self.config.batch_size))

    def normalize(self, batch: dict) -> dict:
        return {**batch, "weights": batch["weights"] / jnp.maximum(batch["weights"].sum(), 1)}

    def cast(self, params):
        return cast_encoder(params, self.model.dtype)

    def loss(self, params, batch: dict, dropout_keys=None) -> tuple[jax.Array, dict]:
        losses, right = self.dataset.objective.loss(apply(self.model, params, batch, dropout_keys), batch)
        weights = batch["weights"]
        tokens = batch["input_mask"].sum().astype(jnp.float32)
        return (weights * losses).sum(), {"accuracy": (weights * right).sum(), "tokens": tokens}

    def evaluate(self, params, step: int) -> dict[str, float]:
        scores, self.files = {}, {}
        for split in self.dataset.dev:
            found = split.read(self._predict(params, split.examples))
            scores |= split.score(found)
            if step == self.total_steps:
                self.files |= split.files(found)
        return scores

    def score(self, metrics: dict[str, float]) -> float:
        return metrics[self.dataset.metric]

    def flops(self, start: int, stop: int) -> int:
        sequences = self.config.batch_size * max(1, self.dataset.train.choices)
        lengths = self._step_lengths[start:stop]
        return sum(
            int(count) * self.dataset.objective.flops(self.model, sequences, int(length))
            for length, count in zip(*np.unique(lengths, return_counts=True))
        )

    @functools.cached_property
    def _step_lengths(self) -> np.ndarray:
        return np.array([self._order.length(step) for step in range(self.total_steps)])


def encode_pairs(tokenizer, firsts: list[str], seconds: list[str] | None, max_seq_length: int):
    """`[CLS] A [SEP]` or `[CLS] A [SEP] B [SEP]`: ids, token types, and booleans: cut to `max_seq_length`.

    Of what is too long the longer side loses its last tokens, one by one (run_classifier._truncate_seq_pair).
    """
    encoded = [tokenizer.encode_ids(firsts), tokenizer.encode_ids(seconds) if seconds is not None else None]
    input_ids, token_types, cut = [], [], []
    for number, a in enumerate(encoded[0]):
        b = encoded[1][number] if encoded[1] is not None else []
        room = max_seq_length - (3 if encoded[1] is not None else 2)
        cut.append(len(a) + len(b) > room)
        if cut[-1]:
            keep_a = max(room - len(b), min(len(a), room - room // 2))  # b is cut first where both are of one length
            a, b = a[:keep_a], b[: room - min(keep_a, len(a))]
        ids = [tokenizer.cls_id, *a, tokenizer.sep_id]
        types = [0] * len(ids)
        if encoded[1] is not None:
            ids += [*b, tokenizer.sep_id]
            types += [1] * (len(b) + 1)
        input_ids.append(np.array(ids, np.int32))
        token_types.append(np.array(types, np.int32))
    return input_ids, token_types, cut


def report(scores: dict[str, float]) -> str:
    """The scores on the dev set for a person: of shares the hundredfold, as papers have it."""

    def text(name: str, value: float | None) -> str:
        if value is None:
            return f"{name} none"
        return f"{name} {value:.2f}" if name == "null_threshold" else f"{name} {100 * value:.2f}"

    return "dev: " + ", ".join(text(name, value) for name, value in scores.items())
