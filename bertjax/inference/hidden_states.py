"""Extracts hidden states of texts as features (Devlin et al. 2019, section 5.3)."""

import functools
import itertools
import zipfile
from collections.abc import Callable, Iterable, Iterator
from typing import Any, NamedTuple

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
from etils import epath

from bertjax.common.errors import UserError
from bertjax.common.files import replacing
from bertjax.inference.predictor import check_numbers, divide_by_length, padded_batch
from bertjax.nn.layer_pooling import combine
from bertjax.text.tokenizer import Tokenizer

BATCH_SIZE = 32
PORTION = 1 << 15  # the approximate number of tokens whose hidden states are in memory


@functools.partial(jax.jit, static_argnums=(0, 3))
def _features(model: nn.Module, params: dict, batch: dict, layers: str) -> jax.Array:
    states: Any = model.apply({"params": params}, **batch, every_layer=True, method="encode")
    return combine(states, layers).astype(jnp.float32)


def compute_hidden_states(
    model: nn.Module, params: dict, tokenizer: Tokenizer, texts: Iterable[str], layers: str
) -> Iterator[np.ndarray]:
    """Yields the hidden states of each text, `[tokens, width]` float32 with [CLS] and [SEP], in order.

    Args:
      model: the encoder.
      params: the params of the encoder.
      tokenizer: the tokenizer.
      texts: the texts. A text with more tokens than the model has positions is truncated.
      layers: one of `layer_pooling.WITHOUT_WEIGHTS`; the model must have enough layers.
    """
    longest = model.config.max_position_embeddings
    room = longest - len(tokenizer.framed(()))
    encoded = (tokenizer.framed(ids[:room]) for ids in map(tokenizer.encode_with_masks, texts))
    for ids in divide_by_length(encoded, PORTION):
        # Batches texts of similar length to reduce padding; pads to powers of two to limit compilations.
        lengths = list(map(len, ids))
        order = sorted(range(len(ids)), key=lengths.__getitem__)
        states: dict[int, np.ndarray] = {}
        for first in range(0, len(order), BATCH_SIZE):
            rows = order[first : first + BATCH_SIZE]
            length = min(longest, max(16, 1 << (lengths[rows[-1]] - 1).bit_length()))
            batch = padded_batch([ids[i] for i in rows], tokenizer, BATCH_SIZE, length)
            features = np.asarray(_features(model, params, batch, layers))
            states |= {i: features[row, : lengths[i]] for row, i in enumerate(rows)}
        check_numbers(*states.values())
        yield from (states[i] for i in range(len(ids)))


class WrittenStates(NamedTuple):
    """The result of `write_hidden_states`.

    Attributes:
      shape: the shape of the array, (tokens of all texts, width).
      texts: the number of texts.
      cut: the number of texts that were truncated.
    """

    shape: tuple[int, int]
    texts: int
    cut: int


def write_hidden_states(
    path: epath.PathLike,
    model: nn.Module,
    params: dict,
    tokenizer: Tokenizer,
    texts: Callable[[], Iterable[str]],
    layers: str,
) -> WrittenStates:
    """Writes the results of `compute_hidden_states` to an .npz file.

    The file contains `hidden` `[tokens of all texts, width]` and `offsets` `[texts + 1]` int64. The hidden states of
    text i are `hidden[offsets[i] : offsets[i + 1]]`.

    Args:
      path: the file.
      model: the encoder.
      params: the params of the encoder.
      tokenizer: the tokenizer.
      texts: a function that returns the texts, at least one. The function is called twice, because the file begins with
        the number of rows.
      layers: see `compute_hidden_states`.

    Raises:
      UserError: if the second call returns other texts, or if the file cannot be written.
    """
    longest, around = model.config.max_position_embeddings, len(tokenizer.framed(()))
    counts = np.fromiter((len(ids) + around for ids in map(tokenizer.encode_with_masks, texts())), np.int64)
    offsets = np.concatenate([[0], np.minimum(counts, longest).cumsum()])
    rows, path = int(offsets[-1]), epath.Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    with replacing(path) as partial, partial.open("wb") as file, zipfile.ZipFile(file, "w") as archive:
        states = compute_hidden_states(model, params, tokenizer, texts(), layers)
        first = next(states)
        shape, written = (rows, first.shape[-1]), 0
        with archive.open("hidden.npy", "w", force_zip64=True) as member:
            header = {"descr": np.lib.format.dtype_to_descr(first.dtype), "fortran_order": False, "shape": shape}
            np.lib.format.write_array_header_1_0(member, header)
            for features in itertools.chain([first], states):
                member.write(np.ascontiguousarray(features).data)
                written += features.size
        if written != rows * shape[1]:
            raise UserError(
                "--input: the file changed during the computation; stop the program that changes it, and try again"
            )
        with archive.open("offsets.npy", "w") as member:
            np.lib.format.write_array(member, offsets)
    return WrittenStates(shape, len(counts), int((counts > longest).sum()))
