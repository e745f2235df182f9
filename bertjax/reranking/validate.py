"""Checks of the fields of the task `rerank`."""

from ml_collections import ConfigDict

from bertjax.config.defaults import fine_tuning_config
from bertjax.config.limits import one_of, require
from bertjax.reranking import sets
from bertjax.reranking.losses import validate_loss


def validate(config: ConfigDict) -> None:
    """Raises `UserError` for invalid values of the fields that only this task has."""
    validate_loss(config)
    one_of(config, "data.windows", ("", "max", "mean"))
    stride, negatives = config.data.doc_stride, config.loss.negatives
    require(stride >= 1, "data.doc_stride", stride, "must be at least 1: the tokens between the starts of two windows")
    require(negatives >= 0, "loss.negatives", negatives, "must be the number of in-batch negatives, or 0 for none")
    for source in (sets.training_set(config.data), sets.dev_set(config.data)):
        source.validate()
    _validate_teacher(config)


def _validate_teacher(config: ConfigDict) -> None:
    distill, default = config.distill, fine_tuning_config("").distill
    for field in ("temperature", "weight"):
        replaced = "has no effect: the teacher's scores replace the grades; set loss.temperature for loss.name=kl"
        require(not distill.teacher or distill[field] == default[field], f"distill.{field}", distill[field], replaced)
    grades = "needs grades of the data; choose mse, margin_mse, kl or another loss of lists for a teacher"
    has_grades = config.loss.name not in ("binary_cross_entropy", "multiple_negatives")
    require(not distill.teacher or has_grades, "loss.name", config.loss.name, grades)
