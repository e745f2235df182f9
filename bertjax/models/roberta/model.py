"""The modules of RoBERTa."""

import jax

from bertjax.models.bert.model import BertModel
from bertjax.nn.ops.dropout import dropout, fold_in


class RobertaModel(BertModel):
    """BERT with dropout before the pooler, as in the RobertaClassificationHead of transformers."""

    def __call__(
        self,
        input_ids: jax.Array,
        segments: jax.Array,
        token_types: jax.Array,
        positions: jax.Array | None = None,
        dropout_keys: jax.Array | None = None,
        first_tokens: jax.Array | None = None,
    ) -> tuple[jax.Array, jax.Array]:
        """Returns hidden states and the pooled output, see `EncoderModel.__call__`."""
        hidden = self.encode(input_ids, segments, token_types, positions, dropout_keys=dropout_keys)
        # `heads.Classifier` uses the keys without `fold_in` for its dropout.
        keys = fold_in(fold_in(dropout_keys, self.config.num_hidden_layers + 1), 0)
        dropped = dropout(hidden, self.config.pooled_dropout_prob, keys)
        return hidden, self.pool(dropped, segments, first_tokens)
