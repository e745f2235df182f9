"""Activations of feed-forward networks and heads."""

import math
from collections.abc import Callable

import flax.linen as nn
import jax
import jax.numpy as jnp
from jax import Array

from bertjax.config.model_config import Compute
from bertjax.nn.kernels import gpu_activation
from bertjax.nn.kernels.gpu_activation import can_activate_on_gpu, gpu_activate


def _gelu(x: Array) -> Array:
    """Returns x times the normal distribution function."""
    if x.dtype == jnp.float32:  # 1 + erf takes a third of the time of erfc, but cancels digits in bfloat16
        return 0.5 * x * (1 + jax.lax.erf(x * math.sqrt(0.5)))
    return nn.gelu(x, approximate=False)


# The activations of the kernel for GPUs, with an exact GELU.
ACTIVATIONS: dict[str, Callable[[Array], Array]] = gpu_activation.ACTIVATIONS | {"gelu": _gelu}


def activate(inner: Array, activation: str, compute: Compute) -> Array:
    """Returns the activation of `inner` `[batch, length, wide]` in a feed-forward network.

    In a gated network `inner` is `[batch, length, 2, wide]`; returns the activation of the first half times the second
    half (Shazeer 2020).
    """
    if can_activate_on_gpu(compute, inner.shape[1], inner.shape[-1]):
        return gpu_activate(inner, None, activation, compute.chip)
    if inner.ndim == 3:
        return ACTIVATIONS[activation](inner)
    return ACTIVATIONS[activation](inner[..., 0, :]) * inner[..., 1, :]
