"""Replaced token detection compared with transformers' ElectraForPreTraining and ElectraForMaskedLM, converted from a
run.
"""

import flax.linen as nn
import jax
import numpy as np
import pytest

from bertjax.config.defaults import named_stages, stage
from bertjax.interop import huggingface
from bertjax.models import families
from bertjax.models.electra.huggingface import FORMAT
from bertjax.objectives.generator import Generator
from bertjax.objectives.parsing import learn
from bertjax.objectives.parts.generator import separate_params
from bertjax.pretraining.losses import StageLoss
from tests.conftest import one_device_mesh, pretraining_task, tiny_config

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")
pytestmark = pytest.mark.extra_packages

SIZES = dict(
    vocab_size=150, hidden_size=64, num_hidden_layers=2, num_attention_heads=4, intermediate_size=96,
    max_position_embeddings=64, embedding_size=32,
)  # fmt: skip
TABLES = "electra.embeddings."  # the prefixes of shared params


def task_of(embeddings: str):
    config = tiny_config(records="unused")
    config.model = families.model_fields("electra", **SIZES)
    learn(config, "50*replaced + generator", generator=dict(width=0.5, layers=0.5, embeddings=embeddings))
    config.stages = named_stages(only=stage(1, 32, 5))
    return pretraining_task(config, one_device_mesh(config), None)


def random_like(rng, path, x):
    """Returns random params; scales of norms are around 1."""
    return (0.1 * rng.standard_normal(x.shape) + (path[-1].key == "scale")).astype(np.float32)


def batch_of(rows=3, length=32):
    rng = np.random.default_rng(0)
    sizes = np.array([length, length * 2 // 3, length])[:, None]
    inside = np.arange(length) < sizes
    ids = np.where(inside, rng.integers(5, 150, (rows, length)), 0).astype(np.int32)
    places = np.sort(np.stack([1 + rng.permutation(size - 2)[:5] for size in sizes[:, 0]]), 1).astype(np.int32)
    weights = np.ones((rows, 5), np.float32)
    weights[1, 3:], places[1, 3:] = 0, 0
    words = np.where(weights > 0, np.take_along_axis(ids, places, 1), 0).astype(np.int32)
    masked = ids.copy()
    for row in range(rows):
        masked[row, places[row, weights[row] > 0]] = 4
    types = (inside & (np.arange(length) >= sizes // 2)).astype(np.int32)
    batch = dict(input_ids=masked, segments=inside.astype(np.int32), token_types=types)
    batch |= dict(word_positions=places, word_ids=words, word_weights=weights)
    return batch | dict(pair_labels=np.zeros(rows, np.int32), sequence_weights=np.ones(rows, np.float32)), ids


@pytest.mark.parametrize("embeddings", ["shared", "apart", "disentangled"])
def test_losses_and_gradients_equal_transformers(embeddings, tmp_path):
    """Compares losses and gradients of a step, at equal tokens drawn from the generator."""
    task, (batch, ids) = task_of(embeddings), batch_of()
    shapes, rng = nn.meta.unbox(jax.eval_shape(task.init_params, jax.random.key(0))), np.random.default_rng(1)
    params = jax.tree_util.tree_map_with_path(lambda path, x: random_like(rng, path, x), shapes)
    replaced, generator = task.loss.terms
    read = {}

    class Spied(Generator):
        def rewrite(self, encoded, weights, keys):
            rewritten = super().rewrite(encoded, weights, keys)
            read["ids"] = rewritten.batch["input_ids"]
            return rewritten

    spied = generator._replace(objective=Spied(**vars(generator.objective)))
    spied_loss = StageLoss(task.loss.model.clone(terms=(replaced, spied)))

    def loss(params):
        total, metrics = spied_loss(params, spied_loss.normalize(batch))
        return total, (metrics, read["ids"])

    (_, (metrics, drawn)), gradient = jax.jit(jax.value_and_grad(loss, has_aux=True))(params)
    drawn, gradient = np.asarray(drawn), jax.device_get(gradient)

    finished, their_models = generator.objective.export_params(params), {}
    generator_model = generator.objective.models(task.loss.model.config)["generator"]
    for name, config, params_of_part in (
        ("ForPreTraining", task.loss.model.config, finished),
        ("ForMaskedLM", generator_model, finished["generator"]),
    ):
        huggingface.write(tmp_path / name, config, params_of_part, None, f"Electra{name}")
        loader = getattr(transformers, f"Electra{name}")
        model, info = loader.from_pretrained(tmp_path / name, output_loading_info=True)
        assert not any(info.values()), info
        their_models[name] = model.eval()
    used = batch["word_weights"] > 0
    is_masked = np.zeros(ids.shape, bool)
    for row, places in enumerate(batch["word_positions"]):
        is_masked[row, places[used[row]]] = True
    assert (drawn[~is_masked] == ids[~is_masked]).all() and (drawn != ids).sum() > 5

    def given(ids):
        rest = dict(attention_mask=torch.tensor(batch["segments"]), token_type_ids=torch.tensor(batch["token_types"]))
        return dict(input_ids=torch.tensor(ids, dtype=torch.long), **rest)

    labels = torch.tensor(np.where(is_masked, ids, -100), dtype=torch.long)
    of_words = their_models["ForMaskedLM"](**given(batch["input_ids"]), labels=labels).loss
    outputs = their_models["ForPreTraining"](**given(drawn), labels=torch.tensor(drawn != ids))
    np.testing.assert_allclose(metrics["generator_loss"], of_words.item(), rtol=1e-4)
    np.testing.assert_allclose(metrics["replaced_loss"], outputs.loss.item(), rtol=1e-4)
    (of_words + 50 * outputs.loss).backward()
    real = batch["segments"] > 0
    is_right = (outputs.logits.detach().numpy() > 0) == (drawn != ids)
    np.testing.assert_allclose(metrics["replaced_accuracy"], is_right[real].mean(), rtol=1e-5)
    np.testing.assert_allclose(metrics["replaced_share"], (drawn != ids)[real].mean(), rtol=1e-5)

    expected = {
        kind: {name: param.grad.numpy() for name, param in model.named_parameters()}
        for kind, model in their_models.items()
    }
    shared = [name for name in expected["ForMaskedLM"] if name.startswith(TABLES)]
    if embeddings == "shared":
        for name in shared:
            sums = sum(losses[name] for losses in expected.values())
            expected["ForPreTraining"][name] = expected["ForMaskedLM"][name] = sums
    of_difference, encoder_config = gradient["generator"].get("difference"), task.loss.model.config
    whole = separate_params(
        gradient["bert"], {x: part for x, part in gradient["generator"].items() if x != "difference"}
    )[1]
    our_gradient = gradient["bert"]
    if embeddings == "disentangled":  # the tables have the gradient of the generator only
        our_gradient = our_gradient | {"embeddings": our_gradient["embeddings"] | of_difference}
    tensors = {
        "ForPreTraining": FORMAT.to_tensors(gradient | {"bert": our_gradient}, encoder_config, "ElectraForPreTraining")[
            0
        ],
        "ForMaskedLM": FORMAT.to_tensors(whole, generator_model, "ElectraForMaskedLM")[0],
    }
    for kind, named in tensors.items():
        assert named.keys() == expected[kind].keys()
        for name, array in named.items():
            bound = 1e-4 * max(1.0, np.abs(expected[kind][name]).max())
            np.testing.assert_allclose(array, expected[kind][name], atol=bound, err_msg=f"{kind} {name}")
    assert ("difference" in gradient["generator"]) == (embeddings == "disentangled")
    assert ("word" in gradient["generator"]["bert"].get("embeddings", {})) == (embeddings == "apart")
