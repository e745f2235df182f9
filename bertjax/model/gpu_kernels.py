"""What the GPU kernels (Pallas through Triton) share: where and how they run, and the dropout mask on chip.

What both they and the TPU kernels need is in `kernels`.
"""

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton

from bertjax.config import Compute
from bertjax.model.dropout import hash_index, threshold

# Chips that have kernels, by the beginning of `device_kind`.
CHIPS = ("NVIDIA A100", "NVIDIA H100", "NVIDIA H200", "NVIDIA L4")
EMULATED = "emulated GPU"  # any device: slowly, for tests


def is_supported(chip: str) -> bool:
    """Returns whether a chip is a GPU that has kernels."""
    return chip.startswith(CHIPS) or chip == EMULATED


def has_gpu_kernels(compute: Compute) -> bool:
    """Returns whether kernels run: on bfloat16, of which the matrix units multiply many more a second."""
    return is_supported(compute.chip) and (compute.dtype == "bfloat16" or compute.chip == EMULATED)


def gpu_call(kernel, *, chip: str, warps: int, stages: int, **options):
    """`pl.pallas_call` for programs of some warps; `stages`: how many steps of a loop are loaded ahead."""
    parameters = triton.CompilerParams(num_warps=warps, num_stages=stages)
    return pl.pallas_call(kernel, compiler_params=parameters, interpret=chip == EMULATED, **options)


def kept_at(words, index, rate: float) -> jax.Array:
    """Returns booleans: the elements of a row that `dropout` keeps, bit for bit.

    Args:
      words: the two words of the row's key.
      index: uint32, those of the elements in their row of the batch.
      rate: the dropout rate.
    """
    return hash_index(index, *words) >= jnp.uint32(threshold(rate))
