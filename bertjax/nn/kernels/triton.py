"""Functions of the Pallas kernels for GPUs (Triton): supported chips, calls, and the dropout mask on chip."""

import struct
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton

from bertjax.config.model_config import Compute
from bertjax.nn.ops.dropout import hash_index, threshold

# Chips that have kernels, by the beginning of `device_kind`.
HOPPER = ("NVIDIA H100", "NVIDIA H200")
CHIPS = ("NVIDIA A100", *HOPPER, "NVIDIA L4")
EMULATED = "emulated GPU"  # any device: slowly, for tests


def is_supported(chip: str) -> bool:
    """Returns whether a chip is a GPU that has kernels."""
    return chip.startswith(CHIPS) or chip == EMULATED


def has_gpu_kernels(compute: Compute) -> bool:
    """Returns whether kernels run: with bfloat16, which the matrix units multiply much faster."""
    return is_supported(compute.chip) and (compute.dtype == "bfloat16" or compute.chip == EMULATED)


def gpu_call(kernel: Callable[..., None], *, chip: str, warps: int, stages: int, **options: Any) -> Callable[..., Any]:
    """Returns `pl.pallas_call` for programs with `warps` warps, which load `stages` steps of a loop ahead."""
    parameters = triton.CompilerParams(num_warps=warps, num_stages=stages)
    return pl.pallas_call(kernel, compiler_params=parameters, interpret=chip == EMULATED, **options)


def kept_at(words: tuple[Array, Array], index: Array, rate: float) -> Array:
    """Returns booleans: the elements of a row that `dropout` keeps, bit for bit.

    Args:
      words: the two words of the key of the row.
      index: uint32, the indices of the elements in their row of the batch.
      rate: the dropout rate.
    """
    return hash_index(index, *words) >= jnp.uint32(threshold(rate))


def zero_dropped(x: Array, hashes: Array, rate: float, chip: str) -> Array:
    """Zeroes the elements of a float32 array that `dropout` drops, from the hashes of their indices.

    A comparison and a selection. The compiler would select after the conversion to bfloat16, with twice the
    instructions.
    """
    least = threshold(rate)
    if chip == EMULATED:
        return jnp.where(hashes >= jnp.uint32(least), x, 0.0)
    asm = f"{{.reg .pred kept; setp.hs.u32 kept, $2, {least}; selp.f32 $0, $1, 0f00000000, kept;}}"
    return _elementwise(asm, "=f,f,r", x, hashes)


def power_of_two(x: Array, factor: float, shift: Array, chip: str) -> Array:
    """Returns 2 ** (factor * x - shift) of a float32 array in two instructions; results below 2 ** -126 are 0.

    `shift` has the shape of x, or axes of size 1.
    """
    if chip == EMULATED:
        return jnp.exp2(factor * x - shift)
    (bits,) = struct.unpack("<I", struct.pack("<f", factor))
    asm = f"{{.reg .f32 y; fma.rn.f32 y, $1, 0f{bits:08X}, $2; ex2.approx.ftz.f32 $0, y;}}"
    return _elementwise(asm, "=f,f,f", x, jnp.broadcast_to(-shift, x.shape))


def _elementwise(asm: str, constraints: str, *args: Array) -> Array:
    results = [jax.ShapeDtypeStruct(args[0].shape, args[0].dtype)]
    return triton.elementwise_inline_asm(asm, args=args, constraints=constraints, pack=1, result_shape_dtypes=results)[
        0
    ]
