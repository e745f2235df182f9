"""Fine-tuning (Devlin et al. 2019, section 4 and appendix A.3): adds an output layer and trains it with the encoder."""

import dataclasses
import functools
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import ml_collections
import numpy as np
from jax.sharding import Mesh

from bertjax.common.errors import UserError
from bertjax.config.model_config import BertConfig
from bertjax.data.batch import Batch
from bertjax.data.loading.examples import Examples, PackedOrder, TrainingOrder, count_steps
from bertjax.data.loading.mixture import MixedOrder, WeightedExamples, steps_per_dataset
from bertjax.distributed.mesh import compute_on, local_rows
from bertjax.inference import losses
from bertjax.inference.output_layers import OutputLayer, apply, make_predictor
from bertjax.inference.vectors import Vectors
from bertjax.interop.pretrained import Pretrained
from bertjax.models import families
from bertjax.models.heads import cast_encoder
from bertjax.nn.ops import low_rank
from bertjax.text.tokenizer import Tokenizer
from bertjax.training.evaluator import Evaluator
from bertjax.training.scores import Scores
from bertjax.training.task import CoupledLoss

SEPARATOR = " ||| "  # between the parts of an input text
PAPER_SWEEP = "batch_size=16,32 learning_rate=5e-5,4e-5,3e-5,2e-5 epochs=2,3,4"  # appendix A.3


@dataclasses.dataclass(frozen=True)
class InputForm:
    """The input format of predict: the allowed numbers of parts of a text, and a description for messages."""

    parts: range
    usage: str

    def split(self, texts: Sequence[str]) -> list[tuple[str, ...]]:
        """Splits texts. Raises `UserError` as `check` does."""
        divided = [tuple(text.split(SEPARATOR)) for text in texts]
        self.check(divided)
        return divided

    def check(self, texts: Sequence[tuple[str, ...]]) -> None:
        """Raises `UserError` unless all texts have the same, allowed number of parts and no part is empty."""
        for parts in texts:
            if len(parts) != len(texts[0]) or len(parts) not in self.parts or not all(map(str.strip, parts)):
                raise UserError(
                    f"{SEPARATOR.join(parts)[:60]!r}: this checkpoint expects {self.usage}, the same number of "
                    f"non-empty parts in each"
                )


@dataclasses.dataclass(frozen=True)
class FineTuningTask:
    """A fine-tuning task: everything that the package needs to know about it.

    Each module in `finetuning/tasks/` defines one as `TASK`. Register your own with `finetuning.register`, or as an
    entry point of the group "bertjax.tasks".

    Args:
      architecture: the transformers class with the same output layer.
      inputs: the input format of `predict`.
      load: (config, tokenizer) -> the tokenized data. Raises `UserError` for missing or invalid files.
      predict: (checkpoint, texts as tuples of parts) -> one JSON object per text. `checkpoint.settings` is the config
        of the run, empty for other formats.
      output_layer: (checkpoint) -> the output layer that it has, for `bertjax.Model.apply`.
      method: the method of `bertjax.Model` that `predict` is: "classify", "tag", "answer"; "" if it is none of them.
      columns: (config of the run) -> names of the columns, in its tables, with the parts of a text; () if it has none.
      validate: (config) -> None. Raises `UserError` for invalid values of the task's own fields.
      adopt: (config, settings of the run, or of an `init_checkpoint` with this architecture) -> what it has taken from
        there: of the task's own fields, those that the config leaves at their defaults.
      continued: top-level keys of the output layer's params that begin with those of an `init_checkpoint`, if this has
        the same.
      weightless: whether the output layer can be without params.
      vectors: (checkpoint, prompt, width) -> how it makes vectors of texts, for `extract`, if it does.
      vectors_of_search: (checkpoint, `embedding.retrieval.Search`) -> the vectors of queries, and the vectors of
        documents, for `mine`; None if the task makes no vectors.
      identity: fields that, besides `task`, cannot change within a workdir, such as "data.name".
      submission: (checkpoint, path of the test set) -> content of the benchmark's submission file, and a summary line.
      labelled: (checkpoint of a run, path of a file like its dev set) -> the output layer, and the file's examples,
        which are scored with what the dev set decided.
      reading: names of flags of `evaluate` that `labelled` takes as well, such as "form": they say how the file is read
        instead of the config of a run, so that the checkpoint can be of another format.
      paper_sweep: the settings of `config.sweep = "paper"`.
      sample: (config, ids of a sequence) -> a batch of examples, all sequences of which are this one, as training and
        dev data, for the planner; None: too much of the task depends on its data.
    """

    architecture: str
    inputs: InputForm
    load: Callable[[Any, Tokenizer], "Dataset"]
    predict: Callable[[Pretrained, Sequence[tuple[str, ...]]], Iterator[dict]]
    output_layer: Callable[[Pretrained], OutputLayer] | None = None
    method: str = ""
    columns: Callable[[Any], tuple[str, ...]] = lambda config: ()
    validate: Callable[[Any], None] = lambda config: None
    adopt: Callable[[Any, Any], list[str]] = lambda config, theirs: []
    continued: tuple[str, ...] = ()
    weightless: bool = False
    vectors: Callable[[Pretrained, str | None, int], Vectors] | None = None
    vectors_of_search: Callable[[Pretrained, Any], tuple[np.ndarray, np.ndarray]] | None = None
    identity: tuple[str, ...] = ()
    submission: Callable[[Pretrained, str], tuple[str, str]] | None = None
    labelled: Callable[..., tuple[OutputLayer, "Split"]] | None = None
    reading: tuple[str, ...] = ()
    paper_sweep: str = PAPER_SWEEP
    sample: Callable[[Any, np.ndarray], "Dataset"] | None = None

    def check_weights(self, source: Pretrained) -> None:
        """Raises `UserError` if a checkpoint of this task has no weights for its output layer."""
        if not self.weightless and not source.params.keys() - {"bert", "masked_lm", "next_sentence"}:
            raise UserError(
                f"{source.path}: its architecture is {source.architecture}, but it has no weights for the output layer"
            )


@dataclasses.dataclass(frozen=True)
class Split:
    """Examples to evaluate on, and functions of their outputs.

    Args:
      score: (outputs) -> {metric: score}.
      decide: (outputs) -> values tuned on these examples that predict needs, such as a threshold.
      files: (outputs) -> {name: content} of files for the workdir.
      read: (logits, one array per example) -> outputs; by default the logits.
      note: a line to print about the examples.
    """

    examples: Examples
    score: Callable[[Any], dict[str, float]]
    decide: Callable[[Any], dict[str, float]] = lambda _: {}
    files: Callable[[Any], dict[str, str]] = lambda _: {}
    read: Callable[[list[np.ndarray]], Any] = lambda logits: logits
    note: str = ""


@dataclasses.dataclass(frozen=True)
class Dataset:
    """The tokenized data of a task.

    Args:
      labels: names of the rows of the output layer; empty if they have none.
      others: more training examples, each batch of which is of one of them or of `train`.
      metric: name of the metric that ranks runs; higher is better. `more_metrics`: others for a search's table.
      baseline: upper bound of the score of a constant, or nearly constant, prediction.
      notes: lines to print about the data.
      texts: the parts of each training example's text, which a teacher with another tokenizer can read; empty if the
        examples are not whole texts.
      forms: the forms of `train` and then of `others`, which choose the prompts of a teacher; empty without forms.
      taught: (teacher) -> targets for each training example, first of `train` and then of `others`, if the targets are
        not logits of `labels`. Raises `UserError` for a teacher without such targets.
    """

    output_layer: OutputLayer
    labels: tuple[str, ...]
    train: Examples
    dev: tuple[Split, ...]
    metric: str
    notes: tuple[str, ...] = ()
    baseline: float = 0.0
    more_metrics: tuple[str, ...] = ()
    texts: Sequence[tuple[str, ...]] = ()
    others: tuple[WeightedExamples, ...] = ()
    forms: tuple[str, ...] = ()
    taught: Callable[[Pretrained], list[np.ndarray]] | None = None

    @property
    def sets(self) -> tuple[Examples, ...]:
        return (self.train, *(share.examples for share in self.others))

    def steps_of_sets(self, batch_size: int) -> list[int]:
        """Returns the steps of an epoch that each set has."""
        weights = (1.0, *(share.weight for share in self.others))
        return steps_per_dataset(list(map(len, self.sets)), weights, batch_size)

    def count(self, batch_size: int) -> int:
        """Returns the training examples of an epoch; of several sets those of whole batches."""
        return batch_size * sum(self.steps_of_sets(batch_size)) if self.others else len(self.train)


def check_indices(examples: Examples, labels: Sequence[str], model: BertConfig) -> None:
    """Raises `UserError` for ids, token types or labels that no table has a row for; JAX would make NaN of them."""
    types = max(2, model.type_vocab_size)  # a model with one takes all tokens as of it
    limits = [("token id", examples.input_ids, model.vocab_size), ("token type", examples.token_types, types)]
    if labels and examples.labels is not None:
        given = (
            [np.maximum(each, 0) for each in examples.labels] if examples.per_token else [np.asarray(examples.labels)]
        )
        limits.append(("label", given, len(labels)))
    for what, arrays, limit in limits:
        values = np.concatenate([np.empty(0, np.int64), *map(np.ravel, arrays)])
        if len(values) and not 0 <= values.min() <= values.max() < limit:
            wrong = values[(values < 0) | (values >= limit)][0]
            raise UserError(f"the data has {wrong:g} as {what}, which must be from 0 to {limit - 1}")


def _init(model: nn.Module, key) -> dict:
    ids = jnp.zeros((1, 8), jnp.int32)
    return model.init(key, ids, ids, ids)["params"]


class FineTuningEvaluator(Evaluator):
    """Scores predictions for the dev splits of a dataset."""

    def __init__(self, dataset: Dataset, predict: Callable) -> None:
        self._dataset, self._predict = dataset, predict
        self._outputs: list = []  # of the last evaluation, per dev split

    def run(self, params: dict, step: int, after_batch: Callable[[], None] = lambda: None) -> Scores:
        """Returns the scores of all dev splits, see `Evaluator.run`."""
        scores, decided, self._outputs = {}, {}, []
        for split in self._dataset.dev:
            outputs = split.read(self._predict(params, split.examples, after_batch))
            scores |= split.score(outputs)
            decided |= split.decide(outputs)
            self._outputs.append(outputs)
        measured_on = f"{sum(len(split.examples) for split in self._dataset.dev)} dev examples"
        return Scores(scores, scores[self._dataset.metric], measured_on, decided)

    def files(self) -> dict[str, str]:
        """Returns the predictions of the last evaluation."""
        files = {}
        for split, outputs in zip(self._dataset.dev, self._outputs):
            files |= split.files(outputs)
        return files


class FineTuningLoss(CoupledLoss):
    """The loss of a task.

    Attributes:
      model: the encoder and the output layer.
      layer: the description of the output layer.
      compare: (outputs, batch) -> the loss of each label, and whether each prediction is correct.
    """

    def __init__(self, model: nn.Module, layer: OutputLayer, compare: Callable) -> None:
        self.model, self.layer, self.compare = model, layer, compare
        self.couples_rows = layer.couples

    def normalize(self, batch: dict) -> dict:
        """Returns the batch with normalized `weights` and `loss_weights`."""
        weights, total = batch["weights"], losses.prediction_weights(self.compare, batch).sum()
        return {
            **batch,
            "weights": weights / jnp.maximum(weights.sum(), 1),
            "loss_weights": weights / jnp.where(total > 0, total, 1),
        }

    def cast(self, params: dict) -> dict:
        """Casts the params of the encoder to the types that the model computes with."""
        return cast_encoder(params, self.model.compute.dtype)

    def __call__(self, params: dict, batch: dict, dropout_keys: jax.Array | None = None) -> tuple[jax.Array, dict]:
        """Returns the loss and the metrics, see `Loss.__call__`."""
        return self.loss_of_outputs(self.outputs(params, batch, dropout_keys), batch)

    def outputs(self, params: dict, batch: dict, dropout_keys: jax.Array | None = None) -> jax.Array:
        """Returns the outputs of the output layer `[rows, ...]`."""
        return apply(self.model, self.layer.pooled, params, batch, dropout_keys)

    def loss_of_outputs(self, outputs: jax.Array, batch: dict) -> tuple[jax.Array, dict]:
        """Returns the loss and the metrics of outputs."""
        label_losses, correct = self.compare(outputs, batch)
        tokens = (batch["segments"] > 0).sum().astype(jnp.float32)
        padding = batch["segments"].size - tokens
        return (batch["loss_weights"] * label_losses).sum(), {
            "accuracy": (batch["weights"] * correct).sum(),
            "tokens": tokens,
            "padding": padding,
        }


class FineTuning:
    """The `Task` of a dataset. `config` is validated, with the model of the checkpoint."""

    def __init__(self, config, mesh: Mesh, dataset: Dataset):
        self.config, self.mesh, self.dataset = config, mesh, dataset
        for examples in (*dataset.sets, *(split.examples for split in dataset.dev)):
            check_indices(examples, dataset.labels, families.config_of(config))
        head = config.get("head", {})
        self.lora = low_rank.of(config)
        compute = dataclasses.replace(compute_on(mesh, config), lora=self.lora)
        layer = dataset.output_layer
        self.model = layer.model(families.config_of(config), head, compute=compute)
        if self.lora:
            self._check_updates()
        compare = layer.loss_with_settings(config, dataset.labels, dataset.train)
        if dataset.train.teacher_logits is not None:
            compare = losses.Distilled(compare, config.distill.temperature, config.distill.weight)
        self.loss = FineTuningLoss(self.model, layer, compare)
        if config.packing and not layer.can_pack(self.model):
            raise UserError("config.packing = True: the model of this task cannot share rows; set packing=False")
        self.carry = None
        self.total_steps = count_steps(config, dataset.count(config.batch_size))
        self._order = self._make_order()
        self._predict = make_predictor(
            self.model, layer.pooled, mesh, config.batch_size // config.microbatches, config.packing
        )
        self.evaluator = FineTuningEvaluator(dataset, self._predict)
        self._shapes = functools.lru_cache(2)(self._shapes)

    def _make_order(self) -> PackedOrder | TrainingOrder | MixedOrder:
        config, dataset, ways = self.config, self.dataset, self.mesh.shape["data"] * self.mesh.shape["fsdp"]

        def order_of(examples: Examples) -> PackedOrder | TrainingOrder:
            given = (examples, config.batch_size, config.seed, config.model.max_position_embeddings)
            return PackedOrder(*given, ways * config.microbatches) if config.packing else TrainingOrder(*given)

        if not dataset.others:
            return order_of(dataset.train)
        return MixedOrder(list(map(order_of, dataset.sets)), dataset.steps_of_sets(config.batch_size), config.seed)

    def init_params(self, key):
        return _init(self.model, key)

    def is_frozen(self, path: tuple[str, ...]) -> bool:
        if self.lora and path[0] == "bert" and path[1] != "pooler" and not path[-1].startswith("lora_"):
            return True
        return path[0] in self.dataset.output_layer.frozen

    def _check_updates(self) -> None:
        if "bert" in self.dataset.output_layer.frozen:
            raise UserError(f"config.lora.rank = {self.lora.rank}: this task does not train the encoder; set 0")
        everywhere = dataclasses.replace(
            self.model.compute, lora=dataclasses.replace(self.lora, targets=(low_rank.ALL,))
        )
        models = self.model, self.model.clone(compute=everywhere)
        found = (nn.meta.unbox(jax.eval_shape(functools.partial(_init, model), jax.random.key(0))) for model in models)
        low_rank.check_targets(self.lora, *found)

    def layer_ids(self, path: tuple[str, ...]) -> np.ndarray | None:
        return families.layer_ids(self.model.config, path)

    def batches(self, start_step: int) -> Iterator[Batch]:
        steps = range(start_step, self.total_steps)
        yield from self._order.batches(steps, functools.partial(local_rows, self.mesh))

    def mask_updates(self, updates: dict, step: jax.Array) -> dict:
        return updates

    def loss_and_config(self, step: int) -> tuple[FineTuningLoss, ml_collections.ConfigDict]:
        return self.loss, self.config

    def flops(self, start: int, stop: int) -> int:
        if start >= stop:
            return 0
        size, steps = self._order.steps_per_epoch, np.arange(start, stop)
        # Epochs after the next one are not planned before they come, and cost about as much.
        first, epochs = start // size, np.minimum(steps // size, start // size + 1)
        shapes = np.concatenate([self._shapes(epoch) for epoch in range(first, epochs[-1] + 1)])
        shapes = shapes[(epochs - first) * size + steps % size]
        shapes, counts = np.unique(shapes, axis=0, return_counts=True)
        flops = self.dataset.output_layer.flops
        return sum(count * flops(self.model, *shape) for shape, count in zip(shapes.tolist(), counts.tolist()))

    def _shapes(self, epoch: int) -> np.ndarray:
        """`[steps of an epoch, 2]`: what `shape` of the order says of each."""
        size = self._order.steps_per_epoch
        return np.array([self._order.shape(step) for step in range(epoch * size, (epoch + 1) * size)])

    def planned(self) -> tuple[int, Batch, Callable, Batch]:
        """Returns what the planner compiles: the rows of the first step and its batch, with the rows of all hosts, and
        the function that `evaluate` computes outputs with, and its first batch."""
        (rows, _), batch = self._order.shape(0), next(self._order.batches(range(1), np.arange))
        return rows, batch, *self._predict.first(self.dataset.dev[0].examples)
