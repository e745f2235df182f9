"""The protocol of Jina and Cohere for rerankers: `POST /v1/rerank` and `POST /v2/rerank`."""

import uuid
from collections.abc import Sequence
from typing import Annotated, Any

import msgspec
import numpy as np

from bertjax.finetuning.metrics import sigmoid
from bertjax.library.model import Model
from bertjax.reranking.ranking import is_reranker
from bertjax.serving.endpoint import Computation, Refused, Request, convert
from bertjax.serving.methods import LogitsMethod, TextScores


class RerankDocument(msgspec.Struct):
    """A document of a request. Other fields are ignored."""

    text: str


class RerankBody(msgspec.Struct):
    """The fields of a request. Other fields, such as `max_tokens_per_doc`, are ignored."""

    query: str
    documents: list[str | RerankDocument]
    model: str | None = None
    top_n: Annotated[int, msgspec.Meta(ge=1)] | None = None
    return_documents: bool | None = None


class Rerank(Computation):
    """Ranks documents for a query.

    Args:
      version: the version of the protocol. Version 1 returns documents unless `return_documents` is false, like the
        server of Jina. Version 2 returns documents only if `return_documents` is true, like the server of Cohere.
    """

    field = "documents"

    def __init__(self, version: int) -> None:
        self._version = version

    def error(self, status: int, message: str) -> Any:
        """Returns the message in the fields that clients of Cohere and of Jina read."""
        return {"message": message, "detail": message}

    def check(self, model: Model) -> None:
        """Raises `Refused` if the checkpoint is not a reranker."""
        require_reranker(model, 400)

    def read(self, content: dict[str, Any], model: Model) -> Request:
        """Returns the request."""
        body = convert(content, RerankBody)
        texts = [document if isinstance(document, str) else document.text for document in body.documents]
        return Request(LogitsMethod(), pairs_of(body.query, texts, self.field), body)

    def answer(self, request: Request, results: Sequence[TextScores], model: Model) -> Any:
        """Returns the ranked documents and the number of tokens of all pairs."""
        body, tokens = request.body, sum(result.tokens for result in results)
        returns_documents = self._version == 1 if body.return_documents is None else body.return_documents
        scores = relevance_scores(results)
        ranking = [
            {
                "index": index,
                "relevance_score": scores[index],
                **({"document": {"text": request.inputs[index][1]}} if returns_documents else {}),
            }
            for index in ranking_of(results)[: body.top_n]
        ]
        meta = {
            "api_version": {"version": str(self._version)},
            "billed_units": {"search_units": 1},
            "tokens": {"input_tokens": tokens, "output_tokens": 0},
        }
        usage = {"prompt_tokens": tokens, "total_tokens": tokens}
        about = {"id": str(uuid.uuid4()), "model": body.model or model.path}
        return {**about, "results": ranking, "usage": usage, "meta": meta}


def require_reranker(model: Model, status: int) -> None:
    """Raises `Refused` with an HTTP status if the checkpoint does not compute one score for a pair of texts."""
    if not is_reranker(model.source):
        raise Refused(
            status,
            f"the checkpoint {model.path} cannot rank documents: it does not compute one score for a pair of texts; "
            f"serve a run of rerank, a CrossEncoder, or a classifier with one label",
        )


def pairs_of(query: str, documents: Sequence[str], field: str) -> list[tuple[str, str]]:
    """Returns pairs of the query and a document. Raises `Refused` without documents."""
    if not documents:
        raise Refused(400, f"{field} = []: must contain one document or more")
    return [(query, document) for document in documents]


def relevance_scores(results: Sequence[TextScores]) -> list[float]:
    """Returns the sigmoid of the logit of each pair, from 0 to 1, as clients of these protocols expect."""
    scores: list[float] = sigmoid(np.array([result.logits[0] for result in results])).tolist()
    return scores


def ranking_of(results: Sequence[TextScores]) -> list[int]:
    """Returns the indices of pairs in descending order of the logits. The sigmoid is 1.0 for all logits above 37."""
    return descending([result.logits[0] for result in results])


def descending(logits: Sequence[float] | np.ndarray) -> list[int]:
    """Returns the indices of logits `[logits]` in descending order. Equal logits keep their order."""
    indices: list[int] = np.argsort(-np.asarray(logits), kind="stable").tolist()
    return indices
