"""The choice between the embeddings that a checkpoint was trained for, and pooled hidden states."""

import contextlib

from bertjax.common.errors import UserError
from bertjax.config.limits import POOLS
from bertjax.inference.abilities import find_ability
from bertjax.inference.task import HasEmbeddings
from bertjax.inference.text_embedding import PooledStatesEmbedder, TextEmbedder
from bertjax.interop.pretrained import Pretrained
from bertjax.nn.layer_pooling import WITHOUT_WEIGHTS, check_layers


def find_embedding_task(source: Pretrained) -> HasEmbeddings | None:
    """Returns the task of a checkpoint that was trained to compute embeddings; else None."""
    with contextlib.suppress(UserError):  # An unregistered task is not an error: hidden states need no task.
        return find_ability(source, HasEmbeddings)
    return None


def embedder_of(
    source: Pretrained, prompt: str | None = None, width: int = 0, pool: str = "", layers: str = ""
) -> TextEmbedder:
    """Returns the embedder of a checkpoint.

    Args:
      source: the checkpoint.
      prompt: the prompt, which precedes each text: the name "query" or "document", the name of another prompt in a
        folder of sentence-transformers, or any other text, which is the prompt itself. None: the default prompt of the
        checkpoint.
      width: the number of leading dimensions to keep, one of the widths of the training; 0 for all.
      pool: "mean", "cls" or "last" pools the hidden states of any checkpoint; "" for the embeddings that the checkpoint
        was trained for.
      layers: the layers that `pool` reads, one of `layer_pooling.WITHOUT_WEIGHTS`; "" for the last layer.

    Raises:
      UserError: for an unknown value, for arguments that exclude each other, or if `pool` is "" and the checkpoint was
        not trained for embeddings.
    """
    check_settings(prompt, width, pool, layers)
    if pool:
        check_layers(layers or "last", source.config, "layers")
        return PooledStatesEmbedder(source, layers or "last", pool)
    if (task := find_embedding_task(source)) is None:
        raise UserError(
            f"{source.path}: was not trained for embeddings; choose a run of embed or a sentence-transformers folder, "
            f"or pool hidden states (--pool=mean, in Python pool='mean')"
        )
    if layers:
        raise UserError(f"layers = {layers!r}: is for hidden states; add pool=mean, or leave out layers")
    return task.embedder(source, prompt, width)


def check_settings(prompt: str | None, width: int, pool: str, layers: str) -> None:
    """Raises `UserError` for an unknown value, and for `prompt` or `width` together with `pool` or `layers`."""
    for name, value, choices in (("pool", pool, POOLS), ("layers", layers, WITHOUT_WEIGHTS)):
        if value and value not in choices:
            raise UserError(f"{name} = {value!r}: choose one of {', '.join(choices)}")
    if pool or layers:
        require_no_prompt(prompt, width)


def require_no_prompt(prompt: str | None, width: int) -> None:
    """Raises `UserError` if a prompt or a width is set, which hidden states do not have."""
    for name, value in (("prompt", prompt), ("width", width)):
        if value:
            raise UserError(
                f"{name} = {value!r}: is for embeddings, and this checkpoint has pooled hidden states; leave out {name}"
            )
