"""What a row of a batch of pre-training holds, and how many rows hold the packed sequences of a step."""

import math
from collections.abc import Mapping, Sequence

import jax
import numpy as np
from jax.sharding import Mesh

from bertjax.config.stages import config_in, stages_of
from bertjax.data.loading.order import count_groups
from bertjax.data.loading.packing import RowSize, whole
from bertjax.distributed.mesh import batch_sharding
from bertjax.objectives.objective import Term
from bertjax.objectives.parsing import parse_objective

SEQUENCES_PER_ROW = 8  # most sequences in a row; see experiments/benchmarks/RESULTS.md


def most_predictions(config, stage) -> int:
    """Returns how many words of a sequence are predicted, at most; 0: batches have none."""
    for term in parse_objective(config):
        if term.objective.words_per_sequence:
            return term.objective.words_per_sequence(config, stage)
    return stage.max_predictions_per_seq if config.data.masking == "static" else 0  # in the records in any case


def row_size(config, stage) -> RowSize:
    """Returns what a row of packed sequences holds."""
    predictions = 0
    for term in parse_objective(config):
        if term.objective.words_per_row:
            predictions = term.objective.words_per_row(config, stage, SEQUENCES_PER_ROW)
        elif term.objective.words_per_sequence:
            predictions = SEQUENCES_PER_ROW * term.objective.words_per_sequence(config, stage)
    return RowSize(stage.length, SEQUENCES_PER_ROW, predictions)


def row_multiple(config, mesh: Mesh) -> int:
    """Returns what the number of packed rows is a multiple of: each device has as many of each microbatch."""
    return mesh.shape["data"] * mesh.shape["fsdp"] * config.microbatches


def packed_rows(config, mesh: Mesh, real_tokens_share: Sequence[float]) -> list[int]:
    """Estimates the rows of a step of each of `stages_of(config)` from the share of real tokens in the sequences of
    each stage of the config, as `Order.rows`."""
    if len(real_tokens_share) != len(config.stages):
        raise ValueError("packing needs the share of real tokens of each stage")
    stages = stages_of(config)
    shares = dict(zip(dict.fromkeys(stage.name for stage in stages), real_tokens_share))
    found = []
    for stage in stages:
        groups = count_groups(stage.batch_size)
        multiple = math.lcm(groups, row_multiple(config_in(config, stage), mesh))
        found.append(whole(math.ceil(shares[stage.name] * stage.batch_size / groups) * groups, multiple))
    return found


def kinds_of_additions(terms: Sequence[Term]) -> dict[str, str]:
    """Returns whether what objectives add to batches, besides words, is per "token" or "sequence"."""
    return {name: kind for term in terms for name, (kind, _) in term.objective.adds.items()}


def kinds_of_arrays(config, terms: Sequence[Term], predictions: int) -> dict[str, str]:
    """Returns the kinds of all arrays of a training batch: as `kinds_of_additions`, and per "word" if there are
    `predictions`, or per "row"."""
    kinds = dict.fromkeys(("input_ids", "segments", "token_types"), "token")
    kinds |= dict.fromkeys(("pair_labels", "sequence_weights"), "sequence")
    if any(term.objective.is_auxiliary for term in terms):
        kinds["progress"] = "row"
    if config.data.stream:
        kinds["goes_on"] = "sequence"
    if predictions:
        kinds |= dict.fromkeys(("word_positions", "word_ids", "word_weights"), "word")
    return kinds | kinds_of_additions(terms)


def abstract_arrays(terms: Sequence[Term], mesh: Mesh, rows: int, shapes: Mapping[str, tuple]) -> dict:
    """Returns the shapes, types and shardings of the arrays of a batch, whose rows have these `shapes`."""
    types = {name: np.float32 if name.endswith("weights") else np.int32 for name in shapes}
    types |= {"progress": np.float32}
    types |= {name: dtype for term in terms for name, (_, dtype) in term.objective.adds.items()}
    sharding = batch_sharding(mesh)
    return {
        name: jax.ShapeDtypeStruct((rows, *shape), types[name], sharding=sharding) for name, shape in shapes.items()
    }
