"""The choice of `remat` and `unroll` if the config leaves them at "auto"."""

import copy
import math
from collections.abc import Iterator, Sequence

import jax
from jax.sharding import Mesh
from ml_collections import ConfigDict

from bertjax.config.limits import REMAT_POLICIES
from bertjax.config.stages import total_steps
from bertjax.distributed import hosts
from bertjax.models import families
from bertjax.nn.kernels import triton
from bertjax.nn.kernels.pallas import has_kernels
from bertjax.pretraining.data import StageData
from bertjax.pretraining.task import Pretraining
from bertjax.training.monitoring.memory import memory_of
from bertjax.training.step import abstract_hyperparameters, fits_in_memory, make_program

# The number of steps from which unrolled layers save more time than their compilation takes. BERT-base on a v5e gains
# 12 ms a step, and compiles 100 s longer for each stage. On an H200, BERT-base gains 7 ms and BERT-large 17 ms, and the
# compilation takes less than 40 s.
UNROLLED_STEPS = {"tpu": 20_000, "gpu": 5_000}


def compute_candidates(config: ConfigDict, platform: str, chip: str) -> Iterator[ConfigDict]:
    """Yields configs with values in place of "auto" for `remat` and `unroll`, the fastest first.

    Args:
      config: the whole config.
      platform: "tpu", "gpu" or "cpu".
      chip: the kind of the device, as `jax.Device.device_kind`.
    """
    policies = REMAT_POLICIES if config.remat == "auto" else (config.remat,)
    # On TPUs without kernels, writing and reading the values that "none" stores takes longer than computing them again,
    # by the estimate of bertjax.compile.
    if config.remat == "auto" and platform == "tpu" and not has_kernels(chip):
        policies = ("full",)
    ways = [(remat, config.unroll) for remat in policies]
    is_long = total_steps(config) >= UNROLLED_STEPS.get(platform, math.inf)
    # Without a kernel for attention, each unrolled layer compiles a minute longer on TPUs, for no faster step.
    family_has_kernels = families.FAMILIES.get(config.model.family).has_kernels
    can_use = family_has_kernels and config.kernels == "auto" and (has_kernels(chip) or triton.is_supported(chip))
    if config.unroll == "auto" and policies[0] == "none" and can_use and is_long:
        ways.insert(0, ("none", "yes"))
    for remat, unroll in ways:
        candidate = copy.deepcopy(config)
        candidate.remat, candidate.unroll = remat, unroll
        yield candidate


def fastest_that_fits(config: ConfigDict, mesh: Mesh, data: Sequence[StageData], platform: str) -> ConfigDict:
    """Returns the first of `compute_candidates` with which the largest stage fits in memory; if none fits, the last."""
    *ways, last = compute_candidates(config, platform, mesh.devices.flat[0].device_kind)
    for way in ways:
        if platform == "cpu":
            return way
        if jax.process_index() == 0:  # compilation can take minutes
            print(f"compiling with remat={way.remat} unroll={way.unroll}", flush=True)
        task = Pretraining(way, mesh, data)
        program, index = make_program(task, way, mesh), task.largest_stage_index()
        batch, train_step = data[index].abstract_batch(), program.step_of(*task.loss_and_config_of_stage(index))
        lowered = train_step.lower(program.state, batch, abstract_hyperparameters(way, mesh))
        # One host decides, because hosts with other decisions would run other programs.
        if hosts.as_on_first(fits_in_memory(lowered, memory_of(mesh))):
            return way
    return last
