"""Checks that the objectives of a config suit each other and the rest of the config."""

from typing import TYPE_CHECKING

import ml_collections

from bertjax.common.errors import UserError
from bertjax.config.stages import config_in, stages_of
from bertjax.models import families
from bertjax.objectives.parsing import OF_WORDS, parse_objective, terms_of_stages
from bertjax.objectives.registry import OBJECTIVES

if TYPE_CHECKING:
    from jax.sharding import Mesh


# The arrays that batches have.
RESERVED = (
    "input_ids", "segments", "token_types", "positions", "first_tokens", "dropout_rows", "word_positions", "word_ids",
    "word_weights", "pair_labels", "sequence_weights", "weights", "original_ids", "progress", "goes_on", "following",
    "memory",
)  # fmt: skip


def validate(config: ml_collections.ConfigDict, with_model: bool = True) -> None:
    """Raises `UserError` if what is to be learnt does not suit the rest of the config, or each other. The masks of
    `eval.fill_masks` are filled after the last stage.

    Args:
      with_model: also what depends on the model; False: `config.model` is not yet what will be trained.
    """
    *others, last = (config_in(config, stage) for stage in stages_of(config))
    for each in others:
        with each.unlocked():
            each.eval.fill_masks = ()
        _validate(each, with_model)
    _validate(last, with_model)
    _validate_stages(config)
    learnt = [term.name for term in terms_of_stages(config)]
    for name in config.get("objectives", {}):
        if name not in learnt or OBJECTIVES.get(name).settings is None:
            what = "has no settings" if name in learnt else f"{' + '.join(learnt)} is learnt, without it"
            raise UserError(f"config.objectives.{name}: {what}; leave it out")


def _validate_stages(config: ml_collections.ConfigDict) -> None:
    """Raises `UserError` if a stage leaves out what all must learn."""
    by_stage = {
        stage.name: [term.name for term in parse_objective(config_in(config, stage))] for stage in stages_of(config)
    }
    for term in terms_of_stages(config):
        without = next((stage for stage, names in by_stage.items() if term.name not in names), None)
        if term.objective.in_all_stages and without is not None:
            raise UserError(
                f"config.stages.{without}: learns {' + '.join(by_stage[without])}, without {term.name}, "
                f"{term.objective.in_all_stages}"
            )


def validate_mesh(config: ml_collections.ConfigDict, mesh: "Mesh") -> None:
    """Raises `UserError` if a mesh does not divide a model that is trained beside that of the config."""
    from bertjax.distributed.mesh import undivided

    model = families.config_of(config)
    for term in terms_of_stages(config):
        for name, own in term.objective.models(model).items():
            if fault := undivided(vars(own), mesh.shape):
                raise UserError(f"config.objectives.{term.name}: the {name} has {fault}")


def _validate(config: ml_collections.ConfigDict, with_model: bool) -> None:
    terms = parse_objective(config)
    of_words = [term.name for term in terms if term.objective.words_per_sequence]
    if len(of_words) > 1:
        raise UserError(
            f"config.objective = {config.objective!r}: {' and '.join(of_words)} both predict words; leave one out"
        )
    if config.eval.bits_windows and not of_words:
        names = " + ".join(term.name for term in terms)
        raise UserError(f"config.eval.bits_windows = {config.eval.bits_windows}: {names} predicts no words; set 0")
    if terms[0].objective.is_auxiliary:
        raise UserError(
            f"config.objective = {config.objective!r}: {terms[0].name} only helps others to be learnt; put one of them "
            f"first, such as 'lm + {terms[0].name}'"
        )
    for field, what in (("rewrite", "change what is read"), ("encode", "say how it is read")):
        names = [term.name for term in terms if getattr(term.objective, field)]
        if len(names) > 1:
            both = " and ".join(names)
            raise UserError(f"config.objective = {config.objective!r}: {both} both {what}; leave one out")
    taken = set(RESERVED)
    for term in terms:
        if clashing := taken & term.objective.adds.keys():
            raise UserError(
                f"config.objective = {config.objective!r}: {term.name} adds {min(clashing)!r} to batches, which have it"
            )
        taken |= term.objective.adds.keys()
        if config.data.stream and not term.objective.goes_on:
            words = OF_WORDS[families.lm_type_of(config)]
            other = f"learn {words}, or " if OBJECTIVES.get(words).goes_on else ""
            raise UserError(
                f"config.data.stream = True: {term.name} reads sequences by themselves, not text that goes on; {other}"
                f"set False"
            )
        if with_model:
            term.objective.validate(config)
    if config.eval.fill_masks and not any(term.objective.fills_masks for term in terms):
        names = " + ".join(term.name for term in terms)
        raise UserError(f"config.eval.fill_masks = {config.eval.fill_masks!r}: {names} does not teach it; set ()")
