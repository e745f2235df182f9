"""New tokens of a vocabulary: trained as in the definition, for all extensible tokenizer types."""

import collections
import itertools
import json
import random

import pytest
from tokenizers import Tokenizer as HuggingFaceTokenizer
from tokenizers import decoders, models, pre_tokenizers

from bertjax.common.errors import UserError
from bertjax.text import tokenizer, vocabulary_extension, vocabulary_learning
from bertjax.text.tokenizers import json_file
from tests.conftest import make_corpus
from tests.text.test_tokenizer import HARD, learn

OLD = [*make_corpus(20).splitlines(), "abcdefghijklmnopqrstuvwxyz !'-,"]
NEW = [
    f"pharmacology of {drug}, pharmacokinetics of {drug}s; the harbour's {drug}!"
    for drug in ("ibuprofen", "paracetamol", "amoxicillin") * 4
]
PIECES = 8


def unigram(learnt: tokenizer.SentencePiece) -> tokenizer.Unigram:
    """Returns the same tokens in the tokenizer.json format of XLM-R."""
    scores = json.loads(learnt.to_huggingface())["model"]["vocab"]
    special = {learnt.pieces[i] for i in learnt.special_ids}
    pieces = [("<pad>", 0.0), ("<unk>", 0.0), ("<s>", 0.0), ("</s>", 0.0)]
    pieces += [(piece, score) for piece, score in scores if piece not in special]
    made = HuggingFaceTokenizer(models.Unigram([*pieces, ("<mask>", 0.0)], unk_id=1))
    made.decoder = decoders.Metaspace(prepend_scheme="always")
    made.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="always")
    return tokenizer.Unigram(
        json_file.with_special_tokens(made, ["<pad>", "<unk>", "<s>", "</s>", "<mask>"]).encode(), "made"
    )


@pytest.fixture(scope="module")
def tokenizers() -> dict[str, tokenizer.Tokenizer]:
    by_kind = {kind: learn(kind, OLD, size) for kind, size in (("wordpiece", 100), ("sentencepiece", 80), ("bpe", 330))}
    return by_kind | {"unigram": unigram(by_kind["sentencepiece"])}


@pytest.mark.parametrize("kind", ["wordpiece", "sentencepiece", "bpe", "unigram"])
def test_new_tokens_shorten_new_text_and_keep_other_tokens(kind, tokenizers, tmp_path):
    old, words = tokenizers[kind], vocabulary_learning.count_words(kind, NEW)
    larger = vocabulary_extension.extended(old, words, PIECES)
    new = larger.pieces[old.vocab_size :]
    assert larger.pieces[: old.vocab_size] == old.pieces and len(set(new)) == PIECES and not set(new) & set(old.pieces)
    assert larger.special_ids == old.special_ids
    unchanged = 0
    for text in [*OLD[:20], *NEW, *HARD, "ship storm captain"]:
        ids = larger.encode(text).ids
        assert larger.decode(ids) == old.decode(old.encode(text).ids)
        if max(ids, default=0) < old.vocab_size:
            assert ids == old.encode(text).ids
            unchanged += bool(ids)
    assert unchanged > 3
    tokens = [sum(len(tokenizer_version.encode(text).ids) for text in NEW) for tokenizer_version in (larger, old)]
    assert tokens[0] < 0.8 * tokens[1]
    # A new token is the concatenation of its subtokens.
    for piece in new:
        parts = [old.pieces[i] for i in old.parts(piece)]
        assert "".join(part.removeprefix("##") for part in parts) == piece.removeprefix("##") and len(parts) > 1
    # The order of the words does not matter. Saved files are read back, also by other libraries.
    shuffled = sorted(words.items(), key=lambda item: hash(item[0]))
    assert vocabulary_extension.extended(old, dict(shuffled), PIECES).fingerprint == larger.fingerprint
    larger.save(tmp_path)
    assert tokenizer.load_tokenizer(kind, tmp_path / larger.filename).pieces == larger.pieces
    reloaded = HuggingFaceTokenizer.from_str(larger.to_huggingface())
    for text in NEW:
        assert reloaded.encode(text, add_special_tokens=False).ids == larger.encode(text).ids


def test_merges_equal_byte_pair_encoding(tokenizers):
    """Compares with a loop that counts all pairs again after each merge."""
    old, rng = tokenizers["bpe"], random.Random(0)
    words = {"".join(rng.choices("abcdn", k=rng.randint(2, 9))): rng.randint(1, 9) for _ in range(150)}
    units = [(unit, words[word]) for word in words for unit in old.units(word)]
    expected = []
    while len({piece for piece, _, _ in expected} - set(old.pieces)) < 40:
        pairs = collections.Counter()
        for unit, count in units:
            for pair in itertools.pairwise(unit):
                pairs[pair] += count
        left, right = min(
            (pair for pair in pairs if "".join(pair) not in old.pieces), key=lambda pair: (-pairs[pair], pair)
        )
        expected.append((left + right, left, right))
        merged = []
        for unit, count in units:
            tokens, rest = [], list(unit)
            while rest:
                is_pair = rest[:2] == [left, right]
                tokens.append(left + right if is_pair else rest[0])
                rest = rest[1 + is_pair :]
            merged.append((tokens, count))
        units = merged
    assert [tuple(merge) for merge in vocabulary_extension.learn_joined(old, words, 40)] == expected
    # The extended tokenizer splits the words in the same way.
    larger = old.extended(vocabulary_extension.learn_joined(old, words, 40))
    cut = [[larger.pieces[i] for i in larger.encode(word).ids] for word in words]
    assert cut == [unit for unit, _ in units]


def test_tokens_that_occur_only_inside_longer_tokens_are_removed(tokenizers):
    words = {"ibuprofen": 50}
    assert [new_token.token for new_token in vocabulary_extension.learn_joined(tokenizers["wordpiece"], words, 1)] != [
        "ibuprofen"
    ]
    learned = vocabulary_extension.learn_joined(tokenizers["wordpiece"], words, 5)
    assert [new_token.token for new_token in learned] == ["ibuprofen"]
    assert (
        len(vocabulary_extension.learn_joined(tokenizers["bpe"], words, 50))
        == len(tokenizers["bpe"].units("ibuprofen")[0]) - 1
    )


def test_no_word_becomes_unknown():
    """WordPiece takes the longest prefix, even if the remaining characters have no token."""
    old = tokenizer.WordPiece([*tokenizer.SPECIAL_TOKENS, *"ab", "##b", "##c", "##e", "##cd", "ab"], lowercase=True)
    words = {"abc": 9, "abcd": 5, "abe": 3}
    assert [new_token.token for new_token in vocabulary_extension.learn_joined(old, words, 1)] == ["abc"]
    larger = vocabulary_extension.extended(old, words, 1)
    assert larger.pieces[-1] != "abc" and all(larger.unk_id not in larger.encode(word).ids for word in words)


def test_too_few_words_are_reported(tokenizers):
    with pytest.raises(
        UserError,
        match=r"config.tokenizer.extend = 9: this corpus gives 1 new tokens; set --config.tokenizer.extend=1 or less",
    ):
        vocabulary_extension.extended(tokenizers["wordpiece"], {"ibuprofen": 50}, 9)
    with pytest.raises(UserError, match="gives 0 new tokens"):
        vocabulary_extension.extended(tokenizers["bpe"], {}, 1)
    assert not tokenizer.Bytes.extends
