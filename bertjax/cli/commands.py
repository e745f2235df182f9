"""The command `bertjax`, also `python -m bertjax`: imports and runs the module of a subcommand."""

import runpy
import sys

from bertjax import __version__

COMMANDS = {  # name: (the name in `python -m bertjax.NAME`, what the command does)
    "train": ("main", "pre-trains or fine-tunes a model as an experiment configures it"),
    "prepare": ("prepare", "converts a corpus to pre-masked TFRecords"),
    "vocabulary": ("vocabulary", "learns a vocabulary from a corpus"),
    "compile": ("compile", "plans an experiment for TPUs or GPUs without them: memory, time, cost"),
    "predict": ("predict", "fills masks, or applies a fine-tuned model to texts"),
    "evaluate": ("evaluate", "scores a checkpoint on labelled data, or by minimal pairs of sentences"),
    "serve": ("serve", "serves a checkpoint over HTTP, with a page to try it"),
    "mine": ("mine", "mines hard negatives for the training of embeddings"),
    "search": ("search", "finds the documents that are nearest to queries by their embeddings"),
    "rerank": ("rerank", "ranks documents for a query with a reranker"),
    "extract": ("extract", "writes embeddings or hidden states of texts"),
    "submit": ("submit", "writes a benchmark's submission file"),
    "runs": ("runs", "lists runs with their steps, losses and states"),
    "report": ("report", "draws the curves of runs, and the attention and embeddings of a checkpoint"),
    "convert": ("convert", "converts a checkpoint to or from Hugging Face's or Google's format"),
    "doctor": ("doctor", "describes this installation, its devices and its problems, for a bug report"),
}


def main() -> None:
    """Runs the command that the first argument names."""
    name = sys.argv[1] if len(sys.argv) > 1 else "--help"
    if name in ("-h", "-help", "--help", "help"):
        lines = [f"  {command:<12}{purpose}" for command, (_, purpose) in COMMANDS.items()]
        last = "COMMAND --help lists the flags of a command. --version prints the version of bertjax."
        lines = ["usage: bertjax COMMAND [--flag=VALUE ...]", "", *lines, "", last]
        print("\n".join(lines), flush=True)
    elif name == "--version":
        print(f"bertjax {__version__}", flush=True)
    elif name in COMMANDS:
        del sys.argv[1]
        # As __main__, because absl reads its docstring and flags.
        runpy.run_module(f"bertjax.cli.{name}", run_name="__main__", alter_sys=True)
    else:
        import difflib

        close = difflib.get_close_matches(name, COMMANDS, n=1)
        guess = f"did you mean {close[0]}? There are" if close else "there are"
        print(f"error: bertjax has no command {name!r}; {guess} {', '.join(COMMANDS)}", file=sys.stderr)
        sys.exit(1)
