"""Tags of words by the feature-based approach (Devlin et al. 2019, section 5.3): BERT is frozen, a BiLSTM is learnt."""

import dataclasses
import functools

from bertjax.model.bert import BertForFeatureBasedTagging, forward_flops, lstm_flops
from bertjax.tasks import finetuning, ner
from bertjax.tasks.finetuning import Dataset, Objective
from bertjax.text.tokenizer import Tokenizer

ARCHITECTURE = "BertForFeatureBasedTagging"  # transformers has no such class


def load(config, tokenizer: Tokenizer) -> Dataset:
    """The files of `tasks.ner`. Raises `UserError` for what is missing or wrong in them."""
    dataset = ner.load(config, tokenizer)
    return dataclasses.replace(dataset, objective=tagging(len(dataset.labels)))


def tagging(labels: int) -> Objective:
    """As `finetuning.tagging`; the model's `layers`, `lstm_size` and `lstm_layers` are those of `config.head`."""

    def flops(model: BertForFeatureBasedTagging, sequences: int, length: int) -> int:
        # Nothing goes back through BERT.
        return forward_flops(model.config, sequences, length, 0) + 3 * lstm_flops(model, sequences, length)

    make_model = functools.partial(BertForFeatureBasedTagging, labels=labels)
    return dataclasses.replace(
        finetuning.tagging(labels), architecture=ARCHITECTURE, make_model=make_model, frozen=("bert",), flops=flops
    )
