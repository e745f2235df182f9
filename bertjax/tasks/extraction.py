"""Extracts hidden states of texts as features (Devlin et al. 2019, section 5.3)."""

import functools
from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np

from bertjax.model.bert import BertModel
from bertjax.model.hidden_states import combine
from bertjax.text.tokenizer import Tokenizer

BATCH_SIZE = 32


@functools.partial(jax.jit, static_argnums=(0, 3))
def _features(model: BertModel, params, batch, layers: str):
    states = model.apply({"params": params}, **batch, every_layer=True, method="encode")
    return combine(states, layers).astype(jnp.float32)


def extract(
    model: BertModel, params: dict, tokenizer: Tokenizer, texts: Sequence[str], layers: str
) -> tuple[np.ndarray, np.ndarray, int]:
    """Extracts hidden states.

    Args:
      layers: one of `hidden_states.WITHOUT_WEIGHTS`; the model must have enough layers.

    Returns:
      `hidden` `[texts, length, width]`, zero in padding; `mask` `[texts, length]`, 1 for tokens and 0 for padding; and
      the number of texts truncated to the model's positions. `length` is that of the longest, with [CLS] and [SEP].
    """
    longest = model.config.max_position_embeddings
    whole = [tokenizer.encode_with_masks(text) for text in texts]
    ids = [[tokenizer.cls_id, *x[: longest - 2], tokenizer.sep_id] for x in whole]
    cut = sum(len(x) > longest - 2 for x in whole)
    lengths = np.array([len(x) for x in ids])
    mask = (np.arange(lengths.max()) < lengths[:, None]).astype(np.int32)
    hidden = None
    # Batches texts of similar length to reduce padding; pads to powers of two to limit compilations.
    order = np.argsort(lengths, kind="stable")
    for rows in np.split(order, range(BATCH_SIZE, len(order), BATCH_SIZE)):
        length = min(longest, max(16, 1 << int(lengths[rows].max() - 1).bit_length()))
        input_ids = np.full((BATCH_SIZE, length), tokenizer.pad_id, np.int32)
        segments = np.zeros((BATCH_SIZE, length), np.int32)
        for row, i in enumerate(rows):
            input_ids[row, : lengths[i]], segments[row, : lengths[i]] = ids[i], 1
        batch = {"input_ids": input_ids, "segments": segments, "token_types": np.zeros_like(segments)}
        states = np.asarray(_features(model, params, batch, layers))[: len(rows), : mask.shape[1]]
        if hidden is None:
            hidden = np.zeros((*mask.shape, states.shape[-1]), np.float32)
        hidden[rows, : states.shape[1]] = states * segments[: len(rows), : states.shape[1], None]
    return hidden, mask, cut
