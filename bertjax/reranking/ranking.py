"""Ranks documents for a query with a checkpoint that computes one score for a pair of texts."""

import dataclasses
from collections.abc import Sequence

import numpy as np

from bertjax.common.errors import UserError
from bertjax.finetuning.classification import logits_of, windows_of
from bertjax.finetuning.labels import label_type_of
from bertjax.inference.text_embedding import checkpoint_hash
from bertjax.interop.cross_encoder import ARCHITECTURE, query_prompt_of
from bertjax.interop.pretrained import Pretrained

PAIRS_AT_ONCE = 1 << 14  # pairs in memory as ids


@dataclasses.dataclass(frozen=True)
class Ranked:
    """A document of a ranking.

    Attributes:
      index: the index of the document in the list of documents, from 0.
      score: the relevance score; higher is better.
      text: the document.
    """

    index: int
    score: float
    text: str


class Ranker:
    """Scores pairs of a query and a document.

    Args:
      source: the checkpoint of a run of `rerank` or of a regression, a folder of a CrossEncoder, or a classifier of
        transformers with one label.

    Raises:
      UserError: if the checkpoint does not compute one score for a pair of texts.
    """

    def __init__(self, source: Pretrained) -> None:
        if not is_reranker(source):
            raise UserError(
                f"{source.path}: must compute one score for a pair of texts: choose the workdir of a run of rerank, a "
                f"CrossEncoder, or a classifier with one label"
            )
        self._source, self._label_type = source, label_type_of(source)

    def scores(self, pairs: Sequence[tuple[str, str]]) -> np.ndarray:
        """Returns the relevance score of each pair (query, document), `[pairs]` float32.

        The scores of a CrossEncoder have its activation, such as the sigmoid.
        """
        return self._label_type.predictions(self.logits(pairs)[:, None]).astype(np.float32)

    def logits(self, pairs: Sequence[tuple[str, str]]) -> np.ndarray:
        """Returns the output of the head for each pair (query, document), without an activation, `[pairs]` float32.

        Equal pairs have equal outputs: each pair is computed once. In two rows of a batch, the outputs of a pair may
        differ by rounding.
        """
        pairs = [(query, document) for query, document in pairs]  # also from lists of two texts
        places = {pair: place for place, pair in enumerate(dict.fromkeys(pairs))}
        distinct, portions = list(places), [np.zeros(0, np.float32)]
        for start in range(0, len(distinct), PAIRS_AT_ONCE):
            logits, _ = logits_of(self._source, self._label_type.head, distinct[start : start + PAIRS_AT_ONCE])
            portions.append(np.stack(logits)[:, 0].astype(np.float32))
        return np.concatenate(portions)[[places[pair] for pair in pairs]]

    def identity(self) -> str:
        """Returns the hash of the checkpoint and the settings that determine the scores."""
        settings = self._source.settings
        encoding = query_prompt_of(settings), windows_of(settings)
        return f"{checkpoint_hash(self._source)} {self._source.dtype} {self._label_type} {encoding}"

    def rank(self, query: str, documents: Sequence[str], top_k: int | None = None) -> list[Ranked]:
        """Returns the documents in descending order of their scores. Documents with equal scores keep their order.

        Args:
          query: the query.
          documents: the documents; one or more.
          top_k: the largest number of documents to return; None for all.
        """
        scores = self.scores([(query, document) for document in documents])
        order = np.argsort(-scores, kind="stable")[:top_k]
        return [Ranked(int(index), float(scores[index]), documents[index]) for index in order]


def is_reranker(source: Pretrained) -> bool:
    """Returns whether a checkpoint computes one score for a pair of texts."""
    if source.architecture != ARCHITECTURE or "classifier" not in source.params or source.is_multi_label:
        return False
    return bool(source.params["classifier"]["dense"]["bias"].shape == (1,))
