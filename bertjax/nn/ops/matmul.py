"""Matrix products with the dtypes and layouts that a processor multiplies fast.

Factors have `compute.product_dtype`, and products have `compute.dtype`. The dtypes differ on CPUs only: XLA for CPUs
multiplies bfloat16 fast if the product is float32, all arrays are row-major, and the first factor is not transposed
(YNNPACK).
"""

import functools
import math
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array
from jax.experimental.layout import Layout, with_layout_constraint

from bertjax.config.model_config import Compute


def project(x: Array, kernel: Array, compute: Compute, outputs_first: bool = False) -> Array:
    """Returns x W: `[..., inputs]`, `[inputs, *features]` -> `[..., *features]` in `compute.dtype`.

    The gradients have `compute.dtype` as well. With `outputs_first`, `kernel` is `[features, inputs]`.
    """
    if not compute.casts_factors:
        kernel = kernel.astype(compute.dtype)
    return _project(x.astype(compute.dtype), kernel, compute, outputs_first)


@functools.partial(jax.custom_vjp, nondiff_argnums=(2, 3))
def _project(x: Array, kernel: Array, compute: Compute, outputs_first: bool) -> Array:
    return _project_forward(x, kernel, compute, outputs_first)[0]


def _project_forward(x: Array, kernel: Array, compute: Compute, outputs_first: bool) -> tuple[Array, Any]:
    x, kernel = x.astype(compute.product_dtype), kernel.astype(compute.product_dtype)
    inputs = kernel.ndim - 1 if outputs_first else 0
    return jnp.tensordot(x, kernel, (-1, inputs), preferred_element_type=compute.dtype), (x, kernel)


def _project_backward(compute: Compute, outputs_first: bool, saved: Any, grad: Array) -> tuple[Array, Array]:
    x, kernel = saved
    grad = grad.astype(compute.product_dtype)
    features = list(range(x.ndim - 1, grad.ndim))
    axes = [0] if outputs_first else list(range(1, kernel.ndim))
    of_x = jnp.tensordot(grad, kernel, (features, axes), preferred_element_type=compute.dtype)
    left, right = (grad, x) if outputs_first else (x, grad)
    return of_x, _sum_over_rows(left, right, x.ndim - 1, compute)


_project.defvjp(_project_forward, _project_backward)


def _sum_over_rows(a: Array, b: Array, rows: int, compute: Compute) -> Array:
    """`[*rows, *a]`, `[*rows, *b]` -> `[*a, *b]`: the gradient of a kernel.

    A CPU transposes the first factor. If it is less work, the factors are swapped and the product is transposed.
    """
    count, over = math.prod(a.shape[:rows]), list(range(rows))
    swaps = a.size > b.size + a.size // count * b.size // count
    if swaps:
        a, b = b, a
    axes = a.ndim - rows  # of `a` in the product
    if compute.casts_factors:
        a = _row_major(jnp.moveaxis(a, over, range(axes, a.ndim)), compute)
    contracted = list(range(axes, a.ndim)) if compute.casts_factors else over
    product = jnp.tensordot(a, b, (contracted, over), preferred_element_type=compute.dtype)
    return jnp.moveaxis(_row_major(product, compute), range(axes), range(-axes, 0)) if swaps else product


def multiply(
    a: Array, b: Array, compute: Compute, transpose_a: bool = False, transpose_b: bool = False, dtype: Any = None
) -> Array:
    """Returns A B of the last two axes: `[..., m, k]`, `[..., k, n]` -> `[..., m, n]`.

    Args:
      a: the first factor.
      b: the second factor.
      compute: the dtypes.
      transpose_a: whether a is `[..., k, m]`.
      transpose_b: whether b is `[..., n, k]`.
      dtype: the dtype of the product; None: `compute.dtype`.
    """
    a, b = (_row_major(x.astype(compute.product_dtype), compute) for x in (a, b))
    if transpose_a and compute.casts_factors:
        *_, k, m = a.shape
        if k * m > (k + m) * b.shape[-1]:  # the rule of _sum_over_rows
            product = multiply(jnp.swapaxes(b, -1, -2), a, compute, dtype=dtype)
            return jnp.swapaxes(_row_major(product, compute), -1, -2)
        a, transpose_a = _row_major(jnp.swapaxes(a, -1, -2), compute), False
    contracted = ((a.ndim - (2 if transpose_a else 1),), (b.ndim - (1 if transpose_b else 2),))
    batch = tuple(range(a.ndim - 2))
    return jax.lax.dot_general(a, b, (contracted, (batch, batch)), preferred_element_type=dtype or compute.dtype)


def _row_major(x: Array, compute: Compute) -> Array:
    """Forces the order of the axes in memory. Otherwise the compiler avoids the copy and reads another order."""
    if not compute.casts_factors:
        return x
    return with_layout_constraint(x, Layout(tuple(range(x.ndim))))
