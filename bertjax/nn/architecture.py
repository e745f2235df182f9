"""The architecture of a Transformer encoder: one typed object for each choice.

A family composes an `Architecture` from these objects. `TransformerModel` builds the modules.
"""

import dataclasses

from bertjax.nn.attention import Attention, AttentionChoices, AttentionModule
from bertjax.nn.embeddings import Embeddings
from bertjax.nn.feed_forward import FeedForward
from bertjax.nn.heads import DenseTransform, Pooling, PoolingMode, Transform, TwoLayerTransform, WordHead
from bertjax.nn.layers import Layer, Layers, PostNorm, PreNorm, Residual, SandwichNorm
from bertjax.nn.norm import LayerNorm, Norm, RMSNorm
from bertjax.nn.positions import (
    Alibi,
    LearnedPositions,
    LinearScaling,
    Llama3Scaling,
    PositionEmbeddings,
    RelativeBias,
    Rotary,
    RotaryScaling,
    ScoreBias,
    SinusoidalPositions,
    YarnScaling,
)


@dataclasses.dataclass(frozen=True)
class Architecture:
    """The choices of an encoder and of its heads. Equal architectures compare equal.

    Attributes:
      embeddings: the embeddings.
      layers: the layers, and the norm after the last layer.
      pooling: the pooled output.
      word_head: the head that predicts words.
      score_bias: a term of the attention scores that all layers share; None: no term.
    """

    embeddings: Embeddings
    layers: Layers
    pooling: Pooling
    word_head: WordHead
    score_bias: ScoreBias | None = None

    def flops(self, embedding_size: int, hidden: int, length: int) -> int:
        """Returns the FLOPs of the encoder for one row.

        Args:
          embedding_size: the size of word embeddings.
          hidden: the size of hidden states.
          length: the number of tokens in the row.
        """
        projection = 2 * length * embedding_size * hidden if self.embeddings.projects else 0
        return projection + self.layers.flops(hidden, length)


__all__ = [
    "Alibi",
    "Architecture",
    "Attention",
    "AttentionChoices",
    "AttentionModule",
    "DenseTransform",
    "Embeddings",
    "FeedForward",
    "Layer",
    "LayerNorm",
    "Layers",
    "LearnedPositions",
    "LinearScaling",
    "Llama3Scaling",
    "Norm",
    "Pooling",
    "PoolingMode",
    "PositionEmbeddings",
    "PostNorm",
    "PreNorm",
    "RMSNorm",
    "RelativeBias",
    "Residual",
    "Rotary",
    "RotaryScaling",
    "SandwichNorm",
    "ScoreBias",
    "SinusoidalPositions",
    "Transform",
    "TwoLayerTransform",
    "WordHead",
    "YarnScaling",
]
