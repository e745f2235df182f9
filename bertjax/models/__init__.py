"""Model families: one folder each, with its config, its modules, and conversion to and from Hugging Face's folders."""

from bertjax.models.families import FAMILIES, config_of, model_fields, register
from bertjax.models.family import Family, layers_by_name, projection_flops, shown_by_embeddings

__all__ = [
    "FAMILIES",
    "Family",
    "config_of",
    "layers_by_name",
    "model_fields",
    "projection_flops",
    "register",
    "shown_by_embeddings",
]
