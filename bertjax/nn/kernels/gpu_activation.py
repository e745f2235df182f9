"""The activation of a feed-forward network on GPUs. Its gradient is a kernel: the compiler would store the hyperbolic
tangents in between."""

import functools
import math
from typing import NamedTuple

import flax.linen as nn
import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl

from bertjax.config.model_config import Compute
from bertjax.nn.kernels.pallas import on_mesh, parts_along
from bertjax.nn.kernels.triton import gpu_call, has_gpu_kernels

_TOKENS, _WIDE = 16, 128  # a program's piece of a product: tokens, and elements of each
_CHUNK = 128  # tokens whose sums a program adds up
_PRODUCT = ("batch", "length", None, "mlp")
_INNER = ("batch", "length", "mlp")
_BIAS = (None, "mlp")


def _gelu(x):
    """x times the normal distribution function, by Abramowitz and Stegun 1964, 7.1.26: to 1.5e-7."""
    z = jnp.abs(x) * math.sqrt(0.5)
    t = 1 / (1 + 0.3275911 * z)
    polynomial = t * (0.254829592 + t * (-0.284496736 + t * (1.421413741 + t * (-1.453152027 + t * 1.061405429))))
    upper = 0.5 * polynomial * jnp.exp(-z * z)  # beyond abs(x)
    return x * jnp.where(x > 0, 1 - upper, upper)


# In float32. The compiler of kernels has no erf.
ACTIVATIONS = {
    "gelu": _gelu,
    "gelu_new": functools.partial(nn.gelu, approximate=True),
    "relu": nn.relu,
    "silu": nn.silu,
}


def can_activate_on_gpu(compute: Compute, length: int, wide: int) -> bool:
    """Returns whether the kernel can run on `length` tokens of a width, all devices' together."""
    return has_gpu_kernels(compute) and length % _TOKENS == 0 and wide // parts_along("mlp") % _WIDE == 0


def gpu_activate(product, bias, activation: str, chip: str):
    """The activation of product + bias; for a gated linear unit that of the first half, times the second half.

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
    name: str
    chip: str

    def __call__(self, *parts):
        first = ACTIVATIONS[self.name](parts[0])
        return first * parts[1] if len(parts) > 1 else first


@functools.partial(jax.custom_vjp, nondiff_argnums=(2,))
def _activate(product, bias, activation: Activation):
    inner = product.astype(jnp.float32) if bias is None else product.astype(jnp.float32) + bias
    return activation(*jnp.moveaxis(inner, 2, 0)).astype(product.dtype)


def _forward(product, bias, activation):
    return _activate(product, bias, activation), (product, bias)


def _backward(activation: Activation, saved, gradient):
    product, bias = saved

    def run(gradient, product, *bias):
        batch, length, parts, wide = product.shape
        chunk = math.gcd(length, _CHUNK)
        product_block = pl.BlockSpec((None, chunk, parts, _WIDE), lambda i, j, k: (i, j, 0, k))
        bias_block = pl.BlockSpec((parts, _WIDE), lambda i, j, k: (0, k))
        sums_block = pl.BlockSpec((None, None, parts, _WIDE), lambda i, j, k: (i, j, 0, k))
        inner_block = pl.BlockSpec((None, chunk, _WIDE), lambda i, j, k: (i, j, k))
        sums = jax.ShapeDtypeStruct((batch, length // chunk, parts, wide), jnp.float32)
        call = gpu_call(
            functools.partial(_backward_kernel, activation, parts, chunk),
            grid=(batch, length // chunk, wide // _WIDE),
            in_specs=[inner_block, product_block, *(bias_block for _ in bias)],
            out_specs=[product_block, *(sums_block for _ in bias)],
            out_shape=[jax.ShapeDtypeStruct(product.shape, product.dtype), *(sums for _ in bias)],
            chip=activation.chip,
            warps=4,
            stages=2,
            name="gpu_activation_backward",
        )
        return call(gradient, product, *bias)

    biases = [] if bias is None else [bias]
    axes = (_INNER, _PRODUCT, *(_BIAS for _ in biases))
    run = on_mesh(run, axes, (_PRODUCT, *(("batch", None, None, "mlp") for _ in biases)))
    of_product, *sums = run(gradient, product, *biases)
    return of_product, sums[0].sum((0, 1)) if sums else None


_activate.defvjp(_forward, _backward)


def _backward_kernel(activation: Activation, parts: int, chunk: int, gradient_ref, product_ref, *refs):
    bias_ref, of_product_ref, sums_ref = refs if len(refs) > 1 else (None, *refs, None)

    def differentiate(number, sums):
        at = pl.ds(number * _TOKENS, _TOKENS)
        inner = [product_ref[at, part, :].astype(jnp.float32) for part in range(parts)]
        if bias_ref is not None:
            inner = [each + bias_ref[part, :][None] for part, each in enumerate(inner)]
        _, pull_back = jax.vjp(activation, *inner)
        found = pull_back(gradient_ref[at, :].astype(jnp.float32))
        for part, each in enumerate(found):
            of_product_ref[at, part, :] = each.astype(of_product_ref.dtype)
        return sums if bias_ref is None else tuple(a + b for a, b in zip(sums, found))

    zeros = jnp.zeros((_TOKENS, _WIDE), jnp.float32)
    sums = jax.lax.fori_loop(0, chunk // _TOKENS, differentiate, () if bias_ref is None else (zeros,) * parts)
    for part, each in enumerate(sums):
        sums_ref[part, :] = each.sum(0)
