"""Pre-training: stages of sequences, from which a model learns the objectives of the config, and its scores."""

import copy
import dataclasses
import functools
import itertools
import math
from collections.abc import Callable, Iterator, Sequence

import flax.linen as nn
import jax
import jax.numpy as jnp
import ml_collections
import numpy as np
from etils import epath
from jax.sharding import Mesh

from bertjax.common.errors import UserError
from bertjax.config.lists import mixture_of
from bertjax.config.stages import config_in, stages_of, total_steps
from bertjax.data.loading import pipeline
from bertjax.data.loading.order import Order
from bertjax.data.loading.packing import RowSize
from bertjax.data.records.manifest import training_shares
from bertjax.data.records.record_sets import find_records, mixed
from bertjax.distributed.mesh import Batch, batch_sharding, compute_on, local_copy, local_rows, replicated
from bertjax.distributed.rules import RULES
from bertjax.distributed.transfers import fetched, on_devices
from bertjax.models import families
from bertjax.models.heads import BertForMaskedLM, cast_encoder
from bertjax.nn.ops.dropout import fold_in, row_keys
from bertjax.objectives.objective import Term
from bertjax.objectives.parsing import parse_objective, terms_of_stages
from bertjax.objectives.parts.pretraining_model import PretrainingModel
from bertjax.objectives.parts.transforms import additions_of
from bertjax.pretraining.adaptation import HeldOutText, only_pieces
from bertjax.pretraining.batch_shapes import (
    abstract_arrays,
    kinds_of_additions,
    kinds_of_arrays,
    most_predictions,
    row_multiple,
    row_size,
)
from bertjax.pretraining.scores import divided, means_of, normalized, scores_of
from bertjax.text.tokenizer import Tokenizer
from bertjax.training.scores import Scores
from bertjax.training.state import abstract_axes
from bertjax.training.task import Recurrence

MEASURED_SEQUENCES = 65_536  # training sequences that the statistics of baselines are estimated from
STREAM_ROWS = 8  # rows in which held-out text that goes on is read, or one for each of more devices: few and long
OBJECTIVES_KEY = 1 << 16  # derives the objectives' keys from a row's; lower numbers are the layers'


class Pretraining:
    """The `Task` of pre-training, with its stages in sequence.

    Args:
      config: a validated config.
      mesh: the mesh that `evaluate` runs on.
      records: folder of TFRecords; None if `batches` and `evaluate` are unused (the planner) or overridden.
      cache: folder that keeps what has been counted in records without a manifest.
      tokenizer: for what objectives add to the records, such as masks (`data.masking=dynamic`).
      rows: the rows of a step of each stage, if sequences are packed and `records` is None.
      heldout_text: what bits per byte are measured on in evaluations (`eval.bits_windows`).

    Attributes:
      rows: the rows of a step of each stage; with packing, of the first steps: later ones may have a few more or fewer.
    """

    couples_rows = False

    def __init__(
        self,
        config,
        mesh: Mesh,
        records: epath.PathLike | None,
        cache: epath.Path | None = None,
        tokenizer: Tokenizer | None = None,
        rows: Sequence[int] | None = None,
        heldout_text: HeldOutText | None = None,
    ):
        self.config, self.mesh = config, mesh
        self._tokenizer, self._heldout_text = tokenizer, heldout_text
        self.terms = parse_objective(config)
        self.model = self._make_model(self.terms)
        self.total_steps, self._stages = total_steps(config), stages_of(config)
        self._configs = [config_in(config, stage) for stage in self._stages]
        self._terms_of_stages = terms_of_stages(config)
        ways = mesh.shape["data"] * mesh.shape["fsdp"]
        for stage, its in zip(self._stages, self._configs):
            if stage.batch_size % (its.microbatches * ways):
                raise UserError(
                    f"config.stages.{stage.name}: a batch of {stage.batch_size} in {its.microbatches} microbatches "
                    f"cannot be shared by {ways} devices (mesh.data * mesh.fsdp); choose multiples"
                )
        self.row_sizes = [row_size(*each) for each in zip(self._configs, self._stages)]
        self.rows = rows or [stage.batch_size for stage in self._stages]
        if records is not None:
            given = dict(vocab_size=config.model.vocab_size, cache=cache)
            given["token_types"] = max(2, families.config_of(config).type_vocab_size)
            given |= dict(on_corrupt=config.data.on_corrupt, checksums=config.data.checksums)
            find = functools.cache(functools.partial(find_records, records, **given))
            shapes = [(s.length, s.max_predictions_per_seq) for s in self._stages]
            train = [find(*shape, split="train", measures=config.packing) for shape in shapes]
            shares = training_shares(records)
            mixtures = [
                mixture_of(its, dict.fromkeys([*shares, *files.sources], 1.0), files.sizes)
                if any(files.sources)
                else {}
                for its, files in zip(self._configs, train)
            ]
            train = [mixed(*each) if each[1] else each[0] for each in zip(train, mixtures)]
            self.orders = [
                Order(files, stage.batch_size, config.seed, row, stage.sequences_before, config.data.stream)
                for files, stage, row in zip(train, self._stages, self.row_sizes)
            ]
            heldout = [find(*shape, split="heldout") for shape in shapes]
            self._heldout = [found.by_source() if found else {} for found in heldout]
            if config.eval.patience and not all(self._heldout):
                raise UserError(
                    f"config.eval.patience = {config.eval.patience}: {records} holds out no text, by whose score a run "
                    "could stop early; set 0"
                )
            self._shares = [{source: x * each.get(source, 1) for source, x in shares.items()} for each in mixtures]
            if config.packing:
                self.rows = [order.rows(0, row_multiple(c, mesh)) for order, c in zip(self.orders, self._configs)]
            self._additions = [additions_of(config, stage, tokenizer) for stage in self._stages]
        if config.data.stream:  # how much of the text a row reads, and so its memory, must not depend on microbatches
            self.eval_batch_size = ways * -(-STREAM_ROWS // ways)
        else:  # fits in memory, because a microbatch does
            self.eval_batch_size = min(
                rows // each.microbatches
                for rows, each, stage in zip(self.rows, self._configs, self._stages)
                if not stage.grows
            )
        self._statistics: dict | None = None  # measured at the first evaluation
        self._stage_ends = list(itertools.accumulate(s.steps for s in self._stages))

    # The interface of `Task`.

    def init_params(self, key):
        whole = copy.copy(self)
        whole.terms = self._terms_of_stages  # all output layers are there from the first step on
        sizes = dict(token=(8,), sequence=(), word=(8,), row=())
        shapes = {name: sizes[kind] for name, kind in kinds_of_arrays(self.config, whole.terms, predictions=8).items()}
        abstract = abstract_arrays(whole.terms, self.mesh, 1, shapes)
        batch = {name: jnp.zeros(x.shape, x.dtype) for name, x in abstract.items()}
        model = self._make_model(whole.terms)
        return model.init(key, batch, whole._weights(batch), None, row_keys(key, jnp.arange(1)))["params"]

    @property
    def recurrence(self) -> Recurrence | None:
        if not self.config.data.stream:
            return None
        config, shortest = self.model.config, min(stage.length for stage in self._stages)
        # The memory of a layer is made by that of the layer below it, which reaches as far back again.
        reach = config.num_hidden_layers * math.ceil(config.memory_length / shortest)
        return Recurrence(functools.partial(self._new_memory, self.config.batch_size, config), reach)

    def is_frozen(self, path: tuple[str, ...]) -> bool:
        return False

    def layer_numbers(self, path: tuple[str, ...]) -> np.ndarray | None:
        moved = (term.objective.moves(path) for term in self._terms_of_stages)
        return families.layer_ids(self.model.config, next(filter(None, moved), path))

    def batches(self, start_step: int) -> Iterator[Batch]:
        first, own = 0, functools.partial(local_rows, self.mesh)
        for index, end in enumerate(self._stage_ends):
            if start_step < end:
                start = max(start_step, first)
                given = dict(start=start - first, rows=own, additions=self._additions[index])
                order, predictions = self.orders[index], self._stages[index].max_predictions_per_seq
                if self.config.packing:
                    given |= dict(multiple=row_multiple(self._configs[index], self.mesh))
                    given |= dict(kinds=kinds_of_additions(self._computing[index].terms))
                    batches = pipeline.packed_batches(order, predictions, **given)
                else:
                    batches = pipeline.train_batches(order, predictions, **given)
                yield from map(self._computing[index]._with_progress, range(start, end), batches)
            first = end

    def at(self, step: int) -> tuple["Pretraining", ml_collections.ConfigDict]:
        return self.at_stage(self._index(step))

    def normalize(self, batch: dict) -> dict:
        def scaled(term, weights):
            return weights / term.objective.total(weights)

        weights = self._weights(batch)
        return {**batch, "weights": {term.name: scaled(term, weights[term.name]) for term in self.terms}}

    def cast(self, params):
        return cast_encoder(params, self.model.compute.dtype)

    def loss(self, params, batch: dict, dropout_keys=None) -> tuple[jax.Array, dict]:
        keys = fold_in(dropout_keys, OBJECTIVES_KEY)
        if keys is None:
            keys = row_keys(jax.random.key(0), jnp.arange(len(batch["input_ids"])))
        weights = batch["weights"] if "weights" in batch else self._weights(batch)
        found, memory = self.model.apply({"params": params}, batch, weights, dropout_keys, keys)
        tokens = (batch["segments"] > 0).sum().astype(jnp.float32)
        loss, metrics = 0.0, {"tokens": tokens, "padding": batch["segments"].size - tokens}
        for name, weight, _ in self.terms:
            own, others = found[name]
            loss = loss + (own if weight == 1 else weight * own)
            metrics |= {f"{name}_{metric}": value for metric, value in {"loss": own, **others}.items()}
        return loss, metrics if memory is None else metrics | {"memory": memory}

    def limited(self, updates, step):
        if not (first := self.config.adapt.new_pieces_first):
            return updates
        pieces = self._tokenizer.vocab_size if self._tokenizer else self.model.config.vocab_size
        new = range(pieces - self.config.tokenizer.extend, pieces)
        return only_pieces(updates, abstract_axes(self.init_params), new, step < first)

    def evaluate(self, params, step: int, after_batch: Callable[[], None] = lambda: None) -> Scores | None:
        """Returns the scores of the objectives on held-out data, with their baselines; None if there is none.

        Evaluates the first `eval.max_sequences` held-out sequences of the stage of `step`; losses of different lengths
        are not compared. Of several sources, each counts as much as in training; `mlm_loss (SOURCE)` and
        `mlm_accuracy (SOURCE)` are those of one, by the first objective.
        """
        index = self._index(max(0, step - 1))
        statistics, means, total = None, {}, 0
        shares = {source: self._shares[index].get(source, 1.0) for source in self._heldout[index]}
        shares = normalized({source: share for source, share in shares.items() if share})
        for source, sequences in divided(self.config.eval.max_sequences, shares).items():
            if statistics is None:
                statistics = jax.device_put(self._measured(after_batch), replicated(self.mesh))
            files = self._heldout[index][source]
            evaluated, found = self._sums(params, index, files, sequences, statistics, after_batch)
            means[source], total = means_of(found), total + round(evaluated)
        terms = self._computing[index].terms
        scores, first = scores_of(terms, means, shares), terms[0].name
        if f"{first}_loss" not in scores:  # not if all is in damaged files
            return None
        lm_type = families.lm_type_of
        if self._heldout_text is not None and lm_type(self._configs[index]) == lm_type(self.config):
            scores |= self._bits(params, index)
        stage = self._stages[index]
        changes = {name: value for name, value in stage.changes.items() if name.startswith(("data.", "objective"))}
        kinds = [f"sequences of length {stage.length}", *(f"{name} = {value}" for name, value in changes.items())]
        return Scores(scores, -scores[f"{first}_loss"], f"{total} {', '.join(kinds)}")

    def files(self) -> dict[str, str]:
        return {}

    def at_stage(self, stage: int) -> tuple["Pretraining", ml_collections.ConfigDict]:
        """As `at`, by the number of a stage."""
        return self._computing[stage], self._configs[stage]

    def largest_stage(self) -> int:
        """Returns the number of the stage with the most tokens in a microbatch, of equal ones the last."""
        sizes = [
            rows // its.microbatches * stage.length for rows, its, stage in zip(self.rows, self._configs, self._stages)
        ]
        return max(range(len(sizes)), key=lambda number: (sizes[number], number))

    def abstract_batch(self, stage: int) -> dict:
        """Returns the shapes, types and shardings of the batches of a stage."""
        if not self.config.packing:
            return self._abstract_batch(stage, self._stages[stage].batch_size)
        row = self.row_sizes[stage]
        sizes = dict(token=(row.tokens,), sequence=(row.sequences,), word=(row.predictions,), row=())
        terms = self._computing[stage].terms
        kinds = kinds_of_arrays(self.config, terms, row.predictions)
        kinds |= dict(positions="token", first_tokens="sequence", dropout_rows="row")
        shapes = {name: sizes[kind] for name, kind in kinds.items()}
        return abstract_arrays(terms, self.mesh, self.rows[stage], shapes)

    def abstract_eval_batch(self, stage: int) -> dict:
        """Returns the shapes, types and shardings of the batches that a stage is evaluated on."""
        batch = self._abstract_batch(stage, self.eval_batch_size)
        return {name: x for name, x in batch.items() if name != "progress"}

    def abstract_eval_memory(self):
        """Returns the shapes, types and shardings of the memory of held-out rows; None if they have none."""
        if not self.config.data.stream:
            return None
        shapes, sharding = jax.eval_shape(self.new_eval_memory), batch_sharding(self.mesh)
        return jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding), shapes)

    def flops(self, start: int, stop: int) -> int:
        total = 0
        for stage, own, row, rows in zip(self._stages, self._configs, self.row_sizes, self.rows):
            steps = max(0, min(stop, stage.first_step + stage.steps) - max(start, stage.first_step))
            if not self.config.packing:
                row = RowSize(stage.length, 1, most_predictions(own, stage))
            config = families.config_of(own)
            family = families.family_of(config)
            forward = family.forward_flops(config, stage.length)
            forward += family.memory_flops(config, stage.length) if self.config.data.stream else 0
            forward += sum(term.objective.flops(config, row) for term in parse_objective(own))
            total += 3 * steps * rows * forward
        return total

    def computing_as(self, config) -> "Pretraining":
        """Returns the same task with what another config says of how to compute, such as `remat`."""
        other = copy.copy(self)
        other.config, other.terms = config, parse_objective(config)
        other._configs = [config_in(config, stage) for stage in self._stages]
        other.model = other._make_model(other.terms)
        for cached in ("eval_step", "new_eval_memory", "_eval_model", "_computing"):
            other.__dict__.pop(cached, None)
        return other

    # Implementation.

    def _index(self, step: int) -> int:
        """Returns the number of the stage that the update after `step` others is in, or of the last."""
        return next((i for i, end in enumerate(self._stage_ends) if step < end), len(self._stages) - 1)

    @functools.cached_property
    def _computing(self) -> list["Pretraining"]:
        """The task of each stage: this one, or one with what the stage changes of the model."""
        own = self.config.model.to_dict(), self.terms
        return [
            self if (each.model.to_dict(), parse_objective(each)) == own else self.computing_as(each)
            for each in self._configs
        ]

    def _with_progress(self, step: int, batch: Batch) -> Batch:
        """Returns the batch of a step with the share of all steps that are done before it, if an objective asks."""
        if "progress" not in kinds_of_arrays(self.config, self.terms, predictions=0):
            return batch
        return batch | {"progress": np.full(len(batch["input_ids"]), step / self.total_steps, np.float32)}

    def _sums(self, params, stage: int, files, max_sequences: int, statistics, after_batch):
        """Returns the sums of what `eval_step` returns over the first held-out sequences of a source."""
        length = self._stages[stage].length
        batches = pipeline.heldout_batches(
            files,
            length,
            self._stages[stage].max_predictions_per_seq,
            batch_size=self.eval_batch_size,
            max_sequences=max_sequences,
            additions=self._additions[stage],
            seed=self.config.data.seed,
            rows=functools.partial(local_rows, self.mesh),
            is_stream=self.config.data.stream,
        )
        sums = None
        with jax.set_mesh(self.mesh), nn.logical_axis_rules(RULES):
            on_mesh = enumerate(on_devices(batches, self.mesh))
            task, seed = self._computing[stage], self.config.data.seed

            def evaluated():
                memory = task.new_eval_memory() if self.config.data.stream else None
                for number, batch in on_mesh:
                    found, memory = task.eval_step(params, batch, statistics, np.int32([seed, number]), memory)
                    yield found

            for found in fetched(evaluated()):
                sums = found if sums is None else jax.tree.map(np.add, sums, found)
                after_batch()
        return jax.tree.map(float, sums)

    def _bits(self, params, stage: int) -> dict[str, float]:
        """Returns bits per byte by source. Each host measures all of them, and a device has all params."""
        used = self._computing[stage]._eval_model
        model = BertForMaskedLM(used.config, used.compute)
        found = self._heldout_text.measured(model, local_copy(params, self.mesh), self._tokenizer)
        each = {f"bits_per_byte ({source})": scores["bits_per_byte"] for source, scores in found.items()}
        return {name: value for name, value in each.items() if value is not None}

    def _make_model(self, terms: tuple[Term, ...]):
        model, compute = families.config_of(self.config), compute_on(self.mesh, self.config)
        return PretrainingModel(model, terms, compute, self.config.z_loss)

    def _weights(self, batch) -> dict[str, jax.Array]:
        return {term.name: term.objective.weights(batch) for term in self.terms}

    def _abstract_batch(self, stage: int, rows: int) -> dict:
        length, predictions = self._stages[stage].length, most_predictions(self._configs[stage], self._stages[stage])
        sizes = dict(token=(length,), sequence=(), word=(predictions,), row=())
        terms = self._computing[stage].terms
        kinds = kinds_of_arrays(self.config, terms, predictions)
        return abstract_arrays(terms, self.mesh, rows, {name: sizes[kind] for name, kind in kinds.items()})

    @functools.cached_property
    def eval_step(self):
        """(cast params, batch, statistics, (seed, number of the batch), memory of its rows or None) -> (its sequences,
        and sums over its rows), and the memory after it."""

        def eval_step(params, batch, statistics, place, memory):
            seed, number = place
            rows = len(batch["input_ids"])
            keys = row_keys(jax.random.key(seed, impl="threefry2x32"), number * rows + jnp.arange(rows))
            weights = self._weights(batch)
            given = batch if memory is None else batch | {"memory": memory}
            found, memory = self._eval_model.apply({"params": params}, given, weights, None, keys)
            sums = {}
            for name, _, objective in self.terms:
                if objective.is_auxiliary:
                    continue
                loss, metrics = found[name]
                baselines = objective.baselines(batch, weights[name], statistics.get(name))
                sums[name] = {"weight": weights[name].sum(), "loss": loss, **metrics, **baselines}
            return (batch["sequence_weights"].sum(), sums), memory

        return jax.jit(eval_step, out_shardings=(replicated(self.mesh), batch_sharding(self.mesh)))

    @functools.cached_property
    def new_eval_memory(self):
        """() -> the memory of rows of held-out text that have read nothing."""
        new = functools.partial(self._new_memory, self.eval_batch_size, self._eval_model.config)
        return jax.jit(new, out_shardings=batch_sharding(self.mesh))

    @functools.cached_property
    def _eval_model(self) -> PretrainingModel:
        """The model as it reads held-out text, which may have a longer memory than in training."""
        given = {name: value for name in ("memory_length", "clamp_length") if (value := self.config.eval[name])}
        return self.model.clone(config=dataclasses.replace(self.model.config, **given)) if given else self.model

    def _new_memory(self, rows: int, config):
        return families.family_of(config).new_memory(config, rows, self.model.compute.dtype)

    def abstract_statistics(self) -> dict:
        """Returns the shapes, types and shardings of what the baselines know of the training data."""
        return {
            term.name: jax.ShapeDtypeStruct(
                term.objective.statistics.shape(self.model.config), np.float32, sharding=replicated(self.mesh)
            )
            for term in self._terms_of_stages
            if term.objective.statistics
        }

    def _measured(self, after_batch: Callable[[], None]) -> dict[str, np.ndarray]:
        """Returns the statistics of the first training sequences."""
        if self._statistics is None:
            self._statistics = {
                term.name: term.objective.statistics.measure(self.model.config, self._first_batches(after_batch))
                for term in self._terms_of_stages
                if term.objective.statistics
            }
        return self._statistics

    def _first_batches(self, after_batch: Callable[[], None]) -> Iterator[Batch]:
        """Yields the batches of the first training sequences, with the rows of all hosts."""
        sequences, order = min(MEASURED_SEQUENCES, self.orders[0].files.total), self.orders[0]
        batches = pipeline.train_batches(order, self._stages[0].max_predictions_per_seq, additions=self._additions[0])
        for batch in itertools.islice(batches, max(1, sequences // order.batch_size)):
            yield batch
            after_batch()
