"""The registry of objectives: each module beside this one that has an `OBJECTIVE`, and the objectives of users."""

from bertjax.common.registry import Registry, own_in
from bertjax.objectives.objective import Objective

# Modules in this folder without an objective.
OTHER_MODULES = ("encoded_batch", "objective", "parsing", "parts", "registry", "validate")
OBJECTIVES: Registry[Objective] = Registry(
    "objective", "objective", own_in(__package__, __file__, "OBJECTIVE", without=OTHER_MODULES), base=Objective
)
register = OBJECTIVES.register
