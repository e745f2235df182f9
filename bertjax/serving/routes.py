"""The table of paths that the server answers, in the protocols of bertjax and of other servers."""

from collections.abc import Iterable

from bertjax.serving import openai, rerank, text_embeddings_inference
from bertjax.serving.endpoint import Computation, Description, MethodComputation
from bertjax.serving.methods import METHODS, Method

# Protocols of other servers. Several protocols may share a path: the field with the inputs distinguishes them.
COMPUTATIONS: dict[str, Computation] = {
    "/v1/embeddings": openai.Embeddings(),
    "/v1/rerank": rerank.Rerank(version=1),
    "/v2/rerank": rerank.Rerank(version=2),
    "/embed": text_embeddings_inference.Embed(),
    "/rerank": text_embeddings_inference.Rerank(),
    "/predict": text_embeddings_inference.Predict(),
}
DESCRIPTIONS: dict[str, Description] = {
    "/v1/models": openai.Models(),
    "/info": text_embeddings_inference.Info(),
}
PAGES = ("/", "/health", "/metrics", *DESCRIPTIONS)


def computations_of(methods: dict[str, type[Method]]) -> dict[str, list[Computation]]:
    """Returns the protocols of each path of POST requests.

    Args:
      methods: the methods that the checkpoint supports, see `request_methods_of`. Requests for other methods of bertjax
        are answered with an error.
    """
    paths = describe_paths(methods)
    computations: dict[str, list[Computation]] = {
        f"/{name}": [MethodComputation(name, methods.get(name), paths)] for name in METHODS | methods
    }
    for path, computation in COMPUTATIONS.items():
        computations.setdefault(path, []).append(computation)
    return computations


def describe_paths(methods: Iterable[str]) -> str:
    """Returns the paths that the server answers, for error messages."""
    paths = dict.fromkeys([*(f"/{name}" for name in methods), *COMPUTATIONS])
    *first, last = PAGES
    return f"the paths are {', '.join(f'POST {path}' for path in paths)}, GET {', '.join(first)} and {last}"
