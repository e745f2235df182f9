"""Multi-head self-attention (Vaswani et al. 2017, section 3.2), restricted to tokens of the same segment."""

import flax.linen as nn
import jax
import jax.numpy as jnp

from bertjax.config import BertConfig
from bertjax.model.dropout import dropout


class Dense(nn.Module):
    """x W + b over the last `contracted` dimensions of x; `axes` are the logical axes of W, contracted ones first."""

    config: BertConfig
    dtype: jnp.dtype
    features: tuple[int, ...]
    axes: tuple[str | None, ...]
    contracted: int = 1

    @nn.compact
    def __call__(self, x):
        init = nn.initializers.truncated_normal(self.config.initializer_range)
        shape = x.shape[-self.contracted :] + self.features
        kernel = self.param("kernel", nn.with_logical_partitioning(init, self.axes), shape)
        bias_init = nn.with_logical_partitioning(nn.initializers.zeros, self.axes[self.contracted :])
        bias = self.param("bias", bias_init, self.features)
        return jnp.tensordot(x, kernel.astype(self.dtype), self.contracted) + bias.astype(self.dtype)


def layer_norm(config: BertConfig, dtype, **kwargs) -> nn.LayerNorm:
    """LayerNorm over the last axis; float32 statistics in two passes (a single pass loses precision)."""
    return nn.LayerNorm(
        epsilon=config.layer_norm_eps,
        dtype=dtype,
        use_fast_variance=False,
        scale_init=nn.with_logical_partitioning(nn.initializers.ones, ("embed",)),
        bias_init=nn.with_logical_partitioning(nn.initializers.zeros, ("embed",)),
        **kwargs,
    )


def same_segment(segments: jax.Array) -> jax.Array:
    """Attention mask: `[batch, length]` segments -> `[batch, 1, length, length]` booleans.

    Segment 0 is padding. Padding attends to padding, so that no row of the softmax is empty; no other token does.
    """
    return (segments[:, :, None] == segments[:, None, :])[:, None]


class SelfAttention(nn.Module):
    """softmax(Q K^T / sqrt(d)) V with dropout on the probabilities, then the output projection."""

    config: BertConfig
    dtype: jnp.dtype

    @nn.compact
    def __call__(self, x, segments, dropout_keys=None):
        """`x` `[batch, length, hidden]`, `segments` `[batch, length]` -> `[batch, length, hidden]`."""
        config = self.config
        heads, size = config.num_attention_heads, config.head_size
        project = Dense(config, self.dtype, (3, heads, size), ("embed", None, "heads", "kv"), name="query_key_value")
        query, key, value = jnp.moveaxis(project(x), 2, 0)
        query = nn.with_logical_constraint(query, ("batch", "length", "heads", "kv"))

        scores = jnp.einsum("bqhd,bkhd->bhqk", query, key, preferred_element_type=jnp.float32) / jnp.sqrt(size)
        scores = jnp.where(same_segment(segments), scores, jnp.finfo(jnp.float32).min)
        probs = jax.nn.softmax(scores).astype(self.dtype)
        probs = dropout(probs, config.attention_probs_dropout_prob, dropout_keys)
        context = jnp.einsum("bhqk,bkhd->bqhd", probs, value)

        return Dense(config, self.dtype, (config.hidden_size,), ("heads", "kv", "embed"), contracted=2, name="output")(
            context
        )
