"""Writes the embeddings or the hidden states of texts to a file."""

from typing import NamedTuple

import jax
import numpy as np

from bertjax.common.errors import UserError
from bertjax.config.limits import FLOAT32
from bertjax.data.corpus.text_input import TextInput
from bertjax.distributed.mesh import compute_for
from bertjax.inference import hidden_states, text_embedding
from bertjax.inference.embedders import embedder_of, find_embedding_task, require_no_prompt
from bertjax.inference.quantization import read_ranges
from bertjax.inference.text_embedding import TextEmbedder
from bertjax.interop.pretrained import Pretrained, tokenizer_of
from bertjax.models import families
from bertjax.nn.layer_pooling import check_layers


class Extracted(NamedTuple):
    """The content of a file that `write_extracted` has written.

    Attributes:
      name: the name of the array: "vectors" with a row per text, or "hidden" with a row per token.
      shape: the shape of the array, (rows, width).
      texts: the number of texts.
      cut: the number of texts that were truncated.
      most_tokens: the number of tokens, with special tokens, to which a longer text is truncated.
      layers: the layers that `write_extracted` has chosen for "hidden"; "" if the caller has set the layers, and for
        "vectors".
      precision: float32, int8 or ubinary.
    """

    name: str
    shape: tuple[int, int]
    texts: int
    cut: int
    most_tokens: int
    layers: str = ""
    precision: str = FLOAT32

    def describe(self, path: str) -> str:
        """Returns a line about the file."""
        note = f"; {self.cut} of them cut to {self.most_tokens} tokens" if self.cut else ""
        note += f"; --layers={self.layers}" if self.layers else ""
        note += f"; --precision={self.precision}" if self.precision != FLOAT32 else ""
        rows, width = self.shape
        return f"{self.name} [{rows}, {width}] of {self.texts} texts in {path}{note}"


def write_extracted(
    source: Pretrained,
    texts: TextInput,
    output: str,
    prompt: str | None = None,
    width: int = 0,
    pool: str = "",
    layers: str = "",
    precision: str = FLOAT32,
    calibration: str = "",
) -> Extracted:
    """Writes one embedding per text, or the hidden states of all tokens of all texts.

    With `pool`, the embeddings are pooled hidden states. Without `pool` and `layers`, the function writes the
    embeddings that the checkpoint was trained for. If the checkpoint was not trained for embeddings, or if only
    `layers` is set, the function writes the hidden states of all tokens.

    Args:
      source: the checkpoint.
      texts: the texts.
      output: the .npy, .npz or .parquet file; hidden states of tokens need an .npz.
      prompt: see `embedder_of`.
      width: see `embedder_of`.
      pool: see `embedder_of`.
      layers: one of `layer_pooling.WITHOUT_WEIGHTS`. "" with `pool`: the last layer. "" without `pool`: the
        concatenation of the last four layers, or the last layer if the model has fewer than four layers.
      precision: float32, int8 or ubinary, see `quantization.Quantizer`; the latter two are for one embedding per text.
      calibration: for int8, the file that determines the ranges, see `quantization.read_ranges`; "" for the ranges of
        the embeddings.

    Raises:
      UserError: for a wrong setting.
    """
    if pool or (not layers and find_embedding_task(source) is not None):
        embedder = embedder_of(source, prompt, width, pool, layers)
        ids = texts.ids if texts.id_column else None
        ranges = _calibrated_ranges(calibration, embedder) if calibration else None
        shape, cut = text_embedding.write_embeddings(
            output, embedder, iter(texts), ids, texts.id_column, texts.size, precision, ranges
        )
        most_tokens = source.config.max_position_embeddings if pool else source.max_seq_length
        return Extracted("vectors", shape, shape[0], cut, most_tokens, precision=precision)
    if precision != FLOAT32:
        raise UserError(
            f"--precision={precision}: is for one embedding per text, not for the hidden states of tokens; add "
            f"--pool=mean, or leave the flag out"
        )
    require_no_prompt(prompt, width)
    if not output.endswith(".npz"):
        raise UserError(f"--output={output}: hidden states of tokens are written to an .npz; or set pool=mean")
    chosen = layers or ("concat_last_four" if source.config.num_hidden_layers >= 4 else "last")
    check_layers(chosen, source.config, "layers")
    model = families.encoder_of(source.config, compute_for(source.dtype))
    params = jax.device_put(source.params["bert"])  # once, not per batch
    written = hidden_states.write_hidden_states(output, model, params, tokenizer_of(source), texts.__iter__, chosen)
    most_tokens = source.config.max_position_embeddings
    return Extracted("hidden", written.shape, written.texts, written.cut, most_tokens, "" if layers else chosen)


def _calibrated_ranges(calibration: str, embedder: TextEmbedder) -> np.ndarray:
    """Reads the ranges of a calibration. Raises `UserError` if their width is not the width of the embeddings."""
    ranges = read_ranges(calibration)
    embeddings, _ = embedder(["a"])
    if (width := embeddings.shape[1]) != ranges.shape[1]:
        raise UserError(
            f"--calibration={calibration}: has width {ranges.shape[1]}, expected {width}, the width of the embeddings; "
            f"name embeddings of this checkpoint"
        )
    return ranges
