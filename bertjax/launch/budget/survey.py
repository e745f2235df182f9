"""Reads at most 64 MB of a corpus: sizes, letters and words of the text, and held-out sentences for filling masks."""

import collections
import itertools
import re
import time
import unicodedata
from collections.abc import Mapping, Sequence
from typing import NamedTuple

import numpy as np
from ml_collections import ConfigDict

from bertjax.common.errors import UserError
from bertjax.common.progress import phase
from bertjax.config.lists import corpus_sources
from bertjax.data.corpus import corpus, reading, sentences
from bertjax.data.corpus.reading import Document
from bertjax.data.corpus.selection import is_train, selection_of
from bertjax.launch.budget.choice import Text
from bertjax.text import vocabulary_learning
from bertjax.text.tokenizer import Tokenizer

MOST_BYTES = 24_000_000  # bytes of one reading; there may be two readings, and half a reading for the masked texts
COUNTED_CHARACTERS = 4_000_000  # characters whose words and scripts are counted
LEAST_DOCUMENTS = 20
DECODED_LETTERS = 20_000
LEAST_TOKENS = 300  # the bytes and the special tokens of a byte-level vocabulary are 261 tokens
LONGEST_WORDS = 20  # mean characters between spaces; texts without spaces between words, such as Chinese, have more
ENCODED_CHARACTERS = 400_000
MASKED_TEXTS = 3


class Survey(NamedTuple):
    """The result of `survey`.

    Attributes:
      text: the properties of the corpus that determine the sizes.
      document: the value of `data.document` with which the text has enough documents.
      scripts: {script, such as "LATIN": fraction of the letters}, the most frequent script first.
      kind: the kind of tokenizer that the words were counted for.
      words: counts of words, from which a vocabulary can be learnt.
      sample: the first sentences.
      seconds_per_byte: the time for splitting and counting on one core.
      files: the number of files; 0 if the sources are not files.
      is_whole: whether the whole corpus was read.
    """

    text: Text
    document: str
    scripts: Mapping[str, float]
    kind: str
    words: collections.Counter[str]
    sample: list[str]
    seconds_per_byte: float
    files: int
    is_whole: bool


class _LimitReached(Exception):
    """The reading of a portion has reached the limit of bytes."""


def survey(config: ConfigDict) -> Survey:
    """Surveys `config.data.corpus`.

    Raises:
      UserError: the corpus has too few documents, or a source cannot be read.
    """
    sources, document = corpus_sources(config), config.data.document
    phase(f"reading the beginning of {len(sources)} source{'s' * (len(sources) > 1)} for the plan")
    portions = corpus.corpus_portions(sources)
    beginning = _Beginning(config, portions, document)
    if len(beginning.sizes) < LEAST_DOCUMENTS and document == "blank_line" and "data.document" not in config.overrides:
        by_line = _Beginning(config, portions, "line")
        if len(by_line.sizes) >= LEAST_DOCUMENTS:
            beginning, document = by_line, "line"
    if (count := len(beginning.sizes)) < LEAST_DOCUMENTS:
        raise UserError(
            f"config.data.corpus = {config.data.corpus!r}: has {count} document{'s' * (count != 1)} in "
            f"{beginning.read_bytes:,} bytes; at least {LEAST_DOCUMENTS} are needed, because some are held out: end "
            f"each document with a blank line, or write each document on one line and set --config.data.document=line"
        )
    began = time.perf_counter()
    split = [sentences.split(read, config.data.language, config.data.split_sentences) for read in beginning.documents]
    sample = list(itertools.chain.from_iterable(split))
    characters = sum(map(len, sample))
    kind = config.tokenizer.kind if config.tokenizer.kind in vocabulary_learning.TRAINING_BYTES else "bpe"
    words = vocabulary_learning.count_words(kind, sample, config.tokenizer.lowercase)
    seconds_per_byte = (time.perf_counter() - began) / max(1, characters)
    scripts = _scripts(sample)
    median, ninth_decile, longest = np.percentile(beginning.sizes, [50, 90, 99]).tolist()
    text = Text(
        bytes=beginning.corpus_bytes,
        documents=beginning.corpus_documents,
        lengths=(median, ninth_decile, longest),
        latin=scripts.get("LATIN", 0.0),
        words=len(words),
        has_spaces=characters < LONGEST_WORDS * sum(len(sentence.split()) for sentence in sample),
    )
    files = sum(len(portion.files) for portion in portions)
    return Survey(text, document, scripts, kind, words, sample, seconds_per_byte, files, beginning.is_whole)


class _Beginning(reading.ReadOptions):
    """The beginning of a corpus: at most `MOST_BYTES`, about the same number of bytes of each portion.

    Attributes:
      sizes: the bytes of each document.
      documents: the first documents, of about `COUNTED_CHARACTERS`.
      read_bytes: the bytes that were read, as stored. Data sets do not report stored bytes; for data sets, this is the
        number of bytes of the text.
      is_whole: whether the whole corpus was read.
      corpus_bytes: the estimated bytes of the text of the corpus.
      corpus_documents: the estimated number of documents of the corpus.
    """

    def __init__(self, config: ConfigDict, portions: Sequence[corpus.Portion], document: str):
        """Reads the beginning of the corpus. Raises `UserError` if the beginning contains no document."""
        super().__init__(config.data.text_column, document)
        self.sizes: list[int] = []
        self.documents: list[Document] = []
        self.read_bytes, self.is_whole, self.corpus_bytes, self.corpus_documents = 0, True, 0.0, 0.0
        self._text_bytes, self._limit = 0, 0
        self._faults: list[tuple[str, str]] = []
        for index, portion in enumerate(portions):
            if self.read_bytes < MOST_BYTES:
                self._read(portion, (MOST_BYTES - self.read_bytes) // (len(portions) - index))
        if not self.sizes:
            if self._faults:
                reading.DEFAULT.on_bad(*self._faults[0])
            part = "the text" if self.is_whole else f"the first {self.read_bytes:,} bytes"
            raise UserError(f"config.data.corpus = {config.data.corpus!r}: no words in {part}; name files with text")

    def _read(self, portion: corpus.Portion, limit: int) -> None:
        """Reads a portion until `limit` bytes have been read."""
        start, text_start, documents_start, is_whole = self.read_bytes, self._text_bytes, len(self.sizes), True
        self._limit = start + limit
        try:
            for document in corpus.read_portion(portion, self):
                if self._text_bytes < COUNTED_CHARACTERS:
                    self.documents.append(document)
                self.sizes.append(sum(len(line.encode()) for line in document.lines))
                self._text_bytes += self.sizes[-1]
                if self.read_bytes == start and self._text_bytes - text_start > limit:
                    raise _LimitReached
        except _LimitReached:
            is_whole = self.is_whole = False
        text_bytes = self._text_bytes - text_start
        if self.read_bytes == start:
            self.read_bytes += text_bytes
        # The estimate assumes that the rest of a portion resembles the beginning. If the size of the portion is
        # unknown, only the beginning counts.
        factor = 1.0 if is_whole else max(1.0, portion.bytes / max(1, self.read_bytes - start))
        self.corpus_bytes += factor * text_bytes
        self.corpus_documents += factor * (len(self.sizes) - documents_start)

    def on_read(self, size: int) -> None:
        """Counts the bytes. Raises `_LimitReached` at the limit."""
        if self.read_bytes >= self._limit:
            raise _LimitReached
        self.read_bytes += size

    def on_bad(self, fault: str, remedy: str = reading.SKIP) -> None:
        """Stores the fault."""
        self._faults.append((fault, remedy))

    def on_skipped_file(self, path: str, fault: str) -> None:
        """Stores the fault."""
        self._faults.append((f"{path}: {fault}", reading.READABLE))


def _scripts(sample: list[str]) -> dict[str, float]:
    """Returns {script: fraction of the letters}, the most frequent script first."""
    step = max(1, sum(map(len, sample)) // DECODED_LETTERS)
    characters = itertools.islice(itertools.chain.from_iterable(sample), 0, None, step)
    counts = collections.Counter(unicodedata.name(x, "OTHER").split()[0] for x in characters if x.isalpha())
    return {script: count / counts.total() for script, count in counts.most_common()}


def learn_from_survey(kind: str, lowercase: bool, vocab_size: int, surveyed: Survey) -> Tokenizer:
    """Learns a tokenizer from the surveyed words. The vocabulary is smaller if the words do not give enough tokens.

    The tokenizer is used to estimate the number of tokens; the run learns its tokenizer from all documents.

    Args:
      kind: the kind of tokenizer.
      lowercase: whether the tokenizer lowercases the text.
      vocab_size: the number of tokens to learn.
      surveyed: the survey of the corpus.

    Raises:
      UserError: the kind cannot be learnt, or there is too little text.
    """
    if kind not in vocabulary_learning.TRAINING_BYTES:
        kinds = ", ".join(vocabulary_learning.TRAINING_BYTES)
        raise UserError(
            f"config.tokenizer.kind = {kind!r}: bertjax cannot learn this kind; choose {kinds}, or set tokenizer.path"
        )
    words = surveyed.words
    if kind != surveyed.kind:
        words = vocabulary_learning.count_words(kind, surveyed.sample, lowercase)
    least, tried = 0, set()
    while vocab_size not in tried:
        tried.add(vocab_size)
        try:
            return vocabulary_learning.learn_new_vocabulary(kind, words, vocab_size, lowercase)
        except UserError as error:
            match = re.search(r"gives (\d+) tokens", str(error))
            possible = int(match[1]) if match else 0
        if possible > vocab_size:  # the letters alone are more tokens
            least, vocab_size = possible, 128 * (possible // 128 + 1)
        else:
            # The run learns from fewer documents, which give fewer tokens.
            sizes = (128 * (possible * 4 // 5 // 128), possible * 9 // 10, possible)
            vocab_size = next((size for size in sizes if size >= max(least, LEAST_TOKENS)), possible)
    raise UserError(
        f"config.data.corpus: {surveyed.text.bytes:,.0f} bytes are too little text to learn a vocabulary; add text, or "
        f"set --config.tokenizer.path to a vocabulary"
    )


def bytes_per_token(tokenizer: Tokenizer, sample: Sequence[str]) -> float:
    """Returns the mean number of bytes of a token in the first sentences of the sample."""
    ends = np.cumsum([len(sentence) for sentence in sample])
    texts = sample[: int(np.searchsorted(ends, ENCODED_CHARACTERS)) + 1]
    _, counts = tokenizer.encode_flat(texts)
    return sum(len(text.encode()) for text in texts) / max(1, int(counts.sum()))


def masked_texts(config: ConfigDict, surveyed: Survey) -> tuple[str, ...]:
    """Returns at most `MASKED_TEXTS` sentences of held-out documents, in which [MASK] replaces a frequent word.

    The sentences are from the beginning of the corpus, one per document. Every call returns the same sentences.
    """
    frequent = {word for word, _ in surveyed.words.most_common(600)[12:]}
    selection, characters = selection_of(config), 0
    texts: list[str] = []
    counts: collections.Counter = collections.Counter()
    for selected in selection.read(corpus.groups(list(selection.weights))[0], counts):
        characters += sum(map(len, selected.document.lines))
        if len(texts) >= MASKED_TEXTS or max(counts["bytes"], characters) > MOST_BYTES // 2:
            break
        if not is_train(selected.part):
            split = sentences.split(selected.document, config.data.language, config.data.split_sentences)
            texts += itertools.islice(filter(None, (_masked(sentence, frequent) for sentence in split)), 1)
    return tuple(texts)


def _masked(sentence: str, frequent: set[str]) -> str:
    """Masks a frequent word of a sentence of 5 to 25 words; returns "" if the sentence is not suitable."""
    words = sentence.split()
    places = [i for i, word in enumerate(words) if i and word in frequent and word.isalpha() and len(word) > 2]
    if "[MASK]" in sentence or not 5 <= len(words) <= 25 or not places:
        return ""
    words[places[len(places) // 2]] = "[MASK]"
    return " ".join(words)
