"""The network of a checkpoint with its head, as a pure function."""

import functools
from collections.abc import Callable
from typing import Any, cast

import jax
import jax.numpy as jnp

from bertjax.config.model_config import Compute
from bertjax.inference import abilities, predictor
from bertjax.interop.pretrained import Pretrained
from bertjax.models import families

Function = Callable[..., jax.Array]  # (params, batch, dropout_keys) -> array


def outputs(source: Pretrained, compute: Compute) -> Function:
    """Returns the function that computes the outputs of a checkpoint's head, see `bertjax.Model.apply`."""
    config, task = source.config, abilities.task_of(source)
    if task is not None:
        head = task.head(source)
        model = head.model(config, source.head, compute=compute)
        return functools.partial(predictor.apply_model, model, head.pooled)
    if not source.predicts_words:
        return states(source, compute)
    words = predictor.words_model(source, compute)[0]
    readers = 2 if families.family_of(config).lm_type(config) == "bidirectional" else 1

    def logits(params: dict[str, Any], batch: dict[str, Any], dropout_keys: jax.Array | None) -> jax.Array:
        rows, length = batch["input_ids"].shape
        positions = jnp.concatenate([jnp.broadcast_to(jnp.arange(length), (rows, length))] * readers, axis=1)
        outputs = words.apply({"params": params}, **batch, masked_positions=positions, dropout_keys=dropout_keys)
        return cast(jax.Array, outputs)[..., : config.vocab_size]

    return logits


def states(source: Pretrained, compute: Compute) -> Function:
    """Returns the function that computes the last hidden states `[batch, length, hidden]`."""
    encoder = families.encoder_of(source.config, compute)

    def run(params: dict[str, Any], batch: dict[str, Any], dropout_keys: jax.Array | None) -> jax.Array:
        variables = {"params": params["bert"]}
        return cast(jax.Array, encoder.apply(variables, **batch, dropout_keys=dropout_keys, method="encode"))

    return run
