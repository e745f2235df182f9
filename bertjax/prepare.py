"""Converts a corpus to TFRecords: python -m bertjax.prepare --config=base --output=DIR --workers=8

Writes the pre-masked records of every stage of the config in Google BERT's format, the tokenizer, and manifest.json.
The same config gives the same bytes for any number of workers. Train on them with --config.data.records=DIR.
"""

from absl import flags

from bertjax import command
from bertjax.sharding.topology import available_cores

_CONFIG = command.define_config_flag()
_OUTPUT = flags.DEFINE_string("output", None, "Folder for the records; must not contain finished records.")
_WORKERS = flags.DEFINE_integer("workers", available_cores(), "Number of parallel processes.")
flags.mark_flags_as_required(["config", "output"])


def main(arguments: list[str]) -> None:
    from bertjax.config import UserError
    from bertjax.data.preparation import prepare
    from bertjax.validation import validate_pretraining

    if arguments:
        raise UserError(f"unexpected argument {arguments[0]!r}; settings are given as --config.name=value")
    validate_pretraining(_CONFIG.value)
    prepare(_CONFIG.value, _OUTPUT.value, _WORKERS.value)
    print(f"train on them with --config.data.records={_OUTPUT.value}")


if __name__ == "__main__":
    command.run(main)
