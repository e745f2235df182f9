"""The summary of a table of fine-tuning: its rows that are used or skipped, and the tokens that are cut or unknown."""

import dataclasses
from collections.abc import Iterator, Mapping, Sequence

from bertjax.data.loading.examples import Examples
from bertjax.text.tokenizer import Tokenizer

MOST_UNKNOWN = 0.01  # share of unknown tokens above which there is a warning
KEEPS_MORE = "--config.max_seq_length keeps more"


@dataclasses.dataclass(frozen=True)
class TableSummary:
    """Counts of a table; rows found = used + skipped.

    Attributes:
      name: such as "training".
      rows, texts: what a row is, and a text, in the plural; by default the same.
      used: how many rows are used.
      skipped: how many rows are not, by reason.
      examples: the encoded texts, or their windows.
      parts: texts of an example: 1, or 2 of a pair.
      lost: for each text how many of its tokens were cut off.
      keeps: the setting that keeps them.
    """

    name: str
    used: int
    examples: Examples
    tokenizer: Tokenizer
    rows: str = "examples"
    texts: str = ""
    skipped: Mapping[str, int] = dataclasses.field(default_factory=dict)
    parts: int = 1
    lost: Sequence[int] = ()
    keeps: str = KEEPS_MORE

    def lines(self, max_seq_length: int) -> Iterator[str]:
        """Yields the lines to print."""
        texts = self.texts or self.rows
        reasons = {reason: count for reason, count in self.skipped.items() if count}
        skipped = sum(reasons.values())
        why = f" ({', '.join(f'{count:,} {reason}' for reason, count in reasons.items())})" if reasons else ""
        special = len(self.tokenizer.framed((), () if self.parts > 1 else None))
        tokens = sum(map(len, self.examples.input_ids)) - special * len(self.examples.input_ids)
        unknown = sum(int((ids == self.tokenizer.unk_id).sum()) for ids in self.examples.input_ids)
        found = f"{self.name}: {self.used + skipped:,} {self.rows} found = {self.used:,} used, {skipped:,} skipped{why}"
        yield f"{found}; {tokens:,} tokens, {unknown / max(1, tokens):.2%} of them unknown"
        if cut := sum(lost > 0 for lost in self.lost):
            gone = sum(self.lost)
            yield (
                f"{cut} of {len(self.lost)} {self.name} {texts} truncated to {max_seq_length} tokens: "
                f"{gone / (tokens + gone):.2%} of the tokens are cut, {max(self.lost):,} of the longest; {self.keeps}"
            )
        if empty := sum(len(ids) == special for ids in self.examples.input_ids):
            yield f"{empty} of {len(self.examples.input_ids)} {self.name} {texts} are empty: they have no token"
        if unknown > MOST_UNKNOWN * tokens:
            yield (
                f"warning: {unknown / tokens:.1%} of the tokens of the {self.name} {texts} are unknown to the "
                f"vocabulary: is the checkpoint one of this language and script? --config.tokenizer.extend adds words "
                f"to a vocabulary when pre-training goes on"
            )
