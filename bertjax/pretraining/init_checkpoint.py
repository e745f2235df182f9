"""Starts a run from `config.init_checkpoint`: sets config fields, and converts and resizes the params.

A run can add tokens to the vocabulary of the checkpoint (`tokenizer.extend`) and positions (`adapt.positions`).
"""

from etils import epath
from ml_collections import ConfigDict

from bertjax.common.errors import UserError
from bertjax.config.model_config import BertConfig, fields_with_roles
from bertjax.config.resolved import Resolution, ResolvedConfig
from bertjax.interop import initialization, pretrained, resizing
from bertjax.models import families
from bertjax.objectives.objective import joint_models
from bertjax.objectives.parsing import add_all_settings, parse_objective, terms_of_stages
from bertjax.pretraining.validate import require_recurrent_memory, validate
from bertjax.text import tokenizer
from bertjax.text.tokenizer import Tokenizer
from bertjax.training.checkpoints.workdir import RunInfo


def resolve(config: ConfigDict, previous: RunInfo | None) -> Resolution:
    """Resolves a config: sets the fields that the previous run or `init_checkpoint` determines.

    A resumed run keeps the spelling of `config.objective`. A branch uses the records of the parent run, unless the
    config sets `data.records`.

    Args:
      config: the validated config of the user.
      previous: the info of the run to resume, or of the parent of a branch; None for a new run.
    """
    config = ResolvedConfig.copy_of(config)
    if previous is not None:
        if config.branch_from and not config.data.records:
            workdir = config.branch_from.rpartition("@")[0]
            config.data.records = previous.config.data.records or str(epath.Path(workdir) / "records")
        if parse_objective(previous.config) == parse_objective(config):
            config.objective = previous.config.objective
    add_all_settings(config)
    return resolve_checkpoint(config, previous)


def resolve_checkpoint(config: ConfigDict, previous: RunInfo | None = None) -> Resolution:
    """Resolves the config fields that `init_checkpoint` determines.

    These fields are the model fields of the role "behaviour" and, if the config names neither a tokenizer nor records,
    the tokenizer. With `adapt.model`, they include all model fields except fields that a run may choose.

    Args:
      config: the validated config of the user.
      previous: the info of the run to resume, which determines the fields instead of the checkpoint.

    Raises:
      UserError: if the config does not match the checkpoint.
    """
    config = ResolvedConfig.copy_of(config)
    if not config.init_checkpoint:
        return Resolution(config)
    if config.adapt.model:
        path = config.init_checkpoint
        model = pretrained.read_config(path) if previous is None else families.config_of(previous.config)
        initialization.adopt_model(config, model, path)
        if previous is None:
            initialization.adopt_tokenizer(config)
            _extend_model(config)
        _check_stages(config)
        require_recurrent_memory(config)
        validate(config, with_data=False, is_adopted=True)  # `validate` skips these checks before the model is known
    elif previous is None:
        initialization.adopt(config)
    else:  # the checkpoint may have been deleted since the run began
        names = fields_with_roles(families.config_of(previous.config), "behaviour")
        config.model.update({name: previous.config.model[name] for name in names})
    return Resolution(config)


def import_params(config: ConfigDict, params: dict) -> dict:
    """Converts the params of the checkpoint for training, see `JointModel.import_params`."""
    for objective in joint_models(terms_of_stages(config)):
        params = objective.import_params(params)
    return params


def resize_embeddings(config: ConfigDict, axes: dict, extended: Tokenizer, arrays: dict, model: BertConfig) -> dict:
    """Returns the arrays of the checkpoint with new tokens (`tokenizer.extend`) and new positions (`adapt.positions`).

    Args:
      config: the whole config.
      axes: the logical axes of the params.
      extended: the tokenizer of the run, with the new tokens.
      arrays: {path: array} of the checkpoint.
      model: the model config of the checkpoint; unused, `initialization.initialize` passes it.
    """
    del model
    axes = pretrained.flattened(axes)
    if config.tokenizer.extend:
        rows = families.config_of(config).padded_vocab_size
        arrays = resizing.with_tokens(arrays, axes, rows, _tokenizer_to_extend(config), extended)
    if config.adapt.positions:
        arrays = resizing.with_positions(arrays, axes, families.config_of(config), config.adapt.positions_from)
    return arrays


def _extend_model(config: ConfigDict) -> None:
    """Sets `vocab_size` and `max_position_embeddings` for new tokens and positions.

    Raises:
      UserError: if `adapt.positions` is less than the number of positions of the checkpoint.
    """
    if config.tokenizer.extend:
        tokens = _tokenizer_to_extend(config).vocab_size + config.tokenizer.extend
        # The embedding table of a checkpoint can have more rows than the vocabulary has tokens.
        config.model.vocab_size = max(config.model.vocab_size, tokens)
    positions, count = config.adapt.positions, config.model.max_position_embeddings
    if positions and positions < count:
        raise UserError(
            f"config.adapt.positions = {positions}: must be at least {count}, the positions of "
            f"{config.init_checkpoint}, or 0; set a larger value, or 0 to keep the positions"
        )
    config.model.max_position_embeddings = positions or count


def _check_stages(config: ConfigDict) -> None:
    """Raises `UserError` if the model of the checkpoint does not support the length or the fields of a stage."""
    path, count = config.init_checkpoint, config.model.max_position_embeddings
    for name, stage in config.stages.items():
        for field in stage.get("model", {}):
            if field not in config.model:
                raise UserError(
                    f"config.stages.{name}.model.{field}: the family {config.model.family!r} of {path} has no field "
                    f"{field}; delete the field"
                )
        if stage.length > count:
            raise UserError(
                f"config.stages.{name}.length = {stage.length}: {path} has {count} positions; set "
                f"--config.adapt.positions={stage.length}, or shorten the stage"
            )


def _tokenizer_to_extend(config: ConfigDict) -> Tokenizer:
    """Returns the tokenizer to which `tokenizer.extend` adds tokens. Raises `UserError` for a fixed vocabulary."""
    kind, path, lowercase = (config.tokenizer[name] for name in ("kind", "path", "lowercase"))
    loaded = (
        tokenizer.load_tokenizer(kind, path, lowercase) if path else pretrained.read_tokenizer(config.init_checkpoint)
    )
    if loaded is None:
        raise UserError(
            f"config.tokenizer.path = '': tokenizer.extend needs a vocabulary, and {config.init_checkpoint} has none; "
            f"set the path of a vocabulary"
        )
    if fault := loaded.cannot_extend:
        raise UserError(f"config.tokenizer.extend = {config.tokenizer.extend}: the tokenizer {fault}; set 0")
    return loaded
