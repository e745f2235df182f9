"""Writes files atomically."""

import uuid

from etils import epath


def write_whole(path: epath.PathLike, content: str | bytes) -> None:
    """Writes to a temporary name, then renames it, so that readers never see a partial file."""
    path = epath.Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_name(f"{path.name}.{uuid.uuid4().hex[:8]}.partial")  # unique per writer
    partial.write_bytes(content.encode() if isinstance(content, str) else content)
    partial.replace(path)
