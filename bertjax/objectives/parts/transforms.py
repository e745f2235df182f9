"""The batch transforms of the objectives of a stage, such as dynamic masking."""

import zlib

from ml_collections import ConfigDict

from bertjax.config.stages import Stage, config_in
from bertjax.data.loading.transforms import SeededTransform
from bertjax.objectives.parsing import parse_objective
from bertjax.objectives.parts.words import WordObjective
from bertjax.text.tokenizer import Tokenizer


def transforms_of(config: ConfigDict, stage: Stage, tokenizer: Tokenizer | None) -> list[SeededTransform]:
    """Returns the transforms of the objectives of a stage, each with an independent random seed."""
    transforms, config = [], config_in(config, stage)
    for name, _, objective in parse_objective(config):
        if (transform := objective.transform(config, stage, tokenizer)) is not None:
            # An empty seed keeps the random numbers of word objectives equal to the numbers of the first versions.
            seed = () if isinstance(objective, WordObjective) else (zlib.crc32(name.encode()),)
            transforms.append(SeededTransform(transform, seed, objective.batch_spec(config, stage), name))
    return transforms
