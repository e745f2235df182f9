"""Computes the outputs of a model for examples, in batches."""

import dataclasses
import functools
import itertools
import math
from collections.abc import Callable, Iterable, Iterator, Sequence, Sized
from typing import Any, TypeVar

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh

from bertjax.common.errors import DamagedWeights, UserError
from bertjax.config.model_config import Compute
from bertjax.data.batch import Batch
from bertjax.data.loading.evaluation import evaluation_batches, packed_evaluation
from bertjax.data.loading.examples import Examples, next_power_of_two
from bertjax.data.loading.packing import index_in_row, round_up
from bertjax.distributed.mesh import Rows, compute_for, local_rows, replicated
from bertjax.distributed.rules import RULES
from bertjax.distributed.transfers import copy_to_devices, fetch_results
from bertjax.inference.heads import Head
from bertjax.interop.pretrained import Pretrained
from bertjax.models.heads import BertForMaskedLM
from bertjax.nn.ops.dropout import fold_in
from bertjax.text.tokenizer import Tokenizer

PREDICTION_BATCH = 32
Item = TypeVar("Item", bound=Sized)
Places = list[tuple]  # (number of an example, index of the outputs of the example in the outputs of the batch)


def apply_model(
    model: nn.Module, pooled: bool, params: dict, batch: dict, dropout_keys: jax.Array | None = None
) -> jax.Array:
    """Computes the outputs of a batch of `Examples`: `[rows, ...]`, or `[rows, choices, ...]`.

    In a packed batch, the outputs of sequences are `[rows, sequences, ...]`, or `[rows, sequences, choices, ...]`.
    """
    outputs: Any  # By its type, `model.apply` can return more than an array.
    inputs = [batch[name] for name in ("input_ids", "segments", "token_types")]
    if "positions" in batch:
        packed, first_tokens = {"positions": batch["positions"]}, batch["first_tokens"]
        if pooled:
            packed["first_tokens"] = first_tokens.reshape(len(first_tokens), -1)
        outputs = model.apply({"params": params}, *inputs, dropout_keys=dropout_keys, **packed)
        return outputs.reshape(*first_tokens.shape, *outputs.shape[2:]) if pooled else outputs
    rows, *choices, length = inputs[0].shape
    if choices:
        inputs = [x.reshape(-1, length) for x in inputs]
        if dropout_keys is not None:
            keys: Any = [fold_in(dropout_keys, i) for i in range(choices[0])]
            dropout_keys = jnp.stack(keys, axis=1).reshape(-1)
    outputs = model.apply({"params": params}, *inputs, dropout_keys=dropout_keys)
    return outputs.reshape(rows, *choices, *outputs.shape[1:])


class Predictor:
    """Computes the outputs of examples on a mesh.

    Args:
      model: the encoder with a head.
      pooled: `Head.pooled` of the head.
      mesh: the devices.
      batch_size: the approximate number of examples in a batch.
      packs: whether examples share rows.
    """

    def __init__(self, model: nn.Module, pooled: bool, mesh: Mesh, batch_size: int, packs: bool) -> None:
        self._mesh, self._batch_size, self._longest = mesh, batch_size, model.config.max_position_embeddings
        self._pooled, self._packs = pooled, packs
        self._ways = mesh.shape["data"] * mesh.shape["fsdp"]  # The number of rows of a batch is a multiple of it.
        self._apply = jax.jit(functools.partial(apply_model, model, pooled), out_shardings=replicated(mesh))

    def __call__(
        self, params: dict, examples: Examples, after_batch: Callable[[int], None] = lambda examples: None
    ) -> list[np.ndarray]:
        """Returns the outputs of each example, on every host. Outputs of tokens exclude the padding.

        Args:
          params: the params of the model, on the mesh.
          examples: the examples, whose labels are not read.
          after_batch: a function that is called after each batch, with the number of its examples.
        """
        outputs: list = [None] * len(examples)
        batch_places, batches = itertools.tee(self._batches(examples, functools.partial(local_rows, self._mesh)))
        with jax.set_mesh(self._mesh), nn.logical_axis_rules(RULES):
            on_mesh = copy_to_devices((batch for _, batch in batches), self._mesh)
            for (places, _), batch_outputs in zip(
                batch_places, fetch_results(self._apply(params, batch) for batch in on_mesh)
            ):
                for example, *index in places:
                    outputs[example] = batch_outputs[tuple(index)]
                after_batch(len(places))
        return outputs

    def first(self, examples: Examples) -> tuple[jax.stages.Wrapped, Batch]:
        """Returns the compiled function (params, batch) -> outputs, and the first batch, with the rows of all hosts."""
        return self._apply, next(self._batches(examples, np.arange))[1]

    def _batches(self, examples: Examples, rows_of: Rows) -> Iterator[tuple[Places, Batch]]:
        examples = dataclasses.replace(examples, labels=None)
        return self._packed(examples, rows_of) if self._packs else self._padded(examples, rows_of)

    def _padded(self, examples: Examples, rows_of: Rows) -> Iterator[tuple[Places, Batch]]:
        row_count = min(self._batch_size, round_up(next_power_of_two(len(examples)), self._ways))
        host_rows = rows_of(row_count)
        for rows, length in evaluation_batches(examples, row_count, self._longest):
            places: Places = [
                (example, row, slice(examples.lengths[example])) for row, example in enumerate(rows) if example >= 0
            ]
            if self._pooled:
                places = [place[:2] for place in places]
            yield places, examples.batch(rows[host_rows], length)

    def _packed(self, examples: Examples, rows_of: Rows) -> Iterator[tuple[Places, Batch]]:
        packed_batches = packed_evaluation(examples, self._batch_size, self._longest, self._ways)
        for numbers, rows, starts, row_count, row in packed_batches:
            if self._pooled:
                places = list(zip(numbers, rows, index_in_row(rows)))
            else:
                ends = starts + examples.lengths[numbers]
                places = list(zip(numbers, rows, map(slice, starts, ends)))
            batch, host_rows = examples.packed(numbers, rows, starts, row_count, row), rows_of(row_count)
            yield places, {name: x[host_rows] for name, x in batch.items()}


# The cache shares compiled predictors between the trials of a sweep, and between the portions of a table.
make_predictor = functools.lru_cache(maxsize=4)(Predictor)


def predict(
    head: Head, source: Pretrained, examples: Examples, after_batch: Callable[[int], None] = lambda examples: None
) -> list[np.ndarray]:
    """Returns the outputs of each example by a checkpoint, computed on one device.

    Args:
      head: the head of the checkpoint.
      source: the checkpoint.
      examples: the examples.
      after_batch: a function that is called after each batch, with the number of its examples.

    Raises:
      UserError: if the outputs are NaN.
    """
    return single_device_predictor(head, source, after_batch)(examples)


def single_device_predictor(
    head: Head, source: Pretrained, after_batch: Callable[[int], None] = lambda examples: None
) -> Callable[[Examples], list[np.ndarray]]:
    """Returns a function from examples to the result of `predict`. The params are copied to the device only once."""
    mesh = Mesh(np.array(jax.devices()[:1]).reshape(1, 1, 1), ("data", "fsdp", "tensor"))
    model = head.model(source.config, source.head, compute=compute_for(source.dtype))
    params = jax.device_put(source.params, replicated(mesh))
    predictor = make_predictor(model, head.pooled, mesh, PREDICTION_BATCH, head.can_pack(model))

    def outputs_of(examples: Examples) -> list[np.ndarray]:
        outputs = predictor(params, examples, after_batch)
        check_numbers(*outputs)
        return outputs

    return outputs_of


def words_model(source: Pretrained, compute: Compute | None = None) -> tuple[BertForMaskedLM, dict]:
    """Returns the language model of a checkpoint, and its params on one device.

    Args:
      source: the checkpoint.
      compute: the types to compute with; None for the checkpoint's `dtype`.

    Raises:
      UserError: if the checkpoint has no language model.
    """
    if not source.predicts_words:
        raise UserError(source.no_words_reason)
    model = BertForMaskedLM(source.config, compute or compute_for(source.dtype))
    return model, jax.device_put(source.params)  # Once, not per text.


def padded_batch(sequences: Sequence[Sequence[int]], tokenizer: Tokenizer, rows: int, length: int) -> Batch:
    """Returns the inputs of a model, `[rows, length]`: one sequence per row, then rows and tokens of padding."""
    ids = np.full((rows, length), tokenizer.pad_id, np.int32)
    segments, types = np.zeros((2, rows, length), np.int32)
    for row, sequence in enumerate(sequences):
        size = len(sequence)
        ids[row, :size], segments[row, :size], types[row, :size] = sequence, 1, tokenizer.token_types(size)
    return {"input_ids": ids, "segments": segments, "token_types": types}


def divide_by_length(items: Iterable[Item], length: int, most: float = math.inf) -> Iterator[list[Item]]:
    """Yields portions of items. A portion ends when it has a total length of at least `length`, or `most` items."""
    portion: list[Item] = []
    total = 0
    for item in items:
        portion.append(item)
        total += len(item)
        if len(portion) >= most or total >= length:
            yield portion
            portion, total = [], 0
    if portion:
        yield portion


def check_numbers(*outputs: np.ndarray) -> None:
    """Raises `DamagedWeights` if an output is NaN, before anything is derived from it."""
    if any(np.isnan(output).any() for output in outputs):
        raise DamagedWeights("the checkpoint's outputs are NaN: its weights are damaged, or its training diverged")
