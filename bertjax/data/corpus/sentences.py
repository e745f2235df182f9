"""Splits documents into sentences with the sentencex library."""

import sentencex

from bertjax.data.corpus.reading import Document

MAX_SENTENCE_CHARACTERS = 100_000


def split(document: Document, language: str = "en", split_lines: bool = True) -> list[str]:
    """Returns the sentences of a document. With `split_lines=False`, each line is one sentence."""
    return [sentence for line in document.lines for sentence in _split_line(line, language, split_lines)]


def _split_line(line: str, language: str, split_lines: bool) -> list[str]:
    parts = sentencex.segment(language, line) if split_lines else (line,)
    return [sentence for part in parts if (sentence := part.strip())]


def find_fault(document: Document, language: str, split_lines: bool) -> str:
    """Returns a message if a sentence has more than `MAX_SENTENCE_CHARACTERS`, else ""."""
    long = (line for line in document.lines if len(line) > MAX_SENTENCE_CHARACTERS)
    longest = max((len(part) for line in long for part in _split_line(line, language, split_lines)), default=0)
    if longest <= MAX_SENTENCE_CHARACTERS:
        return ""
    return (
        f"{document.source}: a sentence of this document has {longest:,} characters, expected at most "
        f"{MAX_SENTENCE_CHARACTERS:,}"
    )
