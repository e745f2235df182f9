"""The recipes of `config.recipe`: everything about a run but its sizes, which `choice` computes from the text."""

import ml_collections

from bertjax import experiment, families
from bertjax.config import named_stages, pretraining_config, stage


def recipe_config(recipe: str) -> ml_collections.ConfigDict:
    """Returns the config of a recipe, with sizes that `budget.plan` replaces.

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
        config.stages = named_stages(short=stage(1000, 128, predictions(config, 128)))
        config.optimizer.update(bias_correction=True, beta2=0.98)
        return config.lock()
    config.model = families.model_fields("modernbert", attention_output_dropout_prob=0.0)
    config.tokenizer.update(kind="bpe", lowercase=False)
    config.data.update(next_sentence="none", masked_lm_prob=0.3)
    config.stages = named_stages(short=stage(1000, 128, predictions(config, 128)))
    config.packing = True
    config.optimizer.update(name="stable_adamw", beta2=0.98, schedule="trapezoid", decay_proportion=0.2, decay="sqrt")
    config.optimizer.weight_decay = 1e-4
    return config.lock()


def predictions(config, length: int) -> int:
    """Returns how many masks a sequence of this length has at most: for 128 tokens 20, or 39 of 30 %."""
    return int(config.data.masked_lm_prob * length) + 1


def with_recipe(config) -> ml_collections.ConfigDict:
    """Returns the config with the recipe that `config.recipe` names, and with the fields that the user has set.

    Raises `UserError` for a field that the models of the recipe do not have.
    """
    if config.model.family == ("bert" if config.recipe == "bert" else "modernbert"):
        return config
    switched = recipe_config(config.recipe)
    switched.budget, switched.overrides = config.budget, config.overrides
    for name in config.overrides:
        experiment.find_field(switched, name).set(experiment.find_field(config, name).value)
    return switched.lock()
