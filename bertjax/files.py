"""Files that are whole under their final name, or not there at all."""

import uuid

from etils import epath


def write_whole(path: epath.PathLike, content: str | bytes) -> None:
    """Writes under another name first, then renames: a reader never meets half a file."""
    path = epath.Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_name(f"{path.name}.{uuid.uuid4().hex[:8]}.partial")  # two writers do not meet
    partial.write_bytes(content.encode() if isinstance(content, str) else content)
    partial.replace(path)
