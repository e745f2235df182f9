"""The table of paths that the server answers, in the protocols of bertjax and of other servers."""

from collections.abc import Iterable

from bertjax.library.model import Model
from bertjax.serving import openai, rerank, text_embeddings_inference
from bertjax.serving.endpoint import Computation, Description, MethodComputation
from bertjax.serving.methods import METHODS, Method

# Protocols of other servers. Several protocols may share a path: the field with the inputs distinguishes them.
COMPUTATIONS: dict[str, Computation] = {
    "/v1/embeddings": openai.CreateEmbeddings(),
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


def computations_of(methods: dict[str, type[Method]], model: Model) -> dict[str, list[Computation]]:
    """Returns the protocols of each path of POST requests.

    Args:
      methods: the methods that the checkpoint supports, see `request_methods_of`. Requests for other methods of bertjax
        are answered with an error, unless another protocol of the path supports the checkpoint.
      model: the checkpoint.
    """
    paths = describe_paths(methods, model)
    computations: dict[str, list[Computation]] = {path: [computation] for path, computation in COMPUTATIONS.items()}
    for name in METHODS | methods:
        protocols = computations.setdefault(f"/{name}", [])
        if name in methods or not any(protocol.supports(model) for protocol in protocols):
            protocols.insert(0, MethodComputation(name, methods.get(name), paths))
    return computations


def describe_paths(methods: Iterable[str], model: Model) -> str:
    """Returns the paths that the server answers with this checkpoint, for error messages."""
    protocols = (path for path, computation in COMPUTATIONS.items() if computation.supports(model))
    paths = dict.fromkeys([*(f"/{name}" for name in methods), *protocols])
    *first, last = PAGES
    return f"the paths are {', '.join(f'POST {path}' for path in paths)}, GET {', '.join(first)} and {last}"
