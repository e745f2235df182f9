"""Reads at most 64 MB of a corpus: sizes, letters and words of its text, and held-out sentences to fill masks in."""

import collections
import itertools
import re
import time
import unicodedata
from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple

import numpy as np

from bertjax.common.errors import UserError
from bertjax.config.lists import corpus_sources
from bertjax.data.corpus import corpus, reading, sentences
from bertjax.data.corpus.reading import Document
from bertjax.data.corpus.selection import is_train, selection_of
from bertjax.launch.budget.choice import Text
from bertjax.text import vocabulary_learning
from bertjax.text.tokenizer import Tokenizer

MOST_BYTES = 24_000_000  # of a reading; there may be two, and one for masked texts
COUNTED_CHARACTERS = 4_000_000  # the words of so many characters are counted, and their letters by script
LEAST_DOCUMENTS = 20
DECODED_LETTERS = 20_000
LEAST_PIECES = 300  # a byte-level vocabulary has 261 of bytes and special pieces
LONGEST_WORDS = 20  # mean of characters between spaces; in Chinese there are more
ENCODED_CHARACTERS = 400_000
MASKED_TEXTS = 3


class Survey(NamedTuple):
    """The result of `survey`.

    Attributes:
      document: the value of `data.document` with which the text has enough documents.
      scripts: {script, such as "LATIN": share of the letters}, the most frequent first.
      kind: the kind of tokenizer that the words were counted for.
      words: counts of words, as vocabularies are learnt from.
      sample: sentences.
      seconds_per_byte: the time that splitting and counting took one core.
      files: the number of files; 0 if the sources are no files.
      is_whole: whether all of the corpus was read.
    """

    text: Text
    document: str
    scripts: Mapping[str, float]
    kind: str
    words: collections.Counter
    sample: list[str]
    seconds_per_byte: float
    files: int
    is_whole: bool


class _Enough(Exception):
    """The bytes that may be read of a portion have been read."""


class _Read(NamedTuple):
    """The documents that were read.

    Attributes:
      sizes: their bytes.
      first: the first documents.
      bytes: of the files that were read, as stored.
      is_whole: whether there are no others.
      text, documents: estimates for the corpus.
    """

    sizes: list[int]
    first: list[Document]
    bytes: int
    is_whole: bool
    text: float
    documents: float


def survey(config) -> Survey:
    """Surveys `config.data.corpus`. Raises `UserError` if it has too few documents."""
    portions, document = corpus.portions(corpus_sources(config)), config.data.document
    read = _read(config, portions, document)
    if len(read.sizes) < LEAST_DOCUMENTS and document == "blank_line" and "data.document" not in config.overrides:
        by_line = _read(config, portions, "line")
        if len(by_line.sizes) >= LEAST_DOCUMENTS:
            read, document = by_line, "line"
    if len(read.sizes) < LEAST_DOCUMENTS:
        number = f"{len(read.sizes)} document{'s' * (len(read.sizes) != 1)}"
        raise UserError(
            f"config.data.corpus = {config.data.corpus!r}: has {number} in {read.bytes:,} bytes; at least "
            f"{LEAST_DOCUMENTS} are needed, because some are held out: end each document with a blank line, or put it "
            f"on a line of its own and set --config.data.document=line"
        )
    return _surveyed(config, portions, document, read)


def _read(config, portions: Sequence[corpus.Portion], document: str) -> _Read:
    """Reads at most `MOST_BYTES`, as many of each portion that does not end before.

    Raises `UserError` if they have no document.
    """
    sizes, first, faults, characters, read, is_whole, whole, number = [], [], [], 0, 0, True, 0.0, 0.0
    for done, portion in enumerate(portions):
        if read >= MOST_BYTES:
            break
        before, reader = len(sizes), _Reader(config, document, (MOST_BYTES - read) // (len(portions) - done), faults)
        for text in reader.documents(portion):
            sizes.append(sum(len(line.encode()) for line in text.lines))
            if characters < COUNTED_CHARACTERS:
                first.append(text)
                characters += sizes[-1]
        # The rest of a portion is like its beginning; without a known size, only the beginning counts.
        more = max(1.0, portion.bytes / reader.read) if reader.stopped and portion.bytes and reader.read else 1.0
        whole, number = whole + more * sum(sizes[before:]), number + more * (len(sizes) - before)
        read, is_whole = read + reader.read, is_whole and not reader.stopped
    if not sizes:
        if faults:
            reading.DEFAULT.on_bad(*faults[0])
        raise UserError(f"config.data.corpus = {config.data.corpus!r}: there is no text in its first {read:,} bytes")
    return _Read(sizes, first, read, is_whole, whole, number)


def _surveyed(config, portions: Sequence[corpus.Portion], document: str, read: _Read) -> Survey:
    began = time.perf_counter()
    kind, lowercase = config.tokenizer.kind, config.tokenizer.lowercase
    split = [sentences.split(text, config.data.language, config.data.split_sentences) for text in read.first]
    sample = list(itertools.chain.from_iterable(split))
    kind = kind if kind in vocabulary_learning.TRAINING_BYTES else "bpe"
    words = vocabulary_learning.count_words(kind, sample, lowercase)
    seconds_per_byte = (time.perf_counter() - began) / max(1, sum(map(len, sample)))
    scripts = _scripts(sample)
    percentiles = tuple(float(x) for x in np.percentile(read.sizes, [50, 90, 99]))
    text = Text(
        read.text,
        read.documents,
        percentiles,
        scripts.get("LATIN", 0.0),
        len(words),
        sum(map(len, sample)) < LONGEST_WORDS * sum(len(sentence.split()) for sentence in sample),
    )
    files = sum(len(portion.files) for portion in portions)
    return Survey(text, document, scripts, kind, words, sample, seconds_per_byte, files, read.is_whole)


class _Reader(reading.ReadOptions):
    """Reads the documents of a portion until `most` bytes of it have been read."""

    def __init__(self, config, document: str, most: int, faults: list[tuple[str, ...]]):
        super().__init__(config.data.text_column, document)
        self._most, self._faults, self.read, self.stopped = most, faults, 0, False

    def on_bad(self, fault: str, remedy: str = reading.SKIP) -> None:
        self._faults.append((fault, remedy))

    def on_skipped_file(self, path: str, fault: str) -> None:
        self._faults.append((f"{path}: {fault}", reading.READABLE))

    def on_read(self, size: int) -> None:
        if self.read >= self._most:
            raise _Enough
        self.read += size

    def documents(self, portion: corpus.Portion) -> Iterator[Document]:
        size = 0
        try:
            for document in corpus.read_portion(portion, self):
                yield document
                size += sum(map(len, document.lines))
                if not self.read and size > self._most:  # of data sets, which do not count bytes
                    raise _Enough
        except _Enough:
            self.stopped = True
        self.read = self.read or size


def _scripts(sample: list[str]) -> dict[str, float]:
    """Returns the shares of the scripts among the letters, the most frequent first."""
    step = max(1, sum(map(len, sample)) // DECODED_LETTERS)
    letters = (letter for letter in itertools.islice(itertools.chain.from_iterable(sample), 0, None, step))
    counts = collections.Counter(unicodedata.name(x, "OTHER").split()[0] for x in letters if x.isalpha())
    return {script: count / counts.total() for script, count in counts.most_common()}


def learn(kind: str, lowercase: bool, vocab_size: int, found: Survey) -> Tokenizer:
    """Learns a tokenizer of the surveyed words: of fewer pieces than `vocab_size` if the words give no more.

    It is used for its number of tokens; the run learns a tokenizer of its own from all documents. Raises `UserError`
    for a kind that cannot be learnt, and for too little text.
    """
    if kind not in vocabulary_learning.TRAINING_BYTES:
        learnt = ", ".join(vocabulary_learning.TRAINING_BYTES)
        raise UserError(f"config.tokenizer.kind = {kind!r}: cannot be learnt; choose {learnt}, or set tokenizer.path")
    words = found.words if kind == found.kind else vocabulary_learning.count_words(kind, found.sample, lowercase)
    least, tried = 0, set()
    while vocab_size not in tried:
        tried.add(vocab_size)
        try:
            return vocabulary_learning.learn(kind, words, vocab_size, lowercase)
        except UserError as error:
            given = re.search(r"gives (\d+) pieces", str(error))
            possible = int(given[1]) if given else 0
        if possible > vocab_size:  # the letters alone need as many
            least, vocab_size = possible, 128 * (possible // 128 + 1)
        else:
            # The run learns from fewer documents, which give fewer pieces.
            sizes = (128 * (possible * 4 // 5 // 128), possible * 9 // 10, possible)
            vocab_size = next((size for size in sizes if size >= max(least, LEAST_PIECES)), possible)
    raise UserError(
        f"config.data.corpus: {found.text.bytes:,.0f} bytes are too little text to learn a vocabulary from; add text, "
        f"or name one with --config.tokenizer.path"
    )


def bytes_per_token(tokens: Tokenizer, sample: list[str]) -> float:
    """Returns the bytes of text that a token stands for, in sentences of the sample."""
    texts, size = [], 0
    for sentence in sample:
        texts.append(sentence)
        size += len(sentence)
        if size >= ENCODED_CHARACTERS:
            break
    _, counts = tokens.encode_flat(texts)
    return sum(len(text.encode()) for text in texts) / max(1, int(counts.sum()))


def masked_texts(config, found: Survey, most: int = MASKED_TEXTS) -> tuple[str, ...]:
    """Returns sentences of held-out documents, in each of which a frequent word is replaced by [MASK].

    They are from the beginning of the corpus: different sentences for different corpora, and the same on every call.
    """
    common = {word for word, _ in found.words.most_common(600)} - {word for word, _ in found.words.most_common(12)}
    selection, texts, counts, characters = selection_of(config), [], collections.Counter(), 0
    for group in corpus.groups(list(selection.weights))[:1]:
        for each in selection.read(group, counts):
            characters += sum(map(len, each.document.lines))
            if len(texts) >= most or max(counts["bytes"], characters) > MOST_BYTES // 2:
                return tuple(texts)
            if is_train(each.part):
                continue
            split = sentences.split(each.document, config.data.language, config.data.split_sentences)
            texts += itertools.islice(filter(None, (_masked(sentence, common) for sentence in split)), 1)
    return tuple(texts)


def _masked(sentence: str, common: set[str]) -> str:
    words = sentence.split()
    if "[MASK]" in sentence or not 5 <= len(words) <= 25:
        return ""
    places = [i for i, word in enumerate(words) if i and word in common and word.isalpha() and len(word) > 2]
    if not places:
        return ""
    words[places[len(places) // 2]] = "[MASK]"
    return " ".join(words)
