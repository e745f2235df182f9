"""The parts of an export that StableHLO and ONNX share: the output folder, and the exported function."""

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
    """Yields a temporary folder, which becomes `output` at the end, so that no incomplete export remains.

    A folder in an object store is written in place.

    Raises:
      UserError: `output` exists and is not an empty folder.
    """
    require_new_folder(output)
    output = epath.Path(output)
    if "://" in str(output):
        yield output
        return
    output = absolute(output)  # also "." has a name then
    partial = output.parent / f".{output.name}.part"
    shutil.rmtree(partial, ignore_errors=True)  # remains of an export that was killed
    partial.mkdir(parents=True)
    try:
        yield partial
        if output.exists():
            for path in list(partial.iterdir()):
                path.rename(output / path.name)
        else:
            partial.rename(output)
    finally:
        shutil.rmtree(partial, ignore_errors=True)


def check_exportable_rows(source: Pretrained) -> None:
    """Raises `UserError` for a checkpoint of multiple choice, whose rows are not texts."""
    if source.architecture.endswith("ForMultipleChoice"):
        raise UserError(f"{source.path}: multiple-choice models cannot be exported")


def exported_function(source: Pretrained) -> network.Function:
    """Returns the function that is exported: `bertjax.Model.apply`, in float32 on any device."""
    return network.outputs(source, Compute())
