"""Growth of the time of attention with the length: local and global attention, forward and backward.

  python -m experiments.benchmarks.local_attention

One layer's attention of ModernBERT-base (12 heads of 64, 64 places to either side) in float32, without its projections,
on a row of one segment. A round times each length once; the table has medians.

Needs:    no TensorFlow
Hardware: CPU
Score:    see RESULTS.md
"""

import argparse
import functools
import statistics

import jax
import jax.numpy as jnp

from bertjax.config.model_config import Compute
from bertjax.nn.ops.plain_attention import plain_attention
from bertjax.nn.ops.tiles import tile_of
from bertjax.nn.ops.window_attention import window_attention
from experiments.benchmarks.timing import in_turns, seconds_of, spread, table_header, table_row

LENGTHS = (512, 1024, 2048, 4096, 8192)
HEADS, SIZE, WINDOW = 12, 64, 64


def step_of(length: int, is_local: bool):
    """Returns a function that computes the context and the gradient of one row, compiled, and returns the seconds."""
    compute = Compute(chip="cpu")
    segments = jnp.ones((1, length), jnp.int32)
    row, gradient = (jax.random.normal(jax.random.key(0), (1, length, *shape)) for shape in ((3, HEADS, SIZE), (768,)))
    if is_local:
        tile = tile_of(1, length, HEADS, 3 * WINDOW)
        attend = functools.partial(window_attention, segments=segments, half=WINDOW, compute=compute, tile=tile)
    else:
        tile = tile_of(1, length, HEADS)

        def attend(row):
            return plain_attention(row, segments, None, 0.0, compute, tile=tile)

    @jax.jit
    def step(row):
        context, pull_back = jax.vjp(attend, row)
        return context, pull_back(gradient)

    def run():
        jax.block_until_ready(step(row))

    run()
    return functools.partial(seconds_of, run)


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=7)
    rounds = parser.parse_args().rounds
    steps = {(length, is_local): step_of(length, is_local) for length in LENGTHS for is_local in (True, False)}
    times = in_turns(steps, rounds)
    print(table_header(["length", "local, ms", "ns a token", "global, ms", "ns a token"]))
    for length in LENGTHS:
        cells = [f"{length:,}"]
        for is_local in (True, False):
            seconds = times[length, is_local]
            cells.append(spread([1e3 * value for value in seconds], 1))
            cells.append(f"{1e9 * statistics.median(seconds) / length:,.0f}")
        print(table_row(cells))


if __name__ == "__main__":
    main()
