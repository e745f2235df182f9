"""Checks the config of a run of any kind."""

from ml_collections import ConfigDict

from bertjax.inference import tasks
from bertjax.pretraining import validate as pretraining


def validate(config: ConfigDict, with_data: bool = True, is_adopted: bool = False) -> None:
    """Checks a config, without files or devices.

    Args:
      config: the config of a run.
      with_data: whether to require the location of the data.
      is_adopted: with `adapt.model`, whether `config.model` already is the model of `init_checkpoint`.

    Raises:
      UserError: a field is wrong. The message has the field, its value and a remedy.
    """
    if config.task == tasks.PRETRAINING:
        pretraining.validate(config, with_data, is_adopted)
        if config.recipe:
            from bertjax.launch import recipes

            recipes.prepared(config)
    else:
        from bertjax.finetuning import validate as finetuning  # imports JAX

        finetuning.validate(config, with_data)
