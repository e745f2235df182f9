"""Documents -> sentences, with the library sentencex."""

import sentencex

from bertjax.config import UserError
from bertjax.text.documents import Document

MAX_SENTENCE_CHARACTERS = 100_000


def split(document: Document, language: str = "en", split_lines: bool = True) -> list[str]:
    """The sentences of a document. Without `split_lines` each of its lines already is one.

    Raises `UserError` for a sentence of more than `MAX_SENTENCE_CHARACTERS`: such a thing is not language.
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
