"""MPNet (Song et al. 2020): BERT without token types, with a relative position bias that all layers share."""

import dataclasses
from typing import TYPE_CHECKING, Any

from bertjax.models.bert.family import EncoderLayersFamily
from bertjax.models.family import HuggingFaceFamily, PositionCompensation
from bertjax.models.mpnet.config import MPNetConfig

if TYPE_CHECKING:
    from bertjax.nn.architecture import Architecture


class MPNetFamily(EncoderLayersFamily, HuggingFaceFamily, PositionCompensation):
    """MPNet."""

    config_class = MPNetConfig
    has_kernels = False
    model_types = ("mpnet",)

    def architecture(self, config: Any) -> "Architecture":
        """Returns BERT with a relative position bias, and with the dropout of RoBERTa before the pooler."""
        from bertjax.nn.positions import RelativeBias

        bert = super().architecture(config)
        return dataclasses.replace(
            bert,
            score_bias=RelativeBias(config.relative_attention_num_buckets, config.relative_attention_max_distance),
            pooling=dataclasses.replace(bert.pooling, dropout=config.pooled_dropout_prob),
        )


FAMILY = MPNetFamily()
