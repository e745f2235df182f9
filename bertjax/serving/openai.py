"""The protocol of OpenAI: `POST /v1/embeddings` and `GET /v1/models`."""

import base64
import time
from collections.abc import Sequence
from typing import Any, Literal

import msgspec
import numpy as np

from bertjax.library.model import Model
from bertjax.serving.embeddings import Dimensions, Inputs, check_dimensions, count_inputs, inputs_of, require_embeddings
from bertjax.serving.endpoint import Computation, Description, Endpoint, Limits, Request, convert
from bertjax.serving.methods import Embedding, EmbedMethod

STARTED = int(time.time())  # the time of the model in `GET /v1/models`


class OpenAI(Endpoint):
    """The errors of OpenAI."""

    def error(self, status: int, message: str) -> Any:
        """Returns the error object."""
        kind = "server_error" if status >= 500 else "invalid_request_error"
        code = {401: "invalid_api_key", 404: "not_found"}.get(status)
        return {"error": {"message": message, "type": kind, "param": None, "code": code}}


class EmbeddingsBody(msgspec.Struct):
    """The fields of a request for embeddings. Other fields, such as `user`, are ignored."""

    input: Inputs
    model: str | None = None
    encoding_format: Literal["float", "base64"] | None = None
    dimensions: Dimensions | None = None


class CreateEmbeddings(OpenAI, Computation):
    """Computes embeddings with the default prompt of the checkpoint."""

    field = "input"

    def check(self, model: Model) -> None:
        """Raises `Refused` if the checkpoint was not trained for embeddings."""
        require_embeddings(model, 400)

    def count(self, value: Any) -> int:
        """Returns the number of texts or lists of token ids."""
        return count_inputs(value)

    def read(self, content: dict[str, Any], model: Model) -> Request:
        """Returns the request."""
        body = convert(content, EmbeddingsBody)
        method = EmbedMethod(width=check_dimensions(body.dimensions, model))
        return Request(method, inputs_of(body.input, self.field, model), body)

    def answer(self, request: Request, results: Sequence[Embedding], model: Model) -> Any:
        """Returns the embeddings as lists of numbers, or as base64 of float32 numbers with the low byte first."""
        tokens, is_base64 = sum(result.tokens for result in results), request.body.encoding_format == "base64"
        data = [
            {
                "object": "embedding",
                "index": index,
                "embedding": _base64_of(result.vector) if is_base64 else request.method.as_json(result),
            }
            for index, result in enumerate(results)
        ]
        usage = {"prompt_tokens": tokens, "total_tokens": tokens}
        return {"object": "list", "data": data, "model": request.body.model or model.path, "usage": usage}


def _base64_of(vector: np.ndarray) -> str:
    return base64.b64encode(np.asarray(vector, "<f4").tobytes()).decode()


class Models(OpenAI, Description):
    """Lists the checkpoint as the only model."""

    def describe(self, model: Model, limits: Limits) -> Any:
        """Returns the list of models."""
        served = {"id": model.path, "object": "model", "created": STARTED, "owned_by": "bertjax"}
        return {"object": "list", "data": [served]}
