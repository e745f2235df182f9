"""Progress through a corpus."""

from collections.abc import Sequence

import tqdm

from bertjax.data.corpus import Group


def progress(title: str, groups: Sequence[Group]) -> tqdm.tqdm:
    """A progress bar over the bytes of a corpus as stored: with MB/s and, if its size is known, the time left."""
    total = sum(group.bytes for group in groups) or None
    return tqdm.tqdm(desc=title, total=total, unit="B", unit_scale=True, disable=None, leave=False)
