"""Objectives of pre-training: what a model learns from text. `config.objective` names one, or a sum of several.

An objective is a file, found by its name, which its metrics begin with (`mlm_loss`). Everything that training,
evaluation, the planner and the report ask about it is said there. Its module is imported without JAX's modules, which
its functions import when they are called.
"""

import dataclasses
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import ml_collections
import numpy as np

from bertjax import families
from bertjax.config import BertConfig, Compute, UserError
from bertjax.registry import Registry, own_in
from bertjax.stages import config_in, stages_of

if TYPE_CHECKING:
    import flax.linen as nn
    import jax

    from bertjax.data.batches.additions import Addition
    from bertjax.data.batches.packing import RowSize
    from bertjax.objectives.parts.model import EncodedBatch
    from bertjax.text.tokenizer import Tokenizer


class Statistics(NamedTuple):
    """What a baseline knows of the training data.

    Attributes:
      shape: model's config -> the shape of what `measure` returns, a float32 array.
      measure: (model's config, batches of training) -> the array.
    """

    shape: Callable[[BertConfig], tuple[int, ...]]
    measure: Callable[[BertConfig, Iterable[Mapping[str, np.ndarray]]], np.ndarray]


class Plot(NamedTuple):
    """A picture in the report: a metric in training and evaluation, and a baseline of the evaluation.

    Attributes:
      baseline: a score, in which {name} stands for the objective's name.
      is_main: whether it is also drawn against tokens and hours.
    """

    title: str
    metric: str
    baseline: str = ""
    is_main: bool = False


def _number_of_sequences(weights):
    import jax.numpy as jnp

    return jnp.maximum(weights.sum(), 1)  # data.on_corrupt=skip may leave none


@dataclasses.dataclass(frozen=True)
class Objective:
    """Something to learn.

    Args:
      loss: (encoded batch, weights, keys `[rows]`) -> the weighted sum of the losses, and {metric: weighted sum}. The
        keys are random, the objective's own, and given in evaluation too; sequences that share a row share its key.
      scores: (its name, {metric, loss or baseline: weighted mean on held-out text}) -> {score: value}. `NAME_loss` must
        be one.
      report: (its name, scores) -> lines of the report.
      heads: (model's config, how it computes) -> {name among the params: module}, its output layers. Objectives that
        name the same share it.
      weights: batch -> how much each prediction counts: 1, or 0 for one that is not there.
      total: weights of a batch -> what the loss is divided by in training, for its mean.
      baselines: (batch, weights, statistics or None) -> {baseline: weighted sum}.
      statistics: what the baselines know of the training data, if anything.
      words_per_sequence: (config, stage) -> words of a sequence that are predicted, at most; None: it predicts none.
        One objective of a sum may.
      words_per_row: (config, stage, sequences) -> words that are predicted, at most, in a row that so many sequences
        share; None: so many times those of a sequence.
      adds: {name: (per "token" or "sequence", type)}, arrays that its `addition` adds to a batch, besides those of
        words (`word_positions`, `word_ids`, `word_weights`).
      addition: (config, stage, tokenizer) -> what a host adds to batches for it; None: records have all that it needs.
      flops: (model's config, size of a row) -> matrix-multiply FLOPs of its output layers for a row, forwards.
      validate: whole config -> None. Raises `UserError` if it cannot be learnt with it.
      plots: what the report draws.
      fills_masks: whether the model can fill a [MASK] afterwards.
    """

    loss: Callable[["EncodedBatch", "jax.Array", "jax.Array"], tuple["jax.Array", dict[str, "jax.Array"]]]
    scores: Callable[[str, dict[str, float]], dict[str, float]]
    report: Callable[[str, Mapping[str, float]], list[str]]
    heads: Callable[[BertConfig, Compute], dict[str, "nn.Module"]] = lambda config, compute: {}
    weights: Callable[[dict], "jax.Array"] = lambda batch: batch["sequence_weights"]
    total: Callable[["jax.Array"], "jax.Array"] = _number_of_sequences
    baselines: Callable[[dict, "jax.Array", Any], dict[str, "jax.Array"]] = lambda batch, weights, statistics: {}
    statistics: Statistics | None = None
    words_per_sequence: Callable[[Any, Any], int] | None = None
    words_per_row: Callable[[Any, Any, int], int] | None = None
    adds: Mapping[str, tuple[str, type]] = dataclasses.field(default_factory=dict)
    addition: Callable[[Any, Any, "Tokenizer"], "Addition | None"] = lambda config, stage, tokenizer: None
    flops: Callable[[BertConfig, "RowSize"], int] = lambda config, row: 0
    validate: Callable[[Any], None] = lambda config: None
    plots: Sequence[Plot] = ()
    fills_masks: bool = False


class Term(NamedTuple):
    """An objective in the sum that is learnt."""

    name: str
    weight: float
    objective: Objective


OBJECTIVES: Registry[Objective] = Registry(
    "objective", "objective", own_in(__name__, __path__, "OBJECTIVE", is_package=False)
)
register = OBJECTIVES.register
# What is learnt if `config.objective` does not say: from words, by `families.words`, and from pairs of segments, by
# `data.next_sentence`.
OF_WORDS = {"masked": "mlm", "next": "lm", "neighbours": "bilm"}
OF_PAIRS = {"pairs": "nsp", "order": "sop"}
# The arrays that batches have.
RESERVED = (
    "input_ids", "segments", "token_types", "positions", "first_tokens", "dropout_rows", "word_positions", "word_ids",
    "word_weights", "pair_labels", "sequence_weights", "weights",
)  # fmt: skip


def of(config: ml_collections.ConfigDict) -> tuple[Term, ...]:
    """Returns the terms of `config.objective`, such as "mlm + 0.5*sop", in their order; the first one's held-out loss
    says which checkpoint is the best.

    Raises `UserError` if it is not a sum of objectives.
    """
    text = config.objective
    if not text.strip():
        pairs = OF_PAIRS.get(config.data.next_sentence)
        text = " + ".join(filter(None, (OF_WORDS[families.words(config)], pairs)))
    terms = []
    for part in text.split("+"):
        found = re.fullmatch(r"(?:(\d+(?:\.\d*)?|\.\d+)\s*\*\s*)?([^\s*]+)", part.strip())
        if not found or float(found[1] or 1) <= 0:
            raise UserError(
                f"config.objective = {text!r}: write one objective, or a sum such as 'mlm + 0.5*sop', with weights "
                f"above 0; there are {', '.join(OBJECTIVES.names())}"
            )
        terms.append(Term(found[2], float(found[1] or 1), OBJECTIVES.get(found[2])))
    names = [term.name for term in terms]
    if twice := next((name for name in names if names.count(name) > 1), None):
        raise UserError(f"config.objective = {text!r}: has {twice} twice; give it one weight")
    return tuple(terms)


def validate(config: ml_collections.ConfigDict) -> None:
    """Raises `UserError` if what is to be learnt does not suit the rest of the config, or each other. The masks of
    `eval.fill_masks` are filled after the last stage."""
    *others, last = (config_in(config, stage) for stage in stages_of(config))
    for each in others:
        with each.unlocked():
            each.eval.fill_masks = ()
        _validate(each)
    _validate(last)


def _validate(config: ml_collections.ConfigDict) -> None:
    terms = of(config)
    of_words = [term.name for term in terms if term.objective.words_per_sequence]
    if len(of_words) > 1:
        raise UserError(
            f"config.objective = {config.objective!r}: {' and '.join(of_words)} both predict words; leave one out"
        )
    taken = set(RESERVED)
    for term in terms:
        if clashing := taken & term.objective.adds.keys():
            raise UserError(
                f"config.objective = {config.objective!r}: {term.name} adds {min(clashing)!r} to batches, which have it"
            )
        taken |= term.objective.adds.keys()
        term.objective.validate(config)
    if config.eval.fill_masks and not any(term.objective.fills_masks for term in terms):
        names = " + ".join(term.name for term in terms)
        raise UserError(f"config.eval.fill_masks = {config.eval.fill_masks!r}: {names} does not teach it; set ()")
