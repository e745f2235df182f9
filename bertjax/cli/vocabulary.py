"""Learns a vocabulary from a corpus.

    bertjax vocabulary --config=base --config.data.corpus=texts/ --output=vocabulary

Learns `config.model.vocab_size` tokens from `config.data.corpus` and writes vocabulary/vocab.txt, or
vocabulary/tokenizer.model with --config.tokenizer.kind=sentencepiece. Use it with --config.tokenizer.path=FILE. The
same config gives the same vocabulary for any number of workers.
"""

import os

from absl import flags

from bertjax.cli.app import run_command
from bertjax.cli.flags import (
    config_arguments,
    define_config_flag,
    define_required_flag,
    experiment_name,
    refuse_arguments,
)
from bertjax.cli.next_commands import command, print_next
from bertjax.distributed.topology import available_cores

_CONFIG = define_config_flag()
_OUTPUT = define_required_flag("output", "Folder for the vocabulary.")
_WORKERS = flags.DEFINE_integer(
    "workers", available_cores(), "Number of parallel processes; by default one per core.", lower_bound=1
)


def main(arguments: list[str]) -> None:
    """Learns the vocabulary, and proposes commands that use it."""
    refuse_arguments(arguments, "settings are given as --config.name=value")

    from bertjax.library.runs import learn_vocabulary

    tokenizer, path = learn_vocabulary(_CONFIG.value, _OUTPUT.value, _WORKERS.value)
    print(f"learned {tokenizer.vocab_size} tokens, written to {path}", flush=True)
    arguments = [*config_arguments(), f"--config.tokenizer.path={path}"]
    print_next(
        command("prepare", *arguments, f"--output={os.path.join(_OUTPUT.value, 'records')}"),
        command("train", *arguments, f"--workdir=runs/{experiment_name()}"),
    )


if __name__ == "__main__":
    run_command(main)
