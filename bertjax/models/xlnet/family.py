"""XLNet (Yang et al. 2019): relative positions, relative segment encodings, and two-stream attention.

The second stream predicts tokens in a random order of factorization. [CLS] is the last token of a text.
"""

from collections.abc import Sequence
from typing import TYPE_CHECKING

from bertjax.config.model_config import Compute
from bertjax.models.family import (
    ExposesAttention,
    HuggingFaceFamily,
    LmType,
    ModelFamily,
    NamesSpecialTokens,
    Recurrent,
    TwoStreamAttention,
    possible_vocab_sizes,
)
from bertjax.models.xlnet.config import XlnetConfig
from bertjax.text.tokenizer import XLNET

if TYPE_CHECKING:
    from bertjax.nn.encoder_model import EncoderModel
    from bertjax.nn.heads import WordHead


class XlnetFamily(ModelFamily, Recurrent, TwoStreamAttention, ExposesAttention, NamesSpecialTokens, HuggingFaceFamily):
    """XLNet."""

    config_class = XlnetConfig
    supports_packing = True
    has_kernels = False
    model_types = ("xlnet",)
    special_tokens = XLNET

    def build(self, config: XlnetConfig, compute: Compute) -> "EncoderModel":
        """Returns the encoder, an `XlnetModel`."""
        from bertjax.models.xlnet.model import XlnetModel

        return XlnetModel(config, compute)

    def lm_type(self, config: XlnetConfig) -> LmType:
        """Returns the task of language modelling, see `ModelFamily.lm_type`."""
        return "permuted"

    def word_head(self, config: XlnetConfig) -> "WordHead":
        """Returns the decoder with a bias, without a transform."""
        from bertjax.nn.heads import WordHead

        return WordHead(None, tied=config.tie_word_embeddings)

    def forward_flops(self, config: XlnetConfig, length: int) -> int:
        """Returns the FLOPs of the layers for one row, see `ModelFamily.forward_flops`."""
        hidden = config.hidden_size
        keys_and_values = 2 * 2 * length * hidden * hidden
        return config.num_hidden_layers * keys_and_values + self.query_flops(config, length, length)

    def query_flops(self, config: XlnetConfig, length: int, queries: int) -> int:
        """Returns the FLOPs of `queries` hidden states that attend to a row, see `TwoStreamAttention.query_flops`.

        The projection of the distance embeddings is not included, because all rows of a batch share it.
        """
        hidden, inner = config.hidden_size, config.intermediate_size
        per_token = 2 * hidden * hidden + 2 * hidden * inner  # query, output; two feed-forward matrices
        # Content scores; position scores for distances to both sides; weighted values.
        attention = (length + 2 * length + length) * hidden
        return 2 * config.num_hidden_layers * queries * (per_token + attention)

    def infer_config(self, params: dict) -> dict[str, Sequence] | None:
        """Returns the config fields that params imply, see `ModelFamily.infer_config`."""
        kernels = params["bert"]["encoder"].get("layers", {})
        if "segment_bias" not in kernels:
            return None
        layers, hidden, heads, _ = kernels["attention"]["query"]["kernel"].shape
        return {
            "vocab_size": possible_vocab_sizes(params),
            "hidden_size": (hidden,),
            "num_hidden_layers": (layers,),
            "num_attention_heads": (heads,),
            "intermediate_size": (kernels["intermediate"]["kernel"].shape[-1],),
        }


FAMILY = XlnetFamily()
