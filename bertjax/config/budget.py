"""Parses `config.budget`, the limit of the time or of the training tokens of a run."""

import dataclasses
import math
import re

from bertjax.common.errors import UserError

EXAMPLES = "20min, 8h, 2d or 200M (tokens)"
_SECONDS = {"s": 1, "sec": 1, "min": 60, "h": 3600, "d": 86_400}
_TOKENS = {"k": 1e3, "M": 1e6, "B": 1e9, "G": 1e9, "T": 1e12}
_PART = re.compile(r"(\d+(?:\.\d*)?)\s*(sec|min|s|h|d)\s*")
_COUNT = re.compile(r"(\d+(?:\.\d*)?)\s*([kMBGT]?)\s*tokens|(\d+(?:\.\d*)?)\s*([kMBGT])")


@dataclasses.dataclass(frozen=True)
class Budget:
    """The largest number of seconds from the start of a run to its report, or of training tokens; inf: no limit."""

    text: str  # the value of the field
    seconds: float = math.inf
    tokens: float = math.inf

    def __str__(self) -> str:
        return self.text


def parse_budget(text: str) -> Budget:
    """Returns the budget of "20min", "1h 30min", "8h" or "200M" (tokens). Raises `UserError` for any other text."""
    whole = text.strip() if len(text) < 30 else ""
    if match := _COUNT.fullmatch(whole):
        tokens = float(match[1] or match[3]) * _TOKENS.get(match[2] or match[4], 1)
        if tokens > 0:
            return Budget(whole, tokens=tokens)
    parts = _PART.findall(whole)
    seconds = sum(float(number) * _SECONDS[unit] for number, unit in parts)
    if seconds > 0 and re.fullmatch(rf"(?:{_PART.pattern})+", whole):
        return Budget(whole, seconds=seconds)
    raise UserError(f"config.budget = {text!r}: must be a time or a number of tokens, such as {EXAMPLES}")
