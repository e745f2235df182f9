"""The config of a Jina Embeddings v3 model."""

import dataclasses

from bertjax.config.model_config import field, size
from bertjax.models.rotary_bert.config import RotaryBertConfig


@dataclasses.dataclass(frozen=True)
class JinaEmbeddingsV3Config(RotaryBertConfig):
    """The architecture of a Jina Embeddings v3. The defaults are jina-embeddings-v3."""

    vocab_size: int = size(250002)
    hidden_size: int = size(1024)
    num_hidden_layers: int = size(24, most=1000)
    num_attention_heads: int = size(16)
    intermediate_size: int = size(4096)
    attention_probs_dropout_prob: float = field(0.1, least=0, below=1)
    max_position_embeddings: int = field(8194, "behaviour", least=1, most=2**31 - 1)
    layer_norm_eps: float = field(1e-5, "behaviour", above=0, below=1)
    rope_theta: float = field(20_000.0, "behaviour", above=0)
    family: str = field("jina_embeddings_v3", "form")
