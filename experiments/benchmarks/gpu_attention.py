"""Attention's kernels on a GPU: beside their definition in float32, and their time beside that of other ways.

Command:  python -m experiments.benchmarks.gpu_attention
Measures: the relative error, ||found - expected|| / ||expected||, of the context and of the gradient; then milliseconds
          of the forward pass and of both, for our kernels, XLA's products (`plain_attention`, `window_attention`) and
          cuDNN's kernels (`jax.nn.dot_product_attention`; without dropout, window and segments); with --sweep also
          other tiles
Needs:    a GPU; no TensorFlow
Results:  RESULTS.md
"""

import argparse
import functools
import itertools
import statistics
import time

import jax
import jax.numpy as jnp
import numpy as np

from bertjax.config import Compute
from bertjax.model.dropout import dropout, row_keys
from bertjax.model.gpu_attention import Tiles, gpu_attention, tiles_of
from bertjax.model.plain_attention import plain_attention, visible
from bertjax.model.window_attention import window_attention

# (batch, length, heads, head's size, rate, causal, window)
CHECKED = (
    (2, 128, 2, 64, 0.0, False, None), (2, 200, 2, 64, 0.1, False, None), (2, 300, 2, 32, 0.1, True, None),
    (2, 1000, 2, 64, 0.1, False, 64), (3, 40, 2, 16, 0.1, False, None), (2, 512, 2, 128, 0.1, True, None),
)  # fmt: skip
TIMED = (
    (128, 128, 12, 64, 0.1, False, None), (32, 512, 16, 64, 0.1, False, None), (32, 512, 16, 64, 0.0, False, None),
    (16, 1024, 12, 64, 0.0, False, None), (16, 1024, 12, 64, 0.0, False, 64), (2, 8192, 12, 64, 0.0, False, None),
    (2, 8192, 12, 64, 0.0, False, 64),
)  # fmt: skip
SWEPT = (  # tiles of the forward kernel, and of the backward kernel
    (Tiles(128, 64, 4, 3), Tiles(128, 64, 8, 3), Tiles(128, 128, 8, 2), Tiles(64, 64, 4, 2), Tiles(64, 128, 4, 2)),
    (Tiles(64, 64, 4, 3), Tiles(64, 32, 4, 3), Tiles(128, 64, 8, 2), Tiles(128, 64, 8, 3), Tiles(128, 32, 8, 3)),
)


def packed(rows: int, length: int) -> jax.Array:
    """Rows of three segments of different lengths and padding; the last one is a single segment."""
    places, ends = np.arange(length), np.linspace(length // 4, length // 3, rows).astype(int)[:, None]
    segments = np.minimum(places // ends + 1, 4) % 4
    segments[-1] = 1
    return jnp.asarray(segments, jnp.int32)


def definition(query_key_value, segments, keys, rate, causal, window):
    """Vaswani et al. 2017, section 3.2.1."""
    query, key, value = jnp.moveaxis(query_key_value, 2, 0)
    einsum = functools.partial(jnp.einsum, precision="highest")
    scores = einsum("bqhd,bkhd->bhqk", query, key) / np.sqrt(query.shape[-1])
    probs = dropout(jax.nn.softmax(scores, where=visible(segments, causal, window)), rate, keys)
    return einsum("bhqk,bkhd->bqhd", probs, value).reshape(*segments.shape, -1)


def both_ways(attend, inputs, gradient):
    context, pull_back = jax.vjp(attend, inputs)
    return context, *pull_back(gradient)


def arrays(batch: int, length: int, heads: int, size: int, dtype):
    first, second = jax.random.split(jax.random.key(length))
    inputs = jax.random.normal(first, (batch, length, 3, heads, size)).astype(dtype)
    return inputs, jax.random.normal(second, (batch, length, heads * size)).astype(dtype)


def check(chip: str, dtype: str, batch, length, heads, size, rate, causal, window) -> list[float]:
    inputs, gradient = arrays(batch, length, heads, size, dtype)
    keys = row_keys(jax.random.key(1), jnp.arange(batch)) if rate else None
    given = packed(batch, length), keys, rate
    how = dict(causal=causal, window=window)
    exact = jax.jit(functools.partial(both_ways, lambda x: definition(x, *given, **how)))
    ours = jax.jit(functools.partial(both_ways, lambda x: gpu_attention(x, *given, chip=chip, **how)))
    expected = exact(inputs.astype("float32"), gradient.astype("float32"))
    pairs = zip(expected, ours(inputs, gradient), strict=True)
    return [float(jnp.linalg.norm((a - b).ravel()) / jnp.linalg.norm(a.ravel())) for a, b in pairs]


def milliseconds(function, *given) -> float:
    """The median of rounds of calls that do not wait for each other."""
    jax.block_until_ready(function(*given))
    times = []
    for _ in range(7):
        began = time.perf_counter()
        jax.block_until_ready([function(*given) for _ in range(10)])
        times.append((time.perf_counter() - began) / 10)
    return 1000 * statistics.median(times)


def ways(chip: str, shape, sweep: bool):
    """Yields a name and a function `(query_key_value, segments, keys) -> context`."""
    batch, length, heads, size, rate, causal, window = shape
    how = dict(chip=chip, causal=causal, window=window)
    compute = Compute("bfloat16", "bfloat16", chip=chip)
    yield "kernels", lambda x, segments, keys: gpu_attention(x, segments, keys, rate, **how)
    if window is not None:
        yield "XLA", lambda x, segments, keys: window_attention(x, segments, window, compute)
    elif batch * heads * length**2 < 1 << 30:
        yield "XLA", lambda x, segments, keys: plain_attention(x, segments, keys, rate, compute, causal)
    if not rate and window is None:

        def cudnn(x, segments, keys):
            del segments, keys
            context = jax.nn.dot_product_attention(*jnp.moveaxis(x, 2, 0), is_causal=causal, implementation="cudnn")
            return context.reshape(*x.shape[:2], -1)

        yield "cuDNN", cudnn
    for number, tiles in enumerate(SWEPT) if sweep else ():
        for each in tiles:
            both = list(tiles_of(size))
            both[number] = each
            name = f"{('forward', 'backward')[number]} {tuple(each)}"
            yield name, functools.partial(_with_tiles, rate=rate, tiles=tuple(both), **how)


def _with_tiles(x, segments, keys, *, rate, **how):
    return gpu_attention(x, segments, keys, rate, **how)


def measure(chip: str, shape, sweep: bool) -> None:
    batch, length, heads, size, rate, _, window = shape
    inputs, gradient = arrays(batch, length, heads, size, "bfloat16")
    segments = jnp.ones((batch, length), jnp.int32)
    keys = row_keys(jax.random.key(1), jnp.arange(batch)) if rate else None
    seen = length if window is None else 2 * window + 1
    flops = 4 * batch * heads * length * seen * size
    for name, way in ways(chip, shape, sweep):
        attend = functools.partial(way, segments=segments, keys=keys)
        try:
            forward = milliseconds(jax.jit(attend), inputs)
            both = milliseconds(jax.jit(functools.partial(both_ways, attend)), inputs, gradient)
        except jax.errors.JaxRuntimeError as error:  # tiles that need more than the chip has
            print(f"| {shape} | {name} | {str(error)[:100]!r} |", flush=True)
            continue
        rates = [1e-9 * times * flops / ms for times, ms in ((1, forward), (3.5, both))]
        print(f"| {shape} | {name} | {forward:.3f} | {both:.3f} | {rates[0]:.0f} | {rates[1]:.0f} |", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sweep", action="store_true", help="also other tiles")
    parser.add_argument("--only", type=int, help="the number of a shape to time")
    parser.add_argument("--no_checks", action="store_true", help="only time")
    options = parser.parse_args()
    chip = jax.devices()[0].device_kind
    print(f"{chip}, JAX {jax.__version__}")
    for shape, dtype in () if options.no_checks else itertools.product(CHECKED, ("float32", "bfloat16")):
        errors = check(chip, dtype, *shape)
        assert max(errors) < (1e-5 if dtype == "float32" else 1e-2), (shape, dtype, errors)
        print(f"| {shape} | {dtype} | " + " | ".join(f"{error:.1e}" for error in errors) + " |", flush=True)
    print("| shape | way | forward, ms | both, ms | forward, TFLOP/s | both, TFLOP/s |\n|---|---|---|---|---|---|")
    for number, shape in enumerate(TIMED):
        if options.only in (None, number):
            measure(chip, shape, options.sweep)


if __name__ == "__main__":
    main()
