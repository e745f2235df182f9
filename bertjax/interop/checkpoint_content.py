"""The content of a checkpoint of any format."""

import dataclasses
from collections.abc import Mapping
from typing import Any

import jax
import ml_collections
import numpy as np

from bertjax.config.model_config import BertConfig, Compute
from bertjax.interop import cross_encoder, huggingface, sentence_transformers
from bertjax.models import families
from bertjax.objectives.objective import joint_models
from bertjax.objectives.parsing import terms_of_run
from bertjax.text.tokenizer import Tokenizer
from bertjax.text.words import SPACES, join_of


@dataclasses.dataclass(frozen=True)
class Pretrained:
    """A checkpoint: params (NumPy, float32, layout of bertjax; heads may be missing), model config and tokenizer.

    Args:
      path: the path of the checkpoint, with the step of a run.
      format: bertjax, huggingface, peft or tf1.
      config: the model config.
      params: the params.
      tokenizer: the tokenizer; None for a checkpoint without a tokenizer.
      ignored: names of arrays in the files that are not part of the model.
      architecture: the class of transformers, if known.
      labels: names of the labels of a classifier.
      problem_type: the `problem_type` of config.json, if the number of labels does not imply it.
      settings: the config of the run. For a folder of sentence-transformers, the equivalent fields of a run; otherwise
        empty.
      dtype: the `config.dtype` of the run, the type of predictions; auto for other formats.
      step: the step of the run; 0 for other formats.
      decided: values tuned on the dev set, such as the "no answer" threshold.
      scores: the scores of a checkpoint of bertjax, if it has been evaluated.
      updates: {path of a kernel: the low-rank update of a run}. `params` include the updates.
      fingerprints: {file name: fingerprint} of the training data of a run.
      masked_lm_problem: the reason why a masked-LM head of the checkpoint is not read; "" without such a head.
      max_length: the sequence length of transformers; None if the folder does not state a length.
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
            return f"{self.path}: no task reads the classifier of this checkpoint"
        reason, part = f"{self.path}: no masked-LM head, which predicts words", next(iter(self.parts), "")
        if part and has_masked_lm(self.params[part], self.parts[part]):
            return f"{reason}; write the {part}, which has this head, with bertjax convert --part={part}"
        return f"{reason}; write hidden states with bertjax extract"

    @property
    def is_multi_label(self) -> bool:
        """Whether several labels of a classifier may apply to one text."""
        rows = self.params["classifier"]["dense"]["bias"].shape[0] if "classifier" in self.params else 0
        is_sigmoid = self.settings.get("activation_fn") == cross_encoder.SIGMOID
        return self.problem_type == huggingface.MULTI_LABEL or (rows > 1 and is_sigmoid)

    def label_names(self, rows: int) -> tuple[str, ...]:
        """Returns the names of the labels of a head: `labels`, or "LABEL_0", "LABEL_1", ... without names.

        Args:
          rows: the number of outputs of the head.

        Raises:
          UserError: if the checkpoint has another number of names, or equal names.
        """
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
        """The sequence length of transformers: the length that the folder states, or else the number of positions.

        The length of a reranker is the length of fine-tuning, because CrossEncoder truncates pairs to this length.
        """
        task = self.settings.get("task")
        is_folder = not task and self.architecture != sentence_transformers.ARCHITECTURE
        return self.max_seq_length if is_folder or task == cross_encoder.RERANK else self._longest

    @property
    def is_cross_encoder(self) -> bool:
        """Whether the model is a classifier that the CrossEncoder of sentence-transformers can open for pairs.

        This is a classifier with one output, or with the settings of a CrossEncoder.
        """
        rows = len(self.params["classifier"]["dense"]["bias"]) if "classifier" in self.params else 0
        is_classifier = self.architecture == cross_encoder.ARCHITECTURE
        return is_classifier and (rows == 1 or "activation_fn" in self.settings)


def has_masked_lm(params: dict, config: BertConfig) -> bool:
    """Returns whether params may contain a masked-LM head. A plain, tied head has no params."""
    return "masked_lm" in params or not families.family_of(config).word_head(config).has_params
