"""EuroBERT beside transformers': hidden states, logits and gradients, every class, its tokenizer, and back."""

import jax
import numpy as np
import pytest
import tokenizers
from tokenizers import decoders, models, pre_tokenizers, processors, trainers

from bertjax.families.eurobert import FAMILY
from bertjax.families.eurobert.huggingface import to_tensors
from bertjax.families.eurobert.model import EuroBertModel
from bertjax.families.with_heads import BertForMaskedLM
from bertjax.interop import conversion, huggingface, pretrained, tokenizer_files
from bertjax.tasks.fill_mask import fill_masks
from bertjax.tasks.pairs import encode_pairs
from bertjax.text.extension import extended
from tests.conftest import make_corpus
from tests.interop.test_modernbert_parity import MODELS
from tests.text.test_tokenizer import HARD

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
    model.set_attn_implementation("eager")  # the only one that returns its attention
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
        theirs(**given, output_hidden_states=True, output_attentions=True),
        inside[..., None],
        np.tile(np.arange(length), (2, 1)),
    )
    states = EuroBertModel(source.config).apply(
        {"params": source.params["bert"]}, ids, inside, types, every_layer=True, method="encode"
    )
    for ours, hidden in zip(states, expected.hidden_states, strict=True):
        np.testing.assert_allclose(ours * real, hidden.detach().numpy() * real, atol=1e-4)

    attention = FAMILY.attention(source.config, source.params["bert"], ids[:1], inside[:1], types[:1])
    for ours, shares in zip(attention, expected.attentions, strict=True):
        np.testing.assert_allclose(ours, shares[0].detach().numpy(), atol=1e-4)

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


@pytest.mark.parametrize(
    "head, pooling",
    [
        *(("ForSequenceClassification", pooling) for pooling in ("bos", "mean", "late")),
        *((head, "late") for head in ("ForTokenClassification", "ForMaskedLM", "Model")),
    ],
)
def test_every_class_is_read_and_written(head, pooling, tmp_path):
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


# How Llama 3's tokenizer, which EuroBERT's is made of, divides a text.
WORDS = "|".join([
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)", r"[^\r\n\p{L}\p{N}]?\p{L}+", r"\p{N}{1,3}", r" ?[^\s\p{L}\p{N}]+[\r\n]*",
    r"\s*[\r\n]+", r"\s+(?!\S)", r"\s+",
])  # fmt: skip


@pytest.fixture(scope="module")
def tokenizer_folder(tmp_path_factory):
    """A byte-level BPE of EuroBERT's form, learnt from hard text, as transformers writes it: no piece ends a text."""
    made = tokenizers.Tokenizer(models.BPE(ignore_merges=True))
    split = pre_tokenizers.Split(tokenizers.Regex(WORDS), "isolated")
    bytes_alone = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    made.pre_tokenizer, made.decoder = pre_tokenizers.Sequence([split, bytes_alone]), decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    text = [*(sample for sample in HARD for _ in range(3)), *make_corpus(40).split("\n")]
    made.train_from_iterator(text, trainers.BpeTrainer(vocab_size=500, initial_alphabet=alphabet, show_progress=False))
    names = ["<|begin_of_text|>", "<|end_of_text|>", "<|mask|>", "<|parallel_sep|>", "<|pad|>"]
    made.add_special_tokens([tokenizers.AddedToken(name, lstrip=name == "<|mask|>") for name in names])
    begin = ("<|begin_of_text|>", made.token_to_id("<|begin_of_text|>"))
    template = processors.TemplateProcessing(
        single=f"{begin[0]} $A", pair=f"{begin[0]} $A {begin[0]}:1 $B:1", special_tokens=[begin]
    )
    made.post_processor = processors.Sequence([processors.ByteLevel(trim_offsets=False), template])
    folder = tmp_path_factory.mktemp("eurobert")
    special = dict(zip(("bos_token", "eos_token", "mask_token"), names), pad_token="<|pad|>")
    transformers.PreTrainedTokenizerFast(tokenizer_object=made, **special).save_pretrained(folder)
    return folder


def test_the_tokenizer_gives_the_same_ids(tokenizer_folder):
    ours, theirs = tokenizer_files.read(tokenizer_folder), transformers.AutoTokenizer.from_pretrained(tokenizer_folder)
    special = (theirs.pad_token_id, theirs.eos_token_id, theirs.bos_token_id, theirs.eos_token_id, theirs.mask_token_id)
    assert ours.special_ids == special and len({*special}) == 4
    rng = np.random.default_rng(0)
    texts = [
        *HARD,
        "In 12345 days,  it's\n\n done",
        *("".join(map(chr, rng.integers(32, 0x2FFF, 40))) for _ in range(300)),
    ]
    for text in texts:
        assert ours.encode(text).ids == theirs(text, add_special_tokens=False).input_ids, text
    pairs = [(a, b) for a, b in zip(texts, texts[::-1]) if a and b]
    ids, _, cut = encode_pairs(ours, [a for a, _ in pairs], [b for _, b in pairs], 200)
    for (a, b), found, is_cut in zip(pairs, ids, cut):
        assert is_cut or found.tolist() == theirs(a, b).input_ids
    assert any(cut) and not all(cut) and max(map(len, ids)) == 200
    assert encode_pairs(ours, texts[:1], None, 500)[0][0].tolist() == theirs(texts[0]).input_ids


def test_more_pieces_come_after_the_special_ones(tokenizer_folder, tmp_path):
    ours, words = tokenizer_files.read(tokenizer_folder), {"shiphull": 9, "hullship": 7}
    larger = extended(ours, words, 5)
    assert larger.pieces[: ours.vocab_size] == ours.pieces and larger.special_ids == ours.special_ids
    larger.save(tmp_path)
    theirs = transformers.PreTrainedTokenizerFast(tokenizer_file=str(tmp_path / "tokenizer.json"))
    for text in ("a shiphull <|mask|>", *HARD):
        assert larger.encode(text).ids == theirs(text, add_special_tokens=False, split_special_tokens=True).input_ids
    assert max(larger.encode("a shiphull").ids) >= ours.vocab_size
    assert theirs.convert_tokens_to_ids("<|mask|>") == ours.mask_id


def test_masks_are_filled_as_by_transformers_and_the_folder_comes_back(tokenizer_folder, tmp_path):
    save_theirs(tokenizer_folder, "ForMaskedLM", vocab_size=tokenizer_files.read(tokenizer_folder).vocab_size)
    source = pretrained.read_with_tokenizer(tokenizer_folder)
    huggingface.write(tmp_path, source.config, source.params, source.tokenizer)
    again = transformers.AutoTokenizer.from_pretrained(tmp_path)
    model = transformers.EuroBertForMaskedLM.from_pretrained(tmp_path)
    assert model.config.mask_token_id == again.mask_token_id == source.tokenizer.mask_id
    assert model.config.bos_token_id == source.tokenizer.cls_id and model.config.tie_word_embeddings is False
    given = again("The ship <|mask|> sailed", return_tensors="pt")
    place = given.input_ids[0].tolist().index(again.mask_token_id)
    expected = model.eval()(**given).logits[0, place].softmax(-1).topk(3).values.detach()
    (filled,) = fill_masks(
        BertForMaskedLM(source.config), source.params, source.tokenizer, ["The ship [MASK] sailed"], top_k=3
    )
    np.testing.assert_allclose([probability for _, probability in filled.masks[0]], expected, rtol=1e-4)
