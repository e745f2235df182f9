"""Times of attention kernels and of other implementations on a GPU. tests/nn/test_gpu_kernels has their definition.

Command:  python -m experiments.benchmarks.gpu_attention
Measures: milliseconds of the forward pass and of both passes, for bertjax's kernels, XLA's products
          (`plain_attention`, `window_attention`) and cuDNN's kernels (`jax.nn.dot_product_attention`; without
          dropout, window and segments); with --sweep also other tiles
Needs:    a GPU; no TensorFlow
Results:  RESULTS.md
"""

import argparse
import functools
import itertools
import statistics

import jax
import jax.numpy as jnp

from bertjax.config.model_config import Compute
from bertjax.nn.kernels.gpu_attention import AllTiles, Tiles, gpu_attention, tiles_of
from bertjax.nn.ops.dropout import row_keys
from bertjax.nn.ops.plain_attention import plain_attention
from bertjax.nn.ops.window_attention import window_attention
from experiments.benchmarks.timing import seconds_of

# (batch, length, heads, head's size, rate, causal, window)
TIMED = (
    (128, 128, 12, 64, 0.1, False, None), (32, 512, 16, 64, 0.1, False, None), (32, 512, 16, 64, 0.0, False, None),
    (16, 1024, 12, 64, 0.0, False, None), (16, 1024, 12, 64, 0.0, False, 64), (2, 8192, 12, 64, 0.0, False, None),
    (2, 8192, 12, 64, 0.0, False, 64),
)  # fmt: skip
BLOCKS = ((64, 64, 4), (64, 32, 4), (128, 64, 8), (128, 32, 8), (128, 64, 4), (128, 32, 4), (64, 128, 4))
SWEPT = [Tiles(*sizes, stages) for sizes in BLOCKS for stages in (2, 3)]


def both_ways(attend, inputs, gradient):
    context, pull_back = jax.vjp(attend, inputs)
    return context, *pull_back(gradient)


def arrays(batch: int, length: int, heads: int, size: int, dtype):
    first, second = jax.random.split(jax.random.key(length))
    inputs = jax.random.normal(first, (batch, length, 3, heads, size)).astype(dtype)
    return inputs, jax.random.normal(second, (batch, length, heads * size)).astype(dtype)


def milliseconds(function, *given) -> float:
    """Returns the median of rounds of asynchronous calls."""

    def run(calls: int = 10) -> None:
        jax.block_until_ready([function(*given) for _ in range(calls)])

    run(1)  # compiles
    return 1000 / 10 * statistics.median(seconds_of(run) for _ in range(7))


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
    for part, each in itertools.product(AllTiles._fields, SWEPT) if sweep else ():
        tiles = tiles_of(size, chip)._replace(**{part: each})
        yield f"{part} {tuple(each)}", functools.partial(_with_tiles, rate=rate, tiles=tiles, **how)


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
        except jax.errors.JaxRuntimeError as error:  # tiles that do not fit the chip
            print(f"| {shape} | {name} | {str(error)[:100]!r} |", flush=True)
            continue
        rates = [1e-9 * times * flops / ms for times, ms in ((1, forward), (3.5, both))]
        print(f"| {shape} | {name} | {forward:.3f} | {both:.3f} | {rates[0]:.0f} | {rates[1]:.0f} |", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sweep", action="store_true", help="also other tiles, of one kernel at a time")
    parser.add_argument("--only", type=int, help="the number of a shape to time")
    options = parser.parse_args()
    chip = jax.devices()[0].device_kind
    print(f"{chip}, JAX {jax.__version__}")
    print("| shape | way | forward, ms | both, ms | forward, TFLOP/s | both, TFLOP/s |\n|---|---|---|---|---|---|")
    for number, shape in enumerate(TIMED):
        if options.only in (None, number):
            measure(chip, shape, options.sweep)


if __name__ == "__main__":
    main()
