"""The implementations of self-attention: kernels for TPUs and GPUs, and plain operations for all chips.

`implementation_of` returns the first implementation that supports a call:

| implementation | chip | dropout | rotation | window | causal | score bias | soft cap | mask |
|---|---|---|---|---|---|---|---|---|
| `MaskedOperations` | all | yes | yes | no | no | yes | yes | yes |
| `GpuKernel` | GPU | yes | yes | yes | yes, without window | no | no | no |
| `ShortTpuKernel` | TPU | yes | no | no | yes | no | no | no |
| `FlashTpuKernel` | TPU | no | required | yes | no | no | no | no |
| `BlocksOfWindows` | all | no | yes | required | no | no | no | no |
| `PlainOperations` | all | yes | yes | yes | yes | yes | yes | no |
"""

import abc
from typing import Any, NamedTuple

import flax.linen as nn
import jax.numpy as jnp
from jax import Array

from bertjax.config.model_config import Compute
from bertjax.nn.kernels import triton
from bertjax.nn.kernels.flash_attention import can_flash, flash_attention
from bertjax.nn.kernels.fused_attention import LONGEST, fused_attention
from bertjax.nn.kernels.gpu_attention import can_attend_on_gpu, gpu_attention
from bertjax.nn.kernels.pallas import LANES, has_kernels, on_one_device, parts_along
from bertjax.nn.ops.plain_attention import masked_attention, plain_attention
from bertjax.nn.ops.rotary import Rotation
from bertjax.nn.ops.tiles import Tile, tile_of
from bertjax.nn.ops.window_attention import window_attention

BLOCKS = 6  # windows of the shortest text for which blocks are faster than all scores and a mask


class AttentionCall(NamedTuple):
    """The inputs of an implementation, and the features that it needs.

    Attributes:
      compute: the dtypes and the chip.
      preference: auto: the first implementation that supports the call; xla: no kernel; fused: like auto, and
        `ShortTpuKernel` also on CPUs.
      x: the input of the projections `[batch, length, hidden]`.
      segments: `[batch, length]`. Tokens attend within their segment, whose tokens are consecutive.
      heads: the number of heads.
      size: the size of a head.
      projects_in_kernel: whether a kernel may compute the projections, from `kernel` and `bias`. False if queries and
        keys are normalized or scaled after the projections, or if a low-rank update has dropout.
      rotation: the rotation of queries and keys; None: no rotation.
      keys: `[batch]` for the dropout of the probabilities; None: no dropout.
      rate: the dropout rate of the probabilities.
      causal: tokens attend to earlier tokens and to themselves.
      window: the largest distance to a token, to either side; None: any distance.
      bias: a term of the scores, float32 `[heads, queries, keys]`, or with a mask `[batch, heads, queries, keys]`;
        None: no term.
      soft_cap: the scores are `soft_cap * tanh(scores / soft_cap)`; None: no cap.
      mask: booleans `[batch, queries, keys]`, see `nn.attention.SharedInputs`; None: tokens attend within segments.
    """

    compute: Compute
    preference: str
    x: Array
    segments: Array
    heads: int
    size: int
    projects_in_kernel: bool
    rotation: Rotation | None
    keys: Array | None
    rate: float
    causal: bool
    window: int | None
    bias: Array | None
    soft_cap: float | None
    mask: Array | None = None

    @property
    def length(self) -> Any:
        """The number of tokens in a row, which is symbolic in a program for any length (`jax.export`)."""
        return self.x.shape[1]

    def tile(self, keys: int | None = None) -> Tile | None:
        """Returns the tile for `keys` keys of a query; None: all at a time. Devices would have to exchange tiles."""
        if self.compute.chip != "cpu" or not on_one_device():
            return None
        return tile_of(self.x.shape[0], self.length, self.heads, keys)


class Projections(abc.ABC):
    """The projections of an attention layer, which an implementation computes or passes to a kernel."""

    @abc.abstractmethod
    def states(self) -> Array:
        """Returns queries, keys (both rotated) and values `[batch, length, 3, heads, size]`."""

    @abc.abstractmethod
    def params(self) -> tuple[Array, Array | None]:
        """Returns the kernel `[hidden, 3, heads, size]` in the dtype of activations, and the bias or None."""


class AttentionImplementation(abc.ABC):
    """One implementation."""

    @abc.abstractmethod
    def supports(self, call: AttentionCall) -> bool:
        """Returns whether the implementation has all features that a call needs, on the chip of the call."""

    @abc.abstractmethod
    def __call__(self, call: AttentionCall, projections: Projections) -> Array:
        """Returns the context `[batch, length, heads * size]`."""


class GpuKernel(AttentionImplementation):
    """The kernel for GPUs, with dropout, causal masks and windows."""

    def supports(self, call: AttentionCall) -> bool:
        """Returns whether the GPU has the kernel for the sizes."""
        has_features = call.bias is None and call.soft_cap is None and not (call.causal and call.window is not None)
        return has_features and call.preference != "xla" and can_attend_on_gpu(call.compute, call.length, call.size)

    def __call__(self, call: AttentionCall, projections: Projections) -> Array:
        """Returns the context."""
        settings: dict[str, Any] = dict(chip=call.compute.chip, causal=call.causal, window=call.window)
        return gpu_attention(_sharded(projections.states(), call), call.segments, call.keys, call.rate, **settings)


class ShortTpuKernel(AttentionImplementation):
    """The kernel for TPUs that holds all scores of a row on chip, with dropout and causal masks."""

    def supports(self, call: AttentionCall) -> bool:
        """Returns whether the kernel supports the features, and has the sizes."""
        is_plain = call.rotation is None and call.window is None and call.bias is None and call.soft_cap is None
        return is_plain and call.projects_in_kernel and fuses(call)

    def __call__(self, call: AttentionCall, projections: Projections) -> Array:
        """Returns the context."""
        kernel, bias = projections.params()
        bias = jnp.zeros(kernel.shape[1:], kernel.dtype) if bias is None else bias
        settings = call.rate, call.compute.chip, call.compute.unroll, call.causal
        return fused_attention(call.x, kernel, bias, call.segments, call.keys, *settings)


def fuses(call: AttentionCall) -> bool:
    """Returns whether `ShortTpuKernel` supports the sizes of a call, and is wanted."""
    width = call.heads * call.size // parts_along("heads")  # of a device
    if call.length % LANES or call.length > LONGEST or width % LANES or LANES % call.size:
        return False
    is_wanted = call.preference == "fused" or (call.preference == "auto" and has_kernels(call.compute.chip))
    return is_wanted and not triton.is_supported(call.compute.chip)


class FlashTpuKernel(AttentionImplementation):
    """The kernel for TPUs that computes scores block by block, with rotations and windows."""

    def supports(self, call: AttentionCall) -> bool:
        """Returns whether the kernel supports the features, and has the sizes."""
        has_features = call.rotation is not None and call.bias is None and call.soft_cap is None and not call.causal
        return (
            has_features
            and call.keys is None
            and call.projects_in_kernel
            and call.preference != "xla"
            and has_kernels(call.compute.chip)
            and can_flash(call.length, call.heads * call.size, call.size)
        )

    def __call__(self, call: AttentionCall, projections: Projections) -> Array:
        """Returns the context."""
        assert call.rotation is not None
        kernel, bias = projections.params()
        return flash_attention(call.x, kernel, bias, call.rotation, call.segments, call.compute.chip, call.window)


class BlocksOfWindows(AttentionImplementation):
    """Plain operations on blocks of `window` queries. The cost grows with length times window."""

    def supports(self, call: AttentionCall) -> bool:
        """Returns whether the text is long, and the call needs a window only."""
        is_plain = call.keys is None and call.bias is None and call.soft_cap is None and not call.causal
        is_long = isinstance(call.length, int) and call.window is not None and call.length >= BLOCKS * call.window
        return is_plain and is_long

    def __call__(self, call: AttentionCall, projections: Projections) -> Array:
        """Returns the context."""
        assert call.window is not None
        states = _sharded(projections.states(), call)
        return window_attention(states, call.segments, call.window, call.compute, call.tile(3 * call.window))


class MaskedOperations(AttentionImplementation):
    """Plain operations on all scores, with a mask for each row."""

    def supports(self, call: AttentionCall) -> bool:
        """Returns whether the call has a mask. No other implementation reads the mask."""
        return call.mask is not None

    def __call__(self, call: AttentionCall, projections: Projections) -> Array:
        """Returns the context."""
        assert call.mask is not None
        states = nn.with_logical_constraint(projections.states(), ("batch", "length", None, "heads", "kv"))
        settings = call.rate, call.compute, call.soft_cap
        return masked_attention(states, call.mask, call.bias, call.keys, *settings)


class PlainOperations(AttentionImplementation):
    """Plain operations on all scores, with all features."""

    def supports(self, call: AttentionCall) -> bool:
        """Returns True."""
        return True

    def __call__(self, call: AttentionCall, projections: Projections) -> Array:
        """Returns the context."""
        return plain_attention(
            _sharded(projections.states(), call),
            call.segments,
            call.keys,
            call.rate,
            call.compute,
            call.causal,
            call.tile(),
            call.window,
            call.bias,
            call.soft_cap,
        )


def _sharded(states: Array, call: AttentionCall) -> Array:
    """Returns rotated states with a sharding. Projections without a rotation have the sharding of their kernel."""
    if call.rotation is None:
        return states
    return nn.with_logical_constraint(states, ("batch", "length", None, "heads", "kv"))


IMPLEMENTATIONS = (
    MaskedOperations(),
    GpuKernel(),
    ShortTpuKernel(),
    FlashTpuKernel(),
    BlocksOfWindows(),
    PlainOperations(),
)


def implementation_of(call: AttentionCall) -> AttentionImplementation:
    """Returns the first implementation that supports a call."""
    return next(implementation for implementation in IMPLEMENTATIONS if implementation.supports(call))
