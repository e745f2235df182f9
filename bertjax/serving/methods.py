"""The methods of the server: the inputs and the options of a request, and the computation of the results."""

import abc
import collections
import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Annotated, Any, ClassVar, NamedTuple, TypedDict

import numpy as np
from msgspec import Meta

from bertjax.common.errors import UserError
from bertjax.config.limits import POOLS
from bertjax.finetuning.classification import compute_logits
from bertjax.finetuning.labels import label_type_of
from bertjax.finetuning.tasks.swag import Swag
from bertjax.inference.abilities import task_of
from bertjax.inference.embedders import embedder_of, require_no_prompt
from bertjax.inference.predictor import check_numbers
from bertjax.inference.task import SEPARATOR, InputForm
from bertjax.inference.text_embedding import TextEmbedder
from bertjax.library.model import Model
from bertjax.models import families
from bertjax.models.family import ExposesAttention
from bertjax.nn.layer_pooling import WITHOUT_WEIGHTS
from bertjax.reporting import insight

MOST_TOKENS = 128  # the attention of longer texts is not shown
MOST_WORDS = 25_600  # the words for all masks of a request: the largest `top_k` for a mask in each of 256 texts
MASK = "[MASK]"
CHARACTERS_OF_TOKEN = 4  # the number of characters that a token id of a request counts for
CACHED_EMBEDDERS = 8
Width = Annotated[int, Meta(ge=0, le=10_000)]  # 0 for all dimensions, as in `Model.embed`


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

    def check(self, model: Model, inputs: Sequence[Any]) -> None:  # noqa: B027 (most methods have nothing to check)
        """Raises `UserError` if a request cannot be computed. Called before the inputs of the request wait."""

    @abc.abstractmethod
    def compute(self, model: Model, inputs: Sequence[Any]) -> list[Any]:
        """Returns a result for each input. Raises `UserError` if an input is wrong."""

    def size(self, value: Any) -> int:
        """Returns the length of an input in characters."""
        return count_characters(value)

    def rows(self, value: Any) -> int:
        """Returns the number of sequences that the model computes for an input; by default one."""
        return 1

    def as_json(self, result: Any) -> Any:
        """Returns a result as a value of JSON; by default the result itself."""
        return result


@dataclasses.dataclass(frozen=True)
class FillMaskMethod(Method):
    """Fills masks with words."""

    top_k: Annotated[int, Meta(ge=1, le=100)] = 5

    def check(self, model: Model, inputs: Sequence[str]) -> None:
        """Raises `UserError` if the answer would have too many words."""
        masks = sum(text.count(MASK) for text in inputs)
        if (words := masks * self.top_k) > MOST_WORDS:
            raise UserError(
                f"top_k = {self.top_k}: the answer for {masks:,} masks would have {words:,} words; expected at most "
                f"{MOST_WORDS:,} words; decrease top_k, or send fewer masks in a request"
            )

    def compute(self, model: Model, inputs: Sequence[str]) -> list[Any]:
        """Returns the text with the first words, and the likeliest words for each mask with their probabilities."""
        return [
            {"text": filled.text, "masks": filled.masks_as_json()} for filled in model.fill_mask(inputs, self.top_k)
        ]


@dataclasses.dataclass(frozen=True)
class PredictMethod(Method):
    """Predicts with the task of a checkpoint: texts, and tuples of texts."""

    inputs_type: ClassVar[Any] = list[str | Annotated[tuple[str, ...], Meta(min_length=1)]]

    def check(self, model: Model, inputs: Sequence[str | tuple[str, ...]]) -> None:
        """Raises `UserError` if a text has another number of parts than the task expects, or an empty part."""
        form = _input_form_of(model)
        for number, value in enumerate(inputs):
            parts = [value] if isinstance(value, str) else list(value)
            if len(parts) not in form.parts or not all(map(str.strip, parts)):
                raise UserError(
                    f"{self.field}[{number}] = {parts!r:.60}: this checkpoint expects {form.usage}; send a list of "
                    f'parts in place of "{SEPARATOR}"; no part may be empty'
                )

    def compute(self, model: Model, inputs: Sequence[str | tuple[str, ...]]) -> list[Any]:
        """Returns the predictions of the task, such as labels, probabilities or a score."""
        return compute_by_parts(inputs, model.predict)


@dataclasses.dataclass(frozen=True)
class ChoiceMethod(PredictMethod):
    """Predicts the endings of sentences: tuples of a sentence and its endings. The model computes pairs of them."""

    def size(self, value: str | tuple[str, ...]) -> int:
        """Returns the length of all pairs (sentence, ending) in characters."""
        repeated = 0 if isinstance(value, str) else (self.rows(value) - 1) * len(value[0])
        return count_characters(value) + repeated

    def rows(self, value: str | tuple[str, ...]) -> int:
        """Returns the number of endings; 1 for a text without endings, which is answered with an error."""
        return 1 if isinstance(value, str) else max(1, len(value) - 1)


@dataclasses.dataclass(frozen=True)
class TagMethod(PredictMethod):
    """Tags words."""

    inputs_type: ClassVar[Any] = list[str]


class QuestionInContext(TypedDict):
    """A question and the text that contains the answer."""

    question: str
    context: str


@dataclasses.dataclass(frozen=True)
class AnswerMethod(Method):
    """Answers questions."""

    field: ClassVar[str] = "questions"
    inputs_type: ClassVar[Any] = list[QuestionInContext]

    def check(self, model: Model, inputs: Sequence[QuestionInContext]) -> None:
        """Raises `UserError` for an empty question or context."""
        for number, pair in enumerate(inputs):
            for name, text in pair.items():
                if not str(text).strip():
                    raise UserError(f"{self.field}[{number}].{name} = {text!r:.60}: must not be empty")

    def compute(self, model: Model, inputs: Sequence[QuestionInContext]) -> list[Any]:
        """Returns the answers with their positions and probabilities."""
        return model.predict([(pair["question"], pair["context"]) for pair in inputs])


class Embedding(NamedTuple):
    """The embedding of a text.

    Attributes:
      vector: the embedding, `[width]` float32.
      tokens: the number of tokens after the truncation, with special tokens.
      was_cut: whether the text was truncated.
    """

    vector: np.ndarray
    tokens: int
    was_cut: bool


@dataclasses.dataclass(frozen=True)
class EmbedMethod(Method):
    """Computes embeddings of texts, or of tuples of token ids. The options are the arguments of `Model.embed`."""

    prompt: str | None = None
    width: Width = 0
    pool: str = ""
    layers: str = ""

    def compute(self, model: Model, inputs: Sequence[str | tuple[int, ...]]) -> list[Embedding]:
        """Returns the embeddings. The prompt is not added to token ids."""
        if self.pool:
            require_no_prompt(self.prompt, self.width)
            embedder = _find_pooled_embedder(model, self.pool, self.layers or "last")
        else:
            embedder = _find_embedder(model, self)
        texts = [value for value in inputs if isinstance(value, str)]
        of_texts = zip(*embedder.encode(texts)) if texts else iter(())
        encoded = [next(of_texts) if isinstance(value, str) else _encode_ids(model, value) for value in inputs]
        input_ids, token_types, lost = map(list, zip(*encoded))
        vectors = embedder.embed(input_ids, token_types)
        return [Embedding(vector, len(ids), count > 0) for vector, ids, count in zip(vectors, input_ids, lost)]

    def size(self, value: str | tuple[int, ...]) -> int:
        """Returns the length of an input and of the prompt before each text."""
        if isinstance(value, tuple):
            return CHARACTERS_OF_TOKEN * len(value)
        return len(self.prompt or "") + len(value)

    def as_json(self, result: Embedding) -> list[float]:
        """Returns a list of numbers."""
        numbers: list[float] = result.vector.tolist()
        return numbers


@functools.lru_cache(maxsize=CACHED_EMBEDDERS)
def _find_embedder(model: Model, method: EmbedMethod) -> TextEmbedder:
    """Returns the embedder for a prompt and a width. All these embedders share a compiled program."""
    return embedder_of(model.source, **dataclasses.asdict(method))


@functools.lru_cache(maxsize=len(POOLS) * len(WITHOUT_WEIGHTS))
def _find_pooled_embedder(model: Model, pool: str, layers: str) -> TextEmbedder:
    """Returns the embedder that pools hidden states.

    The cache holds the embedders of all options, with their compiled programs. Therefore a client that changes the
    options in turn does not make the server compile in a loop.
    """
    return embedder_of(model.source, pool=pool, layers=layers)


def _encode_ids(model: Model, ids: tuple[int, ...]) -> tuple[np.ndarray, np.ndarray, int]:
    """Returns the token ids of a text and their types, and the number of tokens that were cut off before the end."""
    tokenizer, lost = model.tokenizer, max(0, len(ids) - model.source.max_seq_length)
    kept = len(ids) - len(tokenizer.end) - lost
    input_ids = np.array([*ids[:kept], *tokenizer.end], np.int32)
    return input_ids, tokenizer.token_types(len(input_ids)), lost


class TextScores(NamedTuple):
    """The logits of a classifier for a text or a pair of texts.

    Attributes:
      logits: the logits, `[labels]`; one logit of a checkpoint that computes one score.
      tokens: the number of tokens after the truncation, with special tokens.
      was_cut: whether the text was truncated.
    """

    logits: np.ndarray
    tokens: int
    was_cut: bool


@dataclasses.dataclass(frozen=True)
class LogitsMethod(Method):
    """Computes the logits of a classifier, or the logit of the score of a pair (query, document)."""

    def compute(self, model: Model, inputs: Sequence[tuple[str, ...]]) -> list[TextScores]:
        """Returns the logits of tuples of texts."""
        head = label_type_of(model.source).head

        def scores_of(texts: Sequence[tuple[str, ...]]) -> list[TextScores]:
            logits, were_cut, tokens = compute_logits(model.source, head, texts)
            return list(map(TextScores, logits, tokens, were_cut))

        return compute_by_parts(inputs, scores_of)


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
            check_numbers(probabilities)
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
    methods = {name: method for name, method in METHODS.items() if name in names}
    if "predict" in methods and model.source.architecture == Swag.architecture:
        methods["predict"] = ChoiceMethod
    return methods


@functools.lru_cache(maxsize=8)
def _input_form_of(model: Model) -> InputForm:
    """Returns the form of the inputs of a checkpoint's task. The search for the task takes several milliseconds."""
    task = task_of(model.source)
    assert task is not None  # The server has methods of a task for fine-tuned checkpoints only.
    return task.inputs


def compute_by_parts(inputs: Sequence[Any], compute: Callable[[list[Any]], Sequence[Any]]) -> list[Any]:
    """Returns the results of texts and tuples of texts. `compute` takes inputs with the same number of texts."""
    places = collections.defaultdict(list)
    for place, texts in enumerate(inputs):
        places[1 if isinstance(texts, str) else len(texts)].append(place)
    results: dict[int, Any] = {}
    for group in places.values():
        results |= zip(group, compute([inputs[place] for place in group]))
    return [results[place] for place in range(len(inputs))]


def count_characters(value: Any) -> int:
    """Returns the number of characters of a text, or of all texts of a tuple or dict."""
    if isinstance(value, str):
        return len(value)
    return sum(map(count_characters, value.values() if isinstance(value, dict) else value))
