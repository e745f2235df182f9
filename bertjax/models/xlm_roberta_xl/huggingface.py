"""XLM-RoBERTa-XL in Hugging Face's folders. Tensors have the names of RoBERTa, except LayerNorms."""

import dataclasses
from typing import Any, ClassVar

from bertjax.models.roberta import huggingface as roberta
from bertjax.models.xlm_roberta_xl.config import XlmRobertaXlConfig


class XlmRobertaXlFormat(roberta.RobertaFormat):
    """Folders of XLM-RoBERTa-XL and XLM-RoBERTa-XXL."""

    classes: ClassVar = {"XLMRobertaXL": "XLM-RoBERTa-XL"}
    fields: ClassVar = dataclasses.replace(roberta.FIELDS, config_class=XlmRobertaXlConfig, kind="xlm-roberta-xl")
    replacements: ClassVar = {
        ".attention.output.LayerNorm.": ".attention.self_attn_layer_norm.",
        ".output.LayerNorm.": ".LayerNorm.",
    } | roberta.RobertaFormat.replacements

    def class_prefix(self, config: Any) -> str:
        """Returns the beginning of the class names."""
        return "XLMRobertaXL"


FORMAT = XlmRobertaXlFormat()
