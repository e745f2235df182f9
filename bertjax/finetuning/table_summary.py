"""The summary of a table of fine-tuning: the numbers of used and skipped rows, and of truncated and unknown tokens."""

import dataclasses
from collections.abc import Iterator, Mapping, Sequence

from bertjax.data.loading.examples import Examples
from bertjax.text.tokenizer import Tokenizer

MOST_UNKNOWN = 0.01  # a larger share of unknown tokens causes a warning
KEEPS_MORE = "--config.max_seq_length keeps more"


@dataclasses.dataclass(frozen=True)
class TableSummary:
    """Counts of a table.

    Attributes:
      name: the name of the table, such as "training".
      used: the number of rows that are used.
      examples: the encoded texts, or their windows.
      tokenizer: the tokenizer.
      rows: the word for the rows in the lines, such as "sentences".
      texts: the word for the texts in the lines; "" for the same word as `rows`.
      skipped: the number of rows that are not used, by reason.
      parts: the number of texts of an example: 1, or 2 for a pair.
      lost: the number of tokens of each text that were cut off.
      keeps: a clause about the setting that keeps more tokens.
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
        details = ", ".join(f"{count:,} {reason}" for reason, count in reasons.items())
        special = len(self.tokenizer.framed((), () if self.parts > 1 else None))
        tokens = sum(map(len, self.examples.input_ids)) - special * len(self.examples.input_ids)
        unknown = sum(int((ids == self.tokenizer.unk_id).sum()) for ids in self.examples.input_ids)
        counts = f"{self.used + skipped:,} {self.rows} found = {self.used:,} used, {skipped:,} skipped"
        counts += f" ({details})" if details else ""
        yield f"{self.name}: {counts}; {tokens:,} tokens, {unknown / max(1, tokens):.2%} of them unknown"
        if cut := sum(lost > 0 for lost in self.lost):
            cut_tokens = sum(self.lost)
            share = cut_tokens / (tokens + cut_tokens)
            yield (
                f"{cut} of {len(self.lost)} {self.name} {texts} truncated to {max_seq_length} tokens: {share:.2%} of "
                f"the tokens are cut, {max(self.lost):,} of the longest text; {self.keeps}"
            )
        if empty := sum(len(ids) == special for ids in self.examples.input_ids):
            yield f"{empty} of {len(self.examples.input_ids)} {self.name} {texts} are empty: they have no token"
        if unknown > MOST_UNKNOWN * tokens:
            yield (
                f"warning: {unknown / tokens:.1%} of the tokens of the {self.name} {texts} are unknown to the "
                f"vocabulary; choose a checkpoint of this language and script, or add words to the vocabulary in "
                f"continued pre-training with --config.tokenizer.extend"
            )
