"""Converts a checkpoint: bertjax convert runs/mine for-transformers --format=huggingface

Source and output are the workdir of a run, a folder of Hugging Face or sentence-transformers, or Google's
bert_model.ckpt. The folder of a converted run contains a model card, README.md, with data, recipe and scores.
--push=USER/NAME also pushes the folder to the hub.

--format=stablehlo writes programs that need only jax, numpy and flatbuffers, and a loader, load.py. --format=onnx
writes a file for ONNX Runtime, with the config and the tokenizer of transformers. --int8 also writes a model in 8 bits.
"""

from absl import flags

from bertjax.cli.app import run_command
from bertjax.cli.flags import group_flags, require_flags
from bertjax.cli.next_commands import print_next, uses_of

_SOURCE = flags.DEFINE_string(
    "source",
    None,
    "A run's workdir, a folder of Hugging Face or sentence-transformers, hub:NAME[@REVISION], or bert_model.ckpt.",
)
_OUTPUT = flags.DEFINE_string("output", None, "Folder to write; must be new or empty.")
_FORMAT = flags.DEFINE_enum(
    "format",
    None,
    ["bertjax", "huggingface", "sentence-transformers", "tf1", "peft", "stablehlo", "onnx"],
    "Format to write.",
)
_ARCHITECTURE = flags.DEFINE_string(
    "architecture", "", "For huggingface: the transformers class; by default the one that keeps the most weights."
)
_LICENSE = flags.DEFINE_string("license", "", "The model's license, for the model card: apache-2.0, ...")
_PART = flags.DEFINE_string("part", "", "A model that the run has trained beside its own, to write in its place.")
_BASE = flags.DEFINE_string(
    "base", "", "For peft: the base's name on the hub, if init_checkpoint is a folder: USER/NAME[@REVISION]."
)
_PUSH = flags.DEFINE_string("push", "", "USER/NAME on the Hugging Face hub, where the folder is pushed as well.")
_PRIVATE = flags.DEFINE_bool("private", False, "With --push: only you see the model, if the repository is new.")
_INT8 = flags.DEFINE_bool("int8", False, "With --format=onnx: writes model_int8.onnx as well, a quarter of the size.")
require_flags("format", positional=["source", "output"])
group_flags("Hugging Face", _ARCHITECTURE, _LICENSE, _PART, _BASE, _PUSH, _PRIVATE)
group_flags("ONNX", _INT8)


def main(arguments: list[str]) -> None:
    """Converts the checkpoint, and prints a summary."""
    from bertjax import library
    from bertjax.common.errors import UserError

    if arguments:
        raise UserError(f"unexpected argument {arguments[0]!r}; give a source, an output and --format=")
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
