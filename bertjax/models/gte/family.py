"""GTE (Zhang et al. 2024, mGTE): BERT with rotary positions and gated feed-forward networks."""

from typing import TYPE_CHECKING

from bertjax.models.gte.config import GteConfig
from bertjax.models.rotary_bert.base_family import RotaryBertFamily

if TYPE_CHECKING:
    from bertjax.nn.architecture import FeedForward


class GteFamily(RotaryBertFamily):
    """GTE, the encoder of gte-multilingual-base and of snowflake-arctic-embed-m-v2.0."""

    config_class = GteConfig
    model_types = ("gte",)
    head_activation = "gelu"

    def feed_forward(self, config: GteConfig) -> "FeedForward":
        """Returns a gated network with dropout of the inner states, and a bias of the output."""
        from bertjax.nn.architecture import FeedForward

        return FeedForward(
            config.intermediate_size, config.hidden_act, gated=True, bias=False, dropout=config.hidden_dropout_prob
        )


FAMILY = GteFamily()
