"""Bits per byte and tokens per word of held-out text, while a model is trained; and before, of a checkpoint that it
starts from: what adapting it changes.

The windows of text, and which of their words are hidden, are chosen when a run begins, and kept in its workdir with
what the checkpoint scored before.
"""

import dataclasses
import itertools
import json
from collections.abc import Mapping
from typing import TypedDict

import jax
import jax.numpy as jnp
import numpy as np
from etils import epath
from flax.traverse_util import flatten_dict, unflatten_dict

from bertjax.common.errors import UserError
from bertjax.common.files import read_json, write_whole
from bertjax.config.lists import corpus_sources
from bertjax.distributed.mesh import compute_for
from bertjax.inference.bits_per_byte import bits_per_byte as measure_bits_per_byte
from bertjax.inference.bits_per_byte import hidden_words, windows
from bertjax.interop import pretrained
from bertjax.models import families
from bertjax.models.heads import BertForMaskedLM
from bertjax.text.tokenizer import Tokenizer

FILE = "heldout_text.json"
WINDOW_BYTES = (100, 600)  # the shortest and the longest window
WINDOWS_OF_DOCUMENT = 4  # at most, so that not one long document decides


class Measured(TypedDict):
    bits_per_byte: float | None  # None if the model predicts neither hidden nor next words
    tokens_per_word: float


class HeldOutWindow(TypedDict):
    text: str
    hidden: list[int]  # numbers of the words that are hidden


@dataclasses.dataclass(frozen=True)
class HeldOutText:
    """Windows of held-out text by source of the corpus, and what the checkpoint that is adapted, if one is, scores on
    them.
    """

    windows: Mapping[str, list[HeldOutWindow]]
    before: Mapping[str, Measured]

    def measured(self, model: BertForMaskedLM | None, params, tokenizer: Tokenizer) -> dict[str, Measured]:
        """Returns the scores of a model by source; those of its tokenizer alone if it is None."""
        return {source: _measured(windows, model, params, tokenizer) for source, windows in self.windows.items()}

    def report(self, after: Mapping[str, Measured]) -> list[str]:
        """Returns a line for each source."""
        lines = []
        for source, scores in after.items():
            before = self.before.get(source)
            parts = [
                f"{what.replace('_', ' ')} {scores[what]:.3f}"
                if before is None
                else f"{what.replace('_', ' ')} {before[what]:.3f} before, {scores[what]:.3f} after"
                for what in Measured.__annotations__
                if scores[what] is not None and (before is None or before[what] is not None)
            ]
            lines.append(f"held-out text of {source}: {'; '.join(parts)}")
        return lines


def only_pieces(updates: dict, axes: dict, pieces: range, is_limited: jax.Array) -> dict:
    """Returns updates of params that change, if `is_limited`, nothing but the rows of some pieces.

    Args:
      axes: the logical axes of all params, of which `updates` may have some.
    """

    def limited(update, axes):
        if "vocab" not in axes:
            return jnp.where(is_limited, 0, update)
        axis = tuple(axes).index("vocab")
        number = jnp.arange(update.shape[axis]).reshape(-1, *[1] * (update.ndim - axis - 1))
        is_one = (number >= pieces.start) & (number < pieces.stop)
        return jnp.where(is_limited & ~is_one, 0, update)

    axes, trained = flatten_dict(axes), flatten_dict(updates)
    return unflatten_dict({path: limited(update, axes[path]) for path, update in trained.items()})


def _measured(windows: list[HeldOutWindow], model, params, tokenizer: Tokenizer) -> Measured:
    texts = [window["text"] for window in windows]
    words = [text.split(" ") for text in texts]
    tokens = sum(map(len, tokenizer.encode_ids(texts))) / sum(map(len, words))
    if model is None or families.family_of(model.config).lm_type(model.config) == "bidirectional":
        return Measured(bits_per_byte=None, tokens_per_word=tokens)
    hidden = [
        [number in chosen for number in range(len(its))]
        for its, chosen in zip(words, (set(window["hidden"]) for window in windows))
    ]
    longest = model.config.max_position_embeddings
    found = measure_bits_per_byte(model, params, tokenizer, texts, hidden, longest)
    return Measured(bits_per_byte=found["bits_per_byte"], tokens_per_word=tokens)


def begin(config, workdir: epath.Path, used: Tokenizer) -> None:
    """Chooses the windows of a new run, and measures its checkpoint, if it has one, before anything is changed.

    Raises `UserError` if no text is held out.

    Args:
      used: the tokenizer of the run.
    """
    source = pretrained.read(config.init_checkpoint) if config.init_checkpoint else None
    base = used
    if source is not None:
        base = source.tokenizer if source.tokenizer is not None else pretrained.require_tokenizer(config)
    windows = {name: _windows_of(config, name, base) for name in corpus_sources(config)}
    found = HeldOutText({name: each for name, each in windows.items() if each}, {})
    if not found.windows:
        raise UserError(
            f"config.data.heldout_fraction = {config.data.heldout_fraction}: holds out no text of words between "
            f"spaces to measure bits per byte on; increase it, or set eval.bits_windows=0"
        )
    before = {}
    if source is not None:
        model = BertForMaskedLM(source.config, compute_for(config.dtype)) if source.predicts_words else None
        before = found.measured(model, jax.device_put(source.params), base)
    write_whole(workdir / FILE, json.dumps({"windows": found.windows, "before": before}, ensure_ascii=False) + "\n")


def _windows_of(config, source: str, base: Tokenizer) -> list[HeldOutWindow]:
    """Returns windows of the first held-out documents of a source. Words that are hidden have known letters only."""
    from bertjax.data.corpus.selection import heldout_documents  # with pyarrow, which training does without

    def may_hide(word: str) -> bool:
        ids = base.encode(word).ids
        return bool(ids) and base.unk_id not in ids

    each = (
        windows([" ".join(document.lines)], WINDOWS_OF_DOCUMENT, *WINDOW_BYTES)
        for document in heldout_documents(config, source)
    )
    texts = list(itertools.islice(itertools.chain.from_iterable(each), config.eval.bits_windows))
    hidden = hidden_words(texts, may_hide)
    return [HeldOutWindow(text=text, hidden=np.flatnonzero(which).tolist()) for text, which in zip(texts, hidden)]


def read(workdir: epath.Path) -> HeldOutText | None:
    """Returns what `begin` wrote; None if it has not."""
    path = workdir / FILE
    return HeldOutText(**read_json(path)) if path.exists() else None
