"""The generator of replaced words: a model of masked words beside the encoder, whose embeddings it can share."""

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np

from bertjax.config.model_config import BertConfig, Compute
from bertjax.models.heads import BertForMaskedLM
from bertjax.nn.ops.dropout import fold_in
from bertjax.objectives.encoded_batch import EncodedBatch
from bertjax.objectives.parts.words import loss_of_words

DROPOUT_KEY = 1 << 17  # derives the keys of its dropout from a row's; lower numbers are the encoder's, and objectives'


class Generator(nn.Module):
    """The params of a `BertForMaskedLM`, without what it shares with the encoder.

    Args:
      config: its own.
      embeddings: shared: all of the encoder's embeddings but their projection are its own as well; apart: it has some
        of its own; disentangled: as shared, but the encoder's are these, without a gradient, plus a `difference`, which
        begins with 0 (He et al. 2021, section 3.3).
    """

    config: BertConfig
    compute: Compute
    embeddings: str

    @nn.compact
    def __call__(self):
        """Returns its params."""
        if self.is_initializing():
            ids = jnp.zeros((1, 8), jnp.int32)
            model = BertForMaskedLM(self.config, self.compute, parent=None)
            params = model.init(self.make_rng("params"), ids, ids, ids, ids)["params"]
            if self.embeddings != "apart":
                tables, own = _split(params["bert"]["embeddings"])
                params["bert"] = {name: part for name, part in params["bert"].items() if name != "embeddings"}
                params["bert"] |= {"embeddings": own} if own else {}
                if self.embeddings == "disentangled":
                    params["difference"] = jax.tree.map(jnp.zeros_like, tables)
            for name, part in params.items():
                self.param(name, lambda key, part=part: part)
        return self.variables["params"]


def _split(embeddings: dict) -> tuple[dict, dict]:
    """Returns what can be shared of a model's embeddings, and what brings it to the size of its hidden states."""
    own = {name: part for name, part in embeddings.items() if name == "projection"}
    return {name: part for name, part in embeddings.items() if name not in own}, own


def joined(encoder: dict, generator: dict) -> tuple[dict, dict]:
    """Returns the params of an encoder, and of a whole `BertForMaskedLM`, from the encoder's and a `Generator`'s."""
    shared, _ = _split(encoder["embeddings"])
    own = generator["bert"].get("embeddings", {})
    whole = {name: part for name, part in generator.items() if name != "difference"}
    whole["bert"] = generator["bert"] | {"embeddings": shared | own}
    if "difference" in generator:
        moved = jax.tree.map(lambda x, own: jax.lax.stop_gradient(x) + own, shared, generator["difference"])
        encoder = encoder | {"embeddings": encoder["embeddings"] | moved}
    return encoder, whole


def parted(encoder: dict, generator: dict, embeddings: str) -> tuple[dict, dict]:
    """The inverse of `joined`, for a `Generator` with these `embeddings`.

    Raises `ValueError`, which says what those of the generator are, if they are not those that it would have.
    """
    if embeddings == "apart":
        return encoder, generator
    (tables, _), (theirs, own) = _split(encoder["embeddings"]), _split(generator["bert"]["embeddings"])
    if jax.tree.map(jnp.shape, tables) != jax.tree.map(jnp.shape, theirs):
        raise ValueError("embeddings of other sizes than the model; set apart")
    part = {name: each for name, each in generator["bert"].items() if name != "embeddings"}
    generator = generator | {"bert": part | ({"embeddings": own} if own else {})}
    if embeddings == "disentangled":
        difference = jax.tree.map(lambda x, own: x - own, tables, theirs)
        return encoder | {"embeddings": encoder["embeddings"] | theirs}, generator | {"difference": difference}
    if not all(jax.tree.leaves(jax.tree.map(np.array_equal, tables, theirs))):
        raise ValueError("other embeddings than the model; set disentangled, or apart")
    return encoder, generator


def rewrite(encoded: EncodedBatch, weights, keys) -> tuple[EncodedBatch, tuple]:
    """Has the generator predict the masked words, and puts words that are drawn from its predictions in their place.

    See `Objective.rewrite`. The loss is that of the generator; nothing of the encoder's reaches it through the words.
    """
    head, batch = encoded.heads["generator"], encoded.batch
    params = head()
    if head.is_initializing():
        return encoded._replace(batch=batch | {"original_ids": batch["input_ids"]}), (jnp.float32(0), {})
    module, variables = encoded.encoder.unbind()
    of_encoder, whole = joined(variables["params"], params)
    model = BertForMaskedLM(head.config, head.compute, parent=None).bind({"params": whole})
    hidden = model.bert.encode(
        batch["input_ids"],
        batch["segments"],
        batch["token_types"],
        batch.get("positions"),
        dropout_keys=fold_in(encoded.dropout_keys, DROPOUT_KEY),
    )
    read = encoded._replace(encoder=model.bert, heads={"masked_lm": model.masked_lm}, hidden=hidden)
    found, words = loss_of_words(read, weights, keys)
    batch = batch | {"input_ids": _with_words(batch, words), "original_ids": _with_words(batch, batch["word_ids"])}
    return encoded._replace(batch=batch, encoder=module.bind({"params": of_encoder})), found


def _with_words(batch: dict, words: jax.Array) -> jax.Array:
    """Returns the ids of a batch with words `[rows, predictions]` where some are predicted."""
    ids = batch["input_ids"]
    places = jnp.where(batch["word_weights"] > 0, batch["word_positions"], ids.shape[1])  # outside: are dropped
    return jax.vmap(lambda row, where, each: row.at[where].set(each, mode="drop"))(ids, places, words)
