"""Pre-training: masked words, and what pairs of segments teach, if there are any (Devlin et al. 2019, section 3.1); or,
of a causal model, the next words (left-to-right, section 5.1), and of two LSTMs those and the previous ones (ELMo)."""

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

from bertjax import families
from bertjax.config import stages_of, total_steps
from bertjax.data import pipeline
from bertjax.data.layouts import features
from bertjax.data.masking import rules_of
from bertjax.data.order import Order, count_groups
from bertjax.data.packing import RowSize, whole
from bertjax.data.records import find_records, training_shares
from bertjax.families.with_heads import BertForMaskedLM, BertForPreTraining, cast_encoder, forward_flops
from bertjax.sharding.mesh import (
    Batch,
    batch_sharding,
    compute_on,
    local_rows,
    replicated,
)
from bertjax.sharding.rules import RULES
from bertjax.sharding.streams import fetched, on_devices
from bertjax.text.tokenizer import Tokenizer
from bertjax.training.checkpoint import Scores

SEQUENCES_PER_ROW = 8  # most sequences in a row; see experiments/benchmarks/RESULTS.md
UNIGRAM_SEQUENCES = 65_536  # training sequences that the unigram baseline is estimated from


class Learnt(NamedTuple):
    """The names of what is learnt: of its metrics (`NAME_loss`, ...), and in the report."""

    metrics: str
    report: str


# By `families.words`.
WORDS = {
    "masked": Learnt("mlm", "masked words"),
    "next": Learnt("lm", "next words"),
    "neighbours": Learnt("bilm", "next and previous words"),
}
# By `data.next_sentence`; with "none" there are no pairs.
PAIRS = {"pairs": Learnt("nsp", "next sentence"), "order": Learnt("sop", "sentence order")}


class Pretraining:
    """The `Task` of pre-training, with its stages in sequence.

    Args:
      config: a validated config.
      mesh: the mesh that `evaluate` runs on.
      records: folder of TFRecords; None if `batches` and `evaluate` are unused (the planner) or overridden.
      cache: folder that keeps what has been counted in records without a manifest.
      tokenizer: masks records that are not masked (`data.masking=dynamic`).
      rows: the rows of a step of each stage, if sequences are packed and `records` is None.

    Attributes:
      rows: the rows of a step of each stage; with packing, of the first steps: later ones may have a few more or fewer.
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
        self._words, self._pairs = WORDS[families.words(config)], PAIRS.get(config.data.next_sentence)
        self.model = self._make_model()
        self.total_steps, self._stages = total_steps(config), stages_of(config)
        self.row_sizes = [row_size(config, stage) for stage in self._stages]
        self.rows = rows or [config.batch_size] * len(self._stages)
        if records is not None:
            shapes = [(s.length, s.max_predictions_per_seq) for s in self._stages]
            given = dict(vocab_size=config.model.vocab_size, cache=cache)
            given |= dict(on_corrupt=config.data.on_corrupt, checksums=config.data.checksums)
            find = functools.partial(find_records, records, **given)
            train = [find(*shape, split="train", measures=config.packing) for shape in shapes]
            self.orders = [
                Order(files, config.batch_size, config.seed, row) for files, row in zip(train, self.row_sizes)
            ]
            heldout = [find(*shape, split="heldout") for shape in shapes]
            self._heldout = [found.by_source() if found else {} for found in heldout]
            self._shares = training_shares(records)
            if config.packing:
                self.rows = [order.rows(0, row_multiple(config, mesh)) for order in self.orders]
            self._rules = [
                tokenizer and rules_of(config.data, tokenizer, self._predictions(stage), families.words(config))
                for stage in self._stages
            ]
        self.eval_batch_size = min(self.rows) // config.microbatches  # fits in memory, because a microbatch does
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
                order, predictions = self.orders[index], self._predictions(self._stages[index])
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
            "masked_lm_weights": words / (words.sum() + 1e-5),  # normalized as in run_pretraining.get_masked_lm_output
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
        name = self._words.metrics
        metrics = {f"{name}_loss": loss, f"{name}_accuracy": accuracy, "tokens": tokens, "padding": padding}
        if self._pairs:
            name = self._pairs.metrics
            pair_loss, accuracy = _weighted(pairs, batch["next_sentence_labels"], batch["next_sentence_weights"])
            loss, metrics = loss + pair_loss, {**metrics, f"{name}_loss": pair_loss, f"{name}_accuracy": accuracy}
        return loss, metrics

    def evaluate(self, params, step: int, after_batch: Callable[[], None] = lambda: None) -> Scores | None:
        """Returns losses and accuracies on held-out data, with their baselines; None if there is no held-out data.

        `unigram_loss` is the loss of predicting the training frequencies of words, on the same words. `mlm_majority`
        (`lm_majority` of a causal model) and `nsp_majority` (or `sop_majority`) are the accuracies of predicting the
        most frequent word and class. Evaluates the first `eval.max_sequences` held-out sequences of the stage of
        `step`; losses of different lengths are not compared. Of several sources, each counts as much as in training;
        `mlm_loss (SOURCE)` and `mlm_accuracy (SOURCE)` are those of one.
        """
        index = next(i for i, end in enumerate(self._stage_ends) if step <= end)
        unigram, sums = None, {}
        shares = _normalized({source: self._shares.get(source, 1.0) for source in self._heldout[index]})
        for source, sequences in divided(self.config.eval.max_sequences, shares).items():
            if unigram is None:
                unigram = jax.device_put(self._unigram_log_probabilities(after_batch), replicated(self.mesh))
            found = self._sums(params, index, self._heldout[index][source], sequences, unigram, after_batch)
            if found["words"]:  # not if all are in damaged files
                sums[source] = found
        if not sums:
            return None
        shares = _normalized({source: shares[source] for source in sums})
        rates = {source: self._rates(found) for source, found in sums.items()}
        mixed = {
            name: sum(shares[source] * rates[source][name] for source in rates) for name in next(iter(rates.values()))
        }
        name = self._words.metrics
        scores = {key: mixed[key] for key in (f"{name}_loss", "unigram_loss", f"{name}_accuracy")}
        scores[f"{name}_majority"] = mixed["most_frequent"]
        if self._pairs:
            pairs, ones = self._pairs.metrics, mixed["label_1"]
            scores |= {f"{pairs}_{metric}": mixed[f"{pairs}_{metric}"] for metric in ("loss", "accuracy")}
            scores[f"{pairs}_majority"] = max(ones, 1 - ones)
        for source in rates if len(rates) > 1 else ():
            scores |= {f"{key} ({source})": rates[source][key] for key in (f"{name}_loss", f"{name}_accuracy")}
        total = round(sum(found["sequences"] for found in sums.values()))
        return Scores(scores, -scores[f"{name}_loss"], f"{total} sequences of length {self._stages[index].length}")

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
            predictions, pooled = self._predictions(stage), 1
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

    def _sums(self, params, stage: int, files, max_sequences: int, unigram, after_batch) -> dict[str, float]:
        """Returns the sums of `eval_step` over the first held-out sequences of a source."""
        length = self._stages[stage].length
        batches = pipeline.heldout_batches(
            files,
            length,
            self._predictions(self._stages[stage]),
            batch_size=self.eval_batch_size,
            max_sequences=max_sequences,
            rules=self._rules[stage],
            seed=self.config.data.seed,
            rows=functools.partial(local_rows, self.mesh),
        )
        sums = collections.Counter()
        with jax.set_mesh(self.mesh), nn.logical_axis_rules(RULES):
            on_mesh = on_devices(batches, self.mesh)
            for found in fetched(self.eval_step(params, batch, unigram) for batch in on_mesh):
                sums.update(found)
                after_batch()
        return {name: float(value) for name, value in sums.items()}

    def _rates(self, sums: dict[str, float]) -> dict[str, float]:
        """Returns sums per word, or per sequence."""
        of_sequences = {"label_1"} | (
            {f"{self._pairs.metrics}_{x}" for x in ("loss", "accuracy")} if self._pairs else set()
        )
        return {name: x / sums["sequences" if name in of_sequences else "words"] for name, x in sums.items()}

    def _make_model(self):
        make_model = BertForPreTraining if self._pairs else BertForMaskedLM
        return make_model(families.config_of(self.config), compute_on(self.mesh, self.config))

    def _predictions(self, stage) -> int:
        """Returns how many tokens of a sequence are predicted, at most."""
        return most_predictions(self.config, stage)

    def _abstract_batch(self, stage: int, rows: int) -> dict:
        sizes = features(self._stages[stage].length, self._predictions(self._stages[stage]))
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
            predictions = self._predictions(self._stages[0])
            all_rows = pipeline.train_batches(self.orders[0], predictions, rules=self._rules[0])  # on every host
            for batch in itertools.islice(all_rows, max(1, sequences // self.config.batch_size)):
                ids = batch["masked_lm_ids"][batch["masked_lm_weights"] > 0]
                counts += np.bincount(ids, minlength=len(counts))
                after_batch()
            self._unigram = np.log(counts / counts.sum()).astype(np.float32)
        return self._unigram


def _normalized(shares: dict[str, float]) -> dict[str, float]:
    total = sum(shares.values())
    return {name: share / total for name, share in shares.items()}


def divided(sequences: int, shares: dict[str, float]) -> dict[str, int]:
    """Divides a number of sequences among sources by their shares; each has a fourth of an equal part at least."""
    return {
        source: max(1, round(sequences * share), sequences // (4 * len(shares))) for source, share in shares.items()
    }


def most_predictions(config, stage) -> int:
    """Returns how many tokens of a sequence are predicted, at most; neighbours are, once from each side."""
    most = {"next": stage.length - 1, "neighbours": 2 * (stage.length - 1), "masked": stage.max_predictions_per_seq}
    return most[families.words(config)]


def row_size(config, stage) -> RowSize:
    """Returns what a row of packed sequences holds."""
    if families.words(config) == "next":
        return RowSize(stage.length, SEQUENCES_PER_ROW, most_predictions(config, stage))
    # The number of masked tokens in a sequence is rounded, and at least one; the shortest sequence has three tokens.
    wanted = config.data.masked_lm_prob * stage.length
    rounded = math.ceil(wanted + SEQUENCES_PER_ROW / 2)
    at_least_one = math.floor(wanted + SEQUENCES_PER_ROW * (1 - 3 * config.data.masked_lm_prob))
    most = min(max(rounded, at_least_one), SEQUENCES_PER_ROW * stage.max_predictions_per_seq)
    return RowSize(stage.length, SEQUENCES_PER_ROW, most)


def row_multiple(config, mesh: Mesh) -> int:
    """Returns what the number of packed rows is a multiple of: each device has as many of each microbatch."""
    return mesh.shape["data"] * mesh.shape["fsdp"] * config.microbatches


def packed_rows(config, mesh: Mesh, real_tokens_share: Sequence[float]) -> list[int]:
    """Estimates the rows of a step of each stage from the share of real tokens in its sequences, as `Order.rows`."""
    if len(real_tokens_share) != len(config.stages):
        raise ValueError("packing needs the share of real tokens of each stage")
    groups = count_groups(config.batch_size)
    multiple = math.lcm(groups, row_multiple(config, mesh))
    return [whole(math.ceil(share * config.batch_size / groups) * groups, multiple) for share in real_tokens_share]


def _weighted(logits, labels, weights) -> tuple[jax.Array, jax.Array]:
    """Returns the weighted sums of the cross-entropy and of the correct predictions."""
    losses = optax.softmax_cross_entropy_with_integer_labels(logits, labels)
    correct = jnp.take_along_axis(logits, labels[..., None], -1)[..., 0] >= logits.max(-1)  # argmax is slow on CPU
    return (weights * losses).sum(), (weights * correct).sum()
