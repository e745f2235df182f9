"""Reads checkpoints of any supported format: a bertjax workdir, a Hugging Face folder, also one that is of
sentence-transformers or on the hub, an adapter of PEFT with its base, or Google's TF1 checkpoint."""

import dataclasses
import re
from collections.abc import Callable, Collection

import flax.traverse_util
import jax
import ml_collections
import numpy as np
from etils import epath

from bertjax.common.errors import UserError
from bertjax.common.files import inside, read_json, read_whole
from bertjax.config.model_config import BertConfig, Compute, fields_of
from bertjax.config.stages import config_after
from bertjax.interop import hf_tokenizer, hub, huggingface, peft_adapter, sentence_transformers, tf1
from bertjax.models import families
from bertjax.models.family import ImportsParams
from bertjax.models.library_fields import tables
from bertjax.nn.ops import low_rank
from bertjax.objectives.objective import joint_models
from bertjax.objectives.parsing import terms_of_run
from bertjax.text import tokenizer
from bertjax.text.tokenizer import Tokenizer
from bertjax.text.words import SPACES, join_of
from bertjax.training.checkpoints import checkpoint, workdir
from bertjax.training.checkpoints.workdir import RunInfo

FORMATS = ("bertjax", "huggingface", "tf1")  # formats of whole models
WHICH = re.compile(r"(.*)@(latest|best|\d+)")  # a path with a choice of checkpoint: "runs/mrpc@best", "runs/mrpc@75"
BEST_RUN = "best"  # file in the workdir of a search with the path of its best run, such as "runs/seed=1"


@dataclasses.dataclass(frozen=True)
class Pretrained:
    """A checkpoint: params (NumPy, float32, our layout; heads may be missing), model config and tokenizer.

    Args:
      ignored: names of arrays in the files that are not part of BERT.
      architecture: the class of transformers, if known.
      labels: names of a classifier's labels.
      problem_type: the `problem_type` of config.json, if the rows of the classifier do not imply it.
      settings: the config of the run; of a folder of sentence-transformers the fields that a run would have; else
        empty.
      dtype: type that predictions compute in, as `config.dtype`: the run's; auto for other formats.
      step: the run's step; 0: not known, as in other formats.
      decided: values tuned on the dev set, such as the "no answer" threshold.
      scores: the scores of a bertjax checkpoint, if it has been evaluated.
      updates: the low-rank updates of a run, which are a part of `params`, by the paths of their kernels.
      fingerprints: the fingerprints of the data that a run has read, by the names of files.
      masked_lm_problem: why it cannot predict words although others could; "" if there is no such reason.
      max_length: the number of tokens that transformers truncates a text to; None if its folder does not state it.
    """

    path: str
    format: str
    config: BertConfig
    params: dict
    tokenizer: Tokenizer | None
    ignored: list[str]
    architecture: str = ""
    labels: tuple[str, ...] = ()
    problem_type: str = ""
    settings: ml_collections.ConfigDict = dataclasses.field(default_factory=ml_collections.ConfigDict)
    dtype: str = "auto"
    step: int = 0
    decided: dict[str, float] = dataclasses.field(default_factory=dict)
    scores: dict[str, float | None] = dataclasses.field(default_factory=dict)
    updates: dict[tuple[str, ...], np.ndarray] = dataclasses.field(default_factory=dict)
    fingerprints: dict[str, str] = dataclasses.field(default_factory=dict)
    masked_lm_problem: str = ""
    max_length: float | None = None

    @property
    def parts(self) -> dict[str, BertConfig]:
        """Returns the models that a run has trained beside its own, by the names of their params."""
        objectives = joint_models(terms_of_run(self.settings))
        models = {name: model for objective in objectives for name, model in objective.models(self.config).items()}
        return {name: model for name, model in models.items() if name in self.params}

    @property
    def required_tokenizer(self) -> Tokenizer:
        """The tokenizer. Raises `UserError` if the checkpoint has none."""
        if self.tokenizer is None:
            raise UserError(f"{self.path}: no tokenizer beside the checkpoint; add its vocab.txt or tokenizer.json")
        return self.tokenizer

    @property
    def head(self) -> dict:
        """Returns the `config.head` of a bertjax run: the settings of the model on top of BERT."""
        return dict(self.settings.get("head", {}))

    @property
    def predicts_words(self) -> bool:
        """Whether it has an output layer for words: one that is plain has no params."""
        if "masked_lm" in self.params:
            return True
        is_other = self.architecture and not self.architecture.endswith("ForMaskedLM")
        if is_other or not _has_output_of_words(self.params, self.config):
            return False
        heads = (term.objective.heads(self.config, Compute()) for term in terms_of_run(self.settings))
        return "objective" not in self.settings or any("masked_lm" in layers for layers in heads)

    @property
    def no_words(self) -> str:
        """Says why it predicts no words."""
        if self.masked_lm_problem:
            return self.masked_lm_problem
        if {"classifier", "spans"} & self.params.keys():
            return f"{self.path}: a classifier for which there is no task here"
        none, own = f"{self.path}: no masked-LM head to predict words with", next(iter(self.parts), "")
        if own and _has_output_of_words(self.params[own], self.parts[own]):
            return f"{none}; but its {own} has one: bertjax.convert --part={own} makes it a model of its own"
        return f"{none}; bertjax.extract writes hidden states"

    @property
    def is_multi_label(self) -> bool:
        """Whether the labels of a classifier do not exclude each other."""
        rows = self.params["classifier"]["dense"]["bias"].shape[0] if "classifier" in self.params else 0
        is_sigmoid = self.settings.get("activation_fn") == sentence_transformers.SIGMOID
        return self.problem_type == huggingface.MULTI_LABEL or (rows > 1 and is_sigmoid)

    def label_names(self, rows: int) -> tuple[str, ...]:
        """Returns the names of the rows of a classifier. Raises `UserError` if the checkpoint has others."""
        huggingface.check_labels(self.labels, rows, self.path)
        return self.labels or tuple(f"LABEL_{i}" for i in range(rows))

    @property
    def reads_spaced_words(self) -> bool:
        """Whether it tags words that have a space before each, whatever the text has (data.join = spaces)."""
        is_tagger = self.architecture in ("BertForTokenClassification", "BertForFeatureBasedTagging")
        has_spaces = self.tokenizer is not None and bool(self.tokenizer.space)
        return is_tagger and has_spaces and join_of(self.settings) == SPACES

    @property
    def max_seq_length(self) -> int:
        """The sequence length of fine-tuning, if known; otherwise the number of positions, at most `max_length`."""
        positions = self.config.max_position_embeddings
        return self.settings.get("max_seq_length", min(positions, int(self.max_length or positions)))

    @property
    def model_max_length(self) -> int:
        """The length that transformers truncates a text to: as the folder of the checkpoint states it, or the number of
        positions."""
        is_folder = not self.settings.get("task") and self.architecture != sentence_transformers.ARCHITECTURE
        positions = self.config.max_position_embeddings
        return self.max_seq_length if is_folder else min(positions, int(self.max_length or positions))


@dataclasses.dataclass(frozen=True)
class Place:
    """The location of a checkpoint: `step` of the run `info` in a bertjax workdir, `prefix` of a TF1 checkpoint, the
    model of `modules`, a folder of sentence-transformers, or an adapter of PEFT with its `base`."""

    format: str
    folder: epath.Path
    step: int | None = None
    info: RunInfo | None = None
    prefix: epath.Path | None = None
    modules: sentence_transformers.Folder | None = None
    base: "Place | None" = None

    @property
    def vectors(self) -> sentence_transformers.Folder | None:
        """The folder of sentence-transformers, if its model makes vectors."""
        is_encoder = self.modules and self.modules.kind == sentence_transformers.ARCHITECTURE
        return self.modules if is_encoder else None

    def __str__(self) -> str:
        whole = self.modules.path if self.modules else self.folder
        return f"{self.prefix or whole}" + (f"@{self.step}" if self.step is not None else "")


def read(path: epath.PathLike) -> Pretrained:
    """Reads a checkpoint of any of the `FORMATS`, or an adapter of PEFT with its base.

    Raises `UserError` if the checkpoint is missing or incomplete.

    From a bertjax run, reads the best checkpoint after fine-tuning and the latest after pre-training, unless the path
    ends in "@best", "@latest" or "@STEP".
    """
    return _read(find(path))


def _read(place: Place) -> Pretrained:
    config, known = _read_config(place), {}
    if place.format == "bertjax":
        info = place.info
        params, ignored = checkpoint.read_params(place.folder, place.step), []
        if lora := low_rank.of(info.config):
            known["updates"] = low_rank.updates_of(params, lora)
            params = low_rank.merge(params, known["updates"])
        params = _export_params(params, info.config)
        _check_sizes(params, config, place)
        scores = checkpoint.read_scores(place.folder, place.step)
        known |= dict(architecture=info.architecture, labels=info.labels or (), settings=info.config)
        known |= dict(problem_type=info.problem_type, fingerprints=info.fingerprints or {})
        if _predicts_number(info, params):
            known["problem_type"] = huggingface.REGRESSION
        known |= dict(dtype=info.config.get("dtype", "auto"), step=place.step)
        known |= dict(decided=scores.decided, scores=scores.scores) if scores else {}
    elif place.format == "huggingface":
        params, ignored, known["masked_lm_problem"] = huggingface.read_params(place.folder, config)
        names = ("architecture", "labels", "problem_type")
        known |= zip(names, huggingface.read_head(place.folder / huggingface.CONFIG))
        if not place.vectors:
            theirs = place.folder, config, known["architecture"], place.modules
            known["settings"] = sentence_transformers.read_classifier(*theirs)
    elif place.format == "peft":
        params, ignored, known = _read_adapter(place, config)
    else:
        params, ignored = tf1.read_params(place.prefix, config)
    if place.vectors:
        known |= dict(architecture=sentence_transformers.ARCHITECTURE, labels=(), problem_type="")
        known["settings"] = sentence_transformers.read_settings(place.vectors, config)
        params |= sentence_transformers.read_params(place.vectors, config)
    if place.format in ("huggingface", "peft"):
        known["max_length"] = hf_tokenizer.max_length(_with_tokenizer(place).folder)
    found = _read_tokenizer(place)
    if found is not None and found.vocab_size > config.vocab_size:
        raise UserError(
            f"{place.folder}: its tokenizer has {found.vocab_size} pieces, its model only {config.vocab_size}"
        )
    return Pretrained(str(place), place.format, config, params, found, ignored, **known)


def _read_adapter(place: Place, config: BertConfig) -> tuple[dict, list[str], dict]:
    """Returns the params of a base with an adapter, the names of ignored tensors, and other fields of `Pretrained`."""
    folder, base, layout = place.folder, place.base, families.huggingface_of(config)
    fields, tensors, content = _open_adapter(place)
    if base.format == "huggingface":
        named = huggingface.tensors_of(base.folder)
        _, labels, problem_type = huggingface.read_head(base.folder / huggingface.CONFIG)
    else:
        source = _read(base)
        architecture = layout.choose_architecture(source.params, source.config, source.architecture)
        named = layout.to_tensors(source.params, source.config, architecture)[0].items()
        labels, problem_type = source.labels, source.problem_type
    named, whole = peft_adapter.merged(folder, fields, named, tensors, content)
    params, ignored, masked_lm_problem = layout.read_params(iter(named.items()), content, config, str(folder))
    if strange := sorted(name for name in whole & set(ignored) if not peft_adapter.is_decoder(name)):
        raise UserError(f"{folder}: {strange[0]} fits no layer of the base; {peft_adapter.MERGE}")
    params = peft_adapter.finished(folder, content, params)
    if peft_adapter.adapts_words_alone(fields, tensors) and _has_output_of_words(params, config):
        masked_lm_problem = (
            f"{folder}: the adapter changes the word embeddings, to which the output layer for words is tied"
        )
        params.pop("masked_lm", None)
    architecture = huggingface.head_of(content["architectures"][0], content)
    rows = len(params["classifier"]["dense"]["bias"]) if "classifier" in params else 0
    known = dict(
        architecture=architecture, masked_lm_problem=masked_lm_problem, labels=labels if len(labels) == rows else ()
    )
    known["max_length"] = _max_length(place)
    if architecture.endswith("ForSequenceClassification"):
        known["problem_type"] = problem_type
    if base.format == "huggingface" and not place.vectors:
        theirs = base.folder, config, architecture, place.modules or base.modules
        known["settings"] = sentence_transformers.read_classifier(*theirs)
    return params, ignored, known


def _max_length(place: Place) -> float | None:
    """Returns the length that the files of the tokenizer of an adapter state; None if they state none."""
    if hf_tokenizer.file_in(place.folder) is None and place.base and place.base.format == "huggingface":
        return hf_tokenizer.max_length(place.base.folder)
    return hf_tokenizer.max_length(place.folder)


def _open_adapter(place: Place) -> tuple[peft_adapter.Fields, dict[str, np.ndarray], dict]:
    """Returns the fields and the tensors of an adapter, and the config.json of its base with the adapter."""
    fields, tensors = peft_adapter.read_fields(place.folder), peft_adapter.read_tensors(place.folder)
    return fields, tensors, peft_adapter.config_fields(fields, _config_json(place.base), tensors)


def class_of_adapter(place: Place) -> str:
    """Returns BERT's class with the output layer of a base with an adapter; "" if the class is unknown."""
    _, _, content = _open_adapter(place)
    return huggingface.head_of(content["architectures"][0], content)


def _config_json(base: Place) -> dict:
    """Returns the config.json of the base of an adapter, or the config.json that `convert` writes of the base."""
    if base.format == "huggingface":
        return read_json(base.folder / huggingface.CONFIG)
    config = _read_config(base)
    try:
        huggingface.check_exportable(config)
    except UserError as error:
        raise UserError(f"{base}: a model with {error} is no base of an adapter of PEFT") from None
    layout = families.huggingface_of(config)
    kind = (base.info.architecture if base.info else "").removeprefix(huggingface.OURS)
    names = [name for name in layout.architectures if kind and name.endswith(kind)]
    return {"architectures": names[:1], "tie_word_embeddings": config.tie_word_embeddings, **layout.to_fields(config)}


def _predicts_number(info: RunInfo, params: dict) -> bool:
    """Whether a run was fine-tuned to predict a number, which its workdir does not name as the problem."""
    is_run = info.config.get("task") and info.architecture == "BertForSequenceClassification" and not info.problem_type
    return bool(is_run and "classifier" in params and params["classifier"]["dense"]["bias"].shape == (1,))


def _export_params(params: dict, config) -> dict:
    """Returns the params of a run without shared parts, see `JointModel.export_params`."""
    for objective in joint_models(terms_of_run(config)):
        params = objective.export_params(params)
    return params


def _has_output_of_words(params: dict, config: BertConfig) -> bool:
    """Whether a model can have learnt words: a plain output layer has no params if it is the embeddings."""
    return "masked_lm" in params or (config.output == "plain" and config.tie_word_embeddings)


def _check_sizes(params: dict, config: BertConfig, place: Place) -> None:
    """Raises `UserError` if the params of a run are not of the sizes that its config says."""
    shown = families.family_of(config).infer_config(params)
    if shown is None:
        raise UserError(
            f"{place.folder / workdir.CONFIG}: model.family is {config.family!r}, but the params are of another"
        )
    for name, values in shown.items():
        if (given := getattr(config, name)) not in values:
            has = f"up to {values[0]}" if isinstance(values, range) else repr(values[0])
            raise UserError(f"{place.folder / workdir.CONFIG}: model.{name} is {given!r}, but the params have {has}")


def read_with_tokenizer(path: epath.PathLike, dtype: str | None = None) -> Pretrained:
    """As `read`, with another `dtype` if that is given. Prints a note of weights that are not read.

    Also raises `UserError` if the checkpoint has no tokenizer.
    """
    source = read(path)
    source = dataclasses.replace(source, dtype=dtype or source.dtype, tokenizer=source.required_tokenizer)
    if source.format in ("huggingface", "peft") and (names := sorted(source.ignored)):
        more = f" and {len(names) - 8} more" * (len(names) > 8)
        tables.note(epath.Path(source.path), f"weights that are not read: {', '.join(names[:8])}{more}")
    return source


def read_config(path: epath.PathLike) -> BertConfig:
    """Reads the model config of a checkpoint, without its arrays."""
    return _read_config(find(path))


def _read_config(place: Place) -> BertConfig:
    if place.format == "bertjax":
        config = place.info.config
        is_of_stage = "stages" in config and place.step  # without a step: params alone, as `convert` writes them
        return families.config_of(config_after(config, place.step) if is_of_stage else config)
    if place.format == "peft":
        _, _, content = _open_adapter(place)
        layout = families.huggingface_of(_read_config(place.base))
        return layout.read_config(place.base.folder / huggingface.CONFIG, content)
    module = huggingface if place.format == "huggingface" else tf1
    return module.read_config(place.folder / module.CONFIG)


def read_settings(path: epath.PathLike) -> tuple[str, ml_collections.ConfigDict]:
    """Reads `architecture` and `settings` of a checkpoint, without its arrays."""
    place = find(path)
    if place.format == "bertjax":
        return place.info.architecture, place.info.config
    if place.vectors:
        settings = sentence_transformers.read_settings(place.vectors, _read_config(place))
        return sentence_transformers.ARCHITECTURE, settings
    return "", ml_collections.ConfigDict()


def read_tokenizer(path: epath.PathLike) -> Tokenizer | None:
    """Reads the tokenizer of a checkpoint: of our run, or `tokenizer.model`, `tokenizer.json` or `vocab.txt`."""
    return _read_tokenizer(find(path))


def _with_tokenizer(place: Place) -> Place:
    """Returns the place of a tokenizer: the base of an adapter, if the adapter has no tokenizer of its own."""
    return place.base if place.base and hf_tokenizer.file_in(place.folder) is None else place


def _read_tokenizer(place: Place) -> Tokenizer | None:
    place = _with_tokenizer(place)
    if place.format == "bertjax":
        return workdir.load_tokenizer(place.folder, place.info)
    found = hf_tokenizer.read(place.folder)
    if place.modules:
        sentence_transformers.check_tokenizer(place.modules, found)
    return found


def require_tokenizer(config) -> Tokenizer:
    """Returns the tokenizer of `config.tokenizer`, or else that of `config.init_checkpoint`; call after `adopt_model`.

    Raises `UserError` if there is none, or if it does not fit the model.
    """
    if path := config.tokenizer.path:
        found = tokenizer.load(config.tokenizer.kind, path, config.tokenizer.lowercase)
        if found.vocab_size > (size := config.model.vocab_size):
            raise UserError(f"config.tokenizer.path = {path!r}: {found.vocab_size} pieces, but the model has {size}")
        check_tokenizer(config.init_checkpoint, found)
        return found
    if (found := read_tokenizer(config.init_checkpoint)) is None:
        raise UserError(
            f"config.tokenizer.path = '': {config.init_checkpoint} has no vocabulary; name the vocab.txt it was "
            f"trained with"
        )
    check_flags(config, found, config.init_checkpoint)
    return found


def find(path: epath.PathLike) -> Place:
    """Locates a checkpoint, which is downloaded if it is one of the hub. Raises `UserError` if there is none."""
    repository, which = hub.repository(path), ""
    path = hub.fetched(repository) if repository else epath.Path(path)
    if (chosen := WHICH.fullmatch(str(path))) and not path.exists():
        path, which = epath.Path(chosen[1]), chosen[2]
    if (best := path / BEST_RUN).is_file():  # the folder of a search
        path = inside(path, read_whole(best).decode(errors="replace").strip(), best)
    if (path / checkpoint.FOLDER).is_dir():
        info = workdir.require_info(path)
        default = "best" if info.architecture and checkpoint.best_step(path) is not None else "latest"
        return Place("bertjax", path, checkpoint.resolve_step(path, which or default), info)
    if which and not (path / workdir.TRIAL_RESULT).exists():
        raise UserError(f"@{which} needs the workdir of a run, but {str(path)!r} is not one")
    if (path / workdir.TRIAL_RESULT).exists():
        raise UserError(f"{path}: not the best trial of its search, so that its checkpoint was deleted")
    if (path / huggingface.CONFIG).exists() and "task" in read_json(path / huggingface.CONFIG):
        raise UserError(f"{path}: a run that has not saved a checkpoint yet")
    if sentence_transformers.is_folder(path):
        modules = sentence_transformers.open_folder(path)
        if peft_adapter.is_folder(modules.encoder):
            return Place("peft", modules.encoder, modules=modules, base=_find_base(modules.encoder))
        return Place("huggingface", modules.encoder, modules=modules)
    if peft_adapter.is_folder(path):
        return Place("peft", path, base=_find_base(path))
    has_tf1 = (path / f"{tf1.PREFIX}.index").exists() and not list(path.glob("*.safetensors"))
    if (path / huggingface.CONFIG).exists() and not has_tf1:
        return Place("huggingface", path)
    for prefix in (epath.Path(re.sub(r"\.(index|meta|data-\d+-of-\d+)$", "", str(path))), path / tf1.PREFIX):
        if prefix.name and prefix.with_name(prefix.name + ".index").exists():  # "/" has no name
            return Place("tf1", prefix.parent, prefix=prefix)
    raise UserError(
        f"no checkpoint in {str(path)!r}: give the workdir of a run, a Hugging Face folder (config.json and "
        f"model.safetensors), an adapter of PEFT, hub:NAME for one of the hub, or Google's bert_model.ckpt"
    )


def _find_base(adapter: epath.Path) -> Place:
    """Locates the base of an adapter: a path, also from the adapter's folder or beside this folder, or a name on the
    hub. Raises `UserError` if there is none."""
    source, fields = adapter / peft_adapter.CONFIG, peft_adapter.read_fields(adapter)
    named = fields.base_model_name_or_path
    paths = (epath.Path(named), adapter / named, adapter.absolute().parent / named)
    path = next((str(path) for path in paths if path.exists() and path.resolve() != adapter.resolve()), "")
    if not path and not re.fullmatch(r"[\w-][\w.-]*(/[\w-][\w.-]*)?", named):
        raise UserError(
            f"{source}: the base of the adapter, base_model_name_or_path {named!r}, is not there; set it to the folder "
            f"of the base, or to its name on the hub"
        )
    revision = f"@{fields.revision}" if fields.revision else ""
    try:
        if path and peft_adapter.is_folder(epath.Path(path)):  # whose base may be this adapter
            raise UserError(f"is an adapter itself; {peft_adapter.MERGE}")
        place = find(path or f"{hub.PREFIX}{named}{revision}")
        if place.format == "peft":
            raise UserError(f"is an adapter itself; {peft_adapter.MERGE}")
    except UserError as error:
        raise UserError(f"{source}: the base of the adapter, base_model_name_or_path {named!r}: {error}") from None
    return place


def _tokenizer_file(place: Place) -> epath.Path:
    """Returns the file of a tokenizer that there is."""
    place = _with_tokenizer(place)
    if place.format == "bertjax":
        return place.folder / tokenizer.KINDS[place.info.tokenizer["kind"]].filename
    return hf_tokenizer.file_in(place.folder)


def check_flags(config, used: Tokenizer, source: str) -> None:
    """Raises `UserError` if the config says of the tokenizer what the one that is used does not do.

    A default cannot be told from a flag, and says nothing.
    """
    for name, default in (("kind", "wordpiece"), ("lowercase", True)):
        if (value := config.tokenizer[name]) not in (default, getattr(used, name)):
            raise UserError(
                f"config.tokenizer.{name} = {value!r}: has no effect, since the tokenizer of {source} is used, with "
                f"{name} = {getattr(used, name)!r}; leave it out, or set tokenizer.path"
            )


def adopt(config) -> None:
    """Takes the model's behaviour (activation, ...) from `config.init_checkpoint`; also its tokenizer, if the config
    names no tokenizer and no records. Raises `UserError` if the model's sizes or form differ."""
    path = config.init_checkpoint
    place = find(path)
    theirs = _read_config(place)
    if config.model.family != theirs.family:
        raise UserError(
            f"config.model.family = {config.model.family!r}: {path} has {theirs.family!r}; begin with an experiment "
            f"whose model is one"
        )
    names = fields_of(theirs, "size", "form")
    if wrong := {name: getattr(theirs, name) for name in names if config.model[name] != getattr(theirs, name)}:
        name, value = next(iter(wrong.items()))
        flags = " ".join(f"--config.model.{field}={size}" for field, size in wrong.items())
        raise UserError(f"config.model.{name} = {config.model[name]}: {path} has {value}; set {flags}")
    for name in fields_of(theirs, "choice"):
        if config.model[name] != getattr(theirs, name) and jax.process_index() == 0:
            given = config.model[name]
            print(f"config.model.{name} = {given}: {path} was trained with {getattr(theirs, name)}", flush=True)
    config.model.update({name: getattr(theirs, name) for name in fields_of(theirs, "behaviour")})
    adopt_tokenizer(config)


def adopt_tokenizer(config) -> None:
    """Takes the tokenizer of `config.init_checkpoint`, if there is one and the config names none, and no records."""
    place = find(config.init_checkpoint)
    if config.tokenizer.path or config.data.records or (found := _read_tokenizer(place)) is None:
        return
    check_flags(config, found, config.init_checkpoint)
    config.tokenizer.update(kind=found.kind, path=str(_tokenizer_file(place)), lowercase=found.lowercase)


def adopt_model(config, theirs: BertConfig, source: str) -> None:
    """Takes all model fields except dropout, and others that a run may choose, from a checkpoint.

    Raises `UserError` if the config sets other sizes, or fields that the checkpoint's family has not, or if
    `max_seq_length` exceeds the model's positions.
    """
    default, own = dataclasses.asdict(BertConfig()), dataclasses.asdict(theirs)
    taken = fields_of(theirs, "size", "form", "behaviour", "choice")
    for name, value in config.model.items():
        is_none = "dropout" in name and value == 0  # which a model without it has as well
        if name not in own and value != default.get(name) and not is_none:
            has = f"{source} has model.family = {theirs.family!r}, whose models have no such field"
            raise UserError(f"config.model.{name} = {value}: {has}; leave it out")
    for name in taken:
        if config.model.get(name) not in (None, default.get(name), own[name]):
            raise UserError(f"config.model.{name} = {config.model[name]}: {source} has {own[name]}; leave it out")
    if config.get("max_seq_length", 0) > theirs.max_position_embeddings:
        raise UserError(
            f"config.max_seq_length = {config.max_seq_length}: {source} has {theirs.max_position_embeddings} positions "
            f"only; set --config.max_seq_length={theirs.max_position_embeddings} or less"
        )
    chosen = {name: value for name, value in config.model.items() if name in own and name not in taken}
    config.model = families.model_fields(**{**own, **chosen})


def check_tokenizer(path: epath.PathLike, ours: Tokenizer) -> None:
    """Prints how many pieces differ from the checkpoint's tokenizer. Raises `UserError` if more than a tenth do: a few
    replaced pieces, such as `[unused1]`, are fine; another vocabulary would invalidate the embeddings."""
    theirs = read_tokenizer(path)
    if theirs is None or theirs.fingerprint == ours.fingerprint:
        return
    common = min(len(ours.pieces), len(theirs.pieces))
    different = sum(a != b for a, b in zip(ours.pieces, theirs.pieces))
    message = f"{different} of the first {common} pieces of the tokenizer are not those of {path}"
    if different <= 0.1 * common and ours.lowercase != theirs.lowercase:
        raise UserError(f"config.tokenizer.lowercase = {ours.lowercase}: {path} was trained with {theirs.lowercase}")
    if different > 0.1 * common:
        raise UserError(f"config.init_checkpoint: {message}; use its tokenizer, also for records")
    if different and jax.process_index() == 0:
        print(message, flush=True)


def initialize(
    params: dict,
    path: epath.PathLike,
    encoder_only: bool = False,
    continued: Collection[str] = (),
    start: Callable[[dict], dict] = lambda params: params,
    resize: Callable[[dict, BertConfig], dict] = lambda arrays, config: arrays,
) -> dict:
    """Replaces `params` by those of a checkpoint, with the same shardings, and prints what was loaded.

    Args:
      encoder_only: does not load the output layers, which may belong to another task.
      continued: top-level keys of output layers that are loaded nevertheless, where they are of the same sizes.
      start: params of the checkpoint -> those that the run has in their place.
      resize: ({path: array} of the checkpoint, its config) -> arrays of the sizes of `params`.

    Raises `UserError` if a shape differs.
    """
    pretrained = read(path)
    if pretrained.masked_lm_problem and "masked_lm" in params and not encoder_only:
        raise UserError(f"config.init_checkpoint = {str(path)!r}: {pretrained.masked_lm_problem}")
    ours = flattened(params)
    family, theirs = families.family_of(pretrained.config), pretrained.params
    theirs = start(family.import_params(theirs) if isinstance(family, ImportsParams) else theirs)
    theirs = resize(flattened(theirs), pretrained.config)

    def is_used(name: str, array) -> bool:
        part = name.partition("/")[0]
        of_same_size = name in ours and ours[name].shape == array.shape
        return name in ours and (not encoder_only or part == "bert" or (part in continued and of_same_size))

    unused = {name: array for name, array in theirs.items() if not is_used(name, array)}
    theirs = {name: array for name, array in theirs.items() if name not in unused}
    for name in sorted(ours.keys() & theirs.keys()):
        if ours[name].shape != theirs[name].shape:
            raise UserError(
                f"config.init_checkpoint = {str(path)!r}: {name} has shape {theirs[name].shape}, but the model of this "
                f"config has {ours[name].shape}"
            )
    loaded = {name: jax.device_put(theirs[name], x.sharding) if name in theirs else x for name, x in ours.items()}
    if jax.process_index() == 0:
        fresh = sorted(ours.keys() - theirs.keys())
        loaded_arrays = f"{len(ours) - len(fresh)} of {len(ours)} arrays loaded"
        parts = [f"started from {pretrained.path} ({pretrained.format}): {loaded_arrays}"]
        beside = pretrained.parts  # models of their own, each of which has one name
        used = set(map(id, theirs.values()))  # `start` may have copied an array of `unused` to another name
        left = [name for name, array in unused.items() if id(array) not in used]
        left = {part if (part := name.partition("/")[0]) in beside else name for name in left}
        for what, names in (("left fresh", fresh), ("not used", sorted(left) + pretrained.ignored)):
            if names:
                parts.append(f"{what}: {', '.join(names[:8])}{f' and {len(names) - 8} more' * (len(names) > 8)}")
        print("; ".join(parts), flush=True)
    return flax.traverse_util.unflatten_dict(loaded, sep="/")


def flattened(params: dict) -> dict:
    """Flattens params to arrays by path, such as "bert/pooler/dense/kernel"."""
    return flax.traverse_util.flatten_dict(params, sep="/")
