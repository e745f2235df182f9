"""Converts checkpoints between formats."""

import contextlib
import dataclasses
from collections.abc import Iterator, Mapping
from typing import Any

from etils import epath

from bertjax.common.errors import UserError
from bertjax.common.files import read_json, require_new_folder, write_whole
from bertjax.config.defaults import common_config
from bertjax.data.records.manifest import read_manifest
from bertjax.interop import cross_encoder, hf_tokenizer, hub, huggingface, peft_writer, sentence_transformers, tf1
from bertjax.interop.model_card import model_card, shown_name
from bertjax.interop.pretrained import (
    WHICH,
    Pretrained,
    RunPlace,
    find,
    read_config,
    read_tokenizer,
    tokenizer_of,
)
from bertjax.models import families
from bertjax.models.heads import count_parameters
from bertjax.models.library_fields.tables import defaults_of
from bertjax.objectives.objective import joint_models
from bertjax.objectives.parsing import OBJECTIVE_OF_LM_TYPE, terms_of_run
from bertjax.training.checkpoints import checkpoint, workdir
from bertjax.training.checkpoints.workdir import RunInfo
from bertjax.training.scores import Scores

CARDED = ("huggingface", "sentence-transformers")  # formats with a model card
PUSHED = (*CARDED, "peft")  # formats of the hub
SPACED = (
    "the tagger was trained with data.join = spaces, a space before each word and punctuation mark: transformers' "
    "pipeline finds fewer entities in text; train with data.join=text for the same tags"
)
# Fields of config.json and tokenizer_config.json that describe the writer of the file, or repeat other fields.
BOOKKEEPING = ("transformers_version", "torch_dtype", "dtype", "architectures", "label2id", "use_cache",
               "gradient_checkpointing", "tokenizer_class", "name_or_path", "tokenizer_file", "special_tokens_map_file",
               "added_tokens_decoder", "backend", "is_local", "local_files_only")  # fmt: skip

ENDLESS = 10**18  # transformers writes a larger model_max_length for texts of any length


def convert(
    source: epath.PathLike,
    output: epath.PathLike,
    to: str,
    architecture: str = "",
    license_name: str = "",
    part: str = "",
    push: str = "",
    is_private: bool = False,
    base: str = "",
) -> str:
    """Converts a checkpoint. Writes a model card for a run of bertjax.

    Args:
      source: the checkpoint.
      output: the new folder.
      to: one of `pretrained.FORMATS`, sentence-transformers or peft.
      architecture: the class of transformers for the format huggingface; "" for the class that keeps most params.
      license_name: the license in the model card.
      part: a model that the run has trained jointly, which is converted instead of the model of the run.
      push: a repository of the hub, USER/NAME; the folder is pushed to this repository as well.
      is_private: whether a new repository is private.
      base: the name on the hub of the base of an adapter; "" for the `init_checkpoint` of the run.

    Returns:
      A summary in one line.

    Raises:
      UserError: the format cannot contain the model, an option does not apply to the format, or the push fails.
    """
    output = epath.Path(output)
    _check_options(to, architecture, license_name, push, is_private, base)
    require_new_folder(output)
    place = find(source)
    whole = place.read()
    selected = _part_of(whole, part) if part else whole
    if to != "bertjax":
        _require_class(selected, to)
    if to == "peft":
        summary = _write_adapter(output, selected, push, base)
    else:
        selected, left_out = _without_lstm(selected, to)
        architecture = _class_for(selected, to, architecture)
        manifest = _manifest(selected, place.folder) if to in CARDED else None  # raises before anything is written
        summary = _write_model(output, selected, to, architecture, left_out)
        if to in CARDED and selected.settings.get("task"):
            name, license_name = push or output.name, license_name or "unknown"
            card = model_card(selected, whole.settings, to, architecture, manifest, name, license_name, part)
            write_whole(output / "README.md", card)
        _check_written(output, selected)
        if to in CARDED and place.format == "huggingface":
            for change in _changes(place.folder, output):
                print(change, flush=True)
        summary += [SPACED] if to == "huggingface" and whole.reads_spaced_words else []
        summary += [] if selected.tokenizer else ["the checkpoint has no tokenizer"]
        summary += [f"ignored, not part of BERT: {', '.join(selected.ignored[:8])}"] if selected.ignored else []
    if push:
        summary.append(f"pushed to {hub.push(output, push, is_private)}")
    return "; ".join(summary)


def _check_options(to: str, architecture: str, license_name: str, push: str, is_private: bool, base: str) -> None:
    """Raises `UserError` for an option that does not apply to the format, or if nothing can be pushed to `push`."""
    if is_private and not push:
        raise UserError("--private: needs --push=USER/NAME; add --push")
    options = {"push": (push, PUSHED), "base": (base, ("peft",)), "architecture": (architecture, ("huggingface",))}
    for option, (value, formats) in options.items():
        if value and to not in formats:
            raise UserError(f"--{option}={value}: only for --format={', '.join(formats)}")
    if license_name and to not in CARDED:
        raise UserError(f"--license={license_name}: only for --format={' or '.join(CARDED)}")
    if push:
        hub.check_push(push)


def _without_lstm(source: Pretrained, to: str) -> tuple[Pretrained, list[str]]:
    """Returns a model without the values and heads that a format cannot contain, and their names.

    Only bertjax has a class for a BiLSTM on top of the encoder, and stores values that were tuned on the dev set.
    """
    if to == "bertjax":
        return source, []
    left_out = [f"{name} = {value:.4g}" for name, value in source.decided.items()]
    if "lstm" in source.params:
        left_out = sorted(source.params.keys() - {"bert"}) + left_out
        encoder = {"bert": source.params["bert"]}
        source = dataclasses.replace(source, params=encoder, architecture="", labels=(), problem_type="")
    return source, left_out


def _class_for(source: Pretrained, to: str, architecture: str) -> str:
    """Returns the class of transformers for a model, or for the encoder of embeddings; "" for other formats.

    Raises `UserError` if the family of the model does not have the class `architecture`.
    """
    if to not in CARDED:
        return ""
    layout = families.huggingface_of(source.config)
    if architecture and architecture not in layout.architectures:
        raise UserError(f"--architecture={architecture}: choose one of {', '.join(layout.architectures)}")
    if to == "sentence-transformers" and not source.is_cross_encoder:
        if source.architecture != sentence_transformers.ARCHITECTURE:
            raise UserError(
                f"{source.path}: computes no embeddings of texts, and no score of a pair of texts; train it for "
                f"embeddings or for rerank first, or write it with --format=huggingface"
            )
        return layout.choose_architecture({"bert": source.params["bert"]}, source.config)
    return architecture or layout.choose_architecture(source.params, source.config, source.architecture)


def _write_model(output: epath.Path, source: Pretrained, to: str, architecture: str, left_out: list[str]) -> list[str]:
    """Writes a model in a format other than peft; returns the parts of the summary."""
    config, params = source.config, source.params
    if source.architecture == sentence_transformers.ARCHITECTURE and to in ("huggingface", "tf1"):
        head = ", ".join(f"{name} = {value!r}" for name, value in source.head.items())
        left_out.append(f"how embeddings are computed ({head}), which --format=sentence-transformers keeps")
    is_cross_encoder = to == "sentence-transformers" and source.is_cross_encoder
    if to == "sentence-transformers" and not is_cross_encoder:
        left_out += sentence_transformers.write(
            output, config, params, tokenizer_of(source), source.settings, source.max_seq_length, architecture
        )
        architecture = sentence_transformers.ARCHITECTURE
    elif to in CARDED:
        activation = cross_encoder.activation_of(source.settings, source.problem_type)
        metadata = huggingface.Metadata(source.labels, source.problem_type, activation, source.model_max_length)
        left_out += huggingface.write(output, config, params, source.tokenizer, architecture, metadata)
        windows = source.settings.get("data", {}).get("windows", "")
        left_out += [f"data.windows = {windows!r}: long texts are truncated"] if windows else []
        prompt = cross_encoder.query_prompt_of(source.settings)
        if prompt and not is_cross_encoder and source.architecture == cross_encoder.ARCHITECTURE:
            left_out.append(f"data.query_prompt = {prompt!r}, which --format=sentence-transformers keeps")
        if is_cross_encoder:
            cross_encoder.write(output, source.settings, activation, source.max_seq_length)
    elif to == "tf1":
        left_out += tf1.write(output, config, params, source.tokenizer)
    else:
        _write_run(output, source)
    summary = [f"{source.format} -> {to}: {count_parameters(params, config):,} params in {output}"]
    if left_out:
        summary.append(f"left out, because {architecture or 'the format'} cannot store them: {', '.join(left_out[:8])}")
    return summary


def _write_run(output: epath.Path, source: Pretrained) -> None:
    """Writes the workdir of a run with params alone."""
    config = common_config()
    config.update(source.settings)
    config.model = families.model_fields(**dataclasses.asdict(source.config))
    checkpoint.write_params(output, source.params)
    if source.decided:
        checkpoint.write_scores(output, 0, Scores({}, decided=source.decided))
    if source.max_length and "max_seq_length" not in config:
        config.max_seq_length = source.max_seq_length
    info = RunInfo(config, source.architecture, source.labels, problem_type=source.problem_type)
    workdir.write_info(output, info, source.tokenizer)


def _write_adapter(output: epath.Path, source: Pretrained, push: str, base: str) -> list[str]:
    """Writes an adapter of PEFT; returns the parts of the summary. `push` and `base` are as in `convert`."""
    layout = families.huggingface_of(source.config)
    architecture = layout.choose_architecture(source.params, source.config, source.architecture)
    started_from = source.settings.get("init_checkpoint", "")
    repository = hub.repository(f"{hub.PREFIX}{base.removeprefix(hub.PREFIX)}" if base else started_from)
    if push and not repository:
        raise UserError(
            f"--push={push}: the base of the adapter, init_checkpoint {started_from!r}, has no name on the hub; "
            f"push the base first, and add --base=USER/NAME"
        )
    if repository and repository.folder:
        raise UserError(
            f"--format=peft: the base of the adapter, {started_from!r}, is a folder in a repository, which "
            f"base_model_name_or_path cannot name; use --format=huggingface"
        )
    has_words = not repository and _is_extended(started_from, source.config.vocab_size)
    name, revision, _ = repository or hub.Repository(shown_name(WHICH.sub(r"\1", started_from)), "")
    size = peft_writer.write(output, source, architecture, name, revision, has_words)
    summary = [f"{source.format} -> peft: an adapter for {architecture}, {size:,} numbers in {output}"]
    if not repository:
        summary.append(
            f"base_model_name_or_path is {name!r}, the name of a folder: put the base beside the adapter, or "
            f"name the base on the hub with --base=USER/NAME"
        )
    summary += [f"left out: {decided} = {value:.4g}" for decided, value in source.decided.items()]
    if prompt := cross_encoder.query_prompt_of(source.settings):
        summary.append(f"left out: data.query_prompt = {prompt!r}; write it before each query")
    summary += [f"left out: labels {', '.join(source.labels)}"] if source.labels else []
    summary += [f"left out: problem_type {source.problem_type}"] if source.problem_type else []
    return summary


def _check_written(output: epath.Path, source: Pretrained) -> None:
    """Empties a written folder and raises `UserError` if bertjax cannot read it, or reads other tokens."""
    reason = ""
    try:
        read_config(output)
        written = read_tokenizer(output)
        if written and source.tokenizer and written.pieces != source.tokenizer.pieces:
            reason = "the tokenizer has other tokens"
    except UserError as error:
        reason = str(error)
    if reason:
        for path in output.iterdir():
            path.rmtree() if path.is_dir() else path.unlink()
        raise UserError(f"{source.path}: the written checkpoint cannot be read ({reason}); {output} was emptied")


def _changes(source: epath.Path, output: epath.Path) -> Iterator[str]:
    """Yields a line for each field of config.json and tokenizer_config.json that a written folder lacks or changes.

    Skips omitted fields with the default of transformers: a folder without them has the same values.
    """
    for name, kind in ((huggingface.CONFIG, ""), (hf_tokenizer.SETTINGS, "tokenizer")):
        if not (source / name).exists() or not (output / name).exists():
            continue
        before: dict[str, Any] = read_json(source / name)
        after: dict[str, Any] = read_json(output / name)
        fixed = hf_tokenizer.FIXED if kind else {}
        defaults = fixed | defaults_of("transformers", kind or before.get("model_type", "bert"))
        for field, value in before.items():
            if after.get(field, defaults.get(field, ...)) == value or _is_insignificant(field, value, field in after):
                continue
            shown = str(value) if len(str(value)) <= 100 else f"{str(value)[:100]}..."
            change = f"written as {after[field]}" if field in after else "not written"
            yield f"{name}: {field} {shown} is {change}"


def _is_insignificant(field: str, value: Any, is_written: bool) -> bool:
    """Returns whether a change or an omission of a field of config.json or tokenizer_config.json has no effect."""
    if field in BOOKKEEPING or field.startswith("_") or (not is_written and value in (None, {}, [])):
        return True
    if field == "id2label":  # the names that transformers uses without this field
        return all(name == f"LABEL_{number}" for number, name in dict(value or {}).items())
    return field == "model_max_length" and isinstance(value, int | float) and value > ENDLESS


def _is_extended(path: str, size: int) -> bool:
    """Returns whether a vocabulary of `size` tokens extends the vocabulary of the published base of a model.

    Args:
      path: the `init_checkpoint` of the model.
      size: the vocabulary size of the model.
    """
    try:
        while path and not hub.repository(path):
            place = find(path)
            settings: Mapping[str, Any] = place.info.config if isinstance(place, RunPlace) else {}
            if place.read_config().vocab_size != size or settings.get("tokenizer", {}).get("extend"):
                return True
            path = settings.get("init_checkpoint", "")
    except UserError:  # the checkpoint no longer exists
        return False
    return False


def _part_of(source: Pretrained, name: str) -> Pretrained:
    """Returns a model that a run has trained jointly, as if the run had trained this model only."""
    if name not in (parts := source.parts):
        has = f"has {', '.join(parts)}" if parts else "has no second model; leave --part out"
        raise UserError(f"--part={name}: {source.path} {has}")
    config, settings = parts[name], source.settings.copy_and_resolve_references().unlock()
    family = families.family_of(config)
    if type(config) is not family.config_class:
        raise UserError(
            f"--part={name}: the embedding size {config.embedding_size} and the hidden size {config.hidden_size} must "
            f"be equal in a separate model with model.family = {config.family!r}"
        )
    settings.objective = OBJECTIVE_OF_LM_TYPE[family.lm_type(config)]
    if "objectives" in settings:
        del settings["objectives"]
    for stage in settings.stages.values():
        if "objective" in stage:
            del stage["objective"]
    terms = terms_of_run(source.settings)
    with_part = [term for term in terms for model in joint_models([term]) if name in model.models(source.config)]
    prefixes = tuple(f"{term.name}_" for term in terms if term not in with_part)
    scores = {score: value for score, value in source.scores.items() if not score.startswith(prefixes)}
    return dataclasses.replace(source, config=config, params=source.params[name], settings=settings, scores=scores)


def _manifest(source: Pretrained, workdir: epath.Path) -> Mapping[str, Any] | None:
    """Returns the manifest of the records of a pre-training run; None if the records no longer exist."""
    if source.settings.get("task") != "pretraining":
        return None
    return read_manifest(source.settings.data.records or workdir / "records")


def _require_class(source: Pretrained, to: str) -> None:
    """Raises `UserError` if a format has no class for a model."""
    try:
        (tf1 if to == "tf1" else huggingface).check_exportable(source.config)
    except UserError as error:
        formats = "use --format=bertjax"
        with contextlib.suppress(UserError):
            huggingface.check_exportable(source.config)
            formats = "use --format=huggingface or --format=bertjax"
        raise UserError(f"{source.path}: --format={to} does not support a model with {error}; {formats}") from None
