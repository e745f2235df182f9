"""Extracts hidden states of texts as features (Devlin et al. 2019, section 5.3), a portion of texts at a time."""

import functools
import itertools
import zipfile
from collections.abc import Callable, Iterable, Iterator
from typing import NamedTuple

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
from etils import epath

from bertjax.common.errors import UserError
from bertjax.common.files import replacing
from bertjax.inference.predictor import check_numbers
from bertjax.nn.layer_pooling import combine
from bertjax.text.tokenizer import Tokenizer

BATCH_SIZE = 32
PORTION = 1 << 15  # tokens of texts that are read, and whose hidden states are held, at a time


@functools.partial(jax.jit, static_argnums=(0, 3))
def _features(model: nn.Module, params, batch, layers: str):
    states = model.apply({"params": params}, **batch, every_layer=True, method="encode")
    return combine(states, layers).astype(jnp.float32)


def extract(
    model: nn.Module, params: dict, tokenizer: Tokenizer, texts: Iterable[str], layers: str
) -> Iterator[np.ndarray]:
    """Yields the hidden states of each text, `[tokens, width]` float32 with [CLS] and [SEP], in order.

    Args:
      model: an encoder, of any family.
      texts: those with more tokens than the model has positions are cut.
      layers: one of `layer_pooling.WITHOUT_WEIGHTS`; the model must have enough layers.
    """
    longest = model.config.max_position_embeddings
    room = longest - len(tokenizer.framed(()))
    encoded = (tokenizer.framed(ids[:room]) for ids in _encode(tokenizer, texts))
    for ids in _portions(encoded):
        # Batches texts of similar length to reduce padding; pads to powers of two to limit compilations.
        order, found = sorted(range(len(ids)), key=lambda i: len(ids[i])), [None] * len(ids)
        for first in range(0, len(order), BATCH_SIZE):
            rows = order[first : first + BATCH_SIZE]
            length = min(longest, max(16, 1 << (len(ids[rows[-1]]) - 1).bit_length()))
            input_ids = np.full((BATCH_SIZE, length), tokenizer.pad_id, np.int32)
            segments, types = np.zeros((2, BATCH_SIZE, length), np.int32)
            for row, i in enumerate(rows):
                size = len(ids[i])
                input_ids[row, :size], segments[row, :size], types[row, :size] = ids[i], 1, tokenizer.token_types(size)
            batch = {"input_ids": input_ids, "segments": segments, "token_types": types}
            features = np.asarray(_features(model, params, batch, layers))
            for row, i in enumerate(rows):
                found[i] = features[row, : len(ids[i])]
        check_numbers(*found)
        yield from found


def _encode(tokenizer: Tokenizer, texts: Iterable[str]) -> Iterator[list[int]]:
    for text in texts:
        yield tokenizer.encode_with_masks(text)


def _portions(encoded: Iterable[list[int]]) -> Iterator[list[list[int]]]:
    portion, tokens = [], 0
    for ids in encoded:
        portion.append(ids)
        tokens += len(ids)
        if tokens >= PORTION:
            yield portion
            portion, tokens = [], 0
    if portion:
        yield portion


class WrittenStates(NamedTuple):
    """What `write` has written."""

    shape: tuple[int, int]
    texts: int
    cut: int  # texts of more tokens than the model has positions


def write(
    path: epath.PathLike,
    model: nn.Module,
    params: dict,
    tokenizer: Tokenizer,
    texts: Callable[[], Iterable[str]],
    layers: str,
) -> WrittenStates:
    """Writes what `extract` yields, as it comes, to an .npz file.

    It holds `hidden` `[tokens of all texts, width]` and `offsets` `[texts + 1]` int64: text i has the rows from
    `offsets[i]` to `offsets[i + 1]`.

    Args:
      texts: returns them, one or more; is called twice, because the file begins with the number of rows.

    Raises `UserError` if they differ the second time, or if the file cannot be written.
    """
    longest, around = model.config.max_position_embeddings, len(tokenizer.framed(()))
    counts = np.fromiter((len(ids) + around for ids in _encode(tokenizer, texts())), np.int64)
    offsets = np.concatenate([[0], np.minimum(counts, longest).cumsum()])
    rows, path = int(offsets[-1]), epath.Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    with replacing(path) as partial, partial.open("wb") as file, zipfile.ZipFile(file, "w") as archive:
        found = extract(model, params, tokenizer, texts(), layers)
        first = next(found)
        shape, written = (rows, first.shape[-1]), 0
        with archive.open("hidden.npy", "w", force_zip64=True) as member:
            header = {"descr": np.lib.format.dtype_to_descr(first.dtype), "fortran_order": False, "shape": shape}
            np.lib.format.write_array_header_1_0(member, header)
            for features in itertools.chain([first], found):
                member.write(np.ascontiguousarray(features).data)
                written += features.size
        if written != rows * shape[1]:
            raise UserError("--input: has changed while it was read")
        with archive.open("offsets.npy", "w") as member:
            np.lib.format.write_array(member, offsets)
    return WrittenStates(shape, len(counts), int((counts > longest).sum()))
