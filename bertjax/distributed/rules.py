"""Maps the logical axes of the model to mesh axes."""

from jax.sharding import PartitionSpec

# Modules name logical axes; only this table knows the mesh. A mesh axis is used once per array: activations are
# [batch, length, embed], where "batch" takes fsdp, so "embed" is not partitioned there, although it is in params.
RULES = (
    ("batch", ("data", "fsdp")),
    ("length", None),
    ("positions", None),  # rows of their table
    ("embed", "fsdp"),
    ("heads", "tensor"),
    ("kv", None),
    ("mlp", "tensor"),
    ("vocab", "tensor"),
    ("layers", None),
    ("projections", None),  # query, key and value
)

STACKED = ("layers", "projections")  # the axes along which an array has several matrices

# The rules among devices with the same index along `data`, which share one part of the batch.
RULES_WITHIN_DATA = (("batch", "fsdp"), *RULES[1:])


def stacked(axes: PartitionSpec) -> list[int]:
    """Returns the axes along which a param stacks several matrices."""
    return [number for number, name in enumerate(axes) if name in STACKED]
