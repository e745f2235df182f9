"""The device mesh, and how batches and params lie on it."""

import contextlib
import ctypes
import math
import os

import flax.linen as nn
import jax
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

from bertjax.config import UserError
from bertjax.sharding.rules import RULES
from bertjax.sharding.topology import available_cores


def use_cpu_cores(config) -> None:
    """Where there is nothing but a CPU: a device for each core, as far as they can share the batch evenly.

    XLA runs most of a program on one thread a device; this is what occupies the others. Must come before anything
    else asks JAX for its devices, and leaves alone what the user has set.
    """
    if config.mesh.data != -1 or "host_platform_device_count" in os.environ.get("XLA_FLAGS", ""):
        return
    share = config.mesh.fsdp * config.mesh.tensor
    cores = max(1, available_cores() // share)
    rows = config.batch_size // config.microbatches // config.mesh.fsdp
    ways = max(n for n in range(1, cores + 1) if rows % n == 0)
    with contextlib.suppress(RuntimeError):  # devices were asked for before, in a notebook, say
        jax.config.update("jax_num_cpu_devices", ways * share)
    _keep_freed_memory()


def _keep_freed_memory() -> None:
    """Has glibc keep the buffers that XLA frees after every step, for the next one; elsewhere does nothing.

    Otherwise they go back to the kernel, and come again as pages to be zeroed: a fifth of a small model's step.
    """
    with contextlib.suppress(AttributeError, OSError):
        mallopt = ctypes.CDLL(None).mallopt
        for parameter, size in ((-3, 32 << 20), (-1, 1 << 30), (-2, 64 << 20)):  # mmap threshold, trim threshold, pad
            mallopt(parameter, size)


def make_mesh(config, devices=None) -> Mesh:
    """A mesh with axes data, fsdp and tensor. Raises `UserError` where config and devices do not fit together."""
    devices = jax.devices() if devices is None else devices
    sizes = dict(config.mesh)
    given = math.prod(size for size in sizes.values() if size != -1)
    if -1 in sizes.values() and len(devices) % given == 0:
        sizes = {axis: len(devices) // given if size == -1 else size for axis, size in sizes.items()}
    if math.prod(sizes.values()) != len(devices):
        raise UserError(f"config.mesh = {dict(config.mesh)}: does not multiply to the {len(devices)} devices here")

    rows = config.batch_size // config.microbatches
    ways = sizes["data"] * sizes["fsdp"]
    if ways % jax.process_count():
        raise UserError(
            f"config.mesh = {dict(config.mesh)}: batches go {ways} ways (data * fsdp), which {jax.process_count()} "
            f"hosts cannot share evenly; mesh.tensor must stay within a host"
        )
    if rows % ways:
        raise UserError(
            f"config.batch_size = {config.batch_size}: each of the {config.microbatches} microbatches must be a "
            f"multiple of the {ways} devices that share it (mesh.data * mesh.fsdp)"
        )
    for size, fields in (
        (sizes["tensor"], ("num_attention_heads", "intermediate_size")),
        (sizes["fsdp"], ("hidden_size",)),
    ):
        for field in fields:
            if config.model[field] % size:
                raise UserError(
                    f"config.model.{field} = {config.model[field]}: must be a multiple of the {size} devices "
                    f"that config.mesh = {dict(config.mesh)} splits it over"
                )
    # Auto: Linen's logical constraints are hints to the partitioner, which the Explicit default refuses.
    return jax.make_mesh(tuple(sizes.values()), tuple(sizes), (AxisType.Auto,) * len(sizes), devices=devices)


def replicated(mesh: Mesh) -> NamedSharding:
    return NamedSharding(mesh, PartitionSpec())


def batch_sharding(mesh: Mesh) -> NamedSharding:
    return NamedSharding(mesh, nn.logical_to_mesh_axes(("batch",), RULES))


def param_shardings(abstract_params, mesh: Mesh):
    """`NamedSharding`s for a tree of logically partitioned (still boxed) params."""
    return nn.logical_to_mesh_sharding(nn.get_partition_spec(abstract_params), mesh, RULES)


def put_batch(batch: dict, mesh: Mesh) -> dict:
    """This host's rows of a batch -> global arrays on the mesh. Does not wait for the copy."""
    sharding = batch_sharding(mesh)
    return {name: jax.make_array_from_process_local_data(sharding, rows) for name, rows in batch.items()}
