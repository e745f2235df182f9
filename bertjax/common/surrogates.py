"""Lone surrogates: halves of a UTF-16 character, which a Python string and JSON may hold and UTF-8 may not.

U+FFFD takes the place of each of them where text enters. A character stays one character, so that the places of words
and answers stay as they are.
"""

import re

REPLACEMENT = "\ufffd"
SURROGATE = re.compile("[\ud800-\udfff]")
# The escapes of a JSON text, one after the other: a pair is one character, and the group matches a lone surrogate.
ESCAPE = re.compile(r"\\(?:u[dD][89abAB][0-9a-fA-F]{2}\\u[dD][c-fC-F][0-9a-fA-F]{2}|(u[dD][89a-fA-F][0-9a-fA-F]{2})|.)")


def replaced(text: str) -> str:
    """Returns a text with U+FFFD in place of each lone surrogate."""
    return text if text.isascii() else SURROGATE.sub(REPLACEMENT, text)


def replaced_in_json(text: str) -> str:
    """Returns a JSON text with U+FFFD in place of each escape of a lone surrogate."""
    return ESCAPE.sub(lambda escape: "\\ufffd" if escape[1] else escape[0], text)
