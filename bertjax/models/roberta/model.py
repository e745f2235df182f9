"""The modules of RoBERTa."""

import jax

from bertjax.models.bert.model import BertModel
from bertjax.nn.ops.dropout import dropout, fold_in


class RobertaModel(BertModel):
    """BERT with dropout before the pooler, as in the RobertaClassificationHead of transformers."""

    def pooler_input(self, hidden: jax.Array, dropout_keys: jax.Array | None) -> jax.Array:
        """Returns the hidden states with dropout."""
        # `heads.Classifier` uses the keys without `fold_in` for its dropout.
        keys = fold_in(fold_in(dropout_keys, self.config.num_hidden_layers + 1), 0)
        return dropout(hidden, self.config.pooled_dropout_prob, keys)
