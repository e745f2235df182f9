"""Checks that the objectives of a config suit each other and the rest of the config."""

from typing import TYPE_CHECKING

from ml_collections import ConfigDict

from bertjax.common.errors import UserError
from bertjax.config.stages import Stage, config_in, stages_of
from bertjax.data.batch import (
    PACKING_ARRAYS,
    PROGRESS_ARRAYS,
    RECORD_ARRAYS,
    RESERVED_NAMES,
    STREAM_ARRAYS,
    WORD_ARRAYS,
    Axis,
)
from bertjax.models import families
from bertjax.objectives.objective import AuxiliaryObjective, JointModel, Objective, QueryStream, Term, joint_models
from bertjax.objectives.parsing import OBJECTIVE_OF_LM_TYPE, parse_objective, terms_of_stages
from bertjax.objectives.parts.words import WordObjective
from bertjax.objectives.registry import OBJECTIVES

if TYPE_CHECKING:
    from jax.sharding import Mesh

# Names that an objective cannot give to an array of a batch.
TAKEN = {*RECORD_ARRAYS, *PACKING_ARRAYS, *STREAM_ARRAYS, *PROGRESS_ARRAYS, *RESERVED_NAMES}


def validate(config: ConfigDict, with_model: bool = True) -> None:
    """Raises `UserError` if the objectives do not suit each other or the rest of the config.

    The masks of `eval.fill_masks` are filled after the last stage.

    Args:
      config: the whole config.
      with_model: whether to check what depends on `config.model`. False: another model will be trained.
    """
    stages = stages_of(config)
    for stage in stages:
        stage_config = config_in(config, stage)
        if stage is not stages[-1]:
            with stage_config.unlocked():
                stage_config.eval.fill_masks = ()
        _validate(stage_config, stage, with_model)
    _validate_stages(config)
    names = [term.name for term in terms_of_stages(config)]
    for name in config.get("objectives", {}):
        if name not in names or not vars(OBJECTIVES.get(name)):
            reason = "has no settings" if name in names else f"{' + '.join(names)} is learnt, without it"
            raise UserError(f"config.objectives.{name}: {reason}; leave it out")


def _validate_stages(config: ConfigDict) -> None:
    """Raises `UserError` if a stage leaves out an objective that all stages must train."""
    by_stage = {
        stage.name: [term.name for term in parse_objective(config_in(config, stage))] for stage in stages_of(config)
    }
    for name, _, objective in terms_of_stages(config):
        reason = objective.reason_for_all_stages() if isinstance(objective, JointModel) else ""
        stage = next((stage for stage, names in by_stage.items() if name not in names), None)
        if reason and stage is not None:
            raise UserError(f"config.stages.{stage}: learns {' + '.join(by_stage[stage])}, without {name}, {reason}")


def validate_mesh(config: ConfigDict, mesh: "Mesh") -> None:
    """Raises `UserError` if a mesh does not divide a model that is trained beside the encoder."""
    from bertjax.distributed.mesh import undivided

    encoder = families.config_of(config)
    for term in terms_of_stages(config):
        for objective in joint_models([term]):
            for name, model in objective.models(encoder).items():
                if fault := undivided(vars(model), mesh.shape):
                    raise UserError(f"config.objectives.{term.name}: the {name} has {fault}")


def _validate(config: ConfigDict, stage: Stage, with_model: bool) -> None:
    """Raises `UserError` for the objectives of a stage."""
    terms = parse_objective(config)
    _validate_sum(config, terms)
    taken = set(TAKEN)
    for name, _, objective in terms:
        arrays = objective.batch_spec(config, stage)
        names = arrays.without(WORD_ARRAYS).keys() if isinstance(objective, WordObjective) else arrays.keys()
        if clashing := taken & names:
            raise UserError(
                f"config.objective = {config.objective!r}: {name} adds {min(clashing)!r} to batches, which have it"
            )
        taken |= names
        axes = {Axis.SEQUENCE, Axis.TOKEN} | ({Axis.PREDICTION} if isinstance(objective, WordObjective) else set())
        if unsupported := [array for array in names if arrays[array].axis not in axes]:
            array = unsupported[0]
            raise UserError(
                f"config.objective = {config.objective!r}: {name} adds {array!r} per {arrays[array].axis.value} to "
                f"batches; declare the array per sequence or per token"
            )
        if config.data.stream and not _continues(objective):
            default = OBJECTIVE_OF_LM_TYPE[families.lm_type_of(config)]
            alternative = f"learn {default}, or " if _continues(OBJECTIVES.get(default)) else ""
            raise UserError(
                f"config.data.stream = True: {name} reads sequences by themselves, not text that goes on; {alternative}"
                f"set False"
            )
        if with_model:
            objective.validate(config)
    if config.eval.fill_masks and not any(getattr(term.objective, "fills_masks", False) for term in terms):
        text = " + ".join(term.name for term in terms)
        raise UserError(f"config.eval.fill_masks = {config.eval.fill_masks!r}: {text} does not teach it; set ()")


def _continues(objective: Objective) -> bool:
    return isinstance(objective, WordObjective) and objective.continues


def _validate_sum(config: ConfigDict, terms: tuple[Term, ...]) -> None:
    """Raises `UserError` if the objectives of a sum exclude each other, or lack an objective that a field needs."""
    text = config.objective
    of_words = [term for term in terms if isinstance(term.objective, WordObjective)]
    for members, effect in (
        (of_words, "predict words"),
        ([term for term in terms if isinstance(term.objective, JointModel)], "change what is read"),
        ([term for term in terms if isinstance(term.objective, QueryStream)], "say how it is read"),
    ):
        if len(members) > 1:
            names = " and ".join(term.name for term in members)
            raise UserError(f"config.objective = {text!r}: {names} both {effect}; leave one out")
    if config.eval.bits_windows and not of_words:
        names, windows = " + ".join(term.name for term in terms), config.eval.bits_windows
        raise UserError(f"config.eval.bits_windows = {windows}: {names} predicts no words; set 0")
    if isinstance(terms[0].objective, AuxiliaryObjective):
        name = terms[0].name
        raise UserError(
            f"config.objective = {text!r}: {name} only helps others to be learnt; put one of them first, such as "
            f"'lm + {name}'"
        )
