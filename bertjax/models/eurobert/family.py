"""EuroBERT (Boizard et al. 2025): Llama's layers, but all tokens attend to each other: RMSNorm before each part, rotary
positions, heads that share keys and values, gated feed-forward layers, no biases."""

from bertjax.config.limits import require
from bertjax.models.eurobert.config import EuroBertConfig
from bertjax.models.family import Family


def _model(config, compute):
    from bertjax.models.eurobert.model import EuroBertModel

    return EuroBertModel(config, compute)


def _layer_flops(config: EuroBertConfig, length: int) -> int:
    hidden, queries = config.hidden_size, config.num_attention_heads * config.head_dim
    shared = config.num_key_value_heads * config.head_dim
    # Query and output; key and value; three feed-forward matrices.
    per_token = 2 * hidden * queries + 2 * hidden * shared + 3 * hidden * config.intermediate_size
    attention = 2 * length * length * queries  # scores and weighted values, all heads
    return 2 * config.num_hidden_layers * (length * per_token + attention)


def _shown(params: dict) -> dict | None:
    kernels = params["bert"]["encoder"].get("layers", {})
    if "key_value" not in kernels.get("attention", {}):
        return None
    layers, hidden, heads, width = kernels["attention"]["query"]["kernel"].shape
    rows = len(params["bert"]["embeddings"]["word"]["embedding"])
    found = {
        "vocab_size": range(rows, rows - 128, -1),
        "hidden_size": (hidden,),
        "num_hidden_layers": (layers,),
        "num_attention_heads": (heads,),
        "num_key_value_heads": (kernels["attention"]["key_value"]["kernel"].shape[-2],),
        "head_dim": (width,),
        "intermediate_size": (kernels["input"]["kernel"].shape[-1],),
    }
    return found | ({"tie_word_embeddings": (False,)} if "masked_lm" in params else {})


def _attention(config: EuroBertConfig, params: dict, ids, segments, token_types):
    from bertjax.models.eurobert.model import attention_probabilities

    del token_types
    return attention_probabilities(config, params, ids, segments)


def _validate(config) -> None:
    heads, shared, width = (config.model[name] for name in ("num_attention_heads", "num_key_value_heads", "head_dim"))
    remedy = f"must divide model.num_attention_heads = {heads}"
    require(heads % shared == 0, "model.num_key_value_heads", shared, remedy)
    require(width % 2 == 0, "model.head_dim", width, "must be even: rotary positions halve it")


FAMILY = Family(
    model=_model,
    words=lambda config: "masked",
    layer_flops=_layer_flops,
    shown=_shown,
    validate=_validate,
    attention=_attention,
    model_types=("eurobert",),
    huggingface="bertjax.models.eurobert.huggingface",
    packs=True,
    config=EuroBertConfig,
)
