"""What saves memory, for a config whose steps do not fit in that of the devices."""

from collections.abc import Iterator

from jax.sharding import Mesh

from bertjax.config import UserError
from bertjax.sharding.gpus import GIB
from bertjax.validation import REMAT_POLICIES


def settings_that_save(config) -> Iterator[dict]:
    """Yields settings that save memory, the one that costs least time first."""
    if config.unroll == "yes":
        yield {"unroll": "no"}
    weaker = REMAT_POLICIES if config.remat == "auto" else (config.remat,)  # policies that have been tried
    stronger = REMAT_POLICIES[REMAT_POLICIES.index(weaker[-1]) + 1 :]
    yield from ({"remat": remat} for remat in stronger)
    microbatches = config.microbatches
    while config.batch_size % (2 * microbatches) == 0 and microbatches < 64:
        microbatches *= 2
        yield {"remat": "full", "microbatches": microbatches}


def as_flags(settings: dict) -> str:
    return " ".join(f"--config.{name}={value}" for name, value in settings.items())


def require_memory(error: Exception, config, mesh: Mesh) -> None:
    """Raises `UserError`, which names the next setting to try, if `error` says that a device's memory is exhausted."""
    if "RESOURCE_EXHAUSTED" not in str(error):
        return
    device, ways = mesh.devices.flat[0], mesh.shape["data"] * mesh.shape["fsdp"]
    limit = (device.memory_stats() or {}).get("bytes_limit")
    has = f" ({device.device_kind}, {limit / GIB:.1f} GiB for JAX)" if limit else f" ({device.device_kind})"
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
