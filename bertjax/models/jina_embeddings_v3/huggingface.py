"""Jina Embeddings v3 in Hugging Face's folders."""

import dataclasses
from collections.abc import Collection
from typing import ClassVar

from bertjax.models.jina_embeddings_v3.config import JinaEmbeddingsV3Config
from bertjax.models.rotary_bert import huggingface as rotary_bert


class JinaEmbeddingsV3Format(rotary_bert.RotaryBertFormat):
    """Folders of Jina Embeddings v3 that transformers writes."""

    classes: ClassVar = {"JinaEmbeddingsV3": "Jina Embeddings v3"}
    architectures: ClassVar = {
        **rotary_bert.classes_of("JinaEmbeddingsV3"),
        "JinaEmbeddingsV3ForQuestionAnswering": ("spans",),
    }
    optional_parts: ClassVar = {"JinaEmbeddingsV3Model": ("pooler",)}
    fields: ClassVar = dataclasses.replace(
        rotary_bert.FIELDS, config_class=JinaEmbeddingsV3Config, kind="jina_embeddings_v3"
    )
    model_name = "a Jina Embeddings v3"
    words = "roberta.embeddings.word_embeddings.weight"
    part_tensors: ClassVar = {
        "masked_lm": ("lm_head.bias",),
        "pooler": ("roberta.pooler.dense.weight", "classifier.dense.weight"),
        "classifier": ("classifier.out_proj.weight", "classifier.weight"),
        "spans": ("qa_outputs.weight",),
    }
    inner_layers = ("fc1",)
    inner_bias = True
    output_layer = "fc2"
    published: ClassVar = {
        r"\bencoder\.layers\.": ("layers.",),
        r"\bemb_ln\.": ("embeddings.LayerNorm.",),
        r"\bmixer\.Wqkv\.": ("self_attn.q_proj.", "self_attn.k_proj.", "self_attn.v_proj."),
        r"\bmixer\.out_proj\.": ("self_attn.o_proj.",),
        r"\bnorm1\.": ("post_attention_layernorm.",),
        r"\bnorm2\.": ("post_mlp_layernorm.",),
    }

    def pooled_names(self, parts: Collection[str]) -> tuple[str, str]:
        """Returns the names of the pooler and of the classifier; the pooler of a classifier of texts is its layer."""
        return (
            ("classifier.dense", "classifier.out_proj")
            if {"pooler", "classifier"} <= {*parts}
            else (super().pooled_names(parts))
        )


FORMAT = JinaEmbeddingsV3Format()
