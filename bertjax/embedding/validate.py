"""Checks of the fields of the task `embed`."""

import ml_collections
from ml_collections import ConfigDict

from bertjax.config.defaults import fine_tuning_config
from bertjax.config.limits import one_of, require
from bertjax.embedding.datasets import SECTION, dev_set, training_sets
from bertjax.embedding.forms import JUDGES
from bertjax.embedding.head import widths_of_loss


def validate(config: ConfigDict) -> None:
    """Raises `UserError` for invalid values of the fields that only this task has."""
    one_of(config, "head.pooling", ("mean", "cls", "last"))
    one_of(config, "head.dense_act", ("none", "tanh"))
    dense, loss = config.head.dense, config.loss
    require(dense >= 0, "head.dense", dense, "must be the width of a dense layer, or 0 for none")
    require(loss.temperature > 0, "loss.temperature", loss.temperature, "must be above 0")
    require(0 < loss.margin <= 2, "loss.margin", loss.margin, "must be above 0 and at most 2: a cosine's range")
    widths_of_loss(config)
    require(
        config.batch_size > 1,
        "batch_size",
        config.batch_size,
        "must be at least 2: the loss compares the examples of a batch",
    )
    _validate_sets(config)
    _validate_teacher(config)


def _validate_sets(config: ConfigDict) -> None:
    for name, fields in config.data.sets.items():
        fields = fields.to_dict() if isinstance(fields, ml_collections.ConfigDict) else fields
        is_set = isinstance(fields, dict) and fields.keys() == {*SECTION, "weight"}
        require(is_set, f"data.sets.{name}", fields, "must be text_set(path, ...), as in experiments/embed.py")
    for source in (*training_sets(config.data).values(), dev_set(config.data)):
        source.validate()
    dev = dev_set(config.data).form
    judging = f"single texts allow no evaluation; set data.dev.path, and data.dev.form to one of {', '.join(JUDGES)}"
    require(dev in JUDGES, "data.dev.form", dev, judging)


def _validate_teacher(config: ConfigDict) -> None:
    distill, default = config.distill, fine_tuning_config("").distill
    one_of(config, "distill.what", ("vectors", "scores"))
    none = "needs a teacher: set distill.teacher, or leave this field out"
    require(bool(distill.teacher) or distill.what == "vectors", "distill.what", distill.what, none)
    divides = "applies to logits, and the targets are vectors or scores; leave the field out"
    is_default = distill.temperature == default.temperature
    require(is_default, "distill.temperature", distill.temperature, divides)
    same = "single texts have no scores of pairs; set distill.what=vectors"
    is_scored = all(source.form != "sentences" for source in training_sets(config.data).values())
    require(not distill.teacher or is_scored or distill.what != "scores", "distill.what", distill.what, same)
