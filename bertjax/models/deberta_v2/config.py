"""The config of a DeBERTa-v2 or DeBERTa-v3 model."""

import dataclasses

from bertjax.config.model_config import ModelConfig, field, size


@dataclasses.dataclass(frozen=True)
class DebertaV2Config(ModelConfig):
    """The architecture of a DeBERTa-v2, DeBERTa-v3 or mDeBERTa. The defaults are DeBERTa-v3-base.

    Fields are named as in Hugging Face's config.json.
    """

    vocab_size: int = size(128100)
    hidden_size: int = size(768)
    num_hidden_layers: int = size(12, most=1000)
    num_attention_heads: int = size(12)
    intermediate_size: int = size(3072)
    hidden_act: str = field("gelu", "behaviour", choices=("gelu", "gelu_new", "relu"))
    hidden_dropout_prob: float = field(0.1, least=0, below=1)
    attention_probs_dropout_prob: float = field(0.1, least=0, below=1)
    pooler_dropout: float = field(0.0, least=0, below=1)  # before the dense layer of a classifier of texts
    # The maximum sequence length, and the default of max_relative_positions.
    max_position_embeddings: int = size(512)
    type_vocab_size: int = field(0, "size", least=0, most=2**31 - 1)
    initializer_range: float = field(0.02, above=0, below=1)
    layer_norm_eps: float = field(1e-7, "behaviour", above=0, below=1)
    position_biased_input: bool = field(False, "form")  # adds embeddings of absolute positions to word embeddings
    relative_attention: bool = field(True, "form")  # False: attention scores do not depend on the distance
    # The terms of attention scores. c2p: the query times the embedding of the distance. p2c: the key times the
    # embedding of the distance.
    pos_att_type: str = field("p2c|c2p", "form", choices=("", "c2p", "p2c", "p2c|c2p"))
    # True: the projections of queries and keys also project the embeddings of distances.
    share_att_key: bool = field(True, "form")
    # The number of buckets of distances to one side. -1 or 0: each distance has an embedding.
    position_buckets: int = field(256, "size", least=-1, most=2**31 - 1)
    # The largest distance to one side. -1 or 0: max_position_embeddings.
    max_relative_positions: int = field(-1, "size", least=-1, most=2**31 - 1)
    norm_rel_ebd: str = field("layer_norm", "form", choices=("none", "layer_norm"))  # of the embeddings of distances
    # The width of a convolution beside the first layer, an odd number of tokens; 0: no convolution.
    conv_kernel_size: int = field(0, "size", least=0, most=2**31 - 1)
    conv_act: str = field("tanh", "behaviour", choices=("tanh", "gelu", "gelu_new", "relu"))
    # The tensor names of the masked-LM head in transformers: `cls.predictions` (True) or `lm_predictions` (False).
    legacy: bool = field(True, "form")
    family: str = field("deberta_v2", "form")

    @property
    def position_terms(self) -> tuple[str, ...]:
        """The terms in `pos_att_type`."""
        return tuple(self.pos_att_type.split("|")) if self.pos_att_type else ()

    @property
    def largest_distance(self) -> int:
        """The largest distance to one side. Larger distances have the embedding of this distance."""
        return self.max_relative_positions if self.max_relative_positions > 0 else self.max_position_embeddings

    @property
    def distance_rows(self) -> int:
        """The number of embeddings of distances to both sides."""
        return 2 * (self.position_buckets if self.position_buckets > 0 else self.largest_distance)
