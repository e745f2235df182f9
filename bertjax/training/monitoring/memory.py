"""Checks that a step fits in the memory of a device, and finds settings that save memory."""

import contextlib
import copy
import math
from collections.abc import Iterator, Mapping
from typing import Any

import jax
from jax.sharding import Mesh, NamedSharding
from ml_collections import ConfigDict

from bertjax.common.errors import UserError
from bertjax.config.limits import REMAT_POLICIES
from bertjax.config.stages import config_in, stages_of
from bertjax.distributed.gpus import GIB
from bertjax.distributed.topology import host_memory
from bertjax.training.planning import Planning
from bertjax.training.state import TrainState
from bertjax.training.step import Program, abstract_hyperparameters, fits_in_memory
from bertjax.training.task import Task


def memory_saving_settings(config: ConfigDict) -> Iterator[dict[str, Any]]:
    """Yields settings that reduce the memory of a step, {config field: value}, the fastest setting first.

    With `config.remat = "auto"`, the run has already tried all policies, so that only more microbatches remain.
    """
    not_unrolled = {"unroll": "no"} if config.unroll == "yes" else {}  # Recomputed layers must not be unrolled.
    if not_unrolled:
        yield not_unrolled
    tried = REMAT_POLICIES if config.remat == "auto" else (config.remat,)
    untried = REMAT_POLICIES[REMAT_POLICIES.index(tried[-1]) + 1 :]  # policies that recompute more
    yield from ({"remat": remat, **not_unrolled} for remat in untried)
    microbatches = config.microbatches
    while config.batch_size % (2 * microbatches) == 0 and microbatches < 64:
        microbatches *= 2
        yield {"remat": "full", "microbatches": microbatches, **not_unrolled}


def as_flags(settings: Mapping[str, Any]) -> str:
    """Formats settings as command line flags, such as "--config.remat=full --config.microbatches=2"."""
    return " ".join(f"--config.{name}={value}" for name, value in settings.items())


def memory_limit(mesh: Mesh) -> int | None:
    """Returns the bytes that JAX may use on a local device of the mesh; None if the devices do not report the limit."""
    return (mesh.local_devices[0].memory_stats() or {}).get("bytes_limit")


def usable_memory(device: jax.Device) -> float:
    """Returns the bytes that a run may use on a local device; infinity if the device does not report the limit.

    CPU devices share the memory of the host equally.
    """
    if device.platform == "cpu":
        return host_memory() / jax.local_device_count()
    return (device.memory_stats() or {}).get("bytes_limit") or float("inf")


def min_step_bytes(config: ConfigDict, program: Program) -> float:
    """Returns a lower bound of the bytes that a step needs per device, without compiling the step.

    The bound counts the training state and the activations of each layer that the backward pass reads. With
    rematerialization, these are only the inputs of the layers.
    """

    def size(arrays: TrainState) -> int:
        return sum(math.prod(x.sharding.shard_shape(x.shape)) * x.dtype.itemsize for x in jax.tree.leaves(arrays))

    sharding = program.state.step.sharding
    assert isinstance(sharding, NamedSharding)
    model, mesh = config.model, sharding.mesh
    hidden, layers = model.get("hidden_size", 0), model.get("num_hidden_layers", 0)
    width = hidden if config.remat in ("full", "auto") else 4 * hidden + model.get("intermediate_size", 4 * hidden)
    itemsize = 4 if mesh.devices.flat[0].platform == "cpu" else 2
    activations = _min_tokens(config) * layers * width * itemsize / (mesh.shape["data"] * mesh.shape["fsdp"])
    return size(program.state) + activations


def _min_tokens(config: ConfigDict) -> float:
    """Returns a lower bound of the number of tokens in a global microbatch.

    Packing removes at most half of the tokens. In fine-tuning, a sequence has at least 16 tokens.
    """
    if "stages" not in config:
        return 16 * config.batch_size / config.microbatches
    least_filled = 0.5 if config.packing else 1.0
    return max(
        least_filled * stage.tokens_per_step / config_in(config, stage).microbatches for stage in stages_of(config)
    )


def check_memory_bound(config: ConfigDict, program: Program) -> None:
    """Raises `UserError` before compilation if `min_step_bytes` exceeds the memory of a device.

    Without this check, the operating system kills the process on a CPU. The error suggests the first setting for which
    `min_step_bytes` fits.
    """
    device = jax.local_devices()[0]
    needed, available = min_step_bytes(config, program), usable_memory(device)
    if needed <= available:
        return
    remedy = "choose a smaller model or batch_size, or more devices (config.mesh.fsdp)"
    for settings in memory_saving_settings(config):
        changed = copy.deepcopy(config)
        changed.update(settings)
        if min_step_bytes(changed, program) <= available:
            remedy = f"set {as_flags(settings)}, or choose a smaller batch_size"
            break
    name = "this machine" if device.platform == "cpu" else device.device_kind
    raise UserError(
        f"config.batch_size = {config.batch_size}: a step needs at least {needed / GIB:.1f} GiB, and {name} has "
        f"{available / GIB:.1f} GiB; {remedy}"
    )


def raise_if_out_of_memory(error: Exception, config: ConfigDict, task: Task, mesh: Mesh, planning: Planning) -> None:
    """Raises `UserError` if `error` reports that a device ran out of memory. The message suggests a setting.

    Compiles the training step with one setting after another until the step fits. If the planner cannot describe the
    task without data, or if the devices do not report their memory, the message suggests the first setting without a
    test.

    Args:
      error: an error of JAX; ignored unless it is RESOURCE_EXHAUSTED.
      config: the config of the run.
      task: the task of the run.
      mesh: the devices.
      planning: makes the task without data, so that this function can compile the step.
    """
    if "RESOURCE_EXHAUSTED" not in str(error):
        return
    config, step_config = copy.deepcopy(config), task.loss_and_config(0)[1]
    config.remat, config.unroll = step_config.remat, step_config.unroll  # values that replaced "auto"
    batch_shards, limit = mesh.shape["data"] * mesh.shape["fsdp"], memory_limit(mesh)
    possible = [
        settings
        for settings in memory_saving_settings(config)
        if config.batch_size // settings.get("microbatches", 1) % batch_shards == 0
    ]
    remedy = f"try {as_flags(possible[0])}" if possible else ""
    if limit is not None and jax.process_count() == 1 and not config.packing:
        with contextlib.suppress(UserError):  # The planner cannot describe the task.
            all_fitting = (settings for settings in possible if _fits(config, settings, mesh, limit, planning))
            fitting = next(all_fitting, None)
            remedy = f"it fits with {as_flags(fitting)}" if fitting else ""
    kind = mesh.devices.flat[0].device_kind
    available = f" ({kind}, {limit / GIB:.1f} GiB for JAX)" if limit else f" ({kind})"
    remedy = remedy or "choose a smaller batch_size, or more devices (config.mesh.fsdp)"
    raise UserError(f"a step of {config.batch_size} rows runs out of memory{available}: {remedy}") from error


def _fits(config: ConfigDict, settings: Mapping[str, Any], mesh: Mesh, limit: int, planning: Planning) -> bool:
    """Compiles the steps of all stages with some settings, and returns whether they need at most `limit` bytes."""
    print(f"a step runs out of memory; compiling it with {as_flags(settings)}", flush=True)
    config = copy.deepcopy(config)
    config.update(settings)
    task, stages = planning.open(config, mesh, ())
    program, hyperparameters = Program(task, config, mesh), abstract_hyperparameters(config, mesh)
    for stage in stages:
        train_step: Any = program.step_of(*task.loss_and_config(stage.stage.first_step))
        if not fits_in_memory(train_step.lower(program.state, stage.batch, hyperparameters), limit):
            return False
    return True
