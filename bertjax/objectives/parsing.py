"""Objectives of pre-training: what a model learns from text. `config.objective` names one, or a sum of several;
`config.objectives` has the settings of those that have any.

An objective is a file, found by its name, which its metrics begin with (`mlm_loss`). Everything that training,
evaluation, the planner and the report ask about it is said there. Its module is imported without JAX's modules, which
its functions import when they are called.
"""

import dataclasses
import functools
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import ml_collections
import numpy as np

from bertjax.common.errors import UserError
from bertjax.common.registry import Registry, own_in
from bertjax.config.limits import within
from bertjax.config.model_config import BertConfig, Compute
from bertjax.config.stages import config_in, stages_of
from bertjax.models import families

if TYPE_CHECKING:
    import flax.linen as nn
    import jax
    from jax.sharding import Mesh

    from bertjax.data.loading.packing import RowSize
    from bertjax.data.loading.transforms import Addition
    from bertjax.nn.ops.recurrent_memory import Memory
    from bertjax.objectives.parts.pretraining_model import EncodedBatch
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


def _number_of_predictions(weights):
    import jax.numpy as jnp

    return jnp.maximum(weights.sum(), 1)  # data.on_corrupt=skip may leave none


@dataclasses.dataclass(frozen=True)
class Objective:
    """Something to learn.

    Args:
      loss: (encoded batch, weights, keys `[rows]`) -> the weighted sum of the losses, and {metric: weighted sum}. The
        keys are random, the objective's own, and given in evaluation too; sequences that share a row share its key.
        None: it has `rewrite` instead.
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
      encode: (encoder, batch, dropout keys `[rows]`, what rows that go on remember or None) -> (hidden states, states
        that predict words `[rows, predictions, hidden]`, what rows then remember): how a batch is read, if not by the
        encoder's `encode`. One objective of a sum may say it.
      rewrite: (batch that the encoder has not read, weights, keys) -> (batch as it reads it, what `loss` returns). It
        changes `input_ids`, and keeps those of the text as `original_ids`; or the params of the encoder. One objective
        of a sum may.
      models: model's config -> {name among the params: config}, the models that are trained beside the encoder, each
        as a model of its own: `convert --part=NAME`.
      goes_on: whether it can be learnt from a stream of text, whose rows go on in the next step (`data.stream`).
      finished: params of a checkpoint -> those that all but training read: its own may be spread over others.
      start: the inverse: params that `finished` returned, perhaps of a run with other settings or other objectives ->
        those that training starts from. Raises `UserError` if there are no such params.
      moves: path of one of its params -> that of the param of the encoder that it is added to; None: to none.
      in_all_stages: why a run that learns it must do so in all stages, and what to do; empty: it need not.
      settings: a frozen dataclass of `config.field`s with defaults, which say their limits: `config.objectives.NAME`.
      made: settings -> the objective with them; it itself has the defaults.
      is_auxiliary: whether it only helps others of the sum to be learnt: it is not evaluated, so that it has no scores,
        and its loss also gets `EncodedBatch.states`, and `progress` in the batch.
    """

    loss: Callable[["EncodedBatch", "jax.Array", "jax.Array"], tuple["jax.Array", dict[str, "jax.Array"]]] | None
    scores: Callable[[str, dict[str, float]], dict[str, float]]
    report: Callable[[str, Mapping[str, float]], list[str]]
    heads: Callable[[BertConfig, Compute], dict[str, "nn.Module"]] = lambda config, compute: {}
    weights: Callable[[dict], "jax.Array"] = lambda batch: batch["sequence_weights"]
    total: Callable[["jax.Array"], "jax.Array"] = _number_of_predictions
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
    encode: Callable[["nn.Module", dict, "jax.Array", "Memory | None"], tuple] | None = None
    rewrite: Callable[["EncodedBatch", "jax.Array", "jax.Array"], tuple["EncodedBatch", tuple]] | None = None
    models: Callable[[BertConfig], dict[str, BertConfig]] = lambda config: {}
    goes_on: bool = False
    finished: Callable[[dict], dict] = lambda params: params
    start: Callable[[dict], dict] = lambda params: params
    moves: Callable[[tuple[str, ...]], tuple[str, ...] | None] = lambda path: None
    in_all_stages: str = ""
    settings: type | None = None
    made: Callable[[Any], "Objective"] | None = None
    is_auxiliary: bool = False


class Term(NamedTuple):
    """An objective in the sum that is learnt."""

    name: str
    weight: float
    objective: Objective


OBJECTIVES: Registry[Objective] = Registry(
    "objective", "objective", own_in(__package__, __file__, "OBJECTIVE", without=("parsing", "parts"))
)
register = OBJECTIVES.register
# What is learnt if `config.objective` does not say: from words, by `families.words`, and from pairs of segments, by
# `data.next_sentence`.
OF_WORDS = {"masked": "mlm", "next": "lm", "neighbours": "bilm", "permuted": "plm"}
OF_PAIRS = {"pairs": "nsp", "order": "sop"}
# The arrays that batches have.
RESERVED = (
    "input_ids", "segments", "token_types", "positions", "first_tokens", "dropout_rows", "word_positions", "word_ids",
    "word_weights", "pair_labels", "sequence_weights", "weights", "original_ids", "progress", "goes_on", "following",
    "memory",
)  # fmt: skip


def of(config: ml_collections.ConfigDict) -> tuple[Term, ...]:
    """Returns the terms of `config.objective`, such as "mlm + 0.5*sop", in their order; the first one's held-out loss
    says which checkpoint is the best.

    Raises `UserError` if it is not a sum of objectives.
    """
    return tuple(Term(name, weight, _with_settings(config, name)) for name, weight in weights_of(config).items())


def of_stages(config: ml_collections.ConfigDict) -> tuple[Term, ...]:
    """Returns the terms of all stages, each once."""
    return tuple({term.name: term for stage in stages_of(config) for term in of(config_in(config, stage))}.values())


def of_run(config: ml_collections.ConfigDict) -> tuple[Term, ...]:
    """Returns what a run has learnt, as `of_stages`, without objectives that nobody has registered; nothing after
    fine-tuning. Raises `UserError` if its config is damaged."""
    if "objective" not in config:
        return ()
    weights: dict[str, float] = {}
    for stage in stages_of(config):
        weights |= weights_of(config_in(config, stage))
    return tuple(Term(name, x, _with_settings(config, name)) for name, x in weights.items() if _is_there(name))


def _is_there(name: str) -> bool:
    try:
        OBJECTIVES.get(name)
    except UserError:
        return False
    return True


def weights_of(config: ml_collections.ConfigDict) -> dict[str, float]:
    """Returns the weights of `config.objective` by the names of the objectives, which may not exist."""
    text = config.objective
    if not text.strip():
        pairs = OF_PAIRS.get(config.data.next_sentence)
        text = " + ".join(filter(None, (OF_WORDS[families.words(config)], pairs)))
    weights: dict[str, float] = {}
    for part in text.split("+"):
        found = re.fullmatch(r"(?:(\d+(?:\.\d*)?|\.\d+)\s*\*\s*)?([^\s*]+)", part.strip())
        if not found or float(found[1] or 1) <= 0:
            raise UserError(
                f"config.objective = {text!r}: write one objective, or a sum such as 'mlm + 0.5*sop', with weights "
                f"above 0; there are {', '.join(OBJECTIVES.names())}"
            )
        if found[2] in weights:
            raise UserError(f"config.objective = {text!r}: has {found[2]} twice; give it one weight")
        weights[found[2]] = float(found[1] or 1)
    return weights


def learn(config: ml_collections.ConfigDict, objective: str, **settings: Mapping[str, Any]) -> None:
    """Sets `config.objective`, and settings by the names of its objectives: `generator=dict(width=1/3)`."""
    config.objective = objective
    for name, given in settings.items():
        add_settings(config, name)
        config.objectives[name].update(given)


def add_settings(config: ml_collections.ConfigDict, name: str) -> None:
    """Adds the settings of an objective to `config.objectives`, with its defaults. Does nothing if it has none."""
    if name not in OBJECTIVES.names() or (settings := OBJECTIVES.get(name).settings) is None:
        return
    with config.unlocked():
        if "objectives" not in config:
            config.objectives = ml_collections.ConfigDict()
        if name not in config.objectives:
            config.objectives[name] = ml_collections.ConfigDict(dataclasses.asdict(settings()))


def add_all_settings(config: ml_collections.ConfigDict) -> None:
    """Adds those of all that is learnt, so that a run says which it has."""
    for term in of_stages(config):
        add_settings(config, term.name)


def _with_settings(config: ml_collections.ConfigDict, name: str) -> Objective:
    """Returns an objective with its settings. Raises `UserError` if it has not these, or other values of them."""
    objective, given = OBJECTIVES.get(name), config.get("objectives", {}).get(name)
    if not given or objective.settings is None:
        return objective
    fields = {each.name: each for each in dataclasses.fields(objective.settings)}
    for field, value in given.items():
        if field not in fields:
            raise UserError(f"config.objectives.{name} has no field {field!r}; there are {', '.join(fields)}")
        within(f"objectives.{name}.{field}", value, **fields[field].metadata)
    return _made(objective.made, objective.settings(**given))


@functools.cache
def _made(make: Callable[[Any], Objective], settings) -> Objective:
    """Equal settings give the same objective: models that have one are compared."""
    return make(settings)


def validate(config: ml_collections.ConfigDict, with_model: bool = True) -> None:
    """Raises `UserError` if what is to be learnt does not suit the rest of the config, or each other. The masks of
    `eval.fill_masks` are filled after the last stage.

    Args:
      with_model: also what depends on the model; False: `config.model` is not yet what will be trained.
    """
    *others, last = (config_in(config, stage) for stage in stages_of(config))
    for each in others:
        with each.unlocked():
            each.eval.fill_masks = ()
        _validate(each, with_model)
    _validate(last, with_model)
    _validate_stages(config)
    learnt = [term.name for term in of_stages(config)]
    for name in config.get("objectives", {}):
        if name not in learnt or OBJECTIVES.get(name).settings is None:
            what = "has no settings" if name in learnt else f"{' + '.join(learnt)} is learnt, without it"
            raise UserError(f"config.objectives.{name}: {what}; leave it out")


def _validate_stages(config: ml_collections.ConfigDict) -> None:
    """Raises `UserError` if a stage leaves out what all must learn."""
    by_stage = {stage.name: [term.name for term in of(config_in(config, stage))] for stage in stages_of(config)}
    for term in of_stages(config):
        without = next((stage for stage, names in by_stage.items() if term.name not in names), None)
        if term.objective.in_all_stages and without is not None:
            raise UserError(
                f"config.stages.{without}: learns {' + '.join(by_stage[without])}, without {term.name}, "
                f"{term.objective.in_all_stages}"
            )


def validate_mesh(config: ml_collections.ConfigDict, mesh: "Mesh") -> None:
    """Raises `UserError` if a mesh does not divide a model that is trained beside that of the config."""
    from bertjax.distributed.mesh import undivided

    model = families.config_of(config)
    for term in of_stages(config):
        for name, own in term.objective.models(model).items():
            if fault := undivided(vars(own), mesh.shape):
                raise UserError(f"config.objectives.{term.name}: the {name} has {fault}")


def _validate(config: ml_collections.ConfigDict, with_model: bool) -> None:
    terms = of(config)
    of_words = [term.name for term in terms if term.objective.words_per_sequence]
    if len(of_words) > 1:
        raise UserError(
            f"config.objective = {config.objective!r}: {' and '.join(of_words)} both predict words; leave one out"
        )
    if config.eval.bits_windows and not of_words:
        names = " + ".join(term.name for term in terms)
        raise UserError(f"config.eval.bits_windows = {config.eval.bits_windows}: {names} predicts no words; set 0")
    if terms[0].objective.is_auxiliary:
        raise UserError(
            f"config.objective = {config.objective!r}: {terms[0].name} only helps others to be learnt; put one of them "
            f"first, such as 'lm + {terms[0].name}'"
        )
    for field, what in (("rewrite", "change what is read"), ("encode", "say how it is read")):
        names = [term.name for term in terms if getattr(term.objective, field)]
        if len(names) > 1:
            both = " and ".join(names)
            raise UserError(f"config.objective = {config.objective!r}: {both} both {what}; leave one out")
    taken = set(RESERVED)
    for term in terms:
        if clashing := taken & term.objective.adds.keys():
            raise UserError(
                f"config.objective = {config.objective!r}: {term.name} adds {min(clashing)!r} to batches, which have it"
            )
        taken |= term.objective.adds.keys()
        if config.data.stream and not term.objective.goes_on:
            words = OF_WORDS[families.words(config)]
            other = f"learn {words}, or " if OBJECTIVES.get(words).goes_on else ""
            raise UserError(
                f"config.data.stream = True: {term.name} reads sequences by themselves, not text that goes on; {other}"
                f"set False"
            )
        if with_model:
            term.objective.validate(config)
    if config.eval.fill_masks and not any(term.objective.fills_masks for term in terms):
        names = " + ".join(term.name for term in terms)
        raise UserError(f"config.eval.fill_masks = {config.eval.fill_masks!r}: {names} does not teach it; set ()")
