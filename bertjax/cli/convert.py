"""Converts a checkpoint.

    bertjax convert runs/mine for-transformers --format=huggingface

Source and output are the workdir of a run, a folder of Hugging Face or sentence-transformers, or Google's
bert_model.ckpt. The folder of a converted run contains a model card, README.md, with data, recipe and scores.
--push=USER/NAME also pushes the folder to the hub.

--format=stablehlo writes programs that need only jax, numpy and flatbuffers, and a loader, load.py. --format=onnx
writes a file for ONNX Runtime, with the config and the tokenizer of transformers. --int8 also writes a model in 8 bits.
"""

from absl import flags

from bertjax.cli.app import run_command, start_reading
from bertjax.cli.flags import define_required_flag, group_flags, refuse_arguments
from bertjax.cli.next_commands import print_next, uses_of
from bertjax.config.limits import FORMATS

_SOURCE = define_required_flag(
    "source",
    "A run's workdir, a folder of Hugging Face or sentence-transformers, hub:NAME[@REVISION], or bert_model.ckpt.",
    positional=True,
)
_OUTPUT = define_required_flag("output", "Folder to write; must be new or empty.", positional=True)
_FORMAT = define_required_flag("format", "Format to write.", choices=FORMATS)
_ARCHITECTURE = flags.DEFINE_string(
    "architecture", "", "For huggingface: the transformers class; by default the one that keeps the most weights."
)
_LICENSE = flags.DEFINE_string("license", "", "The model's license, for the model card: apache-2.0, ...")
_PART = flags.DEFINE_string(
    "part", "", "The second model of a run, such as the generator, to write instead of the first model."
)
_BASE = flags.DEFINE_string(
    "base", "", "For peft: the name of the base on the hub, if init_checkpoint is a folder: USER/NAME[@REVISION]."
)
_PUSH = flags.DEFINE_string("push", "", "Pushes the folder to USER/NAME on the Hugging Face hub as well.")
_PRIVATE = flags.DEFINE_bool("private", False, "With --push: a new repository is private.")
_INT8 = flags.DEFINE_bool(
    "int8", False, "With --format=onnx: writes model_int8.onnx as well, which has a quarter of the size."
)
group_flags("Hugging Face", _ARCHITECTURE, _LICENSE, _PART, _BASE, _PUSH, _PRIVATE)
group_flags("ONNX", _INT8)


def main(arguments: list[str]) -> None:
    """Converts the checkpoint, and prints a summary."""
    refuse_arguments(arguments, "give a source, an output and --format=")

    from bertjax import library

    start_reading(_SOURCE.value)
    summary = library.convert(
        _SOURCE.value,
        _OUTPUT.value,
        _FORMAT.value,
        architecture=_ARCHITECTURE.value,
        license=_LICENSE.value,
        part=_PART.value,
        base=_BASE.value,
        push=_PUSH.value,
        private=_PRIVATE.value,
        int8=_INT8.value,
    )
    print(summary, flush=True)
    if _FORMAT.value not in ("peft", "stablehlo", "onnx"):  # The commands do not read these formats.
        print_next(*uses_of(_OUTPUT.value))


if __name__ == "__main__":
    run_command(main)
