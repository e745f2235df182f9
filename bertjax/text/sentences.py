"""Splits documents into sentences with the sentencex library."""

import sentencex

from bertjax.config import UserError
from bertjax.text.documents import Document

MAX_SENTENCE_CHARACTERS = 100_000


def split(document: Document, language: str = "en", split_lines: bool = True) -> list[str]:
    """Returns the sentences of a document. With `split_lines=False`, each line is one sentence.

    Raises `UserError` for a sentence of more than `MAX_SENTENCE_CHARACTERS`, which is probably not text.
    """
    sentences = []
    for line in document.lines:
        parts = sentencex.segment(language, line) if split_lines else (line,)
        sentences.extend(sentence for part in parts if (sentence := part.strip()))
    longest = max(map(len, sentences), default=0)
    if longest > MAX_SENTENCE_CHARACTERS:
        raise UserError(
            f"{document.source}: a sentence of {longest:,} characters in this document (at most "
            f"{MAX_SENTENCE_CHARACTERS:,}): is it text? Take it out or break it into lines"
        )
    return sentences
