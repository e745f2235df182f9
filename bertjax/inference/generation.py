"""Text generation with causal models."""

import functools
from collections.abc import Iterable, Iterator
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from bertjax.common.errors import UserError
from bertjax.config.model_config import Compute
from bertjax.inference.predictor import check_numbers, words_model
from bertjax.interop.pretrained import Pretrained, tokenizer_of
from bertjax.models import families
from bertjax.models.family import Decodes
from bertjax.models.heads import BertForMaskedLM
from bertjax.text.tokenizer import Tokenizer

NEVER = jnp.finfo(jnp.float32).min
State = tuple[jax.Array, jax.Array, Any, jax.Array]  # ids, logits, cache, position of the next token


class Sampling(NamedTuple):
    """The settings of sampling the next token.

    Attributes:
      temperature: divides the logits; 0 always chooses the most likely token.
      top_k: samples from the k most likely tokens; 0 samples from all tokens.
      top_p: samples from the most likely tokens with this total probability (Holtzman et al. 2020, section 3.1).
    """

    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0


def generate(
    model: BertForMaskedLM,
    params: dict,
    tokenizer: Tokenizer,
    text: str,
    tokens: int,
    sampling: Sampling,
    seed: int = 0,
) -> str:
    """Returns a text with a continuation of up to `tokens` tokens. The continuation ends before the first [SEP].

    Raises:
      UserError: if the model is not causal, or if the tokens of the text fill all positions of the model.
    """
    config = model.config
    family = families.family_of(config)
    if (lm_type := family.lm_type(config)) != "causal" or not isinstance(family, Decodes):
        does = {"bidirectional": "reads in both directions", "causal": "cannot"}.get(lm_type, "fills a [MASK]")
        raise UserError(f"only a left-to-right model (model.causal) continues a text; this model {does}")
    ids = [tokenizer.cls_id, *tokenizer.encode(text).ids]
    if len(ids) >= (positions := config.max_position_embeddings):
        raise UserError(f"{text[:60]!r}... has {len(ids)} tokens, but the model has only {positions} positions")
    size = min(positions, 1 << (len(ids) - 1).bit_length())  # A power of two: few lengths are compiled.
    longest = min(positions, size + tokens)
    tokens = min(tokens, longest - len(ids))
    prompt = np.pad(ids, (0, size - len(ids)), constant_values=tokenizer.pad_id)[None].astype(np.int32)
    special = {tokenizer.pad_id, tokenizer.unk_id, tokenizer.cls_id, tokenizer.mask_id} - {tokenizer.sep_id}
    settings = (model, longest, sampling, tuple(special), tokenizer.sep_id)
    generated, logits = _generate(*settings, params, prompt, len(ids), tokens, jax.random.key(seed))
    check_numbers(np.asarray(logits))
    new_ids = np.asarray(generated)[0, len(ids) : len(ids) + tokens].tolist()
    end = new_ids.index(tokenizer.sep_id) if tokenizer.sep_id in new_ids else len(new_ids)
    return tokenizer.decode([*ids[1:], *new_ids[:end]])


def continue_texts(
    source: Pretrained, texts: Iterable[str], tokens: int, sampling: Sampling, seed: int = 0
) -> Iterator[str]:
    """Yields each text with its continuation by a checkpoint, see `generate`.

    Text number i, counted from 0, has the seed `seed + i`. The computation is in float32, because bfloat16 is slower
    for one token at a time.

    Raises:
      UserError: if the checkpoint has no language model, or if `generate` raises an error.
    """
    model, params = words_model(source, Compute())
    for number, text in enumerate(texts):
        yield generate(model, params, tokenizer_of(source), text, tokens, sampling, seed + number)


@functools.partial(jax.jit, static_argnums=(0, 1, 2, 3, 4))
def _generate(
    model: BertForMaskedLM,
    longest: int,
    sampling: Sampling,
    special: tuple[int, ...],
    sep_id: int,
    params: dict,
    prompt: jax.Array,
    used: jax.Array,
    tokens: jax.Array,
    key: jax.Array,
) -> tuple[jax.Array, jax.Array]:
    """Generates tokens until [SEP].

    Args:
      model: the causal language model.
      longest: the size of the cache in tokens.
      sampling: the settings of sampling.
      special: the ids of the tokens that are never generated.
      sep_id: the id of the token that ends a document.
      params: the params of the model.
      prompt: `[1, length]` ids with padding.
      used: the number of tokens of the prompt without padding.
      tokens: the maximum number of new tokens.
      key: the key of the random numbers.

    Returns:
      `[1, longest]` ids with the prompt and the new tokens, and the last logits.
    """
    family: Any = families.family_of(model.config)  # `Decodes`
    cache = family.new_cache(model.config, 1, longest, model.compute.dtype)
    run: Any = functools.partial(model.apply, {"params": params}, method="decode")
    # The cache contains the padding of the prompt. No token attends to the padding before a new token replaces it.
    logits, cache = run(prompt, jnp.arange(prompt.shape[1]), cache, used - 1)
    ids = jnp.zeros((1, longest), jnp.int32).at[:, : prompt.shape[1]].set(prompt)

    def is_unfinished(state: State) -> jax.Array:
        ids, _, _, place = state
        is_end = (place > used) & (ids[0, place - 1] == sep_id)  # The prompt of GPT-2 begins with [SEP].
        return (place < used + tokens) & ~is_end

    def step(state: State) -> State:
        ids, logits, cache, place = state
        logits = logits.at[:, jnp.array(special, jnp.int32)].set(NEVER)
        ids = ids.at[:, place].set(_choose(logits, sampling, jax.random.fold_in(key, place)))
        logits, cache = run(jax.lax.dynamic_slice(ids, (0, place), (1, 1)), place[None], cache, 0)
        return ids, logits, cache, place + 1

    ids, logits, _, _ = jax.lax.while_loop(is_unfinished, step, (ids, logits, cache, jnp.asarray(used)))
    return ids, logits


def _choose(logits: jax.Array, sampling: Sampling, key: jax.Array) -> jax.Array:
    """Returns a token for each row, `[batch]`; `logits` are `[batch, vocab]`."""
    if sampling.temperature == 0:
        return logits.argmax(-1)
    logits = logits / sampling.temperature
    if sampling.top_k:
        least = jax.lax.top_k(logits, min(sampling.top_k, logits.shape[-1]))[0][:, -1:]
        logits = jnp.where(logits < least, NEVER, logits)
    if sampling.top_p < 1:
        ordered = -jnp.sort(-logits, axis=-1)
        # For each token, the total probability of the more likely tokens.
        before = jnp.cumsum(jax.nn.softmax(ordered), axis=-1) - jax.nn.softmax(ordered)
        least = jnp.where(before < sampling.top_p, ordered, jnp.inf).min(-1, keepdims=True)
        logits = jnp.where(logits < least, NEVER, logits)
    return jax.random.categorical(key, logits)
