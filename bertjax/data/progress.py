"""Progress through a corpus."""

from collections.abc import Iterable

import tqdm


def progress(title: str, sizes: Iterable[int]) -> tqdm.tqdm:
    """Returns a bar over stored bytes: with MB/s and, if the `sizes` of its parts are known, the time left."""
    return tqdm.tqdm(desc=title, total=sum(sizes) or None, unit="B", unit_scale=True, disable=None, leave=False)
