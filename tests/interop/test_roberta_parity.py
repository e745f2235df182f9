"""RoBERTa, XLM-R and CamemBERT beside transformers': hidden states, logits and gradients, every class, and back."""

import dataclasses
import io
import json

import jax
import numpy as np
import pytest
import sentencepiece
import tokenizers
from google.protobuf import runtime_version

from bertjax.config import UserError, pretraining_config
from bertjax.data.preparation.vocabulary import given_tokenizer
from bertjax.families import model_fields
from bertjax.families.bert.model import BertModel
from bertjax.families.roberta import RobertaConfig
from bertjax.families.roberta.huggingface import read_config
from bertjax.families.with_heads import (
    BertForMaskedLM,
)
from bertjax.interop import conversion, huggingface, pretrained, tokenizer_files
from bertjax.tasks.fill_mask import fill_masks
from bertjax.tasks.pairs import encode_pairs
from bertjax.text import learning, tokenizer
from bertjax.text.tokenizer.sentencepiece import _message as sentencepiece_proto
from tests.conftest import make_corpus
from tests.families.test_modernbert import random_params
from tests.interop.test_modernbert_parity import MODELS
from tests.text.test_tokenizer import HARD

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")

TINY = RobertaConfig(
    vocab_size=500, hidden_size=64, num_hidden_layers=3, num_attention_heads=2, intermediate_size=96,
    max_position_embeddings=200, position_offset=2,
)  # fmt: skip


def their_config(variant: str, **fields):
    kind = {"roberta": "Roberta", "xlm-roberta": "XLMRoberta", "camembert": "Camembert"}[variant]
    size = dict(hidden_size=64, num_hidden_layers=3, num_attention_heads=2, intermediate_size=96)
    fields = dict(vocab_size=500, max_position_embeddings=202, type_vocab_size=1, layer_norm_eps=1e-5) | size | fields
    return kind, getattr(transformers, f"{kind}Config")(**fields)


def save_theirs(folder, variant: str, head: str, **fields):
    """Makes a model of theirs whose params are neither 0 nor 1, and saves it."""
    kind, config = their_config(variant, **fields)
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
    ids = np.where(inside, rng.integers(3, 500, (2, length)), 1).astype(np.int32)
    return ids, inside.astype(np.int32), np.zeros_like(ids)


@pytest.mark.parametrize("length", [1, 64, 200])
@pytest.mark.parametrize("variant", ["roberta", "xlm-roberta", "camembert"])
def test_hidden_states_logits_and_gradients_are_transformers(variant, length, tmp_path):
    theirs, (ids, inside, types) = save_theirs(tmp_path, variant, "ForMaskedLM"), batch_of(length)
    source = pretrained.read(tmp_path)
    assert source.config == dataclasses.replace(TINY, variant=variant) and not source.ignored
    given = dict(input_ids=torch.tensor(ids, dtype=torch.long), attention_mask=torch.tensor(inside))
    expected = theirs(**given, output_hidden_states=True)
    model, real, places = BertForMaskedLM(source.config), inside[..., None], np.tile(np.arange(length), (2, 1))
    states = BertModel(source.config).apply(
        {"params": source.params["bert"]}, ids, inside, types, every_layer=True, method="encode"
    )
    for ours, hidden in zip(states, expected.hidden_states, strict=True):
        np.testing.assert_allclose(ours * real, hidden.detach().numpy() * real, atol=1e-4)

    def loss(params):
        logits = model.apply({"params": params}, ids, inside, types, places)[..., :500]
        return (np.asarray(real) * jax.nn.log_softmax(logits)[..., :50]).sum(), logits

    (_, logits), gradient = jax.value_and_grad(loss, has_aux=True)(source.params)
    np.testing.assert_allclose(logits * real, expected.logits.detach().numpy() * real, atol=1e-4)
    (torch.tensor(real) * torch.log_softmax(expected.logits, -1)[..., :50]).sum().backward()
    layout = huggingface.families.module_of(huggingface.families.of(source.config))
    found, _ = layout.to_tensors(gradient, source.config, f"{theirs.__class__.__name__}")
    for name, param in theirs.named_parameters():
        name = name.replace("lm_head.decoder.weight", "roberta.embeddings.word_embeddings.weight")  # tied
        name = name.replace("lm_head.decoder.bias", "lm_head.bias")
        expected = np.zeros(param.shape) if param.grad is None else param.grad.numpy()
        bound = 1e-4 * max(1.0, np.abs(expected).max())
        np.testing.assert_allclose(found[name], expected, atol=bound, err_msg=name)


@pytest.mark.parametrize("head", MODELS)
def test_classes_give_the_same_and_their_bytes_come_back(head, tmp_path):
    save_theirs(
        tmp_path / "theirs",
        "roberta",
        head,
        num_labels={"ForMultipleChoice": 1, "ForQuestionAnswering": 2}.get(head, 3),
    )
    conversion.convert(tmp_path / "theirs", tmp_path / "ours", "bertjax")
    conversion.convert(tmp_path / "ours", tmp_path / "back", "huggingface")
    name = f"Roberta{head}"
    loader = getattr(transformers, name)
    before, after = (loader.from_pretrained(tmp_path / folder) for folder in ("theirs", "back"))
    assert pretrained.read(tmp_path / "back").architecture == f"Bert{head}"
    assert after.config.architectures == [name] and after.config.model_type == "roberta"
    assert before.state_dict().keys() == after.state_dict().keys()
    for key, tensor in before.state_dict().items():
        assert torch.equal(tensor, after.state_dict()[key]), key

    ids, inside, types = batch_of(32)
    source = pretrained.read(tmp_path / "ours")
    given = dict(input_ids=torch.tensor(ids, dtype=torch.long), attention_mask=torch.tensor(inside))
    if head == "ForMultipleChoice":
        given = {key: x[:, None] for key, x in given.items()}
    expected = after.eval()(**given)
    inputs = (ids, inside, types, np.tile(np.arange(32), (2, 1)))[: 4 if head == "ForMaskedLM" else 3]
    found = np.asarray(MODELS[head](source.config).apply({"params": source.params}, *inputs))
    if head == "ForQuestionAnswering":
        logits = np.stack([expected.start_logits.detach(), expected.end_logits.detach()], -1)
    else:
        logits = expected.logits.detach().numpy()
    if found.ndim == 3:
        found, logits = found[..., : logits.shape[-1]] * inside[..., None], logits * inside[..., None]
    np.testing.assert_allclose(found, logits, atol=1e-4)


def test_what_differs_is_refused(tmp_path):
    for fields, message in (
        (dict(position_embedding_type="relative_key"), "position_embedding_type 'relative_key' is not supported"),
        (dict(pad_token_id=300), "max_position_embeddings is 202, of which pad_token_id leaves none"),
        (dict(pad_token_id=None), "pad_token_id is None, which positions are counted from"),
        (dict(hidden_act="silu"), "hidden_act 'silu' is not supported"),
    ):
        _, config = their_config("roberta")
        with pytest.raises(UserError, match=message):
            read_config(tmp_path / "config.json", config.to_dict() | fields)


def test_a_random_model_has_all_that_their_class_has(tmp_path):
    params = random_params(BertForMaskedLM(TINY), TINY)
    huggingface.write(tmp_path, TINY, params, None)
    _, info = transformers.RobertaForMaskedLM.from_pretrained(tmp_path, output_loading_info=True)
    assert not any(info.values()), info


@pytest.fixture(scope="module")
def tokenizer_folder(tmp_path_factory):
    """A byte-level BPE of RoBERTa's form, learnt from hard text, as transformers writes it."""
    learner = tokenizers.ByteLevelBPETokenizer()
    text = [sample for sample in HARD for _ in range(3)]
    learner.train_from_iterator(text, vocab_size=500, special_tokens=["<s>", "<pad>", "</s>", "<unk>", "<mask>"])
    folder = tmp_path_factory.mktemp("roberta")
    learner.save_model(str(folder))
    names = dict(vocab=str(folder / "vocab.json"), merges=str(folder / "merges.txt"))
    mask = tokenizers.AddedToken("<mask>", lstrip=True, special=True)  # as in the published ones
    transformers.RobertaTokenizer(**names, mask_token=mask).save_pretrained(folder)
    for name in names.values():
        (folder / name).unlink(missing_ok=True)
    return folder


def test_the_tokenizer_gives_the_same_ids(tokenizer_folder):
    ours, theirs = tokenizer_files.read(tokenizer_folder), transformers.AutoTokenizer.from_pretrained(tokenizer_folder)
    special = (theirs.pad_token_id, theirs.unk_token_id, theirs.cls_token_id, theirs.sep_token_id, theirs.mask_token_id)
    assert ours.special_ids == special == (1, 3, 0, 2, 4)
    rng = np.random.default_rng(0)
    texts = [*HARD, *("".join(map(chr, rng.integers(32, 0x2FFF, 40))) for _ in range(200))]
    for text in texts:
        assert ours.encode(text).ids == theirs(text, add_special_tokens=False).input_ids, text
    pairs = [(a, b) for a, b in zip(texts, texts[::-1]) if b]  # to them an empty one is none
    ids, _, cut = encode_pairs(ours, [a for a, _ in pairs], [b for _, b in pairs], 200)
    assert ours.between == (2, 2) and any(cut) and not all(cut)
    for (a, b), found, is_cut in zip(pairs, ids, cut):
        if not is_cut:
            assert found.tolist() == theirs(a, b).input_ids
        assert len(found) <= 200 and (found == 2).sum() == 3


def test_a_folder_comes_back_with_its_tokenizer(tokenizer_folder, tmp_path):
    vocab_size = tokenizer_files.read(tokenizer_folder).vocab_size
    save_theirs(tokenizer_folder, "roberta", "ForMaskedLM", vocab_size=vocab_size)
    conversion.convert(tokenizer_folder, tmp_path / "ours", "bertjax")
    conversion.convert(tmp_path / "ours", tmp_path / "back", "huggingface")
    text = f"Hello {HARD[0]} world"
    folders = tokenizer_folder, tmp_path / "back"
    before, after = map(transformers.AutoTokenizer.from_pretrained, folders)
    assert before(text, HARD[1]).input_ids == after(text, HARD[1]).input_ids
    fields = json.loads((tmp_path / "back/config.json").read_text())
    assert [fields[name] for name in ("pad_token_id", "bos_token_id", "eos_token_id")] == [1, 0, 2]
    source = pretrained.read_with_tokenizer(tmp_path / "ours")
    with torch.no_grad():
        model = transformers.RobertaForMaskedLM.from_pretrained(tmp_path / "back")
        given = after("A <mask> word", return_tensors="pt")
        expected = model(**given).logits[0, given.input_ids[0].tolist().index(4)].softmax(-1)
    (filled,) = fill_masks(BertForMaskedLM(source.config), source.params, source.tokenizer, ["A [MASK] word"], 3)
    found = [probability for _, probability in filled.masks[0]]
    np.testing.assert_allclose(found, expected.topk(3).values, rtol=1e-4)


@pytest.fixture(scope="module")
def unigram_folder(tmp_path_factory):
    """Pieces of a SentencePiece model in the order of XLM-R, normalized as by that model."""
    folder = tmp_path_factory.mktemp("xlm")
    words = learning.count_words("sentencepiece", [*HARD, *make_corpus(60).split("\n")])
    learnt = learning.learn("sentencepiece", words, 120)
    scores = json.loads(learnt.to_huggingface())["model"]["vocab"]
    pieces = [(piece, score) for piece, score in scores if piece not in {learnt.pieces[i] for i in learnt.special_ids}]
    special = [(piece, 0.0) for piece in ("<s>", "<pad>", "</s>", "<unk>")]
    charsmap = sentencepiece_proto(learnt._model).normalizer_spec.precompiled_charsmap
    made = transformers.XLMRobertaTokenizer(vocab=[*special, *pieces], _spm_precompiled_charsmap=charsmap)
    made.save_pretrained(folder)
    return folder


def test_the_tokenizer_of_xlm_r_gives_the_same_ids(unigram_folder, tmp_path):
    ours, theirs = tokenizer_files.read(unigram_folder), transformers.AutoTokenizer.from_pretrained(unigram_folder)
    special = (theirs.pad_token_id, theirs.unk_token_id, theirs.cls_token_id, theirs.sep_token_id, theirs.mask_token_id)
    assert ours.kind == "unigram" and ours.special_ids == special and ours.between == (2, 2)
    rng = np.random.default_rng(0)
    texts = [text for text in HARD if "aaaa" not in text]  # equally good pieces of it are found in any order
    texts += ["the ship sailed", *("".join(map(chr, rng.integers(32, 0x2FFF, 40))) for _ in range(200))]
    for text, ids in zip(texts, ours.encode_ids(texts), strict=True):
        assert ours.encode(text).ids == ids == theirs(text, add_special_tokens=False).input_ids, text
    text = "the ship  sailed over"
    words = {text[start:end] for start, end in ours.encode(text).offsets}
    assert not any(word != word.strip() for word in words)
    starts = [not ours.continues_word[i] for i in ours.encode(text).ids]
    assert sum(starts) == 4 and ours.decode(ours.encode(text).ids) == "the ship sailed over"
    ours.save(tmp_path)
    assert tokenizer.load("unigram", tmp_path / "tokenizer.json").fingerprint == ours.fingerprint


def test_positions_are_counted_from_the_padding_of_the_tokenizer(unigram_folder):
    config = pretraining_config()
    config.tokenizer.update(kind="unigram", path=str(unigram_folder / "tokenizer.json"))
    size = tokenizer_files.read(unigram_folder).vocab_size
    config.model = model_fields("roberta", vocab_size=size)
    with pytest.raises(UserError, match=r"config.model.position_offset = 1: .* which is 1 in .*; set it to 2"):
        given_tokenizer(config)
    config.model.position_offset = 2
    assert given_tokenizer(config).vocab_size == size
    config.tokenizer.path = ""
    with pytest.raises(UserError, match=r"'unigram': is read, not learnt; name a tokenizer.json in tokenizer.path"):
        given_tokenizer(config)


# Folders without a tokenizer.json.


def fuzzed():
    rng = np.random.default_rng(0)
    texts = ["", " a  b ", *HARD, *("".join(map(chr, rng.integers(32, 0x2FFF, 40))) for _ in range(400))]
    return [text for text in texts if "aaaa" not in text]  # equally good pieces of it are found in any order


def check_older(folder, theirs, between: int):
    """The tokenizer of a folder gives the ids of theirs, and is read again from the file that a run keeps of it."""
    ours, texts = tokenizer_files.read(folder), fuzzed()
    named = [getattr(theirs, f"{name}_token_id") for name in ("pad", "unk", "cls", "sep", "mask")]
    assert ours.special_ids == tuple(named) and ours.vocab_size == len(theirs)
    for text, ids in zip(texts, ours.encode_ids(texts), strict=True):
        assert ids == theirs(text, add_special_tokens=False).input_ids, text
    first, second = (ours.encode(text).ids for text in ("the ship", "sailed"))
    assert ours.framed(first, second) == theirs("the ship", "sailed").input_ids and len(ours.between) == between
    ours.save(folder / "saved")
    assert tokenizer.load(ours.kind, folder / "saved/tokenizer.json").fingerprint == ours.fingerprint
    return ours


def test_roberta_is_read_from_vocabulary_and_merges(tmp_path):
    learner = tokenizers.ByteLevelBPETokenizer()
    learner.train_from_iterator(HARD * 3, vocab_size=500, special_tokens=["<s>", "<pad>", "</s>", "<unk>", "<mask>"])
    learner.save_model(str(tmp_path))
    ours = check_older(tmp_path, transformers.RobertaTokenizer.from_pretrained(tmp_path), between=2)
    assert ours.kind == "bpe" and not ours.begins_with_space and ours.encode("<s>").ids != [ours.cls_id]
    vocabulary = json.loads((tmp_path / "vocab.json").read_text())  # the published one has GPT-2's special piece, too
    (tmp_path / "vocab.json").write_text(json.dumps(vocabulary | {"<|endoftext|>": len(vocabulary)}))
    assert len(tokenizer_files.read(tmp_path).between) == 2
    (tmp_path / "tokenizer_config.json").write_text('{"add_prefix_space": true}')
    with pytest.raises(UserError, match=r"add_prefix_space is True, but .*vocab.json has False; make them agree"):
        tokenizer_files.read(tmp_path)


def test_gpt2_is_read_from_vocabulary_and_merges(tmp_path):
    learner = tokenizers.ByteLevelBPETokenizer()
    learner.train_from_iterator(HARD * 3, vocab_size=400, special_tokens=["<|endoftext|>"])
    learner.save_model(str(tmp_path))
    ours, theirs = tokenizer_files.read(tmp_path), transformers.GPT2Tokenizer.from_pretrained(tmp_path)
    texts = fuzzed()
    for text, ids in zip(texts, ours.encode_ids(texts), strict=True):
        assert ids == theirs(text).input_ids, text
    assert {*ours.special_ids} == {theirs.eos_token_id}


@pytest.mark.parametrize(
    "broken, message",
    [
        ({"merges.txt": None}, "no file '.*merges.txt'"),
        ({"merges.txt": "a b\n"}, "vocab.json and its merges.txt are no byte-level BPE"),
        ({"vocab.json": "{"}, "vocab.json and its merges.txt are no byte-level BPE"),
        ({"vocab.json": '{"a": 0, "<s>": 1, "</s>": 2}'}, "vocab.json lacks <pad>, <unk>, <mask>, which RoBERTa has"),
        ({"sentencepiece.bpe.model": "no", "vocab.json": None}, "sentencepiece.bpe.model is not a SentencePiece model"),
    ],
)
def test_older_files_that_are_damaged_are_named(broken, message, tmp_path):
    for name, content in ({"vocab.json": "{}", "merges.txt": "#version: 0.2\n"} | broken).items():
        if content is not None:
            (tmp_path / name).write_text(content)
    with pytest.raises(UserError, match=message) as error:
        tokenizer_files.read(tmp_path)
    assert "\n" not in str(error.value)


@pytest.fixture(scope="module")
def sentencepiece_model():
    """A model as fairseq learnt them: <unk>, <s> and </s> come first."""
    learnt = io.BytesIO()
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter([*HARD, *make_corpus(60).split("\n")]), model_writer=learnt, vocab_size=220,
        hard_vocab_limit=False, character_coverage=0.99, minloglevel=2,
    )  # fmt: skip
    return learnt.getvalue()


@pytest.mark.parametrize(
    "kind, stated",
    [
        ("XLMRoberta", {"config.json": '{"model_type": "xlm-roberta"}'}),
        ("Camembert", {"config.json": '{"model_type": "camembert"}'}),
        ("Camembert", {"tokenizer_config.json": '{"tokenizer_class": "CamembertTokenizer"}'}),
    ],
)
def test_xlm_r_and_camembert_are_read_from_a_sentencepiece_model(
    kind, stated, sentencepiece_model, tmp_path, monkeypatch
):
    # The module of the sentencepiece package that transformers reads a model with wants the newest protobuf.
    monkeypatch.setattr(runtime_version, "ValidateProtobufRuntimeVersion", lambda *_: None)
    (tmp_path / "sentencepiece.bpe.model").write_bytes(sentencepiece_model)
    for name, content in stated.items():
        (tmp_path / name).write_text(content)
    theirs = getattr(transformers, f"{kind}Tokenizer").from_pretrained(tmp_path)
    ours = check_older(tmp_path, theirs, between=2)
    assert ours.kind == "unigram" and ours.mask_id == ours.vocab_size - 1
    assert ours.pieces[:5] == (
        ["<s>NOTUSED", "<pad>", "</s>NOTUSED", "<unk>", "<unk>NOTUSED"]
        if kind == "Camembert"
        else ["<s>", "<pad>", "</s>", "<unk>", ours.pieces[4]]
    )


def test_a_model_of_merges_is_refused(tmp_path):
    learnt = io.BytesIO()
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(make_corpus(20).split("\n")), model_writer=learnt, vocab_size=60, model_type="bpe",
        minloglevel=2,
    )  # fmt: skip
    (tmp_path / "sentencepiece.bpe.model").write_bytes(learnt.getvalue())
    with pytest.raises(UserError, match="is a SentencePiece model of another type than unigram"):
        tokenizer_files.read(tmp_path)


def test_a_run_reads_older_files_and_keeps_a_tokenizer_json(sentencepiece_model, tmp_path):
    (tmp_path / "sentencepiece.bpe.model").write_bytes(sentencepiece_model)
    (tmp_path / "config.json").write_text('{"model_type": "xlm-roberta"}')
    size = tokenizer_files.read(tmp_path).vocab_size
    save_theirs(tmp_path, "xlm-roberta", "ForMaskedLM", vocab_size=size)
    config = pretraining_config()
    config.model = model_fields(**vars(dataclasses.replace(TINY, vocab_size=size, variant="xlm-roberta")))
    config.init_checkpoint = str(tmp_path)
    pretrained.adopt(config)
    assert config.tokenizer.kind == "unigram" and config.tokenizer.path == str(tmp_path / "sentencepiece.bpe.model")
    assert given_tokenizer(config).fingerprint == tokenizer_files.read(tmp_path).fingerprint
    conversion.convert(tmp_path, tmp_path / "back", "huggingface")
    again = transformers.AutoTokenizer.from_pretrained(tmp_path / "back")
    ours = tokenizer_files.read(tmp_path / "back")
    assert again("the ship").input_ids == ours.framed(ours.encode("the ship").ids)
