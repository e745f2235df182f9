"""The parts of requests for embeddings that the protocols share."""

import functools
from collections.abc import Sequence
from typing import Annotated, Any

from msgspec import Meta

from bertjax.embedding.head import width_of, widths_of
from bertjax.interop.sentence_transformers import PACKAGE
from bertjax.library.model import Model
from bertjax.serving.endpoint import Refused

TokenId = Annotated[int, Meta(ge=0)]
Dimensions = Annotated[int, Meta(ge=1)]
# A text, texts, token ids, or lists of token ids.
Inputs = str | list[str | TokenId | list[TokenId]]


def require_embeddings(model: Model, status: int) -> None:
    """Raises `Refused` with an HTTP status if the checkpoint was not trained for embeddings."""
    if not makes_embeddings(model):
        raise Refused(
            status,
            f"the checkpoint {model.path} cannot compute embeddings: it was not trained for embeddings; serve a run of "
            f"embed, or a folder of sentence-transformers",
        )


@functools.lru_cache(maxsize=8)
def makes_embeddings(model: Model) -> bool:
    """Returns whether the checkpoint was trained for embeddings. The search for the task takes several milliseconds."""
    return model.makes_vectors


def count_inputs(value: Any) -> int:
    """Returns the number of texts or lists of token ids in a value of JSON. A list of token ids is one input."""
    return len(value) if isinstance(value, list) and not (value and isinstance(value[0], int)) else 1


def inputs_of(inputs: Inputs, field: str, model: Model) -> list[str | tuple[int, ...]]:
    """Returns the texts, or tuples of token ids, of a request. Raises `Refused` for other lists and for wrong ids."""
    if isinstance(inputs, str):
        return [inputs]
    if not inputs:
        raise Refused(400, f"{field} = []: must contain one text or more")
    values: list[str | tuple[int, ...]] = []
    ids = [value for value in inputs if isinstance(value, int)]
    if len(ids) == len(inputs):
        inputs = [ids]
    for number, value in enumerate(inputs):
        if isinstance(value, int):
            raise Refused(400, f"{field}[{number}] = {value}: must be a text or a list of token ids, as before it")
        values.append(value if isinstance(value, str) else _checked_ids(value, field, model))
    return values


def _checked_ids(ids: Sequence[int], field: str, model: Model) -> tuple[int, ...]:
    """Returns token ids. Raises `Refused` unless they are the ids of a whole text by the tokenizer of the checkpoint.

    Most tokenizers have tokens with the same small ids. The special tokens at both ends show that the ids do not belong
    to another tokenizer, whose ids would get a wrong embedding without an error.
    """
    tokenizer, values = model.tokenizer, tuple(ids)
    begin, end = tuple(tokenizer.begin), tuple(tokenizer.end)
    middle = values[len(begin) : len(values) - len(end)]
    if values != (*begin, *middle, *end) or max(values) >= tokenizer.vocab_size:
        raise Refused(
            400,
            f"{field}: token ids must be ids of the checkpoint's tokenizer below {tokenizer.vocab_size}, from "
            f"{list(begin)} to {list(end)}; send texts instead, in LangChain with check_embedding_ctx_length=False",
        )
    return values


def check_dimensions(dimensions: int | None, model: Model) -> int:
    """Returns the width of embeddings, 0 for all dimensions. Raises `Refused` for a width that was not trained.

    A run has trained the widths of `loss.widths` and the full width. A folder of sentence-transformers does not state
    the widths of its training: all widths up to the full width are allowed.
    """
    settings, full = model.source.settings, width_of(model.source.head, model.source.config)
    if dimensions is None or dimensions == full:
        return 0
    widths = settings.get("loss", {}).get("widths", "")
    trained = {*widths_of(widths, f"config.loss.widths = {widths!r}"), full}
    if dimensions > full if PACKAGE in settings else dimensions not in trained:
        allowed = f"from 1 to {full}" if PACKAGE in settings else " or ".join(map(str, sorted(trained)))
        raise Refused(400, f"dimensions = {dimensions}: the checkpoint has embeddings of {allowed} dimensions")
    return dimensions
