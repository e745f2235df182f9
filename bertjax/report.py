"""Draws runs on one page: python -m bertjax.report WORKDIR... --output=FOLDER

Loss and accuracy against steps, tokens and hours, learning rate, gradient norm and throughput, of all runs over each
other; of searches, means and standard deviations. Of a single run also what its checkpoint has learnt: the attention of
--text, head by head, and the neighbours of word embeddings. Writes report.html, with its pictures, and report.png.
"""

from absl import flags

from bertjax import command

_OUTPUT = flags.DEFINE_string("output", None, "Folder to write to; by default the workdir, if there is only one.")
_TEXT = flags.DEFINE_string("text", "the man went to the store to buy a bottle of milk .", "To draw the attention of.")
_WORDS = flags.DEFINE_list("words", [], "To list the neighbours of; by default the words of the text.")


def main(workdirs: list[str]) -> None:
    from bertjax.config import UserError
    from bertjax.interop import pretrained
    from bertjax.reporting import page
    from bertjax.training import checkpoint

    if not workdirs:
        raise UserError("name the workdirs of one or more runs")
    if _OUTPUT.value is None and len(workdirs) > 1:
        raise UserError("--output: say in which folder to write about several runs")
    for flag in (_TEXT, _WORDS):
        if flag.present and len(workdirs) > 1:
            raise UserError(f"--{flag.name}: of one run only; of {len(workdirs)} runs, their curves are drawn")
    source = None
    if len(workdirs) == 1 and checkpoint.steps(workdirs[0]):  # not of a search, nor of a trial that was not the best
        source = pretrained.read_with_tokenizer(workdirs[0])
    for flag in (_TEXT, _WORDS):
        if flag.present and source is None:
            raise UserError(f"--{flag.name}: {workdirs[0]} has no checkpoint to look into; a search's are in runs/")
    if _TEXT.present and source.config.encoder != "transformer":
        raise UserError(f"--text: {workdirs[0]} has no attention to draw; leave it out")
    print(page.write(_OUTPUT.value or workdirs[0], workdirs, source, _TEXT.value, _WORDS.value))


if __name__ == "__main__":
    command.run(main)
