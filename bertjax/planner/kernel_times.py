"""Counts the cycles of the model's TPU kernels, which the estimates of a compiled program leave out.

libtpu can analyse the instructions of each kernel. That takes a flag which must be set before libtpu is loaded, and
gigabytes for a whole step, so a process of its own compiles the kernels alone.
"""

import ctypes
import functools
import json
import os
import re
import signal
import subprocess
import sys
import tempfile
from collections.abc import Sequence

from bertjax.config.model_config import BertConfig
from bertjax.distributed.topology import Generation, accelerator
from bertjax.planner.hlo import Kernel, kernel_of

# What is analysed for each generation, and how many of its cores work as one device. libtpu analyses v5e and v6e only:
# the cycles of the others are those of the core that resembles theirs.
_ANALYSED = {"v5e": ("v5litepod-1", 1), "v4": ("v5litepod-1", 2), "v5p": ("v5litepod-1", 2), "v6e": ("v6e-1", 1)}
_ANALYSED["tpu7x"] = _ANALYSED["v6e"]

TOKENS = 8192  # tokens that are analysed: enough that the arrays do not fit on the chip

LONGEST_ANALYSED = 1024  # tokens of a row in a kernel that loops; the analysis of more takes minutes and gigabytes

PR_SET_PDEATHSIG = 1  # of Linux's prctl: the signal that a process gets when the thread that started it ends

_CYCLES = re.compile(r'"bundle_analysis_data":\{"estimated_cycles":"(\d+)"')


def kernel_seconds(kernels: Sequence[Kernel], generation: Generation, config: BertConfig, rows: int, length: int):
    """Returns the seconds that the kernels of a step take on one device: their cycles, or their memory traffic.

    Args:
      kernels: the kernels of the compiled step.
      rows: the rows of the batch in one call, on the device.
    """
    if not kernels:
        return 0.0
    name, cores = _ANALYSED[generation.libtpu_name]
    names = tuple(sorted({kernel.name for kernel in kernels}))
    rates = getattr(config, "attention_probs_dropout_prob", 0.0), config.hidden_dropout_prob
    cycles = _analyse(name, names, length, config.hidden_size, config.head_size, *rates)
    share = rows / _rows(length) / cores
    bandwidth = generation.hbm_bandwidth / generation.devices_per_chip
    return sum(
        kernel.times * max(share * cycles[kernel.name] / generation.clock, kernel.bytes / bandwidth)
        for kernel in kernels
    )


def _rows(length: int) -> int:
    """Rows that are analysed."""
    return max(1, TOKENS // length)


@functools.cache
def _analyse(*arguments) -> dict[str, int]:
    """Cycles of each kernel for `TOKENS` tokens: `_main` in a process of its own."""
    with tempfile.TemporaryDirectory() as folder:
        flags = f"{os.environ.get('LIBTPU_INIT_ARGS', '')} --xla_jf_dump_static_llo_profile_to={folder}"
        command = [sys.executable, "-m", "bertjax.planner.kernel_times", json.dumps(arguments)]
        environment = {**os.environ, "LIBTPU_INIT_ARGS": flags, "JAX_PLATFORMS": "cpu"}
        done = subprocess.run(command, env=environment, capture_output=True, text=True)
    if done.returncode:
        raise RuntimeError(f"libtpu could not analyse the kernels: {done.stderr[-2000:]}")
    return json.loads(done.stdout.splitlines()[-1])


def _main(
    name: str, kernels: list[str], length: int, hidden: int, size: int, attention_rate: float, rate: float
) -> None:
    """Prints the cycles of each kernel as JSON, those of loops as in rows of one segment, where they are longest."""
    import jax
    import jax.numpy as jnp
    from jax.sharding import SingleDeviceSharding

    from bertjax.nn.kernels.flash_attention import Flash, bound_rows, flash_backward, flash_forward, padded
    from bertjax.nn.kernels.fused_attention import Attention, attention_backward, attention_forward
    from bertjax.nn.kernels.fused_norm import fused_add_norm

    device = accelerator(name).devices()[0]
    sharding, chip, rows = SingleDeviceSharding(device), device.device_kind, _rows(length)

    def array(*shape, dtype=jnp.bfloat16):
        return jax.ShapeDtypeStruct(shape, dtype, sharding=sharding)

    def attend(planes, segments, words, of_context):
        attention = Attention(length, size, attention_rate, chip)
        context, log_sums = attention_forward(planes, segments, words, attention)
        return attention_backward(planes, segments, words, context, log_sums, of_context, attention)

    def normalize(x, update, bias, words, gradient):
        keys = jax.random.wrap_key_data(words[:, 0], impl="threefry2x32")
        normalized, pull_back = jax.vjp(
            lambda x, update, bias: fused_add_norm(x, update, bias, bias, bias, keys, rate, 1e-12, chip),
            x,
            update,
            bias,
        )
        return normalized, pull_back(gradient)

    def flash(planes, angles, segments, of_context, window):
        settings, bounds = Flash(segments.shape[1], size, window, chip), bound_rows(segments, window)
        context, log_sums = flash_forward(planes, angles, bounds, settings)
        return flash_backward(planes, angles, bounds, context, log_sums, of_context, settings)

    plane, words = array(rows, length, hidden), array(rows, 1, 2, dtype=jnp.uint32)
    segments = array(rows, length, dtype=jnp.int32)
    programs = []
    if any("add_norm" in kernel for kernel in kernels):
        programs.append((normalize, (plane, plane, array(hidden, dtype=jnp.float32), words, plane)))
    if "attention_forward" in kernels:
        programs.append((attend, (array(rows, 3, length, hidden), segments, words, plane)))
    loops = {}
    for window in {Flash.window_of(kernel) for kernel in kernels if kernel.startswith("flash_")}:
        whole = padded(length)
        part = min(whole, LONGEST_ANALYSED)
        count = TOKENS // part
        plane, angles = array(count, part, hidden), array(count, size, part, dtype=jnp.float32)
        arrays = (plane,) * 3, angles, array(count, part, dtype=jnp.int32), plane
        programs.append((functools.partial(flash, window=window), arrays))
        each = Flash(whole, size, window, chip)
        # The analysis counts one turn of a loop.
        loops |= {each.name(kernel): each.pieces * rows * whole / TOKENS for kernel in ("forward", "backward")}
    jax.config.update("jax_enable_compilation_cache", False)  # it would skip the analysis
    cycles = {}
    for program, arrays in programs:
        for line in jax.jit(program).lower(*arrays).compile().as_text().splitlines():
            if kernel := kernel_of(line):
                cycles[kernel.name] = int(_CYCLES.search(line)[1]) * loops.get(kernel.name, 1)
    # Of norms of some lengths, such as 192, the analysis says 0: they take as long as their traffic.
    assert all(cycles[kernel] for kernel in cycles if "add_norm" not in kernel), cycles
    print(json.dumps(cycles))


def _die_with_parent() -> None:
    """Ends this process with the process that waits for the analysis. libtpu exists for Linux only."""
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)


if __name__ == "__main__":
    _die_with_parent()
    _main(*json.loads(sys.argv[1]))
