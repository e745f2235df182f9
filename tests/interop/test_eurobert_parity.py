"""EuroBERT beside transformers': hidden states, logits and gradients, every class, its tokenizer, and back."""

import jax
import numpy as np
import pytest

from bertjax.families.eurobert.huggingface import to_tensors
from bertjax.families.eurobert.model import EuroBertModel
from bertjax.families.with_heads import (
    BertForMaskedLM,
)
from bertjax.interop import conversion, pretrained
from tests.interop.test_modernbert_parity import MODELS

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")

SIZE = dict(vocab_size=300, hidden_size=32, num_hidden_layers=3, num_attention_heads=4, intermediate_size=48)


def save_theirs(folder, head: str, **fields):
    """Makes a model of theirs whose params are neither 0 nor 1, and saves it."""
    fields = (
        SIZE | dict(num_key_value_heads=2, rope_parameters=dict(rope_type="default", rope_theta=250_000.0)) | fields
    )
    config = transformers.EuroBertConfig(pad_token_id=0, **fields)
    torch.manual_seed(0)
    model = getattr(transformers, f"EuroBert{head}")(config).eval()
    with torch.no_grad():
        for param in model.parameters():
            param.add_(0.1 * torch.randn_like(param))
    model.save_pretrained(folder)
    return model


def batch_of(length: int):
    rng = np.random.default_rng(0)
    sizes = np.array([length, max(1, length * 2 // 3)])
    inside = np.arange(length) < sizes[:, None]
    ids = np.where(inside, rng.integers(3, 300, (2, length)), 0).astype(np.int32)
    given = dict(input_ids=torch.tensor(ids, dtype=torch.long), attention_mask=torch.tensor(inside.astype(np.int32)))
    return ids, inside.astype(np.int32), np.zeros_like(ids), given


@pytest.mark.parametrize(
    "length, form",
    [
        (1, dict(num_key_value_heads=2)),
        (64, dict(num_key_value_heads=1)),
        (65, dict(num_key_value_heads=2, head_dim=16)),
        (200, dict(num_key_value_heads=4)),
        (33, dict(num_key_value_heads=2, tie_word_embeddings=True)),
    ],
)
def test_hidden_states_logits_and_gradients_are_transformers(length, form, tmp_path):
    theirs, (ids, inside, types, given) = save_theirs(tmp_path, "ForMaskedLM", **form), batch_of(length)
    source = pretrained.read(tmp_path)
    assert source.predicts_words and not source.ignored
    assert source.config.num_key_value_heads == form["num_key_value_heads"]
    assert source.config.head_dim == form.get("head_dim", 8)
    expected, real, places = (
        theirs(**given, output_hidden_states=True),
        inside[..., None],
        np.tile(np.arange(length), (2, 1)),
    )
    states = EuroBertModel(source.config).apply(
        {"params": source.params["bert"]}, ids, inside, types, every_layer=True, method="encode"
    )
    for ours, hidden in zip(states, expected.hidden_states, strict=True):
        np.testing.assert_allclose(ours * real, hidden.detach().numpy() * real, atol=1e-4)

    weights = (np.random.default_rng(1).normal(size=(2, length, 300)) * real).astype(np.float32)
    model = BertForMaskedLM(source.config)

    def loss(params):
        logits = model.apply({"params": params}, ids, inside, types, places)[..., :300]
        return (logits * weights).mean(), logits

    (_, logits), gradients = jax.jit(jax.value_and_grad(loss, has_aux=True))(source.params)
    np.testing.assert_allclose(logits * real, expected.logits.detach().numpy() * real, atol=1e-4)
    (expected.logits * torch.tensor(weights)).mean().backward()
    named, _ = to_tensors(gradients, source.config, "EuroBertForMaskedLM")
    for name, param in theirs.named_parameters():
        gradient = param.grad.numpy()
        assert np.abs(named[name] - gradient).max() <= 1e-4 * max(np.abs(gradient).max(), 1e-2), name


@pytest.mark.parametrize("pooling", ["bos", "mean", "late"])
@pytest.mark.parametrize("head", ["ForSequenceClassification", "ForTokenClassification", "ForMaskedLM", "Model"])
def test_every_class_is_read_and_written(head, pooling, tmp_path):
    if pooling != "late" and head != "ForSequenceClassification":
        pytest.skip("has no pooling")
    theirs = save_theirs(tmp_path / "theirs", head, num_labels=3, classifier_pooling=pooling)
    source, (ids, inside, types, given) = pretrained.read(tmp_path / "theirs"), batch_of(40)
    assert source.architecture == f"Bert{head}" and not source.ignored and source.config.classifier_pooling == pooling
    assert source.predicts_words == (head == "ForMaskedLM")
    if head in MODELS and head != "ForMaskedLM":
        model = MODELS[head](source.config)
        found = np.asarray(model.apply({"params": source.params}, ids, inside, types))
        expected, real = theirs(**given).logits.detach().numpy(), inside[..., None] if found.ndim == 3 else 1
        np.testing.assert_allclose(found * real, expected * real, atol=1e-4)

    conversion.convert(tmp_path / "theirs", tmp_path / "ours", "bertjax")
    conversion.convert(tmp_path / "ours", tmp_path / "back", "huggingface")
    loader = getattr(transformers, f"EuroBert{head}")
    after, info = loader.from_pretrained(tmp_path / "back", output_loading_info=True)
    assert not any(info.values()), info
    before = theirs.state_dict()
    assert before.keys() == after.state_dict().keys() and after.config.classifier_pooling == pooling
    assert all(torch.equal(tensor, after.state_dict()[name]) for name, tensor in before.items())
    assert after.config.rope_parameters == theirs.config.rope_parameters
