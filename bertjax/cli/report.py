"""Draws runs on one page.

    bertjax report runs/a runs/b --output=FOLDER

Draws the loss and the accuracy over steps, tokens and hours, the learning rate, the gradient norm and the throughput of
all runs; for sweeps, means and standard deviations. The page of a single run also shows the attention of its checkpoint
for --text, head by head, and the nearest word embeddings. Writes report.html, which contains its pictures, and
report.png. WORKDIR@STEP shows another checkpoint of the run. A Hugging Face folder or Google's bert_model.ckpt has a
page without curves.

--watch=30 draws the curves again every 30 seconds until all runs have ended; a browser reloads the page.
"""

from absl import flags

from bertjax.cli.app import run_command, start_reading
from bertjax.cli.next_commands import command, print_next, uses_of
from bertjax.common.errors import UserError

_OUTPUT = flags.DEFINE_string("output", None, "Folder to write to; by default the workdir of a single run.")
_TEXT = flags.DEFINE_string(
    "text", "the man went to the store to buy a bottle of milk .", "The text whose attention is drawn."
)
_WORDS = flags.DEFINE_list(
    "words", [], "The words whose nearest embeddings are listed; by default the words of --text."
)
_WATCH = flags.DEFINE_float("watch", 0.0, "Seconds between updates of the page while runs go on; 0 writes it once.")


def main(workdirs: list[str]) -> None:
    """Writes the page, and prints its path."""
    _check_flags(workdirs)

    from bertjax.reporting.report import watch, write_report

    if _WATCH.value:
        for line in watch(_OUTPUT.value or workdirs[0], workdirs, _WATCH.value):
            print(line, flush=True)
        return
    if len(workdirs) == 1:
        start_reading(workdirs[0])
    required = [flag.name for flag in (_TEXT, _WORDS) if flag.present]
    path, has_checkpoint = write_report(workdirs, _OUTPUT.value or "", _TEXT.value, _WORDS.value, required)
    print(path, flush=True)
    print_next(*(uses_of(workdirs[0]) if has_checkpoint else [command("runs", *workdirs)]))


def _check_flags(workdirs: list[str]) -> None:
    """Raises `UserError` if the flags do not fit each other or the number of runs."""
    if not workdirs:
        raise UserError("WORKDIR: is missing; name the workdirs of one or more runs, as in bertjax report runs/mine")
    if _OUTPUT.value is None and len(workdirs) > 1:
        raise UserError("--output: is missing; name a folder for the page about several runs, such as --output=runs")
    if not 0 <= _WATCH.value < 1e6:
        raise UserError(f"--watch={_WATCH.value:g}: must be a number of seconds")
    for flag in (_TEXT, _WORDS):
        if flag.present and len(workdirs) > 1:
            raise UserError(f"--{flag.name}: is for a single run; the page of {len(workdirs)} runs has curves only")
        if flag.present and _WATCH.value:
            raise UserError(f"--{flag.name}: --watch draws curves only; leave one of them out")


if __name__ == "__main__":
    run_command(main)
