"""A checkpoint as a program that needs no bertjax: StableHLO for JAX, or ONNX."""

import contextlib
import shutil
from collections.abc import Iterator

from etils import epath

from bertjax.common.errors import UserError
from bertjax.common.files import absolute, require_new_folder
from bertjax.config.model_config import Compute
from bertjax.export import network
from bertjax.interop.pretrained import Pretrained


@contextlib.contextmanager
def new_folder(output: epath.PathLike) -> Iterator[epath.Path]:
    """Yields a folder to write, which becomes `output` at the end: there is a whole export, or none.

    Raises `UserError` if `output` is there and not an empty folder. One of an object store is written in place.
    """
    require_new_folder(output)
    output = epath.Path(output)
    if "://" in str(output):
        yield output
        return
    output = absolute(output)  # a folder without a name, such as ".", has one
    partial = output.parent / f".{output.name}.part"
    shutil.rmtree(partial, ignore_errors=True)  # an export that was killed has left it
    partial.mkdir(parents=True)
    try:
        yield partial
        if output.exists():
            for each in list(partial.iterdir()):
                each.rename(output / each.name)
        else:
            partial.rename(output)
    finally:
        shutil.rmtree(partial, ignore_errors=True)


def check(source: Pretrained) -> None:
    """Raises `UserError` if a checkpoint's rows are no texts."""
    if source.architecture.endswith("ForMultipleChoice"):
        raise UserError(f"{source.path}: rows of several choices are not exported")


def exported_function(source: Pretrained) -> network.Function:
    """Returns what is exported: `bertjax.Model.apply`, in float32 on any device."""
    return network.outputs(source, Compute())
