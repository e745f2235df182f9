"""Parses `config.objective`, a weighted sum of objectives, and `config.objectives`, the settings of the objectives."""

import dataclasses
import re
from collections.abc import Mapping
from typing import Any

from ml_collections import ConfigDict

from bertjax.common.errors import UserError
from bertjax.config.limits import within
from bertjax.config.stages import config_in, stages_of
from bertjax.models import families
from bertjax.objectives.objective import Objective, Term
from bertjax.objectives.registry import OBJECTIVES

# If `config.objective` is empty, the model type and `data.next_sentence` determine the objectives.
OBJECTIVE_OF_LM_TYPE = {"masked": "mlm", "causal": "lm", "bidirectional": "bilm", "permuted": "plm"}
OBJECTIVE_OF_PAIRS = {"pairs": "nsp", "order": "sop"}


def parse_objective(config: ConfigDict) -> tuple[Term, ...]:
    """Returns the terms of `config.objective`, such as "mlm + 0.5*sop", in their order.

    The held-out loss of the first term ranks checkpoints.

    Raises:
      UserError: if the field is not a sum of objectives.
    """
    return tuple(Term(name, weight, _with_settings(config, name)) for name, weight in objective_weights(config).items())


def terms_of_stages(config: ConfigDict) -> tuple[Term, ...]:
    """Returns the terms of all stages. A term that several stages train is returned once."""
    terms = (term for stage in stages_of(config) for term in parse_objective(config_in(config, stage)))
    return tuple({term.name: term for term in terms}.values())


def terms_of_run(config: ConfigDict) -> tuple[Term, ...]:
    """Returns the terms of all stages of an earlier run, without unregistered objectives; none for fine-tuning.

    Raises:
      UserError: if `config.objective` is not a sum of objectives.
    """
    if "objective" not in config:
        return ()
    weights: dict[str, float] = {}
    for stage in stages_of(config):
        weights |= objective_weights(config_in(config, stage))
    return tuple(Term(name, x, _with_settings(config, name)) for name, x in weights.items() if _is_registered(name))


def _is_registered(name: str) -> bool:
    try:
        OBJECTIVES.get(name)
    except UserError:
        return False
    return True


def objective_weights(config: ConfigDict) -> dict[str, float]:
    """Returns {objective: weight} of `config.objective`, with the defaults if the field is empty.

    Does not check that the objectives are registered.
    """
    text = config.objective
    if not text.strip():
        pairs = OBJECTIVE_OF_PAIRS.get(config.data.next_sentence)
        text = " + ".join(filter(None, (OBJECTIVE_OF_LM_TYPE[families.lm_type_of(config)], pairs)))
    weights: dict[str, float] = {}
    for part in text.split("+"):
        match = re.fullmatch(r"(?:(\d+(?:\.\d*)?|\.\d+)\s*\*\s*)?([^\s*]+)", part.strip())
        if not match or float(match[1] or 1) <= 0:
            raise UserError(
                f"config.objective = {text!r}: must be an objective, or a sum such as 'mlm + 0.5*sop' with weights "
                f"above 0; the objectives are {', '.join(OBJECTIVES.names())}"
            )
        if match[2] in weights:
            raise UserError(f"config.objective = {text!r}: contains {match[2]} twice; remove one of the terms")
        weights[match[2]] = float(match[1] or 1)
    return weights


def learn(config: ConfigDict, objective: str, **settings: Mapping[str, Any]) -> None:
    """Sets `config.objective` and the settings of the objectives.

    Args:
      config: the config to change.
      objective: the weighted sum, such as "50*replaced + generator".
      **settings: {objective: {setting: value}}, such as `generator=dict(width=1/3)`.

    Raises:
      UserError: if an objective in `settings` has no settings, or is not registered.
    """
    config.objective = objective
    for name, values in settings.items():
        add_settings(config, name)
        if name not in config.get("objectives", {}):
            raise UserError(f"config.objectives.{name}: the objective has no settings; leave out {', '.join(values)}")
        config.objectives[name].update(values)


def add_settings(config: ConfigDict, name: str) -> None:
    """Adds the default settings of an objective to `config.objectives`, if the objective has settings."""
    if name not in OBJECTIVES.names() or not (defaults := dataclasses.asdict(OBJECTIVES.get(name))):
        return
    with config.unlocked():
        if "objectives" not in config:
            config.objectives = ConfigDict()
        if name not in config.objectives:
            config.objectives[name] = ConfigDict(defaults)


def add_all_settings(config: ConfigDict) -> None:
    """Adds the settings of all objectives of a run, so that `config.json` lists them."""
    for term in terms_of_stages(config):
        add_settings(config, term.name)


def _with_settings(config: ConfigDict, name: str) -> Objective:
    """Returns an objective with its settings. Raises `UserError` for an unknown setting or a value out of range."""
    objective, settings = OBJECTIVES.get(name), config.get("objectives", {}).get(name)
    fields = {field.name: field for field in dataclasses.fields(objective)}
    declared = vars(type(objective)).get("__annotations__", {})
    if undecorated := [x for x, kind in declared.items() if x not in fields and "ClassVar" not in str(kind)]:
        raise UserError(
            f"objective {name!r}: its class declares the setting {undecorated[0]!r}, but is not a dataclass; decorate "
            f"the class with @dataclasses.dataclass(frozen=True)"
        )
    if not settings or not fields:
        return objective
    for field, value in settings.items():
        if field not in fields:
            raise UserError(
                f"config.objectives.{name}.{field} = {value!r}: unknown field; the fields are {', '.join(fields)}"
            )
        within(f"objectives.{name}.{field}", value, **fields[field].metadata)
    return dataclasses.replace(objective, **settings)
