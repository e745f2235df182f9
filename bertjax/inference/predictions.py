"""The predictions of a checkpoint for texts: filled masks, continuations, or the results of a fine-tuning task."""

import json
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

from bertjax.common.errors import UserError
from bertjax.inference import fill_mask, generation
from bertjax.inference.abilities import task_of
from bertjax.inference.generation import Sampling
from bertjax.interop.pretrained import Pretrained

TOP_K = 5  # words for each [MASK]
SAMPLING = Sampling()


class Prediction(NamedTuple):
    """The prediction for a text.

    Attributes:
      text: the text.
      values: the prediction, such as {"label": "good"}.
      lines: the prediction as readable lines of text; None if the prediction is only shown by `as_json`.
    """

    text: str
    values: dict[str, Any]
    lines: str | None = None

    def as_json(self) -> str:
        """Returns a JSON object with the text and the values, in one line."""
        return json.dumps({"text": self.text, **self.values}, ensure_ascii=False)


def predict_texts(
    source: Pretrained,
    texts: Sequence[str],
    top_k: int | None = None,
    tokens: int = 0,
    sampling: Sampling = SAMPLING,
    seed: int = 0,
) -> Iterator[Prediction]:
    """Yields the prediction for each text, in order.

    Args:
      source: the checkpoint.
      texts: the texts; " ||| " separates the parts of a text, such as the texts of a pair.
      top_k: the number of words for each [MASK]; None for `TOP_K`.
      tokens: the maximum number of tokens that continue a text, chosen with `sampling`; 0 fills masks instead.
      sampling: the settings of sampling.
      seed: the seed of sampling.

    Raises:
      UserError: if the checkpoint is not fine-tuned and predicts no words, if a text has another number of parts than
        the task expects, and if `top_k` or `tokens` is set for a fine-tuned checkpoint.
    """
    if (task := task_of(source)) is not None:
        for flag, value in (("generate", tokens), ("top_k", top_k)):
            if value:
                raise UserError(f"--{flag}={value}: {source.path} is fine-tuned, and predicts no words")
        for text, values in zip(texts, task.predict(source, task.inputs.split(texts))):
            yield Prediction(text, values)
    elif tokens:
        for text, continued in zip(texts, generation.continue_texts(source, texts, tokens, sampling, seed)):
            yield Prediction(text, {"continued": continued}, continued)
    else:
        for filled in fill_mask.predict_masks(source, texts, top_k or TOP_K):
            yield Prediction(filled.text, {"masks": filled.masks_as_json()}, fill_mask.describe(filled))
