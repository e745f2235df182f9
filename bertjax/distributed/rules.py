"""Maps the logical axes of the model to mesh axes."""

from jax.sharding import PartitionSpec

# Modules name logical axes, and only this table names mesh axes. A mesh axis partitions one axis of an array at most:
# "batch" takes fsdp in activations [batch, length, embed], so that "embed" is partitioned in params only.
RULES = (
    ("batch", ("data", "fsdp")),
    ("length", None),
    ("positions", None),  # rows of the table of positions
    ("embed", "fsdp"),
    ("heads", "tensor"),
    ("kv", None),
    ("mlp", "tensor"),
    ("vocab", "tensor"),
    ("layers", None),
    ("projections", None),  # query, key and value
)

STACKED = ("layers", "projections")  # the axes along which an array stacks several matrices

# The rules among devices with the same index along `data`. These devices share one part of the batch.
RULES_WITHIN_DATA = (("batch", "fsdp"), *RULES[1:])


def stacked_axes(axes: PartitionSpec) -> list[int]:
    """Returns the axes along which a param stacks several matrices."""
    return [number for number, name in enumerate(axes) if name in STACKED]
