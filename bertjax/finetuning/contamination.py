"""Finds examples of a dev set that are also in the training data."""

from collections.abc import Hashable, Iterable, Iterator


def seen_in_training(train: Iterable[Hashable], *dev: tuple[str, Iterable[Hashable]]) -> Iterator[str]:
    """Yields a line to print for each dev set that contains training examples.

    Args:
      train: the training examples.
      *dev: the name of the examples of a dev set, such as "dev sentences", and the examples.
    """
    dev_sets = [(name, list(examples)) for name, examples in dev]
    dev_examples = {example for _, examples in dev_sets for example in examples}
    shared = {example for example in train if example in dev_examples}
    for name, examples in dev_sets:
        if count := sum(example in shared for example in examples):
            yield f"{count} of {len(examples)} {name} are also in the training data"
