"""Pre-training objectives. A module defines one objective, and a run trains a weighted sum of objectives."""

from bertjax.data.batch import ArraySpec, Axis, BatchSpec
from bertjax.objectives.objective import AuxiliaryObjective, JointModel, Objective, ObjectiveMetrics, Plot, QueryStream
from bertjax.objectives.parsing import learn
from bertjax.objectives.parts.pairs import PairObjective
from bertjax.objectives.parts.words import WordObjective
from bertjax.objectives.registry import register

__all__ = [
    "ArraySpec", "AuxiliaryObjective", "Axis", "BatchSpec", "JointModel", "Objective", "ObjectiveMetrics",
    "PairObjective", "Plot", "QueryStream", "WordObjective", "learn", "register",
]  # fmt: skip
