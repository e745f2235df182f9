"""ModernBERT (Warner et al. 2024): rotary positions, norms before each part, gated feed-forward layers, hardly any
biases, and attention within a window in two of three layers."""

import numpy as np

from bertjax.config.limits import require
from bertjax.models.family import Family, layers_by_name, projection_flops
from bertjax.models.modernbert.config import ModernBertConfig, ProjectedModernBertConfig


def _projected(config: ModernBertConfig, size: int) -> ModernBertConfig:
    own = vars(config) | {"embedding_size": size}
    return config if size == config.embedding_size else ProjectedModernBertConfig(**own)


def _model(config, compute):
    from bertjax.models.modernbert.model import ModernBertModel

    return ModernBertModel(config, compute)


def _layer_flops(config: ModernBertConfig, length: int) -> int:
    hidden, inner = config.hidden_size, config.intermediate_size
    per_token = 4 * hidden * hidden + (3 if config.glu else 2) * hidden * inner
    seen = [
        length if config.is_global(layer) else min(length, 2 * config.window + 1)
        for layer in range(config.num_hidden_layers)
    ]
    layers = 2 * sum(length * per_token + 2 * length * keys * hidden for keys in seen)  # scores and weighted values
    return projection_flops(config, length) + layers


def _shown(params: dict) -> dict | None:
    encoder = params["bert"]["encoder"]
    if "first" not in encoder:
        return None
    kernels = encoder["first"]
    groups = encoder.get("groups", {})
    each = [layer["attention"]["output"]["kernel"].shape[0] for layer in groups.values()]
    rest = encoder.get("rest", {})
    wide = kernels["input"]["kernel"].shape
    rows, hidden = params["bert"]["embeddings"]["word"]["embedding"].shape
    return {
        "vocab_size": range(rows, rows - 128, -1),
        "hidden_size": (hidden,),
        "num_hidden_layers": (1 + sum(each) + len(rest),),
        "num_attention_heads": (kernels["attention"]["query_key_value"]["kernel"].shape[-2],),
        "intermediate_size": (wide[-1],),
        "glu": (len(wide) == 3,),
        "bias": ("bias" in kernels["input"],),
    }


def _layer_numbers(config: ModernBertConfig, path: tuple[str, ...]) -> np.ndarray | None:
    if path[0] != "encoder":
        return layers_by_name(config, path)
    period = config.global_attn_every_n_layers
    count = (config.num_hidden_layers - 1) // period
    if path[1] == "first":
        return np.array(1)
    if path[1] in ("groups", "rest"):
        in_group = 2 + int(path[2].removeprefix("layer_"))
        return in_group + (period * np.arange(count) if path[1] == "groups" else np.array(period * count))
    return None


def _start(params: dict) -> dict:
    """A classifier starts from the words' head, as in transformers, where both have one name."""
    if "masked_lm" not in params or "pooler" in params["bert"]:
        return params
    head = {name: params["masked_lm"][name] for name in ("dense", "norm")}
    return params | {"bert": params["bert"] | {"pooler": head}}


def _attention(config: ModernBertConfig, params: dict, ids, segments, token_types):
    from bertjax.models.modernbert.model import attention_probabilities

    del token_types
    return attention_probabilities(config, params, ids, segments)


def _validate(config) -> None:
    model = config.model
    require(model.local_attention % 2 == 0, "model.local_attention", model.local_attention, "must be even")
    head = model.hidden_size // model.num_attention_heads
    remedy = f"makes heads of {head}, which rotary positions cannot halve: choose a size with even ones"
    require(head % 2 == 0, "model.hidden_size", model.hidden_size, remedy)


FAMILY = Family(
    model=_model,
    words=lambda config: "masked",
    layer_flops=_layer_flops,
    shown=_shown,
    validate=_validate,
    attention=_attention,
    model_types=("modernbert",),
    huggingface="bertjax.models.modernbert.huggingface",
    layer_numbers=_layer_numbers,
    start=_start,
    projected=_projected,
    packs=True,
    config=ModernBertConfig,
)
