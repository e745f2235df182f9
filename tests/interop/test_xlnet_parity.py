"""XLNet beside transformers': states of both streams, with masks and memory, logits, gradients, every class."""

import dataclasses
import functools
import io
import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import sentencepiece
from google.protobuf import runtime_version

from bertjax.config import UserError
from bertjax.families.with_heads import BertForMaskedLM, word_logits
from bertjax.families.xlnet import FAMILY, XlnetConfig
from bertjax.families.xlnet.huggingface import to_tensors
from bertjax.families.xlnet.model import XlnetModel
from bertjax.interop import conversion, huggingface, pretrained, tokenizer_files
from bertjax.model.recurrence import Memory
from bertjax.tasks.pairs import encode_pairs
from bertjax.text import learning
from bertjax.text.tokenizer import XLNET
from tests.conftest import make_corpus
from tests.families.test_modernbert import random_params
from tests.interop.test_modernbert_parity import MODELS
from tests.text.test_tokenizer import HARD

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")

TINY = XlnetConfig(vocab_size=300, hidden_size=32, num_hidden_layers=2, num_attention_heads=4, intermediate_size=48)
TYPES = np.repeat([[0] * 5 + [1] * 6 + [2]], 2, axis=0).astype(np.int32)  # A, B, [CLS]


def save_theirs(folder, head: str, **fields):
    """Makes a model of theirs whose params are neither 0 nor 1, and saves it."""
    sizes = dict(vocab_size=300, d_model=32, n_layer=2, n_head=4, d_inner=48, mem_len=None)
    torch.manual_seed(0)
    model = getattr(transformers, f"XLNet{head}")(transformers.XLNetConfig(**sizes | fields)).eval()
    with torch.no_grad():
        for param in model.parameters():
            param.add_(0.1 * torch.randn_like(param))
    model.save_pretrained(folder)
    return model


def permuted(length: int):
    """Returns ids, what is seen `[2, length, length]`, places of predictions, and all of it as theirs takes it."""
    rng = np.random.default_rng(0)
    ids, seen = rng.integers(0, 300, (2, length)), rng.random((2, length, length)) < 0.5
    seen[:, :, 0] = True  # nothing would remain of a row that sees nothing
    places = np.stack([1 + rng.permutation(length - 1)[:3] for _ in ids])
    mapping = (places[:, :, None] == np.arange(length)).astype(np.float32)
    hidden = ~seen | (mapping.any(1)[:, :, None] & np.eye(length, dtype=bool))  # a prediction does not see itself
    given = dict(input_ids=ids, perm_mask=hidden.astype(np.float32), target_mapping=mapping)
    return ids, seen, places, {name: torch.tensor(x) for name, x in given.items()}


@pytest.mark.parametrize("kept", [0, 7])
def test_both_streams_their_logits_and_gradients_are_transformers(kept, tmp_path):
    theirs, (ids, seen, places, given) = save_theirs(tmp_path, "LMHeadModel"), permuted(12)
    source = pretrained.read(tmp_path)
    assert source.config == TINY and source.predicts_words and not source.ignored
    memory = np.random.default_rng(1).normal(size=(2, 2, kept, 32)).astype(np.float32) if kept else None
    remembered = Memory(jnp.moveaxis(memory, 0, 1), jnp.full([2], kept)) if kept else None
    mems = [torch.tensor(each).transpose(0, 1) for each in memory] if kept else None
    given |= dict(token_type_ids=torch.tensor(TYPES), mems=mems, use_mems=True, output_hidden_states=True)
    expected, inside = theirs(**given), np.ones_like(ids)
    weights = np.random.default_rng(2).normal(size=(2, 3, 300)).astype(np.float32)

    def predict(lm):
        streams = lm.bert.read(ids, inside, TYPES, seen=seen, places=places, memory=remembered, every_layer=True)
        numbers = jnp.broadcast_to(jnp.arange(3), places.shape)
        return word_logits(lm.bert, lm.masked_lm, streams[1][-1], numbers)[..., :300], streams

    def loss(params):
        logits, streams = BertForMaskedLM(source.config).apply({"params": params}, method=predict)
        return (logits * weights).mean(), (logits, streams)

    (_, (logits, streams)), gradients = jax.jit(jax.value_and_grad(loss, has_aux=True))(source.params)
    for stream, states in enumerate(streams[:2]):
        for ours, hidden in zip(states, expected.hidden_states[stream::2], strict=True):
            np.testing.assert_allclose(ours, hidden.detach(), atol=1e-4)
    for ours, theirs_kept in zip(streams[0][:-1], expected.mems, strict=True):  # theirs has the memory before, too
        np.testing.assert_allclose(ours, theirs_kept[kept:].transpose(0, 1), atol=1e-4)
    np.testing.assert_allclose(logits, expected.logits.detach(), atol=1e-4)
    (expected.logits * torch.tensor(weights)).mean().backward()
    named, _ = to_tensors(gradients, source.config, "XLNetLMHeadModel")
    for name, param in theirs.named_parameters():
        gradient = param.grad.numpy()
        assert np.abs(named[name] - gradient).max() <= 1e-4 * max(np.abs(gradient).max(), 1e-2), name


def test_plain_states_attention_and_predictions_that_see_all_else_are_transformers(tmp_path):
    theirs, (ids, _, places, given) = save_theirs(tmp_path, "LMHeadModel"), permuted(12)
    source, inside = pretrained.read(tmp_path), np.ones((2, 12), np.int32)
    inside[1, 9:] = 0
    given = dict(input_ids=given["input_ids"], token_type_ids=torch.tensor(TYPES), attention_mask=torch.tensor(inside))
    expected = theirs(**given, output_hidden_states=True, output_attentions=True)
    encode = functools.partial(XlnetModel(source.config).apply, every_layer=True, method="encode")
    states = jax.jit(encode)({"params": source.params["bert"]}, ids, inside, TYPES)
    for ours, hidden in zip(states, expected.hidden_states, strict=True):
        np.testing.assert_allclose(ours * inside[..., None], hidden.detach().numpy() * inside[..., None], atol=1e-4)
    attention = FAMILY.attention(source.config, source.params["bert"], ids[:1], inside[:1], TYPES[:1])
    for ours, shares in zip(attention, expected.attentions, strict=True):
        np.testing.assert_allclose(ours, shares[0].detach(), atol=1e-4)

    places[1] = [3, 5, 5]  # the last one fills up the row
    mapping = (places[:, :, None] == np.arange(12)).astype(np.float32)
    hidden = np.repeat(mapping.any(1)[:, None], 12, axis=1).astype(np.float32)  # from all, whoever they are
    expected = theirs(**given, perm_mask=torch.tensor(hidden), target_mapping=torch.tensor(mapping)).logits
    predict = jax.jit(BertForMaskedLM(source.config).apply)
    logits = predict({"params": source.params}, ids, inside, TYPES, places)[..., :300]
    np.testing.assert_allclose(logits[0], expected[0].detach(), atol=1e-4)
    np.testing.assert_allclose(logits[1, :1], expected[1, :1].detach(), atol=1e-4)


@pytest.mark.parametrize(
    "head, ours",
    [
        ("Model", "Model"),
        ("LMHeadModel", "ForMaskedLM"),
        ("ForQuestionAnsweringSimple", "ForQuestionAnswering"),
        *((head, head) for head in ("ForSequenceClassification", "ForTokenClassification", "ForMultipleChoice")),
    ],
)
def test_every_class_is_read_and_written(head, ours, tmp_path):
    labels = {"ForMultipleChoice": 1, "ForQuestionAnsweringSimple": 2}.get(head, 3)
    theirs = save_theirs(tmp_path / "theirs", head, num_labels=labels)
    source, ids, inside = pretrained.read(tmp_path / "theirs"), permuted(12)[0], np.ones((2, 12), np.int32)
    assert source.architecture == f"Bert{ours}" and not source.ignored
    assert source.predicts_words == (ours == "ForMaskedLM")
    if ours not in ("Model", "ForMaskedLM"):
        given = dict(input_ids=torch.tensor(ids), token_type_ids=torch.tensor(TYPES))
        given = {name: x[None] for name, x in given.items()} if head == "ForMultipleChoice" else given
        expected = theirs(**given)
        if ours == "ForQuestionAnswering":
            expected = torch.stack([expected.start_logits, expected.end_logits], -1)
        else:
            expected = expected.logits
        found = jax.jit(MODELS[ours](source.config).apply)({"params": source.params}, ids, inside, TYPES)
        np.testing.assert_allclose(found, expected.detach().numpy().reshape(found.shape), atol=1e-4)

    conversion.convert(tmp_path / "theirs", tmp_path / "ours", "bertjax")
    conversion.convert(tmp_path / "ours", tmp_path / "back", "huggingface")
    after, info = getattr(transformers, f"XLNet{head}").from_pretrained(tmp_path / "back", output_loading_info=True)
    assert not any(info.values()), info
    before = theirs.state_dict()
    assert before.keys() == after.state_dict().keys()
    assert all(torch.equal(tensor, after.state_dict()[name]) for name, tensor in before.items())
    assert after.config.d_inner == 48 and after.config.ff_activation == "gelu" and after.config.mem_len is None


@pytest.fixture(scope="module")
def released(tmp_path_factory):
    """A SentencePiece model with the special pieces of XLNet's, in their order, learnt from hard text."""
    model = io.BytesIO()
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter([*HARD * 5, *make_corpus(40).split("\n")]), model_writer=model, vocab_size=400,
        hard_vocab_limit=False, control_symbols=["<cls>", "<sep>", "<pad>", "<mask>", "<eod>", "<eop>"],
        minloglevel=2,
    )  # fmt: skip
    folder = tmp_path_factory.mktemp("xlnet")
    (folder / "spiece.model").write_bytes(model.getvalue())
    return folder


@pytest.mark.parametrize("lowercase", [False, True])
def test_both_forms_of_its_tokenizer_give_the_same_ids_and_types(lowercase, released, tmp_path, monkeypatch):
    # The module of the sentencepiece package that transformers reads a model with wants the newest protobuf.
    monkeypatch.setattr(runtime_version, "ValidateProtobufRuntimeVersion", lambda *_: None)
    (tmp_path / "spiece.model").write_bytes((released / "spiece.model").read_bytes())
    (tmp_path / "tokenizer_config.json").write_text(
        json.dumps(dict(tokenizer_class="XLNetTokenizer", do_lower_case=lowercase))
    )
    theirs = transformers.XLNetTokenizer.from_pretrained(tmp_path, do_lower_case=lowercase)
    theirs.save_pretrained(tmp_path / "written")
    ours, again = tokenizer_files.read(tmp_path), tokenizer_files.read(tmp_path / "written")
    names = ("pad", "unk", "cls", "sep", "mask")
    assert ours.special_ids == tuple(getattr(theirs, f"{name}_token_id") for name in names)
    texts = [text for text in (*HARD, "``He said'' 1,000 caf\u00e9s") if text.strip()]
    for found in (ours, again):
        ids, types, _ = encode_pairs(found, texts, texts[::-1], 2000)
        for a, b, own, kinds in zip(texts, texts[::-1], ids, types, strict=True):
            expected = theirs(a, b, return_token_type_ids=True)
            assert own.tolist() == expected.input_ids and kinds.tolist() == expected.token_type_ids, (a, b)
        assert encode_pairs(found, texts[:1], None, 500)[1][0].tolist() == [0] * (
            len(theirs(texts[0]).input_ids) - 1
        ) + [2]
    with pytest.raises(UserError, match="lacks <pad>, <cls>, <sep>, <mask>, which XLNet has"):
        _of_others(tmp_path)


def _of_others(folder):
    """Reads a spiece.model that is not XLNet's."""
    model = io.BytesIO()
    text = iter(make_corpus(10).split("\n"))
    sentencepiece.SentencePieceTrainer.train(sentence_iterator=text, model_writer=model, vocab_size=60, minloglevel=2)
    (folder / "spiece.model").write_bytes(model.getvalue())
    tokenizer_files.read(folder)


def test_a_tokenizer_that_is_learnt_is_the_same_in_transformers(tmp_path):
    words = learning.count_words("sentencepiece", make_corpus(40).split("\n"))
    ours = learning.learn("sentencepiece", words, 80, special=XLNET)
    config = dataclasses.replace(TINY, vocab_size=80)
    huggingface.write(tmp_path, config, random_params(BertForMaskedLM(config), config), ours)
    theirs = transformers.AutoTokenizer.from_pretrained(tmp_path)
    model = transformers.XLNetLMHeadModel.from_pretrained(tmp_path)
    assert model.config.pad_token_id == theirs.pad_token_id == ours.pad_id
    ids, types, _ = encode_pairs(ours, ["the ship", "a whale"], ["near the harbour", "the net"], 40)
    for a, b, own, kinds in zip(["the ship", "a whale"], ["near the harbour", "the net"], ids, types):
        expected = theirs(a, b)
        assert own.tolist() == expected.input_ids and kinds.tolist() == expected.token_type_ids
    padded = theirs(["the ship", "a whale near the harbour"], padding=True, return_tensors="pt")
    assert (padded.input_ids[:, -1] == ours.cls_id).all()  # so that theirs finds it
