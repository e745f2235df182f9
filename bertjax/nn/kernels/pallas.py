"""What the TPU kernels (Pallas) share: where and how they run, and the dropout mask on chip. The GPU's kernels run on a
mesh in the same way.

libtpu can count a kernel's cycles without a TPU (see `planner.kernel_times`), but only if no block lies in scalar
memory, and no block has two strided dimensions before that of the tokens.
"""

import flax.linen as nn
import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from bertjax.nn.ops.dropout import hash_index, threshold

LANES = 128
SUBLANES = 8
CHIPS = ("TPU v4", "TPU v5", "TPU v6", "TPU7x")  # chips that have kernels, by the beginning of `device_kind`
EMULATED = "emulated TPU"  # any device: slowly, for tests


def has_kernels(chip: str) -> bool:
    return chip.startswith(CHIPS) or chip == EMULATED


def is_small(chip: str) -> bool:
    """Returns whether a core has 16 MiB of memory on chip instead of 64 or 128."""
    return chip.startswith("TPU v4")


def kernel_call(kernel, *, grid, chip: str, in_order: int = 0, on_chip: int | None = None, **options):
    """`pl.pallas_call` for a grid whose steps are independent, but for the last `in_order` of its axes.

    `on_chip`: the bytes of memory on chip that it may use, if not the compiler's 16 MiB.
    """
    if not chip.startswith(CHIPS):
        return pl.pallas_call(kernel, grid=grid, interpret=True, **options)
    semantics = ("parallel",) * (len(grid) - in_order) + ("arbitrary",) * in_order
    parameters = pltpu.CompilerParams(dimension_semantics=semantics, vmem_limit_bytes=on_chip)
    return pl.pallas_call(kernel, grid=grid, compiler_params=parameters, **options)


def on_one_device() -> bool:
    """Returns whether the mesh around this has a single device, or there is none."""
    mesh = jax.sharding.get_abstract_mesh()
    return mesh.empty or mesh.size == 1


def on_mesh(function, in_axes, out_axes):
    """Runs `function` on each device's part of its arguments: the partitioner cannot split a kernel.

    `in_axes`, `out_axes`: the logical axes of each argument and result.
    """
    if on_one_device():
        return function

    def specs(axes):
        return tuple(nn.logical_to_mesh_axes(each) for each in axes)

    return jax.shard_map(function, in_specs=specs(in_axes), out_specs=specs(out_axes), check_vma=False)


def parts_along(axis: str) -> int:
    """Returns the number of parts that a logical axis has on the mesh."""
    name = _mesh_axis(axis)
    return jax.sharding.get_abstract_mesh().shape[name] if name else 1


def index_along(axis: str) -> jax.Array | int:
    """Returns which part of a logical axis a device has, within `on_mesh`."""
    return jax.lax.axis_index(_mesh_axis(axis)) if parts_along(axis) > 1 else 0


def _mesh_axis(axis: str) -> str | None:
    mesh = jax.sharding.get_abstract_mesh()
    return None if mesh.empty else nn.logical_to_mesh_axes((axis,))[0]


def key_words(keys: jax.Array | None, batch: int) -> jax.Array:
    """`[batch]` keys -> their words `[batch, 2]` uint32; zeros without keys."""
    return jnp.zeros((batch, 2), jnp.uint32) if keys is None else jax.random.key_data(keys)


def kept(words, start, strides: tuple[int, int], shape: tuple[int, int], rate: float) -> jax.Array:
    """Returns booleans of a 2-D `shape`: the elements that `dropout` keeps, bit for bit.

    Args:
      words: `[1, 2]` uint32, the words of the row's key.
      start: int32, index of the first element in its row of the batch.
      strides: what a step along each dimension adds to the index.
    """
    index = start.astype(jnp.uint32)
    for axis, stride in enumerate(strides):
        index = index + jax.lax.broadcasted_iota(jnp.uint32, shape, axis) * jnp.uint32(stride)
    bits = hash_index(index, words[:, 0:1], words[:, 1:2])
    # The vector unit compares signed numbers only.
    signed = jax.lax.bitcast_convert_type(bits ^ jnp.uint32(1 << 31), jnp.int32)
    return signed >= jnp.int32(threshold(rate) - (1 << 31))


# libtpu 0.0.42 miscompiles for v5e: selects of packed bfloat16, hence float32; and products with an operand that was
# selected against +0.0, of which it makes masked products.
ZERO = -0.0


def dot(a, b):
    return jnp.dot(a, b, preferred_element_type=jnp.float32)


def transposed(x):
    return x.astype(jnp.float32).T


def only_head(head: int, size: int, x):
    """Zeroes the rows of other heads in `[128, n]`. A product over 128 rows costs as much as one over 64."""
    row = jax.lax.broadcasted_iota(jnp.int32, x.shape, 0)
    return jnp.where((row >= head * size) & (row < (head + 1) * size), x, ZERO)


def own_lanes(parts, size: int):
    """Merges `[n, 128]` of each head, of which only its own lanes are meant."""
    lane = jax.lax.broadcasted_iota(jnp.int32, parts[0].shape, 1)
    merged = parts[0]
    for head, part in enumerate(parts[1:], 1):
        merged = jnp.where(lane >= head * size, part, merged)
    return merged
