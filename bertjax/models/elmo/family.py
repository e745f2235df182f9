"""ELMo (Peters et al. 2018): a forward and a backward stack of LSTMs. No stack reads hidden states of the other."""

from collections.abc import Sequence
from typing import TYPE_CHECKING

import ml_collections

from bertjax.config.limits import require
from bertjax.config.model_config import BertConfig, Compute
from bertjax.models.family import LmType, ModelFamily, infer_embeddings_config

if TYPE_CHECKING:
    from bertjax.nn.encoder_model import EncoderModel


class ElmoFamily(ModelFamily):
    """ELMo. The name of the family in configs is lstms."""

    has_kernels = False

    def build(self, config: BertConfig, compute: Compute) -> "EncoderModel":
        """Returns the encoder, a `ElmoModel`."""
        from bertjax.models.elmo.model import ElmoModel

        return ElmoModel(config, compute)

    def lm_type(self, config: BertConfig) -> LmType:
        """Returns the task of language modelling, see `ModelFamily.lm_type`."""
        return "bidirectional"

    def forward_flops(self, config: BertConfig, length: int) -> int:
        """Returns the FLOPs of the layers for one row, see `ModelFamily.forward_flops`."""
        hidden, half = config.hidden_size, config.hidden_size // 2
        inputs = hidden + (config.num_hidden_layers - 1) * half  # the sum of the input sizes of one direction
        gates = length * 2 * 4 * half * (inputs + config.num_hidden_layers * half)  # two directions, four gates
        return 2 * gates

    def infer_config(self, params: dict) -> dict[str, Sequence] | None:
        """Returns the config fields that params imply, see `ModelFamily.infer_config`."""
        if "layers" in params["bert"]["encoder"]:
            return None
        layers = sum(name.startswith("forward_") for name in params["bert"]["encoder"])
        return infer_embeddings_config(params) | {"num_hidden_layers": (layers,)}

    def validate(self, config: ml_collections.ConfigDict) -> None:
        """Checks that the model is not causal, and that the hidden size is even."""
        remedy = "must be False for model.family = 'lstms', which has a forward and a backward stack"
        require(not config.model.causal, "model.causal", True, remedy)
        size = config.model.hidden_size
        require(size % 2 == 0, "model.hidden_size", size, "must be even: each direction has half of the units")


FAMILY = ElmoFamily()
