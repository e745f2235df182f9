"""A folder for the finished parts of a long computation, so that an interrupted computation resumes.

The name of a file contains a hash of the inputs of the part. A computation with other inputs thus never reads the file.
"""

import contextlib
import hashlib
import json
import shutil
import sys
import tempfile
import zipfile
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np
from etils import epath

from bertjax.common import lock
from bertjax.common.errors import UserError
from bertjax.common.files import replacing


class WorkFolder:
    """The finished parts in a folder; `opened_for` returns one.

    Args:
      path: the folder.
    """

    def __init__(self, path: epath.PathLike) -> None:
        self.path = epath.Path(path)

    def file(self, kind: str, inputs: Any, suffix: str) -> epath.Path:
        """Returns the path of the file of a part.

        Args:
          kind: the kind of the part, such as "documents".
          inputs: values that JSON can contain, which determine the content.
          suffix: the suffix of the file.
        """
        return self.path / f"{kind}-{digest_of(inputs)}{suffix}"

    def arrays(self, kind: str, inputs: Any, compute: Callable[[], Sequence[np.ndarray]]) -> list[np.ndarray]:
        """Reads the arrays of a part, or computes and writes the arrays.

        Args:
          kind: the kind of the part.
          inputs: values that JSON can contain, which determine the arrays.
          compute: returns the arrays.
        """
        path = self.file(kind, inputs, ".npz")
        with contextlib.suppress(FileNotFoundError, ValueError, EOFError, zipfile.BadZipFile), np.load(path) as archive:
            return [archive[name] for name in archive]
        arrays = list(compute())
        with replacing(path) as partial, partial.open("wb") as file:
            np.savez(file, *arrays)
        return arrays


def digest_of(inputs: Any) -> str:
    """Returns a hash of values that JSON can contain."""
    return hashlib.sha256(json.dumps(inputs, sort_keys=True).encode()).hexdigest()[:16]


@contextlib.contextmanager
def opened_for(output: epath.PathLike) -> Iterator[WorkFolder]:
    """Context manager: yields the folder `OUTPUT.work`, and deletes the folder if the block ends without an error.

    An output in an object store has a temporary folder, which is also deleted after an error.

    Raises:
      UserError: if the folder cannot be created, or if another process uses the folder.
    """
    if "://" in str(output):
        with tempfile.TemporaryDirectory(prefix="bertjax-") as temporary:
            yield WorkFolder(temporary)
        return
    path = epath.Path(f"{output}.work")
    try:
        path.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UserError(
            f"--output={output}: the work folder {path} cannot be created ({error.strerror}); correct the path"
        ) from None
    with lock.held(path, "work folder"):
        try:
            yield WorkFolder(path)
        except KeyboardInterrupt:
            print(f"the same command resumes from {path}", file=sys.stderr, flush=True)
            raise
        shutil.rmtree(path, ignore_errors=True)  # A network file system keeps files that are mapped into memory.
