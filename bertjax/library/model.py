"""The class `Model`, which computes predictions and embeddings of texts with a checkpoint, and `load`."""

import dataclasses
import functools
import numbers
import os
import tempfile
from typing import Any, cast

import jax
import jax.numpy as jnp
import numpy as np
from numpy.typing import ArrayLike, NDArray

from bertjax.common import surrogates
from bertjax.common.errors import UserError
from bertjax.config.model_config import BertConfig
from bertjax.distributed.mesh import compute_for
from bertjax.export import network
from bertjax.inference import abilities, fill_mask, generation
from bertjax.inference.embedders import embedder_of, find_embedding_task
from bertjax.inference.fill_mask import Filled
from bertjax.inference.task import FineTuningTask
from bertjax.interop.pretrained import Pretrained
from bertjax.library.arguments import check_number, parts_of_texts, plain_texts
from bertjax.library.checkpoints import convert, read_checkpoint
from bertjax.library.types import Answer, Classified, Params, Parts, Path, Tagged, Texts
from bertjax.reranking import ranking
from bertjax.reranking.ranking import Ranked
from bertjax.text.tokenizer import Tokenizer


@dataclasses.dataclass(frozen=True, eq=False, repr=False)
class Model:
    """A checkpoint that computes predictions and embeddings of texts, or the outputs of its network.

    A method with the argument `texts` takes one text or several, and returns a list with one result per text; `embed`
    returns an array. The model reads several texts in batches. A method raises `UserError` if the checkpoint was not
    trained for the method; the message lists the available methods.

    Args:
      source: the checkpoint, with its params on one device.
    """

    source: Pretrained

    def __repr__(self) -> str:
        return f"bertjax.Model({self.path!r})"

    @property
    def path(self) -> str:
        """The path of the checkpoint, such as runs/mine@500000."""
        return self.source.path

    @property
    def params(self) -> Params:
        """The params of the network: a nested dict of arrays."""
        return self.source.params

    @property
    def config(self) -> BertConfig:
        """The config of the model; its class depends on the model family."""
        return self.source.config

    @property
    def tokenizer(self) -> Tokenizer:
        """The tokenizer, with the ids of the special tokens."""
        return cast(Tokenizer, self.source.tokenizer)  # `load` requires one

    # Predictions for texts.

    def fill_mask(self, texts: Texts, top_k: int = 5) -> list[Filled]:
        """Returns each text with the most likely words for each [MASK], and their probabilities.

        Args:
          texts: one text or several, each with at least one [MASK].
          top_k: the number of words for each [MASK].

        Returns:
          One result per text, in order. `masks` has a list of (word, probability) pairs for each [MASK], the most
          likely word first. A word is a token of the vocabulary.

        Raises:
          UserError: if the checkpoint has no masked-LM head, if a text has no [MASK] or is longer than the model
            supports, or if `top_k` is not a positive integer.

        Examples:
          >>> model.fill_mask("the [MASK] barked", top_k=1)[0].masks
          [[('dog', 0.71)]]
        """
        self._require("fill_mask")
        check_number("top_k", top_k, 1)
        return list(fill_mask.predict_masks(self.source, plain_texts(texts), top_k))

    def generate(
        self,
        texts: Texts,
        pieces: int,
        temperature: float = 1.0,
        top_k: int = 0,
        top_p: float = 1.0,
        seed: int = 0,
    ) -> list[str]:
        """Returns each text with a continuation of up to `pieces` tokens. Only for left-to-right models.

        Args:
          texts: the texts.
          pieces: the maximum number of new tokens.
          temperature: divides the logits; 0 always chooses the most likely token.
          top_k: samples from the k most likely tokens; 0 samples from all tokens.
          top_p: samples from the most likely tokens with this total probability.
          seed: the seed of the random numbers. Text number i, counted from 0, has the seed `seed + i`.

        Raises:
          UserError: if the checkpoint is not a left-to-right language model, if an argument is out of range, or if a
            text has as many tokens as the model has positions.
        """
        self._require("generate")
        for name, value, least in (("pieces", pieces, 0), ("top_k", top_k, 0)):
            check_number(name, value, least)
        check_number("seed", seed, 0, 2**31 - 1)
        check_number("temperature", temperature, 0, kinds=numbers.Real)
        check_number("top_p", top_p, 1e-6, 1, kinds=numbers.Real)
        sampling = generation.Sampling(temperature, top_k, top_p)
        return list(generation.continue_texts(self.source, plain_texts(texts), pieces, sampling, seed))

    def classify(self, texts: Parts) -> list[Classified]:
        """Returns the class, the labels of a multi-label task, or the number of a regression for each text.

        Args:
          texts: one text or several. A text can be a tuple of texts, such as ("a premise", "a hypothesis") for a task
            on pairs. Pass a single pair as a list: `[("a premise", "a hypothesis")]`.

        Returns:
          One dict per text, in order. The task determines the keys.

        Raises:
          UserError: if the checkpoint was not trained for classification, or if a text has the wrong number of parts or
            an empty part.

        Examples:
          >>> model.classify(["a great film", "a dull film"])[0]["label"]
          'positive'
        """
        self._require("classify")
        return cast(list[Classified], self.predict(texts))

    def tag(self, texts: Texts) -> list[Tagged]:
        """Returns the words of each text with their tags, and the entities.

        Args:
          texts: one text or several. The tagger divides the texts into words.

        Returns:
          One dict per text, in order. `offsets` and the positions of entities count characters of the text.

        Raises:
          UserError: if the checkpoint was not trained for tagging, or if a text is empty.
        """
        self._require("tag")
        return cast(list[Tagged], self.predict(texts))

    def answer(self, question: str, context: str) -> Answer:
        """Returns the answer to a question: a part of a context. `predict` answers several questions in one call.

        Args:
          question: the question.
          context: the text that contains the answer. A context can be longer than the model supports.

        Returns:
          The answer, with its position in the context in characters, and its probability.

        Raises:
          UserError: if the checkpoint was not trained for question answering, or if an argument is empty.
        """
        self._require("answer")
        (prediction,) = self.predict([(question, context)])
        return cast(Answer, prediction)

    def predict(self, texts: Parts) -> list[dict[str, Any]]:
        """Returns the predictions of a checkpoint of any fine-tuning task. `bertjax predict` prints the same dicts.

        Args:
          texts: one text or several. A text can be a tuple of parts, such as (question, context).

        Returns:
          One dict per text, in order. The task determines the keys; `"cut": True` marks a truncated text.

        Raises:
          UserError: if the checkpoint is not fine-tuned, if a text has the wrong number of parts or an empty part, or
            if the outputs are NaN.
        """
        self._require("predict")
        task, parts = cast(FineTuningTask, self._task), parts_of_texts(texts)
        task.inputs.check(parts)
        return list(task.predict(self.source, parts)) if parts else []

    def embed(
        self, texts: Texts, prompt: str | None = None, width: int = 0, pool: str = "", layers: str = ""
    ) -> NDArray[np.float32]:
        """Returns the embeddings of texts, an array with one row per text, `[number of texts, embedding size]`.

        Args:
          texts: the texts.
          prompt: a prefix for each text, or the name of a prefix: "query", "document", or another name in a folder of
            sentence-transformers. None: the prefix "query" for a run of bertjax, and the default prompt for a folder of
            sentence-transformers.
          width: the number of dimensions to keep; 0 for all. `loss.widths` of the training must contain this
            number (a Matryoshka loss). The shortened embeddings are normalized.
          pool: "mean" averages the hidden states of a text, "cls" takes the first token and "last" the last token.
            These values work with any checkpoint, and do not allow `prompt` and `width`. "" computes the embeddings
            that the checkpoint was trained for.
          layers: the layers that `pool` reads, such as "second_to_last" or "concat_last_four"; "" for the last layer.

        Raises:
          UserError: for an invalid argument, or if `pool` is "" and the checkpoint was not trained for embeddings.

        Examples:
          >>> model.embed(["a query", "another query"]).shape
          (2, 384)
        """
        check_number("width", width, 0)
        prompt = surrogates.replaced(prompt) if isinstance(prompt, str) else prompt
        embedder, plain = embedder_of(self.source, prompt, width, pool, layers), plain_texts(texts)
        return embedder(plain)[0] if plain else np.zeros((0, width), np.float32)

    def rank(self, query: str, documents: Texts, top_k: int | None = None) -> list[Ranked]:
        """Returns documents in descending order of their relevance to a query. Only for rerankers.

        Args:
          query: the query.
          documents: one document, or several.
          top_k: the largest number of documents to return; None for all.

        Returns:
          The documents with their indices and scores. Documents with equal scores keep their order.

        Examples:
          >>> model.rank("how old is the ship ?", ["The ship was built in 1911 .", "The sun shines ."], top_k=1)
          [Ranked(index=0, score=8.4, text='The ship was built in 1911 .')]
        """
        self._require("rank")
        if top_k is not None:
            check_number("top_k", top_k, 1)
        if not isinstance(query, str):
            raise UserError(f"query = {query!r:.60}: must be a str; call rank for each query")
        (plain_query,) = plain_texts(query)
        return ranking.Ranker(self.source).rank(plain_query, plain_texts(documents), top_k)

    # Files.

    def save(self, folder: Path, format: str = "") -> str:
        """Writes the checkpoint to a new folder in another format, see `bertjax.convert`; returns a summary.

        Args:
          folder: the folder; it must be new or empty.
          format: the format; by default huggingface, or sentence-transformers for a model of embeddings.
        """
        return convert(self.path, folder, format or self._format)

    def push(self, repository: str, private: bool = False, format: str = "") -> str:
        """Pushes the checkpoint to a repository of the Hugging Face hub; returns a summary.

        Args:
          repository: the repository, USER/NAME, which is created if it does not exist.
          private: whether a new repository is private.
          format: huggingface or sentence-transformers; by default as for `save`.
        """
        with tempfile.TemporaryDirectory() as folder:
            output = os.path.join(folder, "model")
            return convert(self.path, output, format or self._format, push=repository, private=private)

    @property
    def _format(self) -> str:
        return "sentence-transformers" if self.makes_vectors else "huggingface"

    # The network.

    def apply(
        self,
        params: Params,
        input_ids: ArrayLike,
        segments: ArrayLike | None = None,
        token_types: ArrayLike | None = None,
        dropout_keys: jax.Array | None = None,
    ) -> jax.Array:
        """Computes the outputs of the head, the layers on top of the encoder.

        The method reads the argument `params`, not `self.params`, so that `jax.jit` can compile it and `jax.grad` can
        differentiate it.

        Args:
          params: the params, such as `self.params`.
          input_ids: `[batch, length]`, with [CLS] and [SEP]; for multiple choice `[batch, choices, length]`.
          segments: `[batch, length]`; if several inputs are packed in a row, the number of the input of each token,
            from 1; 0 for padding. Both texts of a pair have the same number. For one input per row, this is the
            attention mask of transformers. None: 0 for [PAD], and 1 for other ids.
          token_types: 1 in the second text of a pair; None: 0 everywhere.
          dropout_keys: `[batch]` random keys, such as `jax.random.split(jax.random.key(0), batch)`; None: no dropout.

        Returns:
          The logits of words `[batch, length, vocab]`, of classes `[batch, labels]`, of tags `[batch, length, labels]`,
          of the start and the end of answers `[batch, length, 2]`, or of choices `[batch, choices, 1]`; or embeddings
          `[batch, width]`. A bidirectional language model (ELMo) returns `[batch, 2 * length, vocab]`: the logits of
          the next words, then the logits of the previous words. Without a head, returns the result of `encode`.

        Examples:
          >>> loss = lambda params: model.apply(params, ids).mean()
          >>> gradients = jax.jit(jax.grad(loss))(model.params)
        """
        return self._outputs(params, self._batch(input_ids, segments, token_types), dropout_keys)

    def encode(
        self,
        params: Params,
        input_ids: ArrayLike,
        segments: ArrayLike | None = None,
        token_types: ArrayLike | None = None,
        dropout_keys: jax.Array | None = None,
    ) -> jax.Array:
        """Computes the hidden states of the last layer. `jax.jit` can compile it, and `jax.grad` can differentiate it.

        Args:
          params: the params, such as `self.params`.
          input_ids: see `apply`.
          segments: see `apply`.
          token_types: see `apply`.
          dropout_keys: see `apply`.

        Returns:
          The hidden states `[batch, length, hidden]`, in the dtype of the computation.
        """
        return self._states(params, self._batch(input_ids, segments, token_types), dropout_keys)

    def _batch(
        self, input_ids: ArrayLike, segments: ArrayLike | None, token_types: ArrayLike | None
    ) -> dict[str, jax.Array]:
        ids = jnp.asarray(input_ids, jnp.int32)
        segments = ids != self.tokenizer.pad_id if segments is None else segments
        token_types = jnp.zeros_like(ids) if token_types is None else token_types
        arrays = {"input_ids": ids, "segments": segments, "token_types": token_types}
        return {name: jnp.asarray(x, jnp.int32) for name, x in arrays.items()}

    @functools.cached_property
    def _outputs(self) -> network.Function:
        return network.outputs(self.source, compute_for(self.source.dtype))

    @functools.cached_property
    def _states(self) -> network.Function:
        return network.states(self.source, compute_for(self.source.dtype))

    # The abilities of the checkpoint.

    @functools.cached_property
    def _task(self) -> FineTuningTask | None:
        return abilities.task_of(self.source)

    @functools.cached_property
    def _methods(self) -> list[str]:
        return [*abilities.methods_of(self.source), *(["rank"] if ranking.is_reranker(self.source) else [])]

    @property
    def methods(self) -> list[str]:
        """The names of the methods that the checkpoint was trained for, such as `classify`."""
        return [*self._methods]

    @property
    def makes_vectors(self) -> bool:
        """Whether the checkpoint was trained to compute embeddings, so that `embed` needs no `pool`."""
        return find_embedding_task(self.source) is not None

    def _require(self, method: str) -> None:
        """Raises `UserError` if the checkpoint was not trained for a method."""
        if method not in self.methods:
            available = ", ".join([*self.methods, "embed", "encode, apply"])
            raise UserError(f"{self.path}: was not trained for {method}; the available methods are {available}")


def load(path: Path, dtype: str | None = None) -> Model:
    """Loads a checkpoint, with its tokenizer.

    Args:
      path: the workdir of a run, for its best checkpoint after fine-tuning and its latest after pre-training
        (WORKDIR@best, @latest or @STEP choose another), a folder of Hugging Face or sentence-transformers,
        hub:NAME[@REVISION], or Google's bert_model.ckpt.
      dtype: the type of the computations, with the same values as the config field `dtype`. None: the type of the run
        for a workdir, and "auto" for other checkpoints.

    Raises:
      UserError: if the path has no checkpoint, or if the checkpoint is damaged.

    Examples:
      >>> model = bertjax.load("runs/quickstart")
      >>> model.methods
      ['fill_mask']
    """
    source = read_checkpoint(path, dtype)
    return Model(dataclasses.replace(source, params=jax.device_put(source.params)))
