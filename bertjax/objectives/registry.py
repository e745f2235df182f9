"""The registry of objectives: `OBJECTIVE` of each module in this folder, and the objectives that users register."""

from bertjax.common.registry import Registry, own_in
from bertjax.objectives.objective import Objective

# Modules in this folder without an objective.
OTHER_MODULES = ("encoded_batch", "objective", "parsing", "parts", "registry", "validate")
OBJECTIVES: Registry[Objective] = Registry(
    "objective", "objective", own_in(__package__, __file__, "OBJECTIVE", without=OTHER_MODULES), base=Objective
)
register = OBJECTIVES.register
