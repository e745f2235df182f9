"""Which mesh axis each logical axis of the model lies on."""

# Modules name logical axes; only this table knows the mesh. An axis that another dimension of the same array already
# took is not used twice: activations are [batch, length, embed], so "embed" stays whole there although params split it.
RULES = (
    ("batch", ("data", "fsdp")),
    ("length", None),
    ("embed", "fsdp"),
    ("heads", "tensor"),
    ("kv", None),
    ("mlp", "tensor"),
    ("vocab", "tensor"),
    ("layers", None),
)

# The same among the devices of one index along `data`, where the batch already is that index's.
RULES_WITHIN_DATA = (("batch", "fsdp"), *RULES[1:])
