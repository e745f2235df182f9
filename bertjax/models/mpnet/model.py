"""The modules of MPNet."""

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np

from bertjax.models.mpnet.config import MPNetConfig
from bertjax.models.roberta.model import RobertaModel
from bertjax.nn.attention import partitioned


class MPNetModel(RobertaModel):
    """RoBERTa with a bias of the attention scores that depends on the distance of two tokens.

    The classification head of transformers has RoBERTa's dropout before the pooler.
    """

    config: MPNetConfig

    def setup(self) -> None:
        """Builds the submodules and the table of the bias, `[buckets, heads]`."""
        super().setup()
        init = nn.initializers.truncated_normal(self.config.initializer_range)
        shape = self.config.relative_attention_num_buckets, self.config.num_attention_heads
        self.relative_attention_bias = self.param("relative_attention_bias", partitioned(init, (None, "heads")), shape)

    def score_bias(self, length: int) -> jax.Array:
        """Returns the bias of the attention scores, float32 `[heads, queries, keys]`.

        The bias is equal in all rows: the positions of a segment are consecutive, so that the distance of two positions
        is the distance of the two places in the row.
        """
        places = jnp.arange(length)
        buckets = distance_buckets(
            places - places[:, None],
            self.config.relative_attention_num_buckets,
            self.config.relative_attention_max_distance,
        )
        bias = jnp.moveaxis(jnp.take(self.relative_attention_bias, buckets, axis=0), -1, 0)
        return nn.with_logical_constraint(bias, ("heads", None, None))


def distance_buckets(distances: jax.Array, buckets: int, longest: int) -> jax.Array:
    """Returns the numbers of the buckets of distances, as in T5 (Raffel et al. 2020, section 2.1).

    The first half of the buckets is for keys before the query, and for the query itself. In either half, the first half
    has one distance per bucket, and the other buckets grow with the logarithm of the distance.

    Args:
      distances: integers, the position of the key minus the position of the query.
      buckets: the number of buckets.
      longest: this distance and all larger distances are in the last bucket.
    """
    half, exact = buckets // 2, buckets // 4
    apart = np.arange(longest + 1)
    # NumPy computes the logarithms, because the rounding of a device could move the first distance of a bucket.
    share = np.log(np.maximum(apart, exact) / exact) / np.log(longest / exact)
    of_apart = np.minimum(np.where(apart < exact, apart, exact + (share * (half - exact)).astype(int)), half - 1)
    return jnp.where(distances > 0, half, 0) + jnp.asarray(of_apart)[jnp.minimum(jnp.abs(distances), longest)]
