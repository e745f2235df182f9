"""Parses `config.objective`, an objective or a weighted sum of objectives, and `config.objectives`, their settings."""

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

# The defaults of `config.objective`: by the language model type of the family, and by `data.next_sentence`.
OBJECTIVE_OF_LM_TYPE = {"masked": "mlm", "causal": "lm", "bidirectional": "bilm", "permuted": "plm"}
OBJECTIVE_OF_PAIRS = {"pairs": "nsp", "order": "sop"}


def parse_objective(config: ConfigDict) -> tuple[Term, ...]:
    """Returns the terms of `config.objective`, such as "mlm + 0.5*sop", in their order.

    The held-out loss of the first term ranks checkpoints.

    Raises:
      UserError: if the field is not a sum of objectives.
    """
    return tuple(Term(name, weight, _with_settings(config, name)) for name, weight in weights_of(config).items())


def terms_of_stages(config: ConfigDict) -> tuple[Term, ...]:
    """Returns the terms of all stages, each once."""
    terms = (term for stage in stages_of(config) for term in parse_objective(config_in(config, stage)))
    return tuple({term.name: term for term in terms}.values())


def terms_of_run(config: ConfigDict) -> tuple[Term, ...]:
    """Returns the terms of all stages of an earlier run, without objectives that are not registered in this process.

    A run of fine-tuning has no terms.

    Raises:
      UserError: if the config is damaged.
    """
    if "objective" not in config:
        return ()
    weights: dict[str, float] = {}
    for stage in stages_of(config):
        weights |= weights_of(config_in(config, stage))
    return tuple(Term(name, x, _with_settings(config, name)) for name, x in weights.items() if _is_registered(name))


def _is_registered(name: str) -> bool:
    try:
        OBJECTIVES.get(name)
    except UserError:
        return False
    return True


def weights_of(config: ConfigDict) -> dict[str, float]:
    """Returns {objective: weight} of `config.objective`. The objectives may not exist."""
    text = config.objective
    if not text.strip():
        pairs = OBJECTIVE_OF_PAIRS.get(config.data.next_sentence)
        text = " + ".join(filter(None, (OBJECTIVE_OF_LM_TYPE[families.lm_type_of(config)], pairs)))
    weights: dict[str, float] = {}
    for part in text.split("+"):
        match = re.fullmatch(r"(?:(\d+(?:\.\d*)?|\.\d+)\s*\*\s*)?([^\s*]+)", part.strip())
        if not match or float(match[1] or 1) <= 0:
            raise UserError(
                f"config.objective = {text!r}: write one objective, or a sum such as 'mlm + 0.5*sop', with weights "
                f"above 0; there are {', '.join(OBJECTIVES.names())}"
            )
        if match[2] in weights:
            raise UserError(f"config.objective = {text!r}: has {match[2]} twice; give it one weight")
        weights[match[2]] = float(match[1] or 1)
    return weights


def learn(config: ConfigDict, objective: str, **settings: Mapping[str, Any]) -> None:
    """Sets `config.objective`, and the settings of its objectives, such as `generator=dict(width=1/3)`."""
    config.objective = objective
    for name, values in settings.items():
        add_settings(config, name)
        if name not in config.get("objectives", {}):
            raise UserError(f"config.objectives.{name}: the objective has no settings; leave out {', '.join(values)}")
        config.objectives[name].update(values)


def add_settings(config: ConfigDict, name: str) -> None:
    """Adds the settings of an objective to `config.objectives`, with their defaults, if the objective has settings."""
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
            raise UserError(f"config.objectives.{name} has no field {field!r}; there are {', '.join(fields)}")
        within(f"objectives.{name}.{field}", value, **fields[field].metadata)
    return dataclasses.replace(objective, **settings)
