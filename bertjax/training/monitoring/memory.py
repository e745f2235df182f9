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
from bertjax.training.step import Program, abstract_hyperparameters, fits_in_memory, make_program
from bertjax.training.task import Task


def settings_that_save(config: ConfigDict) -> Iterator[dict[str, Any]]:
    """Yields settings that save memory, beginning with the setting that costs the least time.

    With remat "auto", the run has tried all policies before, so that only microbatches are left.
    """
    rolled = {"unroll": "no"} if config.unroll == "yes" else {}  # Layers that are recomputed must not be unrolled.
    if rolled:
        yield rolled
    weaker = REMAT_POLICIES if config.remat == "auto" else (config.remat,)
    stronger = REMAT_POLICIES[REMAT_POLICIES.index(weaker[-1]) + 1 :]
    yield from ({"remat": remat, **rolled} for remat in stronger)
    microbatches = config.microbatches
    while config.batch_size % (2 * microbatches) == 0 and microbatches < 64:
        microbatches *= 2
        yield {"remat": "full", "microbatches": microbatches, **rolled}


def as_flags(settings: Mapping[str, Any]) -> str:
    """Formats settings as flags of a command."""
    return " ".join(f"--config.{name}={value}" for name, value in settings.items())


def memory_of(mesh: Mesh) -> int | None:
    """Returns the bytes that JAX may use of a device of the mesh; None if the devices do not report them.

    A host can read only its local devices.
    """
    return (mesh.local_devices[0].memory_stats() or {}).get("bytes_limit")


def memory_of_device(device: jax.Device) -> float:
    """Returns the bytes that a run may use of a local device. A processor has its share of the host's memory."""
    if device.platform == "cpu":
        return host_memory() / jax.local_device_count()
    return (device.memory_stats() or {}).get("bytes_limit") or float("inf")


def least_bytes(config: ConfigDict, program: Program) -> float:
    """Returns a lower bound of the bytes that a step takes on a device, without compiling the step.

    The bound counts the training state and the arrays of each layer that the backward pass reads. If layers are
    recomputed, these arrays are the inputs of the layers.
    """

    def size(arrays: TrainState) -> int:
        return sum(math.prod(x.sharding.shard_shape(x.shape)) * x.dtype.itemsize for x in jax.tree.leaves(arrays))

    sharding = program.state.step.sharding
    assert isinstance(sharding, NamedSharding)
    model, mesh = config.model, sharding.mesh
    hidden, layers = model.get("hidden_size", 0), model.get("num_hidden_layers", 0)
    width = hidden if config.remat in ("full", "auto") else 4 * hidden + model.get("intermediate_size", 4 * hidden)
    itemsize = 4 if mesh.devices.flat[0].platform == "cpu" else 2
    activations = _least_tokens(config) * layers * width * itemsize / (mesh.shape["data"] * mesh.shape["fsdp"])
    return size(program.state) + activations


def _least_tokens(config: ConfigDict) -> float:
    """Returns a lower bound of the tokens of a microbatch.

    Packing removes at most half of the tokens. In fine-tuning, a sequence has at least 16 tokens.
    """
    if "stages" not in config:
        return 16 * config.batch_size / config.microbatches
    filled = 0.5 if config.packing else 1.0
    return max(filled * stage.tokens_per_step / config_in(config, stage).microbatches for stage in stages_of(config))


def require_room(config: ConfigDict, program: Program) -> None:
    """Raises `UserError` if a step certainly needs more memory than a device has.

    On a CPU, the system would kill the process. The error names the first setting whose lower bound fits.
    """
    device = jax.local_devices()[0]
    needed, has = least_bytes(config, program), memory_of_device(device)
    if needed <= has:
        return
    remedy = "choose a smaller model or batch_size, or more devices (config.mesh.fsdp)"
    for settings in settings_that_save(config):
        changed = copy.deepcopy(config)
        changed.update(settings)
        if least_bytes(changed, program) <= has:
            remedy = f"set {as_flags(settings)}, or choose a smaller batch_size"
            break
    name = "this machine" if device.platform == "cpu" else device.device_kind
    raise UserError(
        f"config.batch_size = {config.batch_size}: a step needs at least {needed / GIB:.1f} GiB, and {name} has "
        f"{has / GIB:.1f} GiB: {remedy}"
    )


def require_memory(error: Exception, config: ConfigDict, task: Task, mesh: Mesh, planning: Planning) -> None:
    """Raises `UserError` if the memory of a device is exhausted. The error names a setting that helps.

    Compiles the steps with one setting after another until they fit. If the planner cannot describe the task without
    its data, or if the devices do not report their memory, the error names the first setting to try.

    Args:
      error: the error of JAX. Other errors than exhausted memory are ignored.
      config: the config of the run.
      task: the task of the run.
      mesh: the devices.
      planning: compiles the steps of a config without data.
    """
    if "RESOURCE_EXHAUSTED" not in str(error):
        return
    config, chosen = copy.deepcopy(config), task.loss_and_config(0)[1]
    config.remat, config.unroll = chosen.remat, chosen.unroll  # the choices of the run for "auto"
    ways, limit = mesh.shape["data"] * mesh.shape["fsdp"], memory_of(mesh)
    possible = [
        settings
        for settings in settings_that_save(config)
        if config.batch_size // settings.get("microbatches", 1) % ways == 0
    ]
    remedy = f"try {as_flags(possible[0])}" if possible else ""
    if limit is not None and jax.process_count() == 1 and not config.packing:
        with contextlib.suppress(UserError):  # The planner cannot describe the task.
            fits = (settings for settings in possible if _fits(config, settings, mesh, limit, planning))
            fitting = next(fits, None)
            remedy = f"it fits with {as_flags(fitting)}" if fitting else ""
    kind = mesh.devices.flat[0].device_kind
    has = f" ({kind}, {limit / GIB:.1f} GiB for JAX)" if limit else f" ({kind})"
    remedy = remedy or "choose a smaller batch_size, or more devices (config.mesh.fsdp)"
    raise UserError(f"a step of {config.batch_size} rows runs out of memory{has}: {remedy}") from error


def _fits(config: ConfigDict, settings: Mapping[str, Any], mesh: Mesh, limit: int, planning: Planning) -> bool:
    """Compiles the steps of all stages with some settings, and returns whether they need at most `limit` bytes."""
    print(f"a step runs out of memory; compiling it with {as_flags(settings)}", flush=True)
    config = copy.deepcopy(config)
    config.update(settings)
    task, stages = planning.open(config, mesh, ())
    program, hyperparameters = make_program(task, config, mesh), abstract_hyperparameters(config, mesh)
    for stage in stages:
        train_step: Any = program.step_of(*task.loss_and_config(stage.stage.first_step))
        if not fits_in_memory(train_step.lower(program.state, stage.batch, hyperparameters), limit):
            return False
    return True
