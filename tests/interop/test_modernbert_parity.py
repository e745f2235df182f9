"""ModernBERT beside transformers': hidden states, logits and gradients, every class, and its conversion."""

import dataclasses
import json

import jax
import numpy as np
import pytest
from safetensors.numpy import load_file

from bertjax.families.modernbert.huggingface import to_tensors
from bertjax.families.modernbert.model import ModernBertModel
from bertjax.families.with_heads import (
    BertForMaskedLM,
    BertForQuestionAnswering,
    BertForSequenceClassification,
    BertForTokenClassification,
)
from bertjax.interop import conversion, huggingface, pretrained
from tests.families.test_modernbert import NEW, OLD, TINY, random_params

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
    fields = json.loads((tmp_path / "config.json").read_text())
    for name in OLD if length % 2 else NEW:  # the other form says the same, to them and to us
        del fields[name]
    (tmp_path / "config.json").write_text(json.dumps(fields))
    assert pretrained.read(tmp_path).config == TINY
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


@pytest.mark.parametrize(
    "kind, pooling",
    [*((kind, "cls") for kind in MODELS), ("ForSequenceClassification", "mean"), ("ForMultipleChoice", "mean")],
)
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
    found = theirs(**given)
    places = (np.broadcast_to(np.arange(70, dtype=np.int32), ids.shape),) if kind == "ForMaskedLM" else ()
    if kind == "ForQuestionAnswering":
        expected = torch.stack([found.start_logits, found.end_logits], -1)
    else:
        expected = found.logits.T if kind == "ForMultipleChoice" else found.logits
    weights = np.random.default_rng(1).normal(size=expected.shape).astype(np.float32)
    if weights.ndim == 3:
        weights *= inside[..., None]

    def loss(params):
        logits = model.apply({"params": params}, ids, inside, types, *places)[..., : weights.shape[-1]]
        return (logits * weights).mean(), logits

    (_, ours), gradients = jax.jit(jax.value_and_grad(loss, has_aux=True))(params)
    real = inside[..., None] if weights.ndim == 3 else 1
    np.testing.assert_allclose(ours * real, expected.detach().numpy() * real, atol=1e-4)
    (expected * torch.tensor(weights)).mean().backward()
    named, _ = to_tensors(gradients, config, f"ModernBert{kind}")
    for name, parameter in theirs.named_parameters():
        gradient = parameter.grad.numpy()
        assert np.abs(named[name] - gradient).max() <= 1e-4 * max(np.abs(gradient).max(), 1e-2), name

    again = pretrained.read(tmp_path / "there")
    assert again.config == config and again.architecture == f"Bert{kind}" and again.ignored == [] and not again.wordless
    assert jax.tree.all(jax.tree.map(lambda a, b: a.dtype == b.dtype and (a == b).all(), again.params, params))
    conversion.convert(tmp_path / "there", tmp_path / "ours", "bertjax")
    conversion.convert(tmp_path / "ours", tmp_path / "back", "huggingface")
    before, after = ((tmp_path / name / "model.safetensors").read_bytes() for name in ("there", "back"))
    assert before == after
    assert type(in_torch(tmp_path / "back", kind)) is type(theirs)


@pytest.mark.parametrize("length", [1, 64, 65, 129, 513, 1025])
def test_texts_of_any_length_are_pooled_as_in_transformers(length, tmp_path):
    for pooling in ("cls", "mean"):
        config = dataclasses.replace(TINY, classifier_pooling=pooling, num_hidden_layers=2)
        model = BertForSequenceClassification(config, 3)
        params, (ids, inside, types) = random_params(model, config), batch_of(length)
        huggingface.write(
            tmp_path / pooling, config, params, None, "ModernBertForSequenceClassification", ("a", "b", "c")
        )
        theirs = in_torch(tmp_path / pooling, "ForSequenceClassification")
        with torch.no_grad():
            found = theirs(input_ids=torch.tensor(ids, dtype=torch.long), attention_mask=torch.tensor(inside)).logits
        np.testing.assert_allclose(model.apply({"params": params}, ids, inside, types), found.numpy(), atol=1e-4)


def test_their_folder_comes_back_as_it_was(tmp_path):
    """Also the encoder alone, which has a class of its own."""
    sizes = dict(vocab_size=300, hidden_size=32, num_hidden_layers=8, num_attention_heads=4, intermediate_size=48)
    special = dict(pad_token_id=0, bos_token_id=2, eos_token_id=3, cls_token_id=2, sep_token_id=3)
    theirs = transformers.ModernBertConfig(**sizes, **special, attention_dropout=0.2, local_attention=32)
    for kind in ("Model", "ForMaskedLM"):
        torch.manual_seed(0)
        model = getattr(transformers, f"ModernBert{kind}")(theirs).eval()
        model.save_pretrained(tmp_path / kind)
        ours = pretrained.read(tmp_path / kind)
        assert ours.config.attention_output_dropout_prob == 0.2 and ours.ignored == []
        conversion.convert(tmp_path / kind, tmp_path / f"{kind}-ours", "bertjax")
        conversion.convert(tmp_path / f"{kind}-ours", tmp_path / f"{kind}-back", "huggingface")
        before, after = (load_file(tmp_path / name / "model.safetensors") for name in (kind, f"{kind}-back"))
        assert before.keys() == after.keys() and all(before[name].tobytes() == after[name].tobytes() for name in before)
        again = in_torch(tmp_path / f"{kind}-back", kind)
        apart = (
            "architectures",
            "dtype",
            "transformers_version",
            "_name_or_path",
        )  # and ids of special pieces come from a tokenizer
        for name, value in theirs.to_dict().items():
            if name not in apart and not name.endswith("_token_id"):
                assert getattr(again.config, name) == value, name
        ids, inside, types = batch_of(70)
        with torch.no_grad():
            given = dict(input_ids=torch.tensor(ids, dtype=torch.long), attention_mask=torch.tensor(inside))
            expected = model(**given)[0] if kind == "Model" else model.model(**given)[0]
        found = ModernBertModel(ours.config).apply({"params": ours.params["bert"]}, ids, inside, types, method="encode")
        np.testing.assert_allclose(found * inside[..., None], expected.numpy() * inside[..., None], atol=1e-4)
