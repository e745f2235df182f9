"""Functions of the Pallas kernels for TPUs: supported chips, calls, and the dropout mask on chip.

The kernels for GPUs also use `on_mesh` and `call_on_blocks`. libtpu can count the cycles of a kernel without a TPU (see
`planner.kernel_times`) if no block lies in scalar memory, and no block has two strided dimensions before the dimension
of the tokens.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
from jax import Array
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from bertjax.nn.ops.dropout import hash_index, threshold

Ref = Any  # a reference to a block of an array, within a kernel
LANES = 128
SUBLANES = 8
CHIPS = ("TPU v4", "TPU v5", "TPU v6", "TPU7x")  # chips that have kernels, by the beginning of `device_kind`
EMULATED = "emulated TPU"  # any device: slowly, for tests


def has_kernels(chip: str) -> bool:
    """Returns whether a chip is a TPU that has kernels."""
    return chip.startswith(CHIPS) or chip == EMULATED


def is_small(chip: str) -> bool:
    """Returns whether a core has 16 MiB of memory on chip instead of 64 or 128."""
    return chip.startswith("TPU v4")


def kernel_call(
    kernel: Callable[..., None],
    *,
    grid: tuple[int, ...],
    chip: str,
    in_order: int = 0,
    on_chip: int | None = None,
    **options: Any,
) -> Callable[..., Any]:
    """Returns `pl.pallas_call` for a grid with independent steps.

    Args:
      kernel: the kernel.
      grid: the sizes of the grid.
      chip: `device_kind`.
      in_order: the number of last axes of the grid whose steps depend on earlier steps.
      on_chip: the bytes of memory on chip that the kernel may use; None: the default of the compiler, 16 MiB.
      **options: further arguments of `pl.pallas_call`.
    """
    if not chip.startswith(CHIPS):
        return pl.pallas_call(kernel, grid=grid, interpret=True, **options)
    semantics: Any = ("parallel",) * (len(grid) - in_order) + ("arbitrary",) * in_order
    parameters = pltpu.CompilerParams(dimension_semantics=semantics, vmem_limit_bytes=on_chip)
    return pl.pallas_call(kernel, grid=grid, compiler_params=parameters, **options)


def call_on_blocks(
    call: Callable[..., Callable[..., Any]],
    kernel: Callable[..., None],
    blocks: Mapping[str, pl.BlockSpec],
    inputs: Sequence[tuple[str, Any]],
    outputs: Sequence[tuple[str, Any]],
    **options: Any,
) -> Any:
    """Runs a kernel by `kernel_call` or `gpu_call`.

    Args:
      call: the function that calls the kernel.
      kernel: the kernel.
      blocks: forms of blocks by name.
      inputs: pairs of the name of a block and an array.
      outputs: pairs of the name of a block and a shape with a dtype.
      **options: further arguments of `call`.
    """
    specs = ([blocks[block] for block, _ in pairs] for pairs in (inputs, outputs))
    in_specs, out_specs = specs
    shapes = [shape for _, shape in outputs]
    run = call(kernel, in_specs=in_specs, out_specs=out_specs, out_shape=shapes, **options)
    return run(*(array for _, array in inputs))


def on_one_device() -> bool:
    """Returns whether the current mesh has a single device, or there is no mesh."""
    mesh = jax.sharding.get_abstract_mesh()
    return mesh.empty or mesh.size == 1


def on_mesh(function: Callable[..., Any], in_axes: Sequence[Any], out_axes: Sequence[Any]) -> Callable[..., Any]:
    """Runs `function` on the parts of the devices, because the partitioner cannot split a kernel.

    Args:
      function: (arrays) -> arrays.
      in_axes: the logical axes of each argument.
      out_axes: the logical axes of each result.
    """
    if on_one_device():
        return function
    in_specs, out_specs = (tuple(map(nn.logical_to_mesh_axes, axes)) for axes in (in_axes, out_axes))
    return jax.shard_map(function, in_specs=in_specs, out_specs=out_specs, check_vma=False)


def parts_along(axis: str) -> int:
    """Returns the number of parts of a logical axis on the mesh."""
    name = _mesh_axis(axis)
    return int(jax.sharding.get_abstract_mesh().shape[name]) if name else 1


def index_along(axis: str) -> Array | int:
    """Returns the index of the device's part of a logical axis, within `on_mesh`."""
    return jax.lax.axis_index(_mesh_axis(axis)) if parts_along(axis) > 1 else 0


def _mesh_axis(axis: str) -> Any:
    axes = None if jax.sharding.get_abstract_mesh().empty else nn.logical_to_mesh_axes((axis,))
    return axes[0] if axes else None


def key_words(keys: Array | None, batch: int) -> Array:
    """`[batch]` keys -> their words `[batch, 2]` uint32; zeros without keys."""
    return jnp.zeros((batch, 2), jnp.uint32) if keys is None else jax.random.key_data(keys)


def with_first_head(words: Array, heads: int) -> Array:
    """Adds the number of the first head of the device to the words `[batch, ..., 2]`; `heads`: heads of a device."""
    first = jnp.full((*words.shape[:-1], 1), index_along("heads") * heads, jnp.uint32)
    return jnp.concatenate([words, first], axis=-1)


def kept(words: Array, start: Any, strides: tuple[int, int], shape: tuple[int, ...], rate: float) -> Array:
    """Returns booleans of a 2-D `shape`: the elements that `dropout` keeps, bit for bit.

    Args:
      words: `[1, 2]` uint32, the words of the key of the row.
      start: int32, the index of the first element in its row of the batch.
      strides: the differences of the index along the two dimensions.
      shape: the shape.
      rate: the dropout rate.
    """
    index = start.astype(jnp.uint32)
    for axis, stride in enumerate(strides):
        index = index + jax.lax.broadcasted_iota(jnp.uint32, shape, axis) * jnp.uint32(stride)
    bits = hash_index(index, words[:, 0:1], words[:, 1:2])
    # The vector unit compares signed numbers only.
    signed = jax.lax.bitcast_convert_type(bits ^ jnp.uint32(1 << 31), jnp.int32)
    return signed >= jnp.int32(threshold(rate) - (1 << 31))


# libtpu 0.0.42 miscompiles selections of packed bfloat16 for v5e, hence float32; and products with an operand that was
# selected against +0.0, because it replaces them by masked products.
ZERO = -0.0


def dot(a: Array, b: Array) -> Array:
    """Returns A B, summed in float32."""
    return jnp.dot(a, b, preferred_element_type=jnp.float32)


def transposed(x: Array) -> Array:
    """Returns the transpose in float32."""
    return x.astype(jnp.float32).T


def only_head(head: int, size: int, x: Array) -> Array:
    """Zeroes the rows of other heads in `[128, n]`. A product over 128 rows takes the time of a product over 64."""
    row = jax.lax.broadcasted_iota(jnp.int32, x.shape, 0)
    return jnp.where((row >= head * size) & (row < (head + 1) * size), x, ZERO)


def own_lanes(parts: Sequence[Array], size: int) -> Array:
    """Merges arrays `[n, 128]`, one for each head: takes the lanes of a head from its array."""
    lane = jax.lax.broadcasted_iota(jnp.int32, parts[0].shape, 1)
    merged = parts[0]
    for head, part in enumerate(parts[1:], 1):
        merged = jnp.where(lane >= head * size, part, merged)
    return merged
