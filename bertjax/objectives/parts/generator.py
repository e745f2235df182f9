"""The generator of ELECTRA: a masked language model that can share the embeddings of the encoder."""

from collections.abc import Mapping

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np

from bertjax.config.model_config import BertConfig, Compute
from bertjax.models.heads import BertForMaskedLM
from bertjax.nn.ops.dropout import fold_in
from bertjax.objectives.encoded_batch import EncodedBatch
from bertjax.objectives.parts.words import token_loss

# Derives the dropout keys of the generator from the keys of the rows. Lower numbers derive the keys of the encoder and
# of the objectives.
DROPOUT_KEY = 1 << 17


class GeneratorModel(nn.Module):
    """The parameters of a `BertForMaskedLM`, without the parameters that it shares with the encoder.

    Attributes:
      config: the config of the generator.
      compute: how to compute.
      embeddings: "shared": the generator reads the embeddings of the encoder, and stores only a projection to the
        generator's hidden size. "apart": the generator has separate embeddings. "disentangled": as "shared", but the
        encoder reads stop_gradient(embeddings) + `difference`; `difference` starts at 0 (He et al. 2021, section 3.3).
    """

    config: BertConfig
    compute: Compute
    embeddings: str

    @nn.compact
    def __call__(self) -> Mapping:
        """Returns the parameters."""
        if self.is_initializing():
            ids = jnp.zeros((1, 8), jnp.int32)
            model = BertForMaskedLM(self.config, self.compute, parent=None)
            params = model.init(self.make_rng("params"), ids, ids, ids, ids)["params"]
            if self.embeddings != "apart":
                tables, projection = _split(params["bert"]["embeddings"])
                params["bert"] = {name: part for name, part in params["bert"].items() if name != "embeddings"}
                params["bert"] |= {"embeddings": projection} if projection else {}
                if self.embeddings == "disentangled":
                    params["difference"] = jax.tree.map(jnp.zeros_like, tables)
            for name, part in params.items():
                self.param(name, lambda key, part=part: part)
        return self.variables["params"]


def _split(embeddings: dict) -> tuple[dict, dict]:
    """Returns the tables that models can share, and the projection to the size of the hidden states."""
    projection = {name: part for name, part in embeddings.items() if name == "projection"}
    return {name: part for name, part in embeddings.items() if name not in projection}, projection


def separate_params(encoder: Mapping, generator: Mapping) -> tuple[Mapping, dict]:
    """Returns the parameters of an encoder and of a complete `BertForMaskedLM` that share no parameters.

    Args:
      encoder: the parameters of the encoder.
      generator: the parameters of a `GeneratorModel`.
    """
    tables, _ = _split(encoder["embeddings"])
    projection = generator["bert"].get("embeddings", {})
    complete = {name: part for name, part in generator.items() if name != "difference"}
    complete["bert"] = generator["bert"] | {"embeddings": tables | projection}
    if "difference" in generator:
        sums = jax.tree.map(lambda x, delta: jax.lax.stop_gradient(x) + delta, tables, generator["difference"])
        encoder = {**encoder, "embeddings": encoder["embeddings"] | sums}
    return encoder, complete


def share_params(encoder: dict, generator: dict, embeddings: str) -> tuple[dict, dict]:
    """Returns the parameters of an encoder and of a `GeneratorModel`. This is the inverse of `separate_params`.

    Args:
      encoder: the parameters of the encoder.
      generator: the parameters of a complete `BertForMaskedLM`.
      embeddings: the attribute of the `GeneratorModel`.

    Raises:
      ValueError: if the embeddings cannot be shared. The message continues the sentence "the generator has ...".
    """
    if embeddings == "apart":
        return encoder, generator
    tables, _ = _split(encoder["embeddings"])
    generator_tables, projection = _split(generator["bert"]["embeddings"])
    if jax.tree.map(jnp.shape, tables) != jax.tree.map(jnp.shape, generator_tables):
        raise ValueError("embeddings of other shapes than the encoder; set apart")
    rest = {name: part for name, part in generator["bert"].items() if name != "embeddings"}
    generator = generator | {"bert": rest | ({"embeddings": projection} if projection else {})}
    if embeddings == "disentangled":
        difference = jax.tree.map(lambda x, y: x - y, tables, generator_tables)
        return encoder | {"embeddings": encoder["embeddings"] | generator_tables}, generator | {
            "difference": difference
        }
    if not all(jax.tree.leaves(jax.tree.map(np.array_equal, tables, generator_tables))):
        raise ValueError("embeddings of other values than the encoder; set disentangled or apart")
    return encoder, generator


def rewrite(encoded: EncodedBatch, weights: jax.Array, keys: jax.Array) -> EncodedBatch:
    """Predicts the masked tokens with the generator, and replaces the masked tokens by samples of the predictions.

    `joint_loss` of the result is the loss of the generator. The samples have no gradient. See `JointModel.rewrite`.
    """
    head, batch = encoded.heads["generator"], encoded.batch
    params = head()
    if head.is_initializing():
        batch = batch | {"original_ids": batch["input_ids"]}
        return encoded._replace(batch=batch, joint_loss=(jnp.float32(0), {}))
    module, variables = encoded.encoder.unbind()
    encoder_params, complete = separate_params(variables["params"], params)
    model = BertForMaskedLM(head.config, head.compute, parent=None).bind({"params": complete})
    hidden = model.bert.encode(
        batch["input_ids"],
        batch["segments"],
        batch["token_types"],
        batch.get("positions"),
        dropout_keys=fold_in(encoded.dropout_keys, DROPOUT_KEY),
    )
    masked = encoded._replace(encoder=model.bert, heads={"masked_lm": model.masked_lm}, hidden=hidden)
    loss, words = token_loss(masked, weights, keys)
    assert words is not None
    batch = batch | {"input_ids": _with_words(batch, words), "original_ids": _with_words(batch, batch["word_ids"])}
    return encoded._replace(batch=batch, encoder=module.bind({"params": encoder_params}), joint_loss=loss)


def _with_words(batch: dict, words: jax.Array) -> jax.Array:
    """Returns the token ids `[rows, length]` with `words` `[rows, predictions]` at the predicted positions."""
    ids = batch["input_ids"]
    # The columns of padding are out of bounds, so that `mode="drop"` ignores them.
    columns = jnp.where(batch["word_weights"] > 0, batch["word_positions"], ids.shape[1])
    return jax.vmap(lambda row, indices, values: row.at[indices].set(values, mode="drop"))(ids, columns, words)
