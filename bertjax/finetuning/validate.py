"""Checks of a config of fine-tuning."""

import math

import ml_collections

from bertjax.config import budget
from bertjax.config.defaults import fine_tuning_config
from bertjax.config.limits import BELOW_ONE, FINE_TUNING_LIMITS, at_least_one, require, within
from bertjax.inference import tasks
from bertjax.training.validate import validate_optimization, validate_shared_fields


def validate(config: ml_collections.ConfigDict, with_data: bool = True) -> None:
    """Raises `UserError` if a config of fine-tuning is invalid. Does not read files, and does not use devices.

    Args:
      config: the config.
      with_data: whether to require the location of the data.
    """
    task = tasks.get(config.task)
    validate_fine_tuning(config, with_data)
    task.validate(config)
    validate_optimization(config)


def validate_fine_tuning(config: ml_collections.ConfigDict, with_data: bool = True) -> None:
    """Raises `UserError` if a field that all fine-tuning tasks share is invalid, see `validate`."""
    validate_shared_fields(config, FINE_TUNING_LIMITS)
    one = f'applies to sweeps only; for a single run also set --config.sweep="seed={config.seed}"'
    require(bool(config.sweep) or not config.restarts, "restarts", config.restarts, one)
    single = "is for single runs; set epochs for the trials of a sweep, or leave out sweep"
    require(not (config.sweep and config.budget), "budget", config.budget, single)
    tokens = "fine-tuning takes a time, such as 20min"
    is_time = not config.budget or math.isfinite(budget.parse_budget(config.budget).seconds)
    require(is_time, "budget", config.budget, tokens)
    lstm_size = config.head.get("lstm_size", 0)
    require(lstm_size >= 0, "head.lstm_size", lstm_size, "must be at least 1, or 0 for no BiLSTM")
    if "lstm_layers" in config.head:
        at_least_one(config, "head.lstm_layers")
        more = "lstm_layers needs a BiLSTM: also set head.lstm_size"
        require(config.head.lstm_layers == 1 or lstm_size > 0, "head.lstm_layers", config.head.lstm_layers, more)
    within("head.label_smoothing", config.head.get("label_smoothing", 0.0), **BELOW_ONE)
    both = "cannot be combined with head.class_weights; leave one of the two out"
    weights = config.head.get("class_weights", "")
    require(not (config.distill.teacher and weights), "distill.teacher", config.distill.teacher, both)
    # With other targets than vectors, the data of the task `embed` can contain the scores of a teacher.
    has_targets = config.distill.teacher or config.distill.get("what", "vectors") != "vectors"
    for field in ("temperature", "weight"):
        is_used = has_targets or config.distill[field] == fine_tuning_config("").distill[field]
        none = "needs a teacher: set distill.teacher, or leave this field out"
        require(bool(is_used), f"distill.{field}", config.distill[field], none)
    for field in ("alpha", "dropout", "targets"):
        is_used = config.lora.rank or config.lora[field] == fine_tuning_config("").lora[field]
        none = "needs low-rank updates: set lora.rank, or leave this field out"
        require(bool(is_used), f"lora.{field}", config.lora[field], none)
    targets = config.lora.targets
    is_named = not config.lora.rank or all(map(str.strip, targets.split(",")))
    require(is_named, "lora.targets", targets, "must name kernels, such as query,value, or attention, or all-linear")
    whole = "sequences cannot share a row with a BiLSTM (head.lstm_size); set False"
    require(not (config.packing and lstm_size), "packing", config.packing, whole)
    if with_data:
        require(bool(config.data.path), "data.path", config.data.path, "must name the data: a folder, or tfds:NAME")
        require(
            bool(config.init_checkpoint),
            "init_checkpoint",
            config.init_checkpoint,
            "must be a checkpoint: the workdir of a run, a Hugging Face folder, or bert_model.ckpt of Google",
        )
