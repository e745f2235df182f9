"""Proposes the commands that may come next."""

import importlib.util
import os
import shlex
import sys
from collections.abc import Sequence

from bertjax.common.errors import UserError


def print_next(*commands: Sequence[str]) -> None:
    """Prints commands that may come next, as lines to copy into a shell. They go to stderr: stdout may be data."""
    if commands:
        print("next:", *(f"  {shlex.join(words)}" for words in commands), sep="\n", file=sys.stderr, flush=True)


def command(name: str, *arguments: str) -> list[str]:
    """Returns the words of the command `bertjax NAME`."""
    return ["bertjax", name, *arguments]


def uses_of(checkpoint: str) -> list[list[str]]:
    """Returns commands that use a checkpoint: `predict` with a text that fits, or `extract`; `convert`; and `serve`, or
    for a pre-trained run `train`, which fine-tunes it. Returns none for a path without a checkpoint, such as a search.
    """
    from bertjax.finetuning.run import NARROW_RATE, WIDE
    from bertjax.inference.task import SEPARATOR, HasEmbeddings
    from bertjax.inference.tasks import find_task
    from bertjax.interop import huggingface, pretrained
    from bertjax.objectives.parsing import terms_of_run

    try:
        place = pretrained.find(checkpoint)
        architecture, settings = pretrained.read_settings(checkpoint)
        if place.format == "huggingface" and not place.embedding_folder:
            architecture, *_ = huggingface.read_head(place.folder / huggingface.CONFIG)
        if place.format == "peft" and not place.embedding_folder:
            architecture = place.read_architecture()
        task = find_task(settings, architecture)
        objectives = [term.name for term in terms_of_run(settings)]
        is_google = place.format not in ("huggingface", "peft") and not architecture and "objective" not in settings
    except UserError:  # such as a task that is not registered here
        return []
    if task is not None:
        parts = len(task.text_columns(settings)) if settings.get("task") else 0
        texts = ["a text", "another text", "a third text"][: parts or task.inputs.parts.start]
        commands = [command("predict", checkpoint, SEPARATOR.join(texts))]
    elif architecture.endswith(("ForMaskedLM", "ForPreTraining")) or "mlm" in objectives or is_google:
        text = next(iter(settings.get("eval", {}).get("fill_masks", ())), "the [MASK]")
        commands = [command("predict", checkpoint, text)]
    elif architecture.endswith("ForCausalLM") or "lm" in objectives:
        commands = [command("predict", checkpoint, "--generate=20", "the")]
    else:
        commands = [command("extract", checkpoint, "--pool=mean", "--output=vectors.npy", "a text")]
    if place.format == "bertjax":
        has_vectors = isinstance(task, HasEmbeddings)
        form = "sentence-transformers" if has_vectors else "huggingface"
        output = f"{checkpoint.rstrip('/').replace('@', '-')}-{form}"
        if not os.path.exists(output):
            commands.append(command("convert", checkpoint, output, f"--format={form}"))
    if task is None and place.format == "bertjax":
        fine_tuning = ["--config=classify", f"--config.init_checkpoint={checkpoint}", "--config.data.path=reviews.csv"]
        if settings.model.get("hidden_size", WIDE) < WIDE:
            fine_tuning.append(f"--config.optimizer.learning_rate={NARROW_RATE:g}")
        return [*commands, command("train", *fine_tuning, f"--workdir={checkpoint}-classify")]
    return [*commands, command("serve", checkpoint)] if importlib.util.find_spec("aiohttp") else commands
