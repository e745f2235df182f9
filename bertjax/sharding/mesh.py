"""The device mesh, and how batches and params lie on it."""

import contextlib
import ctypes
import math
import os

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import mesh_utils
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

from bertjax.config import UserError, bert_config
from bertjax.sharding.rules import RULES
from bertjax.sharding.topology import available_cores

Batch = dict[str, np.ndarray]  # `[rows, ...]` of each input and label


def use_cpu_cores(config, batch_size: int) -> None:
    """Where there is nothing but a CPU: a device for each core, as far as they can share a batch evenly.

    XLA runs most of a program on one thread a device; this is what occupies the others. Must come before anything
    else asks JAX for its devices, and leaves alone what the user has set.
    """
    if config.mesh.data != -1 or "host_platform_device_count" in os.environ.get("XLA_FLAGS", ""):
        return
    share = config.mesh.fsdp * config.mesh.tensor
    cores = max(1, available_cores() // share)
    rows = batch_size // config.microbatches // config.mesh.fsdp
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
    if (words := bert_config(config).padded_vocab_size) % sizes["tensor"]:
        raise UserError(
            f"config.mesh.tensor = {sizes['tensor']}: must divide the {words} rows of the word embeddings "
            f"(model.vocab_size, rounded up to a multiple of 128)"
        )
    # Auto: Linen's logical constraints are hints to the partitioner, which the Explicit default refuses.
    return Mesh(_arrange(tuple(sizes.values()), devices), tuple(sizes), axis_types=(AxisType.Auto,) * len(sizes))


def _arrange(shape: tuple[int, int, int], devices) -> np.ndarray:
    """Devices in the shape of the mesh, neighbours in it being neighbours in the network.

    Several slices lie side by side along `data`: only the gradients' sum, once a step, has to cross between them.
    """
    # Of TPUs only: the slices of GPUs are hosts, between which fsdp may reach.
    slices = len({getattr(device, "slice_index", 0) if device.platform == "tpu" else 0 for device in devices})
    if slices == 1:
        return mesh_utils.create_device_mesh(shape, devices, allow_split_physical_axes=True)
    if shape[0] % slices:
        raise UserError(
            f"config.mesh.data = {shape[0]}: must be a multiple of the {slices} slices, which only data may connect"
        )
    return mesh_utils.create_hybrid_device_mesh(
        (shape[0] // slices, *shape[1:]), (slices, 1, 1), devices, allow_split_physical_axes=True
    )


def compute_dtype(config, mesh: Mesh) -> jnp.dtype:
    """Of activations: `config.dtype`; "auto" is bfloat16 where the hardware has it."""
    if config.dtype == "auto":
        return jnp.dtype(jnp.float32 if mesh.devices.flat[0].platform == "cpu" else jnp.bfloat16)
    return jnp.dtype(config.dtype)


def replicated(mesh: Mesh) -> NamedSharding:
    return NamedSharding(mesh, PartitionSpec())


def batch_sharding(mesh: Mesh) -> NamedSharding:
    return NamedSharding(mesh, nn.logical_to_mesh_axes(("batch",), RULES))


def param_shardings(abstract_params, mesh: Mesh):
    """`NamedSharding`s for a tree of logically partitioned (still boxed) params."""
    return nn.logical_to_mesh_sharding(nn.get_partition_spec(abstract_params), mesh, RULES)


def split_over_data(sharding: NamedSharding, axes: tuple[str | None, ...], shape: tuple[int, ...]) -> NamedSharding:
    """Divides a param with these logical axes among the devices along `data` as well, where one of its sizes allows.

    In the first dimension that nothing splits yet, so that the parts are contiguous; in `layers` only if in no other.
    """
    ways, part = sharding.mesh.shape["data"], sharding.shard_shape(shape)
    free = [i for i, size in enumerate(shape) if part[i] == size and size % ways == 0]
    if not free:
        return sharding
    spec = [*sharding.spec] + [None] * (len(shape) - len(sharding.spec))
    spec[min(free, key=lambda i: axes[i] == "layers")] = "data"
    return NamedSharding(sharding.mesh, PartitionSpec(*spec))


def local_copy(arrays, mesh: Mesh):
    """Arrays that are spread over the mesh -> whole ones on a device of this host; all hosts have to take part."""
    whole = jax.jit(lambda x: x, out_shardings=replicated(mesh))(arrays)
    return jax.tree.map(lambda x: x.addressable_data(0), whole)


def local_rows(mesh: Mesh, batch_size: int) -> np.ndarray:
    """The rows of a batch that this host's devices work on, rising: those that it has to read."""
    indices = batch_sharding(mesh).addressable_devices_indices_map((batch_size,)).values()
    return np.unique(np.concatenate([np.arange(batch_size)[index] for index in indices]))


def put_batch(batch: dict, mesh: Mesh, batch_size: int) -> dict:
    """This host's `local_rows` of a batch -> global arrays on the mesh. Does not wait for the copy."""
    sharding, own = batch_sharding(mesh), local_rows(mesh, batch_size)

    def put(rows):
        def part(index):
            first, last, _ = index[0].indices(batch_size)
            return rows[np.searchsorted(own, first) : np.searchsorted(own, last)]

        return jax.make_array_from_callback((batch_size, *rows.shape[1:]), sharding, part)

    return {name: put(rows) for name, rows in batch.items()}
