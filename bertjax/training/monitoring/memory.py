"""What saves memory, for a config whose steps do not fit in that of the devices."""

import contextlib
import copy
import math
from collections.abc import Iterator

import jax
from jax.sharding import Mesh

from bertjax.common.errors import UserError
from bertjax.config.limits import REMAT_POLICIES
from bertjax.config.stages import config_in, stages_of
from bertjax.distributed.gpus import GIB
from bertjax.distributed.topology import host_memory
from bertjax.training.planning import Planning
from bertjax.training.step import Program, abstract_hyperparameters, fits_in_memory, make_program
from bertjax.training.task import Task


def settings_that_save(config) -> Iterator[dict]:
    """Yields settings that save memory, the one that costs least time first; with remat "auto", all policies have been
    tried."""
    rolled = {"unroll": "no"} if config.unroll == "yes" else {}  # layers that are recomputed must not be unrolled
    if rolled:
        yield rolled
    weaker = REMAT_POLICIES if config.remat == "auto" else (config.remat,)
    stronger = REMAT_POLICIES[REMAT_POLICIES.index(weaker[-1]) + 1 :]
    yield from ({"remat": remat, **rolled} for remat in stronger)
    microbatches = config.microbatches
    while config.batch_size % (2 * microbatches) == 0 and microbatches < 64:
        microbatches *= 2
        yield {"remat": "full", "microbatches": microbatches, **rolled}


def as_flags(settings: dict) -> str:
    return " ".join(f"--config.{name}={value}" for name, value in settings.items())


def memory_of(mesh: Mesh) -> int | None:
    """Returns the bytes that JAX may use of a device of the mesh; None if devices do not say. A host asks one of its
    own: others do not answer."""
    return (mesh.local_devices[0].memory_stats() or {}).get("bytes_limit")


def memory_of_device(device) -> float:
    """Returns the bytes that a run may use of a device of this host: of the host's memory if it is its processor."""
    if device.platform == "cpu":
        return host_memory() / jax.local_device_count()
    return (device.memory_stats() or {}).get("bytes_limit") or float("inf")


def least_bytes(config, program: Program) -> float:
    """Returns a lower bound of the bytes that a step takes on a device, without compiling it.

    It counts the state of training, and what the backward pass reads of each layer: of layers that are recomputed only
    their inputs.
    """

    def size(arrays) -> int:
        return sum(math.prod(x.sharding.shard_shape(x.shape)) * x.dtype.itemsize for x in jax.tree.leaves(arrays))

    model, mesh = config.model, program.state.step.sharding.mesh
    hidden, layers = model.get("hidden_size", 0), model.get("num_hidden_layers", 0)
    width = hidden if config.remat in ("full", "auto") else 4 * hidden + model.get("intermediate_size", 4 * hidden)
    itemsize = 4 if mesh.devices.flat[0].platform == "cpu" else 2
    activations = _least_tokens(config) * layers * width * itemsize / (mesh.shape["data"] * mesh.shape["fsdp"])
    return size(program.state) + activations


def _least_tokens(config) -> float:
    """Returns the tokens of a microbatch: without padding half of them, and in fine-tuning 16 of each sequence."""
    if "stages" not in config:
        return 16 * config.batch_size / config.microbatches
    filled = 0.5 if config.packing else 1.0
    return max(filled * stage.tokens_per_step / config_in(config, stage).microbatches for stage in stages_of(config))


def require_room(config, program: Program) -> None:
    """Raises `UserError` if a step certainly needs more memory than a device has: a CPU's system would kill the run.

    Names the first setting that saves memory and with which the lower bound fits.
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


def require_memory(error: Exception, config, task: Task, mesh: Mesh, planning: Planning) -> None:
    """Raises `UserError` if `error` says that a device's memory is exhausted, with a setting with which steps fit.

    Compiles the steps with one setting after the other, as the planner does; where only the data describes the task, or
    devices do not say how much memory they have, it names the first setting to try.
    """
    if "RESOURCE_EXHAUSTED" not in str(error):
        return
    config, chosen = copy.deepcopy(config), task.at(0)[1]
    config.remat, config.unroll = chosen.remat, chosen.unroll  # what the run made of "auto"
    ways, limit = mesh.shape["data"] * mesh.shape["fsdp"], memory_of(mesh)
    possible = [
        settings
        for settings in settings_that_save(config)
        if config.batch_size // settings.get("microbatches", 1) % ways == 0
    ]
    remedy = f"try {as_flags(possible[0])}" if possible else ""
    if limit is not None and jax.process_count() == 1 and not config.packing:
        with contextlib.suppress(UserError):  # only its data describes the task
            fitting = next((each for each in possible if _fits(config, each, mesh, limit, planning)), None)
            remedy = f"it fits with {as_flags(fitting)}" if fitting else ""
    kind = mesh.devices.flat[0].device_kind
    has = f" ({kind}, {limit / GIB:.1f} GiB for JAX)" if limit else f" ({kind})"
    remedy = remedy or "choose a smaller batch_size, or more devices (config.mesh.fsdp)"
    raise UserError(f"a step of {config.batch_size} rows runs out of memory{has}: {remedy}") from error


def _fits(config, settings: dict, mesh: Mesh, limit: int, planning: Planning) -> bool:
    print(f"a step runs out of memory; compiling it with {as_flags(settings)}", flush=True)
    config = copy.deepcopy(config)
    config.update(settings)
    task, stages = planning.open(config, mesh, ())
    program, hyperparameters = make_program(task, config, mesh), abstract_hyperparameters(config, mesh)
    steps = (program.step_of(*task.at(each.stage.first_step)) for each in stages)
    lowered = (step.lower(program.state, each.batch, hyperparameters) for step, each in zip(steps, stages))
    return all(fits_in_memory(each, limit) for each in lowered)
