"""Lone surrogates: halves of a UTF-16 character, which are valid in Python strings and JSON, but not in UTF-8.

U+FFFD replaces a lone surrogate in all texts that are read. The length of the text stays the same, and so do the
positions of words and answers.
"""

import re

REPLACEMENT = "\ufffd"
SURROGATE = re.compile("[\ud800-\udfff]")
# An escape of a JSON text. A pair of surrogates is one escape. The group matches a lone surrogate.
ESCAPE = re.compile(r"\\(?:u[dD][89abAB][0-9a-fA-F]{2}\\u[dD][c-fC-F][0-9a-fA-F]{2}|(u[dD][89a-fA-F][0-9a-fA-F]{2})|.)")


def replaced(text: str) -> str:
    """Returns a text with U+FFFD in place of each lone surrogate."""
    return text if text.isascii() else SURROGATE.sub(REPLACEMENT, text)


def replaced_in_json(text: str) -> str:
    """Returns a JSON text with U+FFFD in place of each escape of a lone surrogate."""
    return ESCAPE.sub(lambda escape: "\\ufffd" if escape[1] else escape[0], text)
