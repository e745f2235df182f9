"""The protocol of text-embeddings-inference: `POST /embed`, `/rerank` and `/predict`, and `GET /info`."""

from collections.abc import Mapping, Sequence
from typing import Any, ClassVar, Literal

import msgspec

import bertjax
from bertjax.distributed.mesh import compute_for
from bertjax.embedding.head import prompts_of
from bertjax.finetuning.labels import ClassLabel, LabelType, label_type_of
from bertjax.finetuning.metrics import l2_normalize, sigmoid, softmax
from bertjax.library.model import Model
from bertjax.reranking.ranking import is_reranker
from bertjax.serving.embeddings import (
    Dimensions,
    Inputs,
    check_dimensions,
    count_inputs,
    inputs_of,
    makes_embeddings,
    require_embeddings,
)
from bertjax.serving.endpoint import Computation, Description, Endpoint, Limits, Refused, Request, convert
from bertjax.serving.methods import Embedding, EmbedMethod, LogitsMethod, TextScores
from bertjax.serving.rerank import descending, pairs_of, ranking_of, relevance_scores, require_reranker

UNSUPPORTED = 424  # the status for a checkpoint without the ability
TOO_LONG = 422  # the status for a text that must not be truncated
ERROR_TYPES = {UNSUPPORTED: "Backend", 500: "Backend", 429: "Overloaded"}
POOLINGS = {"last": "last_token"}  # {pooling of bertjax: pooling of text-embeddings-inference}, if they differ
Side = Literal["right", "Right"]  # the truncated end of a text


class TextEmbeddingsInference(Endpoint):
    """The errors of text-embeddings-inference."""

    statuses: ClassVar[Mapping[int, int]] = {503: 429}

    def error(self, status: int, message: str) -> Any:
        """Returns the message and the type of the error."""
        return {"error": message, "error_type": ERROR_TYPES.get(status, "Validation")}


class EmbedBody(msgspec.Struct):
    """The fields of a request for embeddings. Other fields are ignored."""

    inputs: Inputs
    normalize: bool = True
    truncate: bool | None = None
    truncation_direction: Side = "right"
    prompt_name: str | None = None
    dimensions: Dimensions | None = None


class Embed(TextEmbeddingsInference, Computation):
    """Computes embeddings; the answer is a list of embeddings."""

    field = "inputs"

    def check(self, model: Model) -> None:
        """Raises `Refused` if the checkpoint was not trained for embeddings."""
        require_embeddings(model, UNSUPPORTED)

    def count(self, value: Any) -> int:
        """Returns the number of texts or lists of token ids."""
        return count_inputs(value)

    def read(self, content: dict[str, Any], model: Model) -> Request:
        """Returns the request."""
        body = convert(content, EmbedBody)
        names = [name for name in prompts_of(model.source.settings) if name is not None]
        if body.prompt_name is not None and body.prompt_name not in names:
            raise Refused(400, f"prompt_name = {body.prompt_name!r}: the checkpoint has the prompts {', '.join(names)}")
        method = EmbedMethod(body.prompt_name, check_dimensions(body.dimensions, model))
        return Request(method, inputs_of(body.inputs, self.field, model), body)

    def answer(self, request: Request, results: Sequence[Embedding], model: Model) -> Any:
        """Returns a list of numbers for each text."""
        _require_whole(request, results, model)
        if request.body.normalize:
            results = [result._replace(vector=l2_normalize(result.vector)) for result in results]
        return list(map(request.method.as_json, results))


class ScoreTextsBody(msgspec.Struct):
    """The fields of a request for a ranking. Other fields are ignored."""

    query: str
    texts: list[str]
    raw_scores: bool = False
    return_text: bool = False
    truncate: bool | None = None
    truncation_direction: Side = "right"


class Rerank(TextEmbeddingsInference, Computation):
    """Ranks texts for a query."""

    field = "texts"

    def check(self, model: Model) -> None:
        """Raises `Refused` if the checkpoint is not a reranker."""
        require_reranker(model, UNSUPPORTED)

    def read(self, content: dict[str, Any], model: Model) -> Request:
        """Returns the request."""
        body = convert(content, ScoreTextsBody)
        return Request(LogitsMethod(), pairs_of(body.query, body.texts, self.field), body)

    def answer(self, request: Request, results: Sequence[TextScores], model: Model) -> Any:
        """Returns the texts in descending order of their scores."""
        _require_whole(request, results, model)
        body = request.body
        scores = [float(result.logits[0]) for result in results] if body.raw_scores else relevance_scores(results)
        return [
            {"index": index, "score": scores[index], **({"text": body.texts[index]} if body.return_text else {})}
            for index in ranking_of(results)
        ]


class PredictBody(msgspec.Struct):
    """The fields of a request for classes. Other fields are ignored."""

    inputs: str | list[str | list[str]]
    raw_scores: bool = False
    truncate: bool | None = None
    truncation_direction: Side = "right"


class Predict(TextEmbeddingsInference, Computation):
    """Predicts the classes of a text, of a pair of texts, or of a list of them: ["a"] is a text, ["a", "b"] a pair."""

    field = "inputs"

    def check(self, model: Model) -> None:
        """Raises `Refused` if the checkpoint is not a classifier."""
        if not _is_classifier(model):
            raise Refused(
                UNSUPPORTED,
                f"the checkpoint {model.path} cannot classify texts: it is not a classifier; serve a run of a "
                f"classification, or a classifier of transformers",
            )

    def count(self, value: Any) -> int:
        """Returns the number of texts and pairs of texts."""
        return len(value) if isinstance(value, list) and _is_batch(value) else 1

    def read(self, content: dict[str, Any], model: Model) -> Request:
        """Returns the request."""
        body = convert(content, PredictBody)
        inputs = [text for text in _as_batch(body.inputs) if isinstance(text, list)]
        if not inputs or len(inputs) < len(_as_batch(body.inputs)) or any(len(texts) not in (1, 2) for texts in inputs):
            raise Refused(400, "inputs: must be a text, a pair of texts, or a list of lists of one or two texts")
        return Request(LogitsMethod(), list(map(tuple, inputs)), body)

    def answer(self, request: Request, results: Sequence[TextScores], model: Model) -> Any:
        """Returns the labels with their scores, in descending order, for the text or for each text of a list."""
        _require_whole(request, results, model)
        label_type = label_type_of(model.source)
        labels, predictions = _labels_of(model, label_type), []
        for result in results:
            scores = _scores_of(label_type, result, request.body.raw_scores)
            predictions.append(
                [{"score": scores[index], "label": labels[index]} for index in descending(result.logits)]
            )
        return predictions if _is_batch(request.body.inputs) else predictions[0]


def _is_batch(inputs: str | list[str | list[str]]) -> bool:
    return not isinstance(inputs, str) and not (inputs and isinstance(inputs[0], str))


def _as_batch(inputs: str | list[str | list[str]]) -> list[Any]:
    """Returns a list of lists of texts, if the inputs are valid."""
    if isinstance(inputs, str):
        return [[inputs]]
    return inputs if _is_batch(inputs) else [inputs] if all(isinstance(text, str) for text in inputs) else []


def _scores_of(label_type: LabelType, result: TextScores, is_raw: bool) -> list[float]:
    """Returns the logits, or the probabilities: the sigmoid if the labels do not exclude each other."""
    if is_raw:
        scores = result.logits
    else:
        scores = (softmax if isinstance(label_type, ClassLabel) else sigmoid)(result.logits)
    numbers: list[float] = scores.tolist()
    return numbers


def _labels_of(model: Model, label_type: LabelType) -> tuple[str, ...]:
    rows = model.source.params["classifier"]["dense"]["bias"].shape[0]
    return label_type.labels or model.source.label_names(rows)


def _is_classifier(model: Model) -> bool:
    return "classify" in model.methods or is_reranker(model.source)


def _require_whole(request: Request, results: Sequence[Embedding | TextScores], model: Model) -> None:
    """Raises `Refused` if a text was truncated, and the request forbids it with `truncate: false`."""
    if request.body.truncate is False and any(result.was_cut for result in results):
        most = model.source.max_seq_length
        raise Refused(TOO_LONG, f"the inputs must have at most {most} tokens; shorten them, or set truncate to true")


class Info(TextEmbeddingsInference, Description):
    """Describes the checkpoint and the limits of the server."""

    def describe(self, model: Model, limits: Limits) -> Any:
        """Returns the fields of text-embeddings-inference. `model_type` is null for checkpoints of other kinds."""
        source = model.source
        return {
            "model_id": model.path,
            "model_sha": None,
            "model_dtype": compute_for(source.dtype).product_dtype,
            "served_model_name": model.path,
            "model_type": self._model_type(model),
            "max_concurrent_requests": limits.waiting,
            "max_input_length": source.max_seq_length,
            "max_batch_tokens": limits.batch * source.max_seq_length,
            "max_batch_requests": limits.batch,
            "max_client_batch_size": limits.texts,
            "auto_truncate": True,
            "tokenization_workers": 1,
            "version": bertjax.__version__,
            "sha": None,
            "docker_label": None,
        }

    def _model_type(self, model: Model) -> dict[str, Any] | None:
        if makes_embeddings(model):
            pooling = model.source.head.get("pooling", "mean")
            return {"embedding": {"pooling": POOLINGS.get(pooling, pooling)}}
        if not _is_classifier(model):
            return None
        labels = _labels_of(model, label_type_of(model.source))
        names = {str(index): label for index, label in enumerate(labels)}
        about = {"id2label": names, "label2id": {label: index for index, label in enumerate(labels)}}
        return {"reranker" if is_reranker(model.source) else "classifier": about}
