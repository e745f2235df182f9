"""Words in any order: permutation language modelling, by a model with two streams of states (XLNet; Yang et al. 2019,
sections 2.2 and 2.3).

The last tokens of a random order are predicted, each by a state that sees the tokens before it in the order, and knows
its own place, but not which token is there. All of them are predicted in one pass.
"""

import dataclasses
import functools

import numpy as np

from bertjax.config.model_config import field
from bertjax.models import families
from bertjax.models.family import QueryStream
from bertjax.objectives.objective import Objective
from bertjax.objectives.parts.words import loss_of_words, predicting, validate_not_masked, words_of_rows

TITLE = "permuted words"


@dataclasses.dataclass(frozen=True)
class PermutationSettings:
    """One in `k` tokens is predicted (K in section 2.3): spans of 1 to `max_span_words` words, or single tokens if that
    is 0."""

    k: int = field(6, least=1)
    max_span_words: int = field(5, least=0, most=100)


def _addition(settings: PermutationSettings, config, stage, tokenizer):
    from bertjax.data.loading.permutation import permutes

    if tokenizer is None:
        raise ValueError("orders need a tokenizer, which knows where words begin")
    return permutes(settings.k, settings.max_span_words, stage.max_predictions_per_seq, tokenizer)


def _encode(encoder, batch, dropout_keys, memory):
    """Tokens that are not predicted have rank 0 and see each other; a predicted one sees these, and lower ranks."""
    ranks = batch["ranks"]
    seen = (ranks[:, None] < ranks[:, :, None]) | (ranks == 0)[:, None]
    read = (batch[name] for name in ("input_ids", "segments", "token_types", "word_positions"))
    return encoder.encode_permuted(*read, seen, batch.get("positions"), dropout_keys, memory)


def _loss(encoded, weights, keys):
    import jax.numpy as jnp

    del keys
    places = jnp.broadcast_to(jnp.arange(weights.shape[1]), weights.shape)  # among the states that predict
    batch = encoded.batch | {"word_positions": places}
    return loss_of_words(encoded._replace(hidden=encoded.of_words, batch=batch), weights)[0]


def _flops(config, row) -> int:
    from bertjax.nn.heads import word_flops

    family = families.family_of(config)
    assert isinstance(family, QueryStream)  # see `validate`
    return word_flops(config, row.predictions) + family.query_flops(config, row.tokens, row.predictions)


def _make(settings: PermutationSettings) -> Objective:
    own = predicting(
        TITLE,
        "permuted",
        functools.partial(validate_not_masked, TITLE),
        words_per_sequence=lambda config, stage: stage.max_predictions_per_seq,
        words_per_row=lambda config, stage, sequences: words_of_rows(1 / settings.k, stage, sequences),
        addition=functools.partial(_addition, settings),
        adds={"ranks": ("token", np.int32)},
        encode=_encode,
        goes_on=True,
        fills_masks=True,
    )
    return dataclasses.replace(own, loss=_loss, flops=_flops)


OBJECTIVE = dataclasses.replace(_make(PermutationSettings()), settings=PermutationSettings, made=_make)
