"""The recipes of `config.recipe`: all settings of a run but the sizes, which `launch.budget.choice` computes."""

from collections.abc import Iterator, Mapping
from typing import Any

import ml_collections

from bertjax.common.errors import UserError
from bertjax.config.defaults import named_stages, pretraining_config, stage
from bertjax.config.stages import predictions_for
from bertjax.launch.overrides import find_field
from bertjax.models import families

NO_CHOICE = ("budget", "overrides", "recipe")  # fields that `prepared` does not compare


def recipe_config(recipe: str) -> ml_collections.ConfigDict:
    """Returns the config of a recipe, with sizes that `launch.budget.plan` replaces.

    modern: ModernBERT with packed sequences and 30 % masked tokens. The learning rate is constant after the warm-up,
    and falls in the last fifth of the steps (Warner et al. 2024; Weller et al. 2025).

    bert: BERT with next-sentence prediction and 15 % masked tokens. The learning rate falls linearly after the warm-up
    (Devlin et al. 2019).

    Both recipes mask other tokens in each epoch.
    """
    config = pretraining_config().unlock()
    config.recipe = recipe
    config.data.update(masking="dynamic", dupe_factor=1)
    config.checkpoint.keep, config.remat = 2, "auto"
    # `launch.budget.survey` chooses the texts for filling masks from the held-out documents.
    config.eval.update(max_sequences=512, fill_masks=())
    if recipe == "bert":
        config.optimizer.update(bias_correction=True, beta2=0.98)
    else:
        config.model = families.model_fields("modernbert", attention_output_dropout_prob=0.0)
        config.tokenizer.update(kind="bpe", lowercase=False)
        config.data.update(next_sentence="none", masked_lm_prob=0.3)
        config.packing = True
        config.optimizer.update(name="stable_adamw", beta2=0.98, weight_decay=1e-4)
        config.optimizer.update(schedule="trapezoid", decay_proportion=0.2, decay="sqrt")
    share = config.data.masked_lm_prob
    config.stages = named_stages(
        short=stage(1000, 128, predictions_for(share, 128)), long=stage(100, 512, predictions_for(share, 512))
    )
    return config.lock()


def prepared(config: ml_collections.ConfigDict) -> ml_collections.ConfigDict:
    """Returns a copy of a config with a recipe, in which `overrides` names all fields that the user has set.

    These fields are the fields that the command line has set, and the fields that differ from the config of the recipe.
    If the config was made with another recipe than `config.recipe`, all other fields of the copy have the values of
    `config.recipe`.

    Raises:
      UserError: the models of the recipe do not have a field that the user has set.
    """
    made_with = "bert" if config.model.family == "bert" else "modern"
    defaults = dict(_leaves(recipe_config(made_with)))
    follow_the_masked_share = {
        f"stages.{name}.max_predictions_per_seq"
        for name, fields in config.stages.items()
        if fields.max_predictions_per_seq == predictions_for(config.data.masked_lm_prob, fields.length)
    }
    changed = {name for name, value in _leaves(config) if defaults.get(name) != value}
    names = sorted({*config.overrides} | (changed - follow_the_masked_share))
    if config.recipe == made_with:
        copy = config.copy_and_resolve_references().lock()
    else:
        copy = recipe_config(config.recipe)
        try:
            for name in names:
                find_field(copy, name).set(find_field(config, name).value)
        except UserError as error:
            raise UserError(f"config.recipe = {config.recipe!r}: {error}") from None
    with copy.unlocked():
        copy.budget, copy.overrides = config.budget, tuple(names)
    return copy


def _leaves(section: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Yields the fields of a config that can be set: (dotted name, value)."""
    for name, value in section.items():
        if isinstance(value, ml_collections.ConfigDict):
            yield from _leaves(value, f"{prefix}{name}.")
        elif f"{prefix}{name}" not in NO_CHOICE:
            yield f"{prefix}{name}", value
