"""BERT (Devlin et al. 2019), and with a causal mask GPT (post-norm) and GPT-2 (pre-norm)."""

import dataclasses
from collections.abc import Sequence
from typing import TYPE_CHECKING

from bertjax.config.model_config import BertConfig
from bertjax.models.families import FAMILIES
from bertjax.models.family import Decodes, HuggingFaceFamily, LmType, ProjectsEmbeddings
from bertjax.models.transformer_family import TransformerFamily, embedding_fields

if TYPE_CHECKING:
    from bertjax.nn.architecture import Architecture


class EncoderLayersFamily(TransformerFamily):
    """The base class of the families that have the layers of BERT."""

    def architecture(self, config: BertConfig) -> "Architecture":
        """Returns the choices of BERT, see `TransformerFamily.architecture`.

        A causal model pools the last token of a text, which attends to the whole text.
        """
        from bertjax.nn import architecture as choose
        from bertjax.nn.embeddings import embeddings_of
        from bertjax.nn.heads import word_head_of

        attention = choose.Attention(
            config.num_attention_heads,
            config.head_size,
            dropout=config.attention_probs_dropout_prob,
            causal=config.causal,
            implementation=config.attention,
        )
        positions = choose.LearnedPositions(config.max_position_embeddings, config.position_offset)
        norm, rate = choose.LayerNorm(config.layer_norm_eps), config.hidden_dropout_prob
        residual = {"post": choose.PostNorm(), "pre": choose.PreNorm()}[config.norm]
        layer = choose.Layer(
            attention,
            choose.FeedForward(config.intermediate_size, config.hidden_act, input_name="intermediate"),
            norm,
            residual,
            rate if config.attention_output_dropout else 0.0,
            rate,
            positions if config.positions == "each_layer" else None,
        )
        final_norm = None if residual.ends_with_norm else norm
        return choose.Architecture(
            embeddings_of(config),
            choose.Layers(config.num_hidden_layers, (layer,), norm=final_norm),
            pooling=choose.Pooling(mode=choose.PoolingMode.LAST if config.causal else choose.PoolingMode.FIRST),
            word_head=word_head_of(config),
        )

    def infer_config(self, params: dict) -> dict[str, Sequence] | None:
        """Returns the config fields that params imply, see `ModelFamily.infer_config`."""
        fields = super().infer_config(params)
        if fields is None:
            return None
        names = {field.name for field in dataclasses.fields(self.config_class)}
        embeddings, position = params["bert"]["embeddings"], params["bert"]["encoder"]["layers"].get("position")
        fields |= embedding_fields(params)
        fields["positions"] = ("learned",) if "position" in embeddings else ("sinusoidal", "none")
        fields["norm"] = ("post",) if "norm" in embeddings else ("pre",)
        if position is not None:
            fields["positions"], fields["max_position_embeddings"] = ("each_layer",), position["embedding"].shape[1:2]
        if "masked_lm" in params:
            fields["output"] = ("transform" if "dense" in params["masked_lm"] else "plain",)
        if "position_offset" in names and "max_position_embeddings" in fields:
            (rows,) = fields["max_position_embeddings"]
            fields["max_position_embeddings"] = range(rows, 0, -1)  # the params do not determine the offset
        return {name: values for name, values in fields.items() if name in names}


class BertLayersFamily(Decodes, EncoderLayersFamily):
    """The base class of the families that can be causal: BERT, RoBERTa, DistilBERT, ELECTRA."""

    def lm_type(self, config: BertConfig) -> LmType:
        """Returns the task of language modelling, see `ModelFamily.lm_type`."""
        return "causal" if config.causal else "masked"


class BertFamily(BertLayersFamily, ProjectsEmbeddings, HuggingFaceFamily):
    """BERT, GPT and GPT-2."""

    model_types = ("bert", "gpt2")

    def with_embedding_size(self, config: BertConfig, size: int) -> BertConfig:
        """Returns an ELECTRA config, because BERT has no projection of embeddings. ELECTRA has a fixed activation."""
        electra = FAMILIES.get("electra").config_class
        names = {field.name for field in dataclasses.fields(electra)} - {"family"}
        shared = {name: value for name, value in vars(config).items() if name in names}
        return electra(**shared | {"embedding_size": size})


FAMILY = BertFamily()
