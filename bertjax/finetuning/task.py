"""Fine-tuning (Devlin et al. 2019, section 4 and appendix A.3): adds a head and trains it with the encoder."""

import collections
import dataclasses
import functools
import math
from collections.abc import Iterator, Sequence

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh
from ml_collections import ConfigDict

from bertjax.common.errors import UserError
from bertjax.config.model_config import BertConfig, Lora
from bertjax.config.resolved import ResolvedConfig
from bertjax.data.batch import Batch
from bertjax.data.loading.examples import Examples, Order, count_steps, next_power_of_two
from bertjax.data.loading.mixture import MixedOrder
from bertjax.distributed.mesh import compute_on, local_rows
from bertjax.finetuning.evaluator import FineTuningEvaluator
from bertjax.finetuning.losses import FineTuningLoss
from bertjax.inference import losses
from bertjax.inference.predictor import PREDICTION_BATCH, make_predictor
from bertjax.inference.task import TaskData
from bertjax.models import families
from bertjax.nn.ops import low_rank

MAX_SHAPES = 1024  # batch shapes that `FineTuning.flops` computes; the shape of packed lists costs a millisecond


class FineTuning:
    """Trains a head and its encoder on the data of a fine-tuning task; implements `training.task.Task`.

    Args:
      config: the resolved config.
      mesh: the devices.
      data: the data.
    """

    carry = None

    def __init__(self, config: ResolvedConfig, mesh: Mesh, data: TaskData) -> None:
        self.config, self.mesh, self.data = config, mesh, data
        for examples in (*data.train_sets, *(split.examples for split in data.dev)):
            check_indices(examples, data.labels, families.config_of(config))
        self.lora = low_rank.lora_of(config)
        compute = dataclasses.replace(compute_on(mesh, config), lora=self.lora)
        self.model = data.head.model(families.config_of(config), config.get("head", {}), compute=compute)
        if self.lora:
            self._check_low_rank_targets(self.lora)
        label_loss = data.head.loss_with_settings(config, data.labels, data.train)
        if data.train.teacher_logits is not None:
            if not isinstance(label_loss, losses.DistillableLoss):
                raise UserError(
                    f"config.distill.teacher = {config.distill.teacher!r}: this task cannot have a teacher; leave the "
                    f"field empty"
                )
            label_loss = losses.Distilled(label_loss, config.distill.temperature, config.distill.weight)
        self.loss = FineTuningLoss(self.model, data.head, label_loss)
        if config.packing and not data.head.can_pack(self.model):
            raise UserError(
                "config.packing = True: this model cannot read several texts in one row; set config.packing=False"
            )
        self.total_steps = count_steps(config, data.count(config.batch_size))
        self._order = self._make_order()
        prediction_batch = max(config.batch_size // config.microbatches, PREDICTION_BATCH)
        self._predictor = make_predictor(self.model, data.head.pooled, mesh, prediction_batch, config.packing)
        self.evaluator = FineTuningEvaluator(data, self._predictor)
        self._batch_shape = functools.lru_cache(2 * MAX_SHAPES)(self._order.shape)

    def _make_order(self) -> Order:
        config, data, ways = self.config, self.data, self.mesh.shape["data"] * self.mesh.shape["fsdp"]

        def order_of(examples: Examples) -> Order:
            longest, multiple = config.model.max_position_embeddings, ways * config.microbatches
            return examples.make_order(config.batch_size, config.seed, longest, multiple, config.packing)

        if not data.more_train:
            return order_of(data.train)
        return MixedOrder(list(map(order_of, data.train_sets)), data.steps_of_sets(config.batch_size), config.seed)

    def init_params(self, key: jax.Array) -> dict:
        """Returns random params, see `Task.init_params`."""
        return _init(self.model, key)

    def is_frozen(self, path: tuple[str, ...]) -> bool:
        """Returns whether the param at this path is not trained."""
        if self.lora and path[0] == "bert" and path[1] != "pooler" and not path[-1].startswith("lora_"):
            return True
        return path[0] in self.data.head.frozen

    def _check_low_rank_targets(self, lora: Lora) -> None:
        """Raises `UserError` if the encoder is not trained, or if a target of the low-rank updates does not exist."""
        if "bert" in self.data.head.frozen:
            raise UserError(f"config.lora.rank = {lora.rank}: this task does not train the encoder; set 0")
        all_targets = dataclasses.replace(lora, targets=(low_rank.ALL,))
        models = self.model, self.model.clone(compute=dataclasses.replace(self.model.compute, lora=all_targets))
        params = (nn.meta.unbox(jax.eval_shape(functools.partial(_init, model), jax.random.key(0))) for model in models)
        low_rank.check_targets(lora, *params)

    def layer_ids(self, path: tuple[str, ...]) -> np.ndarray | None:
        """Returns the layer of each slice of a param, see `Task.layer_ids`."""
        return families.layer_ids(self.model.config, path)

    def batches(self, start_step: int) -> Iterator[Batch]:
        """Yields the batches from `start_step` on, with the rows of this host."""
        steps = range(start_step, self.total_steps)
        yield from self._order.batches(steps, functools.partial(local_rows, self.mesh))

    def mask_updates(self, updates: dict, step: jax.Array) -> dict:
        """Returns the updates: fine-tuning updates all params that are not frozen."""
        return updates

    def loss_and_config(self, step: int) -> tuple[FineTuningLoss, ConfigDict]:
        """Returns the loss and the config, which are the same for all steps."""
        return self.loss, self.config

    def flops(self, start: int, stop: int) -> int:
        """Returns the model FLOPs of steps `start` to `stop - 1`.

        The function assumes that all epochs after the epoch of `start` have the batch shapes of the next epoch. The
        FLOPs of more than `MAX_SHAPES` steps are estimated from every second, fourth, ... step.
        """
        if start >= stop:
            return 0
        size, steps = self._order.steps_per_epoch, np.arange(start, stop)
        # Multiples of a power of two: a later call with a larger `start` reads the cached shapes of this call.
        steps = steps[steps % next_power_of_two(math.ceil(len(steps) / MAX_SHAPES)) == 0]
        steps = np.minimum(steps // size, start // size + 1) * size + steps % size
        counts = collections.Counter(map(self._batch_shape, steps.tolist()))
        sampled = sum(count * self.data.head.flops(self.model, *shape) for shape, count in counts.items())
        return sampled * (stop - start) // len(steps)

    def planned(self) -> tuple[int, Batch, jax.stages.Wrapped, Batch]:
        """Returns the inputs of the planner.

        Returns:
          The number of rows of the first step; the batch of this step, with the rows of all hosts; the function that
          computes the outputs of an evaluation; the first batch of an evaluation.
        """
        (rows, _), batch = self._order.shape(0), next(self._order.batches(range(1), np.arange))
        return rows, batch, *self._predictor.first(self.data.dev[0].examples)


def _init(model: nn.Module, key: jax.Array) -> dict:
    ids = jnp.zeros((1, 8), jnp.int32)
    return model.init(key, ids, ids, ids)["params"]


def check_indices(examples: Examples, labels: Sequence[str], model: BertConfig) -> None:
    """Raises `UserError` for ids, token types or labels out of range, for which JAX would compute NaN."""
    types = max(
        2, model.type_vocab_size
    )  # The data may have types 0 and 1 although the model has one type: the model reads both as type 0.
    limits = [("token id", examples.input_ids, model.vocab_size), ("token type", examples.token_types, types)]
    if labels and examples.labels is not None:
        labels_by_example = examples.labels if examples.per_token else [examples.labels]
        label_arrays = [np.maximum(x, 0) if examples.per_token else np.asarray(x) for x in labels_by_example]
        limits.append(("label", label_arrays, len(labels)))
    for name, arrays, limit in limits:
        values = np.concatenate([np.empty(0, np.int64), *map(np.ravel, arrays)])
        if len(values) and not 0 <= values.min() <= values.max() < limit:
            wrong = values[(values < 0) | (values >= limit)][0]
            raise UserError(f"the data has {wrong:g} as {name}, which must be from 0 to {limit - 1}")
