"""What the objectives of a config add to its batches, such as masks, drawn with keys of their own."""

import functools
import zlib
from collections.abc import Callable

import numpy as np

from bertjax.config.stages import Stage, config_in
from bertjax.data.loading.transforms import Addition
from bertjax.distributed.mesh import Batch
from bertjax.objectives.objective import Objective
from bertjax.objectives.parsing import parse_objective
from bertjax.text.tokenizer import Tokenizer


def additions_of(config, stage: Stage, tokenizer: Tokenizer | None) -> list[Addition]:
    """Returns what objectives add to the batches of a stage."""
    found, config = [], config_in(config, stage)
    for name, _, objective in parse_objective(config):
        if (addition := objective.addition(config, stage, tokenizer)) is not None:
            # Those of words have the random numbers without a seed, as when there were no others.
            seed = () if objective.words_per_sequence else (zlib.crc32(name.encode()),)
            declared = functools.partial(_declared, name, objective, addition.add)
            found.append(addition._replace(seed=seed, add=declared))
    return found


def _declared(name: str, objective: Objective, add: Callable, batch: Batch, drawn: Batch) -> Batch:
    """Returns what an objective adds. Raises `ValueError` for arrays that it does not declare, or of other types."""
    types = {each: np.dtype(dtype) for each, (_, dtype) in objective.adds.items()} | {"input_ids": np.dtype(np.int32)}
    if objective.words_per_sequence:
        types |= {f"word_{each}": np.dtype(np.int32) for each in ("positions", "ids")}
        types |= {"word_weights": np.dtype(np.float32)}
    found = add(batch, drawn)
    if wrong := {each: x.dtype for each, x in found.items() if types.get(each) != x.dtype}:
        raise ValueError(f"objective {name}: adds {wrong} to batches; its `adds` must say so")
    return found
