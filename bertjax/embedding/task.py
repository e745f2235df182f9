"""Embeddings of texts, for retrieval, clustering and comparison.

An encoder is trained so that the embeddings of texts that belong together are near each other (Reimers and Gurevych
2019; Gao et al. 2021).
"""

import dataclasses
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
from ml_collections import ConfigDict

from bertjax.common.errors import UserError
from bertjax.config.defaults import fine_tuning_config
from bertjax.config.limits import value_of
from bertjax.data.corpus import holdout
from bertjax.data.loading.examples import Examples
from bertjax.embedding import data, datasets
from bertjax.embedding.data import TO_COSINES, held_out_texts, is_divided, read_evaluated
from bertjax.embedding.datasets import (
    ANY,
    DOCUMENT,
    PAIRS,
    QUERY,
    SECTION,
    EncodedTexts,
    FlagSource,
    dev_set,
    training_sets,
)
from bertjax.embedding.evaluators import EmbeddedTexts, make_split, with_small_documents
from bertjax.embedding.forms import FORMS, JUDGES
from bertjax.embedding.head import (
    EmbeddingHead,
    PromptedEmbedder,
    embed_kinds,
    prompts_of,
    similarity_of,
    width_of,
    widths_of,
)
from bertjax.embedding.validate import validate
from bertjax.finetuning import metrics
from bertjax.inference.heads import Head
from bertjax.inference.task import (
    FineTuningTask,
    HasEmbeddings,
    HasSampleData,
    InputForm,
    ReadsLabelledFiles,
    Split,
    TaskData,
)
from bertjax.inference.text_embedding import TextEmbedder
from bertjax.interop.pretrained import Pretrained, tokenizer_of
from bertjax.interop.sentence_transformers import ARCHITECTURE, SETTINGS
from bertjax.models.heads import SentenceEncoder
from bertjax.text.tokenizer import Tokenizer

# The config fields that determine how embeddings are computed.
HEAD = ("head.pooling", "head.dense", "head.dense_act", "head.normalize")


@dataclasses.dataclass(frozen=True)
class UnscoredTexts(Split):
    """Placeholder texts, for which `bertjax compile` compiles the evaluation without scoring it."""

    def score(self, predictions: list[np.ndarray]) -> dict[str, float]:
        """Returns no scores."""
        return {}


class Embed(FineTuningTask, HasEmbeddings, ReadsLabelledFiles, HasSampleData):
    """Embeddings of texts."""

    architecture = ARCHITECTURE
    inputs = InputForm(range(1, 3), 'texts, or pairs as "A ||| B"')
    identity = (*HEAD, "data.form", "data.heldout_seed", "distill.what")
    reused_params = ("projection",)
    reading_flags = ("form", "texts", "label", "widths", "ignore_identical_ids", "precision", "rescore")

    def load(self, config: ConfigDict, tokenizer: Tokenizer) -> TaskData:
        """Reads the training sets and the dev set. Raises `UserError` for missing or invalid files."""
        return data.load_sets(config, tokenizer)

    def head(self, source: Pretrained) -> Head:
        """Returns the head of a checkpoint."""
        return EmbeddingHead()

    def check_weights(self, source: Pretrained) -> None:
        """Accepts all checkpoints, because some heads of embeddings have no params, such as mean pooling."""

    def validate(self, config: ConfigDict) -> None:
        """Raises `UserError` for invalid values of the fields of the task."""
        validate(config)

    def embedder(self, source: Pretrained, prompt: str | None = None, width: int = 0) -> TextEmbedder:
        """Returns the embedder of a checkpoint, see `PromptedEmbedder`."""
        return PromptedEmbedder(source, prompt, width)

    def sample_data(self, config: ConfigDict, input_ids: np.ndarray) -> TaskData:
        """Returns examples with the form of `config.data` whose texts are all `input_ids`, see `HasSampleData`."""
        texts, value_type = datasets.shape_of(config.data)
        one = Examples([input_ids], [np.zeros_like(input_ids)])
        encoded = EncodedTexts(one, np.zeros((config.batch_size, texts), np.int32))
        labels = np.zeros(config.batch_size, value_type) if value_type else encoded.numbers
        train = datasets.training_examples(encoded, labels)
        if config.loss.get("guide"):  # The width of the guide is assumed to be the width of this model.
            guide_embeddings = [np.zeros((texts, width_of(config.head, config.model)), np.float32)] * len(train)
            train = dataclasses.replace(train, guide_embeddings=guide_embeddings)
        dev = UnscoredTexts(Examples(train.input_ids, train.token_types))
        return TaskData(EmbeddingHead(), (), train, (dev,), metric="")

    def predict(self, source: Pretrained, texts: Sequence[tuple[str, ...]]) -> Iterator[dict]:
        """Yields the `vector` of each text, or the `cosine` or `dot` product of each pair, and `cut` if truncated.

        A single text has the prompt of the kind `ANY`: the query prompt of a run, or the default prompt of a folder.
        The texts of a pair have the prompts of the kinds `QUERY` and `DOCUMENT`, or of `ANY` if the run was trained on
        pairs without queries and documents, such as scored pairs.
        """
        run_data = source.settings.get("data", {})
        has_queries = "form" not in run_data or FORMS[run_data.form].has_queries
        kinds = (QUERY, DOCUMENT) if has_queries and len(texts[0]) == 2 else (ANY, ANY)
        similarity = similarity_of(source.settings)
        sides = list(embed_kinds(source, *zip(kinds, zip(*texts))))
        for *embedded, were_cut in zip(*(embeddings for embeddings, _ in sides), zip(*(cut for _, cut in sides))):
            more = {"cut": True} if any(were_cut) else {}
            if len(embedded) == 1:
                yield {"vector": embedded[0].tolist(), **more}
            else:
                first, second = (metrics.comparable(embedding, similarity) for embedding in embedded)
                yield {similarity: float(first @ second), **more}

    def adopt(self, config: ConfigDict, settings: ConfigDict) -> list[str]:
        """Copies the head, prompts and `max_seq_length` of an earlier run to fields that the user has not set.

        Raises:
          UserError: if the similarity function is not the cosine, which the losses use.
        """
        if (similarity := similarity_of(settings)) != "cosine":
            field = f"config.init_checkpoint = {config.init_checkpoint!r}: {SETTINGS}: similarity_fn_name"
            raise UserError(f"{field} {similarity!r} is not supported in training; supported: 'cosine'; {TO_COSINES}")
        default = {f"head.{field.name}": field.default for field in dataclasses.fields(SentenceEncoder)}
        default |= {f"data.{kind}_prompt": "" for kind in (QUERY, DOCUMENT)}
        default["max_seq_length"] = fine_tuning_config("").max_seq_length
        taken = []
        for name in (*HEAD, "data.query_prompt", "data.document_prompt", "max_seq_length"):
            value = value_of(settings, name)
            if value_of(config, name) == default[name] != value and name not in config.get("overrides", ()):
                section, _, field = name.rpartition(".")
                (config[section] if section else config)[field] = value
                taken.append(f"{name} = {value!r}")
        if width := settings.head.get("truncate_dim"):  # Only folders of sentence-transformers have this field.
            with config.head.unlocked():
                config.head.truncate_dim = width
            taken.append(f"head.truncate_dim = {width}")
        return taken

    def read_labelled(
        self,
        source: Pretrained,
        path: str,
        widths: str | None = None,
        precision: str | None = None,
        rescore: int | None = None,
        **flags: Any,
    ) -> EmbeddedTexts:
        """Returns a set that the embeddings of a checkpoint are evaluated on.

        Fields that `flags` does not name have the values of the run's dev set. Without `flags`, if `path` is the only
        file of the run, from which the run held out a dev set, the set contains only the held-out examples. Otherwise,
        the set contains all examples of `path`.
        """
        settings, fields = source.settings, {**PAIRS, "form": ""}
        held_out: frozenset[str] = frozenset()
        note, run_data = "", settings.get("data", {})
        if "dev" in run_data:
            dev = dev_set(run_data)
            fields = {name: getattr(dev, name) for name in (*SECTION, "ignore_identical_ids")}
        evaluated = FlagSource("", **{**fields, **flags, "path": path})
        evaluated.validate(JUDGES)
        if widths is None:
            widths = settings.get("loss", {}).get("widths", "")
        all_widths = widths_of(widths, f"--widths={widths}", width_of(source.head, source.config))
        if "dev" in run_data and is_divided(run_data) and not flags:
            if holdout.is_file_of_run(path, run_data, source.fingerprints):
                trained = dataclasses.replace(training_sets(run_data)[""], path=path)
                held_out, note = held_out_texts(run_data, datasets.read_set(trained, "train"))
        encoding = (prompts_of(settings), tokenizer_of(source), source.max_seq_length)
        texts, encoded = read_evaluated(evaluated, ["test", "dev"], held_out, *encoding)
        split = make_split(texts, encoded, all_widths, source.decided or None, similarity_of(settings))
        split = with_small_documents(split, precision, rescore)
        lines = [note, *data.describe_set("labelled", texts, encoded, *encoding[1:])]
        return dataclasses.replace(split, note="\n".join(filter(None, lines)))


TASK = Embed()
