"""Parses `config.objective`, which names an objective or a weighted sum of several, and `config.objectives`, which has
their settings."""

import dataclasses
import functools
import re
from collections.abc import Callable, Mapping
from typing import Any

import ml_collections

from bertjax.common.errors import UserError
from bertjax.config.limits import within
from bertjax.config.stages import config_in, stages_of
from bertjax.models import families
from bertjax.objectives.objective import Objective, Term
from bertjax.objectives.registry import OBJECTIVES

# The default objectives: by the `lm_type` of the model, and for pairs of segments by `data.next_sentence`.
OF_WORDS = {"masked": "mlm", "causal": "lm", "bidirectional": "bilm", "permuted": "plm"}
OF_PAIRS = {"pairs": "nsp", "order": "sop"}


def parse_objective(config: ml_collections.ConfigDict) -> tuple[Term, ...]:
    """Returns the terms of `config.objective`, such as "mlm + 0.5*sop", in their order; the first one's held-out loss
    says which checkpoint is the best.

    Raises `UserError` if it is not a sum of objectives.
    """
    return tuple(Term(name, weight, _with_settings(config, name)) for name, weight in weights_of(config).items())


def terms_of_stages(config: ml_collections.ConfigDict) -> tuple[Term, ...]:
    """Returns the terms of all stages, each once."""
    return tuple(
        {term.name: term for stage in stages_of(config) for term in parse_objective(config_in(config, stage))}.values()
    )


def terms_of_run(config: ml_collections.ConfigDict) -> tuple[Term, ...]:
    """Returns what a run has learnt, as `terms_of_stages`, without objectives that nobody has registered; nothing after
    fine-tuning. Raises `UserError` if its config is damaged."""
    if "objective" not in config:
        return ()
    weights: dict[str, float] = {}
    for stage in stages_of(config):
        weights |= weights_of(config_in(config, stage))
    return tuple(Term(name, x, _with_settings(config, name)) for name, x in weights.items() if _is_there(name))


def _is_there(name: str) -> bool:
    try:
        OBJECTIVES.get(name)
    except UserError:
        return False
    return True


def weights_of(config: ml_collections.ConfigDict) -> dict[str, float]:
    """Returns the weights of `config.objective` by the names of the objectives, which may not exist."""
    text = config.objective
    if not text.strip():
        pairs = OF_PAIRS.get(config.data.next_sentence)
        text = " + ".join(filter(None, (OF_WORDS[families.lm_type_of(config)], pairs)))
    weights: dict[str, float] = {}
    for part in text.split("+"):
        found = re.fullmatch(r"(?:(\d+(?:\.\d*)?|\.\d+)\s*\*\s*)?([^\s*]+)", part.strip())
        if not found or float(found[1] or 1) <= 0:
            raise UserError(
                f"config.objective = {text!r}: write one objective, or a sum such as 'mlm + 0.5*sop', with weights "
                f"above 0; there are {', '.join(OBJECTIVES.names())}"
            )
        if found[2] in weights:
            raise UserError(f"config.objective = {text!r}: has {found[2]} twice; give it one weight")
        weights[found[2]] = float(found[1] or 1)
    return weights


def learn(config: ml_collections.ConfigDict, objective: str, **settings: Mapping[str, Any]) -> None:
    """Sets `config.objective`, and settings by the names of its objectives: `generator=dict(width=1/3)`."""
    config.objective = objective
    for name, given in settings.items():
        add_settings(config, name)
        config.objectives[name].update(given)


def add_settings(config: ml_collections.ConfigDict, name: str) -> None:
    """Adds the settings of an objective to `config.objectives`, with its defaults. Does nothing if it has none."""
    if name not in OBJECTIVES.names() or (settings := OBJECTIVES.get(name).settings) is None:
        return
    with config.unlocked():
        if "objectives" not in config:
            config.objectives = ml_collections.ConfigDict()
        if name not in config.objectives:
            config.objectives[name] = ml_collections.ConfigDict(dataclasses.asdict(settings()))


def add_all_settings(config: ml_collections.ConfigDict) -> None:
    """Adds those of all that is learnt, so that a run says which it has."""
    for term in terms_of_stages(config):
        add_settings(config, term.name)


def _with_settings(config: ml_collections.ConfigDict, name: str) -> Objective:
    """Returns an objective with its settings. Raises `UserError` if it has not these, or other values of them."""
    objective, given = OBJECTIVES.get(name), config.get("objectives", {}).get(name)
    if not given or objective.settings is None:
        return objective
    fields = {each.name: each for each in dataclasses.fields(objective.settings)}
    for field, value in given.items():
        if field not in fields:
            raise UserError(f"config.objectives.{name} has no field {field!r}; there are {', '.join(fields)}")
        within(f"objectives.{name}.{field}", value, **fields[field].metadata)
    return _made(objective.made, objective.settings(**given))


@functools.cache
def _made(make: Callable[[Any], Objective], settings) -> Objective:
    """Equal settings give the same objective: models that have one are compared."""
    return make(settings)
