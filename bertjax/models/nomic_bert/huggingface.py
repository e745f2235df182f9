"""NomicBERT in Hugging Face's folders."""

import dataclasses
from collections.abc import Mapping
from typing import Any, ClassVar

from etils import epath

from bertjax.common.errors import UserError
from bertjax.models.nomic_bert.config import NomicBertConfig
from bertjax.models.rotary_bert import huggingface as rotary_bert


class NomicBertFormat(rotary_bert.RotaryBertFormat):
    """Folders of NomicBERT that transformers writes."""

    classes: ClassVar = {"NomicBert": "NomicBERT"}
    architectures: ClassVar = rotary_bert.classes_of("NomicBert")
    inputs = ("input_ids", "token_type_ids", "attention_mask")
    special_ids: ClassVar = {"pad_token_id": "pad"}
    fields: ClassVar = dataclasses.replace(rotary_bert.FIELDS, config_class=NomicBertConfig, kind="nomic_bert")
    model_name = "a NomicBERT"
    words = "nomic_bert.embeddings.word_embeddings.weight"
    decoder = "cls.predictions.decoder.weight"
    transform = "cls.predictions.transform."
    part_tensors: ClassVar = {
        "masked_lm": ("cls.predictions.bias",),
        "pooler": ("nomic_bert.pooler.dense.weight",),
        "classifier": ("classifier.weight",),
    }
    biases = (False, False)
    published: ClassVar = {
        r"\bencoder\.layers\.": ("layers.",),
        r"\bemb_ln\.": ("embeddings.LayerNorm.",),
        r"\battn\.Wqkv\.": ("self_attn.q_proj.", "self_attn.k_proj.", "self_attn.v_proj."),
        r"\battn\.out_proj\.": ("self_attn.o_proj.",),
        r"\bfc11\.": ("up_proj.",),
        r"\bfc12\.": ("gate_proj.",),
        r"\bfc2\.": ("down_proj.",),
        r"\bnorm1\.": ("post_attention_layernorm.",),
        r"\bnorm2\.": ("post_mlp_layernorm.",),
    }

    def read_config(self, path: epath.Path, fields: Mapping[str, Any]) -> NomicBertConfig:
        """Returns the model config of a config.json, see `HuggingFaceFormat.read_config`."""
        if "n_embd" in fields and "hidden_size" not in fields:  # transformers ignores these fields
            raise UserError(
                f"{path}: n_embd {fields['n_embd']!r} is not supported, because it is a field of published code; "
                f"supported: hidden_size; load the model with transformers, and call save_pretrained(FOLDER)"
            )
        return super().read_config(path, fields)  # type: ignore[return-value]


FORMAT = NomicBertFormat()
