"""The modules of RoBERTa."""

from bertjax.models.bert.model import BertModel
from bertjax.nn.ops.dropout import dropout, fold_in


class RobertaModel(BertModel):
    """BERT's, but in training what the pooler reads has dropout, too (transformers' RobertaClassificationHead)."""

    def __call__(self, input_ids, segments, token_types, positions=None, dropout_keys=None, first_tokens=None):
        """As `EncoderModel.__call__`."""
        hidden = self.encode(input_ids, segments, token_types, positions, dropout_keys=dropout_keys)
        # Those of a site of the classifier, whose own dropout has the number itself.
        keys = fold_in(fold_in(dropout_keys, self.config.num_hidden_layers + 1), 0)
        read = dropout(hidden, self.config.pooled_dropout_prob, keys)
        return hidden, self.pool(read, segments, first_tokens)
