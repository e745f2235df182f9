"""XLM-RoBERTa-XL and -XXL (Goyal et al. 2021): RoBERTa with a LayerNorm before each part, and after the last layer.

There is no LayerNorm after the embeddings.
"""

from bertjax.models.roberta.family import RobertaFamily
from bertjax.models.xlm_roberta_xl.config import XlmRobertaXlConfig


class XlmRobertaXlFamily(RobertaFamily):
    """XLM-RoBERTa-XL and XLM-RoBERTa-XXL."""

    config_class = XlmRobertaXlConfig
    model_types = ("xlm-roberta-xl",)


FAMILY = XlmRobertaXlFamily()
