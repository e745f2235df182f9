"""The modules of ALBERT."""

from collections.abc import Callable
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp

from bertjax.models.albert.config import AlbertConfig
from bertjax.models.bert.model import BertModel
from bertjax.nn.encoder import LAYER_AXES, Encoder, EncoderLayer, recomputed, scan_layers
from bertjax.nn.ops.plain_attention import KeyValueCache


class AlbertModel(BertModel):
    """BERT with layers that share params."""

    config: AlbertConfig

    def make_layers(self) -> nn.Module:
        """Returns the layers."""
        return AlbertEncoder(self.config, self.compute)

    @nn.nowrap
    def params_by_layer(self, params: dict) -> dict:
        """Returns the params of all layers `[layers, ...]`, which repeat the params of a group."""
        repeats = self.config.layers_per_group
        return jax.tree.map(lambda x: jnp.repeat(x, repeats, axis=0), params["encoder"]["layers"])


class AlbertEncoder(Encoder):
    """The groups of layers. Params are stacked on an axis of `num_hidden_groups` elements."""

    config: AlbertConfig

    def make_layers(self, every_layer: bool, trains: bool) -> Callable[..., Any]:
        """Returns the layers as a scan over groups, see `Encoder.make_layers`."""
        groups = self.config.num_hidden_groups
        make = scan_layers(SharedLayers, groups, LAYER_AXES, self.compute, trains)
        layers = make(self.config, self.compute, every_layer, name="layers")

        def apply(x: jax.Array, numbers: jax.Array, cache: KeyValueCache | None, *shared: Any) -> tuple[jax.Array, Any]:
            grouped = jax.tree.map(lambda a: a.reshape(groups, -1, *a.shape[1:]), (numbers, cache))
            last, outputs = layers(x, *grouped, *shared)
            return last, jax.tree.map(lambda a: a.reshape(-1, *a.shape[2:]), outputs)

        return apply


class SharedLayers(EncoderLayer):
    """The layers of a group: a scan over layer numbers that reads the params of one layer.

    The dropout of a layer depends on the number of the layer, so that layers with shared params have different masks.
    """

    @nn.compact
    def __call__(self, x: jax.Array, numbers: jax.Array, *inputs: Any) -> tuple[jax.Array, Any]:
        """Returns x `[batch, length, hidden]` after the layers `numbers` `[layers]`, and the outputs of each layer.

        The caches in `inputs` are stacked on `[layers]`, see `EncoderLayer`.
        """
        _, _, dropout_keys, *_ = inputs
        trains = dropout_keys is not None
        repeated = nn.scan(
            recomputed(EncoderLayer.__call__, self.compute),
            variable_broadcast="params",
            split_rngs={"params": False},
            in_axes=LAYER_AXES,
            length=len(numbers),
            unroll=len(numbers) if self.compute.unroll and trains else 1,
        )
        return repeated(self, x, numbers, *inputs)
