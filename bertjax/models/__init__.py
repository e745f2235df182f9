"""Model families. The folder of a family contains its config, modules and Hugging Face format."""

from bertjax.models.families import FAMILIES, config_of, family_of, model_fields, register
from bertjax.models.family import (
    Decodes,
    ExposesAttention,
    HuggingFaceFamily,
    ImportsParams,
    LmType,
    ModelFamily,
    NamesSpecialTokens,
    ProjectsEmbeddings,
    Recurrent,
    TwoStreamAttention,
    infer_embeddings_config,
    projection_flops,
)
from bertjax.models.transformer_family import TransformerFamily

__all__ = [
    "FAMILIES",
    "Decodes",
    "ExposesAttention",
    "HuggingFaceFamily",
    "ImportsParams",
    "LmType",
    "ModelFamily",
    "NamesSpecialTokens",
    "ProjectsEmbeddings",
    "Recurrent",
    "TransformerFamily",
    "TwoStreamAttention",
    "config_of",
    "family_of",
    "infer_embeddings_config",
    "model_fields",
    "projection_flops",
    "register",
]
