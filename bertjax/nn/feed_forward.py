"""The feed-forward network of a Transformer layer (Vaswani et al. 2017, section 3.3; gated: Shazeer 2020)."""

import dataclasses
from typing import Any

import flax.linen as nn
from jax import Array

from bertjax.config.model_config import Compute, ModelConfig
from bertjax.nn.activations import ACTIVATIONS, activate
from bertjax.nn.dense import Dense
from bertjax.nn.kernels.gpu_activation import can_activate_on_gpu, gpu_activate
from bertjax.nn.kernels.pallas import has_kernels
from bertjax.nn.ops.dropout import dropout, fold_in

INNER = ("batch", "length", "mlp")


@dataclasses.dataclass(frozen=True)
class FeedForward:
    """Two dense layers with an activation between the layers.

    Attributes:
      size: the size of the inner states.
      activation: a key of `ACTIVATIONS`.
      gated: whether the inner states are the activation of one projection times another projection (GLU). The names of
        the variants are GeGLU for gelu and SwiGLU for silu.
      bias: whether the first dense layer has a bias.
      output_bias: whether the second dense layer has a bias.
      dropout: the dropout rate of the inner states.
      output_init_scale: multiplies the standard deviation of the initial values of the second dense layer.
      input_name: the name of the first dense layer in params. BERT has `intermediate`.
    """

    size: int
    activation: str
    gated: bool = False
    bias: bool = True
    output_bias: bool = True
    dropout: float = 0.0
    output_init_scale: float = 1.0
    input_name: str = "input"

    def __call__(
        self, config: ModelConfig, compute: Compute, x: Array, keys: Array | None
    ) -> tuple[Array, Array | None]:
        """Returns the product of the second dense layer, and the bias of this layer, which is not added yet.

        The dense layers belong to the module whose compact method calls this function.

        Args:
          config: the model config.
          compute: the dtypes and the chip.
          x: `[batch, length, hidden]`; the product has the same shape.
          keys: `[batch]` for dropout; None: no dropout.
        """
        hidden, wide = (config.hidden_size,), (self.size,)
        features, axes = ((2, *wide), ("embed", "projections", "mlp")) if self.gated else (wide, ("embed", "mlp"))
        inner = Dense(config, compute, hidden, features, axes, self.bias, name=self.input_name)
        settings = ("mlp", "embed"), self.output_bias, self.output_init_scale
        output = Dense(config, compute, wide, hidden, *settings, name="output")

        def project(output: Any, activated: Array) -> Array:
            if self.dropout:  # the output of the network has dropout with the keys themselves
                activated = dropout(activated, self.dropout, fold_in(keys, 0))
            return output.product(nn.with_logical_constraint(activated, INNER), keys)

        def activate_and_project(output: Any, inner: Array) -> Array:
            return project(output, ACTIVATIONS[self.activation](inner))

        if self.gated:
            return project(output, activate(inner(x, keys), self.activation, compute)), output.bias
        if can_activate_on_gpu(compute, x.shape[1], *wide):
            activated = gpu_activate(inner.product(x, keys), inner.bias, self.activation, compute.chip)
            return project(output, activated), output.bias
        if has_kernels(compute.chip):
            # The backward pass activates again: on TPUs this is faster than to write and read the result.
            activate_and_project = nn.remat(activate_and_project, prevent_cse=compute.unroll)
        return activate_and_project(output, inner(x, keys)), output.bias

    def flops_per_token(self, hidden: int) -> int:
        """Returns the FLOPs of the matrix products for one token with hidden states of a size."""
        return 2 * (3 if self.gated else 2) * hidden * self.size
