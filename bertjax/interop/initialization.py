"""Starts a run from `config.init_checkpoint`: copies the model config, the tokenizer and the params."""

import dataclasses
from collections.abc import Callable, Collection

import flax.traverse_util
import jax
import numpy as np
from etils import epath
from ml_collections import ConfigDict

from bertjax.common.errors import UserError
from bertjax.config.model_config import BertConfig, fields_with_roles
from bertjax.interop import pretrained
from bertjax.interop.pretrained import flattened, shortened
from bertjax.models import families
from bertjax.models.family import ImportsParams
from bertjax.text import tokenizer
from bertjax.text.tokenizer import Tokenizer


def adopt(config: ConfigDict) -> None:
    """Copies fields of the model that change outputs but not sizes, and the tokenizer, from the checkpoint.

    Copies the tokenizer only if the config names no tokenizer and no records.

    Raises `UserError` if the family, a size or the form of the model differs.
    """
    path, model = config.init_checkpoint, config.model
    source = pretrained.read_config(path)
    if model.family != source.family:
        raise UserError(
            f"config.model.family = {model.family!r}: {path} has {source.family!r}; choose an experiment "
            f"with this family"
        )
    required = {name: getattr(source, name) for name in fields_with_roles(source, "size", "form")}
    if wrong := {name: value for name, value in required.items() if model[name] != value}:
        name, value = next(iter(wrong.items()))
        flags = " ".join(f"--config.model.{field}={size}" for field, size in wrong.items())
        raise UserError(f"config.model.{name} = {model[name]}: {path} has {value}; set {flags}")
    for name in fields_with_roles(source, "choice"):
        if model[name] != (value := getattr(source, name)):
            _print(f"config.model.{name} = {model[name]}: {path} was trained with {value}")
    model.update({name: getattr(source, name) for name in fields_with_roles(source, "behaviour")})
    adopt_tokenizer(config)


def adopt_tokenizer(config: ConfigDict) -> None:
    """Copies the tokenizer of the checkpoint, if it has one and the config names no tokenizer and no records."""
    if config.tokenizer.path or config.data.records:
        return
    place = pretrained.find(config.init_checkpoint)
    if (loaded := place.read_tokenizer()) is not None:
        check_flags(config, loaded, config.init_checkpoint)
        config.tokenizer.update(kind=loaded.kind, path=str(place.tokenizer_file()), lowercase=loaded.lowercase)


def adopt_model(config: ConfigDict, model: BertConfig, source: str) -> None:
    """Copies all model fields of a checkpoint except fields that a run may choose, such as dropout.

    Args:
      config: the config of the run.
      model: the model config of the checkpoint.
      source: the checkpoint, for messages.

    Raises:
      UserError: the config sets another size, or a field that the family of the checkpoint lacks, or `max_seq_length`
        exceeds the positions of the model.
    """
    default, values = dataclasses.asdict(BertConfig()), dataclasses.asdict(model)
    fixed = fields_with_roles(model, "size", "form", "behaviour", "choice")
    for name, value in config.model.items():
        is_no_dropout = "dropout" in name and value == 0  # equals a model without this dropout
        if name not in values and value != default.get(name) and not is_no_dropout:
            has = f"{source} has model.family = {model.family!r}, whose models have no such field"
            raise UserError(f"config.model.{name} = {value}: {has}; leave the field out")
    for name in fixed:
        if config.model.get(name) not in (None, default.get(name), values[name]):
            raise UserError(
                f"config.model.{name} = {config.model[name]}: {source} has {values[name]}; leave the field out"
            )
    if config.get("max_seq_length", 0) > model.max_position_embeddings:
        raise UserError(
            f"config.max_seq_length = {config.max_seq_length}: {source} has {model.max_position_embeddings} positions "
            f"only; set --config.max_seq_length={model.max_position_embeddings} or less"
        )
    chosen = {name: value for name, value in config.model.items() if name in values and name not in fixed}
    config.model = families.model_fields(**{**values, **chosen})


def require_tokenizer(config: ConfigDict) -> Tokenizer:
    """Returns the tokenizer of `config.tokenizer`, or else of `config.init_checkpoint`. Call it after `adopt_model`.

    Raises `UserError` if the tokenizer is missing, or does not fit the model.
    """
    if path := config.tokenizer.path:
        loaded = tokenizer.load_tokenizer(config.tokenizer.kind, path, config.tokenizer.lowercase)
        if loaded.vocab_size > (size := config.model.vocab_size):
            raise UserError(
                f"config.tokenizer.path = {path!r}: has {loaded.vocab_size} tokens, but the model has {size}; choose "
                f"the tokenizer of the model"
            )
        compare_tokenizers(config.init_checkpoint, loaded)
        return loaded
    if (of_checkpoint := pretrained.read_tokenizer(config.init_checkpoint)) is None:
        raise UserError(
            f"config.tokenizer.path = '': {config.init_checkpoint} has no vocabulary; set the vocab.txt of its training"
        )
    check_flags(config, of_checkpoint, config.init_checkpoint)
    return of_checkpoint


def check_flags(config: ConfigDict, used: Tokenizer, source: str) -> None:
    """Raises `UserError` if a field of `config.tokenizer` differs from the default and from the used tokenizer."""
    for name, default in (("kind", "wordpiece"), ("lowercase", True)):
        if (value := config.tokenizer[name]) not in (default, getattr(used, name)):
            raise UserError(
                f"config.tokenizer.{name} = {value!r}: has no effect, since the tokenizer of {source} is used, with "
                f"{name} = {getattr(used, name)!r}; leave the field out, or set tokenizer.path"
            )


def compare_tokenizers(path: epath.PathLike, loaded: Tokenizer) -> None:
    """Prints how many tokens of a tokenizer differ from the tokenizer of a checkpoint.

    Raises `UserError` if more than a tenth differ: the embeddings of another vocabulary are useless. Fewer differences
    may be replaced tokens such as `[unused1]`.
    """
    trained = pretrained.read_tokenizer(path)
    if trained is None or trained.fingerprint == loaded.fingerprint:
        return
    common = min(loaded.vocab_size, trained.vocab_size)
    different = sum(a != b for a, b in zip(loaded.pieces, trained.pieces))
    message = f"{different} of the first {common} tokens of the tokenizer differ from the tokens of {path}"
    if different > 0.1 * common:
        raise UserError(f"config.init_checkpoint: {message}; use the tokenizer of the checkpoint, also for records")
    if loaded.lowercase != trained.lowercase:
        raise UserError(f"config.tokenizer.lowercase = {loaded.lowercase}: {path} was trained with {trained.lowercase}")
    if different:
        _print(message)


def initialize(
    params: dict,
    path: epath.PathLike,
    encoder_only: bool = False,
    continued: Collection[str] = (),
    start: Callable[[dict], dict] = lambda params: params,
    resize: Callable[[dict, BertConfig], dict] = lambda arrays, config: arrays,
) -> dict:
    """Replaces params by the params of a checkpoint, with the same shardings, and prints a summary.

    Args:
      params: the params of the run.
      path: the checkpoint.
      encoder_only: does not load heads, which may belong to another task.
      continued: top-level keys of heads that are loaded in spite of `encoder_only`, if the sizes are equal.
      start: maps the params of the checkpoint to params of the run.
      resize: maps ({path: array}, config) of the checkpoint to arrays with the sizes of `params`.

    Raises:
      UserError: a shape differs, or the params have a masked-LM head and the head of the checkpoint is not supported.
    """
    source = pretrained.read_pretrained(path)
    if source.masked_lm_problem and "masked_lm" in params and not encoder_only:
        raise UserError(f"config.init_checkpoint = {str(path)!r}: {source.masked_lm_problem}")
    current, family = flattened(params), families.family_of(source.config)
    imported = family.import_params(source.params) if isinstance(family, ImportsParams) else source.params
    arrays = resize(flattened(start(imported)), source.config)

    def is_used(name: str, array: np.ndarray) -> bool:
        part = name.partition("/")[0]
        is_continued = part in continued and name in current and current[name].shape == array.shape
        return name in current and (not encoder_only or part == "bert" or is_continued)

    used = {name: array for name, array in arrays.items() if is_used(name, array)}
    for name, array in sorted(used.items()):
        if current[name].shape != array.shape:
            raise UserError(
                f"config.init_checkpoint = {str(path)!r}: {name} has shape {array.shape}, but the model of this "
                f"config has {current[name].shape}"
            )
    parts = [f"started from {source.path} ({source.format}): {len(used)} of {len(current)} arrays loaded"]
    if fresh := sorted(current.keys() - used.keys()):
        parts.append(f"initialized at random: {shortened(fresh)}")
    ids = set(map(id, used.values()))  # `start` may have copied an array to another name
    left = [name for name, array in arrays.items() if name not in used and id(array) not in ids]
    # The name of a joint model stands for all of its arrays.
    shown = {part if (part := name.partition("/")[0]) in source.parts else name for name in left}
    if unused := sorted(shown) + source.ignored:
        parts.append(f"not used: {shortened(unused)}")
    _print("; ".join(parts))
    loaded = {name: jax.device_put(used[name], x.sharding) if name in used else x for name, x in current.items()}
    return flax.traverse_util.unflatten_dict(loaded, sep="/")


def _print(message: str) -> None:
    """Prints a message on the first host."""
    if jax.process_index() == 0:
        print(message, flush=True)
