"""Hidden states of texts as features (Devlin et al. 2019, section 5.3)."""

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
    """`hidden` `[texts, length, width]`, zero where there is padding; `mask` `[texts, length]` of 1 and 0; and how many
    texts were cut to the model's positions. `length` is that of the longest, with [CLS] and [SEP].

    Args:
      layers: one of `hidden_states.WITHOUT_WEIGHTS`, for which the model has enough layers.
    """
    most = model.config.max_position_embeddings
    whole = [tokenizer.encode_with_masks(text) for text in texts]
    ids = [[tokenizer.cls_id, *x[: most - 2], tokenizer.sep_id] for x in whole]
    cut = sum(len(x) > most - 2 for x in whole)
    lengths = np.array([len(x) for x in ids])
    mask = (np.arange(lengths.max()) < lengths[:, None]).astype(np.int32)
    hidden = None
    # Texts of similar length together, so that short ones do not pay for long ones, in a few lengths to compile few.
    order = np.argsort(lengths, kind="stable")
    for rows in np.split(order, range(BATCH_SIZE, len(order), BATCH_SIZE)):
        length = min(most, max(16, 1 << int(lengths[rows].max() - 1).bit_length()))
        input_ids = np.full((BATCH_SIZE, length), tokenizer.pad_id, np.int32)
        segments = np.zeros((BATCH_SIZE, length), np.int32)
        for row, i in enumerate(rows):
            input_ids[row, : lengths[i]], segments[row, : lengths[i]] = ids[i], 1
        batch = {"input_ids": input_ids, "segments": segments, "token_types": np.zeros_like(segments)}
        found = np.asarray(_features(model, params, batch, layers))[: len(rows), : mask.shape[1]]
        if hidden is None:
            hidden = np.zeros((*mask.shape, found.shape[-1]), np.float32)
        hidden[rows, : found.shape[1]] = found * segments[: len(rows), : found.shape[1], None]
    return hidden, mask, cut
