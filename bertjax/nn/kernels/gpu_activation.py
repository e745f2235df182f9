"""The activation of a feed-forward network on GPUs, with a kernel for the gradient.

Without the kernel, the compiler would store intermediate results.
"""

import functools
import math
from collections.abc import Callable
from typing import Any, NamedTuple

import flax.linen as nn
import jax
import jax.numpy as jnp
from jax import Array
from jax.experimental import pallas as pl

from bertjax.config.model_config import Compute
from bertjax.nn.kernels.pallas import Ref, call_on_blocks, on_mesh, parts_along
from bertjax.nn.kernels.triton import gpu_call, has_gpu_kernels

_TOKENS, _WIDE = 16, 128  # the piece of a product that a program processes at a time: tokens, and elements of a token
_CHUNK = 128  # tokens that a program adds up
_PRODUCT = ("batch", "length", None, "mlp")
_INNER = ("batch", "length", "mlp")
_BIAS = (None, "mlp")


def _gelu(x: Array) -> Array:
    """Returns x times the normal distribution function, to 1.5e-7 (Abramowitz and Stegun 1964, 7.1.26)."""
    z = jnp.abs(x) * math.sqrt(0.5)
    t = 1 / (1 + 0.3275911 * z)
    polynomial = t * (0.254829592 + t * (-0.284496736 + t * (1.421413741 + t * (-1.453152027 + t * 1.061405429))))
    upper = 0.5 * polynomial * jnp.exp(-z * z)  # the probability above abs(x)
    return x * jnp.where(x > 0, 1 - upper, upper)


# In float32. Triton has no erf.
ACTIVATIONS: dict[str, Callable[[Array], Array]] = {
    "gelu": _gelu,
    "gelu_new": functools.partial(nn.gelu, approximate=True),
    "relu": nn.relu,
    "silu": nn.silu,
    "tanh": jnp.tanh,
}


def can_activate_on_gpu(compute: Compute, length: int, wide: int) -> bool:
    """Returns whether the kernel supports `length` tokens, and a width of all devices together."""
    return has_gpu_kernels(compute) and length % _TOKENS == 0 and wide // parts_along("mlp") % _WIDE == 0


def gpu_activate(product: Array, bias: Array | None, activation: str, chip: str) -> Array:
    """Returns the activation of product + bias; for two halves, the activation of the first half times the second.

    Args:
      product: `[batch, length, wide]`, or `[batch, length, 2, wide]`.
      bias: `[wide]`, `[2, wide]`, or None.
      activation: a key of `ACTIVATIONS`.
      chip: `device_kind`.

    Returns:
      `[batch, length, wide]`.
    """
    batch, length, *parts, wide = product.shape
    product = product.reshape(batch, length, *(parts or [1]), wide)
    bias = None if bias is None else bias.reshape(product.shape[2:]).astype(jnp.float32)
    return _activate(product, bias, Activation(activation, chip))


class Activation(NamedTuple):
    """The function and the chip."""

    name: str
    chip: str

    def activate(self, *parts: Array) -> Array:
        """Returns the activation of the first part, times the second part if there are two."""
        first = ACTIVATIONS[self.name](parts[0])
        return first * parts[1] if len(parts) > 1 else first


@functools.partial(jax.custom_vjp, nondiff_argnums=(2,))
def _activate(product: Array, bias: Array | None, activation: Activation) -> Array:
    inner = product.astype(jnp.float32) if bias is None else product.astype(jnp.float32) + bias
    return activation.activate(*jnp.moveaxis(inner, 2, 0)).astype(product.dtype)


def _forward(product: Array, bias: Array | None, activation: Activation) -> tuple[Array, Any]:
    return _activate(product, bias, activation), (product, bias)


def _backward(activation: Activation, saved: Any, gradient: Array) -> tuple[Array, Array | None]:
    product, bias = saved

    def run(gradient: Array, product: Array, *bias: Array) -> Any:
        batch, length, parts, wide = product.shape
        chunk = math.gcd(length, _CHUNK)
        blocks = {
            "product": pl.BlockSpec((None, chunk, parts, _WIDE), lambda i, j, k: (i, j, 0, k)),
            "bias": pl.BlockSpec((parts, _WIDE), lambda i, j, k: (0, k)),
            "sums": pl.BlockSpec((None, None, parts, _WIDE), lambda i, j, k: (i, j, 0, k)),
            "inner": pl.BlockSpec((None, chunk, _WIDE), lambda i, j, k: (i, j, k)),
        }
        sums = jax.ShapeDtypeStruct((batch, length // chunk, parts, wide), jnp.float32)
        return call_on_blocks(
            gpu_call,
            functools.partial(_backward_kernel, activation, parts, chunk),
            blocks,
            [("inner", gradient), ("product", product), *(("bias", x) for x in bias)],
            [("product", jax.ShapeDtypeStruct(product.shape, product.dtype)), *(("sums", sums) for _ in bias)],
            grid=(batch, length // chunk, wide // _WIDE),
            chip=activation.chip,
            warps=4,
            stages=2,
            name="gpu_activation_backward",
        )

    biases = [] if bias is None else [bias]
    axes = (_INNER, _PRODUCT, *(_BIAS for _ in biases))
    run = on_mesh(run, axes, (_PRODUCT, *(("batch", None, None, "mlp") for _ in biases)))
    of_product, *sums = run(gradient, product, *biases)
    return of_product, sums[0].sum((0, 1)) if sums else None


_activate.defvjp(_forward, _backward)


def _backward_kernel(activation: Activation, parts: int, chunk: int, *refs: Ref) -> None:
    gradient_ref, product_ref, bias_ref, of_product_ref, sums_ref = (
        refs if len(refs) > 3 else (*refs[:2], None, refs[2], None)
    )

    def differentiate(number: Array, sums: Any) -> Any:
        at = pl.ds(number * _TOKENS, _TOKENS)
        inner = [product_ref[at, part, :].astype(jnp.float32) for part in range(parts)]
        if bias_ref is not None:
            inner = [x + bias_ref[part, :][None] for part, x in enumerate(inner)]
        _, pull_back = jax.vjp(activation.activate, *inner)
        of_inner = pull_back(gradient_ref[at, :].astype(jnp.float32))
        for part, x in enumerate(of_inner):
            of_product_ref[at, part, :] = x.astype(of_product_ref.dtype)
        return sums if bias_ref is None else tuple(a + b for a, b in zip(sums, of_inner))

    zeros = jnp.zeros((_TOKENS, _WIDE), jnp.float32)
    sums = jax.lax.fori_loop(0, chunk // _TOKENS, differentiate, () if bias_ref is None else (zeros,) * parts)
    for part, total in enumerate(sums):
        sums_ref[part, :] = total.sum(0)
