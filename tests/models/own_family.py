"""A user-defined family in one file: a feed-forward layer over positions mixes tokens, in place of attention."""

import dataclasses

import flax.linen as nn
import jax.numpy as jnp

from bertjax.config.model_config import BertConfig, Compute, field
from bertjax.models.family import ModelFamily, infer_embeddings_config
from bertjax.nn.activations import ACTIVATIONS
from bertjax.nn.dense import Dense
from bertjax.nn.encoder_model import EncoderModel
from bertjax.nn.norm import layer_norm
from bertjax.nn.ops.dropout import dropout, fold_in


@dataclasses.dataclass(frozen=True)
class MixerConfig(BertConfig):
    """The config of BERT with one additional field."""

    family: str = field("mixer", "form")
    mixing_act: str = field("gelu", "form", choices=("gelu", "relu"))


class Mixer(nn.Module):
    """Layers of x + W activation(norm(x)) over positions; padding is mixed in as zeros."""

    config: MixerConfig
    compute: Compute

    @nn.compact
    def __call__(self, x, segments, dropout_keys=None, *, every_layer=False):
        config, length, states = self.config, x.shape[1], []
        most, is_token = config.max_position_embeddings, (segments > 0)[..., None]
        for layer in range(config.num_hidden_layers):
            mix = Dense(config, self.compute, (most,), (most,), (None, None), name=f"mix_{layer}")
            read = layer_norm(config, self.compute, f"norm_{layer}")(x)
            read = jnp.swapaxes(jnp.where(is_token, ACTIVATIONS[config.mixing_act](read), 0), 1, 2)
            mixed = mix(jnp.pad(read, ((0, 0), (0, 0), (0, most - length))))[..., :length]
            keys = fold_in(dropout_keys, layer + 1)
            x = x + dropout(jnp.swapaxes(mixed, 1, 2), config.hidden_dropout_prob, keys)
            states.append(x)
        return jnp.stack(states) if every_layer else x


class MixerModel(EncoderModel):
    def make_layers(self):
        return Mixer(self.config, self.compute)


class MixerFamily(ModelFamily):
    config_class = MixerConfig

    def build(self, config, compute):
        return MixerModel(config, compute)

    def forward_flops(self, config, length):
        return 2 * config.num_hidden_layers * config.hidden_size * length**2

    def infer_config(self, params):
        layers = sum(name.startswith("mix_") for name in params["bert"]["encoder"])
        return infer_embeddings_config(params) | dict(num_hidden_layers=(layers,)) if layers else None


FAMILY = MixerFamily()
