"""Checks of a pre-training config, without files or devices.

An error names the field, the value, the expected value and the fix. `config.limits` holds the limits of single fields;
each field of `config.model` declares its limits with `config.model_config.field`. Objectives, families and optimizers
check their fields.
"""

import re

from ml_collections import ConfigDict

from bertjax.config.limits import PRETRAINING_LIMITS, require, value_of
from bertjax.config.lists import corpus_sources, mixture_of
from bertjax.config.stages import config_in, stages_of
from bertjax.models import families
from bertjax.models.family import Recurrent
from bertjax.objectives.validate import validate as validate_objectives
from bertjax.pretraining.validate_stages import validate_mask_split, validate_stages
from bertjax.text.tokenizer import KINDS
from bertjax.training.validate import validate_optimization, validate_shared_fields


def validate(config: ConfigDict, with_data: bool = True, is_adopted: bool = False) -> None:
    """Raises `UserError` if a pre-training config is invalid.

    Args:
      config: the whole config.
      with_data: whether to require the location of the data.
      is_adopted: with `adapt.model`, whether `config.model` already is the model of `init_checkpoint`.
    """
    validate_pretraining(config, with_data)
    validate_objectives(config, with_model=is_adopted or not config.adapt.model)
    validate_optimization(config)


def validate_pretraining(config: ConfigDict, with_data: bool = True) -> None:
    """Raises `UserError` if a pre-training config is invalid, without a check of the objectives and the optimizer.

    Args:
      config: the whole config.
      with_data: whether to require the location of the data.
    """
    require(config.task == "pretraining", "task", config.task, "must be 'pretraining' for this command")
    validate_shared_fields(config, PRETRAINING_LIMITS)
    language = config.data.language
    is_code = re.fullmatch("[a-z]{2,3}(-[a-z]+)*", language) is not None
    require(is_code, "data.language", language, "must be an ISO 639 code, such as 'en' or 'de'")
    validate_mask_split("data.masked_lm_split", config.data.masked_lm_split)
    _validate_adaptation(config, with_data)
    _validate_initialization(config)
    validate_stages(config, PRETRAINING_LIMITS)
    if config.data.stream:
        _validate_stream(config)
    for stage in stages_of(config):
        stage_config = config_in(config, stage)
        families.FAMILIES.get(config.model.family).validate(stage_config)
        if corpus_sources(config) or config.data.mix_when == "prepared":
            mixture_of(stage_config)
    _validate_evaluation(config)
    has_data = bool(config.data.records or config.branch_from or corpus_sources(config))
    remedy = "must name the text: files, a folder, a glob, gs://..., hf:NAME, tfds:NAME or pydoc; or set data.records"
    require(has_data or not with_data, "data.corpus", config.data.corpus, remedy)


def require_recurrent_memory(config: ConfigDict) -> None:
    """Raises `UserError` if the records are a stream (`data.stream`) and the family has no recurrent memory."""
    family = config.model.family
    has_memory = isinstance(families.FAMILIES.get(family), Recurrent)
    remedy = f"model.family = {family!r} has no recurrent memory; set a family such as 'transformer_xl', or set False"
    require(has_memory or not config.data.stream, "data.stream", config.data.stream, remedy)


def _validate_initialization(config: ConfigDict) -> None:
    """Checks `freeze_layers` and `recipe`, which depend on the initial params."""
    checkpoint, frozen = config.init_checkpoint, config.freeze_layers
    remedy = "must be 0 without a checkpoint, because frozen layers would stay random; set 0, or set init_checkpoint"
    require(bool(checkpoint) or not frozen, "freeze_layers", frozen, remedy)
    if config.recipe:
        remedy = "must be empty with a recipe, which trains from random params; use --config=adapt with a budget"
        require(not (checkpoint or config.adapt.model), "init_checkpoint", checkpoint, remedy)


def _validate_evaluation(config: ConfigDict) -> None:
    for field in ("memory_length", "clamp_length"):
        value, is_used = config.eval[field], config.data.stream and field in config.model
        remedy = f"needs data.stream=True and a model with model.{field}; set 0"
        require(is_used or not value or config.adapt.model, f"eval.{field}", value, remedy)
    patience, heldout_fraction = config.eval.patience, config.data.heldout_fraction
    remedy = f"must be above 0, because early stopping (eval.patience = {patience}) compares scores of held-out text"
    has_scores = heldout_fraction > 0 or bool(config.data.records) or not patience
    require(has_scores, "data.heldout_fraction", heldout_fraction, f"{remedy}; set 0.01, or set eval.patience=0")
    for text in config.eval.fill_masks:
        has_mask = isinstance(text, str) and "[MASK]" in text
        require(has_mask, "eval.fill_masks", text, "each text must contain [MASK]; add [MASK] to the text")


def _validate_stream(config: ConfigDict) -> None:
    if not config.adapt.model:  # Otherwise, the checkpoint determines the model.
        require_recurrent_memory(config)
    remedy = "must be False with data.stream=True, whose rows are full and hold one text each; set False"
    require(not config.packing, "packing", True, remedy)
    expected_values = {"next_sentence": "none", "masking": "dynamic", "dupe_factor": 1, "short_seq_prob": 0}
    for field, expected in expected_values.items():
        value = config.data[field]
        remedy = f"must be {expected} with data.stream=True, which cuts the text once, into full sequences"
        require(value == expected, f"data.{field}", value, f"{remedy}; set {expected}, or set data.stream=False")
    for stage in stages_of(config):
        field = f"stages.{stage.name}.{'ramp_from' if stage.grows else 'batch_size'}"
        remedy = f"must be batch_size = {config.batch_size} with data.stream=True, whose rows continue in the next step"
        require(stage.batch_size == config.batch_size, field, stage.batch_size, f"{remedy}; remove the field")


def _validate_adaptation(config: ConfigDict, with_data: bool) -> None:
    checkpoint, extend, adapt = config.init_checkpoint, config.tokenizer.extend, config.adapt
    for field, value in (
        ("tokenizer.extend", extend),
        ("adapt.model", adapt.model),
        ("adapt.positions", adapt.positions),
    ):
        remedy = "needs a checkpoint to adapt; set init_checkpoint to the workdir of a run, or to a Hugging Face folder"
        require(bool(checkpoint) or not value, field, value, remedy)
        remedy = "needs adapt.model=True, because only the model of init_checkpoint can grow; set adapt.model=True"
        require(adapt.model or not value, field, value, remedy)
    windows, corpus = config.eval.bits_windows, value_of(config, "data.corpus")
    remedy = f"eval.bits_windows = {windows} needs held-out text of a corpus; set data.corpus, or eval.bits_windows=0"
    require(bool(corpus_sources(config)) or not (with_data and windows), "data.corpus", corpus, remedy)
    kind = config.tokenizer.kind
    remedy = f"must be 0 with tokenizer.kind = {kind!r}, whose vocabulary is fixed; set 0"
    require(not extend or KINDS[kind].extends, "tokenizer.extend", extend, remedy)
    frozen, steps = config.freeze_layers, adapt.new_pieces_first
    remedy = f"must be 0 with tokenizer.extend = {extend}, because frozen embeddings cannot learn new tokens; set 0"
    require(not (extend and frozen), "freeze_layers", frozen, remedy)
    remedy = "must be 0 without new tokens; set 0, or set tokenizer.extend"
    require(bool(extend) or not steps, "adapt.new_pieces_first", steps, remedy)
