"""The registry of objectives: each module beside this one that has an `OBJECTIVE`, and those that users register."""

from bertjax.common.registry import Registry, own_in
from bertjax.objectives.objective import Objective

# Modules in this folder that are no objectives.
NO_OBJECTIVES = ("encoded_batch", "objective", "parsing", "parts", "registry", "validate")
OBJECTIVES: Registry[Objective] = Registry(
    "objective", "objective", own_in(__package__, __file__, "OBJECTIVE", without=NO_OBJECTIVES)
)


register = OBJECTIVES.register
