"""The report about runs or a checkpoint: chooses the parts of the page, and redraws the page while runs continue."""

import time
from collections.abc import Collection, Iterator, Sequence

from etils import epath

from bertjax.common import lock
from bertjax.common.errors import UserError
from bertjax.interop import pretrained
from bertjax.interop.places import Place
from bertjax.models import families
from bertjax.models.family import ExposesAttention
from bertjax.reporting import page
from bertjax.training.checkpoints import checkpoint, workdir
from bertjax.training.trackers import jsonl


def write_report(
    workdirs: Sequence[str], output: str = "", text: str = "", words: Sequence[str] = (), required: Collection[str] = ()
) -> tuple[epath.Path, bool]:
    """Writes the page about runs, or about a single run and its checkpoint.

    Args:
      workdirs: the workdirs of runs; or one checkpoint.
      output: the folder to write to; "" for the workdir.
      text: the text whose attention is shown.
      words: the words whose nearest embeddings are listed; by default the words of the text.
      required: the flags "text" and "words", if the user has set them. A page without the part of such a flag is an
        error.

    Returns:
      The path of the page, and whether the page shows a checkpoint.

    Raises:
      UserError: if a required part or the folder is missing, and as `page.write_page` does.
    """
    source, runs = None, list(workdirs)
    if len(workdirs) == 1 and (place := _checkpoint_place(workdirs[0])):
        source = pretrained.read_with_tokenizer(workdirs[0])
        runs = [str(place.folder)] if place.format == "bertjax" else []
    for flag in required:
        if source is None:
            raise UserError(
                f"--{flag}: {workdirs[0]} has no checkpoint; name a trial of the sweep, such as runs/x/runs/y"
            )
        if flag == "text" and not isinstance(families.family_of(source.config), ExposesAttention):
            raise UserError(f"--text: {workdirs[0]} has no attention to draw; leave the flag out")
    if not (output or runs):
        raise UserError(f"--output: is missing; name the folder for the page about {workdirs[0]}")
    return page.write_page(output or runs[0], runs, source, text, words), source is not None


def watch(folder: str, workdirs: Sequence[str], seconds: float) -> Iterator[str]:
    """Draws the curves of runs every `seconds` until all runs have ended; yields a line for each change of the result.

    Raises:
      UserError: if the ended runs have no metrics.
    """
    previous, is_running = "", True
    while is_running:
        is_running = any(map(lock.is_held, workdirs))
        try:
            line = str(page.write_page(folder, workdirs, refreshed=seconds if is_running else 0))
        except UserError as error:  # The runs have no metrics yet.
            if not is_running:
                raise
            line = str(error)
        if line != previous:
            yield line
            previous = line
        if is_running:
            time.sleep(seconds)


def _checkpoint_place(path: str) -> Place | None:
    """Returns the place of a checkpoint; None for a sweep, and for a run or a trial without a checkpoint."""
    folder = epath.Path(path)
    is_run = (folder / jsonl.METRICS).exists() or (folder / workdir.TRIALS).is_dir()
    return None if is_run and not checkpoint.steps(folder) else pretrained.find(path)
