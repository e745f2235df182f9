"""A table of embeddings."""

from typing import Any

import flax.linen as nn
import jax.numpy as jnp
from jax import Array

from bertjax.config.model_config import ModelConfig
from bertjax.nn.dense import partitioned


class Embedding(nn.Module):
    """An embedding table `[rows, size]`.

    Attributes:
      config: the model config.
      dtype: the dtype of the result.
      rows: the number of rows.
      axis: the logical axis of the rows.
      size: the size of an embedding; None: the embedding size of the config.
      offset: the row of the id 0.
    """

    config: ModelConfig
    dtype: str
    rows: int
    axis: str | None = None
    size: int | None = None
    offset: int = 0

    def setup(self) -> None:
        """Builds the table."""
        init = partitioned(nn.initializers.truncated_normal(self.config.initializer_range), (self.axis, "embed"))
        self.embedding = self.param("embedding", init, (self.rows, self.size or self.config.embedding_size))

    def __call__(self, ids: Any) -> Array:
        """Integers `[...]` -> `[..., size]`."""
        # Replicated for the lookup, because the compiler partitions lookups badly, or not at all.
        table = nn.with_logical_constraint(self.embedding, (None, None))
        # float32: the gradient of a frequent token sums thousands of terms, which loses precision in bfloat16.
        rows = ids + self.offset if self.offset else ids
        return jnp.take(table.astype(jnp.float32), rows, axis=0).astype(self.dtype)
