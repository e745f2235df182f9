"""Reranking: scores pairs of a query and a document with one sequence for both texts (a cross-encoder).

Nogueira and Cho 2019 rank the candidates of a first stage with BERT in this way.
"""

import dataclasses
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
from ml_collections import ConfigDict

from bertjax.data.corpus import holdout
from bertjax.data.loading.examples import Examples
from bertjax.embedding.task import UnscoredTexts
from bertjax.inference.heads import Head, RegressionHead
from bertjax.inference.losses import LabelLoss
from bertjax.inference.task import FineTuningTask, HasSampleData, InputForm, ReadsLabelledFiles, TaskData
from bertjax.interop.cross_encoder import RERANK, query_prompt_of
from bertjax.interop.pretrained import Pretrained, tokenizer_of
from bertjax.reranking import data, sets
from bertjax.reranking.evaluator import RankedLists, describe, make_split
from bertjax.reranking.forms import FORMS
from bertjax.reranking.lists import ListExamples, PairEncoder
from bertjax.reranking.losses import POINTWISE, make_loss
from bertjax.reranking.ranking import ARCHITECTURE, Ranker
from bertjax.reranking.validate import validate
from bertjax.text.tokenizer import Tokenizer

DEFAULTS = dict(form="pairs", texts="query,positive", label="", candidates="")  # a set that no config describes
MAX_SEQ_LENGTH = 256  # of the default config; most paragraphs are shorter
SAMPLE_DOCUMENTS = 8  # documents of a list whose length the data determines, for the planner


@dataclasses.dataclass(frozen=True)
class RerankingHead(RegressionHead):
    """One score for a pair of texts. The labels are lists and grades, see `reranking.losses`."""

    def loss_with_settings(self, config: ConfigDict, labels: Sequence[str], train: Examples) -> LabelLoss:
        """Returns the loss that `config.loss` names, with the sizes of the training lists."""
        assert isinstance(train, ListExamples)
        return make_loss(config.loss, config.batch_size, train.longest_list, config.data.windows)


@dataclasses.dataclass(frozen=True)
class SampleEncoder(PairEncoder):
    """Encodes each pair as the same sequence.

    Attributes:
      input_ids: the sequence.
    """

    input_ids: np.ndarray = dataclasses.field(kw_only=True)

    def sizes(self, query: int, document: int) -> list[int]:
        """Returns the length of the sequence."""
        return [len(self.input_ids)]

    def all_sizes(self, queries: np.ndarray, documents: np.ndarray) -> np.ndarray:
        """Returns the length of the sequence for each pair."""
        return np.full(len(queries), len(self.input_ids))

    def encode(self, query: Sequence[int], document: Sequence[int]) -> Iterator[tuple[np.ndarray, np.ndarray]]:
        """Yields the sequence."""
        yield self.input_ids, np.zeros_like(self.input_ids)


class Rerank(FineTuningTask, ReadsLabelledFiles, HasSampleData):
    """Reranking of documents."""

    architecture = ARCHITECTURE
    inputs = InputForm(range(2, 3), 'pairs as "query ||| document"')
    identity = ("data.form", "data.windows", "data.heldout_seed", "loss.name")
    reused_params = ("classifier", "pooler")
    narrow_rate = 2e-4  # ListNet; binary_cross_entropy diverged with 3e-4, see RESULTS.md
    reading_flags = ("form", "texts", "label", "candidates")

    def load(self, config: ConfigDict, tokenizer: Tokenizer) -> TaskData:
        """Reads the training set and the dev set. Raises `UserError` for missing or invalid files."""
        return data.load(config, tokenizer, RerankingHead())

    def head(self, source: Pretrained) -> Head:
        """Returns the head of a checkpoint."""
        return RerankingHead()

    def predict(self, source: Pretrained, texts: Sequence[tuple[str, ...]]) -> Iterator[dict]:
        """Yields the `score` of each pair; higher is more relevant."""
        for score in Ranker(source).scores([(query, document) for query, document in texts]).tolist():
            yield {"score": score}

    def validate(self, config: ConfigDict) -> None:
        """Raises `UserError` for invalid values of the fields of the task."""
        validate(config)

    def adopt(self, config: ConfigDict, settings: ConfigDict) -> list[str]:
        """Copies the prompt and `max_seq_length` of a CrossEncoder or of a run to fields that the user has not set."""
        if "activation_fn" not in settings and settings.get("task") != RERANK:
            return []
        taken, overrides = [], config.get("overrides", ())
        length, is_default = settings.max_seq_length, config.max_seq_length == MAX_SEQ_LENGTH
        if is_default and length != MAX_SEQ_LENGTH and "max_seq_length" not in overrides:
            config.max_seq_length = length
            taken.append(f"max_seq_length = {length}")
        is_open = not query_prompt_of(config) and "data.query_prompt" not in overrides
        if (prompt := query_prompt_of(settings)) and is_open:
            with config.data.unlocked():
                config.data.query_prompt = prompt
            taken.append(f"data.query_prompt = {prompt!r}")
        return taken

    def read_labelled(self, source: Pretrained, path: str, **flags: Any) -> RankedLists:
        """Returns the lists of a file or folder; without flags, in the form of the dev set of the run.

        If `path` is the only file of the run, from which the run held out a dev set, the set contains only the held-out
        lists.
        """
        settings, fields, note = source.settings, DEFAULTS, ""
        run_data = settings.get("data", {})
        is_run = settings.get("task") == RERANK
        is_held_out = False
        if is_run:
            if not flags and holdout.is_file_of_run(path, run_data, source.fingerprints):
                is_held_out = sets.is_divided(run_data)
            described = sets.training_set(run_data) if is_held_out else sets.dev_set(run_data)
            fields = {name: getattr(described, name) for name in DEFAULTS}
        labelled = sets.ListFlagSource("", **{**fields, **flags, "path": path})
        labelled.validate(FORMS)
        lists = labelled.read("test", "dev")
        if is_held_out:
            _, lists, note = sets.divide(lists, run_data)
        lists = sets.judged(lists, labelled)
        examples = sets.encode_lists(lists, sets.encoder_of(settings, tokenizer_of(source), source.max_seq_length))
        lines = (note, describe("labelled", lists.lists, examples), *sets.skipped_lines("labelled", lists))
        return dataclasses.replace(make_split(lists, examples), note="\n".join(filter(None, lines)))

    def sample_data(self, config: ConfigDict, input_ids: np.ndarray) -> TaskData:
        """Returns lists whose pairs are all `input_ids`, see `HasSampleData`."""
        source, count = sets.training_set(config.data), SAMPLE_DOCUMENTS
        if source.form == "pairs":
            count = len(source.columns) - 1
        if config.loss.name in POINTWISE:
            count = 1
        negatives = config.loss.negatives if config.loss.name == "multiple_negatives" else 0
        lists = config.batch_size
        train = ListExamples(
            [],
            [],
            encoder=SampleEncoder(None, len(input_ids), input_ids=input_ids),  # type: ignore[arg-type]
            query_ids=[()] * lists,
            document_ids=[()] * (lists * count),
            list_queries=np.arange(lists),
            list_documents=list(np.arange(lists * count).reshape(lists, count)),
            grades=[np.zeros(count, np.float32)] * lists,
            negatives=negatives,
        )
        dev = UnscoredTexts(Examples([input_ids] * lists, [np.zeros_like(input_ids)] * lists))
        return TaskData(RerankingHead(), (), train, (dev,), metric="")


TASK = Rerank()
