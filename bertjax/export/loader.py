"""Runs the programs of this folder; needs jax, numpy and flatbuffers.

    run = load(FOLDER)
    outputs = run(input_ids, segments, token_types)

All arguments are int32 [batch, length]. The ids include [CLS] and [SEP]. The segments are 1 for tokens and 0 for
padding; by default, 0 for [PAD] only. The token types are 1 in the second text of a pair; by default, all are 0.
about.json describes the outputs.
"""

import json
import pathlib
from collections.abc import Callable

import jax
import numpy as np
from jax import export
from numpy.typing import ArrayLike


def load(folder: str | pathlib.Path = pathlib.Path(__file__).parent) -> Callable[..., np.ndarray]:
    """Returns the function `run`, which pads the arguments to the length of the next program."""
    folder = pathlib.Path(folder)
    about = json.loads((folder / "about.json").read_text())
    params = {name: jax.device_put(value) for name, value in np.load(folder / "params.npz").items()}
    programs: dict[int, Callable[..., jax.Array]] = {}

    def run(
        input_ids: ArrayLike, segments: ArrayLike | None = None, token_types: ArrayLike | None = None
    ) -> np.ndarray:
        ids = np.asarray(input_ids, np.int32)
        segments = (ids != about["pad_id"]) if segments is None else segments
        token_types = np.zeros_like(ids) if token_types is None else token_types
        tokens = ids.shape[1]
        if tokens > about["lengths"][-1]:
            raise ValueError(f"a row has {tokens} tokens, expected at most {about['lengths'][-1]}; truncate the row")
        length = next(length for length in about["lengths"] if length >= tokens)
        if length not in programs:
            content = (folder / f"length{length}.stablehlo").read_bytes()
            programs[length] = jax.jit(export.deserialize(bytearray(content)).call)
        missing = [(0, 0), (0, length - tokens)]
        padded = [np.pad(np.asarray(x, np.int32), missing) for x in (segments, token_types)]
        outputs = programs[length](params, np.pad(ids, missing, constant_values=about["pad_id"]), *padded)
        return np.asarray(outputs)[:, :tokens] if about["by_token"] else np.asarray(outputs)

    return run
