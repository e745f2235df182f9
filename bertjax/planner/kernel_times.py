"""Counts the cycles of the TPU kernels of bertjax. The compiler has no estimates of the kernels.

libtpu can analyse the instructions of a kernel. The analysis needs a flag that must be set before libtpu is loaded, and
gigabytes of memory for a whole step. Therefore another process compiles the kernels alone.
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
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import jax
from jax.sharding import SingleDeviceSharding

from bertjax.config.model_config import ModelConfig
from bertjax.distributed.topology import Generation, accelerator
from bertjax.nn.kernels.flash_attention import Flash, bound_rows, flash_backward, flash_forward, length_in_blocks
from bertjax.nn.kernels.fused_attention import FusedAttention, attention_backward, attention_forward
from bertjax.nn.kernels.fused_norm import fused_add_norm
from bertjax.nn.kernels.shift import shift_on_chip
from bertjax.planner.hlo import Kernel, kernel_of

# {generation: (analysed accelerator, number of cores in a device)}. libtpu analyses v5e and v6e. The cycles of another
# generation are the cycles of the most similar core.
_ANALYSED = {"v5e": ("v5litepod-1", 1), "v4": ("v5litepod-1", 2), "v5p": ("v5litepod-1", 2), "v6e": ("v6e-1", 1)}
_ANALYSED["tpu7x"] = _ANALYSED["v6e"]

TOKENS = 8192  # the number of analysed tokens, whose arrays do not fit on the chip

LONGEST_ANALYSED = 1024  # tokens of a row in a kernel with a loop; longer rows take minutes and gigabytes

PR_SET_PDEATHSIG = 1  # of Linux's prctl: the signal that a process gets when the thread that started it ends

_CYCLES = re.compile(r'"bundle_analysis_data":\{"estimated_cycles":"(\d+)"')


def kernel_seconds(
    kernels: Sequence[Kernel], generation: Generation, config: ModelConfig, rows: int, length: int
) -> float:
    """Returns the seconds of the kernels of a step on one device.

    The time of a kernel is the time of the cycles, or the time of the memory traffic if this is longer.

    Args:
      kernels: the kernels of the compiled step.
      generation: the generation of the TPU.
      config: the model config.
      rows: the rows of the batch in one call, on the device.
      length: the sequence length.
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
    """Returns the number of analysed rows."""
    return max(1, TOKENS // length)


@functools.cache
def _analyse(*arguments: Any) -> dict[str, int]:
    """Returns the cycles of each kernel for `TOKENS` tokens, from `_main` in another process."""
    with tempfile.TemporaryDirectory() as folder:
        flags = f"{os.environ.get('LIBTPU_INIT_ARGS', '')} --xla_jf_dump_static_llo_profile_to={folder}"
        command = [sys.executable, "-m", "bertjax.planner.kernel_times", json.dumps(arguments)]
        environment = {**os.environ, "LIBTPU_INIT_ARGS": flags, "JAX_PLATFORMS": "cpu"}
        process = subprocess.run(command, env=environment, capture_output=True, text=True)
    if process.returncode:
        raise RuntimeError(f"libtpu could not analyse the kernels: {process.stderr[-2000:]}")
    cycles: dict[str, int] = json.loads(process.stdout.splitlines()[-1])
    return cycles


class _Analysis(NamedTuple):
    """The shapes of the kernels to analyse."""

    device: Any
    length: int
    hidden: int
    size: int  # the size of a head
    attention_rate: float
    rate: float

    def array(self, dtype: str, *shape: int) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(shape, dtype, sharding=SingleDeviceSharding(self.device))

    def attend(self, planes: jax.Array, segments: jax.Array, words: jax.Array, of_context: jax.Array) -> Any:
        attention = FusedAttention(self.length, self.size, self.attention_rate, self.device.device_kind)
        context, log_sums = attention_forward(planes, segments, words, attention)
        return attention_backward(planes, segments, words, context, log_sums, of_context, attention)

    def normalize(self, x: jax.Array, update: jax.Array, bias: jax.Array, words: jax.Array, gradient: jax.Array) -> Any:
        keys = jax.random.wrap_key_data(words[:, 0], impl="threefry2x32")

        def norm(x: jax.Array, update: jax.Array, bias: jax.Array) -> jax.Array:
            return fused_add_norm(x, update, bias, bias, bias, keys, self.rate, 1e-12, self.device.device_kind)

        normalized, pull_back = jax.vjp(norm, x, update, bias)
        return normalized, pull_back(gradient)

    def move_scores(self, by_distance: jax.Array, gradient: jax.Array) -> Any:
        moved, pull_back = jax.vjp(lambda scores: shift_on_chip(scores, self.device.device_kind), by_distance)
        return moved, pull_back(gradient)

    def flash(self, window: int | None, length: int) -> Flash:
        return Flash(length, self.size, window, self.device.device_kind)

    def attend_far(
        self, planes: Any, angles: jax.Array, segments: jax.Array, of_context: jax.Array, window: int | None
    ) -> Any:
        flash, bounds = self.flash(window, segments.shape[1]), bound_rows(segments, window)
        context, log_sums = flash_forward(planes, angles, bounds, flash)
        return flash_backward(planes, angles, bounds, context, log_sums, of_context, flash)

    def programs(self, kernels: Sequence[str]) -> Iterator[tuple[Callable[..., Any], tuple[Any, ...]]]:
        """Yields functions with the kernels, and the shapes of the arguments."""
        rows, array = _rows(self.length), self.array
        plane, words = array("bfloat16", rows, self.length, self.hidden), array("uint32", rows, 1, 2)
        if any("add_norm" in kernel for kernel in kernels):
            yield self.normalize, (plane, plane, array("float32", self.hidden), words, plane)
        if any(kernel.startswith("shift_") for kernel in kernels):
            heads = self.hidden // self.size
            by_distance = array("bfloat16", rows, heads, self.length, 2 * self.length)
            yield self.move_scores, (by_distance, array("bfloat16", rows, heads, self.length, self.length))
        if "attention_forward" in kernels:
            planes = array("bfloat16", rows, 3, self.length, self.hidden)
            yield self.attend, (planes, array("int32", rows, self.length), words, plane)
        part = min(length_in_blocks(self.length), LONGEST_ANALYSED)
        rows = TOKENS // part
        plane, angles = array("bfloat16", rows, part, self.hidden), array("float32", rows, self.size, part)
        for window in _windows(kernels):
            arrays = (plane,) * 3, angles, array("int32", rows, part), plane
            yield functools.partial(self.attend_far, window=window), arrays


def _windows(kernels: Sequence[str]) -> set[int | None]:
    return {Flash.window_of(kernel) for kernel in kernels if kernel.startswith("flash_")}


def _main(name: str, kernels: list[str], *shape: Any) -> None:
    """Prints the cycles of each kernel as JSON. Loops have the most iterations, as for rows with one segment."""
    analysis = _Analysis(accelerator(name).devices()[0], *shape)
    whole, turns = length_in_blocks(analysis.length), dict[str, float]()
    for window in _windows(kernels):  # the analysis counts one turn of a loop
        flash = analysis.flash(window, whole)
        share = _rows(analysis.length) * whole / TOKENS
        turns |= {flash.name(kernel): flash.pieces * share for kernel in ("forward", "backward")}
    jax.config.update("jax_enable_compilation_cache", False)  # a cached program is not analysed
    cycles = {}
    for program, arrays in analysis.programs(kernels):
        for line in (jax.jit(program).lower(*arrays).compile().as_text() or "").splitlines():
            if (kernel := kernel_of(line)) and (match := _CYCLES.search(line)):
                cycles[kernel.name] = int(match[1]) * turns.get(kernel.name, 1)
    # The analysis returns 0 for norms of some lengths, such as 192: their time is the time of the memory traffic.
    assert all(cycles[kernel] for kernel in cycles if "add_norm" not in kernel), cycles
    print(json.dumps(cycles))


def _die_with_parent() -> None:
    """Ends this process with the process that waits for the analysis. libtpu exists for Linux only."""
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)


if __name__ == "__main__":
    _die_with_parent()
    _main(*json.loads(sys.argv[1]))
