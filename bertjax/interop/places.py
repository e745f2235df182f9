"""The locations of checkpoints: one class per format reads the config, the params and the tokenizer."""

import abc
import dataclasses
import functools
from typing import Any, ClassVar

import flax.linen as nn
import jax
import jax.numpy as jnp
import ml_collections
import numpy as np
from etils import epath
from flax.traverse_util import flatten_dict

from bertjax.common.errors import UserError
from bertjax.common.files import read_json
from bertjax.config.model_config import BertConfig
from bertjax.config.stages import config_after
from bertjax.interop import cross_encoder, hf_tokenizer, huggingface, peft_adapter, sentence_transformers, tf1
from bertjax.interop.checkpoint_content import Pretrained, has_masked_lm
from bertjax.models import families
from bertjax.models.transformer_family import TransformerFamily
from bertjax.nn.ops import low_rank
from bertjax.objectives.objective import joint_models
from bertjax.objectives.parsing import terms_of_run
from bertjax.text import tokenizer
from bertjax.text.tokenizer import Tokenizer
from bertjax.training.checkpoints import checkpoint, workdir
from bertjax.training.checkpoints.workdir import RunInfo


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
    def embedding_folder(self) -> sentence_transformers.Folder | None:
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
                f"{self.folder}: the tokenizer has {loaded.vocab_size} tokens, but the model has {config.vocab_size}; "
                f"copy the right tokenizer"
            )
        return dataclasses.replace(source, tokenizer=loaded)

    def read_settings(self) -> tuple[str, ml_collections.ConfigDict]:
        """Reads `architecture` and `settings` without the arrays."""
        return "", ml_collections.ConfigDict()

    def read_tokenizer(self) -> Tokenizer | None:
        """Reads the tokenizer; None for a checkpoint without a tokenizer."""
        return hf_tokenizer.read_folder_tokenizer(self.folder)

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
        if lora := low_rank.lora_of(info.config):
            updates = low_rank.updates_of(params, lora)
            params = low_rank.merge_updates(params, updates)
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
            raise UserError(
                f"{source}: model.family is {config.family!r}, but the params are of another family; correct "
                f"model.family"
            )
        for name, values in sizes.items():
            if (stated := getattr(config, name)) not in values:
                has = f"up to {values[0]}" if isinstance(values, range) else repr(values[0])
                raise UserError(f"{source}: model.{name} is {stated!r}, but the params have {has}")
        if isinstance(families.family_of(config), TransformerFamily):
            _check_encoder(params["bert"], config, str(source))

    def read_settings(self) -> tuple[str, ml_collections.ConfigDict]:
        """Returns `architecture` and the config of the run."""
        return self.info.architecture, self.info.config

    def read_tokenizer(self) -> Tokenizer | None:
        """Reads the tokenizer of the run."""
        return workdir.tokenizer_of_run(self.folder, self.info)

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
    def embedding_folder(self) -> sentence_transformers.Folder | None:
        """The folder of sentence-transformers if its model computes embeddings of texts; otherwise None."""
        is_encoder = self.modules is not None and self.modules.kind == sentence_transformers.ARCHITECTURE
        return self.modules if is_encoder else None

    def read_config(self) -> BertConfig:
        """Reads config.json."""
        return huggingface.read_config(self.folder / huggingface.CONFIG)

    def read(self) -> Pretrained:
        """Reads the folder, and the dense layer and the settings of embeddings."""
        source = super().read()
        if (folder := self.embedding_folder) is None:
            return source
        return dataclasses.replace(
            source,
            architecture=sentence_transformers.ARCHITECTURE,
            labels=(),
            problem_type="",
            settings=sentence_transformers.read_embedding_settings(folder, source.config),
            params=source.params | sentence_transformers.read_dense_params(folder, source.config),
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
            settings=self._classifier_settings(config, architecture),
            masked_lm_problem=masked_lm_problem,
            max_length=hf_tokenizer.max_length(self.folder),
        )

    def read_architecture(self) -> str:
        """Returns the class of BERT with the head of the folder; "" if the class is unknown."""
        return huggingface.read_head(self.folder / huggingface.CONFIG)[0]

    def _classifier_settings(self, config: BertConfig, architecture: str) -> ml_collections.ConfigDict:
        """Returns the settings of a CrossEncoder; empty for other models."""
        if self.embedding_folder:
            return ml_collections.ConfigDict()
        return cross_encoder.read_settings(self.folder, config, architecture, self.modules)

    def read_settings(self) -> tuple[str, ml_collections.ConfigDict]:
        """Reads the architecture and the settings of embeddings or of a CrossEncoder; empty for other models."""
        config = self.read_config()
        if (folder := self.embedding_folder) is not None:
            return sentence_transformers.ARCHITECTURE, sentence_transformers.read_embedding_settings(folder, config)
        architecture = self.read_architecture()
        settings = self._classifier_settings(config, architecture)
        return (architecture, settings) if settings else super().read_settings()

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
        fields, tensors = peft_adapter.read_adapter_fields(self.folder), peft_adapter.read_tensors(self.folder)
        return fields, tensors, peft_adapter.config_fields(fields, _config_json(self.base), tensors)

    def read_config(self) -> BertConfig:
        """Reads the config of the base with the vocabulary size of the adapter."""
        layout = families.huggingface_of(self.base.read_config())
        return layout.read_config(self.base.folder / huggingface.CONFIG, self.open()[2])

    def read_architecture(self) -> str:
        """Returns the class of BERT with the head of the adapter; "" if the class is unknown."""
        content = self.open()[2]
        return huggingface.head_of(content["architectures"][0], content)

    def _classifier_settings(self, config: BertConfig, architecture: str) -> ml_collections.ConfigDict:
        """Returns the settings of a CrossEncoder whose classifier is the base; empty for other models."""
        if self.embedding_folder or not isinstance(self.base, TransformersPlace):
            return ml_collections.ConfigDict()
        modules = self.modules or self.base.modules
        return cross_encoder.read_settings(self.base.folder, config, architecture, modules)

    def _read(self, config: BertConfig) -> Pretrained:
        folder, base, layout = self.folder, self.base, families.huggingface_of(config)
        fields, adapter, content = self.open()
        settings = ml_collections.ConfigDict()
        architecture = huggingface.head_of(content["architectures"][0], content)
        if isinstance(base, TransformersPlace):
            tensors = dict(layout.current_tensors(huggingface.tensors_of(base.folder)))
            _, labels, problem_type = huggingface.read_head(base.folder / huggingface.CONFIG)
            settings = self._classifier_settings(config, architecture)
        else:
            source = base.read()
            base_class = layout.choose_architecture(source.params, source.config, source.architecture)
            tensors = layout.to_tensors(source.params, source.config, base_class)[0]
            labels, problem_type = source.labels, source.problem_type
        tensors, whole = peft_adapter.merge_adapter(folder, fields, tensors, adapter, content)
        params, ignored, masked_lm_problem = layout.read_params(tensors.items(), content, config, str(folder))
        if unknown := sorted(name for name in whole & set(ignored) if not peft_adapter.is_decoder(name)):
            raise UserError(f"{folder}: {unknown[0]} fits no layer of the base; {peft_adapter.MERGE}")
        params = peft_adapter.finished(folder, content, params)
        if peft_adapter.adapts_words_alone(fields, adapter) and has_masked_lm(params, config):
            masked_lm_problem = (
                f"{folder}: the adapter changes the word embeddings, to which the language-model head is tied"
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
        raise UserError(f"{base}: a model with {error} cannot be the base of an adapter of PEFT") from None
    layout = families.huggingface_of(config)
    kind = base.read_settings()[0].removeprefix(huggingface.BERT)
    names = [name for name in layout.architectures if kind and name.endswith(kind)]
    return {"architectures": names[:1], "tie_word_embeddings": config.tie_word_embeddings, **layout.to_fields(config)}


def _check_encoder(params: dict, config: BertConfig, source: str) -> None:
    """Raises `UserError` if the names or the shapes of the params of an encoder are not those of the config."""
    ids = jnp.zeros((1, 8), jnp.int32)
    init = functools.partial(families.encoder_of(config).init, method="encode")
    needed = nn.meta.unbox(jax.eval_shape(init, jax.random.key(0), ids, ids, ids)["params"])
    present = {name: tree for name, tree in params.items() if name != "pooler"}
    flat_needed, flat_present = flatten_dict(needed, sep="/"), flatten_dict(present, sep="/")
    for name in sorted(flat_needed.keys() | flat_present.keys()):
        stated, expected = (flat[name].shape if name in flat else "nothing" for flat in (flat_present, flat_needed))
        if stated != expected:
            raise UserError(
                f"{source}: the params of model.family = {config.family!r} have {expected} at {name}, but the "
                f"checkpoint has {stated}; correct the fields of the model"
            )
