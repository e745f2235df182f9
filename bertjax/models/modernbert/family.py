"""ModernBERT (Warner et al. 2024): rotary positions, pre-norm layers, and gated feed-forward networks.

Most layers have no biases. By default, two of three layers have sliding-window attention.
"""

from typing import TYPE_CHECKING, Any

import ml_collections

from bertjax.config.limits import require
from bertjax.models import rope
from bertjax.models.family import HuggingFaceFamily, ImportsParams, ProjectsEmbeddings
from bertjax.models.modernbert.config import ModernBertConfig, ProjectedModernBertConfig
from bertjax.models.transformer_family import TransformerFamily

if TYPE_CHECKING:
    from bertjax.nn.architecture import Architecture


class ModernBertFamily(TransformerFamily, ProjectsEmbeddings, ImportsParams, HuggingFaceFamily):
    """ModernBERT."""

    config_class = ModernBertConfig
    model_types = ("modernbert",)

    def architecture(self, config: ModernBertConfig) -> "Architecture":
        """Returns the choices of ModernBERT. The pooler is the prediction head of transformers."""
        from bertjax.nn import architecture as choose
        from bertjax.nn.heads import dense_transform

        norm = choose.LayerNorm(config.layer_norm_eps, config.bias)
        biases_and_scale: dict[str, Any] = dict(
            bias=config.bias, output_bias=config.bias, output_init_scale=config.output_init_scale
        )
        feed_forward = choose.FeedForward(
            config.intermediate_size, config.hidden_act, gated=config.glu, **biases_and_scale
        )

        global_rotary = rope.rotary_of(config.global_rope_theta, config.global_rope_scaling)
        local_rotary = rope.rotary_of(config.local_rope_theta, config.local_rope_scaling)

        def layer(number: int) -> choose.Layer:
            is_global = config.is_global(number)
            attention = choose.Attention(
                config.num_attention_heads,
                config.head_size,
                rotary=global_rotary if is_global else local_rotary,
                window=None if is_global else config.window,
                **biases_and_scale,
            )
            residual = choose.PreNorm(before_attention=number > 0)
            rate = config.attention_output_dropout_prob
            return choose.Layer(attention, feed_forward, norm, residual, rate, shares_keys=True)

        # The first layer is global. The next layers form groups of local layers and then a global layer.
        group = tuple(layer(1 + number) for number in range(config.global_attn_every_n_layers))
        mode = choose.PoolingMode.MEAN if config.classifier_pooling == "mean" else choose.PoolingMode.FIRST
        return choose.Architecture(
            choose.Embeddings(norm=norm, projects=config.projects_embeddings, projection_bias=config.bias),
            choose.Layers(config.num_hidden_layers, group, layer(0), norm=norm),
            pooling=choose.Pooling(dense_transform(config), mode, transforms_tokens=True),
            word_head=choose.WordHead(dense_transform(config)),
        )

    def validate(self, config: ml_collections.ConfigDict) -> None:
        """Checks that the attention window and the head size are even, and the scalings of rotary positions."""
        model = config.model
        for field in ("global_rope_scaling", "local_rope_scaling"):
            rope.validate_scaling(model[field], f"model.{field}", model[field.replace("scaling", "theta")])
        require(model.local_attention % 2 == 0, "model.local_attention", model.local_attention, "must be even")
        head = model.hidden_size // model.num_attention_heads
        remedy = f"must give an even head size for rotary positions, but hidden_size / num_attention_heads = {head}"
        require(head % 2 == 0, "model.hidden_size", model.hidden_size, remedy)

    def with_embedding_size(self, config: ModernBertConfig, size: int) -> ModernBertConfig:
        """Returns a `ProjectedModernBertConfig`, or the same config if it already has this embedding size."""
        fields = vars(config) | {"embedding_size": size}
        return config if size == config.embedding_size else ProjectedModernBertConfig(**fields)

    def import_params(self, params: dict) -> dict:
        """Returns params whose pooler is initialized from the dense layer and the norm of the masked-LM head."""
        if "masked_lm" not in params or "pooler" in params["bert"]:
            return params
        head = {name: params["masked_lm"][name] for name in ("dense", "norm")}
        return params | {"bert": params["bert"] | {"pooler": head}}


FAMILY = ModernBertFamily()
