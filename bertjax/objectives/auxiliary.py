"""What helps deep models to learn next characters, or words: layers before the last predict them as well, and each
position predicts some that are further ahead (Al-Rfou et al. 2019, section "Auxiliary Losses").

Each layer has matrices of its own for that, one for each character that is predicted. It predicts in training only: the
last layer's next words, which alone are evaluated, are those of `lm`. Write "lm + auxiliary".
"""

import dataclasses
import functools

from bertjax.config.limits import require
from bertjax.config.model_config import BertConfig, field
from bertjax.objectives.lm import OBJECTIVE as NEXT_WORDS
from bertjax.objectives.objective import Objective, Plot
from bertjax.objectives.parsing import parse_objective

# Names of its output layers.
LAYERS, LAST = "words_of_layers", "further_words"


@dataclasses.dataclass(frozen=True)
class AuxiliarySettings:
    """What is predicted besides the last layer's next words.

    Of n layers, the l-th stops to predict after `layers_until` * l / n of the training; 0: none does but the last.
    Each position predicts so many `targets`, the words 1, 2, ... places ahead; what is more than one place ahead counts
    `target_weight`.
    """

    layers_until: float = field(0.5, least=0, most=1)
    targets: int = field(2, least=1, most=64)
    target_weight: float = field(0.5, above=0, most=1)


def _predicted(config: BertConfig, settings: AuxiliarySettings) -> dict[str, tuple[int, int]]:
    """Returns {output layer: (layers of the model that it is of, words that each position predicts)}."""
    before = config.num_hidden_layers - 1 if settings.layers_until else 0
    found = {LAYERS: (before, settings.targets), LAST: (1, settings.targets - 1)}
    return {name: sizes for name, sizes in found.items() if all(sizes)}


def _heads(settings: AuxiliarySettings, config, compute) -> dict:
    from bertjax.objectives.parts.words_of_layers import WordsOfLayers

    return {name: WordsOfLayers(config, compute, *sizes) for name, sizes in _predicted(config, settings).items()}


def _loss(settings: AuxiliarySettings, encoded, weights, keys):
    import jax.numpy as jnp

    from bertjax.objectives.parts.words_of_layers import words_ahead

    del keys
    batch, heads, count = encoded.batch, encoded.heads, len(encoded.states) - 1
    words, its_weights = words_ahead(batch, weights, settings.targets)
    its_weights *= jnp.where(jnp.arange(settings.targets) > 0, settings.target_weight, 1.0)
    total = jnp.float32(0)
    if LAYERS in heads:
        ends = settings.layers_until * jnp.arange(1, count) / count
        predicts = batch["progress"] < ends[:, None]  # [layers, rows]
        each = predicts[:, :, None, None] * its_weights
        total += heads[LAYERS](encoded.states[1:-1], batch["word_positions"], words, each, encoded.z_loss)
    if LAST in heads:
        further = words[..., 1:], its_weights[None, ..., 1:]
        total += heads[LAST](encoded.states[-1:], batch["word_positions"], *further, encoded.z_loss)
    return total, {}


def _flops(settings: AuxiliarySettings, config: BertConfig, row) -> int:
    predicted = sum(layers * targets for layers, targets in _predicted(config, settings).values())
    return 2 * row.predictions * config.hidden_size * config.padded_vocab_size * predicted


def _validate(settings: AuxiliarySettings, config) -> None:
    names = [term.name for term in parse_objective(config)]
    remedy = "what the last layer predicts is missing: write 'lm + auxiliary'"
    require("lm" in names, "objective", config.objective, remedy)
    nothing = "with targets = 1 as well, nothing is predicted besides lm; choose more, or leave auxiliary out"
    is_something = settings.layers_until > 0 or settings.targets > 1
    require(is_something, "objectives.auxiliary.layers_until", settings.layers_until, nothing)


def _make(settings: AuxiliarySettings) -> Objective:
    return Objective(
        loss=functools.partial(_loss, settings),
        scores=lambda name, means: {},
        report=lambda name, scores: [],
        heads=functools.partial(_heads, settings),
        weights=NEXT_WORDS.weights,
        total=NEXT_WORDS.total,
        flops=functools.partial(_flops, settings),
        validate=functools.partial(_validate, settings),
        plots=(Plot("sum of the auxiliary losses", "loss"),),
        is_auxiliary=True,
    )


OBJECTIVE = dataclasses.replace(_make(AuxiliarySettings()), settings=AuxiliarySettings, made=_make)
