"""BERT (Devlin et al. 2019), and what a mask, other positions or other places of its norms make of it: GPT, GPT-2."""

import dataclasses
import functools

import numpy as np

from bertjax.config.model_config import BertConfig
from bertjax.models.families import FAMILIES
from bertjax.models.family import Family, shown_by_embeddings


def _model(config, compute):
    from bertjax.models.bert.model import BertModel

    return BertModel(config, compute)


def _layer_flops(config: BertConfig, length: int) -> int:
    hidden, inner = config.hidden_size, config.intermediate_size
    per_token = 4 * hidden * hidden + 2 * hidden * inner  # query, key, value, output; two feed-forward matrices
    attention = 2 * length * length * hidden  # scores and weighted values, all heads
    return 2 * config.num_hidden_layers * (length * per_token + attention)


def _shown(params: dict) -> dict | None:
    if "layers" not in params["bert"]["encoder"]:
        return None
    kernels = params["bert"]["encoder"]["layers"]
    layers, _, inner = kernels["intermediate"]["kernel"].shape
    heads = kernels["attention"]["query_key_value"]["kernel"].shape[-2]
    sizes = dict(num_hidden_layers=(layers,), intermediate_size=(inner,), num_attention_heads=(heads,))
    if "position" in kernels:
        table = kernels["position"]["embedding"]
        sizes |= dict(positions=("each_layer",), max_position_embeddings=table.shape[1:2])
    return shown_by_embeddings(params) | sizes


def _attention(config: BertConfig, params: dict, ids, segments, token_types):
    import jax
    import jax.numpy as jnp

    from bertjax.models.bert.model import BertModel
    from bertjax.nn.attention import standardize
    from bertjax.nn.ops.plain_attention import visible

    inputs = (ids, segments, token_types)
    states = BertModel(config).apply({"params": params}, *inputs, every_layer=True, method="encode")
    layers = params["encoder"]["layers"]
    x = states[:-1, 0]  # what each layer reads
    if config.positions == "each_layer":
        x = x + layers["position"]["embedding"][:, config.position_offset :][:, : ids.shape[1]]
    if config.norm == "pre":
        norm = layers["attention_norm"]
        x = standardize(x, config.layer_norm_eps) * norm["scale"][:, None] + norm["bias"][:, None]
    project = layers["attention"]["query_key_value"]
    product = functools.partial(jnp.einsum, precision="highest")
    projected = product("lnh,lhpad->lpand", x, project["kernel"]) + project["bias"][:, :, :, None]
    scores = product("laqd,lakd->laqk", projected[:, 0], projected[:, 1]) / np.sqrt(config.head_size)
    return jax.nn.softmax(jnp.where(visible(segments, config.causal)[0], scores, -jnp.inf), axis=-1)


def _projected(config: BertConfig, size: int):
    """An ELECTRA, which has its own activation and output layer, whichever this model has."""
    electra = FAMILIES.get("electra").config
    own = {each.name for each in dataclasses.fields(electra)} - {"family"}
    shared = {name: value for name, value in vars(config).items() if name in own}
    return electra(**shared | {"embedding_size": size})


def _new_cache(config: BertConfig, batch: int, longest: int, dtype):
    from bertjax.models.bert.model import new_cache

    return new_cache(config, batch, longest, dtype)


FAMILY = Family(
    model=_model,
    words=lambda config: "next" if config.causal else "masked",
    layer_flops=_layer_flops,
    shown=_shown,
    attention=_attention,
    new_cache=_new_cache,
    model_types=("bert", "gpt2"),
    huggingface="bertjax.models.bert.huggingface",
    projected=_projected,
    packs=True,
)
