"""All tokenizer types compared with the wrapped libraries and with Google's rules; words of raw text."""

import io
import itertools
import json
import pathlib
import re
import unicodedata

import numpy as np
import pytest
import sentencepiece
from tokenizers import AddedToken, decoders, models, normalizers, pre_tokenizers, processors, trainers
from tokenizers import Tokenizer as HuggingFaceTokenizer

from bertjax.common.errors import UserError
from bertjax.text import tokenizer, vocabulary_learning
from bertjax.text.words import split_words
from tests.conftest import make_corpus

SIZE = {"wordpiece": 120, "sentencepiece": 80, "bpe": 350}  # vocabulary size that the made-up corpus allows

HARD = [
    "UNaffable Café RÉSUMÉ naïve",
    "ah\u535a\u63a8zz 中文字 中a文",
    "tab\tnew\nline\r\n\u00a0nbsp\u3000wide\u200bzero",
    "control\x00\x01\x1fchars\ufffd\ufeff",
    "emoji 😀 👩‍👩‍👧 flags 🇩🇪",
    "a" * 200 + " " + "b" * 100 + " " + "c" * 101,
    "[MASK] [SEP] [CLS] is what somebody typed",
    "don't stop-me (now)... 3.14",
    "e\u0301 combining, ﬁ ligature, İstanbul ǅ",
    "",
    "   ",
]


def learn(kind: str, texts: list[str], size: int, lowercase: bool = True) -> tokenizer.Tokenizer:
    return vocabulary_learning.learn_new_vocabulary(
        kind, vocabulary_learning.count_words(kind, texts, lowercase), size, lowercase
    )


@pytest.fixture(scope="module", params=SIZE)
def learnt(request):
    """A vocabulary of each type, trained on the made-up corpus."""
    learnt = learn(request.param, make_corpus(60).split("\n"), SIZE[request.param])
    learnt.kind = request.param
    return learnt


@pytest.mark.parametrize("text, cased, uncased", [
    ("UNaffable Café", "[UNK] [UNK]", "un ##aff ##able cafe"),
    ("naïve Cafe\u0301s café", "na ##ï ##ve [UNK] café", "na ##ive cafe ##s cafe"),
    ("中文na a中", "中 文 na a 中", "中 文 na a 中"),
    ("na\t \u00a0\u3000a\u200ba\x00\ufffda", "na a ##a ##a", "na a ##a ##a"),
    ("[MASK] don't", "[ [UNK] ] don ' [UNK]", "[ mask ] don ' [UNK]"),
    ("a" * 100 + " " + "a" * 101, "a" + 99 * " ##a" + " [UNK]", "a" + 99 * " ##a" + " [UNK]"),
    ("ÀA Ångström", "À ##A [UNK]", "a ##a [UNK]"),
])  # fmt: skip
def test_wordpiece_equals_googles_rules(text, cased, uncased):
    """Cleaning, words, accents, and the longest tokens of a word."""
    words = "un ##aff ##able cafe café na ##ï ##ve ##ive ##s 中 文 a ##a [ ] ' don mask À ##A"
    for lowercase, expected in ((False, cased), (True, uncased)):
        wordpiece = tokenizer.WordPiece([*tokenizer.SPECIAL_TOKENS, *words.split()], lowercase)
        assert [wordpiece.pieces[i] for i in wordpiece.encode(text).ids] == expected.split()
        assert wordpiece.encode_ids([text])[0] == wordpiece.encode(text).ids


@pytest.mark.parametrize("remembered", [3, 1_000_000])
@pytest.mark.parametrize("kind", SIZE)
def test_batch_encoding_equals_single_encoding(kind, remembered, monkeypatch):
    """Texts have characters that normalization removes, splits or changes; the second encoding uses cached words."""
    monkeypatch.setattr("bertjax.text.tokenizers.wordpiece.MAX_KNOWN_WORDS", remembered)
    learnt = learn(kind, make_corpus(60).split("\n"), SIZE[kind])
    rng = np.random.default_rng(0)
    letters = list(
        "abcdehort      .,-Σ\u00c4\u00e9\u0301\u0327\t\x00\x85\xa0\u200b\u2028\u3000\u4e00\uac00\ufb01\ufffd\U0001f600"
    )
    texts = [*HARD, "", " ", *("".join(rng.choice(letters, rng.integers(40))) for _ in range(500))]
    expected = learnt.encode_ids(texts)
    for _ in range(2):
        ids, sizes = learnt.encode_flat(texts)
        assert sizes.tolist() == [len(encoded_ids) for encoded_ids in expected]
        assert ids.tolist() == [i for encoded_ids in expected for i in encoded_ids]
    assert learnt.encode_flat([])[0].size == 0


@pytest.mark.parametrize("text", [*HARD, "a [MASK] b", "  two  spaces "])
def test_byte_ids_are_utf8_bytes(text, tmp_path):
    """Each text begins with a space."""
    pieces = tokenizer.Bytes()
    encoding = pieces.encode(text)
    whole = (" " * (not text.startswith(" ")) + text) if text else ""
    assert len(encoding.ids) == len(whole.encode()) and pieces.vocab_size == 261
    assert all(i >= len(tokenizer.SPECIAL_TOKENS) for i in encoding.ids)
    assert pieces.decode(encoding.ids) == whole.removeprefix(" ")
    assert pieces.encode_ids([text, "x"])[0] == encoding.ids
    assert all(0 <= start <= end <= len(text) for start, end in encoding.offsets)
    pieces.save(tmp_path)
    assert tokenizer.load_tokenizer("bytes", tmp_path / "bytes.txt").fingerprint == pieces.fingerprint


def test_byte_level_words_start_with_a_space():
    pieces = tokenizer.Bytes()
    ids = pieces.encode("one two").ids
    assert pieces.continues_word[ids].tolist() == [False, True, True, True] * 2
    assert not pieces.continues_word[: len(tokenizer.SPECIAL_TOKENS)].any()


def test_offsets_point_at_the_characters_of_tokens(learnt):
    text = "The  ship, the Whale\tand an apple"
    encoding = learnt.encode(text)
    for i, (start, end) in zip(encoding.ids, encoding.offsets):
        piece = learnt.pieces[i].removeprefix("##").removeprefix("\u2581").removeprefix("\u0120").replace("\u0109", "")
        if piece and i != learnt.unk_id:
            assert text[start:end].strip().lower() == piece
    covered = "".join(text[a:b] for a, b in encoding.offsets)
    assert covered.replace(" ", "").replace("\t", "") == text.replace(" ", "").replace("\t", "")
    # Every token without a continuation mark begins a word.
    encoding = learnt.encode(text := "shipwreck captains ovens")
    starts = np.array(encoding.offsets)[~learnt.continues_word[encoding.ids]][:, 0]
    assert len(starts) == 3 and all(text[start:].lstrip().split()[0] in text.split() for start in starts)


def test_a_trained_vocabulary_is_deterministic_and_round_trips(learnt, tmp_path):
    again = learn(learnt.kind, make_corpus(60).split("\n"), SIZE[learnt.kind])
    assert again.pieces == learnt.pieces and learnt.vocab_size == SIZE[learnt.kind]
    learnt.save(tmp_path)
    loaded = tokenizer.load_tokenizer(learnt.kind, tmp_path / learnt.filename)
    text = "the captain found the onion near the [MASK]"
    assert loaded.fingerprint == learnt.fingerprint
    assert loaded.encode(text) == learnt.encode(text)
    assert loaded.decode(loaded.encode("the captain found the onion").ids) == "the captain found the onion"


def test_special_tokens_are_never_encoded_from_text(learnt):
    special = {learnt.pad_id, learnt.cls_id, learnt.sep_id, learnt.mask_id}
    assert not special & set(learnt.encode("[CLS] the [MASK] ship [SEP] [PAD]").ids)
    masked = learnt.encode_with_masks("the [MASK] saw the [MASK].")
    assert masked.count(learnt.mask_id) == 2
    assert "[MASK]" in learnt.decode(masked)


def test_tokenizer_files_cannot_encode_special_tokens_from_text(tmp_path):
    """Special tokens as non-special tokens of a tokenizer.json, as non-special added tokens, and as user-defined tokens
    of a model.
    """
    vocabulary = [*tokenizer.XLNET, "\u2581", *"ab<>"]
    made = HuggingFaceTokenizer(models.Unigram([(piece, -1.0) for piece in vocabulary], unk_id=1))
    made.pre_tokenizer, made.decoder = pre_tokenizers.Metaspace(), decoders.Metaspace()
    made.add_tokens([AddedToken(piece, special=False) for piece in tokenizer.XLNET])
    made.save(str(tmp_path / "tokenizer.json"))
    content = modernbert_json()
    for token in content["added_tokens"]:
        token["special"] = False
    content["model"]["ignore_merges"] = True  # "[SEP]" is a token of the model if no step divides it
    content["pre_tokenizer"]["use_regex"] = False
    (tmp_path / "bpe.json").write_text(json.dumps(content))
    user_defined = dict(
        user_defined_symbols=["[CLS]", "[SEP]", "[MASK]"], pad_id=3, pad_piece="[PAD]", unk_piece="[UNK]"
    )
    model = io.BytesIO()
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(make_corpus(20).split("\n")),
        model_writer=model,
        vocab_size=40,
        minloglevel=2,
        **user_defined,
    )
    (tmp_path / "tokenizer.model").write_bytes(model.getvalue())
    for kind, name in (("unigram", "tokenizer.json"), ("bpe", "bpe.json"), ("sentencepiece", "tokenizer.model")):
        pieces = tokenizer.load_tokenizer(kind, tmp_path / name)
        special = [pieces.pieces[i] for i in pieces.special_ids]
        for text in ("".join(special), " a ".join(special)):
            ids = pieces.encode(text).ids
            assert not {*pieces.special_ids[::2], pieces.sep_id} & {*ids} and pieces.encode_ids([text]) == [ids], kind
        assert pieces.decode([pieces.cls_id, *pieces.encode("ab").ids]).replace(" ", "") == special[2] + "ab"


def vocabulary_of(made: HuggingFaceTokenizer, texts, trainer, **options) -> dict[str, int]:
    """Returns the vocabulary that the library trains."""
    made.train_from_iterator(texts, trainer(min_frequency=2, show_progress=False, **options))
    return made.get_vocab()


@pytest.mark.parametrize("lowercase", [True, False])
def test_wordpiece_training_from_counts_equals_the_library(lowercase):
    texts = [*make_corpus(60).split("\n"), *HARD, *HARD]
    learnt = learn("wordpiece", texts, 350, lowercase)
    letters = learnt.pieces[5 : next(i for i, piece in enumerate(learnt.pieces) if piece.startswith("##"))]
    inside = [piece for piece in learnt.pieces if piece.startswith("##") and len(piece) == 3]
    reference = HuggingFaceTokenizer(models.WordPiece({"[UNK]": 0}, unk_token="[UNK]"))
    reference.normalizer = normalizers.BertNormalizer(strip_accents=lowercase, lowercase=lowercase)
    reference.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    halves = [re.sub(r"\S{100}", r"\g<0> ", text) for text in texts]  # splits words that are too long
    special = [*tokenizer.SPECIAL_TOKENS, *letters, *inside]
    expected = vocabulary_of(
        reference, halves, trainers.WordPieceTrainer, vocab_size=350, special_tokens=special,
        limit_alphabet=len(letters), initial_alphabet=letters,
    )  # fmt: skip
    assert len(letters) > 40
    assert expected == {piece: i for i, piece in enumerate(learnt.pieces)}


def test_training_on_an_endless_word_ends():
    texts = ["the ship sails", "x" * 1_000_000]  # takes many minutes if the trainer gets the whole word
    learnt = learn("wordpiece", texts * 2, 31)
    assert max(map(len, learnt.pieces)) <= 102


def test_chinese_vocabularies_have_all_characters():
    letters = [chr(0x4E00 + i) for i in range(2000)]
    texts = ["".join(letters[i : i + 50]) for i in range(0, 2000, 25)]
    learnt = learn("wordpiece", texts * 2, 2004)  # all except the last 0.05 %
    assert len(set(letters) & set(learnt.pieces)) == 1999
    with pytest.raises(
        UserError, match=r"gives 2004 tokens; set --config.model.vocab_size=2004 or more: the single characters need"
    ):
        learn("wordpiece", texts * 2, 1000)


def test_sentencepiece_training_accepts_long_lines():
    texts = ["the captain found the onion near the harbour " * 500] * 20
    learnt = learn("sentencepiece", texts, 24)
    assert learnt.decode(learnt.encode("captain onion").ids) == "captain onion"


def test_bpe_training_equals_the_library():
    """The order of the words does not matter; the vocabulary encodes and decodes any Unicode text."""
    texts = [*make_corpus(60).split("\n"), *HARD, *HARD]
    words = vocabulary_learning.count_words("bpe", texts)
    learnt = vocabulary_learning.learn_new_vocabulary("bpe", dict(reversed(list(words.items()))), 400, lowercase=False)
    assert (
        learnt.fingerprint == vocabulary_learning.learn_new_vocabulary("bpe", words, 400, lowercase=False).fingerprint
    )
    reference = HuggingFaceTokenizer(models.BPE())
    reference.normalizer, reference.decoder = normalizers.NFC(), decoders.ByteLevel()
    reference.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=True)
    spaced = [" ".join(re.split("[ \t\r\n]+", text)) for text in texts]
    expected = vocabulary_of(
        reference, spaced, trainers.BpeTrainer, vocab_size=400, special_tokens=[*tokenizer.SPECIAL_TOKENS],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
    )  # fmt: skip
    assert expected == {piece: i for i, piece in enumerate(learnt.pieces)}
    for text in HARD:
        composed = unicodedata.normalize("NFC", text).removeprefix(" ")
        assert learnt.decode(learnt.encode(text).ids) == composed
    lower = vocabulary_learning.learn_new_vocabulary("bpe", words, 400, lowercase=True)
    assert lower.encode("THE Ship").ids == lower.encode("the ship").ids


def modernbert_json(**parts) -> dict:
    """A tokenizer.json with the components of ModernBERT: NFC, no space before a text, and added tokens with ids before
    and after the ids of the model. It has a truncation length, which bertjax ignores.
    """
    made = HuggingFaceTokenizer(models.BPE())
    made.normalizer, made.decoder = normalizers.NFC(), decoders.ByteLevel()
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    trainer = trainers.BpeTrainer(
        vocab_size=400,
        special_tokens=["|||IP_ADDRESS|||", "<|padding|>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    made.train_from_iterator([*make_corpus(60).split("\n"), *["the"] * 100], trainer)
    made.add_tokens([AddedToken(" " * n, normalized=True) for n in range(24, 1, -1)])
    made.add_tokens([AddedToken("|||EMAIL_ADDRESS|||", normalized=False)])
    made.add_special_tokens(["<|endoftext|>", "[UNK]", "[CLS]", "[SEP]", "[PAD]"])
    made.add_special_tokens([AddedToken("[MASK]", lstrip=True, normalized=False)])
    made.add_tokens([AddedToken(f"[unused{n}]", normalized=True) for n in range(3)])
    special = [(name, made.token_to_id(name)) for name in ("[CLS]", "[SEP]")]
    made.post_processor = processors.TemplateProcessing(
        single="[CLS]:0 $A:0 [SEP]:0", pair="[CLS]:0 $A:0 [SEP]:0 $B:0 [SEP]:0", special_tokens=special
    )
    made.enable_truncation(8)
    made.enable_padding()
    return json.loads(made.to_str()) | parts


def of_mpnet(pieces: tokenizer.WordPiece) -> tokenizer.WordPiece:
    """Returns a tokenizer in the layout of MPNet: the special tokens of fairseq around the vocabulary of a BERT."""
    return tokenizer.WordPiece(["<s>", "<pad>", "</s>", "<unk>", *pieces.pieces, "<mask>"], pieces.lowercase)


def gemma_json(**parts) -> dict:
    """A tokenizer.json with the components of Gemma, as in mmBERT: rare characters are bytes."""
    learner = HuggingFaceTokenizer(models.BPE())
    learner.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="never")
    trainer = trainers.BpeTrainer(vocab_size=300, limit_alphabet=60, show_progress=False)
    learner.train_from_iterator([*HARD * 3, *make_corpus(40).split("\n")], trainer)
    learned = json.loads(learner.to_str())["model"]
    special = ["<pad>", "<eos>", "<bos>", "<unk>", "<mask>"]
    pieces = [*special, *(f"<0x{byte:02X}>" for byte in range(256)), *learned["vocab"]]
    vocabulary = {piece: i for i, piece in enumerate(pieces)}
    settings = dict(fuse_unk=True, unk_token="<unk>", byte_fallback=True)
    made = HuggingFaceTokenizer(models.BPE(vocabulary, list(map(tuple, learned["merges"])), **settings))
    made.normalizer = normalizers.Replace(" ", "\u2581")
    made.pre_tokenizer = pre_tokenizers.Split(" ", "merged_with_previous")
    made.decoder = decoders.Sequence([decoders.Replace("\u2581", " "), decoders.ByteFallback(), decoders.Fuse()])
    made.add_special_tokens([AddedToken(piece, lstrip=piece == "<mask>", normalized=False) for piece in special])
    made.add_tokens([AddedToken(piece, normalized=False) for piece in ("\n\n", "\u2581\u2581", "<table>")])
    ids = [(piece, vocabulary[piece]) for piece in ("<bos>", "<eos>")]
    template = "<bos>:0 $A:0 <eos>:0"
    made.post_processor = processors.TemplateProcessing(template, f"{template} <bos>:1 $B:1 <eos>:1", ids)
    return json.loads(made.to_str()) | parts


def mmbert_json() -> dict:
    """A tokenizer.json with the components of mmBERT: the tokens of Gemma, and a space before a text."""
    content = gemma_json(pre_tokenizer=json.loads(pre_tokenizers.Metaspace().__getstate__()))
    pair = content["post_processor"]["pair"]
    content["post_processor"]["pair"] = [
        part for part in pair if part.get("SpecialToken") != {"id": "<bos>", "type_id": 1}
    ]
    return content


@pytest.mark.parametrize("parts, message", [
    ({"normalizer": {"type": "NFC"}}, "normalizer NFC is not supported with byte_fallback; supported: a Replace"),
    ({"normalizer": None}, "normalizer null is not supported with byte_fallback"),
    ({"pre_tokenizer": {"type": "Whitespace"}}, r"pre_tokenizer \[.*Whitespace.*\] is not supported"),
    ({"pre_tokenizer": {"type": "Metaspace", "replacement": "_", "prepend_scheme": "always", "split": True}},
     "supported: null, a Split at ' ', or a Metaspace"),
    ({"added_tokens": [], "model": {"type": "BPE", "byte_fallback": True, "vocab": {"a": 0}, "merges": []}},
     r"lacks \[PAD\]"),
])  # fmt: skip
def test_unsupported_tokenizers_with_byte_fallback_are_refused(parts, message, tmp_path):
    (tmp_path / "tokenizer.json").write_text(json.dumps(gemma_json(**parts)))
    assert tokenizer.tokenizer_kind_of(tmp_path / "tokenizer.json") == "byte_fallback"
    with pytest.raises(UserError, match=message) as error:
        tokenizer.load_tokenizer("byte_fallback", tmp_path / "tokenizer.json")
    assert "\n" not in str(error.value)


@pytest.mark.parametrize("make", [gemma_json, mmbert_json])
def test_byte_fallback_keeps_spaces_lines_and_rare_characters(make, tmp_path):
    (tmp_path / "tokenizer.json").write_text(json.dumps(make()))
    gemma = tokenizer.load_tokenizer("byte_fallback", tmp_path / "tokenizer.json")
    library = HuggingFaceTokenizer.from_file(str(tmp_path / "tokenizer.json"))
    assert [gemma.pieces[i] for i in gemma.special_ids] == ["<pad>", "<unk>", "<bos>", "<eos>", "<mask>"]
    texts = [
        *HARD,
        "",
        " ",
        "a",
        "  two\t\ttabs \n\n\n lines\r\n",
        "\U0001f600\u200d\U0001f6f8 \u4e16\u754c \u0939\u093f",
    ]
    for text in texts:
        ids = gemma.encode(text).ids
        assert ids == gemma.encode_ids([text])[0] == library.encode(text, add_special_tokens=False).ids
        assert gemma.framed(ids) == library.encode(text).ids
        if make is gemma_json:
            assert gemma.decode(ids) == text
        elif "\n\n" not in text:  # mmBERT adds a space after each added token
            assert gemma.decode(ids) == text.removeprefix(" ")
        assert gemma.framed(ids, ids) == library.encode(text, text).ids
    assert gemma.unk_id not in gemma.encode("\u4e16\U0001f600").ids
    assert [gemma.pieces[i] for i in gemma.encode("\u00ff").ids][-2:] == ["<0xC3>", "<0xBF>"]
    assert (
        gemma.begins_with_space == (make is mmbert_json) == (gemma.encode_ids(["ship"]) == gemma.encode_ids([" ship"]))
    )
    assert gemma.encode_following(["ship", " ship", ""]) == [*gemma.encode_ids([" ship"] * 2), []]
    ids, offsets = gemma.encode("a  ship")
    assert offsets[-1][1] == 7 and all(start < end for start, end in offsets)
    assert not gemma.continues_word[gemma.encode(" ship").ids[0]]


@pytest.fixture
def modernbert(tmp_path):
    (tmp_path / "tokenizer.json").write_text(json.dumps(modernbert_json()))
    return tokenizer.load_tokenizer("bpe", tmp_path / "tokenizer.json")


def test_modernbert_added_tokens_are_kept_and_special_tokens_are_not_encoded(modernbert):
    def pieces(ids):
        return [modernbert.pieces[i] for i in ids]

    assert modernbert.vocab_size == 400 + 23 + 1 + 6 + 3 and modernbert.pieces[-1] == "[unused2]"
    assert pieces(modernbert.special_ids) == list(tokenizer.SPECIAL_TOKENS)
    assert pieces(modernbert.encode("a   b").ids) == ["a", "   ", "b"]
    assert "|||EMAIL_ADDRESS|||" in pieces(modernbert.encode("to |||EMAIL_ADDRESS||| of").ids)
    ids = modernbert.encode("[CLS] [SEP] <|endoftext|> [PAD][MASK]").ids
    assert not {*modernbert.special_ids, modernbert.pieces.index("<|endoftext|>")} & {*ids}
    assert modernbert.decode(ids) == "[CLS] [SEP] <|endoftext|> [PAD][MASK]"
    one, long = modernbert.encode_ids(["a", "a" * 9 + "b" * 9])
    assert len(one) == 1 and len(long) > 8, "encodings are neither padded nor truncated"


def test_modernbert_words_have_a_leading_space_except_the_first(modernbert):
    the, spaced = modernbert.encode("the the").ids
    assert modernbert.pieces[spaced] == "\u0120the" != modernbert.pieces[the]
    assert modernbert.encode_following(["the", " the", ""]) == [[spaced], [spaced], []]
    ids, sizes = modernbert.encode_flat(["the", "the"])
    assert ids.tolist() == [spaced, spaced] and sizes.tolist() == [1, 1]
    assert not modernbert.continues_word[spaced] and modernbert.continues_word[the]
    assert not modernbert.continues_word[modernbert.pieces.index("   ")]
    assert modernbert.encode_with_masks("the [MASK] the[MASK]") == [the, modernbert.mask_id, spaced, modernbert.mask_id]
    assert modernbert.encode("so the").offsets[-1] == (3, 6)  # without the space


@pytest.mark.parametrize("parts, message", [
    ({"pre_tokenizer": {"type": "Metaspace"}}, "pre_tokenizer Metaspace is not supported; supported: 'ByteLevel'"),
    ({"pre_tokenizer": {"type": "Sequence", "pretokenizers": []}}, "pre_tokenizer null is not supported"),
    ({"model": {"type": "BPE", "byte_fallback": True}}, "model.byte_fallback = True is not supported"),
    ({"model": {"type": "BPE", "dropout": 0.1}}, r"model.dropout = 0.1 is not supported; supported: null"),
    ({"model": {"type": "BPE", "dropout": "much"}}, "is not a tokenizer.json"),
    ({"normalizer": {"type": "Unheard"}}, "is not a tokenizer.json"),
    ({"added_tokens": []}, r"lacks \[PAD\]"),
    ({"post_processor": {"type": "TemplateProcessing", "single": []}}, "is not a tokenizer.json|post_processor"),
])  # fmt: skip
def test_unsupported_byte_level_tokenizers_are_refused(parts, message, tmp_path):
    (tmp_path / "tokenizer.json").write_text(json.dumps(modernbert_json(**parts)))
    with pytest.raises(UserError, match=message) as error:
        tokenizer.load_tokenizer("bpe", tmp_path / "tokenizer.json")
    assert "\n" not in str(error.value)


def test_published_vocabularies_are_read_cased_and_uncased(tmp_path):
    path = tmp_path / "vocab.txt"
    path.write_bytes("\r\n".join([*tokenizer.SPECIAL_TOKENS, "Paris", "paris", "is"]).encode())
    assert tokenizer.load_tokenizer("wordpiece", path, lowercase=False).encode("Paris is").ids == [5, 7]
    assert tokenizer.load_tokenizer("wordpiece", path, lowercase=True).encode("Paris is").ids == [6, 7]


@pytest.mark.parametrize("lines, ids, note", [
    (["a", "protein", "the", "protein"], [5, 8], "vocab.txt: 'protein' is in lines 7 and 9; the last line is used"),
    (["a", "", "protein", ""], [5, 7], ""),
    (["a", "protein", "", ""], [5, 6], ""),
])  # fmt: skip
@pytest.mark.parametrize("first", ["", "\ufeff"])
def test_a_duplicate_token_has_the_last_id(lines, ids, note, first, tmp_path, capsys):
    """Google's code and transformers do the same. A tokenizer.json has equal tokens, even with gaps in the ids."""
    path = tmp_path / "vocab.txt"
    path.write_text(first + "\n".join([*tokenizer.SPECIAL_TOKENS, *lines]) + "\n")
    loaded = tokenizer.load_tokenizer("wordpiece", path)
    assert note in capsys.readouterr().err
    assert loaded.encode("a protein").ids == ids and loaded.encode("no piece 6").ids == 3 * [loaded.unk_id]
    loaded.save(tmp_path / "saved")
    assert tokenizer.load_tokenizer("wordpiece", tmp_path / "saved/vocab.txt").fingerprint == loaded.fingerprint
    content = json.loads(loaded.to_huggingface())
    for is_whole in (True, False):
        vocabulary = content["model"]["vocab"]
        content["model"]["vocab"] = {x: i for x, i in vocabulary.items() if is_whole or not x.startswith("[no piece")}
        (tmp_path / "tokenizer.json").write_text(json.dumps(content))
        assert tokenizer.load_tokenizer("wordpiece", tmp_path / "tokenizer.json").pieces == loaded.pieces


@pytest.mark.parametrize("kind, content, message", [
    ("wordpiece", "", "is empty"),
    ("wordpiece", "the\n[UNK]\n", r"lacks \[PAD\], \[CLS\], \[SEP\], \[MASK\]"),
    ("sentencepiece", "not a model", "not a SentencePiece model"),
    ("bytes", "[PAD]\n", "is not the file of a tokenizer of bytes; leave the path empty"),
    ("wordpiece", None, "tokenizer.path: no such file .*/file"),
])  # fmt: skip
def test_unusable_vocabularies_are_refused(tmp_path, kind, content, message):
    if content is not None:
        (tmp_path / "file").write_text(content)
    with pytest.raises(UserError, match=message):
        tokenizer.load_tokenizer(kind, tmp_path / "file")


@pytest.mark.parametrize("kind", SIZE)
def test_a_too_small_corpus_is_refused_with_the_possible_vocabulary_size(kind):
    with pytest.raises(
        UserError, match=r"vocab_size = 9000: this corpus gives \d+ tokens; set --config.model.vocab_size=\d+ or less"
    ):
        learn(kind, make_corpus(20).split("\n"), 9000)


# The words of raw text that WordPiece divides into tokens.


@pytest.mark.parametrize("text, words", [
    ('(John) "Rome/Berlin",', ["(", "John", ")", '"', "Rome", "/", "Berlin", '"', ","]),
    ("\u201cU.S.\u201d it\u2019s", ["\u201c", "U", ".", "S", ".", "\u201d", "it", "\u2019", "s"]),
    ("我住在北京。", ["我", "住", "在", "北", "京", "。"]),
    ("iPhone用户𠀀x", ["iPhone", "用", "户", "𠀀", "x"]),
    ("cafe\u0301 Émile ÉCOLE", ["cafe\u0301", "Émile", "ÉCOLE"]),  # accents in one character and in two
    ("a\tb\u00a0c\u3000d\r\ne", ["a", "b", "c", "d", "e"]),
    ("東京 タワー 한국어 ไทย", ["東", "京", "タワー", "한국어", "ไทย"]),
    ("\U0001f600\U0001f600 x", ["\U0001f600\U0001f600", "x"]),  # characters of two UTF-16 units, no punctuation
    ("in\u200bside \u200b end\x00", ["in\u200bside", "end"]),  # characters that the normalizer removes are not a word
    ("[SEP] x", ["[", "SEP", "]", "x"]),
    ("$5+5=10", ["$", "5", "+", "5", "=", "10"]),
    (" \u200b\n", []),
    ("", []),
])  # fmt: skip
def test_split_words_returns_words_and_offsets(text, words):
    places = split_words(text)
    assert [text[start:end] for start, end in places] == words
    assert all(end <= start for (_, end), (start, _) in itertools.pairwise(places))


@pytest.mark.parametrize("lowercase", [True, False])
def test_tokens_of_words_equal_tokens_of_the_text(lowercase):
    """The documents include code, tables and marks."""
    letters = [chr(i) for i in range(33, 127)]
    wordpiece = tokenizer.WordPiece([*tokenizer.SPECIAL_TOKENS, *letters, *("##" + x for x in letters)], lowercase)
    texts = (pathlib.Path(__file__).parents[2] / "docs/text.md").read_text().splitlines()
    texts.append("Straße/Zoë\u0308 北京x\u200by\u0085z (don't) \u2026")
    for text in texts:
        pieces = wordpiece.encode_ids([text[start:end] for start, end in split_words(text)])
        assert [*itertools.chain(*pieces)] == wordpiece.encode(text).ids and [] not in pieces
