"""Bits per byte and tokens per word of held-out text, before and during training.

A new run chooses windows of text and the words to hide in them. If the run adapts a checkpoint, the run also scores the
checkpoint on the windows. The file `heldout_text.json` in the workdir holds the windows, the hidden words and these
scores.
"""

import dataclasses
import itertools
import json
from collections.abc import Mapping
from typing import Any, TypedDict

import jax
import jax.numpy as jnp
import numpy as np
from etils import epath
from flax.traverse_util import flatten_dict, unflatten_dict
from ml_collections import ConfigDict

from bertjax.common.errors import UserError
from bertjax.common.files import read_json, write_whole
from bertjax.config.lists import corpus_sources
from bertjax.distributed.mesh import compute_for
from bertjax.inference.bits_per_byte import bits_per_byte, hidden_words, windows
from bertjax.interop import initialization, pretrained
from bertjax.models import families
from bertjax.models.heads import BertForMaskedLM
from bertjax.text.tokenizer import Tokenizer

FILE = "heldout_text.json"
WINDOW_BYTES = (100, 600)  # the least and the largest number of bytes of a window
MAX_WINDOWS_PER_DOCUMENT = 4  # limits the effect of one long document


class TextScores(TypedDict):
    """The scores of a model on the windows of one source."""

    bits_per_byte: float | None  # None if the model predicts neither hidden words nor next words
    tokens_per_word: float


class HeldOutWindow(TypedDict):
    """A window of held-out text."""

    text: str
    hidden: list[int]  # indices of the hidden words


@dataclasses.dataclass(frozen=True)
class HeldOutText:
    """Windows of held-out text.

    Attributes:
      windows: the windows of each source of the corpus.
      before: the scores of the adapted checkpoint on each source; empty if the run does not adapt a checkpoint.
    """

    windows: Mapping[str, list[HeldOutWindow]]
    before: Mapping[str, TextScores]

    def score(self, model: BertForMaskedLM | None, params: Any, tokenizer: Tokenizer) -> dict[str, TextScores]:
        """Returns the scores of a model on each source; only the tokens per word if the model is None."""
        return {source: _score(windows, model, params, tokenizer) for source, windows in self.windows.items()}

    def report(self, after: Mapping[str, TextScores]) -> list[str]:
        """Returns a line with the scores of each source, before and after training.

        Args:
          after: the scores of the trained model.
        """
        lines = []
        for source, scores in after.items():
            before = self.before.get(source)
            parts = []
            for metric, value in _values(scores).items():
                label = metric.replace("_", " ")
                if before is None:
                    parts.append(f"{label} {value:.3f}")
                elif metric in (values_before := _values(before)):
                    parts.append(f"{label} {values_before[metric]:.3f} before, {value:.3f} after")
            lines.append(f"held-out text of {source}: {'; '.join(parts)}")
        return lines


def keep_token_updates(updates: dict, axes: dict, tokens: range, is_limited: jax.Array) -> dict:
    """Returns the updates of params; if `is_limited`, all updates except the rows of some tokens are zero.

    Args:
      updates: the updates of the trained params.
      axes: the logical axes of all params.
      tokens: the ids of the tokens.
      is_limited: a boolean scalar.
    """

    def masked(update: jax.Array, axes: tuple[str | None, ...]) -> jax.Array:
        if "vocab" not in axes:
            return jnp.where(is_limited, 0, update)
        axis = tuple(axes).index("vocab")
        token_id = jnp.arange(update.shape[axis]).reshape(-1, *[1] * (update.ndim - axis - 1))
        is_kept = (token_id >= tokens.start) & (token_id < tokens.stop)
        return jnp.where(is_limited & ~is_kept, 0, update)

    flat_axes, flat_updates = flatten_dict(axes), flatten_dict(updates)
    return unflatten_dict({path: masked(update, flat_axes[path]) for path, update in flat_updates.items()})


def write_heldout_text(config: ConfigDict, workdir: epath.Path, tokenizer: Tokenizer) -> None:
    """Chooses the windows of a new run, scores the checkpoint that the run adapts, and writes both to the workdir.

    Args:
      config: the whole config.
      workdir: the workdir of the run.
      tokenizer: the tokenizer of the run.

    Raises:
      UserError: if no text is held out.
    """
    checkpoint = pretrained.read_pretrained(config.init_checkpoint) if config.init_checkpoint else None
    if checkpoint is None:
        checkpoint_tokenizer = tokenizer
    elif checkpoint.tokenizer is not None:
        checkpoint_tokenizer = checkpoint.tokenizer
    else:
        checkpoint_tokenizer = initialization.require_tokenizer(config)
    by_source = {source: _windows_of(config, source, checkpoint_tokenizer) for source in corpus_sources(config)}
    text = HeldOutText({source: windows for source, windows in by_source.items() if windows}, {})
    if not text.windows:
        raise UserError(
            f"config.data.heldout_fraction = {config.data.heldout_fraction}: must hold out text with words between "
            f"spaces, to measure bits per byte; set a larger fraction, or set eval.bits_windows=0"
        )
    before = {}
    if checkpoint is not None:
        compute = compute_for(config.dtype)
        model = BertForMaskedLM(checkpoint.config, compute) if checkpoint.predicts_words else None
        before = text.score(model, jax.device_put(checkpoint.params), checkpoint_tokenizer)
    write_whole(workdir / FILE, json.dumps({"windows": text.windows, "before": before}, ensure_ascii=False) + "\n")


def read_heldout_text(workdir: epath.Path) -> HeldOutText | None:
    """Returns the text that `write_heldout_text` has written; None if the workdir has no such file."""
    path = workdir / FILE
    return HeldOutText(**read_json(path)) if path.exists() else None


def _values(scores: TextScores) -> dict[str, float]:
    """Returns the scores that are not None."""
    values: Mapping[str, Any] = scores
    return {metric: value for metric, value in values.items() if value is not None}


def _score(
    windows: list[HeldOutWindow], model: BertForMaskedLM | None, params: Any, tokenizer: Tokenizer
) -> TextScores:
    """Returns the scores of a model on the windows of one source."""
    texts = [window["text"] for window in windows]
    words = [text.split(" ") for text in texts]
    tokens_per_word = sum(map(len, tokenizer.encode_ids(texts))) / sum(map(len, words))
    if model is None or families.family_of(model.config).lm_type(model.config) == "bidirectional":
        return TextScores(bits_per_byte=None, tokens_per_word=tokens_per_word)
    hidden_indices = [set(window["hidden"]) for window in windows]
    is_hidden = [
        [index in indices for index in range(len(text_words))] for text_words, indices in zip(words, hidden_indices)
    ]
    results = bits_per_byte(model, params, tokenizer, texts, is_hidden, model.config.max_position_embeddings)
    return TextScores(bits_per_byte=results["bits_per_byte"], tokens_per_word=tokens_per_word)


def _windows_of(config: ConfigDict, source: str, tokenizer: Tokenizer) -> list[HeldOutWindow]:
    """Returns windows of the first held-out documents of a source. Hidden words have no unknown letters."""
    from bertjax.data.corpus.selection import heldout_documents  # imports pyarrow, which training does not need

    def may_hide(word: str) -> bool:
        ids = tokenizer.encode(word).ids
        return bool(ids) and tokenizer.unk_id not in ids

    windows_of_documents = (
        windows([" ".join(document.lines)], MAX_WINDOWS_PER_DOCUMENT, *WINDOW_BYTES)
        for document in heldout_documents(config, source)
    )
    all_windows = itertools.chain.from_iterable(windows_of_documents)
    texts = list(itertools.islice(all_windows, config.eval.bits_windows))
    is_hidden = hidden_words(texts, may_hide)
    return [HeldOutWindow(text=text, hidden=np.flatnonzero(words).tolist()) for text, words in zip(texts, is_hidden)]
