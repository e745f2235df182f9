"""Finds examples of a dev set that are also in the training data."""

from collections.abc import Hashable, Iterable, Iterator


def seen_in_training(train: Iterable[Hashable], *dev: tuple[str, Iterable[Hashable]]) -> Iterator[str]:
    """Yields a line to print for each dev set, (what its examples are called, its examples), with some in `train`."""
    sides = [(what, list(examples)) for what, examples in dev]
    wanted = {example for _, examples in sides for example in examples}
    found = {example for example in train if example in wanted}
    for what, examples in sides:
        if count := sum(example in found for example in examples):
            yield f"{count} of {len(examples)} {what} are also in the training data"
