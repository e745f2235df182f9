"""Learns vocabularies: counts the words of a text, whose counts may be added, and learns pieces from the counts."""

import collections
import io
import itertools
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence

import numpy as np

from bertjax.common.errors import UserError
from bertjax.text.tokenizer import BPE, SPECIAL_PIECES, SentencePiece, Tokenizer, Unigram, WordPiece
from bertjax.text.tokenizers.byte_level import new_bpe
from bertjax.text.tokenizers.json_file import with_special_pieces
from bertjax.text.tokenizers.wordpiece import MAX_WORD_LETTERS, new_wordpiece

# Limits the single characters in a learnt WordPiece vocabulary, to leave out rare ones such as emoji. Chinese needs
# thousands of characters to reach the same coverage as SentencePiece.
MAX_ALPHABET, COVERAGE = 1000, 0.9995
# Letters that all counted words may have together, and bytes of the text that has each of them as often as counted:
# with these, the trainers need less than 1 GB (85 to 120 bytes per letter of a distinct word in WordPiece's, 13 per
# byte of text in SentencePiece's, 120 per byte of a letter in BPE's, whose letters have up to 4).
COUNTED_LETTERS = {"wordpiece": 5_000_000, "sentencepiece": 8_000_000, "bpe": 2_500_000, "unigram": 2_500_000}
TRAINING_BYTES = {"wordpiece": 400_000_000, "sentencepiece": 30_000_000, "bpe": 400_000_000}
# BERT's normalizer makes each of these a separate word.
IDEOGRAPH = re.compile("[\u3400-\u4dbf\u4e00-\u9fff\uf900-\ufaff\U00020000-\U0002fa1f]")
BETWEEN_SPACES = re.compile("[^ \t\r\n]+")  # normalization may remove other white space


def count_words(kind: str, texts: Iterable[str], lowercase: bool = True) -> collections.Counter[str]:
    """Counts what a kind of tokenizer learns from. Counts of parts of a corpus may be added."""
    return _COUNT[kind](texts, lowercase)


def learn(
    kind: str,
    words: Mapping[str, int],
    vocab_size: int,
    lowercase: bool = True,
    special: Sequence[str] = SPECIAL_PIECES,
) -> Tokenizer:
    """Learns exactly `vocab_size` pieces from the result of `count_words`, whose order does not matter.

    `special`: names of the special pieces of a SentencePiece model, which say where [CLS] comes; other kinds have
    BERT's. Raises `UserError` if the words do not yield that many pieces.
    """
    if not words:
        raise UserError("data.corpus: there are no words to learn a vocabulary from")
    more = (special,) if kind == SentencePiece.kind else ()
    tokenizer = _LEARN[kind](words, vocab_size, lowercase, *more)
    if tokenizer.vocab_size != vocab_size:
        raise UserError(_wrong_size(vocab_size, tokenizer.vocab_size))
    return tokenizer


def _count_between_spaces(texts: Iterable[str], lowercase: bool) -> collections.Counter[str]:
    """Counts the characters between spaces as they are: SentencePiece's and BPE's trainers normalize them."""
    del lowercase
    words = collections.Counter()
    for text in texts:
        words.update(BETWEEN_SPACES.findall(text))
    return words


def _count_normalized(texts: Iterable[str], lowercase: bool) -> collections.Counter[str]:
    """Counts normalized words and punctuation marks."""
    tokenizer = new_wordpiece(lowercase, {"[UNK]": 0})
    by_count = collections.defaultdict(list)  # each word is normalized once
    for word, count in _count_between_spaces(texts, lowercase).items():
        # The trainer's cost is quadratic in the length of a word.
        by_count[count] += (word[i : i + MAX_WORD_LETTERS] for i in range(0, len(word), MAX_WORD_LETTERS))
    words = collections.Counter()
    for count, found in by_count.items():
        text = tokenizer.normalizer.normalize_str(" ".join(found))
        for word, _ in tokenizer.pre_tokenizer.pre_tokenize_str(text):
            words[word] += count
    return words


_COUNT = {
    WordPiece.kind: _count_normalized,
    SentencePiece.kind: _count_between_spaces,
    BPE.kind: _count_between_spaces,
    Unigram.kind: _count_between_spaces,
}


def _learn_wordpiece(words: Mapping[str, int], vocab_size: int, lowercase: bool) -> WordPiece:
    from tokenizers import pre_tokenizers, trainers

    tokenizer = new_wordpiece(lowercase, {"[UNK]": 0})
    tokenizer.normalizer, tokenizer.pre_tokenizer = None, pre_tokenizers.WhitespaceSplit()
    # The library numbers "##" characters by first occurrence, which differs from run to run, and breaks ties by
    # these numbers. Passing them as special tokens fixes their order and makes the vocabulary reproducible.
    alphabet = _alphabet(words)
    inside = [letter for letter in alphabet if not IDEOGRAPH.match(letter)]
    trainer = trainers.WordPieceTrainer(
        vocab_size=vocab_size,
        min_frequency=2,
        special_tokens=[*SPECIAL_PIECES, *alphabet, *("##" + letter for letter in inside)],
        limit_alphabet=len(alphabet),
        initial_alphabet=alphabet,
        show_progress=False,
    )
    tokenizer.train_from_iterator(_written_out(_within(TRAINING_BYTES[WordPiece.kind], words)), trainer)
    vocabulary = tokenizer.get_vocab()
    return WordPiece(sorted(vocabulary, key=vocabulary.get), lowercase)


def _learn_sentencepiece(
    words: Mapping[str, int], vocab_size: int, lowercase: bool, special: Sequence[str]
) -> SentencePiece:
    import sentencepiece

    model, (pad, unk, *others) = io.BytesIO(), special
    try:
        sentencepiece.SentencePieceTrainer.train(
            sentence_iterator=(
                f"{word}\t{n}" for word, n in _within(TRAINING_BYTES[SentencePiece.kind], words).items()
            ),
            # Words with their counts. SentencePiece counts those of sentences itself: no piece reaches across a space.
            input_format="tsv",
            model_writer=model,
            vocab_size=vocab_size,
            model_type="unigram",
            character_coverage=0.9995,
            normalization_rule_name="nmt_nfkc_cf" if lowercase else "nmt_nfkc",
            max_sentence_length=1 << 20,  # bytes; it silently drops longer ones
            pad_id=0,
            unk_id=1,
            bos_id=-1,
            eos_id=-1,
            pad_piece=pad,
            unk_piece=unk,
            control_symbols=others,
            num_threads=16,  # fixed: the floating-point sums, and so the pieces, depend on it
            minloglevel=2,
        )
    except RuntimeError as error:
        if most := re.search(r"value <= (\d+)", str(error)):
            raise UserError(_wrong_size(vocab_size, int(most[1]))) from None
        raise UserError(f"SentencePiece could not learn from this corpus: {str(error).strip()}") from None
    return SentencePiece(model.getvalue())


def _learn_bpe(words: Mapping[str, int], vocab_size: int, lowercase: bool) -> BPE:
    """Learns pieces of words as GPT-2's pattern cuts them, after NFC as in ModernBERT's tokenizer."""
    from tokenizers import normalizers, pre_tokenizers, trainers

    tokenizer = new_bpe({})
    tokenizer.normalizer = (
        normalizers.Sequence([normalizers.NFC(), normalizers.Lowercase()]) if lowercase else normalizers.NFC()
    )
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        min_frequency=2,
        special_tokens=[*SPECIAL_PIECES],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(_written_out(_within(TRAINING_BYTES[BPE.kind], words)), trainer)
    return BPE(with_special_pieces(tokenizer, mask_takes_space=True).encode())


_LEARN = {WordPiece.kind: _learn_wordpiece, SentencePiece.kind: _learn_sentencepiece, BPE.kind: _learn_bpe}


def _alphabet(words: Mapping[str, int]) -> list[str]:
    """Returns the most frequent characters, sorted: `MAX_ALPHABET`, or more if `COVERAGE` needs more."""
    counts = collections.Counter()
    for word, count in words.items():
        for letter in word:
            counts[letter] += count
    letters = sorted(counts.items(), key=lambda item: (-item[1], item[0]))
    covered = np.cumsum([count for _, count in letters])
    most = max(MAX_ALPHABET, 1 + int(np.searchsorted(covered, COVERAGE * covered[-1]))) if letters else 0
    return sorted(letter for letter, _ in letters[:most])


def _written_out(words: Mapping[str, int]) -> Iterator[str]:
    """Yields texts that have each word as often as it was counted: the tokenizers library takes no counts."""
    occurrences = itertools.chain.from_iterable(itertools.starmap(itertools.repeat, words.items()))
    return iter(lambda: " ".join(itertools.islice(occurrences, 2000)), "")


def _within(size: int, words: Mapping[str, int]) -> dict[str, int]:
    """Returns the counts of every second, third ... occurrence, so that a text of these takes some `size` bytes.

    In alphabetical order, so that after the division no word's count is off by one, nor that of all words with the same
    beginning. Returns all counts if they fit.
    """
    ordered = sorted(words)
    counts = np.array([words[word] for word in ordered], np.int64)
    text = int(counts @ [len(word.encode()) + 1 for word in ordered])
    left = np.diff(np.cumsum(counts) // max(1, -(-text // size)), prepend=0)
    return {word: count for word, count in zip(ordered, left.tolist()) if count}


def _wrong_size(wanted: int, given: int) -> str:
    remedy = "or less, or add text" if given < wanted else "or more: its single characters alone need that many"
    return f"config.model.vocab_size = {wanted}: this corpus gives {given} pieces; set it to that {remedy}"
