"""Converts checkpoints between the formats of `pretrained.FORMATS`, and writes model cards."""

import contextlib
import dataclasses
from collections.abc import Iterator, Mapping

import ml_collections
from etils import epath

from bertjax.common.errors import UserError
from bertjax.common.files import read_json, require_new_folder, write_whole
from bertjax.config.defaults import common_config
from bertjax.data.records.manifest import read_manifest
from bertjax.interop import hf_tokenizer, hub, huggingface, peft_writer, sentence_transformers, tf1
from bertjax.interop.model_card import model_card, name_of
from bertjax.interop.pretrained import WHICH, Pretrained, find, read, read_config, read_tokenizer
from bertjax.models import families
from bertjax.models.heads import count_parameters
from bertjax.models.library_fields.tables import defaults_of
from bertjax.objectives.objective import joint_models
from bertjax.objectives.parsing import OBJECTIVE_OF_LM_TYPE, terms_of_run
from bertjax.training.checkpoints import checkpoint, workdir
from bertjax.training.checkpoints.workdir import RunInfo
from bertjax.training.scores import Scores

CARDED = ("huggingface", "sentence-transformers")  # formats with a model card
SPACED = (
    "the tagger was trained with data.join = spaces, a space before each word and punctuation mark: transformers' "
    "pipeline finds fewer entities in text; train with data.join=text for the same tags"
)
PUSHED = (*CARDED, "peft")  # formats that the hub has
# Fields of config.json and tokenizer_config.json that tell who wrote a file, or that other fields tell as well.
BOOKKEEPING = ("transformers_version", "torch_dtype", "dtype", "architectures", "label2id", "use_cache",
               "gradient_checkpointing", "tokenizer_class", "name_or_path", "tokenizer_file", "special_tokens_map_file",
               "added_tokens_decoder", "backend", "is_local", "local_files_only")  # fmt: skip

ENDLESS = 10**18  # a model_max_length that transformers writes if there is no limit


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
    """Writes `source` to the folder `output` in one of the `FORMATS`, or another; returns a one-line summary.

    For Hugging Face and sentence-transformers, a bertjax run gets a model card, with this license. `part`: a model that
    the run has trained beside its own, which is written in its place. `push`: a repository of the hub, USER/NAME, where
    the folder is pushed as well; `is_private`: if it is new, only its owner sees it. `base`: the name on the hub of the
    model that an adapter is for; "" for that of the run's `init_checkpoint`.
    """
    if is_private and not push:
        raise UserError("--private: only for --push=USER/NAME")
    if push and to not in PUSHED:
        raise UserError(f"--push={push}: only for --format={', '.join(PUSHED)}")
    if push:
        hub.check_push(push)
    if base and to != "peft":
        raise UserError(f"--base={base}: only for --format=peft")
    summary = _convert(source, output, to, architecture, license_name, part, push, base)
    return f"{summary}; pushed to {hub.push(output, push, is_private)}" if push else summary


def _convert(
    source: epath.PathLike,
    output: epath.PathLike,
    to: str,
    architecture: str,
    license_name: str,
    part: str,
    push: str,
    base: str,
) -> str:
    """As `convert`, without pushing the folder."""
    output = epath.Path(output)
    require_new_folder(output)
    name = push or output.name  # the name that the card has for the model
    if architecture and to != "huggingface":
        raise UserError(f"--architecture={architecture}: only for --format=huggingface")
    if license_name and to not in CARDED:
        raise UserError(f"--license={license_name}: only for --format={' or '.join(CARDED)}")
    whole, left_out = read(source), []
    pretrained = _part_of(whole, part) if part else whole
    if to != "bertjax":
        _require_class(pretrained, to)
    has_vectors = pretrained.architecture == sentence_transformers.ARCHITECTURE
    if to == "sentence-transformers":
        _require_vectors(pretrained)
    layout = families.huggingface_of(pretrained.config) if to in ("peft", *CARDED) else None
    if architecture and architecture not in layout.architectures:
        known = ", ".join(layout.architectures)
        raise UserError(f"--architecture={architecture}: choose one of {known}")
    manifest = _manifest(pretrained, find(source).folder) if to in CARDED else None
    # Other formats have no class for the model on top of BERT.
    if "lstm" in pretrained.params and to not in ("bertjax", "peft"):
        left_out = sorted(pretrained.params.keys() - {"bert"})
        encoder = {"bert": pretrained.params["bert"]}
        pretrained = dataclasses.replace(pretrained, params=encoder, architecture="", labels=(), problem_type="")
    if to != "bertjax":
        left_out += [f"{name} = {value:.4g}" for name, value in pretrained.decided.items()]
    if has_vectors and to in ("huggingface", "tf1"):
        head = ", ".join(f"{name} = {value!r}" for name, value in pretrained.head.items())
        left_out.append(f"how vectors are made ({head}), which --format=sentence-transformers keeps")
    if to == "sentence-transformers":
        given = pretrained.config, pretrained.params, pretrained.tokenizer, pretrained.settings
        encoder = layout.choose_architecture({"bert": pretrained.params["bert"]}, pretrained.config)
        left_out += sentence_transformers.write(output, *given, pretrained.max_seq_length, encoder)
        architecture = sentence_transformers.ARCHITECTURE
        kept = {name: x for name, x in pretrained.params.items() if name in ("bert", "projection")}
        if pretrained.settings.get("task"):
            given = manifest, name, encoder, kept, license_name or "unknown"
            write_whole(output / "README.md", _model_card(pretrained, whole.settings, *given, makes_vectors=True))
    elif to == "huggingface":
        chosen = layout.choose_architecture(pretrained.params, pretrained.config, pretrained.architecture)
        architecture = architecture or chosen
        left_out += huggingface.write(
            output,
            pretrained.config,
            pretrained.params,
            pretrained.tokenizer,
            architecture,
            pretrained.labels,
            pretrained.problem_type,
            sentence_transformers.of_classifier(pretrained.settings, pretrained.problem_type),
            pretrained.model_max_length,
        )
        if pretrained.settings.get("task"):
            tensors, _ = layout.to_tensors(pretrained.params, pretrained.config, architecture)
            given = manifest, name, architecture, tensors, license_name or "unknown"
            write_whole(output / "README.md", _model_card(pretrained, whole.settings, *given, part=part))
    elif to == "peft":
        return _write_adapter(output, pretrained, push, base)
    elif to == "tf1":
        left_out += tf1.write(output, pretrained.config, pretrained.params, pretrained.tokenizer)
    else:
        config = common_config()
        config.update(pretrained.settings)
        config.model = families.model_fields(**dataclasses.asdict(pretrained.config))
        checkpoint.write_params(output, pretrained.params)
        if pretrained.decided:
            checkpoint.write_scores(output, 0, Scores({}, decided=pretrained.decided))
        if pretrained.max_length and "max_seq_length" not in config:
            config.max_seq_length = pretrained.max_seq_length
        info = RunInfo(config, pretrained.architecture, pretrained.labels, problem_type=pretrained.problem_type)
        workdir.write_info(output, info, pretrained.tokenizer)
    _check_written(output, pretrained)
    if to in CARDED and (place := find(source)).format == "huggingface":
        for change in _changes(place.folder, output):
            print(change, flush=True)
    size = count_parameters(pretrained.params, pretrained.config)
    parts = [f"{pretrained.format} -> {to}: {size:,} params in {output}"]
    if left_out:
        parts.append(f"left out, for which {architecture or 'it'} has no place: {', '.join(left_out[:8])}")
    if to == "huggingface" and whole.reads_spaced_words:
        parts.append(SPACED)
    if pretrained.tokenizer is None:
        parts.append("no tokenizer was found beside it")
    if pretrained.ignored:
        parts.append(f"ignored, not part of BERT: {', '.join(pretrained.ignored[:8])}")
    return "; ".join(parts)


def _write_adapter(output: epath.Path, source: Pretrained, push: str, base: str) -> str:
    """Writes an adapter of PEFT; returns a one-line summary. `push` and `base`: as in `convert`."""
    layout = families.huggingface_of(source.config)
    architecture = layout.choose_architecture(source.params, source.config, source.architecture)
    started_from = source.settings.get("init_checkpoint", "")
    repository = hub.repository(f"{hub.PREFIX}{base.removeprefix(hub.PREFIX)}" if base else started_from)
    if push and not repository:
        raise UserError(
            f"--push={push}: the base of the adapter, init_checkpoint {started_from!r}, has no name on the hub; "
            f"push the base first, and add --base=USER/NAME"
        )
    has_words = not repository and _is_extended(started_from, source.config.vocab_size)
    named = repository or (name_of(WHICH.sub(r"\1", started_from)), "")
    size = peft_writer.write(output, source, architecture, *named, has_words)
    parts = [f"{source.format} -> peft: an adapter for {architecture}, {size:,} numbers in {output}"]
    if not repository:
        parts.append(
            f"base_model_name_or_path is {named[0]!r}, the name of a folder: put the base beside the adapter, or "
            f"name the base on the hub with --base=USER/NAME"
        )
    left_out = [f"{name} = {value:.4g}" for name, value in source.decided.items()]
    left_out += [f"labels {', '.join(source.labels)}"] * bool(source.labels)
    left_out += [f"problem_type {source.problem_type}"] * bool(source.problem_type)
    return "; ".join([*parts, *(f"left out: {each}" for each in left_out)])


def _check_written(output: epath.Path, source: Pretrained) -> None:
    """Raises `UserError` and deletes the files of a folder if bertjax does not read it, or reads other pieces."""
    try:
        read_config(output)
        written = read_tokenizer(output)
        reason = "the tokenizer has other pieces" if written and written.pieces != source.tokenizer.pieces else ""
    except UserError as error:
        reason = str(error)
    if reason:
        for path in output.iterdir():
            path.rmtree() if path.is_dir() else path.unlink()
        raise UserError(f"{source.path}: cannot be written so that it is read again, and {output} is emptied: {reason}")


def _changes(source: epath.Path, output: epath.Path) -> Iterator[str]:
    """Yields a line for each field of config.json and tokenizer_config.json that a written folder lacks or changes.

    Fields that have the default of transformers are left out: a folder without them has the same values.
    """
    kinds = {huggingface.CONFIG: "", hf_tokenizer.SETTINGS: "tokenizer"}
    for name, kind in kinds.items():
        if not (source / name).exists() or not (output / name).exists():
            continue
        before, after = read_json(source / name), read_json(output / name)
        defaults = defaults_of("transformers", kind or before.get("model_type", "bert"))
        defaults = hf_tokenizer.FIXED | defaults if kind else defaults
        for field, value in before.items():
            is_same = field in after and after[field] == value
            is_left_out = field not in after and (value in (None, {}, []) or defaults.get(field, ...) == value)
            is_endless = field == "model_max_length" and isinstance(value, int | float) and value > ENDLESS
            if is_same or is_left_out or is_endless or _is_plain(field, value):
                continue
            if field in BOOKKEEPING or field.startswith("_"):
                continue
            shown = str(value) if len(str(value)) <= 100 else f"{str(value)[:100]}..."
            yield f"{name}: {field} {shown} is {f'written as {after[field]}' if field in after else 'not written'}"


def _is_plain(field: str, value) -> bool:
    """Whether a field has the names of labels that transformers makes itself."""
    return field == "id2label" and all(name == f"LABEL_{number}" for number, name in dict(value or {}).items())


def _is_extended(path: str, size: int) -> bool:
    """Whether a vocabulary of this size has pieces that the published base of the model at a path lacks."""
    try:
        while path and not hub.repository(path):
            place = find(path)
            if read_config(path).vocab_size != size:
                return True
            settings = place.info.config if place.info else {}
            if settings.get("tokenizer", {}).get("extend"):
                return True
            path = settings.get("init_checkpoint", "")
    except UserError:  # which is no longer there
        return False
    return False


def _part_of(source: Pretrained, name: str) -> Pretrained:
    """Returns a model that a run has trained beside its own, as if it had trained this one."""
    if name not in (parts := source.parts):
        has = f"has {', '.join(parts)}" if parts else "has trained no other model than its own; leave it out"
        raise UserError(f"--part={name}: {source.path} {has}")
    config, settings = parts[name], source.settings.copy_and_resolve_references().unlock()
    if type(config) is not families.family_of(config).config_class:
        raise UserError(
            f"--part={name}: its embeddings have {config.embedding_size} numbers and its hidden states "
            f"{config.hidden_size}, which no model with model.family = {config.family!r} has elsewhere"
        )
    settings.objective = OBJECTIVE_OF_LM_TYPE[families.family_of(config).lm_type(config)]
    if "objectives" in settings:
        del settings["objectives"]
    for stage in settings.stages.values():
        if "objective" in stage:
            del stage["objective"]
    terms = terms_of_run(source.settings)
    part_terms = [term for term in terms for model in joint_models([term]) if name in model.models(source.config)]
    prefixes = tuple(f"{term.name}_" for term in terms if term not in part_terms)
    scores = {score: value for score, value in source.scores.items() if not score.startswith(prefixes)}
    return dataclasses.replace(source, config=config, params=source.params[name], settings=settings, scores=scores)


def _manifest(pretrained: Pretrained, workdir: epath.Path) -> Mapping | None:
    """Returns the manifest of the records of a pre-training run, if they are still there."""
    if pretrained.settings.get("task") != "pretraining":
        return None
    return read_manifest(pretrained.settings.data.records or workdir / "records")


def _model_card(
    pretrained: Pretrained,
    settings: ml_collections.ConfigDict,
    manifest: Mapping | None,
    name: str,
    architecture: str,
    kept: dict,
    license_name: str,
    makes_vectors: bool = False,
    part: str = "",
) -> str:
    pieces, config = pretrained.tokenizer, pretrained.config
    kind = huggingface.split_class(architecture, families.huggingface_of(config))[1]
    fills = pretrained.predicts_words and families.family_of(config).lm_type(config) == "masked"
    return model_card(
        name,
        architecture,
        config,
        params=count_parameters(kept, config),
        settings=settings,
        step=pretrained.step,
        scores=pretrained.scores | pretrained.decided if makes_vectors or kind != "Model" else {},
        manifest=manifest,
        mask="" if not fills else pieces.pieces[pieces.mask_id] if pieces else "[MASK]",
        license_name=license_name,
        makes_vectors=makes_vectors,
        part=part,
    )


def _require_vectors(pretrained: Pretrained) -> None:
    """Raises `UserError` unless the checkpoint says how vectors are made, of texts that it can read."""
    if pretrained.architecture != sentence_transformers.ARCHITECTURE:
        raise UserError(
            f"{pretrained.path}: makes no vectors of texts; train it to make some first, or write it with "
            f"--format=huggingface"
        )
    if pretrained.tokenizer is None:
        raise UserError(f"{pretrained.path}: no tokenizer beside the checkpoint; add its vocab.txt or tokenizer.json")


def _require_class(pretrained: Pretrained, to: str) -> None:
    """Raises `UserError` if the model is one that the other format has no class for."""
    try:
        (tf1 if to == "tf1" else huggingface).check_exportable(pretrained.config)
    except UserError as error:
        kept = "only --format=bertjax keeps it"
        with contextlib.suppress(UserError):
            huggingface.check_exportable(pretrained.config)
            kept = "--format=huggingface and --format=bertjax keep it"
        raise UserError(f"{pretrained.path}: a model with {error} has no place in --format={to}; {kept}") from None
