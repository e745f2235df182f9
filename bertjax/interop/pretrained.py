"""Reads checkpoints of any supported format.

The formats are a bertjax workdir, a Hugging Face folder, a folder of sentence-transformers, an adapter of PEFT with its
base, and a TF1 checkpoint of Google. The Hugging Face hub may contain the folders.
"""

import abc
import dataclasses
import re
from collections.abc import Mapping
from typing import Any, ClassVar

import flax.traverse_util
import jax
import ml_collections
import numpy as np
from etils import epath

from bertjax.common.errors import UserError
from bertjax.common.files import inside, note, read_json, read_whole
from bertjax.config.model_config import BertConfig, Compute
from bertjax.config.stages import config_after
from bertjax.interop import hf_tokenizer, hub, huggingface, peft_adapter, sentence_transformers, tf1
from bertjax.models import families
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
BEST_RUN = "best"  # file in the workdir of a sweep with the path of the best run, such as "runs/seed=1"


@dataclasses.dataclass(frozen=True)
class Pretrained:
    """A checkpoint: params (NumPy, float32, layout of bertjax; heads may be missing), model config and tokenizer.

    Args:
      path: the path of the checkpoint, with the step of a run.
      format: bertjax, huggingface, peft or tf1.
      config: the model config.
      params: the params.
      tokenizer: the tokenizer; None if the checkpoint has none.
      ignored: names of arrays in the files that are not part of the model.
      architecture: the class of transformers, if known.
      labels: names of the labels of a classifier.
      problem_type: the `problem_type` of config.json, if the number of labels does not imply it.
      settings: the config of the run. For a folder of sentence-transformers, the equivalent fields of a run; otherwise
        empty.
      dtype: the `config.dtype` of the run, in which predictions are computed; auto for other formats.
      step: the step of the run; 0 for other formats.
      decided: values tuned on the dev set, such as the "no answer" threshold.
      scores: the scores of a checkpoint of bertjax, if it has been evaluated.
      updates: {path of a kernel: the low-rank update of a run}. `params` include the updates.
      fingerprints: {file name: fingerprint} of the training data of a run.
      masked_lm_problem: the reason why a masked-LM head of the checkpoint is not read; "" without such a head.
      max_length: the number of tokens to which transformers truncates a text; None if the folder does not state it.
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
    updates: Mapping[tuple[str, ...], jax.Array | np.ndarray] = dataclasses.field(default_factory=dict)
    fingerprints: dict[str, str] = dataclasses.field(default_factory=dict)
    masked_lm_problem: str = ""
    max_length: float | None = None

    @property
    def parts(self) -> dict[str, BertConfig]:
        """{name in `params`: config} of the models that the run has trained jointly, such as the generator."""
        objectives = joint_models(terms_of_run(self.settings))
        models = {name: model for objective in objectives for name, model in objective.models(self.config).items()}
        return {name: model for name, model in models.items() if name in self.params}

    @property
    def head(self) -> dict[str, Any]:
        """The `config.head` of a run: the settings of the model on top of the encoder."""
        return dict(self.settings.get("head", {}))

    @property
    def predicts_words(self) -> bool:
        """Whether the checkpoint has a masked-LM head. A plain head that is tied to the embeddings has no params."""
        if "masked_lm" in self.params:
            return True
        is_other = self.architecture and not self.architecture.endswith("ForMaskedLM")
        if is_other or not has_masked_lm(self.params, self.config):
            return False
        heads = (term.objective.heads(self.config, Compute()) for term in terms_of_run(self.settings))
        return "objective" not in self.settings or any("masked_lm" in layers for layers in heads)

    @property
    def no_words_reason(self) -> str:
        """The reason why `predicts_words` is False."""
        if self.masked_lm_problem:
            return self.masked_lm_problem
        if {"classifier", "spans"} & self.params.keys():
            return f"{self.path}: a classifier for which there is no task here"
        reason, part = f"{self.path}: no masked-LM head to predict words with", next(iter(self.parts), "")
        if part and has_masked_lm(self.params[part], self.parts[part]):
            return f"{reason}; but its {part} has one: bertjax.convert --part={part} makes it a model of its own"
        return f"{reason}; bertjax.extract writes hidden states"

    @property
    def is_multi_label(self) -> bool:
        """Whether several labels of a classifier may apply to one text."""
        rows = self.params["classifier"]["dense"]["bias"].shape[0] if "classifier" in self.params else 0
        is_sigmoid = self.settings.get("activation_fn") == sentence_transformers.SIGMOID
        return self.problem_type == huggingface.MULTI_LABEL or (rows > 1 and is_sigmoid)

    def label_names(self, rows: int) -> tuple[str, ...]:
        """Returns the names of `rows` labels. Raises `UserError` if the checkpoint has another number of labels."""
        huggingface.check_labels(self.labels, rows, self.path)
        return self.labels or tuple(f"LABEL_{i}" for i in range(rows))

    @property
    def reads_spaced_words(self) -> bool:
        """Whether the model tags words with a space before each word, regardless of the text (data.join = spaces)."""
        is_tagger = self.architecture in ("BertForTokenClassification", "BertForFeatureBasedTagging")
        has_spaces = self.tokenizer is not None and bool(self.tokenizer.space)
        return is_tagger and has_spaces and join_of(self.settings) == SPACES

    @property
    def _longest(self) -> int:
        positions = self.config.max_position_embeddings
        return min(positions, int(self.max_length or positions))

    @property
    def max_seq_length(self) -> int:
        """The sequence length of fine-tuning, or else the number of positions, at most `max_length`."""
        return self.settings.get("max_seq_length", self._longest)

    @property
    def model_max_length(self) -> int:
        """The length to which transformers truncates a text: of the folder, or else the number of positions."""
        is_folder = not self.settings.get("task") and self.architecture != sentence_transformers.ARCHITECTURE
        return self.max_seq_length if is_folder else self._longest


def has_masked_lm(params: dict, config: BertConfig) -> bool:
    """Returns whether params may contain a masked-LM head. A plain, tied head has no params."""
    return "masked_lm" in params or (config.output == "plain" and config.tie_word_embeddings)


@dataclasses.dataclass(frozen=True)
class Place(abc.ABC):
    """The location of a checkpoint.

    Attributes:
      format: bertjax, huggingface, peft or tf1.
      folder: the folder of the model.
    """

    format: ClassVar[str]
    folder: epath.Path

    @property
    def vectors(self) -> sentence_transformers.Folder | None:
        """The folder of sentence-transformers if its model computes embeddings of texts; otherwise None."""
        return None

    @abc.abstractmethod
    def read_config(self) -> BertConfig:
        """Reads the model config."""

    @abc.abstractmethod
    def _read(self, config: BertConfig) -> Pretrained:
        """Reads the checkpoint without the tokenizer."""

    def read(self) -> Pretrained:
        """Reads the checkpoint. Raises `UserError` if the checkpoint is incomplete."""
        config = self.read_config()
        source, loaded = self._read(config), self.read_tokenizer()
        if loaded is not None and loaded.vocab_size > config.vocab_size:
            raise UserError(
                f"{self.folder}: its tokenizer has {loaded.vocab_size} pieces, its model only {config.vocab_size}"
            )
        return dataclasses.replace(source, tokenizer=loaded)

    def read_settings(self) -> tuple[str, ml_collections.ConfigDict]:
        """Reads `architecture` and `settings` without the arrays."""
        return "", ml_collections.ConfigDict()

    def read_tokenizer(self) -> Tokenizer | None:
        """Reads the tokenizer; None if there is none."""
        return hf_tokenizer.read(self.folder)

    def tokenizer_file(self) -> epath.Path | None:
        """Returns the file of the tokenizer."""
        return hf_tokenizer.file_in(self.folder)

    def __str__(self) -> str:
        return str(self.folder)


@dataclasses.dataclass(frozen=True)
class RunPlace(Place):
    """A step of a run of bertjax. `convert` writes params alone as step 0."""

    format = "bertjax"
    info: RunInfo
    step: int

    def read_config(self) -> BertConfig:
        """Reads the model config, which a stage may change."""
        config = self.info.config
        return families.config_of(config_after(config, self.step) if "stages" in config and self.step else config)

    def _read(self, config: BertConfig) -> Pretrained:
        info, params, updates = self.info, checkpoint.read_params(self.folder, self.step), {}
        if lora := low_rank.of(info.config):
            updates = low_rank.updates_of(params, lora)
            params = low_rank.merge(params, updates)
        for objective in joint_models(terms_of_run(info.config)):
            params = objective.export_params(params)
        self._check_sizes(params, config)
        scores = checkpoint.read_scores(self.folder, self.step)
        rows = params["classifier"]["dense"]["bias"].shape if "classifier" in params else ()
        is_classifier = info.config.get("task") and info.architecture == "BertForSequenceClassification"
        return Pretrained(
            str(self),
            self.format,
            config,
            params,
            None,
            ignored=[],
            architecture=info.architecture,
            labels=info.labels or (),
            problem_type=info.problem_type or (huggingface.REGRESSION if is_classifier and rows == (1,) else ""),
            settings=info.config,
            dtype=info.config.get("dtype", "auto"),
            step=self.step,
            decided=scores.decided if scores else {},
            scores=scores.scores if scores else {},
            updates=updates,
            fingerprints=info.fingerprints or {},
        )

    def _check_sizes(self, params: dict, config: BertConfig) -> None:
        """Raises `UserError` if the config does not fit the shapes of the params."""
        source = self.folder / workdir.CONFIG
        sizes = families.family_of(config).infer_config(params)
        if sizes is None:
            raise UserError(f"{source}: model.family is {config.family!r}, but the params are of another")
        for name, values in sizes.items():
            if (stated := getattr(config, name)) not in values:
                has = f"up to {values[0]}" if isinstance(values, range) else repr(values[0])
                raise UserError(f"{source}: model.{name} is {stated!r}, but the params have {has}")

    def read_settings(self) -> tuple[str, ml_collections.ConfigDict]:
        """Returns `architecture` and the config of the run."""
        return self.info.architecture, self.info.config

    def read_tokenizer(self) -> Tokenizer | None:
        """Reads the tokenizer of the run."""
        return workdir.load_tokenizer(self.folder, self.info)

    def tokenizer_file(self) -> epath.Path | None:
        """Returns the file of the tokenizer of the run."""
        return self.folder / tokenizer.KINDS[self.info.tokenizer["kind"]].filename if self.info.tokenizer else None

    def __str__(self) -> str:
        return f"{self.folder}@{self.step}"


@dataclasses.dataclass(frozen=True)
class Tf1Place(Place):
    """A TF1 checkpoint of Google: the files that begin with `prefix`."""

    format = "tf1"
    prefix: epath.Path

    def read_config(self) -> BertConfig:
        """Reads bert_config.json."""
        return tf1.read_config(self.folder / tf1.CONFIG)

    def _read(self, config: BertConfig) -> Pretrained:
        params, ignored = tf1.read_params(self.prefix, config)
        return Pretrained(str(self), self.format, config, params, None, ignored)

    def __str__(self) -> str:
        return str(self.prefix)


@dataclasses.dataclass(frozen=True)
class TransformersPlace(Place):
    """A Hugging Face folder. `modules` is the folder of sentence-transformers that contains it."""

    format = "huggingface"
    modules: sentence_transformers.Folder | None = None

    @property
    def vectors(self) -> sentence_transformers.Folder | None:
        """The folder of sentence-transformers if its model computes embeddings of texts; otherwise None."""
        is_encoder = self.modules is not None and self.modules.kind == sentence_transformers.ARCHITECTURE
        return self.modules if is_encoder else None

    def read_config(self) -> BertConfig:
        """Reads config.json."""
        return huggingface.read_config(self.folder / huggingface.CONFIG)

    def read(self) -> Pretrained:
        """Reads the folder, and the dense layer and the settings of embeddings."""
        source = super().read()
        if (folder := self.vectors) is None:
            return source
        return dataclasses.replace(
            source,
            architecture=sentence_transformers.ARCHITECTURE,
            labels=(),
            problem_type="",
            settings=sentence_transformers.read_settings(folder, source.config),
            params=source.params | sentence_transformers.read_params(folder, source.config),
        )

    def _read(self, config: BertConfig) -> Pretrained:
        params, ignored, masked_lm_problem = huggingface.read_params(self.folder, config)
        architecture, labels, problem_type = huggingface.read_head(self.folder / huggingface.CONFIG)
        return Pretrained(
            str(self),
            self.format,
            config,
            params,
            None,
            ignored,
            architecture,
            labels,
            problem_type,
            settings=self._classifier_settings(self.folder, config, architecture, self.modules),
            masked_lm_problem=masked_lm_problem,
            max_length=hf_tokenizer.max_length(self.folder),
        )

    def _classifier_settings(
        self, folder: epath.Path, config: BertConfig, architecture: str, modules: sentence_transformers.Folder | None
    ) -> ml_collections.ConfigDict:
        if self.vectors:
            return ml_collections.ConfigDict()
        return sentence_transformers.read_classifier(folder, config, architecture, modules)

    def read_settings(self) -> tuple[str, ml_collections.ConfigDict]:
        """Reads the settings of embeddings; empty for other models."""
        if (folder := self.vectors) is None:
            return super().read_settings()
        return sentence_transformers.ARCHITECTURE, sentence_transformers.read_settings(folder, self.read_config())

    def read_tokenizer(self) -> Tokenizer | None:
        """Reads the tokenizer of the folder. Raises `UserError` if sentence-transformers uses it differently."""
        loaded = super().read_tokenizer()
        if self.modules and loaded is not None:
            sentence_transformers.check_tokenizer(self.modules, loaded)
        return loaded

    def __str__(self) -> str:
        return str(self.modules.path if self.modules else self.folder)


@dataclasses.dataclass(frozen=True)
class AdapterPlace(TransformersPlace):
    """An adapter of PEFT. `base` is the place of the base model."""

    format = "peft"
    base: Place = dataclasses.field(kw_only=True)

    def open(self) -> tuple[peft_adapter.Fields, dict[str, np.ndarray], dict[str, Any]]:
        """Returns the fields and the tensors of the adapter, and the config.json of the base with the adapter."""
        fields, tensors = peft_adapter.read_fields(self.folder), peft_adapter.read_tensors(self.folder)
        return fields, tensors, peft_adapter.config_fields(fields, _config_json(self.base), tensors)

    def read_config(self) -> BertConfig:
        """Reads the config of the base with the vocabulary size of the adapter."""
        layout = families.huggingface_of(self.base.read_config())
        return layout.read_config(self.base.folder / huggingface.CONFIG, self.open()[2])

    def read_architecture(self) -> str:
        """Returns the class of BERT with the output layer of the adapter; "" if the class is unknown."""
        content = self.open()[2]
        return huggingface.head_of(content["architectures"][0], content)

    def _read(self, config: BertConfig) -> Pretrained:
        folder, base, layout = self.folder, self.base, families.huggingface_of(config)
        fields, adapter, content = self.open()
        settings, modules = ml_collections.ConfigDict(), self.modules
        architecture = huggingface.head_of(content["architectures"][0], content)
        if isinstance(base, TransformersPlace):
            tensors = dict(huggingface.tensors_of(base.folder))
            _, labels, problem_type = huggingface.read_head(base.folder / huggingface.CONFIG)
            settings = self._classifier_settings(base.folder, config, architecture, modules or base.modules)
        else:
            source = base.read()
            base_class = layout.choose_architecture(source.params, source.config, source.architecture)
            tensors = layout.to_tensors(source.params, source.config, base_class)[0]
            labels, problem_type = source.labels, source.problem_type
        tensors, whole = peft_adapter.merged(folder, fields, tensors, adapter, content)
        params, ignored, masked_lm_problem = layout.read_params(tensors.items(), content, config, str(folder))
        if unknown := sorted(name for name in whole & set(ignored) if not peft_adapter.is_decoder(name)):
            raise UserError(f"{folder}: {unknown[0]} fits no layer of the base; {peft_adapter.MERGE}")
        params = peft_adapter.finished(folder, content, params)
        if peft_adapter.adapts_words_alone(fields, adapter) and has_masked_lm(params, config):
            masked_lm_problem = (
                f"{folder}: the adapter changes the word embeddings, to which the output layer for words is tied"
            )
            params.pop("masked_lm", None)
        rows = len(params["classifier"]["dense"]["bias"]) if "classifier" in params else 0
        return Pretrained(
            str(self),
            self.format,
            config,
            params,
            None,
            ignored,
            architecture,
            labels if len(labels) == rows else (),
            problem_type if architecture.endswith("ForSequenceClassification") else "",
            settings,
            masked_lm_problem=masked_lm_problem,
            max_length=hf_tokenizer.max_length(self._with_tokenizer().folder),
        )

    def _with_tokenizer(self) -> Place:
        """Returns the place of the tokenizer: the base, if the adapter has no tokenizer."""
        return self.base if hf_tokenizer.file_in(self.folder) is None else self

    def read_tokenizer(self) -> Tokenizer | None:
        """Reads the tokenizer of the adapter or of the base."""
        place = self._with_tokenizer()
        return super().read_tokenizer() if place is self else place.read_tokenizer()

    def tokenizer_file(self) -> epath.Path | None:
        """Returns the file of the tokenizer of the adapter or of the base."""
        place = self._with_tokenizer()
        return super().tokenizer_file() if place is self else place.tokenizer_file()


def _config_json(base: Place) -> dict[str, Any]:
    """Returns the config.json of the base of an adapter, or the config.json that `convert` writes for the base."""
    if base.format == "huggingface":
        return read_json(base.folder / huggingface.CONFIG)
    config = base.read_config()
    try:
        huggingface.check_exportable(config)
    except UserError as error:
        raise UserError(f"{base}: a model with {error} is no base of an adapter of PEFT") from None
    layout = families.huggingface_of(config)
    kind = base.read_settings()[0].removeprefix(huggingface.BERT)
    names = [name for name in layout.architectures if kind and name.endswith(kind)]
    return {"architectures": names[:1], "tie_word_embeddings": config.tie_word_embeddings, **layout.to_fields(config)}


def read(path: epath.PathLike) -> Pretrained:
    """Reads a checkpoint of any of the `FORMATS`, or an adapter of PEFT with its base.

    For a bertjax run, reads the best checkpoint after fine-tuning and the latest after pre-training, unless the path
    ends in "@best", "@latest" or "@STEP".

    Raises `UserError` if the checkpoint is missing or incomplete.
    """
    return find(path).read()


def read_with_tokenizer(path: epath.PathLike, dtype: str | None = None) -> Pretrained:
    """Reads a checkpoint, and prints a note if weights in the files are not read.

    Args:
      path: the path, as of `read`.
      dtype: replaces the `dtype` of the checkpoint.

    Raises:
      UserError: the checkpoint is missing or incomplete, or has no tokenizer.
    """
    source = read(path)
    tokenizer_of(source)
    if source.format in ("huggingface", "peft") and (names := sorted(source.ignored)):
        note(epath.Path(source.path), f"weights that are not read: {shortened(names)}")
    return dataclasses.replace(source, dtype=dtype or source.dtype)


def tokenizer_of(source: Pretrained) -> Tokenizer:
    """Returns the tokenizer of a checkpoint. Raises `UserError` if there is none."""
    if source.tokenizer is None:
        raise UserError(f"{source.path}: no tokenizer beside the checkpoint; add its vocab.txt or tokenizer.json")
    return source.tokenizer


def shortened(names: list[str]) -> str:
    """Returns a text with the first names of a list, and the number of the other names."""
    return ", ".join(names[:8]) + f" and {len(names) - 8} more" * (len(names) > 8)


def read_config(path: epath.PathLike) -> BertConfig:
    """Reads the model config of a checkpoint, without the arrays."""
    return find(path).read_config()


def read_settings(path: epath.PathLike) -> tuple[str, ml_collections.ConfigDict]:
    """Reads `architecture` and `settings` of a checkpoint, without the arrays."""
    return find(path).read_settings()


def read_tokenizer(path: epath.PathLike) -> Tokenizer | None:
    """Reads the tokenizer of a checkpoint; None if there is none."""
    return find(path).read_tokenizer()


def find(path: epath.PathLike) -> Place:
    """Locates a checkpoint. Downloads a checkpoint of the hub. Raises `UserError` if there is none."""
    repository, which = hub.repository(path), ""
    path = hub.fetched(repository) if repository else epath.Path(path)
    if (chosen := WHICH.fullmatch(str(path))) and not path.exists():
        path, which = epath.Path(chosen[1]), chosen[2]
    if (best := path / BEST_RUN).is_file():  # the folder of a sweep
        path = inside(path, read_whole(best).decode(errors="replace").strip(), best)
    if (path / checkpoint.FOLDER).is_dir():
        info = workdir.require_info(path)
        default = "best" if info.architecture and checkpoint.best_step(path) is not None else "latest"
        return RunPlace(path, info, checkpoint.resolve_step(path, which or default))
    if (path / workdir.TRIAL_RESULT).exists():
        raise UserError(f"{path}: not the best trial of its search, so that its checkpoint was deleted")
    if which:
        raise UserError(f"@{which} needs the workdir of a run, but {str(path)!r} is not one")
    if (path / huggingface.CONFIG).exists() and "task" in read_json(path / huggingface.CONFIG):
        raise UserError(f"{path}: a run that has not saved a checkpoint yet")
    if (place := _find_folder(path) or _find_tf1(path)) is not None:
        return place
    raise UserError(
        f"no checkpoint in {str(path)!r}: give the workdir of a run, a Hugging Face folder (config.json and "
        f"model.safetensors), an adapter of PEFT, hub:NAME for one of the hub, or Google's bert_model.ckpt"
    )


def _find_folder(path: epath.Path) -> Place | None:
    """Locates a folder of sentence-transformers, transformers or PEFT; None if there is none."""
    modules = sentence_transformers.open_folder(path) if sentence_transformers.is_folder(path) else None
    folder = modules.encoder if modules else path
    if peft_adapter.is_folder(folder):
        return AdapterPlace(folder, modules, base=_find_base(folder))
    has_tf1 = (folder / f"{tf1.PREFIX}.index").exists() and not list(folder.glob("*.safetensors"))
    if modules or ((folder / huggingface.CONFIG).exists() and not has_tf1):
        return TransformersPlace(folder, modules)
    return None


def _find_tf1(path: epath.Path) -> Place | None:
    """Locates a TF1 checkpoint by its folder, its prefix, or one of its files; None if there is none."""
    for prefix in (epath.Path(re.sub(r"\.(index|meta|data-\d+-of-\d+)$", "", str(path))), path / tf1.PREFIX):
        if prefix.name and prefix.with_name(prefix.name + ".index").exists():  # "/" has no name
            return Tf1Place(prefix.parent, prefix)
    return None


def _find_base(adapter: epath.Path) -> Place:
    """Locates the base of an adapter.

    The base is a name on the hub, or a path: absolute, or relative to the working directory, to the folder of the
    adapter, or to the parent of this folder.

    Raises `UserError` if there is no base, or if the base is an adapter.
    """
    source, fields = adapter / peft_adapter.CONFIG, peft_adapter.read_fields(adapter)
    name = fields.base_model_name_or_path or ""
    paths = (epath.Path(name), adapter / name, adapter.absolute().parent / name)
    path = next((str(path) for path in paths if path.exists() and path.resolve() != adapter.resolve()), "")
    if not path and not re.fullmatch(r"[\w-][\w.-]*(/[\w-][\w.-]*)?", name):
        raise UserError(
            f"{source}: the base of the adapter, base_model_name_or_path {name!r}, is not there; set it to the folder "
            f"of the base, or to its name on the hub"
        )
    revision = f"@{fields.revision}" if fields.revision else ""
    try:
        # Looks at the folder before `find`, which would not end if the base names this adapter as its base.
        is_adapter = bool(path) and peft_adapter.is_folder(epath.Path(path))
        place = None if is_adapter else find(path or f"{hub.PREFIX}{name}{revision}")
        if place is None or place.format == "peft":
            raise UserError(f"is an adapter itself; {peft_adapter.MERGE}")
    except UserError as error:
        raise UserError(f"{source}: the base of the adapter, base_model_name_or_path {name!r}: {error}") from None
    return place


def flattened(params: dict) -> dict[str, Any]:
    """Returns {path: array} of params, with paths such as "bert/pooler/dense/kernel"."""
    return flax.traverse_util.flatten_dict(params, sep="/")
