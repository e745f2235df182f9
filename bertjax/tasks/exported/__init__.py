"""A checkpoint as a program that needs no bertjax: StableHLO for JAX alone, or ONNX."""

from etils import epath

from bertjax import tasks
from bertjax.config import Compute, UserError
from bertjax.interop.pretrained import Pretrained
from bertjax.tasks import network


def check(output: epath.PathLike, source: Pretrained) -> epath.Path:
    """Returns the folder to write. Raises `UserError` unless it is new or empty and the checkpoint's rows are texts."""
    output = epath.Path(output)
    if output.exists() and (not output.is_dir() or any(output.iterdir())):
        raise UserError(f"--output={output}: exists and is not empty; name a new folder")
    if source.architecture.endswith("ForMultipleChoice"):
        raise UserError(f"{source.path}: rows of several choices are not exported")
    return output


def outputs(source: Pretrained) -> network.Function:
    """Returns what is exported: `bertjax.Model.apply`, in float32 on any device."""
    task = tasks.of_checkpoint(source.settings.get("task", ""), source.architecture)
    return network.outputs(source, task, Compute())
