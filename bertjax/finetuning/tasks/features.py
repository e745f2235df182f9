"""Tagging with the feature-based approach (Devlin et al. 2019, section 5.3): a BiLSTM on top of a frozen BERT."""

import dataclasses
from typing import Any

import flax.linen as nn
from ml_collections import ConfigDict

from bertjax.config.limits import at_least_one, one_of
from bertjax.config.model_config import BertConfig
from bertjax.finetuning.tasks.ner import Ner
from bertjax.inference.heads import Head, TaggingHead
from bertjax.models import families
from bertjax.models.heads import BertForFeatureBasedTagging, lstm_flops, model_flops
from bertjax.nn.layer_pooling import HIDDEN_STATES, TABLE_7, check_layers


@dataclasses.dataclass(frozen=True)
class FeatureBasedTaggingHead(TaggingHead):
    """A BiLSTM on a frozen encoder; `config.head` sets the fields `layers`, `lstm_size` and `lstm_layers`."""

    architecture = "BertForFeatureBasedTagging"  # transformers has no such class
    frozen = ("bert",)

    def make_model(self, config: BertConfig, **settings: Any) -> nn.Module:
        """Returns the module."""
        return BertForFeatureBasedTagging(config, labels=self.labels, **settings)

    def flops(self, model: nn.Module, rows: int, length: int) -> int:
        """Returns the model FLOPs of a training step; the encoder has no backward pass."""
        return model_flops(model.config, rows, length, 0) + 3 * lstm_flops(model, rows, length)


class Features(Ner):
    """Tagging of the words in CoNLL files with a frozen encoder."""

    architecture = FeatureBasedTaggingHead.architecture
    identity = ("head.layers", "head.lstm_size", "head.lstm_layers", "data.join")
    paper_sweep = f"layers={','.join(TABLE_7)}"

    def head_for(self, labels: int) -> Head:
        """Returns the head for a number of labels."""
        return FeatureBasedTaggingHead(labels)

    def validate(self, config: ConfigDict) -> None:
        """Raises `UserError` for invalid layers of the encoder or sizes of the BiLSTM."""
        super().validate(config)
        one_of(config, "head.layers", tuple(HIDDEN_STATES))
        check_layers(config.head.layers, families.config_of(config), "config.head.layers")
        at_least_one(config, "head.lstm_size")


TASK = Features()
