"""Builds the device mesh, and places batches and params on it."""

import contextlib
import ctypes
import dataclasses
import math
import os
from collections.abc import Callable, Mapping

import flax.linen as nn
import jax
import numpy as np
from jax.experimental import mesh_utils
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

from bertjax.common.errors import UserError
from bertjax.config.model_config import Compute, padded
from bertjax.distributed.rules import RULES
from bertjax.distributed.topology import cpu_dtype, has_accelerator
from bertjax.nn.kernels.gpu_attention import SIZES
from bertjax.nn.kernels.triton import has_gpu_kernels

_POINTER = ctypes.c_void_p
GROUPS = "groups"  # the axis over which a training step is vmapped: the groups of devices along `data`

Rows = Callable[[int], np.ndarray]  # number of rows of a batch -> those that this host computes, ascending


# Options of XLA for the training step, by `device_kind`.
COMPILER_OPTIONS = {
    "cpu": {
        "xla_cpu_prefer_vector_width": 512,  # the default, 256, halves AVX-512's vectors; ignored by CPUs without it
    },
    "TPU v5 lite": {
        # Memory for a fusion's blocks, of 128 MiB on chip; the default is 16 MiB. By the compiler's estimate this gains
        # 2.8 % of BERT-base's step at 64 x 128 and 2.4 % at 16 x 512; 32 MiB gain as much, 64 cost 10 %.
        "xla_tpu_scoped_vmem_limit_kib": 24 * 1024,
    },
}


def compiler_options(mesh: Mesh) -> dict:
    return COMPILER_OPTIONS.get(mesh.devices.flat[0].device_kind, {})


def use_cpu_cores(config) -> None:
    """Configures JAX's CPU devices and this process's memory. Call it before anything else asks JAX for its devices.

    A single device computes with all cores. A device per core is slower, for each has its own copy of the params and
    gradients: 1.0 s instead of 0.75 s per step of 4 layers of 512 on 2 cores. So there are only as many as `mesh.fsdp`
    and `mesh.tensor` ask for; none are added if the user has set `mesh.data` or the number of devices.
    """
    if config.mesh.data == -1 and "host_platform_device_count" not in os.environ.get("XLA_FLAGS", ""):
        with contextlib.suppress(RuntimeError):  # JAX has initialized its devices already, as in a notebook
            jax.config.update("jax_num_cpu_devices", config.mesh.fsdp * config.mesh.tensor)
    if jax.config.jax_platforms == "cpu" or not has_accelerator():
        # A step that is dispatched ahead gains nothing here, and takes its memory already: 5.9 instead of 2.1 GiB in
        # all, for MiniLM at 32 x 128.
        jax.config.update("jax_cpu_enable_async_dispatch", False)
        _keep_freed_memory()


def _keep_freed_memory() -> None:
    """Makes glibc keep the buffers that XLA frees after each step, in huge pages; does nothing with other C libraries.

    Otherwise they return to the kernel and come back as pages of 4 KiB that must be zeroed: an eighth of a step of
    4 layers of 512. Needs a single arena, whose locks would slow the many threads that feed an accelerator.
    """
    arenas, mmaps, trim_threshold, top_pad = -8, -4, -1, -2  # malloc.h
    huge_pages, huge_page = 14, 2 << 20  # MADV_HUGEPAGE
    with contextlib.suppress(AttributeError, OSError):
        libc = ctypes.CDLL(None)
        for parameter, value in ((arenas, 1), (mmaps, 0), (trim_threshold, -1), (top_pad, 64 << 20)):
            libc.mallopt(parameter, value)
        # Pages are only reserved: the heap grows to half of the memory, and shrinks again but for its address range.
        libc.malloc.restype, libc.malloc.argtypes, libc.free.argtypes = _POINTER, [ctypes.c_size_t], [_POINTER]
        libc.madvise.argtypes = [_POINTER, ctypes.c_size_t, ctypes.c_int]
        size = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") // 2
        if block := libc.malloc(size):
            start = -(-block // huge_page) * huge_page
            libc.madvise(start, size - huge_page, huge_pages)
            libc.free(block)


def make_mesh(config, devices=None) -> Mesh:
    """Builds a mesh with axes data, fsdp and tensor. Raises `UserError` if the config does not fit the devices."""
    devices = jax.devices() if devices is None else devices
    sizes = dict(config.mesh)
    given = math.prod(size for size in sizes.values() if size != -1)
    if -1 in sizes.values() and len(devices) % given == 0:
        sizes = {axis: len(devices) // given if size == -1 else size for axis, size in sizes.items()}
    if math.prod(sizes.values()) != len(devices):
        raise UserError(f"config.mesh = {dict(config.mesh)}: does not multiply to the {len(devices)} devices")

    rows = config.batch_size // config.microbatches
    ways = sizes["data"] * sizes["fsdp"]
    if rows % ways:
        raise UserError(
            f"config.batch_size = {config.batch_size}: the size of each of the {config.microbatches} microbatches must "
            f"be a multiple of the {ways} devices that share it (mesh.data * mesh.fsdp)"
        )
    if fault := undivided(config.model, sizes):
        raise UserError(f"config.model.{fault}")
    if (vocab_rows := padded(config.model.vocab_size)) % sizes["tensor"]:
        raise UserError(
            f"config.mesh.tensor = {sizes['tensor']}: must divide the {vocab_rows} rows of the word embeddings "
            f"(model.vocab_size, rounded up to a multiple of 128)"
        )
    # Auto: the Explicit default rejects Linen's logical constraints, which are hints to the partitioner.
    return Mesh(_arrange(tuple(sizes.values()), devices), tuple(sizes), axis_types=(AxisType.Auto,) * len(sizes))


def undivided(model: Mapping, sizes: Mapping[str, int]) -> str:
    """Returns the first size of a model, by the names of its config's fields, that the sizes of a mesh do not divide,
    with what it must be; empty if there is none."""
    for axis, fields in (
        ("tensor", ("num_attention_heads", "num_key_value_heads", "intermediate_size")),
        ("fsdp", ("hidden_size", "embedding_size")),
    ):
        for field in fields:
            if model.get(field, 0) % sizes[axis]:
                devices = f"the {sizes[axis]} devices along mesh.{axis}, over which it is split"
                return f"{field} = {model[field]}: must be a multiple of {devices}"
    return ""


def _arrange(shape: tuple[int, int, int], devices) -> np.ndarray:
    """Arranges devices in the shape of the mesh, so that neighbours in the mesh are neighbours in the network.

    Slices are connected along `data` only: just the sum of gradients, once per step, crosses between them.
    """
    # TPUs only: a GPU's slice index is that of its host, and fsdp may span hosts.
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


def compute_on(mesh: Mesh, config) -> Compute:
    """Returns how `config` computes on a mesh.

    `unroll` "auto" means yes on CPUs: a scan's copies for the backward pass take a tenth of a step.
    """
    device = mesh.devices.flat[0]
    unroll = config.unroll == "yes" or (config.unroll == "auto" and device.platform == "cpu")
    how = compute_for(config.dtype, device)
    if config.model.get("attention") == "fused" and device.platform == "gpu":
        lacks, size = "", config.model.hidden_size // config.model.num_attention_heads
        if not has_gpu_kernels(how):
            lacks = f"{device.device_kind} has no kernel for {how.dtype}"
        elif size not in SIZES:
            lacks = f"GPUs have a kernel for heads of {', '.join(map(str, SIZES))} numbers, not of {size}"
        if lacks:
            raise UserError(f"config.model.attention = 'fused': {lacks}; leave it at auto")
    if config.kernels == "no" and device.platform != "cpu":
        how = dataclasses.replace(how, chip="")
    return dataclasses.replace(how, remat=config.remat, unroll=unroll and config.remat == "none")


def compute_for(dtype: str, device=None) -> Compute:
    """Returns how to compute on a device, the first one unless given. `dtype` is `config.dtype`.

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
    return NamedSharding(mesh, PartitionSpec())


def batch_sharding(mesh: Mesh) -> NamedSharding:
    return NamedSharding(mesh, nn.logical_to_mesh_axes(("batch",), RULES))


def param_shardings(abstract_params, mesh: Mesh):
    """Returns the `NamedSharding`s of a tree of logically partitioned (still boxed) params."""
    return nn.logical_to_mesh_sharding(nn.get_partition_spec(abstract_params), mesh, RULES)


def split_over_data(sharding: NamedSharding, axes: tuple[str | None, ...], shape: tuple[int, ...]) -> NamedSharding:
    """Partitions a param with these logical axes along `data` as well, if one of its dimensions is divisible.

    Takes the first dimension that is not partitioned yet, so that the parts are contiguous; `layers` only if there is
    no other.
    """
    ways, part = sharding.mesh.shape["data"], sharding.shard_shape(shape)
    free = [i for i, size in enumerate(shape) if part[i] == size and size % ways == 0]
    if not free:
        return sharding
    spec = [*sharding.spec] + [None] * (len(shape) - len(sharding.spec))
    spec[min(free, key=lambda i: axes[i] == "layers")] = "data"
    return NamedSharding(sharding.mesh, PartitionSpec(*spec))


def local_copy(arrays, mesh: Mesh):
    """Gathers arrays from the mesh to a device of this host. All hosts must call this together."""
    whole = jax.jit(lambda x: x, out_shardings=replicated(mesh))(arrays)
    return jax.tree.map(lambda x: x.addressable_data(0), whole)


def local_rows(mesh: Mesh, batch_size: int) -> np.ndarray:
    """Returns the indices of the batch rows that this host's devices process and it must read, ascending."""
    indices = batch_sharding(mesh).addressable_devices_indices_map((batch_size,)).values()
    return np.unique(np.concatenate([np.arange(batch_size)[index] for index in indices]))


def put_batch(batch: dict, mesh: Mesh) -> dict:
    """Makes global arrays on the mesh from this host's `local_rows` of a batch. Does not wait for the copy."""
    sharding, ways = batch_sharding(mesh), mesh.shape["data"] * mesh.shape["fsdp"]
    own = local_rows(mesh, ways)  # the parts that this host has

    def put(rows):
        size = len(rows) // len(own)  # rows of a part

        def part(index):
            first = np.searchsorted(own, (index[0].start or 0) // size) * size
            return rows[first : first + size]

        return jax.make_array_from_callback((ways * size, *rows.shape[1:]), sharding, part)

    return {name: put(rows) for name, rows in batch.items()}
