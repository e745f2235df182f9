"""The checkpoint that a run starts from, `config.init_checkpoint`: the fields that it determines, and its params.

Adapting a checkpoint may add pieces to its vocabulary and positions to its table.
"""

from etils import epath
from ml_collections import ConfigDict

from bertjax.common.errors import UserError
from bertjax.config.model_config import BertConfig, fields_of
from bertjax.interop import pretrained, resizing
from bertjax.models import families
from bertjax.objectives.objective import joint_models
from bertjax.objectives.parsing import add_all_settings, parse_objective, terms_of_stages
from bertjax.pretraining.validate import require_memory, validate
from bertjax.text import tokenizer
from bertjax.text.tokenizer import Tokenizer
from bertjax.training.checkpoints.workdir import RunInfo


def adopt(config: ConfigDict, before: RunInfo | None) -> None:
    """Sets the fields that an earlier run or `init_checkpoint` determines.

    A resumed run also keeps the text of its objective, and a branch the records of its parent.

    Args:
      config: the config to change.
      before: the info of the run to resume or of the parent; None for a new run.
    """
    if before is not None:
        if config.branch_from and not config.data.records:
            config.data.records = _records_of_parent(config.branch_from, before)
        if parse_objective(before.config) == parse_objective(config):
            config.objective = before.config.objective
    add_all_settings(config)
    adopt_checkpoint(config, before)


def adopt_checkpoint(config: ConfigDict, before: RunInfo | None = None) -> None:
    """Sets the fields that `init_checkpoint` determines: the behaviour of the model and the tokenizer, if it is unset.

    With `adapt.model` the whole model is adopted.

    Args:
      config: the config to change.
      before: the info of an earlier run, which determines the fields in place of the checkpoint.

    Raises:
      UserError: if the config does not suit the checkpoint.
    """
    if not config.init_checkpoint:
        return
    if config.adapt.model:
        path = config.init_checkpoint
        model = pretrained.read_config(path) if before is None else families.config_of(before.config)
        pretrained.adopt_model(config, model, path)
        if before is None:
            pretrained.adopt_tokenizer(config)
            _extend_model(config)
        _check_stages(config)
        require_memory(config)
        validate(config, with_data=False, is_adopted=True)  # the first validation did not check the model
    elif before is None:
        pretrained.adopt(config)
    else:  # the checkpoint may have been deleted since the run began
        names = fields_of(families.config_of(before.config), "behaviour")
        config.model.update({name: before.config.model[name] for name in names})


def import_params(config: ConfigDict, params: dict) -> dict:
    """Returns the params from which training starts, from the params of the checkpoint."""
    for objective in joint_models(terms_of_stages(config)):
        params = objective.import_params(params)
    return params


def resize_embeddings(config: ConfigDict, axes: dict, used: Tokenizer, arrays: dict, model: BertConfig) -> dict:
    """Returns the arrays of the checkpoint with new pieces (`tokenizer.extend`) and new positions (`adapt.positions`).

    Args:
      config: the whole config.
      axes: the logical axes of the params.
      used: the tokenizer of the run, with the new pieces.
      arrays: {path: array} of the checkpoint.
      model: the model config of the checkpoint.
    """
    del model
    axes = pretrained.flattened(axes)
    if config.tokenizer.extend:
        rows = families.config_of(config).padded_vocab_size
        arrays = resizing.with_pieces(arrays, axes, rows, _extended_tokenizer(config), used)
    if config.adapt.positions:
        arrays = resizing.with_positions(arrays, axes, families.config_of(config), config.adapt.positions_from)
    return arrays


def _extend_model(config: ConfigDict) -> None:
    """Sets the sizes for new pieces and positions. Raises `UserError` for fewer positions than the checkpoint has."""
    if config.tokenizer.extend:
        pieces = _extended_tokenizer(config).vocab_size + config.tokenizer.extend
        config.model.vocab_size = max(config.model.vocab_size, pieces)  # published models may have unused rows
    positions, count = config.adapt.positions, config.model.max_position_embeddings
    if positions and positions < count:
        raise UserError(
            f"config.adapt.positions = {positions}: {config.init_checkpoint} has {count} positions; choose more, or 0"
        )
    config.model.max_position_embeddings = positions or count


def _check_stages(config: ConfigDict) -> None:
    """Raises `UserError` for a stage that the adopted model cannot have."""
    path, count = config.init_checkpoint, config.model.max_position_embeddings
    for name, stage in config.stages.items():
        for field in stage.get("model", {}):
            if field not in config.model:
                raise UserError(
                    f"config.stages.{name}.model.{field}: {path} has model.family = {config.model.family!r}, whose "
                    f"models have no such field; delete the field"
                )
        if stage.length > count:
            raise UserError(
                f"config.stages.{name}.length = {stage.length}: {path} has {count} positions; set "
                f"--config.adapt.positions={stage.length}, or shorten the stage"
            )


def _extended_tokenizer(config: ConfigDict) -> Tokenizer:
    """Returns the tokenizer that `tokenizer.extend` extends. Raises `UserError` if it cannot be extended."""
    kind, path, lowercase = (config.tokenizer[name] for name in ("kind", "path", "lowercase"))
    loaded = tokenizer.load(kind, path, lowercase) if path else pretrained.read_tokenizer(config.init_checkpoint)
    if loaded is None:
        raise UserError(
            f"config.tokenizer.path = '': {config.init_checkpoint} has no vocabulary to extend; set the path of one"
        )
    if fault := loaded.cannot_extend:
        raise UserError(f"config.tokenizer.extend = {config.tokenizer.extend}: the tokenizer {fault}; set 0")
    return loaded


def _records_of_parent(branch_from: str, parent: RunInfo) -> str:
    """Returns the folder of the records of the parent."""
    workdir = branch_from.rpartition("@")[0]
    return parent.config.data.records or str(epath.Path(workdir) / "records")
