"""Checks of a config of pre-training, without touching files or devices.

An error names the field, its value and the remedy. The limits of a field are in `config.limits`, or for `config.model`
with the field itself (`config.model_config.field`). An objective, a family and an optimizer check their own fields.
"""

import re

import ml_collections

from bertjax.config.limits import PRETRAINING_LIMITS, require, value_of
from bertjax.config.lists import corpus_sources, mixture_of
from bertjax.config.stages import config_in, stages_of
from bertjax.models import families
from bertjax.models.family import Recurrent
from bertjax.objectives.validate import validate as validate_objectives
from bertjax.pretraining.validate_stages import split_of_masks, validate_stages
from bertjax.text.tokenizer import KINDS
from bertjax.training.validate import validate_optimization, validate_shared_fields


def validate(config: ml_collections.ConfigDict, with_data: bool = True, is_adopted: bool = False) -> None:
    """Raises `UserError` if a config of pre-training is invalid.

    Args:
      with_data: also require the location of the data.
      is_adopted: with `adapt.model`, whether `config.model` already is the model of `init_checkpoint`.
    """
    validate_pretraining(config, with_data)
    validate_objectives(config, with_model=is_adopted or not config.adapt.model)
    validate_optimization(config)


def validate_pretraining(config: ml_collections.ConfigDict, with_data: bool = True) -> None:
    """Raises `UserError` if a config is not a valid config of pre-training.

    `with_data`: also require the text or the records.
    """
    require(config.task == "pretraining", "task", config.task, "this command is for pre-training")
    validate_shared_fields(config, PRETRAINING_LIMITS)
    language = config.data.language
    code = re.fullmatch("[a-z]{2,3}(-[a-z]+)*", language)
    require(bool(code), "data.language", language, "must be an ISO 639 code, such as 'en' or 'de'")
    split_of_masks("data.masked_lm_split", config.data.masked_lm_split)
    _validate_adaptation(config, with_data)
    random = "would be random as well: set init_checkpoint, or 0"
    require(bool(config.init_checkpoint) or not config.freeze_layers, "freeze_layers", config.freeze_layers, random)
    if config.recipe:
        adapted = "a recipe trains from random params; use --config=adapt with a budget, or leave it out"
        require(not (config.init_checkpoint or config.adapt.model), "init_checkpoint", config.init_checkpoint, adapted)
    validate_stages(config, PRETRAINING_LIMITS)
    if config.data.stream:
        _validate_stream(config)
    for field in ("memory_length", "clamp_length"):
        value, is_known = config.eval[field], config.data.stream and field in config.model
        none = f"is of rows that go on (data.stream) in a model with model.{field}; set 0"
        require(is_known or not value or config.adapt.model, f"eval.{field}", value, none)
    for each in stages_of(config):
        families.FAMILIES.get(config.model.family).validate(config_in(config, each))
        if corpus_sources(config) or config.data.mix_when == "prepared":
            mixture_of(config_in(config, each))
    none = (
        "no text is held out, by whose score a run could stop early: set heldout_fraction above 0, or eval.patience=0"
    )
    is_scored = config.data.heldout_fraction > 0 or bool(config.data.records) or not config.eval.patience
    require(is_scored, "data.heldout_fraction", config.data.heldout_fraction, none)
    for text in config.eval.fill_masks:
        require(isinstance(text, str) and "[MASK]" in text, "eval.fill_masks", text, "each text needs a [MASK]")
    require(
        not with_data or bool(config.data.records or config.branch_from or corpus_sources(config)),
        "data.corpus",
        config.data.corpus,
        "say where the text is (files, a folder, a glob, gs://..., hf:NAME, tfds:NAME, pydoc) or set data.records",
    )


def require_memory(config) -> None:
    """Raises `UserError` if rows go on in the next step (`data.stream`), and the model cannot."""
    family = config.model.family
    none = f"model.family = {family!r} has no memory, with which a row goes on; choose one that has, or set False"
    has_memory = isinstance(families.FAMILIES.get(family), Recurrent)
    require(has_memory or not config.data.stream, "data.stream", config.data.stream, none)


def _validate_stream(config) -> None:
    if not config.adapt.model:  # the model is not known yet
        require_memory(config)
    apart = "rows that go on in the next step (data.stream) are full, and their memory is of one text; set False"
    require(not config.packing, "packing", True, apart)
    why = "a stream of text is cut into whole sequences, once"
    for field, needed in (("next_sentence", "none"), ("masking", "dynamic"), ("dupe_factor", 1), ("short_seq_prob", 0)):
        value = config.data[field]
        require(value == needed, f"data.{field}", value, f"{why}; set {needed}, or data.stream=False")
    for each in stages_of(config):
        one = (
            f"rows go on in the next step, so all stages have batch_size = {config.batch_size}; set it, or leave it out"
        )
        field = "ramp_from" if each.grows else "batch_size"
        require(each.batch_size == config.batch_size, f"stages.{each.name}.{field}", each.batch_size, one)


def _validate_adaptation(config, with_data: bool) -> None:
    start, extend, adapt = config.init_checkpoint, config.tokenizer.extend, config.adapt
    for field, value in (
        ("tokenizer.extend", extend),
        ("adapt.model", adapt.model),
        ("adapt.positions", adapt.positions),
    ):
        none = "there is nothing to adapt: set init_checkpoint to the workdir of a run, or a Hugging Face folder"
        require(bool(start) or not value, field, value, none)
        own = "only the model of init_checkpoint itself can be made larger: also set adapt.model=True"
        require(adapt.model or not value, field, value, own)
    corpus, windows = corpus_sources(config), config.eval.bits_windows
    none = f"eval.bits_windows = {windows} are of held-out text of data.corpus; set it, or 0 there"
    require(bool(corpus) or not (with_data and windows), "data.corpus", value_of(config, "data.corpus"), none)
    kind = config.tokenizer.kind
    whole = f"tokenizer.kind = {kind!r} has all the pieces that there are; set 0"
    require(not extend or KINDS[kind].extends, "tokenizer.extend", extend, whole)
    still = "new pieces cannot be learnt where the embeddings are frozen: set 0"
    require(not (extend and config.freeze_layers), "freeze_layers", config.freeze_layers, still)
    none = "there are no new pieces to train first: set tokenizer.extend, or 0"
    require(bool(extend) or not adapt.new_pieces_first, "adapt.new_pieces_first", adapt.new_pieces_first, none)
