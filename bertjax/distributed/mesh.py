"""Builds the device mesh, and places batches and params on it."""

import contextlib
import ctypes
import dataclasses
import math
import os
from collections.abc import Callable, Mapping, Sequence
from typing import Any, cast

import flax.linen as nn
import jax
import ml_collections
import numpy as np
from jax.experimental import mesh_utils
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

from bertjax.common.errors import UserError
from bertjax.config.model_config import Compute, pad_to_lanes
from bertjax.distributed.rules import RULES
from bertjax.distributed.topology import cpu_dtype, has_accelerator
from bertjax.nn.kernels.gpu_attention import SIZES
from bertjax.nn.kernels.triton import has_gpu_kernels

_POINTER = ctypes.c_void_p
GROUPS = "groups"  # the axis over which a training step is vmapped: the groups of devices along `data`

Rows = Callable[[int], np.ndarray]  # number of rows of a batch -> indices of the rows of this host, ascending

# Options of XLA for the training step, by `device_kind`.
COMPILER_OPTIONS = {
    "cpu": {
        "xla_cpu_prefer_vector_width": 512,  # for AVX-512; the default, 256, halves the vectors
    },
    "TPU v5 lite": {
        # The memory for the blocks of a fusion, a part of 128 MiB on chip; the default is 16 MiB. According to the
        # compiler this saves 2.8 % of a step of BERT-base at 64 x 128 and 2.4 % at 16 x 512. 32 MiB save the same,
        # 64 MiB cost 10 %.
        "xla_tpu_scoped_vmem_limit_kib": 24 * 1024,
    },
}


def compiler_options(mesh: Mesh) -> dict[str, Any]:
    """Returns the options of XLA for the training step on a mesh."""
    return COMPILER_OPTIONS.get(mesh.devices.flat[0].device_kind, {})


def use_cpu_cores(config: ml_collections.ConfigDict) -> None:
    """Configures the CPU devices of JAX and the memory of this process. Call it before the first use of a device.

    A single device computes with all cores. A device per core is slower, because each device has a copy of the params
    and gradients: 1.0 s instead of 0.75 s per step of 4 layers of 512 on 2 cores. The number of devices is the product
    of `mesh.fsdp` and `mesh.tensor`, unless the user has set `mesh.data` or the number of devices.
    """
    if config.mesh.data == -1 and "host_platform_device_count" not in os.environ.get("XLA_FLAGS", ""):
        with contextlib.suppress(RuntimeError):  # JAX has initialized its devices already, as in a notebook
            jax.config.update("jax_num_cpu_devices", config.mesh.fsdp * config.mesh.tensor)
    if cast(Any, jax.config).jax_platforms == "cpu" or not has_accelerator():
        # Asynchronous dispatch saves no time here, and allocates the memory of the next step: 5.9 instead of 2.1 GiB in
        # total for MiniLM at 32 x 128.
        jax.config.update("jax_cpu_enable_async_dispatch", False)
        _keep_freed_memory()


def _keep_freed_memory() -> None:
    """Makes glibc keep the buffers that XLA frees after each step, in huge pages; does nothing with other C libraries.

    Otherwise the buffers return to the kernel, which must then zero new pages of 4 KiB: an eighth of a step of 4 layers
    of 512. This needs a single arena. The locks of an arena would slow the many threads that feed an accelerator.
    """
    arenas, mmaps, trim_threshold, top_pad = -8, -4, -1, -2  # malloc.h
    huge_pages, huge_page = 14, 2 << 20  # MADV_HUGEPAGE
    with contextlib.suppress(AttributeError, OSError):
        libc = ctypes.CDLL(None)
        for parameter, value in ((arenas, 1), (mmaps, 0), (trim_threshold, -1), (top_pad, 64 << 20)):
            libc.mallopt(parameter, value)
        # This reserves addresses, not memory: the heap grows to half of the memory, and keeps the address range.
        libc.malloc.restype, libc.malloc.argtypes, libc.free.argtypes = _POINTER, [ctypes.c_size_t], [_POINTER]
        libc.madvise.argtypes = [_POINTER, ctypes.c_size_t, ctypes.c_int]
        size = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") // 2
        if block := libc.malloc(size):
            start = -(-block // huge_page) * huge_page
            libc.madvise(start, size - huge_page, huge_pages)
            libc.free(block)


def make_mesh(config: ml_collections.ConfigDict, devices: Sequence[jax.Device] | None = None) -> Mesh:
    """Builds a mesh with axes data, fsdp and tensor. Raises `UserError` if the config does not fit the devices."""
    devices = jax.devices() if devices is None else devices
    sizes = dict(config.mesh)
    fixed = math.prod(size for size in sizes.values() if size != -1)
    if -1 in sizes.values() and len(devices) % fixed == 0:
        sizes = {axis: len(devices) // fixed if size == -1 else size for axis, size in sizes.items()}
    if math.prod(sizes.values()) != len(devices):
        raise UserError(
            f"config.mesh = {dict(config.mesh)}: the product must be {len(devices)}, the number of devices; set an "
            f"axis to -1"
        )

    rows = config.batch_size // config.microbatches
    ways = sizes["data"] * sizes["fsdp"]
    if rows % ways:
        raise UserError(
            f"config.batch_size = {config.batch_size}: the size of each of the {config.microbatches} microbatches must "
            f"be a multiple of the {ways} devices that share it (mesh.data * mesh.fsdp)"
        )
    if fault := undivided(config.model, sizes):
        raise UserError(f"config.model.{fault}")
    if (vocab_rows := pad_to_lanes(config.model.vocab_size)) % sizes["tensor"]:
        raise UserError(
            f"config.mesh.tensor = {sizes['tensor']}: must divide the {vocab_rows} rows of the word embeddings "
            f"(model.vocab_size, rounded up to a multiple of 128)"
        )
    # Auto, because Explicit axes reject the logical constraints of Linen.
    return Mesh(_arrange(tuple(sizes.values()), devices), tuple(sizes), axis_types=(AxisType.Auto,) * len(sizes))


def undivided(model: Mapping[str, Any], sizes: Mapping[str, int]) -> str:
    """Returns a message about the first field of a model config that the sizes of a mesh do not divide, or ""."""
    for axis, fields in (
        ("tensor", ("num_attention_heads", "num_key_value_heads", "intermediate_size")),
        ("fsdp", ("hidden_size", "embedding_size")),
    ):
        for field in fields:
            if model.get(field, 0) % sizes[axis]:
                devices = f"the {sizes[axis]} devices along mesh.{axis}, over which it is split"
                return f"{field} = {model[field]}: must be a multiple of {devices}"
    return ""


def _arrange(shape: tuple[int, ...], devices: Sequence[jax.Device]) -> np.ndarray:
    """Arranges devices in the shape of the mesh, so that neighbours in the mesh are neighbours in the network.

    Slices are connected along `data`, so that only the sum of gradients uses the network between slices.
    """
    # TPUs only: the slice index of a GPU is the index of its host, and fsdp may span hosts.
    slices = len({getattr(device, "slice_index", 0) if device.platform == "tpu" else 0 for device in devices})
    if slices == 1:
        return mesh_utils.create_device_mesh(shape, devices, allow_split_physical_axes=True)
    if shape[0] % slices:
        raise UserError(
            f"config.mesh.data = {shape[0]}: must be a multiple of the {slices} slices; only data may span slices"
        )
    return mesh_utils.create_hybrid_device_mesh(
        (shape[0] // slices, *shape[1:]), (slices, 1, 1), devices, allow_split_physical_axes=True
    )


def compute_on(mesh: Mesh, config: ml_collections.ConfigDict) -> Compute:
    """Returns the settings of the computation of `config` on a mesh. Raises `UserError` without a required kernel.

    `unroll` "auto" means yes on CPUs, where the copies of a scan for the backward pass take a tenth of a step.
    """
    device = mesh.devices.flat[0]
    unroll = config.unroll == "yes" or (config.unroll == "auto" and device.platform == "cpu")
    compute = compute_for(config.dtype, device)
    if config.model.get("attention") == "fused" and device.platform == "gpu":
        size = config.model.hidden_size // config.model.num_attention_heads
        if not has_gpu_kernels(compute) or size not in SIZES:
            reason = f"the kernel for GPUs supports head sizes {', '.join(map(str, SIZES))}, not {size}"
            if not has_gpu_kernels(compute):
                reason = f"{device.device_kind} has no kernel for {compute.dtype}"
            raise UserError(f"config.model.attention = 'fused': {reason}; set auto")
    if config.kernels == "no" and device.platform != "cpu":
        compute = dataclasses.replace(compute, chip="")
    return dataclasses.replace(compute, remat=config.remat, unroll=unroll and config.remat == "none")


def compute_for(dtype: str, device: jax.Device | None = None) -> Compute:
    """Returns the settings of the computation on a device, or on the first device. `dtype` is `config.dtype`.

    | device                               | activations      | products take | "auto"   |
    | TPU, GPU                             | `dtype`          | `dtype`       | bfloat16 |
    | CPU with a flag of `BFLOAT16_FLAGS`  | float32          | `dtype`       | bfloat16 |
    | other CPU                            | float32          | `dtype`       | float32  |
    """
    device = device or jax.devices()[0]
    is_cpu = device.platform == "cpu"
    if dtype == "auto":
        dtype = cpu_dtype() if is_cpu else "bfloat16"
    return Compute("float32" if is_cpu else dtype, dtype, chip=device.device_kind)


def replicated(mesh: Mesh) -> NamedSharding:
    """Returns the sharding of an array that all devices have."""
    return NamedSharding(mesh, PartitionSpec())


def batch_sharding(mesh: Mesh) -> NamedSharding:
    """Returns the sharding of an array with a row for each row of the batch."""
    return NamedSharding(mesh, PartitionSpec(dict(RULES)["batch"]))


def param_shardings(abstract_params: Any, mesh: Mesh) -> Any:
    """Returns the `NamedSharding`s of a tree of logically partitioned (still boxed) params."""
    return nn.logical_to_mesh_sharding(nn.get_partition_spec(abstract_params), mesh, RULES)


def split_over_data(sharding: NamedSharding, axes: tuple[str | None, ...], shape: tuple[int, ...]) -> NamedSharding:
    """Partitions a param with the logical `axes` along `data` as well, if a dimension is divisible.

    Partitions the first dimension that is not partitioned yet, so that the parts are contiguous, and `layers` only if
    no other dimension is divisible. `axes` is empty if the module does not name the axes of the param.
    """
    ways, part = sharding.mesh.shape["data"], sharding.shard_shape(shape)
    free = [i for i, size in enumerate(shape) if part[i] == size and size % ways == 0]
    if not free:
        return sharding
    spec: list[Any] = [*sharding.spec] + [None] * (len(shape) - len(sharding.spec))
    spec[min(free, key=lambda i: "layers" in axes[i : i + 1])] = "data"
    return NamedSharding(sharding.mesh, PartitionSpec(*spec))


def local_copy(arrays: Any, mesh: Mesh) -> Any:
    """Gathers arrays from the mesh to a device of this host. All hosts must call this together."""
    whole = jax.jit(lambda x: x, out_shardings=replicated(mesh))(arrays)
    return jax.tree.map(lambda x: x.addressable_data(0), whole)


def local_rows(mesh: Mesh, batch_size: int) -> np.ndarray:
    """Returns the indices of the batch rows that the devices of this host process, ascending."""
    indices = batch_sharding(mesh).addressable_devices_indices_map((batch_size,)).values()
    return np.unique(np.concatenate([np.arange(batch_size)[index] for index in indices]))


def put_batch(batch: Mapping[str, np.ndarray], mesh: Mesh) -> dict[str, jax.Array]:
    """Makes global arrays on the mesh from the `local_rows` of this host. Does not wait for the copy."""
    sharding, ways = batch_sharding(mesh), mesh.shape["data"] * mesh.shape["fsdp"]
    local_parts = local_rows(mesh, ways)

    def put(rows: np.ndarray) -> jax.Array:
        size = len(rows) // len(local_parts)  # rows of a part

        def part(index: Any) -> np.ndarray:
            first = np.searchsorted(local_parts, (index[0].start or 0) // size) * size
            return rows[first : first + size]

        return jax.make_array_from_callback((ways * size, *rows.shape[1:]), sharding, part)

    return {name: put(rows) for name, rows in batch.items()}
