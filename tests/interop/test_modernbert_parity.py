"""ModernBERT beside transformers': hidden states, logits and gradients, every class, and its conversion."""

import dataclasses

import jax
import numpy as np
import pytest

from bertjax.families.modernbert.huggingface import to_tensors
from bertjax.families.modernbert.model import ModernBertModel
from bertjax.families.with_heads import (
    BertForMaskedLM,
    BertForQuestionAnswering,
    BertForSequenceClassification,
    BertForTokenClassification,
)
from bertjax.interop import conversion, huggingface, pretrained
from tests.families.test_modernbert import TINY, random_params

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")

MODELS = {
    "ForMaskedLM": BertForMaskedLM,
    "ForSequenceClassification": lambda config: BertForSequenceClassification(config, 3),
    "ForTokenClassification": lambda config: BertForTokenClassification(config, 3),
    "ForQuestionAnswering": BertForQuestionAnswering,
    "ForMultipleChoice": lambda config: BertForSequenceClassification(config, 1),
}


def batch_of(length, seed=0):
    rng = np.random.default_rng(seed)
    sizes = np.array([length, max(1, length * 2 // 3)])
    inside = np.arange(length) < sizes[:, None]
    ids = np.where(inside, rng.integers(3, TINY.vocab_size, (2, length)), 0).astype(np.int32)
    return ids, inside.astype(np.int32), np.zeros_like(ids)


def in_torch(folder, kind):
    loader = getattr(transformers, f"ModernBert{kind}")
    model, info = loader.from_pretrained(folder, output_loading_info=True, attn_implementation="eager")
    assert not any(info.values()), info
    return model.eval()


@pytest.mark.parametrize("length", [1, 64, 65, 129, 513, 1025])
def test_hidden_states_logits_and_gradients_are_transformers(length, tmp_path):
    model = BertForMaskedLM(TINY)
    params = random_params(model, TINY)
    huggingface.write(tmp_path, TINY, params, None)
    theirs, (ids, inside, types) = in_torch(tmp_path, "ForMaskedLM"), batch_of(length)
    given = dict(input_ids=torch.tensor(ids, dtype=torch.long), attention_mask=torch.tensor(inside))
    expected = theirs(**given, output_hidden_states=True)
    encode = jax.jit(
        lambda p: ModernBertModel(TINY).apply({"params": p}, ids, inside, types, every_layer=True, method="encode")
    )
    real = inside[..., None]
    assert len(expected.hidden_states) == 9
    for ours, hidden in zip(encode(params["bert"]), expected.hidden_states, strict=True):
        np.testing.assert_allclose(ours * real, hidden.detach().numpy() * real, atol=1e-4)

    places = np.broadcast_to(np.arange(length, dtype=np.int32), ids.shape)
    weights = (np.random.default_rng(1).normal(size=(2, length, TINY.vocab_size)) * real).astype(np.float32)

    def loss(params):
        logits = model.apply({"params": params}, ids, inside, types, places)[..., : TINY.vocab_size]
        return (logits * weights).mean(), logits

    (_, logits), gradients = jax.jit(jax.value_and_grad(loss, has_aux=True))(params)
    np.testing.assert_allclose(logits * real, expected.logits.detach().numpy() * real, atol=1e-4)
    (expected.logits * torch.tensor(weights)).mean().backward()
    named, _ = to_tensors(gradients, TINY, "ModernBertForMaskedLM")
    for name, gradient in theirs.named_parameters():
        gradient = gradient.grad.numpy()
        assert np.abs(named[name] - gradient).max() <= 1e-4 * max(np.abs(gradient).max(), 1e-2), name


@pytest.mark.parametrize("pooling", ["cls", "mean"])
@pytest.mark.parametrize("kind", list(MODELS))
def test_every_class_is_transformers_and_is_written_and_read(kind, pooling, tmp_path):
    config = dataclasses.replace(TINY, classifier_pooling=pooling)
    model = MODELS[kind](config)
    params, (ids, inside, types) = random_params(model, config), batch_of(70)
    labels = ("a", "b", "c") if kind in ("ForSequenceClassification", "ForTokenClassification") else ()
    huggingface.write(tmp_path / "there", config, params, None, f"ModernBert{kind}", labels)
    theirs = in_torch(tmp_path / "there", kind)
    given = dict(input_ids=torch.tensor(ids, dtype=torch.long), attention_mask=torch.tensor(inside))
    if kind == "ForMultipleChoice":
        given = {name: x[None] for name, x in given.items()}
    with torch.no_grad():
        found = theirs(**given)
    places = (np.broadcast_to(np.arange(70, dtype=np.int32), ids.shape),) if kind == "ForMaskedLM" else ()
    ours = np.asarray(model.apply({"params": params}, ids, inside, types, *places))
    if kind == "ForQuestionAnswering":
        expected = np.stack([found.start_logits.numpy(), found.end_logits.numpy()], -1)
    else:
        expected = found.logits.numpy()
    if kind == "ForMultipleChoice":
        ours = ours.T
    elif kind == "ForMaskedLM":
        ours = ours[..., : TINY.vocab_size]
    if ours.ndim == 3:
        ours, expected = ours * inside[..., None], expected * inside[..., None]
    np.testing.assert_allclose(ours, expected, atol=1e-4)

    again = pretrained.read(tmp_path / "there")
    assert again.config == config and again.architecture == f"Bert{kind}" and again.ignored == [] and not again.wordless
    assert jax.tree.all(jax.tree.map(lambda a, b: a.dtype == b.dtype and (a == b).all(), again.params, params))
    conversion.convert(tmp_path / "there", tmp_path / "ours", "bertjax")
    conversion.convert(tmp_path / "ours", tmp_path / "back", "huggingface")
    before, after = ((tmp_path / name / "model.safetensors").read_bytes() for name in ("there", "back"))
    assert before == after
    assert type(in_torch(tmp_path / "back", kind)) is type(theirs)
