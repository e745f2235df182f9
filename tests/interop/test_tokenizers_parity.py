"""Tokenizers of all folder types compared with transformers: ids, offsets, special tokens, templates."""

import dataclasses
import functools
import io
import itertools
import json
import pathlib
import re

import flax.linen as nn
import jax
import numpy as np
import pytest
import sentencepiece
import tokenizers
from google.protobuf import runtime_version
from tokenizers import decoders, models, pre_tokenizers, processors, trainers

from bertjax import library
from bertjax.common.errors import UserError
from bertjax.config.defaults import pretraining_config
from bertjax.data.preprocessing.vocabulary import tokenizer_of_config
from bertjax.finetuning.encoding import encode_pairs
from bertjax.inference.fill_mask import fill_masks
from bertjax.interop import conversion, hf_tokenizer, huggingface, initialization, pretrained
from bertjax.models import families
from bertjax.models.heads import BertForMaskedLM
from bertjax.text import tokenizer, vocabulary_learning
from bertjax.text.tokenizer import SPECIAL_TOKENS, XLNET, WordPiece
from bertjax.text.tokenizers.byte_fallback import GEMMA
from bertjax.text.tokenizers.sentencepiece import read_proto as sentencepiece_proto
from bertjax.text.vocabulary_extension import extended
from tests.conftest import make_corpus
from tests.interop.test_families_parity import MODELS, save_theirs
from tests.text.test_tokenizer import HARD, gemma_json, mmbert_json, modernbert_json, of_mpnet

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")
pytestmark = pytest.mark.extra_packages

HALF_WIDTH = "ｶﾞ ﾊﾟ"
PROBE = [
    "  two  spaces\tand\na line ",
    "Straße GROSSE ẞ İstanbul ıI ñandú naïve Ångström ﬁnance",  # noqa: RUF001
    "ΑΣΟΦΟΣ ὀδός Привет, Ёлка й",
    "مُحَمَّد سلام שָׁלוֹם עולם",
    "नमस्ते दुनिया क़ สวัสดีครับ",
    "我们在北京。東京タワー ガギ 한국어 문장 각",
    HALF_WIDTH,
    "e\u0301 é o\u0308",
    "zero\u200bwidth soft\u00adhyphen nbsp\u00a0x \ufeffbom",
    "bell\x07 null\x00 \ufffd end",
    "x" * 101 + " " + "y" * 100,
    "don't (stop) re-use: a/b_c#d@e $5.00 50% «quoted» “curly” … \u2014 \u2013 ``He said'' 1,000 12345 it's\n\n done",
    "😀 👨\u200d👩\u200d👧 🇩🇪 ½ ² Ⅷ \uff11\uff12",
    "[MASK] [SEP] [CLS] [UNK] [PAD] [E1] ##ing UPPER lower MiXeD <s> the ship sailed",
]
CORPUS = make_corpus(40).split("\n")
NAMES = ("pad", "unk", "cls", "sep", "mask")
DEFINED = {f"{name}_token": f"[{name.upper()}]" for name in NAMES}


def from_folder(folder):
    return transformers.AutoTokenizer.from_pretrained(folder)


def write_settings(folder, kind: str, **settings) -> None:
    (folder / "config.json").write_text(json.dumps({"model_type": kind}))
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))


def written(folder, tokenizer, family: str = "bert"):
    """Writes a folder with a bertjax tokenizer."""
    config, ids = dataclasses.replace(MODELS[family][2], vocab_size=tokenizer.vocab_size), np.zeros((1, 8), np.int32)
    shapes = jax.eval_shape(BertForMaskedLM(config).init, jax.random.key(0), *[ids] * 4)["params"]
    params = jax.tree.map(lambda x: np.zeros(x.shape, np.float32), nn.meta.unbox(shapes))
    huggingface.write(folder, config, params, tokenizer)
    assert pretrained.read_tokenizer(folder).fingerprint == tokenizer.fingerprint
    return from_folder(folder)


def word_pieces(*special: str) -> list[str]:
    letters = {c for text in (*PROBE, *HARD) for c in text + text.lower() if not c.isspace()}
    letters = sorted(letters | set("abcdefghijklmnopqrstuvwxyz"))
    words = "straße strasse grosse don ##ing use".split()
    return list(dict.fromkeys([*special, *letters, *(f"##{c}" for c in letters), *words]))


def wordpiece(folder, form: str, lowercase: bool):
    their_tokenizer = written(folder, WordPiece(word_pieces(*SPECIAL_TOKENS), lowercase))
    settings = {
        "vocab.txt": {"do_lower_case": lowercase},
        "tokenizer.json": {"do_lower_case": lowercase, "tokenizer_class": "BertTokenizerFast"},
        "general class": {"tokenizer_class": "PreTrainedTokenizerFast", **DEFINED},
    }
    if form == "vocab.txt":
        (folder / "tokenizer.json").unlink()
    if form != "written":
        (folder / "tokenizer_config.json").write_text(json.dumps(settings[form]))
        their_tokenizer = from_folder(folder)
    return their_tokenizer


def mpnet(folder, form: str):
    made = of_mpnet(WordPiece(word_pieces(*SPECIAL_TOKENS), lowercase=True))
    if form == "written":
        return written(folder, made, "mpnet")
    pieces = [piece for piece in made.pieces if piece != "[UNK]" or form != "no [UNK]"]
    (folder / "vocab.txt").write_text("\n".join(pieces) + "\n")
    unknown = "[UNK]" if "[UNK]" in pieces else "<unk>"
    made = transformers.MPNetTokenizer(vocab=str(folder / "vocab.txt"), unk_token=unknown)
    if form == "vocab.txt":
        write_settings(folder, "mpnet", do_lower_case=True)
    else:
        made.save_pretrained(folder)
        (folder / "vocab.txt").unlink()
    return from_folder(folder)


def of_class(folder, name: str):
    pieces = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", "hello", "world", "##s", ",", "na", "##ive"]
    (folder / "vocab.txt").write_text("\n".join(pieces) + "\n")
    getattr(transformers, name)(vocab=str(folder / "vocab.txt")).save_pretrained(folder)
    return from_folder(folder)


def learnt(folder, kind: str, size: int, family: str = "bert", **more):
    lines = [*PROBE * 20, *CORPUS] if family == "bert" else CORPUS
    return written(
        folder,
        vocabulary_learning.learn_new_vocabulary(kind, vocabulary_learning.count_words(kind, lines), size, **more),
        family,
    )


def prefixed_bpe(folder):
    """A byte-level BPE with add_prefix_space, as GPT-2 allows."""
    made = tokenizers.Tokenizer(models.BPE())
    made.pre_tokenizer, made.decoder = pre_tokenizers.ByteLevel(add_prefix_space=True), decoders.ByteLevel()
    letters = pre_tokenizers.ByteLevel.alphabet()
    end = "<|endoftext|>"
    settings = dict(vocab_size=500, initial_alphabet=letters, special_tokens=[end], show_progress=False)
    made.train_from_iterator(PROBE, trainers.BpeTrainer(**settings))
    made.save(str(folder / "tokenizer.json"))
    write_settings(folder, "gpt2", tokenizer_class="PreTrainedTokenizerFast", eos_token=end)
    return from_folder(folder)


def modernbert(folder):
    (folder / "tokenizer.json").write_text(json.dumps(modernbert_json()))
    write_settings(folder, "modernbert", tokenizer_class="PreTrainedTokenizerFast", **DEFINED)
    return from_folder(folder)


def merges(folder, special: list[str]):
    """Writes a vocab.json and a merges.txt."""
    learner = tokenizers.ByteLevelBPETokenizer()
    learner.train_from_iterator(HARD * 3, vocab_size=500, special_tokens=special, show_progress=False)
    learner.save_model(str(folder))
    names = dict(vocab=str(folder / "vocab.json"), merges=str(folder / "merges.txt"))
    return names


ROBERTAS = ["<s>", "<pad>", "</s>", "<unk>", "<mask>"]


def roberta(folder):
    """A tokenizer.json as in the published folders."""
    names = merges(folder, ROBERTAS)
    mask = tokenizers.AddedToken("<mask>", lstrip=True, special=True)
    transformers.RobertaTokenizer(**names, mask_token=mask).save_pretrained(folder)
    for name in names.values():
        pathlib.Path(name).unlink(missing_ok=True)
    return from_folder(folder)


def older_roberta(folder):
    merges(folder, ROBERTAS)
    return transformers.RobertaTokenizer.from_pretrained(folder)


def older_gpt2(folder):
    merges(folder, ["<|endoftext|>"])
    return transformers.GPT2Tokenizer.from_pretrained(folder)


def xlm_r(folder):
    """The tokens of a SentencePiece model in the order of XLM-R, with the normalization of the model."""
    words = vocabulary_learning.count_words("sentencepiece", [*HARD, *CORPUS])
    learned = vocabulary_learning.learn_new_vocabulary("sentencepiece", words, 120)
    scores = json.loads(learned.to_huggingface())["model"]["vocab"]
    special = {learned.pieces[i] for i in learned.special_ids}
    pieces = [(piece, 0.0) for piece in ROBERTAS[:4]] + [
        tuple(piece_and_score) for piece_and_score in scores if piece_and_score[0] not in special
    ]
    charsmap = sentencepiece_proto(learned._model).normalizer_spec.precompiled_charsmap
    transformers.XLMRobertaTokenizer(vocab=pieces, _spm_precompiled_charsmap=charsmap).save_pretrained(folder)
    return from_folder(folder)


def of_type(folder, kind: str, name: str | None = None):
    """The tokenizer of XLM-R in a folder of another model type, with a tokenizer_class or without."""
    xlm_r(folder)
    settings = json.loads((folder / "tokenizer_config.json").read_text())
    settings = {field: x for field, x in settings.items() if field != "tokenizer_class"}
    write_settings(folder, kind, **settings, **({} if name is None else {"tokenizer_class": name}))
    their_tokenizer = from_folder(folder)
    assert type(their_tokenizer).__name__ == (name or "XLMRobertaTokenizer")
    return their_tokenizer


def sentencepiece_model(lines, vocab_size: int, **settings) -> bytes:
    model, settings_of_trainer = io.BytesIO(), dict(hard_vocab_limit=False, minloglevel=2, **settings)
    train = sentencepiece.SentencePieceTrainer.train
    train(sentence_iterator=iter(lines), model_writer=model, vocab_size=vocab_size, **settings_of_trainer)
    return model.getvalue()


def of_fairseq(folder, name: str, file: str, **stated):
    """A SentencePiece model in fairseq's order: <unk>, <s> and </s> come first."""
    model = sentencepiece_model([*HARD, *CORPUS], 220, character_coverage=0.99)
    (folder / "sentencepiece.bpe.model").write_bytes(model)
    (folder / file).write_text(json.dumps(stated))
    return getattr(transformers, name).from_pretrained(folder)


def xlnet(folder, lowercase: bool, is_written: bool):
    """A SentencePiece model with the special tokens of XLNet, in their order."""
    control = ["<cls>", "<sep>", "<pad>", "<mask>", "<eod>", "<eop>"]
    (folder / "spiece.model").write_bytes(sentencepiece_model([*HARD * 5, *CORPUS], 400, control_symbols=control))
    settings = dict(tokenizer_class="XLNetTokenizer", do_lower_case=lowercase)
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    their_tokenizer = transformers.XLNetTokenizer.from_pretrained(folder, do_lower_case=lowercase)
    if is_written:
        (folder / "spiece.model").unlink()
        their_tokenizer.save_pretrained(folder)
    return their_tokenizer


def deberta(folder, lowercase: bool, is_written: bool):
    """A SentencePiece model with the special tokens of DeBERTa-v3, in their order. [MASK] follows the model."""
    special = dict(pad_piece="[PAD]", bos_piece="[CLS]", eos_piece="[SEP]", unk_piece="[UNK]")
    ids = dict(pad_id=0, bos_id=1, eos_id=2, unk_id=3)
    (folder / "spm.model").write_bytes(sentencepiece_model([*HARD * 5, *CORPUS], 400, **special, **ids))
    write_settings(folder, "deberta-v2", do_lower_case=lowercase, vocab_type="spm")
    their_tokenizer = from_folder(folder)
    assert type(their_tokenizer) is transformers.DebertaV2Tokenizer
    if is_written:
        (folder / "spm.model").unlink()
        their_tokenizer.save_pretrained(folder)
    return their_tokenizer


def albert(folder, is_written: bool, **settings):
    """A SentencePiece model with the special tokens of ALBERT, in their order."""
    special = dict(pad_id=0, unk_id=1, bos_id=-1, eos_id=-1, control_symbols=["[CLS]", "[SEP]", "[MASK]"])
    lines = [*HARD * 5, *CORPUS, *map(str.lower, HARD * 5)]
    (folder / "spiece.model").write_bytes(sentencepiece_model(lines, 400, pad_piece="<pad>", **special))
    write_settings(folder, "albert", **settings)
    their_tokenizer = transformers.AlbertTokenizer.from_pretrained(folder)
    if is_written:
        (folder / "spiece.model").unlink()
        their_tokenizer.save_pretrained(folder)
    return from_folder(folder)


# The pre-tokenization of Llama 3, on which the tokenizer of EuroBERT is based.
WORDS = "|".join([
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)", r"[^\r\n\p{L}\p{N}]?\p{L}+", r"\p{N}{1,3}", r" ?[^\s\p{L}\p{N}]+[\r\n]*",
    r"\s*[\r\n]+", r"\s+(?!\S)", r"\s+",
])  # fmt: skip


def eurobert(folder):
    """A byte-level BPE in the format of EuroBERT, without an end token."""
    made = tokenizers.Tokenizer(models.BPE(ignore_merges=True))
    split = pre_tokenizers.Split(tokenizers.Regex(WORDS), "isolated")
    bytes_alone = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    made.pre_tokenizer, made.decoder = pre_tokenizers.Sequence([split, bytes_alone]), decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=500, initial_alphabet=alphabet, show_progress=False)
    made.train_from_iterator([*HARD * 3, *CORPUS], trainer)
    names = ["<|begin_of_text|>", "<|end_of_text|>", "<|mask|>", "<|parallel_sep|>", "<|pad|>"]
    made.add_special_tokens([tokenizers.AddedToken(name, lstrip=name == "<|mask|>") for name in names])
    begin = (names[0], made.token_to_id(names[0]))
    template = processors.TemplateProcessing(f"{begin[0]} $A", f"{begin[0]} $A {begin[0]}:1 $B:1", [begin])
    made.post_processor = processors.Sequence([processors.ByteLevel(trim_offsets=False), template])
    special = dict(zip(("bos_token", "eos_token", "mask_token"), names), pad_token="<|pad|>")
    transformers.PreTrainedTokenizerFast(tokenizer_object=made, **special).save_pretrained(folder)
    return from_folder(folder)


def mmbert(folder, content=mmbert_json, **settings):
    (folder / "tokenizer.json").write_text(json.dumps(content()))
    names = dict(zip((f"{name}_token" for name in (*NAMES, "bos", "eos")), (*GEMMA, "<bos>", "<eos>")))
    write_settings(folder, "modernbert", **{"tokenizer_class": "PreTrainedTokenizerFast", **names, **settings})
    return from_folder(folder)


OF_CONFIG = {"XLMRobertaTokenizer": "xlm-roberta", "CamembertTokenizer": "camembert"}
FOLDERS = {
    **{
        f"wordpiece {form} {lowercase}": functools.partial(wordpiece, form=form, lowercase=lowercase)
        for form in ("vocab.txt", "tokenizer.json", "general class", "written")
        for lowercase in (True, False)
    },
    "distilbert": functools.partial(of_class, name="DistilBertTokenizer"),
    "electra": functools.partial(of_class, name="ElectraTokenizer"),
    **{
        f"mpnet {form}": functools.partial(mpnet, form=form)
        for form in ("tokenizer.json", "vocab.txt", "written", "no [UNK]")
    },
    "bytes": lambda folder: written(folder, tokenizer.Bytes()),
    "learnt bpe": functools.partial(learnt, kind="bpe", size=400),
    "learnt sentencepiece": functools.partial(learnt, kind="sentencepiece", size=200),
    "learnt xlnet": functools.partial(learnt, kind="sentencepiece", size=80, family="xlnet", special=XLNET),
    "prefixed bpe": prefixed_bpe,
    "modernbert": modernbert,
    "eurobert": eurobert,
    "roberta": roberta,
    "older roberta": older_roberta,
    "older gpt2": older_gpt2,
    "xlm-roberta": xlm_r,
    "nomic-bert": lambda folder: written(folder, WordPiece(word_pieces(*SPECIAL_TOKENS), lowercase=True), "nomic-bert"),
    "gte": functools.partial(of_type, kind="gte"),
    "gte, general class": functools.partial(of_type, kind="gte", name="TokenizersBackend"),
    "jina-embeddings-v3": functools.partial(of_type, kind="jina_embeddings_v3"),
    **{
        f"older {kind}": functools.partial(of_fairseq, name=name, file="config.json", model_type=kind)
        for name, kind in OF_CONFIG.items()
    },
    "older camembert, by its class": functools.partial(
        of_fairseq, name="CamembertTokenizer", file="tokenizer_config.json", tokenizer_class="CamembertTokenizer"
    ),
    **{
        f"deberta {lowercase} {is_written}": functools.partial(deberta, lowercase=lowercase, is_written=is_written)
        for lowercase, is_written in ((True, True), (True, False), (False, False))
    },
    "deberta-v2": functools.partial(deberta, lowercase=False, is_written=True),
    **{
        f"xlnet {lowercase} {is_written}": functools.partial(xlnet, lowercase=lowercase, is_written=is_written)
        for lowercase in (True, False)
        for is_written in (True, False)
    },
    "mmbert": functools.partial(mmbert, extra_special_tokens=["<table>"]),
    "gemma": functools.partial(
        mmbert, content=gemma_json, tokenizer_class="GemmaTokenizer", add_bos_token=True, add_eos_token=True
    ),
    "albert": functools.partial(albert, is_written=True),
    "cased albert": functools.partial(albert, is_written=True, do_lower_case=False),
    "older albert": functools.partial(albert, is_written=False, tokenizer_class="AlbertTokenizer"),
    "older albert, cased": functools.partial(albert, is_written=False, do_lower_case=False),
}


@pytest.fixture(autouse=True)
def any_protobuf(monkeypatch):
    """The protobuf module that transformers uses for sentencepiece models requires the newest protobuf."""
    monkeypatch.setattr(runtime_version, "ValidateProtobufRuntimeVersion", lambda *_: None)


def texts_for(kind: str, name: str) -> list[str]:
    rng = np.random.default_rng(0)
    texts = [*HARD, *PROBE, *("".join(map(chr, rng.integers(32, 0x2FFF, 40))) for _ in range(200))]
    if kind == "sentencepiece":
        # The tokenizers library normalizes character by character, sentencepiece normalizes the whole text.
        texts = [text for text in (*PROBE, *CORPUS) if text != HALF_WIDTH]
    if kind == "unigram":
        # transformers encodes a special token of the model to its id
        texts = [re.sub(r"<s>|\[(MASK|SEP|CLS|UNK|PAD)\]", "", text) for text in texts]
        texts = [text for text in texts if "aaaa" not in text]  # the order of equally good segmentations is not defined
    return texts


@pytest.mark.parametrize("name", FOLDERS)
def test_ids_offsets_and_special_tokens_equal_transformers(name, tmp_path):
    their_tokenizer = FOLDERS[name](tmp_path)
    our_tokenizer = hf_tokenizer.read_folder_tokenizer(tmp_path)
    texts = texts_for(our_tokenizer.kind, name)
    plain = functools.partial(their_tokenizer, add_special_tokens=False, split_special_tokens=True)
    expected = plain(texts, return_offsets_mapping=True)
    encoded = [our_tokenizer.encode(text) for text in texts]
    assert [encoding.ids for encoding in encoded] == expected.input_ids == our_tokenizer.encode_ids(texts)
    if our_tokenizer.kind == "wordpiece":
        flat, sizes = our_tokenizer.encode_flat(texts)
        assert flat.tolist() == list(itertools.chain(*expected.input_ids))
        assert sizes.tolist() == list(map(len, expected.input_ids))
    if our_tokenizer.kind == "wordpiece" or name == "modernbert":
        # bertjax tokenizers have no spaces before words
        for text, encoding, offsets in zip(texts, encoded, expected.offset_mapping):
            begun = [start + len(text[start:end]) - len(text[start:end].lstrip(" ")) for start, end in offsets]
            assert encoding.offsets == [(start, end) for start, (_, end) in zip(begun, offsets)]
    special = {f"{part}_id": getattr(their_tokenizer, f"{part}_token_id") for part in NAMES}
    assert all(getattr(our_tokenizer, part) == number for part, number in special.items() if number is not None)
    assert our_tokenizer.vocab_size == len(their_tokenizer)
    names = " ".join({*SPECIAL_TOKENS, *XLNET, *ROBERTAS, *map(str, their_tokenizer.all_special_tokens)})
    for text in (names, names.replace(" ", "x"), "a\ud800 \udfffb"):  # names of special tokens are text
        assert not {our_tokenizer.pad_id, our_tokenizer.cls_id, our_tokenizer.sep_id, our_tokenizer.mask_id} & {
            *our_tokenizer.encode(text).ids
        }
        ids, sizes = our_tokenizer.encode_flat([text, "a"])
        assert our_tokenizer.encode_ids([text])[0] == our_tokenizer.encode(text).ids and [*sizes][1:] == [
            *our_tokenizer.encode_flat(["a"])[1]
        ]
    assert our_tokenizer.encode(text) == our_tokenizer.encode("a\ufffd \ufffdb")  # replaces lone surrogates
    our_tokenizer.save(tmp_path / "saved")
    file = tmp_path / "saved" / tokenizer.KINDS[our_tokenizer.kind].filename
    assert (
        tokenizer.load_tokenizer(our_tokenizer.kind, file, our_tokenizer.lowercase).fingerprint
        == our_tokenizer.fingerprint
    )
    if "[MASK]" in our_tokenizer.pieces:
        for masked in ("the [MASK] saw un[MASK] [MASK]. a", "[MASK] "):
            theirs = masked.replace("[MASK]", their_tokenizer.mask_token or "[MASK]")
            assert (
                our_tokenizer.encode_with_masks(masked) == their_tokenizer(theirs, add_special_tokens=False).input_ids
            )
    if name in ("prefixed bpe", "older gpt2"):  # the template of this tokenizer is empty
        return
    pairs = [(a, b) for a, b in zip(texts, texts[::-1]) if a and b]
    longest = int(np.median([len(their_tokenizer(a, b, split_special_tokens=True).input_ids) for a, b in pairs]))
    ids_of_pairs, types, cut = encode_pairs(our_tokenizer, *map(list, zip(*pairs)), longest)
    for (a, b), ids, kinds, is_cut in zip(pairs, ids_of_pairs, types, cut, strict=True):
        pair = their_tokenizer(a, b, split_special_tokens=True)
        if not is_cut:
            assert ids.tolist() == pair.input_ids
            assert "token_type_ids" not in pair or kinds.tolist() == pair.token_type_ids
        assert len(ids) <= longest
    assert any(cut) and not all(cut)
    ids, kinds, _ = encode_pairs(our_tokenizer, texts[:1], None, 500)
    alone = their_tokenizer(texts[0], return_token_type_ids=True)
    assert ids[0].tolist() == alone.input_ids and (kinds[0] == alone.token_type_ids).all()


MODEL_OF = {"mmbert": "modernbert"}  # {tokenizer: the model of the folder}, where the names differ


@pytest.mark.parametrize("settings, message", [
    (dict(add_bos_token=True), "add_eos_token is False by default, but .*tokenizer.json has True; use equal values"),
    (dict(add_bos_token=False, add_eos_token=False), "add_bos_token is False, but .*tokenizer.json has True"),
    (dict(cls_token="<eos>"), "cls_token '<eos>' is not supported; supported: '<bos>'"),
])  # fmt: skip
def test_settings_that_change_the_template_are_refused(settings, message, tmp_path):
    mmbert(tmp_path, **settings)
    with pytest.raises(UserError, match=message):
        hf_tokenizer.read_folder_tokenizer(tmp_path)


SENTENCES = [
    "London saw Paris, the whale (a ship) sailed to London-Vienna.",
    "it's 3.14! don't; caf\u00e9 e\u0301 \U0001f600\U0001f600x \ufb01ne",
    "  two  spaces\tand\na line\u00a0nbsp",
    "我们在北京。東京 タワー สวัสดีครับ",
]


@pytest.mark.slow
@pytest.mark.parametrize("name", [
    "modernbert", "mmbert", "roberta", "xlm-roberta", "eurobert", "deberta-v2", "nomic-bert", "gte",
    "jina-embeddings-v3",
])  # fmt: skip
def test_tagged_words_equal_the_pipeline_of_transformers(name, tmp_path):
    """Compares a transformers folder, and the folder after a conversion round trip."""
    pieces = FOLDERS[name](tmp_path)
    labels = {0: "O", 1: "B-X", 2: "I-X", 3: "B-Y"}
    ids = dict(id2label=labels, label2id={label: i for i, label in labels.items()}, max_position_embeddings=300)
    save_theirs(tmp_path, MODEL_OF.get(name, name), "ForTokenClassification", vocab_size=len(pieces), **ids)
    pieces.save_pretrained(tmp_path)
    for number, to in enumerate(("bertjax", "huggingface")):
        conversion.convert(tmp_path / str(number - 1) if number else tmp_path, tmp_path / str(number), to)
    for folder in (tmp_path, tmp_path / "1"):
        predictions = library.load(folder, dtype="float32").tag(SENTENCES)
        pipeline = transformers.pipeline("token-classification", str(folder), ignore_labels=[])
        for text, prediction, entities in zip(SENTENCES, predictions, pipeline(SENTENCES), strict=True):
            tags = {}
            for token in entities:
                piece = text[token["start"] : token["end"]]
                if piece.strip() and token["word"] not in ("\u2581", "\u0120"):
                    tags.setdefault(token["end"] - len(piece.lstrip()), token["entity"])
            assert len(prediction["words"]) == len(prediction["tags"]) > 3
            before = ""
            for tag, (start, _) in zip(prediction["tags"], prediction["offsets"]):
                assert tag == tags.get(start, before.replace("B-X", "I-X")), (text, start)
                before = tag


@pytest.mark.parametrize(
    "name, mask",
    [
        ("roberta", "<mask>"),
        ("mmbert", "<mask>"),
        ("eurobert", "<|mask|>"),
        ("deberta-v2", "[MASK]"),
        ("nomic-bert", "[MASK]"),
        ("gte", "<mask>"),
        ("jina-embeddings-v3", "<mask>"),
    ],
)
def test_filled_masks_equal_transformers_and_the_folder_round_trips(name, mask, tmp_path):
    before = FOLDERS[name](tmp_path)
    save_theirs(tmp_path, MODEL_OF.get(name, name), "ForMaskedLM", vocab_size=len(before))
    for source, target, form in ((".", "ours", "bertjax"), ("ours", "back", "huggingface")):
        conversion.convert(tmp_path / source, tmp_path / target, form)
    after, model = from_folder(tmp_path / "back"), transformers.AutoModelForMaskedLM.from_pretrained(tmp_path / "back")
    assert before(HARD[0], HARD[1]).input_ids == after(HARD[0], HARD[1]).input_ids
    source = pretrained.read_with_tokenizer(tmp_path / "ours")
    pieces = source.tokenizer
    ids = dict(pad_token_id=pieces.pad_id)
    ids |= {} if name == "nomic-bert" else dict(bos_token_id=pieces.cls_id, eos_token_id=pieces.sep_id)
    ids |= dict(mask_token_id=pieces.mask_id) if name == "eurobert" else {}
    assert ids.items() <= model.config.to_dict().items()
    inputs = after(f"The ship {mask} sailed", return_tensors="pt")
    place = inputs.input_ids[0].tolist().index(pieces.mask_id)
    with torch.no_grad():
        expected = model.eval()(**inputs).logits[0, place].softmax(-1).topk(3).values
    lm, texts = BertForMaskedLM(source.config), ["The ship [MASK] sailed"]
    (filled,) = fill_masks(lm, source.params, pieces, texts, top_k=3)
    np.testing.assert_allclose([probability for _, probability in filled.masks[0]], expected, rtol=1e-4)


def test_positions_are_counted_from_the_padding_of_the_tokenizer(tmp_path):
    xlm_r(tmp_path)
    config, size = pretraining_config(), hf_tokenizer.read_folder_tokenizer(tmp_path).vocab_size
    config.tokenizer.update(kind="unigram", path=str(tmp_path / "tokenizer.json"))
    config.model = families.model_fields("roberta", vocab_size=size)
    with pytest.raises(UserError, match=r"config.model.position_offset = 1: must be 2, .* padding token of .*, 1"):
        tokenizer_of_config(config)
    config.model.position_offset = 2
    assert tokenizer_of_config(config).vocab_size == size
    config.tokenizer.path = ""
    with pytest.raises(
        UserError, match=r"'unigram': bertjax cannot learn this kind; set tokenizer.path to a tokenizer.json"
    ):
        tokenizer_of_config(config)


def test_added_tokens_follow_the_special_tokens(tmp_path):
    mask_id = eurobert(tmp_path).mask_token_id
    our_tokenizer = hf_tokenizer.read_folder_tokenizer(tmp_path)
    larger = extended(our_tokenizer, {"shiphull": 9, "hullship": 7}, 5)
    assert (
        larger.pieces[: our_tokenizer.vocab_size] == our_tokenizer.pieces
        and larger.special_ids == our_tokenizer.special_ids
    )
    larger.save(tmp_path)
    their_tokenizer = transformers.PreTrainedTokenizerFast(tokenizer_file=str(tmp_path / "tokenizer.json"))
    for text in ("a shiphull <|mask|>", *HARD):
        assert (
            larger.encode(text).ids
            == their_tokenizer(text, add_special_tokens=False, split_special_tokens=True).input_ids
        )
    assert max(larger.encode("a shiphull").ids) >= our_tokenizer.vocab_size
    assert their_tokenizer.convert_tokens_to_ids("<|mask|>") == mask_id == our_tokenizer.mask_id


@pytest.mark.parametrize(
    "files, message",
    [
        ({"merges.txt": None}, "no such file '.*merges.txt'"),
        ({"merges.txt": "a b\n"}, "vocab.json and its merges.txt are no byte-level BPE"),
        ({"vocab.json": "{"}, "vocab.json and its merges.txt are no byte-level BPE"),
        ({"vocab.json": '{"a": 0, "<s>": 1, "</s>": 2}'}, "vocab.json lacks <pad>, <unk>, <mask>, which RoBERTa needs"),
        ({"sentencepiece.bpe.model": "no", "vocab.json": None}, "sentencepiece.bpe.model is not a SentencePiece model"),
        (dict(model_type="bpe"), "is a SentencePiece model of another type than unigram"),
        (dict(model_type="unigram"), "lacks <pad>, <cls>, <sep>, <mask>, which XLNet needs"),
        ({"spm.model": None}, r"lacks \[PAD\], \[UNK\], \[CLS\], \[SEP\], which DeBERTa-v2 needs"),
    ],
)
def test_unreadable_legacy_files_are_named(files, message, tmp_path):
    if "model_type" in files:
        name = "sentencepiece.bpe.model" if files["model_type"] == "bpe" else "spiece.model"
        (tmp_path / name).write_bytes(sentencepiece_model(CORPUS, 60, **files))
        files = dict.fromkeys(("vocab.json", "merges.txt"))
    if "spm.model" in files:
        (tmp_path / "spm.model").write_bytes(sentencepiece_model(CORPUS, 60))
        files = dict.fromkeys(("spm.model", "vocab.json", "merges.txt"))
    for name, content in ({"vocab.json": "{}", "merges.txt": "#version: 0.2\n"} | files).items():
        if content is not None:
            (tmp_path / name).write_text(content)
    with pytest.raises(UserError, match=message) as error:
        hf_tokenizer.read_folder_tokenizer(tmp_path)
    assert "\n" not in str(error.value)


def test_a_run_reads_legacy_files_and_stores_a_tokenizer_json(tmp_path):
    FOLDERS["older xlm-roberta"](tmp_path)
    size = hf_tokenizer.read_folder_tokenizer(tmp_path).vocab_size
    save_theirs(tmp_path, "xlm-roberta", "ForMaskedLM", vocab_size=size)
    config = pretraining_config()
    config.model = families.model_fields(**vars(dataclasses.replace(MODELS["xlm-roberta"][2], vocab_size=size)))
    config.init_checkpoint = str(tmp_path)
    initialization.adopt(config)
    assert config.tokenizer.kind == "unigram" and config.tokenizer.path == str(tmp_path / "sentencepiece.bpe.model")
    assert tokenizer_of_config(config).fingerprint == hf_tokenizer.read_folder_tokenizer(tmp_path).fingerprint
    conversion.convert(tmp_path, tmp_path / "back", "huggingface")
    our_tokenizer = hf_tokenizer.read_folder_tokenizer(tmp_path / "back")
    assert from_folder(tmp_path / "back")("the ship").input_ids == our_tokenizer.framed(
        our_tokenizer.encode("the ship").ids
    )


@pytest.mark.parametrize("name, other", [("mpnet tokenizer.json", "BertTokenizer"), ("distilbert", "MPNetTokenizer")])
def test_a_class_with_other_special_tokens_than_the_vocabulary_is_refused(name, other, tmp_path):
    FOLDERS[name](tmp_path)
    settings = json.loads((tmp_path / "tokenizer_config.json").read_text())
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(settings | {"tokenizer_class": other}))
    with pytest.raises(UserError, match=f"{other} has other special tokens than .*; set tokenizer_class to '.*Token"):
        hf_tokenizer.read_folder_tokenizer(tmp_path)
