"""The recipes of `config.recipe`: everything about a run but its sizes, which `choice` computes from the text."""

from collections.abc import Iterator, Mapping

import ml_collections

from bertjax.common.errors import UserError
from bertjax.config.defaults import named_stages, pretraining_config, stage
from bertjax.config.stages import predictions_for
from bertjax.launch.overrides import find_field
from bertjax.models import families

NO_CHOICE = ("budget", "overrides", "recipe")  # fields of a config that are neither chosen nor kept


def recipe_config(recipe: str) -> ml_collections.ConfigDict:
    """Returns the config of a recipe, with sizes that `launch.budget.plan` replaces.

    modern: ModernBERT with packed sequences, 30 % of the tokens masked anew in each epoch, and a learning rate that is
    constant after its warm-up and falls in the last fifth (Warner et al. 2024; Weller et al. 2025). bert: BERT with
    next-sentence prediction, 15 % masked, and a rate that falls linearly (Devlin et al. 2019).
    """
    config = pretraining_config().unlock()
    config.recipe = recipe
    config.data.update(masking="dynamic", dupe_factor=1)
    config.checkpoint.keep, config.remat = 2, "auto"
    # The texts in which words are filled are chosen from the held-out text.
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


def prepared(config) -> ml_collections.ConfigDict:
    """Returns a copy of a config with a recipe, in which `overrides` names all fields that somebody has set.

    These are the fields that the command line has set, and those that differ from the config of the recipe. If
    `config.recipe` names another recipe than the config was made with, it gets the other fields of that recipe.

    Raises `UserError` for a field that the models of the recipe do not have.
    """
    made_with = "bert" if config.model.family == "bert" else "modern"
    defaults, names = dict(_leaves(recipe_config(made_with))), set(config.overrides)
    followed = {  # these follow the masked share
        f"stages.{name}.max_predictions_per_seq"
        for name, each in config.stages.items()
        if each.max_predictions_per_seq == predictions_for(config.data.masked_lm_prob, each.length)
    }
    names |= {name for name, value in _leaves(config) if defaults.get(name) != value and name not in followed}
    copy = recipe_config(config.recipe) if config.recipe != made_with else config.copy_and_resolve_references().lock()
    try:
        for name in sorted(names) if copy.model.family != config.model.family else ():
            find_field(copy, name).set(find_field(config, name).value)
    except UserError as error:
        raise UserError(f"config.recipe = {config.recipe!r}: {error}") from None
    with copy.unlocked():
        copy.budget, copy.overrides = config.budget, tuple(sorted(names))
    return copy


def _leaves(section: Mapping, before: str = "") -> Iterator[tuple[str, object]]:
    """Yields the fields of a config that can be set, with their dotted names."""
    for name, value in section.items():
        if isinstance(value, ml_collections.ConfigDict):
            yield from _leaves(value, f"{before}{name}.")
        elif f"{before}{name}" not in NO_CHOICE:
            yield f"{before}{name}", value
