"""Tagging with the feature-based approach (Devlin et al. 2019, section 5.3): a BiLSTM on top of a frozen BERT."""

import dataclasses
import functools

from bertjax.config.limits import at_least_one, one_of
from bertjax.finetuning.task import Dataset, FineTuningTask
from bertjax.finetuning.tasks import ner
from bertjax.inference import output_layers
from bertjax.inference.output_layers import OutputLayer
from bertjax.models import families
from bertjax.models.heads import BertForFeatureBasedTagging, lstm_flops, model_flops
from bertjax.nn.layer_pooling import HIDDEN_STATES, TABLE_7, check_layers
from bertjax.text.tokenizer import Tokenizer

ARCHITECTURE = "BertForFeatureBasedTagging"  # transformers has no such class


def load(config, tokenizer: Tokenizer) -> Dataset:
    """Loads the files of `finetuning.tasks.ner`. Raises `UserError` for missing or invalid files."""
    dataset = ner.load(config, tokenizer)
    return dataclasses.replace(dataset, output_layer=tagging(len(dataset.labels)))


def validate(config) -> None:
    ner.validate(config)
    one_of(config, "head.layers", tuple(HIDDEN_STATES))
    check_layers(config.head.layers, families.config_of(config), "config.head.layers")
    at_least_one(config, "head.lstm_size")


def tagging(labels: int) -> OutputLayer:
    """Like `output_layers.tagging`; `config.head` sets the model's `layers`, `lstm_size` and `lstm_layers`."""

    def flops(model: BertForFeatureBasedTagging, sequences: int, length: int) -> int:
        # BERT has no backward pass.
        return model_flops(model.config, sequences, length, 0) + 3 * lstm_flops(model, sequences, length)

    make_model = functools.partial(BertForFeatureBasedTagging, labels=labels)
    return dataclasses.replace(
        output_layers.tagging(labels),
        architecture=ARCHITECTURE,
        make_model=make_model,
        frozen=("bert",),
        flops=flops,
    )


TASK = FineTuningTask(
    architecture=ARCHITECTURE,
    inputs=ner.INPUTS,
    load=load,
    predict=functools.partial(ner.predict, output_layer=tagging),
    output_layer=functools.partial(ner.layer_of, output_layer=tagging),
    method="tag",
    validate=validate,
    adopt=ner.adopt,
    identity=("head.layers", "head.lstm_size", "head.lstm_layers", "data.join"),
    labelled=functools.partial(ner.labelled, output_layer=tagging),
    paper_sweep=f"layers={','.join(TABLE_7)}",
)
