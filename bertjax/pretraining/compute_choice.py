"""Chooses `remat` and `unroll` if the config sets them to "auto"."""

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
from bertjax.training.monitoring.memory import memory_limit
from bertjax.training.step import Program, abstract_hyperparameters, fits_in_memory

# {platform: minimum number of steps for which unrolled layers save more time than their compilation takes}. On a v5e,
# unrolling makes a step of BERT-base 12 ms faster, and the compilation 100 s slower for each stage. On an H200, a step
# is 7 ms (BERT-base) or 17 ms (BERT-large) faster, and the compilation is less than 40 s slower.
MIN_STEPS_TO_UNROLL = {"tpu": 20_000, "gpu": 5_000}


def compute_candidates(config: ConfigDict, platform: str, chip: str) -> Iterator[ConfigDict]:
    """Yields configs whose `remat` and `unroll` have values in place of "auto", from the fastest to the slowest.

    Args:
      config: the whole config.
      platform: "tpu", "gpu" or "cpu".
      chip: `jax.Device.device_kind`.
    """
    policies = REMAT_POLICIES if config.remat == "auto" else (config.remat,)
    # On TPUs without kernels, storing the activations ("none") takes longer than recomputing them ("full"), by the
    # estimate of bertjax.compile.
    if config.remat == "auto" and platform == "tpu" and not has_kernels(chip):
        policies = ("full",)
    choices = [(remat, config.unroll) for remat in policies]
    is_long = total_steps(config) >= MIN_STEPS_TO_UNROLL.get(platform, math.inf)
    # Without an attention kernel, each unrolled layer adds a minute of compilation on TPUs, and steps are not faster.
    family_has_kernels = families.FAMILIES.get(config.model.family).has_kernels
    uses_kernels = family_has_kernels and config.kernels == "auto" and (has_kernels(chip) or triton.is_supported(chip))
    if config.unroll == "auto" and policies[0] == "none" and uses_kernels and is_long:
        choices.insert(0, ("none", "yes"))
    for remat, unroll in choices:
        candidate = copy.deepcopy(config)
        candidate.remat, candidate.unroll = remat, unroll
        yield candidate


def fastest_that_fits(config: ConfigDict, mesh: Mesh, data: Sequence[StageData], platform: str) -> ConfigDict:
    """Returns the first candidate with which the largest stage fits in device memory, or else the last candidate."""
    *candidates, last = compute_candidates(config, platform, mesh.devices.flat[0].device_kind)
    for candidate in candidates:
        if platform == "cpu":
            return candidate
        if jax.process_index() == 0:  # compilation can take minutes
            print(f"compiling with remat={candidate.remat} unroll={candidate.unroll}", flush=True)
        task = Pretraining(candidate, mesh, data)
        program, index = Program(task, candidate, mesh), task.largest_stage_index()
        batch, train_step = data[index].abstract_batch(), program.step_of(*task.loss_and_config_of_stage(index))
        lowered = train_step.lower(program.state, batch, abstract_hyperparameters(candidate, mesh))
        # The first host decides for all hosts, because all hosts must run the same program.
        if hosts.as_on_first(fits_in_memory(lowered, memory_limit(mesh))):
            return candidate
    return last
