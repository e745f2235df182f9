"""GTE in Hugging Face's folders."""

import dataclasses
from typing import ClassVar

from bertjax.models.gte.config import GteConfig
from bertjax.models.rotary_bert import huggingface as rotary_bert


class GteFormat(rotary_bert.RotaryBertFormat):
    """Folders of GTE that transformers writes."""

    classes: ClassVar = {"Gte": "GTE"}
    architectures: ClassVar = rotary_bert.classes_of("Gte")
    other_types: ClassVar = {"new": "alibaba-nlp-community/gte-multilingual-base"}
    fields: ClassVar = dataclasses.replace(rotary_bert.FIELDS, config_class=GteConfig, kind="gte")
    model_name = "a GTE"
    words = "gte.embeddings.word_embeddings.weight"
    part_tensors: ClassVar = {
        "masked_lm": ("lm_head.decoder.bias",),
        "pooler": ("gte.pooler.dense.weight",),
        "classifier": ("classifier.weight",),
    }
    published: ClassVar = {
        r"^new\.": ("gte.",),
        r"\bencoder\.layer\.": ("layers.",),
        r"\battention\.qkv_proj\.": ("self_attn.q_proj.", "self_attn.k_proj.", "self_attn.v_proj."),
        r"\battention\.o_proj\.": ("self_attn.o_proj.",),
        r"\bup_gate_proj\.": ("up_proj.", "gate_proj."),
        r"\battn_ln\.": ("post_attention_layernorm.",),
        r"\bmlp_ln\.": ("post_mlp_layernorm.",),
        r"\blm_head\.norm\.": ("lm_head.layer_norm.",),
    }


FORMAT = GteFormat()
