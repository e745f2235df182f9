"""Transformer-XL compared with the equations of its paper in PyTorch, one query and one key at a time: states, memory,
logits, gradients.
"""

import dataclasses
import functools
import operator

import flax.linen as nn
import jax
import numpy as np
import pytest

from bertjax.models.heads import BertForMaskedLM
from bertjax.models.transformer_xl.config import TransformerXLConfig
from bertjax.models.transformer_xl.model import TransformerXLModel
from bertjax.nn.ops.recurrent_memory import RecurrentMemory

torch = pytest.importorskip("torch")
pytestmark = pytest.mark.extra_packages

TINY = TransformerXLConfig(
    vocab_size=50, hidden_size=12, num_hidden_layers=2, num_attention_heads=3, intermediate_size=20, memory_length=5,
    max_position_embeddings=64,
)  # fmt: skip


def layer_norm(x, params, epsilon):
    return torch.nn.functional.layer_norm(x, x.shape[-1:], params["scale"], params["bias"], epsilon)


def states_by_the_paper(params, config, ids, memory):
    """Computes the equations of section 3.3: the inputs of all layers, and the final states.

    `memory` has an array `[rows, memory, hidden]` for each layer.
    """
    hidden, size = config.hidden_size, config.head_size
    layers, tied = params["encoder"]["layers"], params["encoder"].get("biases")
    norm = functools.partial(layer_norm, epsilon=config.layer_norm_eps)
    frequencies = torch.tensor([1 / 10_000 ** (2 * k / hidden) for k in range(hidden // 2)])
    h = params["embeddings"]["word"]["embedding"][torch.tensor(ids)] * hidden**0.5
    read = []
    for number in range(config.num_hidden_layers):
        layer = jax.tree.map(operator.itemgetter(number), layers)
        biases, attention = layer.get("biases", tied), layer["attention"]
        read.append(h)
        extended = torch.cat([memory[number], h], dim=1)  # SG(m) o h
        q = torch.einsum("blh,hnd->blnd", h, attention["query"]["kernel"])
        k, v = torch.einsum("blh,hpnd->pblnd", extended, attention["key_value"]["kernel"])
        before, length = memory[number].shape[1], h.shape[1]
        rows = []
        for i in range(length):
            scores = []
            for j in range(before + i + 1):
                angles = (before + i - j) * frequencies
                r = torch.cat([torch.sin(angles), torch.cos(angles)])
                r = torch.einsum("h,hnd->nd", r, attention["position"]["kernel"])
                qi, kj = q[:, i], k[:, j]
                score = (qi * kj).sum(-1) + (qi * r).sum(-1) + (biases["content"] * kj).sum(-1)
                scores.append(score + (biases["position"] * r).sum(-1))
            weights = torch.softmax(torch.stack(scores, -1) / size**0.5, -1)
            rows.append(torch.einsum("bnk,bknd->bnd", weights, v[:, : before + i + 1]))
        a = torch.einsum("blnd,ndh->blh", torch.stack(rows, 1), attention["output"]["kernel"])

        o = norm(a + h, layer["attention_norm"])
        inner = torch.relu(o @ layer["intermediate"]["kernel"] + layer["intermediate"]["bias"])
        h = norm(inner @ layer["output"]["kernel"] + layer["output"]["bias"] + o, layer["output_norm"])
    return read, h


@pytest.mark.parametrize("untie_biases", [False, True])
def test_states_memory_logits_and_gradients_equal_the_equations_of_the_paper(untie_biases):
    config = dataclasses.replace(TINY, untie_biases=untie_biases)
    rng = np.random.default_rng(0)
    ids, target = rng.integers(0, 50, (2, 4)), rng.normal(size=(2, 4, 12)).astype(np.float32)
    memory_states, places = rng.normal(size=(2, 2, 5, 12)).astype(np.float32), np.tile(np.arange(4), (2, 1))
    inputs, whole = (ids, np.ones_like(ids), np.zeros_like(ids)), BertForMaskedLM(config)
    shapes = nn.meta.unbox(jax.eval_shape(whole.init, jax.random.key(0), *inputs, places)["params"])
    params = jax.tree.map(lambda x: rng.normal(0, 0.3, x.shape).astype(np.float32), shapes)

    def loss(params):
        hidden, memory = TransformerXLModel(config).apply(
            {"params": params["bert"]},
            *inputs,
            memory=RecurrentMemory(memory_states, np.array([5, 5])),
            method="encode",
        )
        logits = whole.apply({"params": params}, *inputs, places)[..., : config.vocab_size]
        return (hidden * target).sum() + logits[..., ::3].sum(), (hidden, memory, logits)

    (_, (hidden, memory, logits)), grads = jax.jit(jax.value_and_grad(loss, has_aux=True))(params)
    their_params = jax.tree.map(lambda x: torch.tensor(x, requires_grad=True), params)
    read, expected = states_by_the_paper(
        their_params["bert"], config, ids, torch.tensor(np.moveaxis(memory_states, 1, 0))
    )
    _, alone = states_by_the_paper(their_params["bert"], config, ids, torch.zeros(2, 2, 0, 12))
    token_logits = alone @ their_params["bert"]["embeddings"]["word"]["embedding"].T + their_params["masked_lm"]["bias"]
    token_logits = token_logits[..., : config.vocab_size]
    ((expected * torch.tensor(target)).sum() + token_logits[..., ::3].sum()).backward()

    np.testing.assert_allclose(hidden, expected.detach(), atol=1e-4)
    np.testing.assert_allclose(logits, token_logits.detach(), atol=1e-4)
    # one old token, four new tokens
    kept = np.concatenate([memory_states[:, :, 4:], np.stack([x.detach() for x in read], 1)], axis=2)
    np.testing.assert_allclose(memory.states, kept, atol=1e-4)
    for (path, gradient), x in zip(
        jax.tree_util.tree_leaves_with_path(grads), jax.tree.leaves(their_params), strict=True
    ):
        np.testing.assert_allclose(gradient, x.grad, atol=2e-3, rtol=1e-4, err_msg=str(path))
