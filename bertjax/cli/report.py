"""Draws runs on one page: bertjax report WORKDIR... --output=FOLDER

Loss and accuracy against steps, tokens and hours, learning rate, gradient norm and throughput, of all runs over each
other; of searches, means and standard deviations. The page of a single run also has the attention of its checkpoint to
--text, head by head, and the neighbours of word embeddings. Writes report.html, with its pictures, and report.png.
WORKDIR@STEP looks into that checkpoint; a Hugging Face folder or Google's bert_model.ckpt has no curves, but this.

--watch=30 draws the curves again every 30 seconds until no run goes on any more; a browser that shows them follows.
"""

from absl import flags

from bertjax.cli.app import run_command
from bertjax.cli.next_commands import command, print_next, uses_of

_OUTPUT = flags.DEFINE_string("output", None, "Folder to write to; by default the workdir, if there is only one.")
_TEXT = flags.DEFINE_string("text", "the man went to the store to buy a bottle of milk .", "To draw the attention of.")
_WORDS = flags.DEFINE_list("words", [], "To list the neighbours of; by default the words of the text.")
_WATCH = flags.DEFINE_float(
    "watch", 0.0, "Seconds between updates of the page while runs go on; 0: the page is written once."
)


def main(workdirs: list[str]) -> None:
    from bertjax.common.errors import UserError
    from bertjax.interop import pretrained
    from bertjax.models import families
    from bertjax.models.family import ExposesAttention
    from bertjax.reporting import page

    if not workdirs:
        raise UserError("name the workdirs of one or more runs")
    if _OUTPUT.value is None and len(workdirs) > 1:
        raise UserError("--output: say in which folder to write about several runs")
    for flag in (_TEXT, _WORDS):
        if flag.present and len(workdirs) > 1:
            raise UserError(f"--{flag.name}: of one run only; of {len(workdirs)} runs, their curves are drawn")
    if not 0 <= _WATCH.value < 1e6:
        raise UserError(f"--watch={_WATCH.value:g}: must be a number of seconds")
    for flag in (_TEXT, _WORDS):
        if flag.present and _WATCH.value:
            raise UserError(f"--{flag.name}: --watch draws curves only; leave one of them out")
    if _WATCH.value:
        _watch(_OUTPUT.value or workdirs[0], workdirs, _WATCH.value)
        return
    source, runs = None, workdirs
    if len(workdirs) == 1 and (place := _checkpoint(workdirs[0])):
        source = pretrained.read_with_tokenizer(workdirs[0])
        runs = [place.folder] if place.format == "bertjax" else []
    for flag in (_TEXT, _WORDS):
        if flag.present and source is None:
            raise UserError(f"--{flag.name}: {workdirs[0]} has no checkpoint to look into; a search's are in runs/")
    if _TEXT.present and not isinstance(families.family_of(source.config), ExposesAttention):
        raise UserError(f"--text: {workdirs[0]} has no attention to draw; leave it out")
    if not (_OUTPUT.value or runs):
        raise UserError(f"--output: say in which folder to write about {workdirs[0]}")
    print(page.write_page(_OUTPUT.value or runs[0], runs, source, _TEXT.value, _WORDS.value), flush=True)
    print_next(*(uses_of(workdirs[0]) if source else [command("runs", *workdirs)]))


def _watch(folder: str, workdirs: list[str], seconds: float) -> None:
    """Draws the curves of runs again and again, the last time once none goes on."""
    import time

    from bertjax.common import lock
    from bertjax.common.errors import UserError
    from bertjax.reporting import page

    said, going_on = "", True
    while going_on:
        going_on = any(map(lock.is_held, workdirs))
        try:
            path = str(page.write_page(folder, workdirs, refreshed=seconds if going_on else 0))
        except UserError as error:  # no metrics yet
            if not going_on:
                raise
            path = str(error)
        if path != said:
            print(path, flush=True)
            said = path
        if going_on:
            time.sleep(seconds)


def _checkpoint(path: str):
    """Returns the place of a checkpoint; None for a search, and for a run, or a trial, that has none."""
    from etils import epath

    from bertjax.interop import pretrained
    from bertjax.training.checkpoints import checkpoint, workdir
    from bertjax.training.trackers import jsonl

    folder = epath.Path(path)
    is_run = (folder / jsonl.METRICS).exists() or (folder / workdir.TRIALS).is_dir()
    return None if is_run and not checkpoint.steps(folder) else pretrained.find(path)


if __name__ == "__main__":
    run_command(main)
