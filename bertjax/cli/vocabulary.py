"""Learns a vocabulary from a corpus: bertjax vocabulary --config=base \\
--config.data.corpus=texts/ --output=vocabulary

Learns `config.model.vocab_size` pieces from `config.data.corpus` and writes vocabulary/vocab.txt, or
vocabulary/tokenizer.model with --config.tokenizer.kind=sentencepiece. Use it with --config.tokenizer.path=FILE. The
same config gives the same vocabulary for any number of workers.
"""

from absl import flags

from bertjax.cli.app import run_command
from bertjax.cli.flags import config_arguments, define_config_flag, experiment_name, require_flags
from bertjax.cli.next_commands import command, print_next
from bertjax.distributed.topology import available_cores

_CONFIG = define_config_flag()
_OUTPUT = flags.DEFINE_string("output", None, "Folder for the vocabulary.")
_WORKERS = flags.DEFINE_integer(
    "workers", available_cores(), "Number of parallel processes; by default one a core.", lower_bound=1
)
require_flags("config", "output")


def main(arguments: list[str]) -> None:
    import os

    from bertjax.common.errors import UserError
    from bertjax.data.preprocessing.vocabulary import learn_vocabulary
    from bertjax.launch.budget import plan
    from bertjax.launch.validate import validate
    from bertjax.pretraining.init_checkpoint import resolve_checkpoint
    from bertjax.pretraining.validate import validate_pretraining

    if arguments:
        raise UserError(f"unexpected argument {arguments[0]!r}; settings are given as --config.name=value")
    validate_pretraining(_CONFIG.value)  # refuses tasks other than pre-training
    validate(_CONFIG.value)
    config = plan.with_sizes(_CONFIG.value)
    config, _ = resolve_checkpoint(config)
    learnt = learn_vocabulary(config, _WORKERS.value)
    learnt.save(_OUTPUT.value)
    path = os.path.join(_OUTPUT.value, learnt.filename)
    print(f"learnt {learnt.vocab_size} pieces, written to {path}", flush=True)
    arguments = [*config_arguments(), f"--config.tokenizer.path={path}"]
    print_next(
        command("prepare", *arguments, f"--output={os.path.join(_OUTPUT.value, 'records')}"),
        command("train", *arguments, f"--workdir=runs/{experiment_name()}"),
    )


if __name__ == "__main__":
    run_command(main)
