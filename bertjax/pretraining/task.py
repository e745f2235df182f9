"""The pre-training task: a sequence of stages, with the data and the loss of each stage."""

import functools
import operator
from collections.abc import Iterator, Sequence

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh
from ml_collections import ConfigDict

from bertjax.config.stages import config_in, stage_index, total_steps
from bertjax.data.batch import Batch, RowSize
from bertjax.models import families
from bertjax.models.families import recurrent_family_of
from bertjax.nn.ops.dropout import row_keys
from bertjax.objectives.objective import joint_models
from bertjax.objectives.parsing import parse_objective, terms_of_stages
from bertjax.pretraining.adaptation import HeldOutText, keep_token_updates
from bertjax.pretraining.data import StageData
from bertjax.pretraining.evaluator import PretrainingEvaluator
from bertjax.pretraining.losses import StageLoss, init_carry, make_loss
from bertjax.text.tokenizer import Tokenizer
from bertjax.training.state import abstract_axes
from bertjax.training.task import Carry

# The row with which the model is traced to initialize the params. The shapes of the params do not depend on this size.
INIT_ROW = RowSize(tokens=8, sequences=1, predictions=8)


class Pretraining:
    """Pre-training as a `training.task.Task`.

    Args:
      config: a validated config.
      mesh: the mesh of the run.
      data: the data of each stage.
      tokenizer: the tokenizer of the records, for `adapt.new_pieces_first` and bits per byte.
      heldout_text: the text for bits per byte (`eval.bits_windows`).

    Attributes:
      config: the config.
      mesh: the mesh.
      data: the data of each stage.
      losses: the loss of each stage.
      loss: the loss of the config without the changes of stages.
      evaluator: evaluates the model on held-out data.
      total_steps: the number of updates of the run.
    """

    def __init__(
        self,
        config: ConfigDict,
        mesh: Mesh,
        data: Sequence[StageData],
        tokenizer: Tokenizer | None = None,
        heldout_text: HeldOutText | None = None,
    ) -> None:
        self.config, self.mesh, self.data, self._tokenizer = config, mesh, data, tokenizer
        self.total_steps = total_steps(config)
        self.loss = make_loss(config, mesh, parse_objective(config))
        self._terms_of_stages = terms_of_stages(config)
        self._configs = [config_in(config, stage_data.stage) for stage_data in data]
        self.losses = [make_loss(stage_config, mesh, parse_objective(stage_config)) for stage_config in self._configs]
        self.evaluator = PretrainingEvaluator(config, mesh, data, self.losses, tokenizer, heldout_text)

    def init_params(self, key: jax.Array) -> dict:
        """Returns random params with the heads of all stages, logically partitioned."""
        loss = make_loss(self.config, self.mesh, self._terms_of_stages)
        spec = functools.reduce(operator.or_, (data.padded_spec for data in self.data))
        batch = spec.padding_rows(1, INIT_ROW)
        arrays = {name: jnp.asarray(values) for name, values in batch.items()}
        keys = row_keys(key, jnp.arange(1))
        return loss.model.init(key, arrays, loss.weights(arrays), None, keys)["params"]

    @property
    def carry(self) -> Carry | None:
        """The recurrent memory of the rows; None without `data.stream`."""
        if not self.config.data.stream:
            return None
        model, shortest = self.loss.model, min(data.stage.length for data in self.data)
        reach = recurrent_family_of(model.config).memory_reach(model.config, shortest)
        return Carry(functools.partial(init_carry, model, self.config.batch_size), reach)

    def is_frozen(self, path: tuple[str, ...]) -> bool:
        """Returns False: only config fields such as `freeze_layers` freeze params in pre-training."""
        return False

    def layer_ids(self, path: tuple[str, ...]) -> np.ndarray | None:
        """Returns the layers of a param, see `training.task.Task`.

        A param that a joint model adds to another param (`JointModel.delta_target`) has the layers of the other param.
        """
        targets = (objective.delta_target(path) for objective in joint_models(self._terms_of_stages))
        return families.layer_ids(self.loss.model.config, next(filter(None, targets), path))

    def batches(self, start_step: int) -> Iterator[Batch]:
        """Yields this host's rows of the batches of steps `start_step`, `start_step + 1`, ..."""
        for data in self.data:
            if start_step < data.stage.end_step:
                yield from data.batches(max(start_step, data.stage.first_step))
                start_step = data.stage.end_step

    def loss_and_config(self, step: int) -> tuple[StageLoss, ConfigDict]:
        """Returns the loss and the config of the update that follows `step` updates."""
        return self.loss_and_config_of_stage(stage_index([data.stage for data in self.data], step))

    def loss_and_config_of_stage(self, index: int) -> tuple[StageLoss, ConfigDict]:
        """Returns the loss and the config of a stage."""
        return self.losses[index], self._configs[index]

    def mask_updates(self, updates: dict, step: jax.Array) -> dict:
        """Zeroes all updates except updates of new tokens in the first `adapt.new_pieces_first` steps."""
        if not (first := self.config.adapt.new_pieces_first):
            return updates
        tokens = self._tokenizer.vocab_size if self._tokenizer else self.loss.model.config.vocab_size
        new = range(tokens - self.config.tokenizer.extend, tokens)
        return keep_token_updates(updates, abstract_axes(self.init_params), new, step < first)

    def largest_stage_index(self) -> int:
        """Returns the index of the stage with the most tokens in a microbatch; the last index in case of a tie."""
        sizes = [data.rows // data.config.microbatches * data.stage.length for data in self.data]
        return max(range(len(sizes)), key=lambda index: (sizes[index], index))

    def flops(self, start: int, stop: int) -> int:
        """Returns the model FLOPs of steps `start` to `stop - 1`, forward and backward."""
        total = 0
        for data, loss in zip(self.data, self.losses):
            stage, config = data.stage, loss.model.config
            steps = max(0, min(stop, stage.end_step) - max(start, stage.first_step))
            forward = families.family_of(config).forward_flops(config, stage.length)
            if self.config.data.stream:
                forward += recurrent_family_of(config).memory_flops(config, stage.length)
            forward += sum(term.objective.flops(config, data.row) for term in loss.terms)
            total += 3 * steps * data.rows * forward
        return total
