"""Continues a text with a causal model, word after word."""

import functools
from collections.abc import Iterable, Iterator
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from bertjax.common.errors import UserError
from bertjax.config.model_config import Compute
from bertjax.inference.predictor import check_numbers, words_model
from bertjax.interop.pretrained import Pretrained
from bertjax.models import families
from bertjax.models.family import Decodes
from bertjax.models.heads import BertForMaskedLM
from bertjax.text.tokenizer import Tokenizer

NEVER = jnp.finfo(jnp.float32).min


class Sampling(NamedTuple):
    """How the next piece is chosen.

    Attributes:
      temperature: divides the logits; 0: always the most likely piece.
      top_k: only among the k most likely ones; 0: all.
      top_p: only among the most likely ones that together have this probability (Holtzman et al. 2020, section 3.1).
    """

    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0


def generate(
    model: BertForMaskedLM, params, tokenizer: Tokenizer, text: str, tokens: int, sampling: Sampling, seed: int = 0
) -> str:
    """Returns a text with up to `tokens` more pieces; it ends earlier where the model ends a document.

    Raises `UserError` if the model is not causal, or if the text leaves it no room.
    """
    config = model.config
    family = families.family_of(config)
    if (lm_type := family.lm_type(config)) != "causal" or not isinstance(family, Decodes):
        does = {"bidirectional": "reads in both directions", "causal": "cannot"}.get(lm_type, "fills a [MASK]")
        raise UserError(f"only a left-to-right model (model.causal) continues a text; this one {does}")
    ids = [tokenizer.cls_id, *tokenizer.encode(text).ids]
    if len(ids) >= (most := config.max_position_embeddings):
        raise UserError(f"{text[:60]!r}... has {len(ids)} tokens, and the model no room for more than {most}")
    size = min(config.max_position_embeddings, 1 << (len(ids) - 1).bit_length())  # few lengths to compile for
    longest = min(config.max_position_embeddings, size + tokens)
    tokens = min(tokens, longest - len(ids))
    prompt = np.pad(ids, (0, size - len(ids)), constant_values=tokenizer.pad_id)[None].astype(np.int32)
    special = {tokenizer.pad_id, tokenizer.unk_id, tokenizer.cls_id, tokenizer.mask_id} - {tokenizer.sep_id}
    found, logits = _generate(
        model,
        longest,
        sampling,
        tuple(special),
        tokenizer.sep_id,
        params,
        prompt,
        len(ids),
        tokens,
        jax.random.key(seed),
    )
    check_numbers(np.asarray(logits))
    found = np.asarray(found)[0, len(ids) : len(ids) + tokens].tolist()
    end = found.index(tokenizer.sep_id) if tokenizer.sep_id in found else len(found)
    return tokenizer.decode([*ids[1:], *found[:end]])


def of_checkpoint(
    source: Pretrained, texts: Iterable[str], tokens: int, sampling: Sampling, seed: int = 0
) -> Iterator[str]:
    """Continues texts with a checkpoint, see `generate`, each with a seed of its own.

    Computes in float32: one token at a time is slower in bfloat16. Also raises `UserError` if it predicts no words.
    """
    model, params = words_model(source, Compute())
    for number, text in enumerate(texts):
        yield generate(model, params, source.tokenizer, text, tokens, sampling, seed + number)


@functools.partial(jax.jit, static_argnums=(0, 1, 2, 3, 4))
def _generate(model, longest, sampling, special, sep_id, params, prompt, used, tokens, key):
    """Returns `[1, longest]` ids, the prompt's first `used` ones and pieces after them until [SEP]; the last logits."""
    cache = families.family_of(model.config).new_cache(model.config, 1, longest, model.compute.dtype)
    run = functools.partial(model.apply, {"params": params}, method="decode")
    # The prompt's padding is in the cache as well: no token attends to it before another has taken its place.
    logits, cache = run(prompt, jnp.arange(prompt.shape[1]), cache, used - 1)
    ids = jnp.zeros((1, longest), jnp.int32).at[:, : prompt.shape[1]].set(prompt)

    def goes_on(state):
        ids, _, _, place = state
        is_end = (place > used) & (ids[0, place - 1] == sep_id)  # GPT-2 begins with the same piece
        return (place < used + tokens) & ~is_end

    def step(state):
        ids, logits, cache, place = state
        logits = logits.at[:, jnp.array(special, jnp.int32)].set(NEVER)
        ids = ids.at[:, place].set(_choose(logits, sampling, jax.random.fold_in(key, place)))
        logits, cache = run(jax.lax.dynamic_slice(ids, (0, place), (1, 1)), place[None], cache, 0)
        return ids, logits, cache, place + 1

    return jax.lax.while_loop(goes_on, step, (ids, logits, cache, jnp.asarray(used)))[:2]


def _choose(logits, sampling: Sampling, key):
    """`[batch, vocab]` -> `[batch]` pieces."""
    if sampling.temperature == 0:
        return logits.argmax(-1)
    logits = logits / sampling.temperature
    if sampling.top_k:
        least = jax.lax.top_k(logits, min(sampling.top_k, logits.shape[-1]))[0][:, -1:]
        logits = jnp.where(logits < least, NEVER, logits)
    if sampling.top_p < 1:
        ordered = -jnp.sort(-logits, axis=-1)
        # For each piece, the total probability of the more likely ones.
        before = jnp.cumsum(jax.nn.softmax(ordered), axis=-1) - jax.nn.softmax(ordered)
        least = jnp.where(before < sampling.top_p, ordered, jnp.inf).min(-1, keepdims=True)
        logits = jnp.where(logits < least, NEVER, logits)
    return jax.random.categorical(key, logits)
