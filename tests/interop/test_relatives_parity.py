"""DistilBERT and ELECTRA beside transformers': hidden states, logits and gradients, every class, and back."""

import jax
import numpy as np
import pytest

from bertjax import families
from bertjax.config import UserError
from bertjax.families.distilbert import DistilBertConfig
from bertjax.families.electra import ElectraConfig
from bertjax.families.with_heads import BertForMaskedLM, count_parameters
from bertjax.interop import conversion, pretrained
from tests.interop.test_modernbert_parity import MODELS

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")

SIZES = dict(
    vocab_size=500, hidden_size=64, num_hidden_layers=3, num_attention_heads=2, intermediate_size=96,
    max_position_embeddings=200,
)  # fmt: skip
THEIRS = {
    "distilbert": (
        "DistilBert",
        dict(vocab_size=500, dim=64, n_layers=3, n_heads=2, hidden_dim=96, max_position_embeddings=200),
    ),
    "electra": ("Electra", SIZES | dict(embedding_size=32)),
    "electra of one width": ("Electra", SIZES | dict(embedding_size=64)),
}
CONFIGS = {
    "distilbert": DistilBertConfig(**SIZES),
    "electra": ElectraConfig(**SIZES, embedding_size=32),
    "electra of one width": ElectraConfig(**SIZES, embedding_size=64),
}


def save_theirs(folder, name: str, head: str, **fields):
    """Makes a model of theirs whose params are neither 0 nor 1, and saves it."""
    kind, sizes = THEIRS[name]
    config = getattr(transformers, f"{kind}Config")(**(sizes | fields))
    torch.manual_seed(0)
    model = getattr(transformers, f"{kind}{head}")(config).eval()
    with torch.no_grad():
        for param in model.parameters():
            param.add_(0.02 * torch.randn_like(param))
    model.save_pretrained(folder)
    return model


def batch_of(length: int):
    rng = np.random.default_rng(0)
    sizes = np.array([length, max(1, length * 2 // 3)])
    inside = np.arange(length) < sizes[:, None]
    ids = np.where(inside, rng.integers(3, 500, (2, length)), 0).astype(np.int32)
    return ids, inside.astype(np.int32), (inside & (np.arange(length) >= sizes[:, None] // 2)).astype(np.int32)


def given_to(model, ids, inside, types) -> dict:
    """Returns what their model is given."""
    given = dict(input_ids=torch.tensor(ids, dtype=torch.long), attention_mask=torch.tensor(inside))
    if getattr(model.config, "type_vocab_size", 0):
        given["token_type_ids"] = torch.tensor(types, dtype=torch.long)
    return given


@pytest.mark.parametrize("name", CONFIGS)
def test_hidden_states_logits_and_gradients_are_transformers(name, tmp_path):
    length = 200
    theirs, batch = save_theirs(tmp_path, name, "ForMaskedLM"), batch_of(length)
    source = pretrained.read(tmp_path)
    assert source.config == CONFIGS[name] and not source.ignored and source.predicts_words
    assert count_parameters(source.params, source.config) == sum(x.numel() for x in theirs.parameters())
    expected = theirs(**given_to(theirs, *batch), output_hidden_states=True)
    real, places = batch[1][..., None], np.tile(np.arange(length), (2, 1))
    encoder = families.of(source.config).model(source.config, BertForMaskedLM(source.config).compute)
    states = encoder.apply({"params": source.params["bert"]}, *batch, every_layer=True, method="encode")
    for ours, hidden in zip(states, expected.hidden_states, strict=True):
        np.testing.assert_allclose(ours * real, hidden.detach().numpy() * real, atol=1e-4)

    def loss(params):
        logits = BertForMaskedLM(source.config).apply({"params": params}, *batch, places)[..., :500]
        return (np.asarray(real) * jax.nn.log_softmax(logits)[..., :50]).sum(), logits

    (_, logits), gradient = jax.jit(jax.value_and_grad(loss, has_aux=True))(source.params)
    np.testing.assert_allclose(logits * real, expected.logits.detach().numpy() * real, atol=1e-4)
    (torch.tensor(real) * torch.log_softmax(expected.logits, -1)[..., :50]).sum().backward()
    layout = families.module_of(families.of(source.config))
    found, _ = layout.to_tensors(gradient, source.config, type(theirs).__name__)
    assert found.keys() == dict(theirs.named_parameters()).keys()
    for key, param in theirs.named_parameters():
        expected = param.grad.numpy()
        bound = 1e-4 * max(1.0, np.abs(expected).max())
        np.testing.assert_allclose(found[key], expected, atol=bound, err_msg=key)


@pytest.mark.parametrize("head", MODELS)
@pytest.mark.parametrize("name", ["distilbert", "electra"])
def test_classes_give_the_same_and_their_bytes_come_back(name, head, tmp_path):
    labels = {"ForMultipleChoice": 1, "ForQuestionAnswering": 2, "ForMaskedLM": 2}.get(head, 3)
    names = dict(id2label=dict(enumerate("abc")), label2id=dict(zip("abc", range(3)))) if labels == 3 else {}
    save_theirs(tmp_path / "theirs", name, head, num_labels=labels, **names)
    conversion.convert(tmp_path / "theirs", tmp_path / "ours", "bertjax")
    assert "left out" not in conversion.convert(tmp_path / "ours", tmp_path / "back", "huggingface")
    architecture = f"{THEIRS[name][0]}{head}"
    loader = getattr(transformers, architecture)
    before, after = (loader.from_pretrained(tmp_path / folder).eval() for folder in ("theirs", "back"))
    assert pretrained.read(tmp_path / "back").architecture == f"Bert{head}"
    assert after.config.architectures == [architecture] and after.config.model_type == before.config.model_type
    assert {**after.config.to_dict(), "_name_or_path": ""} == {**before.config.to_dict(), "_name_or_path": ""}
    assert before.state_dict().keys() == after.state_dict().keys()
    for key, tensor in before.state_dict().items():
        assert torch.equal(tensor, after.state_dict()[key]), key

    batch, source = batch_of(32), pretrained.read(tmp_path / "ours")
    given = given_to(after, *batch)
    if head == "ForMultipleChoice":
        given = {key: x[:, None] for key, x in given.items()}
    expected = after(**given)
    inputs = (*batch, np.tile(np.arange(32), (2, 1)))[: 4 if head == "ForMaskedLM" else 3]
    found = np.asarray(MODELS[head](source.config).apply({"params": source.params}, *inputs))
    if head == "ForQuestionAnswering":
        logits = np.stack([expected.start_logits.detach(), expected.end_logits.detach()], -1)
    else:
        logits = expected.logits.detach().numpy()
    if found.ndim == 3:
        real = batch[1][..., None]
        found, logits = found[..., : logits.shape[-1]] * real, logits * real
    np.testing.assert_allclose(found, logits, atol=1e-4)


def test_a_discriminator_keeps_what_tells_replaced_tokens(tmp_path):
    theirs, batch = save_theirs(tmp_path / "theirs", "electra", "ForPreTraining"), batch_of(32)
    conversion.convert(tmp_path / "theirs", tmp_path / "ours", "bertjax")
    assert "left out" not in conversion.convert(tmp_path / "ours", tmp_path / "back", "huggingface")
    source, after = pretrained.read(tmp_path / "ours"), transformers.ElectraForPreTraining.from_pretrained
    assert not source.ignored and not source.predicts_words
    back, info = after(tmp_path / "back", output_loading_info=True)
    assert not any(info.values()), info
    for key, tensor in theirs.state_dict().items():
        assert torch.equal(tensor, back.state_dict()[key]), key
    head = source.params["replaced_tokens"]
    model = families.of(source.config).model(source.config, BertForMaskedLM(source.config).compute)
    hidden = model.apply({"params": source.params["bert"]}, *batch, method="encode")
    inner = jax.nn.gelu(hidden @ head["dense"]["kernel"] + head["dense"]["bias"], approximate=False)
    logits = (inner @ head["output"]["kernel"] + head["output"]["bias"])[..., 0] * batch[1]
    np.testing.assert_allclose(logits, theirs(**given_to(theirs, *batch)).logits.detach() * batch[1], atol=1e-4)
    said = conversion.convert(tmp_path / "ours", tmp_path / "encoder", "huggingface", "ElectraModel")
    assert "left out, for which ElectraModel has no place: replaced_tokens" in said
    with pytest.raises(UserError, match="ElectraForMaskedLM: it has cls/predictions, which the checkpoint lacks; use "):
        conversion.convert(tmp_path / "ours", tmp_path / "words", "huggingface", "ElectraForMaskedLM")


@pytest.mark.parametrize("name", ["distilbert", "electra"])
def test_tokenizers_of_their_folders_are_read(name, tmp_path):
    pieces = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", "hello", "world", "##s", ",", "na", "##ive"]
    (tmp_path / "vocab.txt").write_text("\n".join(pieces) + "\n")
    made = getattr(transformers, f"{THEIRS[name][0]}Tokenizer")
    made(vocab=str(tmp_path / "vocab.txt")).save_pretrained(tmp_path)
    save_theirs(tmp_path, name, "ForMaskedLM")
    ours, theirs = pretrained.read_tokenizer(tmp_path), transformers.AutoTokenizer.from_pretrained(tmp_path)
    for text in ("Hello, worlds", "naïve", "hello \u4e16 x"):
        assert ours.encode(text).ids == theirs(text, add_special_tokens=False).input_ids
    conversion.convert(tmp_path, tmp_path / "back", "huggingface")
    again = transformers.AutoTokenizer.from_pretrained(tmp_path / "back")
    assert dict(again("Hello", "worlds")) == dict(theirs("Hello", "worlds"))
