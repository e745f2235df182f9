"""A forward and a backward stack of LSTMs, neither of which sees the other's states (ELMo; Peters et al. 2018)."""

from bertjax.config.limits import require
from bertjax.config.model_config import BertConfig
from bertjax.models.family import Family, shown_by_embeddings


def _model(config, compute):
    from bertjax.models.elmo.model import LstmsModel

    return LstmsModel(config, compute)


def _layer_flops(config: BertConfig, length: int) -> int:
    hidden, half = config.hidden_size, config.hidden_size // 2
    inputs = hidden + (config.num_hidden_layers - 1) * half  # input sizes of all layers in one direction, added up
    gates = length * 2 * 4 * half * (inputs + config.num_hidden_layers * half)  # two directions, four gates
    return 2 * gates


def _shown(params: dict) -> dict | None:
    if "layers" in params["bert"]["encoder"]:
        return None
    layers = sum(name.startswith("forward_") for name in params["bert"]["encoder"])
    return shown_by_embeddings(params) | dict(num_hidden_layers=(layers,))


def _validate(config) -> None:
    require(not config.model.causal, "model.causal", True, "model.family = 'lstms' has both directions; set False")
    size = config.model.hidden_size
    require(size % 2 == 0, "model.hidden_size", size, "must be even: half of it is for each direction")


FAMILY = Family(
    model=_model,
    words=lambda config: "neighbours",
    layer_flops=_layer_flops,
    shown=_shown,
    validate=_validate,
    has_kernels=False,
)
