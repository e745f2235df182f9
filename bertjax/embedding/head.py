"""The head of embeddings, and the embeddings of a checkpoint."""

import dataclasses
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import flax.linen as nn
import numpy as np
from ml_collections import ConfigDict

from bertjax.common.errors import UserError
from bertjax.config.model_config import BertConfig
from bertjax.embedding import loss_settings
from bertjax.embedding.datasets import ANY, DOCUMENT, QUERY, Prompts
from bertjax.finetuning import metrics
from bertjax.finetuning.encoding import encode_pairs
from bertjax.inference.heads import Head
from bertjax.inference.losses import LabelLoss
from bertjax.inference.text_embedding import TextEmbedder
from bertjax.interop.pretrained import Pretrained, tokenizer_of
from bertjax.interop.sentence_transformers import ARCHITECTURE, PACKAGE
from bertjax.models.heads import SentenceEncoder, model_flops


@dataclasses.dataclass(frozen=True)
class EmbeddingHead(Head):
    """Embeddings of texts, `[batch, width]`; `config.head` sets their computation from hidden states."""

    architecture = ARCHITECTURE

    def make_model(self, config: BertConfig, **settings: Any) -> nn.Module:
        """Returns the module."""
        return SentenceEncoder(config, **settings)

    def loss(self, config: ConfigDict) -> LabelLoss:
        """Returns the loss of a config whose model is known. Raises `UserError` for widths above `width_of`."""
        widths = widths_of_loss(config, width_of(config.head, config.model))
        return loss_settings.make_loss(config.loss, widths, config.get("distill"))

    def flops(self, model: nn.Module, rows: int, length: int) -> int:
        """Returns the model FLOPs of a training step."""
        dense = 2 * rows * model.config.hidden_size * model.dense
        return 3 * (model_flops(model.config, rows, length, 0, pooled=0) + dense)


class PromptedEmbedder(TextEmbedder):
    """Computes embeddings with the head of a checkpoint.

    Args:
      source: the checkpoint.
      prompt: the name of a prompt, such as `QUERY` or `DOCUMENT`, or the prompt itself, which precedes each text. None:
        the prompt `ANY`, see `prompts_of`.
      width: the number of leading dimensions to keep; 0 for all. If the head normalizes embeddings, the shortened
        embeddings are normalized again.

    Raises:
      UserError: if embeddings have fewer dimensions than `width`.
    """

    def __init__(self, source: Pretrained, prompt: str | None = None, width: int = 0) -> None:
        super().__init__(source, EmbeddingHead())
        full_width = width_of(source.head, source.config)
        if width > full_width:
            raise UserError(
                f"--width={width}: must be at most {full_width}, the width of the embeddings of {source.path}"
            )
        prompts = prompts_of(source.settings)
        self._prompt = prompts[ANY] if prompt is None else prompts.get(prompt, prompt)
        self._width, self._is_shortened = width or full_width, width not in (0, full_width)

    @property
    def flags(self) -> Mapping[str, str]:
        """The prompt and the width."""
        return {"prompt": self._prompt, "width": str(self._width)}

    def encode(self, texts: list[str]) -> tuple[list[np.ndarray], list[np.ndarray], list[int]]:
        """Encodes texts after the prompt."""
        prompted = [self._prompt + text for text in texts]
        return encode_pairs(tokenizer_of(self.source), prompted, None, self.source.max_seq_length)

    def finish(self, embeddings: np.ndarray) -> np.ndarray:
        """Shortens embeddings to `width`."""
        if not self._is_shortened:
            return embeddings
        shortened = embeddings[:, : self._width]
        return metrics.l2_normalize(shortened) if self.source.head["normalize"] else shortened


def embed_kinds(
    source: Pretrained, *sides: tuple[str | None, Sequence[str]]
) -> Iterator[tuple[np.ndarray, list[bool]]]:
    """Yields the embeddings of texts of each kind, and whether each text was truncated.

    Args:
      source: the checkpoint.
      *sides: the kind of texts, `QUERY`, `DOCUMENT` or `ANY`, and the texts.
    """
    # One embedder for all kinds, so that the model is compiled once.
    embedder, prompts = PromptedEmbedder(source, prompt=""), prompts_of(source.settings)
    for kind, texts in sides:
        yield embedder([prompts[kind] + text for text in texts])


def prompts_of(settings: ConfigDict) -> Prompts:
    """Returns the prompts of a run, or of a folder of sentence-transformers, by name.

    The prompt `ANY` is for texts that are neither queries nor documents. In a run, it is the prompt of queries; in a
    folder, it is the default prompt, as in `SentenceTransformer.encode`.
    """
    data, folder = settings.get("data", {}), settings.get(PACKAGE, {})
    query, named = data.get("query_prompt", ""), dict(folder.get("prompts", ()))
    default = named.get(folder["default_prompt_name"], "") if folder else query
    return {**named, QUERY: query, DOCUMENT: data.get("document_prompt", ""), ANY: default}


def similarity_of(settings: ConfigDict) -> str:
    """Returns the comparison of embeddings, see `metrics.comparable`; always "cosine" for a run of bertjax."""
    return settings.get(PACKAGE, {}).get("similarity_fn_name", "cosine")


def width_of(head: Mapping[str, Any], model: ConfigDict | BertConfig) -> int:
    """Returns the number of dimensions of an embedding."""
    width = head["dense"] or model.hidden_size
    return min(width, head.get("truncate_dim") or width)


def widths_of(text: str, setting: str, most: float = float("inf")) -> tuple[int, ...]:
    """Returns the widths that a text lists.

    Args:
      text: such as "256,128,64".
      setting: the setting that contains the text, for messages.
      most: the largest width.

    Raises:
      UserError: if the text is invalid, or if a width is above `most`.
    """
    widths = tuple(filter(None, map(str.strip, text.split(","))))
    if not all(width.isdecimal() and int(width) for width in widths):
        raise UserError(f"{setting}: must be widths, such as 256,128,64")
    if too_wide := [width for width in widths if int(width) > most]:
        raise UserError(f"{setting}: {too_wide[0]} must be at most {most}, the width of an embedding")
    return tuple(map(int, widths))


def widths_of_loss(config: ConfigDict, most: float = float("inf")) -> tuple[int, ...]:
    """Returns the widths of `config.loss`, see `widths_of`."""
    return widths_of(config.loss.widths, f"config.loss.widths = {config.loss.widths!r}", most)
