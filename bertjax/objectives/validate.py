"""Checks that the objectives of a config can be trained together, and with the other fields of the config."""

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

# The names of batch arrays that an objective cannot add.
RESERVED_ARRAYS = {*RECORD_ARRAYS, *PACKING_ARRAYS, *STREAM_ARRAYS, *PROGRESS_ARRAYS, *RESERVED_NAMES}


def validate(config: ConfigDict, with_model: bool = True) -> None:
    """Raises `UserError` if the objectives cannot be trained together, or with the other fields of the config.

    Only the last stage must support `eval.fill_masks`, because the masks are filled after the last stage.

    Args:
      config: the whole config.
      with_model: whether to run the checks that depend on `config.model`. False: a checkpoint will replace the model.
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
            trained = f"the run trains {' + '.join(names)}, not {name}"
            reason = f"the objective {name} has no settings" if name in names else trained
            raise UserError(f"config.objectives.{name}: {reason}; remove the field")


def _validate_stages(config: ConfigDict) -> None:
    """Raises `UserError` if a stage does not train an objective that all stages must train."""
    by_stage = {  # names of objectives
        stage.name: [term.name for term in parse_objective(config_in(config, stage))] for stage in stages_of(config)
    }
    for name, _, objective in terms_of_stages(config):
        error = objective.stage_omission_error() if isinstance(objective, JointModel) else ""
        stage = next((stage for stage, names in by_stage.items() if name not in names), None)
        if error and stage is not None:
            trained = " + ".join(by_stage[stage])
            raise UserError(f"config.stages.{stage}: the stage trains {trained}, not {name}; {error}")


def validate_mesh(config: ConfigDict, mesh: "Mesh") -> None:
    """Raises `UserError` if the axes of a mesh do not divide the sizes of the second model of a `JointModel`."""
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
    taken = set(RESERVED_ARRAYS)
    for name, _, objective in terms:
        arrays = objective.batch_spec(config, stage)
        names = arrays.without(WORD_ARRAYS).keys() if isinstance(objective, WordObjective) else arrays.keys()
        if clashing := taken & names:
            raise UserError(
                f"config.objective = {config.objective!r}: {name} adds an array {min(clashing)!r}, and batches already "
                f"have an array with this name; rename the array of {name}"
            )
        taken |= names
        axes = {Axis.SEQUENCE, Axis.TOKEN} | ({Axis.PREDICTION} if isinstance(objective, WordObjective) else set())
        if unsupported := [array for array in names if arrays[array].axis not in axes]:
            array = unsupported[0]
            raise UserError(
                f"config.objective = {config.objective!r}: {name} adds {array!r} per {arrays[array].axis.value} to "
                f"batches; declare the array per sequence or per token"
            )
        if config.data.stream and not _supports_streams(objective):
            default = OBJECTIVE_OF_LM_TYPE[families.lm_type_of(config)]
            alternative = f"set objective = {default!r}, or " if _supports_streams(OBJECTIVES.get(default)) else ""
            raise UserError(
                f"config.data.stream = True: the objective {name} does not support streams; {alternative}set False"
            )
        if with_model:
            objective.validate(config)
    if config.eval.fill_masks and not any(getattr(term.objective, "fills_masks", False) for term in terms):
        trained = " + ".join(term.name for term in terms)
        raise UserError(
            f"config.eval.fill_masks = {config.eval.fill_masks!r}: models trained on {trained} cannot fill masks; "
            f"set ()"
        )


def _supports_streams(objective: Objective) -> bool:
    return isinstance(objective, WordObjective) and objective.continues


def _validate_sum(config: ConfigDict, terms: tuple[Term, ...]) -> None:
    """Raises `UserError` if objectives of a sum exclude each other, or if a field needs another objective."""
    text = config.objective
    word_terms = [term for term in terms if isinstance(term.objective, WordObjective)]
    for exclusive, ability in (
        (word_terms, "predict tokens"),
        ([term for term in terms if isinstance(term.objective, JointModel)], "change the inputs of the encoder"),
        ([term for term in terms if isinstance(term.objective, QueryStream)], "have a query stream"),
    ):
        if len(exclusive) > 1:
            names = " and ".join(term.name for term in exclusive)
            raise UserError(f"config.objective = {text!r}: {names} both {ability}; remove one of them")
    if config.eval.bits_windows and not word_terms:
        names, windows = " + ".join(term.name for term in terms), config.eval.bits_windows
        raise UserError(f"config.eval.bits_windows = {windows}: {names} predicts no tokens; set 0")
    if isinstance(terms[0].objective, AuxiliaryObjective):
        name = terms[0].name
        raise UserError(
            f"config.objective = {text!r}: the first objective must be evaluated, and {name} is not; put another "
            f"objective first, such as 'lm + {name}'"
        )
