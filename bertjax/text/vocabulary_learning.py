"""Learns vocabularies: counts words, and learns tokens from the counts. The counts of several texts may be added."""

import collections
import io
import itertools
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence

import numpy as np
import sentencepiece
from tokenizers import normalizers, pre_tokenizers, trainers

from bertjax.common.errors import UserError
from bertjax.text.tokenizer import BPE, SPECIAL_TOKENS, SentencePiece, Tokenizer, WordPiece
from bertjax.text.tokenizers.byte_level import new_bpe
from bertjax.text.tokenizers.json_file import with_special_tokens
from bertjax.text.tokenizers.wordpiece import MAX_WORD_LETTERS, new_wordpiece

# The largest number of single characters in a learned WordPiece vocabulary, to omit rare ones such as emoji. Chinese
# needs thousands of characters to reach the same coverage as SentencePiece.
MAX_ALPHABET, COVERAGE = 1000, 0.9995
# The largest number of letters of all distinct words, and of bytes of a text that repeats each word as often as it was
# counted. With these limits the trainers need less than 1 GB: 85 to 120 bytes per letter of a distinct word for
# WordPiece, 13 per byte of text for SentencePiece, and 120 per byte of a letter, which has up to 4 bytes, for BPE.
COUNTED_LETTERS = {"wordpiece": 5_000_000, "sentencepiece": 8_000_000, "bpe": 2_500_000, "unigram": 2_500_000}
TRAINING_BYTES = {"wordpiece": 400_000_000, "sentencepiece": 30_000_000, "bpe": 400_000_000}
# The normalizer of BERT makes each of these characters a separate word.
IDEOGRAPH = re.compile("[\u3400-\u4dbf\u4e00-\u9fff\uf900-\ufaff\U00020000-\U0002fa1f]")
BETWEEN_SPACES = re.compile("[^ \t\r\n]+")  # normalization may remove other white space


def count_words(kind: str, texts: Iterable[str], lowercase: bool = True) -> collections.Counter[str]:
    """Counts words for `learn_new_vocabulary`. Counts of parts of a corpus may be added.

    The words of WordPiece are normalized words and punctuation marks. The trainers of the other kinds normalize text,
    so that their words are the characters between spaces.
    """
    words: collections.Counter[str] = collections.Counter()
    for text in texts:
        words.update(BETWEEN_SPACES.findall(text))
    return _normalized(words, lowercase) if kind == WordPiece.kind else words


def _normalized(words: Mapping[str, int], lowercase: bool) -> collections.Counter[str]:
    """Returns the counts of normalized words and punctuation marks."""
    tokenizer = new_wordpiece(lowercase, {"[UNK]": 0})
    by_count: dict[int, list[str]] = collections.defaultdict(list)  # each word is normalized once
    for word, count in words.items():
        # The cost of the trainer is quadratic in the length of a word.
        by_count[count] += (word[i : i + MAX_WORD_LETTERS] for i in range(0, len(word), MAX_WORD_LETTERS))
    normalized: collections.Counter[str] = collections.Counter()
    for count, parts in by_count.items():
        text = tokenizer.normalizer.normalize_str(" ".join(parts))
        for word, _ in tokenizer.pre_tokenizer.pre_tokenize_str(text):
            normalized[word] += count
    return normalized


def learn_new_vocabulary(
    kind: str,
    words: Mapping[str, int],
    vocab_size: int,
    lowercase: bool = True,
    special: Sequence[str] = SPECIAL_TOKENS,
) -> Tokenizer:
    """Learns exactly `vocab_size` tokens.

    Args:
      kind: a key of `TRAINING_BYTES`.
      words: the result of `count_words`. The order does not matter.
      vocab_size: the number of tokens.
      lowercase: whether the tokenizer folds case.
      special: the names of the special tokens of a SentencePiece model, which determine the position of [CLS]. Other
        kinds have the special tokens of BERT.

    Raises:
      UserError: the words do not yield `vocab_size` tokens.
    """
    if not words:
        raise UserError("data.corpus: there are no words to learn a vocabulary from; add text")
    tokenizer: Tokenizer
    if kind == SentencePiece.kind:
        tokenizer = _learn_sentencepiece(words, vocab_size, lowercase, special)
    else:
        tokenizer = {WordPiece.kind: _learn_wordpiece, BPE.kind: _learn_bpe}[kind](words, vocab_size, lowercase)
    if tokenizer.vocab_size != vocab_size:
        raise UserError(_wrong_size(vocab_size, tokenizer.vocab_size))
    return tokenizer


def _learn_wordpiece(words: Mapping[str, int], vocab_size: int, lowercase: bool) -> WordPiece:
    tokenizer = new_wordpiece(lowercase, {"[UNK]": 0})
    tokenizer.normalizer, tokenizer.pre_tokenizer = None, pre_tokenizers.WhitespaceSplit()
    # The library numbers "##" characters by first occurrence, which differs from run to run, and breaks ties by
    # these numbers. Special tokens have a fixed order, so that the vocabulary is reproducible.
    alphabet = _alphabet(words)
    inside = [letter for letter in alphabet if not IDEOGRAPH.match(letter)]
    trainer = trainers.WordPieceTrainer(
        vocab_size=vocab_size,
        min_frequency=2,
        special_tokens=[*SPECIAL_TOKENS, *alphabet, *("##" + letter for letter in inside)],
        limit_alphabet=len(alphabet),
        initial_alphabet=alphabet,
        show_progress=False,
    )
    tokenizer.train_from_iterator(_written_out(_within(TRAINING_BYTES[WordPiece.kind], words)), trainer)
    vocabulary = tokenizer.get_vocab()
    return WordPiece(sorted(vocabulary, key=vocabulary.__getitem__), lowercase)


def _learn_sentencepiece(
    words: Mapping[str, int], vocab_size: int, lowercase: bool, special: Sequence[str]
) -> SentencePiece:
    model, (pad, unk, *controls) = io.BytesIO(), special
    try:
        sentencepiece.SentencePieceTrainer.train(
            sentence_iterator=(
                f"{word}\t{n}" for word, n in _within(TRAINING_BYTES[SentencePiece.kind], words).items()
            ),
            # Words with their counts. No token crosses a space, so that sentences would give the same tokens.
            input_format="tsv",
            model_writer=model,
            vocab_size=vocab_size,
            model_type="unigram",
            character_coverage=0.9995,
            normalization_rule_name="nmt_nfkc_cf" if lowercase else "nmt_nfkc",
            max_sentence_length=1 << 20,  # bytes; the trainer drops longer sentences without a message
            pad_id=0,
            unk_id=1,
            bos_id=-1,
            eos_id=-1,
            pad_piece=pad,
            unk_piece=unk,
            control_symbols=controls,
            num_threads=16,  # fixed, because floating-point sums and thus the tokens depend on it
            minloglevel=2,
        )
    except RuntimeError as error:
        if most := re.search(r"value <= (\d+)", str(error)):
            raise UserError(_wrong_size(vocab_size, int(most[1]))) from None
        raise UserError(f"SentencePiece could not learn from this corpus: {str(error).strip()}") from None
    return SentencePiece(model.getvalue())


def _learn_bpe(words: Mapping[str, int], vocab_size: int, lowercase: bool) -> BPE:
    """Learns tokens of words, which the pattern of GPT-2 separates, after NFC as in the tokenizer of ModernBERT."""
    tokenizer = new_bpe({})
    tokenizer.normalizer = (
        normalizers.Sequence([normalizers.NFC(), normalizers.Lowercase()]) if lowercase else normalizers.NFC()
    )
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        min_frequency=2,
        special_tokens=[*SPECIAL_TOKENS],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(_written_out(_within(TRAINING_BYTES[BPE.kind], words)), trainer)
    return BPE(with_special_tokens(tokenizer, mask_takes_space=True).encode())


def _alphabet(words: Mapping[str, int]) -> list[str]:
    """Returns the most frequent characters, sorted: `MAX_ALPHABET`, or more if `COVERAGE` needs more."""
    counts: collections.Counter[str] = collections.Counter()
    for word, count in words.items():
        for letter in word:
            counts[letter] += count
    letters = sorted(counts.items(), key=lambda item: (-item[1], item[0]))
    covered = np.cumsum([count for _, count in letters])
    most = max(MAX_ALPHABET, 1 + int(np.searchsorted(covered, COVERAGE * covered[-1]))) if letters else 0
    return sorted(letter for letter, _ in letters[:most])


def _written_out(words: Mapping[str, int]) -> Iterator[str]:
    """Yields texts that repeat each word as often as it was counted: the tokenizers library accepts no counts."""
    occurrences = itertools.chain.from_iterable(itertools.starmap(itertools.repeat, words.items()))
    return iter(lambda: " ".join(itertools.islice(occurrences, 2000)), "")


def _within(size: int, words: Mapping[str, int]) -> dict[str, int]:
    """Returns the counts of every n-th occurrence, so that a text of these occurrences has about `size` bytes.

    The words are in alphabetical order, so that the rounding error is less than one occurrence for each word, and for
    all words with the same prefix together. Returns all counts if they fit.
    """
    ordered = sorted(words)
    counts = np.array([words[word] for word in ordered], np.int64)
    text = int(counts @ [len(word.encode()) + 1 for word in ordered])
    left = np.diff(np.cumsum(counts) // max(1, -(-text // size)), prepend=0)
    return {word: count for word, count in zip(ordered, left.tolist()) if count}


def _wrong_size(wanted: int, possible: int) -> str:
    remedy = "or less, or add text" if possible < wanted else f"or more: the single characters need {possible} tokens"
    return (
        f"config.model.vocab_size = {wanted}: this corpus gives {possible} tokens; set "
        f"--config.model.vocab_size={possible} {remedy}"
    )
