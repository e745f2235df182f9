"""Pre-training: masked words, and what pairs of segments teach, if there are any (Devlin et al. 2019, section 3.1)."""

import collections
import copy
import functools
import itertools
import math
from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
from etils import epath
from jax.sharding import Mesh

from bertjax.config import UserError, bert_config, corpus_sources, stages_of, total_steps
from bertjax.data import pipeline, preparation, vocabulary
from bertjax.data.layouts import features
from bertjax.data.masking import rules_of
from bertjax.data.order import Order
from bertjax.data.packing import RowSize, whole
from bertjax.data.records import find_records, read_manifest, require_folder
from bertjax.interop import pretrained
from bertjax.model.bert import BertForMaskedLM, BertForPreTraining, cast_encoder, forward_flops
from bertjax.model.kernels import has_kernels
from bertjax.sharding import hosts
from bertjax.sharding.mesh import (
    Batch,
    batch_sharding,
    compute_on,
    local_copy,
    local_rows,
    make_mesh,
    replicated,
)
from bertjax.sharding.rules import RULES
from bertjax.sharding.streams import fetched, on_devices
from bertjax.sharding.topology import available_cores
from bertjax.tasks import fill_mask
from bertjax.text import tokenizer
from bertjax.text.tokenizer import Tokenizer
from bertjax.training.checkpoint import Scores
from bertjax.training.loop import Trained
from bertjax.training.run import Kind, Run
from bertjax.training.step import abstract_hyperparameters, fits_in_memory, make_program
from bertjax.training.workdir import RunInfo, tokenizer_entry
from bertjax.validation import REMAT_POLICIES

SEQUENCES_PER_ROW = 8  # at most; see experiments/benchmarks/RESULTS.md
UNIGRAM_SEQUENCES = 65_536  # training sequences that the unigram baseline is estimated from
# From how many steps unrolled layers pay: BERT-base on a v5e gains 12 ms a step, and compiles 100 s longer a stage.
UNROLLED_STEPS = 20_000


class PairObjective(NamedTuple):
    """The names of what pairs of segments teach: of its metrics (`NAME_loss`, ...), and in the report."""

    metrics: str
    report: str


# By `data.next_sentence`; with "none" there are no pairs.
PAIR_OBJECTIVES = {"pairs": PairObjective("nsp", "next sentence"), "order": PairObjective("sop", "sentence order")}


class Pretraining:
    """The `Task` of pre-training, with its stages in sequence.

    Args:
      config: a validated config.
      mesh: the mesh that `evaluate` runs on.
      records: folder of TFRecords; None if `batches` and `evaluate` are unused (the planner) or overridden.
      cache: folder that keeps what has been counted in records without a manifest.
      tokenizer: masks records that are not masked (`data.masking=dynamic`).
      rows: of a step of each stage, if sequences are packed and `records` is None.

    Attributes:
      rows: of a step of each stage; with packing, of the first ones: later ones may have a few more or fewer.
    """

    frozen = ()

    def __init__(
        self,
        config,
        mesh: Mesh,
        records: epath.PathLike | None,
        cache: epath.Path | None = None,
        tokenizer: Tokenizer | None = None,
        rows: Sequence[int] | None = None,
    ):
        self.config, self.mesh = config, mesh
        self._pairs = PAIR_OBJECTIVES.get(config.data.next_sentence)
        self.model = self._make_model()
        self.total_steps, self._stages = total_steps(config), stages_of(config)
        self.eval_batch_size = config.batch_size // config.microbatches  # fits in memory, because a microbatch does
        self.row_sizes = [row_size(config, stage) for stage in self._stages]
        self.rows = rows or [config.batch_size] * len(self._stages)
        if records is not None:
            shapes = [(s.length, s.max_predictions_per_seq) for s in self._stages]
            given = dict(vocab_size=config.model.vocab_size, on_corrupt=config.data.on_corrupt, cache=cache)
            find = functools.partial(find_records, records, **given)
            train = [find(*shape, split="train", measures=config.packing) for shape in shapes]
            self.orders = [
                Order(files, config.batch_size, config.seed, row) for files, row in zip(train, self.row_sizes)
            ]
            self._heldout = [find(*shape, split="heldout") for shape in shapes]
            if config.packing:
                self.rows = [order.rows(0, row_multiple(config, mesh)) for order in self.orders]
            self._rules = [tokenizer and rules_of(config.data, tokenizer, predictions) for _, predictions in shapes]
        self._unigram: np.ndarray | None = None  # counted at the first evaluation
        self._stage_ends = list(itertools.accumulate(s.steps for s in self._stages))

    # The interface of `Task`.

    def init_params(self, key):
        ids = jnp.zeros((1, 8), jnp.int32)
        return self.model.init(key, ids, ids, ids, ids)["params"]

    def batches(self, start_step: int) -> Iterator[Batch]:
        first, own = 0, functools.partial(local_rows, self.mesh)
        for index, end in enumerate(self._stage_ends):
            if start_step < end:
                start = max(start_step, first)
                given = dict(start=start - first, rows=own, rules=self._rules[index])
                order, predictions = self.orders[index], self._stages[index].max_predictions_per_seq
                if self.config.packing:
                    batches = pipeline.packed_batches(
                        order, predictions, multiple=row_multiple(self.config, self.mesh), **given
                    )
                else:
                    batches = pipeline.train_batches(order, predictions, **given)
                yield from itertools.islice(batches, end - start)
            first = end

    def normalize(self, batch: dict) -> dict:
        words, sequences = batch["masked_lm_weights"], batch["next_sentence_weights"]
        return {
            **batch,
            "masked_lm_weights": words / (words.sum() + 1e-5),  # as in run_pretraining.get_masked_lm_output
            "next_sentence_weights": sequences / jnp.maximum(sequences.sum(), 1),  # data.on_corrupt=skip may leave none
        }

    def cast(self, params):
        return cast_encoder(params, self.model.compute.dtype)

    def loss(self, params, batch: dict, dropout_keys=None) -> tuple[jax.Array, dict]:
        packed = {name: batch[name] for name in ("positions", "first_tokens") if name in batch}
        if not self._pairs:
            packed.pop("first_tokens", None)
        logits = self.model.apply(
            {"params": params},
            batch["input_ids"],
            segments=batch["input_mask"],
            token_types=batch["segment_ids"],
            masked_positions=batch["masked_lm_positions"],
            dropout_keys=dropout_keys,
            **packed,
        )
        words, pairs = logits if self._pairs else (logits, None)
        loss, accuracy = _weighted(words, batch["masked_lm_ids"], batch["masked_lm_weights"])
        tokens = (batch["input_mask"] > 0).sum().astype(jnp.float32)
        padding = batch["input_mask"].size - tokens
        metrics = dict(mlm_loss=loss, mlm_accuracy=accuracy, tokens=tokens, padding=padding)
        if self._pairs:
            name = self._pairs.metrics
            pair_loss, accuracy = _weighted(pairs, batch["next_sentence_labels"], batch["next_sentence_weights"])
            loss, metrics = loss + pair_loss, {**metrics, f"{name}_loss": pair_loss, f"{name}_accuracy": accuracy}
        return loss, metrics

    def evaluate(self, params, step: int, after_batch: Callable[[], None] = lambda: None) -> Scores | None:
        """Returns losses and accuracies on held-out data, with their baselines; None if there is no held-out data.

        `unigram_loss` is the loss of predicting the training frequencies of words, on the same masked words.
        `mlm_majority` and `nsp_majority` (or `sop_majority`) are the accuracies of predicting the most frequent word
        and class. Evaluates the first `eval.max_sequences` held-out sequences of the stage of `step`; losses of
        different lengths are not compared.
        """
        index = next(i for i, end in enumerate(self._stage_ends) if step <= end)
        if self._heldout[index] is None:
            return None
        stage = self._stages[index]
        batches = pipeline.heldout_batches(
            self._heldout[index],
            stage.length,
            stage.max_predictions_per_seq,
            batch_size=self.eval_batch_size,
            max_sequences=self.config.eval.max_sequences,
            rules=self._rules[index],
            seed=self.config.data.seed,
            rows=functools.partial(local_rows, self.mesh),
        )
        unigram = jax.device_put(self._unigram_log_probabilities(after_batch), replicated(self.mesh))
        sums = collections.Counter()
        with jax.set_mesh(self.mesh), nn.logical_axis_rules(RULES):
            on_mesh = on_devices(batches, self.mesh)
            for found in fetched(self.eval_step(params, batch, unigram) for batch in on_mesh):
                sums.update(found)
                after_batch()
        sums = {name: float(value) for name, value in sums.items()}

        words, sequences = sums["words"], sums["sequences"]
        if not words:  # all are in damaged files
            return None
        scores = {
            "mlm_loss": sums["mlm_loss"] / words,
            "unigram_loss": sums["unigram_loss"] / words,
            "mlm_accuracy": sums["mlm_accuracy"] / words,
            "mlm_majority": sums["most_frequent"] / words,
        }
        if self._pairs:
            name, ones = self._pairs.metrics, sums["label_1"]
            scores |= {f"{name}_{metric}": sums[f"{name}_{metric}"] / sequences for metric in ("loss", "accuracy")}
            scores[f"{name}_majority"] = max(ones, sequences - ones) / sequences
        return Scores(scores, -scores["mlm_loss"], measured_on=f"{round(sequences)} sequences of length {stage.length}")

    def files(self) -> dict[str, str]:
        return {}

    def abstract_batch(self, stage: int) -> dict:
        """Returns the shapes, types and shardings of the batches of a stage."""
        if not self.config.packing:
            return self._abstract_batch(stage, self.config.batch_size)
        row = self.row_sizes[stage]
        tokens = dict.fromkeys(("input_ids", "input_mask", "segment_ids", "positions"), (row.tokens,))
        predictions = dict.fromkeys(("masked_lm_positions", "masked_lm_ids", "masked_lm_weights"), (row.predictions,))
        pairs = dict.fromkeys(("first_tokens", "next_sentence_labels", "next_sentence_weights"), (row.sequences,))
        return self._abstract(self.rows[stage], {"dropout_rows": (), **tokens, **predictions, **pairs})

    def abstract_eval_batch(self, stage: int) -> dict:
        """Returns the shapes, types and shardings of the batches that a stage is evaluated on."""
        return self._abstract_batch(stage, self.eval_batch_size)

    def flops(self, start: int, stop: int) -> int:
        total, first = 0, 0
        for stage, row, rows, end in zip(self._stages, self.row_sizes, self.rows, self._stage_ends):
            steps = max(0, min(stop, end) - max(start, first))
            predictions, pooled = stage.max_predictions_per_seq, 1
            if self.config.packing:
                predictions, pooled = row.predictions, row.sequences
            pooled *= self._pairs is not None
            forward = forward_flops(self.model.config, rows, stage.length, predictions, pooled)
            total, first = total + 3 * steps * forward, end
        return total

    def computing_as(self, config) -> "Pretraining":
        """Returns the same task with what another config says of how to compute, such as `remat`."""
        other = copy.copy(self)
        other.config = config
        other.model = other._make_model()
        return other

    # Implementation.

    def _make_model(self):
        make_model = BertForPreTraining if self._pairs else BertForMaskedLM
        return make_model(bert_config(self.config), compute_on(self.mesh, self.config))

    def _abstract_batch(self, stage: int, rows: int) -> dict:
        sizes = features(self._stages[stage].length, self._stages[stage].max_predictions_per_seq)
        shapes = {name: (size,) for name, (size, _) in sizes.items()}
        return self._abstract(rows, shapes | {"next_sentence_labels": (), "next_sentence_weights": ()})

    def _abstract(self, rows: int, shapes: dict[str, tuple]) -> dict:
        sharding = batch_sharding(self.mesh)
        types = {name: np.float32 if name.endswith("weights") else np.int32 for name in shapes}
        return {
            name: jax.ShapeDtypeStruct((rows, *shape), types[name], sharding=sharding) for name, shape in shapes.items()
        }

    @functools.cached_property
    def eval_step(self):
        def eval_step(params, batch, unigram):
            _, sums = self.loss(params, batch)
            words, weights = batch["masked_lm_ids"], batch["masked_lm_weights"]
            sequences = batch["next_sentence_weights"]
            return {
                **sums,
                "words": weights.sum(),
                "sequences": sequences.sum(),
                "unigram_loss": -(weights * unigram[words]).sum(),
                "most_frequent": (weights * (words == unigram.argmax())).sum(),
                "label_1": (sequences * batch["next_sentence_labels"]).sum(),
            }

        return jax.jit(eval_step, out_shardings=replicated(self.mesh))

    def _unigram_log_probabilities(self, after_batch: Callable[[], None]) -> np.ndarray:
        """`[vocab_size]` float32, from the masked tokens of the first training sequences, with add-one smoothing."""
        if self._unigram is None:
            sequences = min(UNIGRAM_SEQUENCES, self.orders[0].files.total)
            counts = np.ones(self.model.config.vocab_size, np.int64)
            predictions = self._stages[0].max_predictions_per_seq
            all_rows = pipeline.train_batches(self.orders[0], predictions, rules=self._rules[0])  # on every host
            for batch in itertools.islice(all_rows, max(1, sequences // self.config.batch_size)):
                ids = batch["masked_lm_ids"][batch["masked_lm_weights"] > 0]
                counts += np.bincount(ids, minlength=len(counts))
                after_batch()
            self._unigram = np.log(counts / counts.sum()).astype(np.float32)
        return self._unigram


def row_size(config, stage) -> RowSize:
    """Returns what a row of packed sequences holds."""
    # Of each sequence, the number of masked tokens is rounded.
    masked = math.ceil(config.data.masked_lm_prob * stage.length + SEQUENCES_PER_ROW / 2)
    return RowSize(stage.length, SEQUENCES_PER_ROW, min(masked, SEQUENCES_PER_ROW * stage.max_predictions_per_seq))


def row_multiple(config, mesh: Mesh) -> int:
    """Returns what the number of packed rows is a multiple of: each device has as many of each microbatch."""
    return mesh.shape["data"] * mesh.shape["fsdp"] * config.microbatches


def packed_rows(config, mesh: Mesh, real_tokens_share: Sequence[float]) -> list[int]:
    """Estimates the rows of a step of each stage from the share of real tokens in its sequences."""
    multiple = row_multiple(config, mesh)
    return [whole(share * config.batch_size, multiple) for share in real_tokens_share]


def _weighted(logits, labels, weights) -> tuple[jax.Array, jax.Array]:
    """Returns the weighted sums of the cross-entropy and of the correct predictions."""
    losses = optax.softmax_cross_entropy_with_integer_labels(logits, labels)
    correct = jnp.take_along_axis(logits, labels[..., None], -1)[..., 0] >= logits.max(-1)  # argmax is slow on CPU
    return (weights * losses).sum(), (weights * correct).sum()


# Pre-training as a `Kind` of run, for `training.run`.


def _adopt(config, before: RunInfo | None) -> None:
    """Sets the fields that `init_checkpoint` determines: activation, LayerNorm epsilon and, if unset, the tokenizer."""
    if not config.init_checkpoint:
        return
    if before is None:
        pretrained.adopt(config)
    else:  # does not need `init_checkpoint`, which may be gone
        model = before.config.model
        config.model.update(hidden_act=model.hidden_act, layer_norm_eps=model.layer_norm_eps)


def ways_to_compute(config, platform: str, chip: str) -> Iterator:
    """Yields `config` with what "auto" may stand for in `remat` and `unroll`, the fastest first."""
    policies = REMAT_POLICIES if config.remat == "auto" else (config.remat,)
    # On TPUs without kernels, what "none" stores takes longer to write and read than to recompute (bertjax.compile).
    if config.remat == "auto" and platform == "tpu" and not has_kernels(chip):
        policies = ("full",)
    ways = [(remat, config.unroll) for remat in policies]
    is_long = total_steps(config) >= UNROLLED_STEPS
    if config.unroll == "auto" and policies[0] == "none" and has_kernels(chip) and is_long:
        ways.insert(0, ("none", "yes"))
    for remat, unroll in ways:
        candidate = copy.deepcopy(config)
        candidate.remat, candidate.unroll = remat, unroll
        yield candidate


def fastest_that_fits(task: Pretraining, platform: str) -> Pretraining:
    """Returns the task with the first of `ways_to_compute` that fits the longest stage in memory, or the last."""
    device = task.mesh.devices.flat[0]
    *others, last = map(task.computing_as, ways_to_compute(task.config, platform, device.device_kind))
    for way in others:
        if platform == "cpu":
            return way
        if jax.process_index() == 0:  # it can take minutes
            print(f"compiling with remat={way.config.remat} unroll={way.config.unroll}", flush=True)
        program = make_program(way, way.config, way.mesh)
        batch = way.abstract_batch(len(way.rows) - 1)
        lowered = program.train_step.lower(program.state, batch, abstract_hyperparameters(way.mesh))
        if fits_in_memory(lowered, device):
            return way
    return last


def _open(config, workdir: epath.Path, before: RunInfo | None) -> Run:
    mesh = make_mesh(config)
    records, tokenizer = find_or_prepare(config, workdir)
    initialize = None
    if config.init_checkpoint and before is None:
        pretrained.check_tokenizer(config.init_checkpoint, tokenizer)
        initialize = functools.partial(pretrained.initialize, path=config.init_checkpoint)
    fill_mask.check(config.eval.fill_masks, tokenizer, config.model.max_position_embeddings)
    with hosts.first_before_others("records counted"):
        task = Pretraining(config, mesh, records, workdir, tokenizer)
    task = fastest_that_fits(task, mesh.devices.flat[0].platform)  # all hosts compile together
    fields = [field for field in ("remat", "unroll") if task.config[field] != config[field]]
    notes = [f"config.{field} = 'auto': {task.config[field]}" for field in fields]
    if (warmup := config.optimizer.warmup_steps) >= task.total_steps:
        notes += [f"config.optimizer.warmup_steps = {warmup}: the {task.total_steps} steps end before the warm-up does"]
    info = RunInfo(config.copy_and_resolve_references(), tokenizer=tokenizer_entry(tokenizer))

    def end_report(trained: Trained) -> str:
        params = local_copy(trained.state.params, mesh)  # all hosts must call this
        if jax.process_index():
            return ""
        model = BertForMaskedLM(task.model.config, task.model.compute)
        filled = fill_mask.fill_masks(model, params, tokenizer, config.eval.fill_masks)
        return "\n".join([report(trained.scores), *map(fill_mask.describe, filled)])

    return Run(config, mesh, task, info, tokenizer, initialize, notes, end_report)


KIND = Kind(
    identity=lambda config: ("data.next_sentence",),
    adopt=_adopt,
    total_steps=lambda config, before: total_steps(config),
    open=_open,
)


def find_or_prepare(config, workdir: epath.Path) -> tuple[epath.Path, Tokenizer]:
    """Returns the folder of the records and their tokenizer; prepares them in the workdir if the config names none.

    Raises `UserError` if they are missing or do not match the config.
    """
    folder = require_folder(config.data.records) if config.data.records else workdir / "records"
    manifest = read_manifest(folder)
    if manifest is None and not config.data.records:
        if jax.process_count() > 1:
            raise UserError(
                "config.data.records = '': runs on several hosts need records; run bertjax.prepare on one host first"
            )
        print(f"preparing {', '.join(corpus_sources(config))} in {folder}", flush=True)
        manifest = preparation.prepare(config, folder, workers=available_cores())
    elif manifest is not None:
        if not config.data.records and jax.process_index() == 0:
            print(f"found prepared records in {folder}", flush=True)
        preparation.check_recipe(config, manifest, folder)
    if manifest is None and config.data.next_sentence != "pairs":
        raise UserError(
            f"config.data.next_sentence = {config.data.next_sentence!r}: the records in {folder} have no manifest, and "
            f"are taken for Google's, which are pairs; set --config.data.next_sentence=pairs, or use bertjax.prepare"
        )
    if manifest is None and not config.tokenizer.path:
        raise UserError(
            f"config.tokenizer.path = '': the records in {folder} have no manifest; set the vocabulary that they "
            f"were made with"
        )
    return folder, _tokenizer_of_records(config, folder, manifest)


def _tokenizer_of_records(config, folder: epath.Path, manifest: dict | None) -> Tokenizer:
    made_with = manifest["tokenizer"] if manifest else dict(config.tokenizer)
    path = config.tokenizer.path or folder / tokenizer.KINDS[made_with["kind"]].filename
    kind, lowercase = config.tokenizer.kind, config.tokenizer.lowercase
    if not config.tokenizer.path:
        kind, lowercase = made_with["kind"], made_with["lowercase"]
    loaded = tokenizer.load(kind, path, lowercase)
    if manifest and loaded.fingerprint != made_with["fingerprint"]:
        raise UserError(
            f"config.tokenizer: the records in {folder} were made with another tokenizer ({made_with['kind']}, "
            f"lowercase = {made_with['lowercase']}, {made_with['vocab_size']} pieces); leave tokenizer.path empty to "
            f"use theirs"
        )
    vocabulary.check_vocab_size(config, loaded, path)
    return loaded


def report(scores: Scores | None) -> str:
    """Formats the held-out scores, each with its baseline."""
    if scores is None:
        return "no held-out data, so no scores"
    loss, unigram, accuracy, majority = (
        scores.scores[name] for name in ("mlm_loss", "unigram_loss", "mlm_accuracy", "mlm_majority")
    )
    comparison = f"{abs(unigram - loss):.3f} {'more' if unigram > loss else 'less'}"
    lines = [
        f"held-out masked words: loss {loss:.3f} nats; unigram baseline {unigram:.3f}, {comparison}",
        f"                       accuracy {accuracy:.1%}; always the most frequent word {majority:.1%}",
    ]
    for pairs in PAIR_OBJECTIVES.values():
        if f"{pairs.metrics}_loss" in scores.scores:
            accuracy, majority = (scores.scores[f"{pairs.metrics}_{name}"] for name in ("accuracy", "majority"))
            lines.append(
                f"held-out {pairs.report}: accuracy {accuracy:.1%}; always the more frequent class {majority:.1%}"
            )
    return "\n".join(lines)
