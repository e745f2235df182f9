"""BERT (Devlin et al. 2019), and with a causal mask GPT (post-norm) and GPT-2 (pre-norm)."""

import dataclasses
from collections.abc import Sequence
from typing import TYPE_CHECKING

from bertjax.config.model_config import BertConfig, Compute
from bertjax.models.families import FAMILIES
from bertjax.models.family import (
    Decodes,
    ExposesAttention,
    HuggingFaceFamily,
    LmType,
    ModelFamily,
    ProjectsEmbeddings,
    infer_embeddings_config,
)

if TYPE_CHECKING:
    from bertjax.nn.encoder_model import EncoderModel


class BertLayersFamily(Decodes, ExposesAttention, ModelFamily):
    """The base class of the families that have BERT's layers: BERT, RoBERTa, DistilBERT, ELECTRA, ALBERT."""

    supports_packing = True

    def lm_type(self, config: BertConfig) -> LmType:
        """Returns the task of language modelling, see `ModelFamily.lm_type`."""
        return "causal" if config.causal else "masked"

    def forward_flops(self, config: BertConfig, length: int) -> int:
        """Returns the FLOPs of the layers for one row, see `ModelFamily.forward_flops`."""
        hidden, inner = config.hidden_size, config.intermediate_size
        per_token = 4 * hidden * hidden + 2 * hidden * inner  # query, key, value, output; two feed-forward matrices
        attention = 2 * length * length * hidden  # scores and weighted values, all heads
        return 2 * config.num_hidden_layers * (length * per_token + attention)

    def infer_config(self, params: dict) -> dict[str, Sequence] | None:
        """Returns the config fields that params imply, see `ModelFamily.infer_config`."""
        if "layers" not in params["bert"]["encoder"]:
            return None
        kernels = params["bert"]["encoder"]["layers"]
        layers, _, inner = kernels["intermediate"]["kernel"].shape
        heads = kernels["attention"]["query_key_value"]["kernel"].shape[-2]
        fields: dict[str, Sequence] = {
            "num_hidden_layers": (layers,),
            "intermediate_size": (inner,),
            "num_attention_heads": (heads,),
        }
        if "position" in kernels:
            fields["positions"] = ("each_layer",)
            fields["max_position_embeddings"] = kernels["position"]["embedding"].shape[1:2]
        return infer_embeddings_config(params) | fields


class BertFamily(BertLayersFamily, ProjectsEmbeddings, HuggingFaceFamily):
    """BERT, GPT and GPT-2."""

    model_types = ("bert", "gpt2")

    def build(self, config: BertConfig, compute: Compute) -> "EncoderModel":
        """Returns the encoder, a `BertModel`."""
        from bertjax.models.bert.model import BertModel

        return BertModel(config, compute)

    def with_embedding_size(self, config: BertConfig, size: int) -> BertConfig:
        """Returns an ELECTRA config, because BERT has no projection of embeddings. ELECTRA has a fixed activation."""
        electra = FAMILIES.get("electra").config_class
        names = {field.name for field in dataclasses.fields(electra)} - {"family"}
        shared = {name: value for name, value in vars(config).items() if name in names}
        return electra(**shared | {"embedding_size": size})


FAMILY = BertFamily()
