"""What saves memory, for a config whose steps do not fit in that of the devices."""

from collections.abc import Iterator

from jax.sharding import Mesh

from bertjax.config import UserError
from bertjax.sharding.gpus import GIB
from bertjax.validation import REMAT_POLICIES


def settings_that_save(config) -> Iterator[dict]:
    """Yields settings that save memory, the one that costs least time first; with remat "auto", all policies have been
    tried."""
    rolled = {"unroll": "no"} if config.unroll == "yes" else {}  # as layers must be that are recomputed
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


def require_memory(error: Exception, config, mesh: Mesh) -> None:
    """Raises `UserError`, which names the next setting to try, if `error` says that a device's memory is exhausted.

    `config` says how the step computes, without "auto" where a run has chosen.
    """
    if "RESOURCE_EXHAUSTED" not in str(error):
        return
    kind, ways, limit = mesh.devices.flat[0].device_kind, mesh.shape["data"] * mesh.shape["fsdp"], memory_of(mesh)
    has = f" ({kind}, {limit / GIB:.1f} GiB for JAX)" if limit else f" ({kind})"
    possible = (
        settings
        for settings in settings_that_save(config)
        if config.batch_size // settings.get("microbatches", 1) % ways == 0
    )
    settings = next(possible, None)
    remedy = (
        f"try {as_flags(settings)}" if settings else "choose a smaller batch_size, or more devices (config.mesh.fsdp)"
    )
    raise UserError(f"a step of {config.batch_size} rows runs out of memory{has}: {remedy}") from error
