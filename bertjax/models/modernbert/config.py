"""The config of a ModernBERT model."""

import dataclasses
from typing import ClassVar

from bertjax.config.model_config import ModelConfig, field, size


@dataclasses.dataclass(frozen=True)
class ModernBertConfig(ModelConfig):
    """The architecture of a ModernBERT.

    Fields that `BertConfig` also has have the same names. Other fields are named as in Hugging Face's config.json.
    """

    vocab_size: int = size(50368)
    hidden_size: int = size(768)
    num_hidden_layers: int = size(22, most=1000)
    num_attention_heads: int = size(12)
    intermediate_size: int = size(1152)  # the output size of the gate; the input projection has twice this size
    hidden_act: str = field("gelu", "behaviour", choices=("gelu", "gelu_new", "relu"))
    attention_output_dropout_prob: float = field(0.1, least=0, below=1)  # the only dropout of the encoder
    classifier_dropout: float = field(0.0, least=0, below=1)
    # The maximum sequence length. No param depends on this field.
    max_position_embeddings: int = field(8192, "behaviour", least=1, most=2**31 - 1)
    initializer_range: float = field(0.02, above=0, below=1)
    layer_norm_eps: float = field(1e-5, "behaviour", above=0, below=1)
    # Layers 0, n, 2 n, ... attend to all tokens. Other layers attend to tokens at a distance of at most
    # local_attention / 2.
    global_attn_every_n_layers: int = field(3, "form", least=1, most=1000)
    local_attention: int = field(128, "behaviour", least=2, most=2**31 - 1)
    global_rope_theta: float = field(160_000.0, "behaviour", above=0)
    local_rope_theta: float = field(10_000.0, "behaviour", above=0)
    global_rope_scaling: str = field("", "behaviour")  # see `models.rope`
    local_rope_scaling: str = field("", "behaviour")
    # cls: pools the state of [CLS]. mean: pools the mean state.
    classifier_pooling: str = field("cls", choices=("cls", "mean"))
    glu: bool = field(True, "form")  # True: gated feed-forward networks (GeGLU); False: as in BERT
    # Whether dense layers and norms have biases. Heads always have a bias.
    bias: bool = field(False, "form")
    family: str = field("modernbert", "form")

    type_vocab_size: ClassVar[int] = 1

    @property
    def hidden_dropout_prob(self) -> float:
        """The dropout rate before a head. The modules in `nn/` read this name."""
        return self.classifier_dropout

    @property
    def output_init_scale(self) -> float:
        """The factor on the initial values of the output projections, as in GPT-2 (Radford et al. 2019)."""
        return (2 * self.num_hidden_layers) ** -0.5

    @property
    def window(self) -> int:
        """The maximum distance in tokens between a query and a key in local layers."""
        return self.local_attention // 2

    def is_global(self, layer: int) -> bool:
        """Returns whether layer number `layer`, from 0, attends to all tokens."""
        return layer % self.global_attn_every_n_layers == 0


@dataclasses.dataclass(frozen=True)
class ProjectedModernBertConfig(ModernBertConfig):
    """A ModernBERT whose embedding size differs from the hidden size."""

    embedding_size: int = size(768)
