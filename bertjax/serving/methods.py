"""The methods of the server: the inputs and the options of a request, and the computation of the results."""

import abc
import collections
import dataclasses
from collections.abc import Sequence
from typing import Annotated, Any, ClassVar, TypedDict

import numpy as np
from msgspec import Meta

from bertjax.common.errors import UserError
from bertjax.library.model import Model
from bertjax.models import families
from bertjax.models.family import ExposesAttention
from bertjax.reporting import insight

MOST_TOKENS = 128  # the attention of longer texts is not shown
Option = Annotated[int, Meta(ge=1, le=10_000)]


@dataclasses.dataclass(frozen=True)
class Method(abc.ABC):
    """A method with the options of a request, which are the fields. Inputs of equal methods are computed together.

    Attributes:
      field: the field of a request that contains the inputs.
      inputs_type: the type of the inputs.
      takes_one: whether a request has one input, and its answer is the result instead of a list of results.
    """

    field: ClassVar[str] = "texts"
    inputs_type: ClassVar[Any] = list[str]
    takes_one: ClassVar[bool] = False

    @abc.abstractmethod
    def compute(self, model: Model, inputs: Sequence[Any]) -> list[Any]:
        """Returns a result for each input, which JSON can hold. Raises `UserError` if an input is wrong."""


@dataclasses.dataclass(frozen=True)
class FillMaskMethod(Method):
    """Fills masks with words."""

    top_k: Annotated[int, Meta(ge=1, le=100)] = 5

    def compute(self, model: Model, inputs: Sequence[str]) -> list[Any]:
        """Returns the text with the first words, and the likeliest words for each mask with their probabilities."""
        return [
            {"text": filled.text, "masks": filled.masks_as_json()} for filled in model.fill_mask(inputs, self.top_k)
        ]


@dataclasses.dataclass(frozen=True)
class PredictMethod(Method):
    """Predicts with the task of a checkpoint: texts, and tuples of texts."""

    inputs_type: ClassVar[Any] = list[str | Annotated[tuple[str, ...], Meta(min_length=1)]]

    def compute(self, model: Model, inputs: Sequence[str | tuple[str, ...]]) -> list[Any]:
        """Returns the predictions of the task, such as labels, probabilities or a score."""
        # `Model.predict` takes inputs with the same number of texts.
        places = collections.defaultdict(list)
        for place, texts in enumerate(inputs):
            places[1 if isinstance(texts, str) else len(texts)].append(place)
        results: dict[int, Any] = {}
        for group in places.values():
            results |= zip(group, model.predict([inputs[place] for place in group]))
        return [results[place] for place in range(len(inputs))]


@dataclasses.dataclass(frozen=True)
class TagMethod(Method):
    """Tags words."""

    def compute(self, model: Model, inputs: Sequence[str]) -> list[Any]:
        """Returns the words, their tags and the entities."""
        return list(model.tag(inputs))


class QuestionInContext(TypedDict):
    """A question and the text that contains the answer."""

    question: str
    context: str


@dataclasses.dataclass(frozen=True)
class AnswerMethod(Method):
    """Answers questions."""

    field: ClassVar[str] = "questions"
    inputs_type: ClassVar[Any] = list[QuestionInContext]

    def compute(self, model: Model, inputs: Sequence[QuestionInContext]) -> list[Any]:
        """Returns the answers with their positions and probabilities."""
        return model.predict([(pair["question"], pair["context"]) for pair in inputs])


@dataclasses.dataclass(frozen=True)
class EmbedMethod(Method):
    """Computes embeddings. The options are the arguments of `Model.embed`."""

    prompt: str | None = None
    width: Option = 0
    pool: str = ""
    layers: str = ""

    def compute(self, model: Model, inputs: Sequence[str]) -> list[Any]:
        """Returns lists of numbers."""
        embeddings: list[Any] = model.embed(inputs, **dataclasses.asdict(self)).tolist()
        return embeddings


@dataclasses.dataclass(frozen=True)
class AttentionMethod(Method):
    """Returns the attention of a text."""

    takes_one: ClassVar[bool] = True

    def compute(self, model: Model, inputs: Sequence[str]) -> list[Any]:
        """Returns the tokens of a text, and their attention `[layers, heads, queries, keys]` in thousandths."""
        results = {}
        for text in dict.fromkeys(inputs):
            count = len(model.tokenizer.framed(model.tokenizer.encode_with_masks(text)))
            if count > MOST_TOKENS:
                raise UserError(f"the text has {count} tokens; attention is shown for up to {MOST_TOKENS}")
            tokens, probabilities = insight.attention(model.source, text)
            results[text] = {"pieces": tokens, "attention": np.rint(1000 * probabilities).astype(int).tolist()}
        return [results[text] for text in inputs]


METHODS: dict[str, type[Method]] = {
    "fill_mask": FillMaskMethod,
    "classify": PredictMethod,
    "tag": TagMethod,
    "answer": AnswerMethod,
    "predict": PredictMethod,
    "embed": EmbedMethod,
    "attention": AttentionMethod,
}
# The methods of tasks. The server has `predict` for checkpoints of other tasks.
METHODS_OF_TASKS = {"classify", "tag", "answer"}


def request_methods_of(model: Model) -> dict[str, type[Method]]:
    """Returns {path: method} of the methods that a checkpoint supports."""
    names = {*model.methods, "embed"}
    if model.makes_vectors or names & METHODS_OF_TASKS:
        names.discard("predict")
    if isinstance(families.family_of(model.config), ExposesAttention):
        names.add("attention")
    return {name: method for name, method in METHODS.items() if name in names}
