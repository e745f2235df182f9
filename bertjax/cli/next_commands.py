"""Proposes the commands that may come next."""

import importlib.util
import os
import shlex
import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING

from ml_collections import ConfigDict

from bertjax.common.errors import UserError

if TYPE_CHECKING:  # These modules import JAX, which `--help` does not need.
    from bertjax.inference.task import FineTuningTask
    from bertjax.interop.places import Place


def print_next(*commands: Sequence[str]) -> None:
    """Prints commands that may come next, as lines to copy into a shell. They go to stderr: stdout may be data."""
    if commands:
        print("next:", *(f"  {shlex.join(words)}" for words in commands), sep="\n", file=sys.stderr, flush=True)


def command(name: str, *arguments: str) -> list[str]:
    """Returns the words of the command `bertjax NAME`."""
    return ["bertjax", name, *arguments]


def uses_of(checkpoint: str) -> list[list[str]]:
    """Returns commands that use a checkpoint, without reading its params.

    The first command predicts or extracts. `convert` follows for a run, then `train`, which fine-tunes a pre-trained
    run, or `serve`. Returns no commands for a path without a checkpoint, such as a sweep.
    """
    from bertjax.inference.task import HasEmbeddings
    from bertjax.inference.tasks import find_task
    from bertjax.interop import pretrained
    from bertjax.interop.cross_encoder import RERANK

    try:
        place = pretrained.find(checkpoint)
        architecture, settings = _read_description(checkpoint, place)
        task = find_task(settings, architecture)
        commands = [_first_use(checkpoint, place, task, architecture, settings)]
    except UserError:  # such as a task that is not registered in this process
        return []
    if place.format == "bertjax":
        is_of_library = isinstance(task, HasEmbeddings) or settings.get("task") == RERANK
        output_format = "sentence-transformers" if is_of_library else "huggingface"
        output = f"{checkpoint.rstrip('/').replace('@', '-')}-{output_format}"
        if not os.path.exists(output):
            commands.append(command("convert", checkpoint, output, f"--format={output_format}"))
        if task is None:
            return [*commands, _fine_tuning_command(checkpoint, settings)]
    return [*commands, command("serve", checkpoint)] if importlib.util.find_spec("aiohttp") else commands


def _read_description(checkpoint: str, place: "Place") -> tuple[str, ConfigDict]:
    """Returns the transformers class and the settings of a checkpoint, from its config files."""
    from bertjax.interop import pretrained
    from bertjax.interop.places import TransformersPlace

    architecture, settings = pretrained.read_settings(checkpoint)
    if isinstance(place, TransformersPlace) and not place.embedding_folder:
        architecture = place.read_architecture()
    return architecture, settings


def _first_use(
    checkpoint: str, place: "Place", task: "FineTuningTask | None", architecture: str, settings: ConfigDict
) -> list[str]:
    """Returns `predict` with a text that fits the checkpoint, or else `extract`."""
    from bertjax.inference.task import SEPARATOR
    from bertjax.interop.cross_encoder import RERANK
    from bertjax.objectives.parsing import terms_of_run

    objectives = [term.name for term in terms_of_run(settings)]
    is_google = place.format not in ("huggingface", "peft") and not architecture and "objective" not in settings
    if task is not None:
        if settings.get("task") == RERANK or _has_one_label(place, architecture, settings):
            return command("rerank", checkpoint, "--query=a query", "a document", "another document")
        columns = len(task.text_columns(settings)) if settings.get("task") else 0
        texts = ["a text", "another text", "a third text"][: columns or task.inputs.parts.start]
        return command("predict", checkpoint, SEPARATOR.join(texts))
    if architecture.endswith(("ForMaskedLM", "ForPreTraining")) or "mlm" in objectives or is_google:
        text = next(iter(settings.get("eval", {}).get("fill_masks", ())), "the [MASK]")
        return command("predict", checkpoint, text)
    if architecture.endswith("ForCausalLM") or "lm" in objectives:
        return command("predict", checkpoint, "--generate=20", "the")
    return command("extract", checkpoint, "--pool=mean", "--output=vectors.npy", "a text")


def _has_one_label(place: "Place", architecture: str, settings: ConfigDict) -> bool:
    """Returns whether a checkpoint is a classifier of transformers with one label, which ranks documents."""
    from bertjax.interop import huggingface
    from bertjax.interop.places import RunPlace

    if isinstance(place, RunPlace):  # a converted CrossEncoder
        return "activation_fn" in settings and len(place.info.labels or ()) <= 1
    if place.format != "huggingface" or not architecture.endswith("ForSequenceClassification"):
        return False
    _, labels, problem_type = huggingface.read_head(place.folder / huggingface.CONFIG)
    return len(labels) == 1 and problem_type != huggingface.MULTI_LABEL


def _fine_tuning_command(checkpoint: str, settings: ConfigDict) -> list[str]:
    from bertjax.config.defaults import fine_tuning_config
    from bertjax.finetuning.run import WIDE
    from bertjax.inference.task import NARROW_RATE

    overrides = ["--config=classify", f"--config.init_checkpoint={checkpoint}", "--config.data.path=reviews.csv"]
    if settings.model.get("hidden_size", WIDE) < WIDE:
        overrides.append(f"--config.optimizer.learning_rate={NARROW_RATE:g}")
    longest = fine_tuning_config("classify").max_seq_length
    if (positions := settings.model.get("max_position_embeddings", longest)) < longest:
        overrides.append(f"--config.max_seq_length={positions}")
    return command("train", *overrides, f"--workdir={checkpoint}-classify")
